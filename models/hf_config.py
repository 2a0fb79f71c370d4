"""A model's sizes from and to Hugging Face's config.json.

Its model_type picks the family; whatever the family does not compute is refused.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from models import families
from models.parameters import FULL, SLIDING, ModelConfig
from models.rope import SCALINGS, RopeScaling, scaling_of

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
# Values with which a key of scaled rotary embeddings has no effect.
NEUTRAL_ROPE = {"truncate": True, "partial_rotary_factor": 1}
# Keys that change what transformers computes, and the values with which they do not; null never
# does. What a family computes beside that is in its `computes`.
NEUTRAL = {
    "partial_rotary_factor": (1,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "mlp_bias": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "pruned_heads": ({},),
    "quantization_config": (),
    "compression_config": (),
}


def load_config(path) -> ModelConfig:
    """Reads the model's sizes from the config.json of a Hugging Face directory.

    Raises FileNotFoundError where there is none, and ValueError, with file, key and value, for
    anything that the family does not compute: another architecture or activation, rotary
    embeddings scaled in another way than those of models.rope, sliding windows that the family does
    not have, quantised weights, sizes that do not fit together.
    """
    raw = read_config(path)
    try:
        return config_of(raw)
    except ValueError as error:
        raise ValueError(f"{epath.Path(path) / CONFIG_FILE}: {error}") from error


def read_config(path) -> dict[str, Any]:
    """Reads the raw config.json of a Hugging Face directory, as a dictionary.

    Of a model that sees images, too, its text part.
    """
    raw = _read(path)
    if not _sees_images(raw):
        return raw
    outer = {k: v for k, v in raw.items() if k not in ("architectures", "text_config")}
    return outer | raw["text_config"]


def sees_images(path) -> bool:
    """Tells whether a directory's model sees images, too: its text part has other names there."""
    return _sees_images(_read(path))


def _sees_images(raw: Mapping[str, Any]) -> bool:
    text = raw.get("text_config")
    return isinstance(text, dict) and text.get("model_type") == f"{raw.get('model_type')}_text"


def _read(path) -> dict[str, Any]:
    path = epath.Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory: model.path, or --from, has to be one")
    file = path / CONFIG_FILE
    if not file.exists():
        raise FileNotFoundError(f"{path} has no {CONFIG_FILE}; it holds {listing(path)}")
    return read_json(file)


def read_json(file: epath.Path) -> dict[str, Any]:
    """Reads a JSON object; raises ValueError, with the file, for anything else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a JSON {type(value).__name__}, but must hold an object")
    return value


def listing(folder: epath.Path) -> str:
    """Names a directory's files, for messages."""
    return ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"


