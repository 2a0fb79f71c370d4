"""Digests of arrays, which do not depend on their sharding.

An array's digest is the sum of its elements' bits times an odd factor of their position, modulo
2**64. So shards can be summed anywhere, by any process, and their sums added. Any one changed bit
changes it, since no odd factor has a zero divisor there; of other damage about one in 2**32 goes
unseen. The factor is a product of one factor an axis: memory is read once, and nothing is copied.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.learner import named
from dapo_jax.process import hosts

# Where a shard begins in its array, and its part of the array's digest.
Part = tuple[tuple[int, ...], int]


def of_arrays(state) -> dict:
    """Lists (dtype and shape, digest) of every array, by name; all processes call it."""
    mine = {name: sum(it for _, it in parts) for name, parts in parts_of(state).items()}
    everyone = hosts.gather(mine)
    return {
        name: (shape_text(leaf), text(sum(theirs[name] for theirs in everyone)))
        for name, leaf in named(state).items()
    }


def parts_of(tree, *, replicas: bool = False) -> dict[str, list[Part]]:
    """Computes this process's parts of every array's digest, where the arrays are.

    replicas: also of shards that other devices have too. Each device's memory is read once. Every
    device works for itself: with an exchange in them, so many programs at once would wait for each
    other's threads on a CPU.
    """

    def part(shard):
        starts = tuple(cut.start or 0 for cut in shard.index)
        placed = jax.device_put(np.array(starts, np.uint64), shard.device)
        return starts, _sum(shard.data, placed)

    with jax.enable_x64(True):
        sums = {
            name: [part(it) for it in leaf.addressable_shards if replicas or it.replica_id == 0]
            for name, leaf in named(tree).items()
        }
    # All at once, when every device has begun.
    found = jax.device_get(sums).items()
    return {name: [(starts, int(part)) for starts, part in parts] for name, parts in found}


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


def _factors(axis: int, positions):
    """Returns odd factors for positions of an axis, uint64 each (splitmix64)."""
    z = (positions + np.uint64((axis << 48) + 1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def text(total: int) -> str:
    """Writes a sum of parts as a digest."""
    return f"{total % 2**64:016x}"


def shape_text(array) -> str:
    """Writes an array's dtype and shape."""
    return f"{np.dtype(array.dtype).name}{list(array.shape)}"
