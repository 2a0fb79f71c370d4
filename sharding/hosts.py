"""The only place that knows about processes."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_main_host() -> bool:
    """Whether this process writes the logs, the metrics and the display."""
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
