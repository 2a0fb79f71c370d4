"""Converts a model between a Hugging Face directory and an Orbax directory.

    python -m dapo_jax.convert --from=hf:DIR --to=orbax:DIR [--dtype=float32|bfloat16|float16]
    python -m dapo_jax.convert --from=run:WORKDIR [--step=N] --to=hf:DIR

and back to hf: or orbax:; a Hugging Face directory may be in a bucket (gs://), and one that is read
may be a name on the hub (hf:ORG/NAME). --family=MODULE names a model family of one's own. An Orbax
directory holds params/ (the checkpoint), model_config.json and the tokenizer's files, so that
nothing is lost on the way back. A run is a training run's --workdir. A sentencepiece model is
written as tokenizer.json, from which transformers has the same ids.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from absl import flags
from etils import epath

from dapo_jax import hub, learner
from dapo_jax.checkpoints import store
from dapo_jax.cli import command
from dapo_jax.logs.alarms import require_finite
from dapo_jax.setup import components
from dapo_jax.setup.policy import restored, run_recipe
from dapo_jax.tasks import tokenizer
from models import families, hf
from models.hf_config import CONFIG_FILE, load_config, read_config
from models.parameters import ModelConfig
from models.transformer import abstract_params

MODEL_CONFIG_FILE = "model_config.json"
PARAMS_FOLDER = "params"
PARTIAL = ".partial"  # of what is being written
# Keys of config.json that the model does not compute with, but that its users need.
KEPT_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
SOURCES, TARGETS = ("hf:DIR", "orbax:DIR", "run:DIR"), ("hf:DIR", "orbax:DIR")


def convert(
    source: str, target: str, *, dtype: str, step: int | None = None, trust_code: bool = False
) -> str:
    """Reads the model at `source`, writes it at `target` in `dtype`; returns a one-line summary.

    Both are "hf:DIR" or "orbax:DIR"; a source may be "run:WORKDIR", of which `step` (None: the
    newest) is the checkpoint. The tokenizer's files are copied along; a sentencepiece model's are
    made for transformers. trust_code: whether a module that the run names may be imported.

    Raises FileNotFoundError for a missing source, FileExistsError for a target that is not empty
    and ValueError for a source that is broken or of an unknown family.
    """
    to_kind, to_path = _place("to", target, TARGETS)
    from_kind, from_path = _place("from", source, SOURCES)
    if step is not None and from_kind != "run":
        raise ValueError(f"--step is {step}, but --from is {source!r}: only a run has steps")
    if to_path.exists() and (
        not to_path.is_dir() or {p.name for p in to_path.iterdir()} - {PARTIAL}
    ):
        raise FileExistsError(f"--to: {to_path} exists and is not an empty directory")

    tokenizer_path = from_path
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    if from_kind == "hf":
        config, kept = load_config(from_path), _kept(read_config(from_path))
        params = hf.load_params(from_path, config, dtype=dtype, shardings=host)
    elif from_kind == "orbax":
        params, config, kept = load_orbax(from_path, dtype=dtype)
    else:
        params, config, kept, tokenizer_path = load_run(
            from_path, step, dtype=dtype, trust_code=trust_code
        )
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # host arrays may be large
        require_finite(params, f"--from={source} in {dtype}", sizes=config)

    names = [name for name in tokenizer.FILES if (tokenizer_path / name).exists()]
    names = [name for name in names if name != CONFIG_FILE]
    with _complete(to_path) as folder:
        if to_kind == "hf" and names == ["tokenizer.model"]:
            names = tokenizer.save_for_transformers(tokenizer_path / names[0], folder)
        else:
            for name in names:
                (tokenizer_path / name).copy(folder / name)
        if to_kind == "hf":
            hf.save_hf(params, config, folder, dtype=dtype, extra_config=kept)
        else:
            save_orbax(params, config, folder, kept=kept)
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


def save_orbax(params, config: ModelConfig, path, *, kept: Mapping[str, Any]):
    """Writes params/ and model_config.json; `kept` holds further keys of config.json."""
    path = epath.Path(path)
    store.save_params(path / PARAMS_FOLDER, params)
    content = {
        "model_type": config.model_type,
        "model": dataclasses.asdict(config),
        "hf": dict(kept),
    }
    (path / MODEL_CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_orbax(path, *, dtype: str) -> tuple[dict[str, Any], ModelConfig, dict[str, Any]]:
    """(params as host arrays, config, kept keys of config.json) of what `save_orbax` wrote.

    Raises FileNotFoundError where model_config.json or params/ is absent, and ValueError for a
    config file that cannot be read and for arrays that do not fit it.
    """
    path = epath.Path(path)
    file, folder = path / MODEL_CONFIG_FILE, path / PARAMS_FOLDER
    for part in (file, folder):
        if not part.exists():
            raise FileNotFoundError(f"{part} is missing: {path} is no converted Orbax directory")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        model_type = content.get("model_type", "qwen2")
        kept, model_types = content["hf"], families.known()
        if model_type not in model_types:
            raise ValueError(f"model_type {model_type!r} is unknown; --family names its module")
        config = model_types[model_type].config.of(content["model"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} cannot be read as a model config: {error!r}") from error
    _, abstract = abstract_params(config)

    def check(stored):
        try:
            hf.check_params(stored, config)
        except ValueError as error:
            raise ValueError(f"{folder} against {file}: {error}") from error

    params = store.restore_params(folder, abstract, dtype=dtype, check=check)
    return params, config, kept


def load_run(workdir: epath.Path, step: int | None, *, dtype: str, trust_code: bool = False):
    """(params, model config, kept keys of config.json, tokenizer directory) of a run.

    Raises FileNotFoundError for a directory without a run, or without that checkpoint, and
    ValueError as `run_recipe` and `restored` do.
    """
    recipe = run_recipe(workdir, trust_code=trust_code)
    hub.fetch(hub.paths(recipe, "data.", "eval."), workdir)
    programs = components.programs(recipe, vocab_size=0)
    _, params, start_weights = restored(programs, workdir, step)
    model_path = hub.local(recipe.model.path)
    kept = _kept(read_config(model_path)) if model_path else {}
    tokenizer_path = epath.Path(hub.local(recipe.tokenizer.path) or model_path)
    if programs.learning.lora:
        params = learner.policy_weights(params, start_weights, programs.learning)
    return learner.cast(params, dtype), programs.sizes, kept, tokenizer_path


def _kept(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: raw[key] for key in KEPT_KEYS if raw.get(key) is not None}


def _place(flag: str, value: str, forms) -> tuple[str, epath.Path]:
    kind, colon, path = value.partition(":")
    if kind not in [form.partition(":")[0] for form in forms] or not colon or not path:
        raise ValueError(f"--{flag} is {value!r}, but must be {' or '.join(forms)}")
    if (flag, kind) == ("from", "hf"):
        path = value if path.startswith("//") else path
        hub.fetch({"--from": path})
    return kind, epath.Path(hub.local(path))


def main(_):
    names = ("from", "to", "dtype", "step", "family", "trust_code")
    given = {name: flags.FLAGS[name].value for name in names}
    families.load(given["family"])
    how = {name: given[name] for name in ("dtype", "step", "trust_code")}
    print(convert(given["from"], given["to"], **how))


if __name__ == "__main__":
    flags.DEFINE_string("from", None, "What to read: hf:, orbax: or run:DIR.", required=True)
    flags.DEFINE_string("to", None, "What to write: hf:DIR or orbax:DIR.", required=True)
    flags.DEFINE_enum("dtype", "float32", hf.DTYPES, "The written arrays' type.")
    flags.DEFINE_integer("step", None, "Of a run: finished steps of the checkpoint.")
    flags.DEFINE_string("family", "qwen2", "The model's family, as config.model.family has it.")
    command.define_trust_code()
    command.run(main)