def config_of(raw: Mapping[str, Any]) -> ModelConfig:
    """Makes the config of config.json's content; raises ValueError as `load_config` does."""
    known, name = families.known(), raw.get("model_type")
    if name not in tuple(known):
        rule = f"must be {' or '.join(map(repr, known))}; model.family names others"
        _refuse("model_type", name, rule)
    family = known[name].config
    raw = family.plain(raw)
    _check_computed(raw, family)
    rope_theta, rope_scaling = _rope(raw, default_theta=family.defaults["rope_theta"])
    # Null stands for as many as there are heads; without the key a family may have a number.
    heads = {"num_key_value_heads": raw.get("num_attention_heads")}
    defaults = heads | family.defaults | {key: heads[key] for key in heads.keys() & raw.keys()}
    given = {key: value for key, value in raw.items() if value is not None}
    raw = {"tie_word_embeddings": False} | defaults | given
    sizes = {field: _number(raw, key, whole=True) for field, key in SIZE_KEYS.items()}
    width, heads, kv_heads = sizes["width"], sizes["num_heads"], sizes["num_kv_heads"]
    if heads % kv_heads:
        _refuse(
            "num_attention_heads", heads, f"must be a multiple of num_key_value_heads = {kv_heads}"
        )
    if "head_dim" not in raw and width % heads:
        _refuse("hidden_size", width, f"must be a multiple of num_attention_heads = {heads}")
    head_dim = _number({"head_dim": width // heads} | raw, "head_dim", whole=True)
    if head_dim % 2:
        _refuse("head_dim", head_dim, "must be even for rotary embeddings")
    sizes |= {field: _own(raw, key, family.defaults[key]) for field, key in family.keys.items()}
    return family(
        **sizes,
        head_dim=head_dim,
        tie_embeddings=_own(raw, "tie_word_embeddings", False),
        rope_theta=rope_theta,
        rms_norm_eps=_number(raw, "rms_norm_eps"),
        rope_scaling=rope_scaling,
        windows=_windows(raw, family),
    )


def _windows(raw: Mapping[str, Any], family: type[ModelConfig]) -> tuple[int | None, ...]:
    types, computed = raw.get("layer_types"), family.layer_types(raw)
    if computed != (types or computed):
        _refuse("layer_types", types, f"only {computed!r:.200} is supported")
    layers, kinds = raw["num_hidden_layers"], (FULL, SLIDING)
    if not (isinstance(computed, list) and len(computed) == layers):
        _refuse("layer_types", types, f"must be a list of num_hidden_layers = {layers}")
    if any(kind not in kinds for kind in computed):
        _refuse("layer_types", types, f"only {FULL!r} and {SLIDING!r} are supported")
    if SLIDING not in computed:
        return ()
    window = _number(raw, "sliding_window", whole=True)
    return tuple(window if kind == SLIDING else None for kind in computed)


def _check_computed(raw: Mapping[str, Any], family: type[ModelConfig]) -> None:
    """Refuses the keys with which transformers computes something else than the family."""
    for key, value in family.computes.items():
        given = raw.get(key, value)
        if given != value and (given or value):  # null is false
            _refuse(key, given, f"only {value!r} is supported")
    for key, values in NEUTRAL.items():
        if key not in family.keys.values() and raw.get(key) not in (None, *values):
            _refuse(key, raw[key], f"only {' or '.join(map(repr, values)) or 'null'} is supported")
    architectures = raw.get("architectures") or [family.architecture]
    if not isinstance(architectures, list) or family.architecture not in architectures:
        _refuse("architectures", architectures, f"only {family.architecture!r} is supported")
    code = raw.get("auto_map") or {}
    if not isinstance(code, dict) or not {"AutoModel", "AutoModelForCausalLM"}.isdisjoint(code):
        _refuse("auto_map", code, "a model of the directory's own code is not supported")


def _rope(raw: Mapping[str, Any], *, default_theta: float) -> tuple[float, RopeScaling | None]:
    """Reads the base of the rotary angles and their scaling; refuses places that disagree.

    Older versions of transformers have rope_theta at top level beside rope_scaling, transformers 5
    has it in rope_parameters, and files that both have touched have all three.
    """
    places, scalings = [raw], []
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key) or {}
        if not isinstance(rope, dict):
            _refuse(key, rope, "must be null or an object")
        if rope:
            places.append(rope)
            scalings.append(_scaling(key, rope))
    given = [place for place in places if place.get("rope_theta") is not None]
    thetas = [_number(place, "rope_theta") for place in given] or [default_theta]
    if any(theta != thetas[0] for theta in thetas):
        _refuse("rope_theta", thetas, "must be the same in all places")
    scaling = scalings[0] if scalings else None
    if any(other != scaling for other in scalings):
        _refuse("rope_scaling", raw["rope_scaling"], "must say the same as rope_parameters")
    # At top level transformers takes it, too.
    key = "original_max_position_embeddings"
    if scaling is not None and raw.get(key) not in (None, getattr(scaling, key, raw.get(key))):
        _refuse(key, raw[key], f"{getattr(scaling, key)} beside the rope_type")
    return thetas[0], scaling


def _scaling(key: str, given: Mapping[str, Any]) -> RopeScaling | None:
    rope = {name: v for name, v in given.items() if v is not None and name != "rope_theta"}
    kinds = [rope.pop(name) for name in ("rope_type", "type") if name in rope] or ["default"]
    kind = kinds[0]
    if kind != kinds[-1] or kind not in ("default", *SCALINGS):
        supported = ", ".join(map(repr, SCALINGS))
        _refuse(key, given, f"only rope_type 'default' (no scaling), {supported} are supported")
    rope = {name: v for name, v in rope.items() if v != NEUTRAL_ROPE.get(name)}
    if kind == "default":
        if rope and rope != {"factor": 1}:
            others = ", ".join(rope)
            _refuse(key, given, f"rope_type 'default' (no scaling) has no {others}")
        return None
    try:
        return scaling_of({"rope_type": kind, **rope})
    except ValueError as error:
        _refuse(key, given, str(error))


def config_json(config: ModelConfig, dtype: np.dtype, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the content of config.json for weights of `dtype`; extra: more keys."""
    fixed = {
        "architectures": [config.architecture],
        "model_type": config.model_type,
        **{key: getattr(config, field) for field, key in SIZE_KEYS.items()},
        **{key: getattr(config, field) for field, key in config.keys.items()},
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        **config.computes,
        "torch_dtype": dtype.name,
    }
    types = [FULL if kind.window is None else SLIDING for kind in config.kinds]
    if types != ModelConfig.layer_types(fixed) or types != config.layer_types(fixed):
        fixed["layer_types"] = types
    if config.windows:
        fixed["sliding_window"] = max(window or 0 for window in config.windows)
    if config.rope_scaling:
        entries = dataclasses.asdict(config.rope_scaling)
        fixed["rope_scaling"] = {name: v for name, v in entries.items() if v is not None}
    free = {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 32_768}
    free |= {key: config.defaults[key] for key in free.keys() & config.defaults.keys()}
    return free | dict(extra) | fixed


def write_json(file, value):
    """Writes a JSON file, indented, with a newline at its end."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _refuse(key: str, value: object, rule: str):
    raise ValueError(f"{key} is {value!r:.200}, but {rule}")


def _own(raw: Mapping[str, Any], key: str, default: float):
    """Reads a value of a family's own, of its default's type; numbers are positive."""
    if not isinstance(default, bool):
        return _number(raw, key, whole=isinstance(default, int))
    if not isinstance(raw[key], bool):
        _refuse(key, raw[key], "must be true or false")
    return raw[key]


def _number(raw: Mapping[str, Any], key: str, *, whole: bool = False):
    """Reads a positive number, as a float; whole: an integer."""
    value, kinds = raw.get(key), int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        _refuse(key, value, f"must be a positive {'integer' if whole else 'number'}")
    return value if whole else float(value)
