"""The only place that knows about processes."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_main_host() -> bool:
    """Whether this process writes the logs, the metrics and the display."""
    return jax.process_index() == 0


def place(tree, sharding):
    """Host arrays (equal on every process) as global arrays; each process keeps its own shards."""

    def one(array):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(one, tree)


def fetch(tree):
    """Global arrays as whole numpy arrays on every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
