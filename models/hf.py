"""Qwen2 in Hugging Face's file format: config.json and safetensors, read and written.

`TENSORS` is the one table of names and layouts; both directions follow it. Host memory stays near
one copy of the model: tensors are read one by one into the stacked arrays, and written by shards.
"""

import json
import math
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.qwen2 import Qwen2, Qwen2Config, abstract_params

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Our array -> (Hugging Face name, layout). Our axes are the letters that end our name; a layout
# gives the same letters in the file's order, one group for each axis of the file's tensor. Arrays
# whose name has "{}" are stacked: one tensor in the file for each layer.
TENSORS = {
    "embed_VD": ("model.embed_tokens.weight", "V D"),
    "final_norm_D": ("model.norm.weight", "D"),
    "head_DV": ("lm_head.weight", "V D"),
    "attn_norm_D": ("model.layers.{}.input_layernorm.weight", "D"),
    "q_DNH": ("model.layers.{}.self_attn.q_proj.weight", "NH D"),
    "q_bias_NH": ("model.layers.{}.self_attn.q_proj.bias", "NH"),
    "k_DKH": ("model.layers.{}.self_attn.k_proj.weight", "KH D"),
    "k_bias_KH": ("model.layers.{}.self_attn.k_proj.bias", "KH"),
    "v_DKH": ("model.layers.{}.self_attn.v_proj.weight", "KH D"),
    "v_bias_KH": ("model.layers.{}.self_attn.v_proj.bias", "KH"),
    "o_NHD": ("model.layers.{}.self_attn.o_proj.weight", "D NH"),
    "mlp_norm_D": ("model.layers.{}.post_attention_layernorm.weight", "D"),
    "gate_DF": ("model.layers.{}.mlp.gate_proj.weight", "F D"),
    "up_DF": ("model.layers.{}.mlp.up_proj.weight", "F D"),
    "down_FD": ("model.layers.{}.mlp.down_proj.weight", "D F"),
}
HEAD_NAME = TENSORS["head_DV"][0]
EMBED_NAME = TENSORS["embed_VD"][0]

# Field of Qwen2Config -> key of config.json.
SIZE_KEYS = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
NO_SCALING = (None, "default")
DTYPES = ("float32", "bfloat16", "float16")
FILE_DTYPES = ("F32", "BF16", "F16")
MAX_SHARD_BYTES = 5 * 10**9


def load_config(path) -> Qwen2Config:
    """The model's sizes from the config.json of a Hugging Face directory.

    Raises FileNotFoundError where there is none, and ValueError, with file, key and value, for
    anything that this model does not compute: another architecture or activation, scaled rotary
    embeddings, sliding windows, quantised weights, sizes that do not fit together.
    """
    file, raw = pathlib.Path(path) / CONFIG_FILE, read_config(path)
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

    if raw.get("model_type") != "qwen2":
        refuse("model_type", raw.get("model_type"), "must be 'qwen2'")
    if raw.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", raw["hidden_act"], "only 'silu' is supported")
    if raw.get("use_sliding_window"):
        refuse("use_sliding_window", raw["use_sliding_window"], "only full attention is supported")
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
    return Qwen2Config(
        **sizes,
        head_dim=head_dim,
        tie_embeddings=require(
            "tie_word_embeddings", tie, lambda v: isinstance(v, bool), "must be true or false"
        ),
        rope_theta=number("rope_theta", raw.get("rope_theta", rope.get("rope_theta"))),
        rms_norm_eps=number("rms_norm_eps", raw.get("rms_norm_eps")),
    )


def read_config(path) -> dict[str, Any]:
    """The raw config.json of a Hugging Face directory, as a dictionary."""
    path = pathlib.Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory; give a Hugging Face model directory")
    file = path / CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{path} has no {CONFIG_FILE}; it holds {_listing(path)}")
    return _read_json(file)


def load_hf(path, *, dtype="float32") -> Qwen2:
    """The model of a Hugging Face directory, its parameters on JAX's default device.

    Raises as `load_config` and `load_params` do.
    """
    config = load_config(path)
    graph, _ = abstract_params(config)
    return nnx.merge(graph, _to_device(load_params(path, config, dtype=dtype)))


def load_params(path, config: Qwen2Config, *, dtype) -> dict[str, Any]:
    """The parameters of a Hugging Face directory as host arrays, nested as `qwen2.split` gives.

    `dtype` (float32, bfloat16 or float16) is what the arrays have; the files may hold any of the
    three. Every tensor of the files is checked before any is read.

    Raises FileNotFoundError for missing files, and ValueError for a broken file, for tensors that
    are missing, unexpected, mis-shaped or not floats (all of them named), and for an lm_head that
    differs from the embedding though config.json ties the two.
    """
    path, dtype = pathlib.Path(path), _dtype(dtype)
    found = _headers(path)
    expected = {name: shape for name, shape, *_ in _tensors(config)}
    head_copy = config.tie_embeddings and HEAD_NAME in found
    if head_copy:
        expected[HEAD_NAME] = expected[EMBED_NAME]
    _check(path, found, expected)

    _, abstract = abstract_params(config)
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, dtype), abstract)
    by_file: dict[pathlib.Path, list] = {}
    for name, _, leaf, layer, layout in _tensors(config):
        by_file.setdefault(found[name][0], []).append((name, leaf, layer, layout))
    for file, tensors in by_file.items():
        with safe_open(file, "np") as reader:
            for name, leaf, layer, layout in tensors:
                target = _at(params, leaf, layer)
                target[...] = _from_file(reader.get_tensor(name), leaf, layout, config)
    if head_copy:
        _check_tied(found)
    return params


