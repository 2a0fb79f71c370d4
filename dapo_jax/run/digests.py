"""Digests of arrays, which do not depend on their sharding, and of JSON.

An array's digest is the sum of its elements' bits times an odd factor of their position, modulo
2**64. So shards can be summed anywhere, by any process, and their sums added. Any one changed bit
changes it, since no odd factor has a zero divisor there; of other damage about one in 2**32 goes
unseen. The factor is a product of one factor an axis: memory is read once, and nothing is copied.
"""

import hashlib
import json
from typing import Any

import jax
import numpy as np

MODULUS = 2**64
FACTORS = 2**20  # of the last axes are multiplied out, up to so many


def of_json(value: Any) -> str:
    """Returns the digest of a JSON-able value, whatever the order of its keys."""
    as_read = json.loads(json.dumps(value))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()[:32]


def of_block(block: np.ndarray, starts: tuple[int, ...]) -> int:
    """Returns the part of an array's digest that a block of it has, which begins at `starts`."""
    block = np.ascontiguousarray(block).reshape(block.shape)  # it makes a scalar an array of one
    factors = [
        _factors(axis, *span) for axis, span in enumerate(zip(starts, block.shape, strict=True))
    ]
    split = block.ndim
    last = np.ones(1, np.uint64)
    while split and last.size * block.shape[split - 1] <= max(FACTORS, block.shape[-1]):
        split -= 1
        last = np.multiply.outer(factors[split], last).ravel()
    first = np.ones(1, np.uint64)
    for axis in range(split):
        first = np.multiply.outer(first, factors[axis]).ravel()
    bits = block.view(f"u{block.dtype.itemsize}").reshape(first.size, last.size)
    rows = np.einsum("rc,c->r", bits, last, dtype=np.uint64, casting="unsafe")
    return int(np.einsum("r,r->", rows, first))


def of_whole(array: np.ndarray) -> tuple[tuple[int, ...], int]:
    """Returns a host array's digest as its only part."""
    starts = (0,) * array.ndim
    return starts, of_block(array, starts)


def of_shards(array: jax.Array, *, replicas: bool) -> list[tuple[tuple[int, ...], int]]:
    """Lists (where it begins, its part of the digest) of this process's shards.

    replicas: also of those that other devices have too.
    """
    return [
        (starts, of_block(np.asarray(shard.data), starts))
        for shard in array.addressable_shards
        if replicas or shard.replica_id == 0
        for starts in [tuple(cut.start or 0 for cut in shard.index)]
    ]


def text(total: int) -> str:
    """Writes a sum of parts as a digest."""
    return f"{total % MODULUS:016x}"


def _factors(axis: int, start: int, size: int) -> np.ndarray:
    """Returns odd factors for the positions of an axis (splitmix64)."""
    z = np.arange(start, start + size, dtype=np.uint64)
    z = (z + np.uint64(axis << 48) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)
