"""States to save and to find again, and what restores them as a new process does."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.checkpoints import digests
from dapo_jax.checkpoints.progress import Progress
from dapo_jax.checkpoints.snapshots import Snapshots
from dapo_jax.checkpoints.store import Checkpoints
from sharding.mesh import make_mesh

EVERYWHERE = PartitionSpec()
LARGE = 128  # Orbax keeps arrays of this width in files of their own, small ones in its index


def state_at(step: int, *, spec=EVERYWHERE, mesh=None) -> dict:
    """Makes a state in which every array depends on the step."""
    rng = np.random.default_rng(step)
    mesh = make_mesh(data=4, model=1) if mesh is None else mesh
    arrays = {
        "params": {
            "embed_VD": rng.normal(size=(LARGE, LARGE)).astype(np.float32),
            "norm_D": rng.normal(size=4).astype(np.float32),
        },
        "moments": {"embed_VD": rng.normal(size=(LARGE, LARGE)).astype(jnp.bfloat16)},
        "count": np.int32(step),
    }

    def place(leaf):
        return jax.device_put(leaf, NamedSharding(mesh, spec if leaf.ndim == 2 else EVERYWHERE))

    return jax.tree.map(place, arrays)


def progress_at(step: int) -> dict:
    return {"cursor": 48 * step, "row": {"step": step - 1, "reward/mean": step / 7}}


def abstract(state):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def assert_bitwise_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def fail(message):
    raise AssertionError(f"nothing was to be reported: {message}")


def saved(folder, *steps, keep=3) -> Checkpoints:
    """Saves these steps, and returns the open checkpoints."""
    checkpoints = Checkpoints(folder, keep=keep)
    for step in steps:
        assert checkpoints.save(step, state_at(step), progress_at(step))
    return checkpoints


def restored(folder, report=fail):
    """(step, state, progress) of the newest checkpoint, as a new process finds it."""
    return Checkpoints(folder, keep=3).restore_latest(abstract(state_at(0)), report=report)


def assert_restored(found, step: int) -> None:
    """Asserts that all that was found is what `saved` saved of a step."""
    assert (found[0], found[2]) == (step, progress_at(step))
    assert_bitwise_equal(found[1], state_at(step))


def snapshots(folder, *, every_steps: int, of=Checkpoints) -> Snapshots:
    return Snapshots(of(folder, keep=None), every_steps=every_steps, say=print)


def take(run: Snapshots, step: int, state, *, cursor: int = 0, force: bool = False) -> None:
    """Takes a snapshot of a state, as a finished step does."""
    run.take(step, state, Progress(cursor=cursor), digests.of_arrays(state), force=force)
