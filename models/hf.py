"""Models in Hugging Face's file format: safetensors, read onto devices and written.

Both directions follow the names and layouts of models.parameters.Parameter. Paths are whatever
etils.epath knows, gs:// among them. A host holds little beside the arrays on its devices: one
parameter's shards while loading, one layer's parameter while saving.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx

from models import hf_config, hf_stream
from models.hf_config import CONFIG_FILE
from models.hf_stream import FILE_DTYPES, PIECE_VALUES, FileTensor
from models.parameters import EMBED, HEAD, ModelConfig, Parameter
from models.transformer import Transformer, abstract_params

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = tuple(dtype.name for dtype in FILE_DTYPES.values())
MAX_SHARD_BYTES = 5 * 10**9
MAX_LISTED = 8  # of what is wrong, in one message
# Buffers that older checkpoints hold, not weights: rotary angles and masks, which are computed.
BUFFERS = re.compile(
    r"(^|[._])(rotary_emb\.((original_)?inv_freq|cos_cached|sin_cached)"
    r"|(attn|attention)\.(masked_)?bias|position_ids)$"
)
READERS = 8  # tensors read at a time: one stream from a bucket is far slower than the network


def load_hf(path, *, dtype="float32") -> Transformer:
    """Loads the model of a Hugging Face directory; raises as `load_config`, `load_params` do."""
    config = hf_config.load_config(path)
    graph, _ = abstract_params(config)
    return nnx.merge(graph, load_params(path, config, dtype=dtype))


def load_params(path, config: ModelConfig, *, dtype, shardings=None) -> dict[str, Any]:
    """Loads the parameters of a Hugging Face directory as global arrays, nested as in `split`.

    `dtype` (float32, bfloat16 or float16) is what the arrays have; the files may hold any of the
    three. `shardings` is one sharding for all arrays, or a tree of them like the parameters (None:
    all on this process's first device). Every process reads the rows that its own shards need, and
    makes one array after the other. Every tensor of the files is checked before any is read.

    Raises FileNotFoundError for missing files, and ValueError for a broken file, for tensors that
    are missing, unexpected, mis-shaped or not floats (counted, the first few named), and for an
    lm_head that differs from the embedding though config.json ties the two.
    """
    path, dtype = epath.Path(path), jnp.dtype(dtype)
    headers = _headers(path, config)
    _check(path, headers, config)
    if config.tie_embeddings and HEAD.tensor in headers:
        _check_tied(headers[HEAD.tensor], headers[EMBED.tensor])

    _, abstract = abstract_params(config)
    if shardings is None:
        shardings = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.broadcast(shardings, abstract)

    def load(key_path, leaf, sharding):
        parameter = config.parameters[key_path[-1].key]
        return _load(headers, parameter, leaf.shape, config, dtype, sharding)

    return jax.tree_util.tree_map_with_path(load, abstract, shardings)


def check_files(path, config: ModelConfig, *, needed: bool = False) -> None:
    """Checks the tensors of a directory by their files' headers, before anything is made of sizes.

    needed: whether weights have to be there; preflight has none. Raises as `load_params`.
    """
    path = epath.Path(path)
    if needed or (path / WEIGHTS_FILE).exists() or (path / INDEX_FILE).exists():
        _check(path, _headers(path, config), config)


def save_hf(
    params,
    config: ModelConfig,
    path,
    *,
    dtype="float32",
    max_shard_bytes=MAX_SHARD_BYTES,
    extra_config: Mapping[str, Any] | None = None,
):
    """Writes a directory that transformers loads as the family's `architecture`.

    `params` is the nested dict of `split`, of host arrays or of this process's, which are fetched
    tensor by tensor; `dtype` is what the files hold. Beyond `max_shard_bytes` the weights are split
    into several files with an index. `extra_config` adds keys to config.json that the model does
    not compute with: bos_token_id and eos_token_id (null otherwise), max_position_embeddings (32768
    otherwise).

    Raises FileExistsError where the directory already holds a model.
    """
    from huggingface_hub import split_state_dict_into_shards_factory  # which few starts need

    path, dtype = epath.Path(path), jnp.dtype(dtype)
    content = hf_config.config_json(config, dtype, extra_config or {})
    old = sorted(p.name for p in [*path.glob("*.safetensors*"), *path.glob(CONFIG_FILE)])
    if old:
        raise FileExistsError(
            f"{path} already holds a model ({', '.join(old)}); remove it or give another directory"
        )
    tensors = {name: tensor for name, *tensor in _tensors(config)}
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: math.prod(tensor[0]) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    path.mkdir(parents=True, exist_ok=True)
    for file, names in split.filename_to_tensors.items():
        shapes = {name: tensors[name][0] for name in names}
        fetched = functools.lru_cache(1)(functools.partial(_fetched, params))  # of all experts
        arrays = (
            _to_file(fetched(parameter.name, *number[:1])[number[1:]], parameter, config, dtype)
            for _, parameter, number in map(tensors.get, names)
        )
        hf_stream.write(path / file, shapes, dtype, arrays)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        hf_config.write_json(path / INDEX_FILE, index)
    hf_config.write_json(path / CONFIG_FILE, content)  # last: with it the directory is complete


def _tensors(config) -> Iterator[tuple[str, tuple[int, ...], Parameter, tuple[int, ...]]]:
    """Lists (file's name, file's shape, parameter, number) of every tensor of a model.

    number: () or (layer,) or (layer, expert), the tensor's place at the front of our array.
    """
    sizes = config.axis_sizes
    runs = itertools.groupby(config.parameters.values(), lambda parameter: parameter.stacked)
    for stacked, parameters in runs:
        parameters = tuple(parameters)
        for layer in [(i,) for i in range(config.num_layers)] if stacked else [()]:
            for p in parameters:
                for expert in np.ndindex(*(sizes[axis] for axis in p.numbered)):
                    number = (*layer, *expert)
                    yield p.tensor.format(*number), p.tensor_shape(sizes), p, number


def _load(headers, parameter, shape, config, dtype, sharding):
    sizes, axes = config.axis_sizes, parameter.axes.removeprefix(parameter.numbered)
    stored = parameter.layout.replace(" ", "")
    leading = len(shape) - len(axes)
    numbers = list(np.ndindex(shape[:leading]))
    tensors = [headers[parameter.tensor.format(*number)] for number in numbers]
    shards = {}  # place -> host array; several devices may share one
    for index in sharding.addressable_devices_indices_map(shape).values():
        place = _place(index, shape)
        if place not in shards:
            shards[place] = np.empty([stop - start for start, stop in place], dtype)

    def read(number, tensor):
        targets = collections.defaultdict(list)  # rows of the tensor -> (columns, array to fill)
        for place, array in shards.items():
            first = zip(number, place, strict=False)
            if not all(start <= n < stop for n, (start, stop) in first):
                continue
            array = array[*(n - start for n, (start, _) in zip(number, place, strict=False))]
            by_axis = dict(zip(axes, place[leading:], strict=True))
            rows, *columns = (by_axis[axis] for axis in stored)
            columns = tuple(slice(*column) for column in columns)
            array = array.transpose([axes.index(axis) for axis in stored])
            targets[rows].append((columns, array))
        for rows, filled in targets.items():
            for first, piece in _pieces(tensor, [sizes[axis] for axis in stored], *rows):
                for columns, array in filled:
                    array[first : first + len(piece)] = piece[:, *columns]

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, numbers, tensors))  # raises what a reader raised
    array = jax.make_array_from_callback(
        shape, sharding, lambda index: shards[_place(index, shape)], dtype=dtype
    )
    return array.block_until_ready()  # without the wait JAX would keep the host arrays alive


def _place(index, shape) -> tuple[tuple[int, int], ...]:
    """Gives (start, stop) on every axis for one of a sharding's indices."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _pieces(tensor, shape, start, stop) -> Iterator[tuple[int, np.ndarray]]:
    """Reads rows start to stop of a tensor taken as `shape`, as (rows before a piece, piece)."""
    step = max(1, PIECE_VALUES // math.prod(shape[1:]))
    rows = tensor.shape[0] // shape[0]  # the file's, in one of ours
    pieces = tensor.pieces(start * rows, stop * rows, step * rows)
    for first, piece in zip(range(0, stop - start, step), pieces, strict=True):
        yield first, piece.reshape(-1, *shape[1:])


def _to_file(array, parameter, config, dtype):
    """Makes of a host array what the file has: axes reordered and merged, cast, contiguous."""
    stored, axes = parameter.layout.replace(" ", ""), parameter.axes
    array = array.transpose([axes.removeprefix(parameter.numbered).index(a) for a in stored])
    array = array.astype(dtype, order="C", copy=False)
    return array.reshape(parameter.tensor_shape(config.axis_sizes))


def _fetched(params, leaf, layer=None):
    array = params[leaf] if layer is None else params["layers"][leaf]
    if isinstance(array, np.ndarray):
        return array if layer is None else array[layer]
    # Not the array itself: JAX would keep what it fetched as long as the array lives.
    return np.asarray(jnp.copy(array) if layer is None else array[layer])


def _headers(path, config: ModelConfig) -> dict[str, FileTensor]:
    """Reads which tensors the directory's weights have, from the files' headers and the index.

    Their names are the family's own, and an expert's part of a stack counts as a tensor.
    """
    index_file = path / INDEX_FILE
    weight_map = {}
    if (path / WEIGHTS_FILE).exists():
        files = [path / WEIGHTS_FILE]
    elif index_file.exists():
        weight_map = hf_config.read_json(index_file).get("weight_map")
        if not weight_map:
            raise ValueError(f"{index_file}: weight_map is {weight_map}, but must name files")
        files = [path / name for name in sorted(set(weight_map.values()))]
        absent = [file.name for file in files if not file.exists()]
        if absent:
            raise FileNotFoundError(f"{path} lacks {_listed(absent, ', ')}, named in {INDEX_FILE}")
    else:
        raise FileNotFoundError(
            f"{path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; it holds "
            f"{hf_config.listing(path)}"
        )
    headers = {
        own: tensor
        for file in files
        for name, tensor in hf_stream.header(file).items()
        if weight_map.get(name, file.name) == file.name
        and (own := config.own_tensor(name)) is not None
    }
    for (stack, names), layer in itertools.product(config.stacks.items(), range(config.num_layers)):
        if stack.format(layer) in headers:
            parameters = [config.parameters[name] for name in names]
            headers |= _of_stack(headers, stack.format(layer), parameters, layer, config)
    return headers


def _of_stack(headers, stack, parameters, layer, config) -> dict[str, FileTensor]:
    """Takes a stack apart, in the file's order: each parameter of one expert, then of the next.

    One of another shape is left, and has a name that no parameter has.
    """
    sizes, tensor = config.axis_sizes, headers[stack]
    rows, columns = parameters[0].tensor_shape(sizes)
    count = len(parameters) * sizes["E"]
    if tensor.shape != (sizes["E"], len(parameters) * rows, columns):
        return {}
    del headers[stack]
    dtype = FILE_DTYPES.get(tensor.dtype, jnp.dtype("int8"))  # `_check` refuses others
    step = math.prod(tensor.shape) // count * dtype.itemsize
    of_each = itertools.product(range(sizes["E"]), parameters)
    return {
        p.tensor.format(layer, e): dataclasses.replace(
            tensor, shape=(rows, columns), start=tensor.start + i * step
        )
        for i, (e, p) in enumerate(of_each)
    }


def _listed(texts: list[str], separator: str) -> str:
    more = f" and {len(texts) - MAX_LISTED} more" if len(texts) > MAX_LISTED else ""
    return separator.join(texts[:MAX_LISTED]) + more


def _check(path, headers, config):
    expected = {name: shape for name, shape, *_ in _tensors(config)}
    if config.tie_embeddings and HEAD.tensor in headers:
        expected[HEAD.tensor] = expected[EMBED.tensor]
    problems = [
        f"missing: {name} {shape}" for name, shape in expected.items() if name not in headers
    ]
    for name, tensor in headers.items():
        shape, file = tensor.shape, tensor.file.name
        if name not in expected and not BUFFERS.search(name):
            problems.append(f"unexpected: {name} {shape} in {file}")
        elif shape != expected.get(name, shape):
            problems.append(
                f"mis-shaped: {name} is {shape} in {file}, but must be {expected[name]}"
            )
        if name in expected and tensor.dtype not in FILE_DTYPES:
            problems.append(
                f"wrong dtype: {name} is {tensor.dtype} in {file}, but must be "
                f"one of {', '.join(FILE_DTYPES)}"
            )
    if problems:
        listed = _listed(problems, "; ")
        raise ValueError(f"{path}: {len(problems)} tensors do not fit the {CONFIG_FILE}: {listed}")


def _check_tied(head, embed):
    both = (_pieces(tensor, tensor.shape, 0, tensor.shape[0]) for tensor in (head, embed))
    if any((a != b).any() for (_, a), (_, b) in zip(*both, strict=True)):
        raise ValueError(
            f"{head.file}: {HEAD.tensor} differs from {EMBED.tensor}, but {CONFIG_FILE} has "
            "tie_word_embeddings true; set it to false to keep both"
        )
