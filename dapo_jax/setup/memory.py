"""The bytes that a device holds in each phase of a step, as shapes and shardings say it.

The rounded copies and activations inside compiled programs are the compiler's to tell; preflight
adds them.
"""

import math
from collections.abc import Iterator, Mapping

import jax

from dapo_jax import learner
from dapo_jax.setup import components

MIB = 2**20
CACHE = "keys and values"


def device_bytes(tree) -> int:
    """Counts the bytes of ShapeDtypeStructs with shardings on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def device_limit() -> int | None:
    """Returns the bytes of a device that programs may take; None for a CPU, which tells of none."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def phases(p: components.Programs) -> dict[str, dict[str, int]]:
    """Returns phase of a step -> what a device holds in it -> bytes; updates of the longest rows.

    In "reshard" the sampler's weights are made. With partial rollouts the cache is never given up.
    """
    batch = learner.abstract_batch(p.settings, learner.row_lengths(p.settings)[-1], p.mesh)
    state = {"state": device_bytes(p.state), "start weights": device_bytes(p.start_weights)}
    weights = {"sampler's weights": device_bytes(p.engine.params)}
    cache = {CACHE: device_bytes(p.engine.pages)}
    kept = cache if p.config.rollout.partial_rollout_steps else {}
    update = {"gradients": device_bytes(p.state.params), "batch": device_bytes(batch)}
    return {
        "reshard": state | weights | kept,
        "rollout": state | weights | cache,
        "update": state | update | kept,
    }


def beside_cache(p: components.Programs) -> int:
    """Counts the bytes of a device that the cache of training has to leave."""
    parts = {}
    for held in phases(p).values():
        parts |= held if CACHE in held else {}
    return sum(parts.values()) - parts[CACHE]


def lines(phases: Mapping[str, Mapping[str, int]], unit: int) -> Iterator[str]:
    """Says what a device holds in each phase."""
    for phase, parts in phases.items():
        sizes = "  ".join(f"{part} {size / unit:,.2f}" for part, size in parts.items() if size)
        yield f"  {phase:10}{sum(parts.values()) / unit:11,.2f}  =  {sizes}"
