"""Readers of the reference vectors in ../shared/golden, and of transformers' logits in golden_data.

Those of the first take the `shared` folder (the fixture of that name) and return cases under the
project's names for things; `arrays` gives any part of policy_loss.npz as it is stored.
"""

import functools
import json
import pathlib
import types

import numpy as np
from safetensors.numpy import save_file

Case = types.SimpleNamespace  # `name` is the reference's
REFERENCE_MODES = {"token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean"}
CLIP = ("eps_low", "eps_high", "dual_clip")
LIMITS = ("max_tokens", "cache_tokens", "factor")


def arrays(shared: pathlib.Path, prefix: str) -> dict[str, np.ndarray]:
    """The arrays of policy_loss.npz below `prefix`, named without it."""
    start = f"{prefix}/"
    return {
        name.removeprefix(start): array
        for name, array in _policy_loss(shared).items()
        if name.startswith(start)
    }


def policy_loss_cases(shared: pathlib.Path) -> list[Case]:
    """Every `pl*` case: one update's policy loss, with the reference's float64 results.

    logp_RT, behavior_logp_RT, advantage_RT, mask_RT: float32. clip: eps_low, eps_high, dual_clip.
    loss_RT, and the means clip_fraction, dual_clip_fraction and mean_log_ratio. aggregated: name of
    the mean -> (loss, its gradient by logp_RT).
    """
    return [
        Case(
            name=name,
            **_loss_inputs(stored),
            clip=dict(zip(CLIP, stored["in/clip"].tolist(), strict=True)),
            loss_RT=stored["mat64"],
            aggregated={
                mode: (float(stored[f"{theirs}/loss64"]), stored[f"{theirs}/grad64"])
                for mode, theirs in REFERENCE_MODES.items()
            },
            clip_fraction=float(stored["pg_clipfrac64"]),
            dual_clip_fraction=float(stored["pg_clipfrac_lower64"]),
            mean_log_ratio=-float(stored["ppo_kl64"]),
        )
        for name, stored in _cases(shared, "pl")
    ]


def advantage_cases(shared: pathlib.Path) -> list[Case]:
    """Every `grpo/*` case: reward_PG and advantage_PG of whole groups, both float32."""

    def case(name, stored):
        # The stored rows of one group follow each other.
        groups = (len(np.unique(stored["in/group"])), -1)
        first_token_R1 = stored["in/mask"].argmax(axis=1, keepdims=True)
        advantage_R1 = np.take_along_axis(stored["adv"], first_token_R1, axis=1)
        reward_PG = stored["in/token_level_rewards"].sum(axis=1).reshape(groups)
        return Case(name=name, reward_PG=reward_PG, advantage_PG=advantage_R1.reshape(groups))

    return [case(*it) for it in _cases(shared, "grpo/")]


def overlong_cases(shared: pathlib.Path) -> list[Case]:
    """Every `overlong/*` case: length_R, correct_R, and the reference's penalty_R and reward_R.

    limits: max_tokens, cache_tokens and factor.
    """
    return [
        Case(
            name=name,
            limits=dict(zip(LIMITS, stored["in/cfg"].tolist(), strict=True)),
            length_R=stored["in/length"],
            correct_R=stored["in/score"] > 0,
            penalty_R=stored["penalty"],
            reward_R=stored["reward"],
        )
        for name, stored in _cases(shared, "overlong/")
    ]


def dynamic_sampling_cases(shared: pathlib.Path) -> list[Case]:
    """Every row of dynamic_sampling.jsonl: generation batches, and what the reference keeps.

    correct_NPG, reward_NPG: batch, prompt, response. filtered_by: the quantity whose variance the
    reference filters on. kept_responses, generation_batches: None where it gives up at the cap,
    max_generation_batches; then error names the exception.
    """
    lines = (shared / "golden" / "dynamic_sampling.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        Case(
            name=row["id"],
            num_prompts=row["train_batch_size"],
            max_generation_batches=row["max_num_gen_batches"],
            filtered_by=row["metric"],
            correct_NPG=np.array([batch["acc"] for batch in row["gen_batches"]]),
            reward_NPG=np.array([batch["reward"] for batch in row["gen_batches"]]),
            kept_responses=row["kept_trajectories"],
            generation_batches=row["num_gen_batches"],
            error=row["error"],
        )
        for row in map(json.loads, lines)
    ]


@functools.cache
def _policy_loss(shared: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(shared / "golden" / "policy_loss.npz") as stored:
        return dict(stored)


def _cases(shared: pathlib.Path, start: str) -> list[tuple[str, dict[str, np.ndarray]]]:
    index = json.loads((shared / "golden" / "policy_loss_index.json").read_text(encoding="utf-8"))
    names = [name for name in index if name.startswith(start)]
    assert names, f"policy_loss_index.json names no case that starts with {start!r}"
    return [(name, arrays(shared, name)) for name in sorted(names)]


def _loss_inputs(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = {"new": "logp_RT", "old": "behavior_logp_RT", "adv": "advantage_RT", "mask": "mask_RT"}
    return {ours: stored[f"in/{theirs}"] for theirs, ours in names.items()}


# Models of transformers.

FOLDER = pathlib.Path(__file__).parent / "golden_data"
# The files of make_transformers_golden.py, and the models in each.
GOLDEN = {
    "qwen2": ("tied", "untied"),
    "qwen2_yarn": ("tied",),
    "qwen3": ("tied", "untied", "yarn"),
    "qwen3_moe": ("normed", "plain"),
    "llama": ("untied", "llama3"),
    "gemma3": ("1b", "27b"),
}
MODELS = [f"{file}/{name}" for file, names in GOLDEN.items() for name in names]
CASES = ("right_padded", "left_padded", "packed")


def arrays_of(model: str) -> dict[str, np.ndarray]:
    """The arrays of "file/model"."""
    file, _, name = model.partition("/")
    with np.load(FOLDER / f"{file}_transformers.npz") as arrays:
        start = f"{name}/"
        return {k.removeprefix(start): a for k, a in arrays.items() if k.startswith(start)}


def directory(model: str, folder: pathlib.Path) -> pathlib.Path:
    """The model's directory, in transformers' own names and config."""
    arrays, start = arrays_of(model), "weights/"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(str(arrays["config"]))
    weights = {k.removeprefix(start): a for k, a in arrays.items() if k.startswith(start)}
    save_file(weights, folder / "model.safetensors")
    return folder
