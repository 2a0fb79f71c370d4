"""Converts a model between a Hugging Face directory and an Orbax directory.

    python -m dapo_jax.convert --from=hf:DIR --to=orbax:DIR [--dtype=float32|bfloat16|float16]

and back. An Orbax directory holds params/ (the checkpoint), model_config.json and the tokenizer's
files, so that nothing is lost on the way back.
"""

import dataclasses
import json
import pathlib
import shutil
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import app, flags, logging

from models import hf
from models.qwen2 import Qwen2Config, abstract_params

MODEL_CONFIG_FILE = "model_config.json"
PARAMS_FOLDER = "params"
# Keys of config.json that the model does not compute with, but that its users need.
KEPT_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
KINDS = ("hf", "orbax")


def convert(source: str, target: str, *, dtype: str) -> str:
    """Reads the model at `source`, writes it at `target` in `dtype`; returns a one-line summary.

    Both are "hf:DIR" or "orbax:DIR". The tokenizer's files are copied along.

    Raises FileNotFoundError for a missing source, FileExistsError for a target that is not empty
    and ValueError for a source that is broken or is no Qwen2 model.
    """
    (from_kind, from_path), (to_kind, to_path) = _place("from", source), _place("to", target)
    if to_path.exists() and (not to_path.is_dir() or any(to_path.iterdir())):
        raise FileExistsError(f"--to: {to_path} exists and is not an empty directory")

    if from_kind == "hf":
        config = hf.load_config(from_path)
        raw = hf.read_config(from_path)
        kept = {key: raw[key] for key in KEPT_KEYS if raw.get(key) is not None}
        params = hf.load_params(from_path, config, dtype=dtype)
    else:
        params, config, kept = load_orbax(from_path, dtype=dtype)

    to_path.mkdir(parents=True, exist_ok=True)
    files = [name for name in TOKENIZER_FILES if (from_path / name).is_file()]
    for name in files:
        shutil.copyfile(from_path / name, to_path / name)
    if to_kind == "hf":
        hf.save_hf(params, config, to_path, dtype=dtype, extra_config=kept)
    else:
        save_orbax(params, config, to_path, kept=kept)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return f"{source} -> {target}: {count:,} parameters in {dtype}; also {', '.join(files) or '-'}"


def save_orbax(params, config: Qwen2Config, path, *, kept: Mapping[str, Any]):
    """Writes params/ and model_config.json; `kept` holds further keys of config.json."""
    path = pathlib.Path(path).absolute()
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path / PARAMS_FOLDER, params)
    content = {"model": dataclasses.asdict(config), "hf": dict(kept)}
    (path / MODEL_CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_orbax(path, *, dtype: str) -> tuple[dict[str, Any], Qwen2Config, dict[str, Any]]:
    """(params as host arrays, config, kept keys of config.json) of what `save_orbax` wrote.

    Raises FileNotFoundError where model_config.json or params/ is absent, and ValueError for a
    config file that cannot be read and for arrays that do not fit it.
    """
    path = pathlib.Path(path).absolute()
    file, folder = path / MODEL_CONFIG_FILE, path / PARAMS_FOLDER
    for part in (file, folder):
        if not part.exists():
            raise FileNotFoundError(f"{part} is missing: {path} is no converted Orbax directory")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        config, kept = Qwen2Config(**content["model"]), content["hf"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} cannot be read as a model config: {error!r}") from error
    _, abstract = abstract_params(config)
    with ocp.PyTreeCheckpointer() as checkpointer:
        stored = checkpointer.metadata(folder).item_metadata.tree
        try:
            hf.check_params(stored, config)
        except ValueError as error:
            raise ValueError(f"{folder} against {file}: {error}") from error
        as_host = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.dtype(dtype)), abstract
        )
        restore = ocp.args.PyTreeRestore(item=abstract, restore_args=as_host)
        return checkpointer.restore(folder, args=restore), config, kept


def _place(flag: str, value: str) -> tuple[str, pathlib.Path]:
    kind, colon, path = value.partition(":")
    if kind not in KINDS or not colon or not path:
        raise ValueError(f"--{flag} is {value!r}, but must be hf:DIR or orbax:DIR")
    return kind, pathlib.Path(path)


def main(_):
    values = {name: flags.FLAGS[name].value for name in ("from", "to", "dtype")}
    try:
        print(convert(values["from"], values["to"], dtype=values["dtype"]))
    except (FileNotFoundError, FileExistsError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    flags.DEFINE_string("from", None, "What to read: hf:DIR or orbax:DIR.", required=True)
    flags.DEFINE_string("to", None, "What to write: hf:DIR or orbax:DIR.", required=True)
    flags.DEFINE_enum("dtype", "float32", hf.DTYPES, "The written arrays' type.")
    flags.FLAGS.set_default("verbosity", logging.WARNING)
    app.run(main)