def save_hf(
    params,
    config: Qwen2Config,
    path,
    *,
    dtype="float32",
    max_shard_bytes=MAX_SHARD_BYTES,
    extra_config: Mapping[str, Any] | None = None,
):
    """Writes a directory that transformers loads as Qwen2ForCausalLM.

    `params` is the nested dict of `qwen2.split`, host or device arrays; `dtype` is what the files
    hold. Beyond `max_shard_bytes` the weights are split into several files with an index.
    `extra_config` adds keys to config.json that the model does not compute with: bos_token_id and
    eos_token_id (null otherwise), max_position_embeddings (32768 otherwise).

    Raises FileExistsError where the directory already holds a model, and ValueError for params
    that do not fit the config, for a tensor larger than a shard and for an extra key that would
    contradict the config.
    """
    path, dtype = pathlib.Path(path), _dtype(dtype)
    content = _config_json(config, dtype, extra_config or {}, path)
    old = sorted(p.name for p in [*path.glob("*.safetensors*"), *path.glob(CONFIG_FILE)])
    if old:
        raise FileExistsError(
            f"{path} already holds a model ({', '.join(old)}); remove it or give another directory"
        )
    check_params(params, config)
    shards = _shards(config, dtype.itemsize, max_shard_bytes)
    path.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS_FILE
        if len(shards) > 1:
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {
            name: _to_file(_at(params, leaf, layer), leaf, layout, config, dtype)
            for name, _, leaf, layer, layout in shard
        }
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        size = sum(math.prod(shape) for _, shape, *_ in _tensors(config)) * dtype.itemsize
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        _write_json(path / INDEX_FILE, index)
    _write_json(path / CONFIG_FILE, content)  # last: with it the directory is complete
    for file in set(weight_map.values()):  # safetensors makes files that only their owner can read
        shutil.copymode(path / CONFIG_FILE, path / file)


def check_params(params, config: Qwen2Config):
    """Raises ValueError, naming every array, unless the params have the config's names and shapes.

    `params` may hold arrays or anything else with a shape.
    """
    given, wanted = _shapes(params), _shapes(abstract_params(config)[1])
    wrong = [key for key in sorted(given | wanted) if given.get(key) != wanted.get(key)]
    if wrong:
        raise ValueError(
            "params do not fit the config: "
            + "; ".join(f"{k} is {given.get(k)}, must be {wanted.get(k)}" for k in wrong)
        )


def _tensors(config) -> Iterator[tuple[str, tuple[int, ...], str, int | None, str]]:
    """(file's name, file's shape, our leaf, layer or None, layout) of every tensor of a model."""
    sizes = _axis_sizes(config)
    per_layer = [leaf for leaf, (name, _) in TENSORS.items() if "{}" in name]
    leaves = [("embed_VD", None)]
    leaves += [(leaf, layer) for layer in range(config.num_layers) for leaf in per_layer]
    leaves += [("final_norm_D", None)]
    leaves += [] if config.tie_embeddings else [("head_DV", None)]
    for leaf, layer in leaves:
        name, layout = TENSORS[leaf]
        shape = tuple(math.prod(sizes[a] for a in group) for group in layout.split())
        yield name.format(layer), shape, leaf, layer, layout


def _axis_sizes(config) -> dict[str, int]:
    return {
        "V": config.vocab_size,
        "D": config.width,
        "F": config.mlp_width,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": config.head_dim,
    }


def _axes(leaf: str) -> str:
    return leaf.rsplit("_", 1)[-1]


def _from_file(tensor, leaf, layout, config):
    """The file's tensor as our array: axes unmerged, then reordered. A view where possible."""
    sizes, stored = _axis_sizes(config), layout.replace(" ", "")
    return tensor.reshape([sizes[a] for a in stored]).transpose(
        [stored.index(a) for a in _axes(leaf)]
    )


def _to_file(array, leaf, layout, config, dtype):
    """The inverse of `_from_file`, cast and contiguous, as safetensors wants it."""
    sizes, stored = _axis_sizes(config), layout.replace(" ", "")
    array = array.transpose([_axes(leaf).index(a) for a in stored])
    shape = [math.prod(sizes[a] for a in group) for group in layout.split()]
    return np.ascontiguousarray(array.astype(dtype).reshape(shape))


