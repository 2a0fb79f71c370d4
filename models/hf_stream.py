"""Safetensors files as streams.

The library reads local files alone (none of gs://), and writes a file only from all of its tensors
at once; here they come one by one, so that a host never holds a whole file.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from etils import epath

FILE_DTYPES = {
    "F32": jnp.dtype("float32"),
    "BF16": jnp.dtype("bfloat16"),
    "F16": jnp.dtype("float16"),
}
PIECE_VALUES = 2**22  # read or written at a time


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor that begins at byte `start` of a file; `dtype` is safetensors' name."""

    file: epath.Path
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
                yield np.frombuffer(data, dtype).reshape(-1, *self.shape[1:])


def header(file: epath.Path) -> dict[str, FileTensor]:
    """Reads which tensors a file has from its beginning; ValueError unless they fill the file."""
    with file.open("rb") as data:
        size = data.seek(0, os.SEEK_END)
        data.seek(0)
        begin = 8 + int.from_bytes(data.read(8), "little")
        try:
            entries = json.loads(data.read(min(begin - 8, size)))
            entries.pop("__metadata__", None)
            tensors, stop = {}, begin
            for name, entry in entries.items():
                first, last = entry["data_offsets"]
                shape, dtype = tuple(entry["shape"]), entry["dtype"]
                tensors[name] = FileTensor(file, shape, dtype, begin + first)
                stop = max(stop, begin + last)
            if stop != size:
                raise ValueError(f"its header promises {stop} bytes")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} ({size} bytes) is no whole safetensors file: {error}; download or export "
                "it again"
            ) from error
    return tensors


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
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            values = tensor.reshape(-1)
            for start in range(0, len(values), PIECE_VALUES):
                out.write(values[start : start + PIECE_VALUES].tobytes())
