"""Exports a run's policy as a Hugging Face directory, or casts such a directory.

    python -m dapo_jax.convert --from=run:WORKDIR [--step=N] --to=hf:DIR
    python -m dapo_jax.convert --from=run:WORKDIR --to=peft:DIR            # LoRA's factors alone
    python -m dapo_jax.convert --from=hf:ORG/NAME --to=hf:DIR [--dtype=float32|bfloat16|float16]

A policy without LoRA is a run's weights in model.compute_dtype, which --dtype is by default; what
float32 has beside may be random (learner.spread_start). Elsewhere it is float32. A run is a
training run's --workdir. A directory may be in a bucket (gs://). The tokenizer's files are copied
along; a sentencepiece model is written as tokenizer.json, from which transformers has the same ids.
--family=MODULE names a model family of one's own.
"""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import optax
from absl import flags
from etils import epath

from dapo_jax import hub, learner
from dapo_jax.cli import command
from dapo_jax.logs.alarms import require_finite
from dapo_jax.setup import policy
from dapo_jax.tasks import tokenizer
from models import families, hf, peft
from models.hf_config import CONFIG_FILE, load_config, read_config, sees_images

PARTIAL = ".partial"  # of what is being written
# Keys of config.json that the model does not compute with, but that its users need.
KEPT_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")


def convert(
    source: str, target: str, *, dtype: str = "", step: str | None = None, trust_code: bool = False
) -> str:
    """Reads the model at `source`, writes it at `target` in `dtype`; returns a one-line summary.

    source: "hf:DIR", or "run:WORKDIR", of which `step` (None: the newest, or "best") is the
    checkpoint. target: "hf:DIR", or "peft:DIR" for a run's LoRA factors alone. dtype: "": as
    without --dtype. trust_code: whether a module that the run names may be imported.
    """
    exports = ("hf", "peft") if source.startswith("run:") else ("hf",)
    to_kind, to_path = _place("to", target, exports)
    from_kind, from_path = _place("from", source, ("hf", "run"))
    if step is not None and from_kind != "run":
        raise ValueError(f"--step is {step}, but --from is {source!r}: only a run has steps")
    if to_path.exists() and (
        not to_path.is_dir() or {p.name for p in to_path.iterdir()} - {PARTIAL}
    ):
        raise FileExistsError(f"--to: {to_path} exists and is not an empty directory")

    host = jax.local_devices(backend="cpu")[0]
    if from_kind == "hf":
        dtype = dtype or "float32"
        tokenizer_path, config = from_path, load_config(from_path)
        shardings = jax.sharding.SingleDeviceSharding(host)
        params = hf.load_params(from_path, config, dtype=dtype, shardings=shardings)
        kept, ends = _kept(read_config(from_path)), []
    else:
        workdir = pathlib.Path(from_path)
        run_config = policy.run_config(workdir, trust_code=trust_code)
        run, _, params, start = policy.load_policy(run_config, workdir, lambda *_: None, step=step)
        config, settings = run.programs.sizes, run.programs.settings
        model_path = hub.local(run_config.model.path)
        dtype = dtype or ("float32" if settings.lora else run_config.model.compute_dtype)
        if to_kind == "peft":
            if not settings.lora:
                raise ValueError(f"--to is {target!r}, but {source} has learner.lora_rank = 0")
            if model_path and sees_images(model_path):  # PEFT would find none of our names in it
                raise ValueError(
                    f"--to is {target!r}, but {model_path} sees images, too, and its text part has "
                    "other names there; use --to=hf:DIR"
                )
            require_finite(params, f"--from={source}")
            with _complete(to_path) as folder:
                base = hub.named(run_config.model.path)
                peft.save_peft(params, config, settings.lora, folder, base=base, dtype=dtype)
            return f"{source} -> {target}: LoRA of rank {settings.lora.rank} in {dtype}"
        if settings.lora:
            params = learner.policy_weights(params, start, settings)
        params, start = optax.tree.cast(params, dtype), None  # lets go of them
        tokenizer_path = epath.Path(hub.local(run_config.tokenizer.path) or model_path)
        kept = _kept(read_config(model_path)) if model_path else {}
        ends = list(run.tokenizer.stop_ids)
    with jax.default_device(host):  # host arrays may be large
        require_finite(params, f"--from={source} in {dtype}")

    names = [it for it in tokenizer.FILES if it != CONFIG_FILE and (tokenizer_path / it).exists()]
    with _complete(to_path) as folder:
        if names == ["tokenizer.model"]:
            names = tokenizer.save_for_transformers(tokenizer_path / names[0], folder)
        else:
            more = sorted((tokenizer_path / tokenizer.MORE_TEMPLATES).glob("*"))
            names += [f"{tokenizer.MORE_TEMPLATES}/{file.name}" for file in more]
            for name in names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (tokenizer_path / name).copy(folder / name)
        if ends and names:  # readers of the export stop where the run did
            end = {"eos_token_id": ends if len(ends) > 1 else ends[0]}
            file = folder / "generation_config.json"
            raw = json.loads(file.read_text()) if file.exists() else {}
            file.write_text(json.dumps(raw | end, indent=2))
            kept |= end
        hf.save_hf(params, config, folder, dtype=dtype, extra_config=kept)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return f"{source} -> {target}: {count:,} parameters in {dtype}; also {', '.join(names) or '-'}"


@contextlib.contextmanager
def _complete(target: epath.Path) -> Iterator[epath.Path]:
    """Yields the directory to write: one inside `target`, whose files move up at the end.

    An error, a signal or a kill before leaves at most that one, and the next command removes it. In
    a bucket it is `target` itself. Errors of the system without a path get the target's.
    """
    is_local = "://" not in str(target)
    folder = target / PARTIAL if is_local else target
    try:
        if is_local and folder.exists():
            folder.rmtree()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        if is_local:
            for file in sorted(folder.iterdir(), key=lambda file: file.name == CONFIG_FILE):
                file.rename(target / file.name)
            folder.rmdir()
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(target)
        raise


def _kept(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: raw[key] for key in KEPT_KEYS if raw.get(key) is not None}


def _place(flag: str, value: str, kinds) -> tuple[str, epath.Path]:
    kind, _, path = value.partition(":")
    if kind not in kinds or not path:
        forms = " or ".join(f"{kind}:DIR" for kind in kinds)
        raise ValueError(f"--{flag} is {value!r}, but must be {forms}")
    if (flag, kind) == ("from", "hf"):
        path = value if path.startswith("//") else path
        hub.fetch({"--from": path})
    return kind, epath.Path(hub.local(path))


def main(_):
    given = flags.FLAGS
    families.load(given.family)
    source, trusts = given["from"].value, given.trust_code
    print(convert(source, given.to, dtype=given.dtype, step=given.step, trust_code=trusts))


if __name__ == "__main__":
    flags.DEFINE_string("from", None, "What to read: hf:DIR or run:DIR.", required=True)
    flags.DEFINE_string("to", None, "What to write: hf:DIR or peft:DIR.", required=True)
    flags.DEFINE_enum("dtype", None, hf.DTYPES, "The written arrays' type.")
    flags.DEFINE_string("step", None, "Of a run: finished steps of the checkpoint, or best.")
    flags.DEFINE_string("family", "qwen2", "The model's family, as config.model.family has it.")
    command.define_trust_code()
    command.run(main)