def _at(params, leaf, layer):
    """The host array of one tensor; a view into the stacked one where it belongs to a layer."""
    return np.asarray(params[leaf]) if layer is None else np.asarray(params["layers"][leaf])[layer]


def _to_device(params):
    """JAX arrays for host ones, moved one by one: a host array goes once its copy is complete."""
    moved = {}
    for key in list(params):
        leaf = params.pop(key)
        if isinstance(leaf, dict):
            moved[key] = _to_device(leaf)
        else:  # without the wait JAX would keep the host array alive
            moved[key] = jax.device_put(leaf).block_until_ready()
    return moved


def _headers(path) -> dict[str, tuple[pathlib.Path, tuple[int, ...], str]]:
    """name -> (file, shape, dtype) of every tensor in the directory's weights; reads headers."""
    index_file = path / INDEX_FILE
    weight_map = {}
    if (path / WEIGHTS_FILE).is_file():
        files = [path / WEIGHTS_FILE]
    elif index_file.is_file():
        weight_map = _read_json(index_file).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index_file}: weight_map is {weight_map!r}, but must name files")
        files = [path / file for file in sorted(set(weight_map.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise FileNotFoundError(f"{path} lacks {', '.join(absent)}, named in {INDEX_FILE}")
    else:
        raise FileNotFoundError(
            f"{path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; it holds {_listing(path)}"
        )
    found: dict[str, tuple] = {}
    for file in files:
        try:
            with safe_open(file, "np") as reader:
                for name in reader.keys():  # noqa: SIM118 (the reader is not a mapping)
                    if name in found:
                        raise ValueError(f"{name} is both in {found[name][0]} and in {file}")
                    tensor = reader.get_slice(name)
                    found[name] = file, tuple(tensor.get_shape()), str(tensor.get_dtype())
        except SafetensorError as error:
            raise ValueError(
                f"{file} ({file.stat().st_size} bytes) is no whole safetensors file: {error}; "
                "download or export it again"
            ) from error
    misplaced = [
        f"{name} ({file})"
        for name, file in weight_map.items()
        if name not in found or found[name][0].name != file
    ]
    if misplaced:
        raise ValueError(f"{index_file} names tensors not in their files: {', '.join(misplaced)}")
    return found


def _check(path, found, expected):
    problems = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in found]
    problems += [
        f"unexpected: {name} {shape} in {file.name}"
        for name, (file, shape, _) in found.items()
        if name not in expected
    ]
    for name, (file, shape, dtype) in found.items():
        if name in expected and shape != expected[name]:
            problems.append(
                f"mis-shaped: {name} is {shape} in {file.name}, but must be {expected[name]}"
            )
        if name in expected and dtype not in FILE_DTYPES:
            problems.append(
                f"wrong dtype: {name} is {dtype} in {file.name}, but must be "
                f"one of {', '.join(FILE_DTYPES)}"
            )
    if problems:
        raise ValueError(
            f"{path}: {len(problems)} tensors do not fit the {CONFIG_FILE}:\n  "
            + "\n  ".join(problems)
        )


def _check_tied(found):
    head_file, embed_file = found[HEAD_NAME][0], found[EMBED_NAME][0]
    with safe_open(head_file, "np") as head, safe_open(embed_file, "np") as embed:
        a, b = head.get_tensor(HEAD_NAME), embed.get_tensor(EMBED_NAME)
    if not np.array_equal(a, b):
        rows = np.flatnonzero((a != b).any(axis=1))
        raise ValueError(
            f"{head_file}: {HEAD_NAME} differs from {EMBED_NAME} in {len(rows)} of {len(a)} rows "
            f"(the first is {rows[0]}), but {CONFIG_FILE} has tie_word_embeddings true; "
            "set it to false to keep both"
        )


def _shapes(params) -> dict[str, tuple[int, ...]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves
    }


def _shards(config, item_bytes, max_shard_bytes):
    """The model's tensors in order, cut into as few runs as fit, each below the limit."""
    shards, size = [[]], 0
    for tensor in _tensors(config):
        tensor_bytes = math.prod(tensor[1]) * item_bytes
        if tensor_bytes > max_shard_bytes:
            raise ValueError(
                f"{tensor[0]} has {tensor_bytes} bytes, more than max_shard_bytes = "
                f"{max_shard_bytes}; raise it"
            )
        if size + tensor_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor_bytes
    return shards


def _config_json(config, dtype, extra, path) -> dict[str, Any]:
    fixed = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **{key: getattr(config, field) for field, key in SIZE_KEYS.items()},
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "use_sliding_window": False,
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


def _is_size(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_positive(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _dtype(dtype) -> np.dtype:
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"dtype is {dtype.name}, but must be one of {', '.join(DTYPES)}")
    return dtype


def _read_json(file) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a JSON {type(value).__name__}, but must hold an object")
    return value


def _write_json(file, value):
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _listing(path) -> str:
    return ", ".join(sorted(p.name for p in path.iterdir())) or "nothing"
