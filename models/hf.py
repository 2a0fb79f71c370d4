"""Qwen2 in Hugging Face's file format: config.json and safetensors, read and written.

Both directions follow the names and layouts of models.parameters.Parameter. Paths are whatever
etils.epath knows, gs:// among them. A host holds little beside the arrays on its devices: one
parameter's shards while loading, one layer's parameter while saving.
"""

import collections
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx

from models.parameters import EMBED, HEAD, ModelConfig, Parameter
from models.qwen2 import Qwen2Config
from models.transformer import Transformer, abstract_params
from sharding import hosts

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

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
DTYPES = ("float32", "bfloat16", "float16")
FILE_DTYPES = dict(zip(("F32", "BF16", "F16"), map(jnp.dtype, DTYPES), strict=True))
MAX_SHARD_BYTES = 5 * 10**9
MAX_HEADER_BYTES = 10**8  # what the safetensors library allows
PIECE_VALUES = 2**22  # read or written at a time
READERS = 8  # tensors read at a time: one stream from a bucket is far slower than the network


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: `nbytes` from `start` in `file`. `dtype` is safetensors' name."""

    file: epath.Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    nbytes: int


def load_config(path) -> ModelConfig:
    """The model's sizes from the config.json of a Hugging Face directory.

    Raises FileNotFoundError where there is none, and ValueError, with file, key and value, for
    anything that this model does not compute: another architecture or activation, scaled rotary
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
    path = epath.Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory; give a Hugging Face model directory")
    file = path / CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{path} has no {CONFIG_FILE}; it holds {_listing(path)}")
    return _read_json(file)


def load_hf(path, *, dtype="float32") -> Transformer:
    """The model of a Hugging Face directory, as `load_params` gives its parameters.

    Raises as `load_config` and `load_params` do.
    """
    config = load_config(path)
    graph, _ = abstract_params(config)
    return nnx.merge(graph, load_params(path, config, dtype=dtype))


def load_params(path, config: ModelConfig, *, dtype, shardings=None) -> dict[str, Any]:
    """The parameters of a Hugging Face directory as global arrays, nested as in `split`.

    `dtype` (float32, bfloat16 or float16) is what the arrays have; the files may hold any of the
    three. `shardings` is one sharding for all arrays, or a tree of them like the parameters (None:
    all on this process's first device). Every process reads the rows that its own shards need, and
    makes one array after the other. Every tensor of the files is checked before any is read.

    Raises FileNotFoundError for missing files, and ValueError for a broken file, for tensors that
    are missing, unexpected, mis-shaped or not floats (all of them named), and for an lm_head that
    differs from the embedding though config.json ties the two.
    """
    path, dtype = epath.Path(path), _dtype(dtype)
    found = _headers(path)
    expected = {name: shape for name, shape, *_ in _tensors(config)}
    head_copy = config.tie_embeddings and HEAD.tensor in found
    if head_copy:
        expected[HEAD.tensor] = expected[EMBED.tensor]
    _check(path, found, expected)
    if head_copy:
        _check_tied(found[HEAD.tensor], found[EMBED.tensor])

    _, abstract = abstract_params(config)
    if shardings is None:
        shardings = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _, one=shardings: one, abstract)

    def load(key_path, leaf, sharding):
        parameter = config.parameters[key_path[-1].key]
        return _load(found, parameter, leaf.shape, config, dtype, sharding)

    return jax.tree_util.tree_map_with_path(load, abstract, shardings)


def save_hf(
    params,
    config: ModelConfig,
    path,
    *,
    dtype="float32",
    max_shard_bytes=MAX_SHARD_BYTES,
    extra_config: Mapping[str, Any] | None = None,
):
    """Writes a directory that transformers loads as Qwen2ForCausalLM.

    `params` is the nested dict of `split`, host or global arrays, which are fetched tensor by
    tensor; `dtype` is what the files hold. Every process of several calls it, with global arrays,
    and the main one writes. Beyond `max_shard_bytes` the weights are split into several files with
    an index. `extra_config` adds keys to config.json that the model does not compute with:
    bos_token_id and eos_token_id (null otherwise), max_position_embeddings (32768 otherwise).

    Raises FileExistsError where the directory already holds a model, and ValueError for params
    that do not fit the config, for a tensor larger than a shard and for an extra key that would
    contradict the config.
    """
    path, dtype = epath.Path(path), _dtype(dtype)
    content = _config_json(config, dtype, extra_config or {}, path)
    old = sorted(p.name for p in [*path.glob("*.safetensors*"), *path.glob(CONFIG_FILE)])
    if old:
        raise FileExistsError(
            f"{path} already holds a model ({', '.join(old)}); remove it or give another directory"
        )
    check_params(params, config)
    shards = _shards(config, dtype.itemsize, max_shard_bytes)
    if hosts.is_main_host():
        path.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS_FILE
        if len(shards) > 1:
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        shapes = {name: shape for name, shape, *_ in shard}
        tensors = (
            _to_file(_fetched(params, parameter.name, layer), parameter, config, dtype)
            for _, _, parameter, layer in shard
        )
        if hosts.is_main_host():
            _write(path / file, shapes, dtype, tensors)
        else:
            collections.deque(tensors, maxlen=0)  # all processes take part in fetching
        weight_map |= dict.fromkeys(shapes, file)
    if not hosts.is_main_host():
        return
    if len(shards) > 1:
        size = sum(math.prod(shape) for _, shape, *_ in _tensors(config)) * dtype.itemsize
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        _write_json(path / INDEX_FILE, index)
    _write_json(path / CONFIG_FILE, content)  # last: with it the directory is complete


def check_params(params, config: ModelConfig):
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


def _tensors(config) -> Iterator[tuple[str, tuple[int, ...], Parameter, int | None]]:
    """(file's name, file's shape, parameter, layer or None) of every tensor of a model."""
    runs = itertools.groupby(config.parameters.values(), lambda parameter: parameter.stacked)
    for stacked, parameters in runs:
        parameters = tuple(parameters)
        for layer in range(config.num_layers) if stacked else (None,):
            for p in parameters:
                yield p.tensor.format(layer), p.tensor_shape(config.axis_sizes), p, layer


def _load(found, parameter, shape, config, dtype, sharding):
    """One parameter as a global array, from its tensors in the files (one for each layer)."""
    sizes, axes = config.axis_sizes, parameter.axes
    stored, stacked = parameter.layout.replace(" ", ""), parameter.stacked
    layers = range(shape[0] if stacked else 1)
    tensors = [found[parameter.tensor.format(layer)] for layer in layers]
    shards = {}  # place -> host array; several devices may share one
    for index in sharding.addressable_devices_indices_map(shape).values():
        place = _place(index, shape)
        if place not in shards:
            shards[place] = np.empty([stop - start for start, stop in place], dtype)

    def read(layer, tensor):
        targets = collections.defaultdict(list)  # rows of the tensor -> (columns, array to fill)
        for place, array in shards.items():
            if stacked:
                (start, stop), *place = place
                if not start <= layer < stop:
                    continue
                array = array[layer - start]
            by_axis = dict(zip(axes, place, strict=True))
            rows, *columns = (by_axis[axis] for axis in stored)
            columns = tuple(slice(*column) for column in columns)
            array = array.transpose([axes.index(axis) for axis in stored])
            targets[rows].append((columns, array))
        for rows, filled in targets.items():
            for first, piece in _pieces(tensor, [sizes[axis] for axis in stored], *rows):
                for columns, array in filled:
                    array[first : first + len(piece)] = piece[:, *columns]

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, range(len(tensors)), tensors))  # raises what a reader raised
    array = jax.make_array_from_callback(
        shape, sharding, lambda index: shards[_place(index, shape)], dtype=dtype
    )
    return array.block_until_ready()  # without the wait JAX would keep the host arrays alive


def _place(index, shape) -> tuple[tuple[int, int], ...]:
    """(start, stop) on every axis, of one of a sharding's indices."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _pieces(tensor, shape, start, stop) -> Iterator[tuple[int, np.ndarray]]:
    """Rows start to stop of a tensor taken as `shape`: (rows before the piece, piece), in order."""
    dtype = FILE_DTYPES[tensor.dtype]
    row_bytes = tensor.nbytes // shape[0]
    step = max(1, PIECE_VALUES // math.prod(shape[1:]))
    with tensor.file.open("rb") as file:
        file.seek(tensor.start + start * row_bytes)
        for first in range(start, stop, step):
            count = min(step, stop - first)
            data = file.read(count * row_bytes)
            if len(data) < count * row_bytes:
                raise ValueError(f"{tensor.file} became shorter while it was read")
            yield first - start, np.frombuffer(data, dtype).reshape(count, *shape[1:])


def _write(file, shapes, dtype, tensors: Iterator[np.ndarray]):
    """A safetensors file (its header's length, the header, the data) of tensors taken one by one.

    `shapes` has their names and shapes, in their order.
    """
    dtype_name = next(name for name, value in FILE_DTYPES.items() if value == dtype)
    header, stop = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype_name, "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8, as the format asks
    # Fetched first: no process may still be looking for old files when this one appears.
    first = next(tensors)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in itertools.chain([first], tensors):
            values = tensor.reshape(-1)
            for start in range(0, len(values), PIECE_VALUES):
                out.write(values[start : start + PIECE_VALUES].tobytes())


def _to_file(array, parameter, config, dtype):
    """A host array as the file has it: axes reordered and merged, cast, contiguous."""
    stored = parameter.layout.replace(" ", "")
    array = array.transpose([parameter.axes.index(a) for a in stored])
    array = array.astype(dtype, order="C", copy=False)
    return array.reshape(parameter.tensor_shape(config.axis_sizes))


def _fetched(params, leaf, layer):
    """The host array of one tensor: a parameter, or a layer of a stacked one."""
    array = params[leaf] if layer is None else params["layers"][leaf]
    if isinstance(array, np.ndarray):
        return array if layer is None else array[layer]
    # Not the array itself: JAX would keep what it fetched as long as the array lives.
    return hosts.fetch(jnp.copy(array) if layer is None else array[layer])


def _headers(path) -> dict[str, Tensor]:
    """Every tensor in the directory's weights, by name; reads headers."""
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
    found: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _header(file).items():
            if name in found:
                raise ValueError(f"{name} is both in {found[name].file} and in {file}")
            found[name] = tensor
    misplaced = [
        f"{name} ({file})"
        for name, file in weight_map.items()
        if name not in found or found[name].file.name != file
    ]
    if misplaced:
        raise ValueError(f"{index_file} names tensors not in their files: {', '.join(misplaced)}")
    return found


def _header(file) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which must fill it; reads its beginning."""

    def require(holds, problem):
        if not holds:
            raise ValueError(problem)

    with file.open("rb") as data:
        data.seek(0, os.SEEK_END)
        size = data.tell()
        data.seek(0)
        try:
            length = int.from_bytes(data.read(8), "little")
            require(8 + length <= size, "its header is cut off")
            require(length <= MAX_HEADER_BYTES, f"its header has {length} bytes")
            entries = json.loads(data.read(length))
            entries.pop("__metadata__", None)
            tensors, stop = {}, 0
            for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
                shape, dtype = tuple(entry["shape"]), entry["dtype"]
                start, end = entry["data_offsets"]
                require(start == stop, f"{name} begins at byte {start} of the data, not {stop}")
                if dtype in FILE_DTYPES:
                    nbytes = math.prod(shape) * FILE_DTYPES[dtype].itemsize
                    require(end - start == nbytes, f"{name} has {end - start} bytes, not {nbytes}")
                tensors[name] = Tensor(file, shape, dtype, 8 + length + start, end - start)
                stop = end
            require(8 + length + stop == size, f"its header promises {8 + length + stop} bytes")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} ({size} bytes) is no whole safetensors file: {error}; "
                "download or export it again"
            ) from error
    return tensors


def _check(path, found, expected):
    problems = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in found]
    for name, tensor in found.items():
        shape, file = tensor.shape, tensor.file.name
        if name not in expected:
            problems.append(f"unexpected: {name} {shape} in {file}")
        elif shape != expected[name]:
            problems.append(
                f"mis-shaped: {name} is {shape} in {file}, but must be {expected[name]}"
            )
        if name in expected and tensor.dtype not in FILE_DTYPES:
            problems.append(
                f"wrong dtype: {name} is {tensor.dtype} in {file}, but must be "
                f"one of {', '.join(FILE_DTYPES)}"
            )
    if problems:
        raise ValueError(
            f"{path}: {len(problems)} tensors do not fit the {CONFIG_FILE}:\n  "
            + "\n  ".join(problems)
        )


def _check_tied(head, embed):
    both = (_pieces(tensor, tensor.shape, 0, tensor.shape[0]) for tensor in (head, embed))
    rows = np.concatenate(
        [
            first + np.flatnonzero((a != b).any(axis=1))
            for (first, a), (_, b) in zip(*both, strict=True)
        ]
    )
    if len(rows):
        raise ValueError(
            f"{head.file}: {HEAD.tensor} differs from {EMBED.tensor} in {len(rows)} of "
            f"{head.shape[0]} rows (the first is {rows[0]}), but {CONFIG_FILE} has "
            "tie_word_embeddings true; set it to false to keep both"
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
