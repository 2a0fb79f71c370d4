"""Safetensors files as streams: reading where the library cannot (gs://), and all writing.

The library reads local files alone, and writes a file only from all of its tensors at once; here
they come one by one, so that a host never holds a whole file.
"""

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from etils import epath

from dapo_jax.untrusted import quoted, shown

FILE_DTYPES = {
    "F32": jnp.dtype("float32"),
    "BF16": jnp.dtype("bfloat16"),
    "F16": jnp.dtype("float16"),
}
MAX_HEADER_BYTES = 16 * 2**20  # 100,000 tensors; the library allows 100 MB
MAX_AXES, MAX_FILE_BYTES = 16, 2**62
PIECE_VALUES = 2**22  # read or written at a time


@dataclasses.dataclass(frozen=True)
class StreamedTensor:
    """A tensor that begins at byte `start` of a file; `dtype` is safetensors' name."""

    file: epath.Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int

    def pieces(self, start: int, stop: int, step: int) -> Iterator[np.ndarray]:
        """Reads rows start to stop in order, `step` at a time, through one stream."""
        dtype, row_values = FILE_DTYPES[self.dtype], math.prod(self.shape[1:])
        with self.file.open("rb") as file:
            file.seek(self.start + start * row_values * dtype.itemsize)
            for first in range(start, stop, step):
                count = min(step, stop - first) * row_values
                data = file.read(count * dtype.itemsize)
                if len(data) < count * dtype.itemsize:
                    raise ValueError(f"{self.file} became shorter while it was read")
                yield np.frombuffer(data, dtype).reshape(-1, *self.shape[1:])


def header(file: epath.Path) -> dict[str, StreamedTensor]:
    """Reads which tensors a file has from its beginning; ValueError unless they fill the file."""
    with file.open("rb") as data:
        data.seek(0, os.SEEK_END)
        size = data.tell()
        data.seek(0)
        try:
            length = int.from_bytes(data.read(8), "little")
            _require(8 + length <= size, "its header is cut off")
            _require(length <= MAX_HEADER_BYTES, f"its header has {length} bytes")
            text = data.read(length).decode("utf-8")
            entries = json.loads(text, object_pairs_hook=_without_duplicates)
            _require(isinstance(entries, dict), "its header is no JSON object")
            entries.pop("__metadata__", None)
            tensors, stop = {}, 0
            for name, (shape, dtype, start, end) in sorted(
                ((name, _entry(name, entry)) for name, entry in entries.items()),
                key=lambda item: item[1][2:],
            ):
                gap = f"{shown(name)} begins at byte {start} of the data, not {stop}"
                _require(start == stop, gap)
                tensors[name] = StreamedTensor(file, name, shape, dtype, 8 + length + start)
                stop = end
            _require(8 + length + stop == size, f"its header promises {8 + length + stop} bytes")
        except RecursionError as error:
            raise broken(file, size, "its header is nested too deeply") from error
        except ValueError as error:
            raise broken(file, size, error) from error
    return tensors


def _entry(name: str, entry: object) -> tuple[tuple[int, ...], str, int, int]:
    """Reads (shape, dtype, start, end) of one tensor in a header."""
    _require(isinstance(entry, dict), f"{shown(name)} is {quoted(entry)} in its header")
    shape, dtype, offsets = (entry.get(key) for key in ("shape", "dtype", "data_offsets"))
    for key, numbers in (("shape", shape), ("data_offsets", offsets)):
        holds = isinstance(numbers, list) and len(numbers) <= MAX_AXES
        holds = holds and all(type(n) is int and 0 <= n <= MAX_FILE_BYTES for n in numbers)
        _require(holds, f"{shown(name)} has {key} {quoted(numbers)}")
    _require(isinstance(dtype, str), f"{shown(name)} has dtype {quoted(dtype)}")
    ordered = len(offsets) == 2 and offsets[0] <= offsets[1]
    _require(ordered, f"{shown(name)} has data_offsets {quoted(offsets)}")
    start, end = offsets
    if dtype in FILE_DTYPES:
        nbytes = math.prod(shape) * FILE_DTYPES[dtype].itemsize
        _require(end - start == nbytes, f"{shown(name)} has {end - start} bytes, not {nbytes}")
    return tuple(shape), dtype, start, end


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Makes an object of JSON; readers disagree on which of two equal names counts."""
    value = dict(pairs)
    _require(len(value) == len(pairs), "its header has a name twice")
    return value


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def broken(file: epath.Path, size: int, error: Exception | str) -> ValueError:
    """Makes the error for a file of `size` bytes that is no safetensors file."""
    return ValueError(
        f"{file} ({size} bytes) is no whole safetensors file: {error}; download or export it again"
    )


def write(file: epath.Path, shapes, dtype: np.dtype, tensors: Iterator[np.ndarray]):
    """Writes a file (its header's length, the header, the data) of tensors taken one by one.

    `shapes` has their names and shapes, in their order.
    """
    dtype_name = next(name for name, value in FILE_DTYPES.items() if value == dtype)
    entries, stop = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": dtype_name, "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8, as the format asks
    # Fetched first: no process may still be looking for old files when this one appears.
    first = next(tensors)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in itertools.chain([first], tensors):
            values = tensor.reshape(-1)
            for start in range(0, len(values), PIECE_VALUES):
                out.write(values[start : start + PIECE_VALUES].tobytes())
