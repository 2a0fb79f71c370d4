"""A model's sizes from and to Hugging Face's config.json.

Its model_type picks the family; whatever the family does not compute is refused.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from models import families
from models.parameters import ModelConfig

CONFIG_FILE = "config.json"

# Field of ModelConfig -> key of config.json.
SIZE_KEYS = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
NO_SCALING = (None, "default")


def load_config(path) -> ModelConfig:
    """Reads the model's sizes from the config.json of a Hugging Face directory.

    Raises FileNotFoundError where there is none, and ValueError, with file, key and value, for
    anything that the family does not compute: another architecture or activation, scaled rotary
    embeddings, sliding windows, quantised weights, sizes that do not fit together.
    """
    file, raw = epath.Path(path) / CONFIG_FILE, read_config(path)
    # transformers 5 keeps rope_theta in rope_parameters, older versions at top level.
    rope_key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(rope_key) or {}

    def refuse(key, value, rule):
        raise ValueError(f"{file}: {key} is {value!r}, but {rule}")

    def require(key, value, is_right, rule):
        if value is None:
            raise ValueError(f"{file}: {key} is missing; it {rule}")
        if not is_right(value):
            refuse(key, value, rule)
        return value

    model_types = families.known()
    if raw.get("model_type") not in tuple(model_types):
        rule = f"must be {' or '.join(map(repr, model_types))}; model.family names others"
        refuse("model_type", raw.get("model_type"), rule)
    family = model_types[raw["model_type"]].config
    for key, value in family.computes.items():
        given = raw.get(key, value)
        if given != value and (given or value):  # null is false
            refuse(key, given, f"only {value!r} is supported")
    if set(raw.get("layer_types") or ()) - {"full_attention"}:
        refuse("layer_types", raw["layer_types"], "only 'full_attention' is supported")
    if raw.get("quantization_config") is not None:
        refuse("quantization_config", raw["quantization_config"], "weights must be unquantised")
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) not in NO_SCALING:
        refuse(rope_key, rope, "only rope_type 'default' (no scaling) is supported")

    def size(key, value):
        return require(key, value, _is_size, "must be a positive integer")

    def number(key, value):
        return float(require(key, value, _is_positive, "must be a positive number"))

    sizes = {field: size(key, raw.get(key)) for field, key in SIZE_KEYS.items()}
    width, heads, kv_heads = sizes["width"], sizes["num_heads"], sizes["num_kv_heads"]
    if heads % kv_heads:
        refuse(
            "num_attention_heads", heads, f"must be a multiple of num_key_value_heads = {kv_heads}"
        )
    if raw.get("head_dim") is not None:
        head_dim = size("head_dim", raw["head_dim"])
    elif width % heads == 0:
        head_dim = width // heads
    else:
        refuse("hidden_size", width, f"must be a multiple of num_attention_heads = {heads}")
    if head_dim % 2:
        refuse("head_dim", head_dim, "must be even for rotary embeddings")
    tie = raw.get("tie_word_embeddings")
    return family(
        **sizes,
        head_dim=head_dim,
        tie_embeddings=require(
            "tie_word_embeddings", tie, lambda v: isinstance(v, bool), "must be true or false"
        ),
        rope_theta=number("rope_theta", raw.get("rope_theta", rope.get("rope_theta"))),
        rms_norm_eps=number("rms_norm_eps", raw.get("rms_norm_eps")),
    )


def read_config(path) -> dict[str, Any]:
    """Reads the raw config.json of a Hugging Face directory, as a dictionary."""
    path = epath.Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory; give a Hugging Face model directory")
    file = path / CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{path} has no {CONFIG_FILE}; it holds {listing(path)}")
    return read_json(file)


def config_json(
    config: ModelConfig, dtype: np.dtype, extra: Mapping[str, Any], path
) -> dict[str, Any]:
    """Makes the content of config.json for weights of `dtype`.

    extra: more keys. Raises ValueError for one that the model decides; path: for that message.
    """
    fixed = {
        "architectures": [config.architecture],
        "model_type": config.model_type,
        **{key: getattr(config, field) for field, key in SIZE_KEYS.items()},
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        **config.computes,
        "torch_dtype": dtype.name,
    }
    clash = sorted(set(fixed) & set(extra))
    if clash:
        raise ValueError(f"{path}: extra_config gives {', '.join(clash)}, which the model decides")
    free = {
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.02,
        "max_position_embeddings": 32768,
        "use_cache": True,
    }
    return fixed | free | dict(extra)


def read_json(file) -> dict[str, Any]:
    """Reads a JSON object; raises ValueError, with the file, for anything else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a JSON {type(value).__name__}, but must hold an object")
    return value


def write_json(file, value):
    """Writes a JSON file, indented, with a newline at its end."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def listing(path) -> str:
    """Names a directory's files, for messages."""
    return ", ".join(sorted(p.name for p in path.iterdir())) or "nothing"


def _is_size(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_positive(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
