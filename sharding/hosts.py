"""The only place that knows about processes."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def require_one_process() -> None:
    """ValueError where there are several: training on many hosts is not there yet."""
    count = jax.process_count()
    if count > 1:
        raise ValueError(f"{count} processes were started, but training runs in one; use one host")


def is_main_host() -> bool:
    """Whether this process writes the files that all processes would write alike."""
    return jax.process_index() == 0


def place(tree, shardings):
    """Host arrays (equal on every process) as global arrays; each process keeps its own shards.

    `shardings` is one sharding for all arrays, or a tree of them like `tree`.
    """

    def one(array, sharding):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda array: one(array, shardings), tree)
    return jax.tree.map(one, tree, shardings)


def fetch(tree):
    """Global arrays as whole numpy arrays on every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
