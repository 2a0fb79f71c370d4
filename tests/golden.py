"""Readers of the reference's vectors in ../shared/golden, and of transformers' in golden_data."""

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file


def below(file: pathlib.Path, start: str) -> dict[str, np.ndarray]:
    """The arrays of an npz file below `start`, named without it."""
    with np.load(file) as arrays:
        return {k.removeprefix(start): arrays[k] for k in arrays if k.startswith(start)}


def cases(shared: pathlib.Path, start: str) -> list[tuple[str, dict[str, np.ndarray]]]:
    """Every case of policy_loss.npz whose name begins so: its name and its arrays."""
    folder = shared / "golden"
    index = json.loads((folder / "policy_loss_index.json").read_text(encoding="utf-8"))
    names = sorted(name for name in index if name.startswith(start))
    assert names, f"policy_loss_index.json names no case that starts with {start!r}"
    return [(name, below(folder / "policy_loss.npz", f"{name}/")) for name in names]


def dynamic_sampling(shared: pathlib.Path) -> list[dict]:
    """Every row of dynamic_sampling.jsonl: generation batches, and what the reference keeps.

    num_gen_batches is None where it gives up at max_num_gen_batches; then error names an exception.
    """
    lines = (shared / "golden" / "dynamic_sampling.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


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
    return below(FOLDER / f"{file}_transformers.npz", f"{name}/")


def directory(model: str, folder: pathlib.Path) -> pathlib.Path:
    """The model's directory, in transformers' own names and config."""
    arrays, start = arrays_of(model), "weights/"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(str(arrays["config"]))
    weights = {k.removeprefix(start): a for k, a in arrays.items() if k.startswith(start)}
    save_file(weights, folder / "model.safetensors")
    return folder
