"""Digests of arrays, which do not depend on their sharding.

An array's digest is the sum of its elements' bits times an odd factor of their position, modulo
2**64. So shards can be summed anywhere, by any process, and their sums added. Any one changed bit
changes it, since no odd factor has a zero divisor there; of other damage about one in 2**32 goes
unseen. The factor is a product of one factor an axis: memory is read once, and nothing is copied.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sharding import hosts

MODULUS = 2**64
FACTORS = 2**20  # of the last axes are multiplied out, up to so many


def of_block(block: np.ndarray, starts: tuple[int, ...]) -> int:
    """Returns the part of an array's digest that a block of it has, which begins at `starts`."""
    block = np.ascontiguousarray(block).reshape(block.shape)  # it makes a scalar an array of one
    spans = enumerate(zip(starts, block.shape, strict=True))
    factors = [
        _factors(axis, np.arange(start, start + size, dtype=np.uint64))
        for axis, (start, size) in spans
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
        for starts in [starts_of(shard)]
    ]


def text(total: int) -> str:
    """Writes a sum of parts as a digest."""
    return f"{total % MODULUS:016x}"


def described(state, sums: Mapping[str, Sequence[jax.Array]] | None = None) -> dict:
    """Lists (dtype and shape, digest) of every array, by name; all processes call it.

    sums: `sums_on_devices` of the state; None: computed now.
    """
    sums = sums_on_devices(state) if sums is None else sums
    mine = {name: sum(map(int, parts)) for name, parts in jax.device_get(sums).items()}
    everyone = hosts.gather(mine)
    totals = {name: sum(theirs[name] for theirs in everyone) for name in mine}
    leaves = named(state)
    return {name: (shape_text(it), text(totals[name])) for name, it in leaves.items()}


def sums_on_devices(tree) -> dict[str, list[jax.Array]]:
    """Begins to compute this process's parts of every array's digest where they are.

    The same numbers as of `of_shards`, uint64 each, in one pass over each device's memory. Every
    device works for itself: with an exchange in them, so many programs at once would wait for each
    other's threads on a CPU.
    """
    with jax.enable_x64(True):
        return {
            name: [
                _sum(shard.data, [np.uint64(start) for start in starts_of(shard)])
                for shard in leaf.addressable_shards
                if shard.replica_id == 0
            ]
            for name, leaf in named(tree).items()
        }


@jax.jit  # a program a shape: weights and both moments share it
def _sum(block, starts):
    """Sums a block's bits times the factors of their positions, modulo 2**64."""
    bits = jax.lax.bitcast_convert_type(block, f"u{block.dtype.itemsize}").astype(jnp.uint64)
    for axis, (start, size) in enumerate(zip(starts, block.shape, strict=True)):
        factors = _factors(axis, start + jnp.arange(size, dtype=jnp.uint64))
        # Made once an axis: fused into the sum they would be made again for every element.
        factors = jax.lax.optimization_barrier(factors)
        bits = bits * jnp.expand_dims(factors, [i for i in range(block.ndim) if i != axis])
    return bits.sum()


def starts_of(shard) -> tuple[int, ...]:
    """Returns where a shard begins in its array."""
    return tuple(cut.start or 0 for cut in shard.index)


def named(tree) -> dict[str, Any]:
    """Lists the leaves by their dotted names."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def shape_text(array) -> str:
    """Writes an array's dtype and shape."""
    return f"{np.dtype(array.dtype).name}{list(array.shape)}"


def _factors(axis: int, positions):
    """Returns odd factors for positions of an axis, uint64 each (splitmix64)."""
    z = (positions + np.uint64((axis << 48) + 1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)
