"""The only module that knows Orbax: a run's checkpoints, and parameters alone."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from sharding import hosts

SHOWN_DIFFERENCES = 3


class WrongStateError(ValueError):
    """A checkpoint holds other arrays than this run's state, another model's for example."""


class Checkpoints:
    """Checkpoints of (state, progress) in `directory`, named by the number of finished steps.

    Each appears whole or not at all. All processes call `save` and the restores alike; `directory`
    is one that all of them see, a bucket's (gs://...) for instance.

    state: the pytree of arrays, sharded as they are. progress: a JSON-able dict with the host's
    side (prompt cursor, counters, the step's metrics row). The newest `keep` are kept.
    """

    def __init__(self, directory, *, keep: int | None):
        directory = _absolute(directory)
        if hosts.is_main_host():
            directory.mkdir(parents=True, exist_ok=True)
        several = hosts.count() > 1
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=False,
            enable_async_checkpointing=False,
            # A run has its folder to itself; what only reads may see one being written.
            cleanup_tmp_directories=keep is not None,
            # Named processes wait for each other in the key-value store. Else they would on the
            # devices, and a save would have to wait for what those are doing.
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                active_processes=set(range(hosts.count())) if several else None
            ),
        )
        hosts.on_main(lambda: None)  # the directory is there for all
        self._manager = ocp.CheckpointManager(
            directory,
            options=options,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(
                    multiprocessing_options=options.multiprocessing_options
                ),
                "progress": ocp.JsonCheckpointHandler(
                    multiprocessing_options=options.multiprocessing_options
                ),
            },
        )
        self._broken: set[int] = set()

    def save(self, step: int, state: Any, progress: dict) -> bool:
        """Saves, if there is no checkpoint of this step yet. Returns whether it was needed."""
        # Orbax saves no step at or below the newest, so what a resumed run could not read must go.
        while self._broken:
            self._manager.delete(self._broken.pop())
        if step in self._manager.all_steps():
            return False
        return self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(progress)
            ),
            force=True,
        )

    def restore_latest(self, abstract_state: Any, *, report: Callable[[str], None]):
        """Reads (step, state, progress) of the newest readable checkpoint; None without any.

        abstract_state: ShapeDtypeStructs with shardings, the mesh's of this run. A broken newest
        checkpoint is reported, and the one before is taken; the next `save` deletes the broken
        one. Raises ValueError if all are broken, since starting anew would overwrite the run, and
        WrongStateError where the newest readable one is another model's.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        errors = []
        for step in steps:
            try:
                state, progress = self.restore(step, abstract_state)
            except WrongStateError:
                raise
            except Exception as error:
                if not _is_unreadable(error):
                    raise
                report(f"checkpoint {step} cannot be read ({_brief(error)}); trying the one before")
                self._broken.add(step)
                errors.append(error)
            else:
                return step, state, progress
        if steps:
            raise ValueError(
                f"none of the checkpoints {steps} in {self._manager.directory} can be read; give "
                "another --workdir to start anew"
            ) from errors[0]
        return None

    def restore(self, step: int, abstract_state: Any):
        """Reads (state, progress) of one checkpoint.

        Raises FileNotFoundError, which names those there are, for a step without a checkpoint and
        WrongStateError, which names the arrays that differ, for another model's.
        """
        steps = sorted(self._manager.all_steps())
        if step not in steps:
            raise FileNotFoundError(f"there is no checkpoint {step}, only {steps}")
        self._check_structure(step, abstract_state)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract_state), progress=ocp.args.JsonRestore()
            ),
        )
        return restored["state"], restored["progress"]

    def _check_structure(self, step: int, abstract_state: Any) -> None:
        """Compares names, shapes and dtypes: Orbax would cast, or fail as if a file were broken."""
        metadata = self._manager.metadata(step).item_metadata["state"]
        if metadata is None:
            raise FileNotFoundError(f"checkpoint {step} has no description of its arrays")
        there, here = _arrays(metadata.tree), _arrays(abstract_state)
        differing = [
            f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here"
            for name in sorted(there.keys() | here.keys(), key=lambda name: (name.count("."), name))
            if there.get(name) != here.get(name)
        ]
        if differing:
            more = len(differing) - SHOWN_DIFFERENCES
            raise WrongStateError(
                f"checkpoint {step} in {self._manager.directory} is of another model: "
                + "; ".join(differing[:SHOWN_DIFFERENCES])
                + (f"; and {more} more" if more > 0 else "")
                + ". Give the model that it was trained from, or another --workdir"
            )

    @property
    def directory(self) -> epath.Path:
        """The directory that holds the checkpoints."""
        return self._manager.directory

    def latest_step(self) -> int | None:
        """The newest checkpoint's step."""
        return self._manager.latest_step()

    def close(self) -> None:
        """Closes the manager; nothing is saved or restored after this."""
        self._manager.close()


def save_params(path, params) -> None:
    """Writes parameters alone, as an Orbax checkpoint without steps."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(_absolute(path), params)


def restore_params(path, abstract_params, *, dtype: str, check: Callable[[Any], None]):
    """Reads what `save_params` wrote, as NumPy arrays; `check` sees the stored shapes before."""
    path = _absolute(path)
    with ocp.PyTreeCheckpointer() as checkpointer:
        check(checkpointer.metadata(path).item_metadata.tree)
        as_host = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.dtype(dtype)),
            abstract_params,
        )
        restore = ocp.args.PyTreeRestore(item=abstract_params, restore_args=as_host)
        return checkpointer.restore(path, args=restore)


def _absolute(path) -> epath.Path:
    """Makes a path absolute, as Orbax wants it; one with a scheme (gs://) is so already."""
    path = epath.Path(path)
    return path if "://" in str(path) else path.absolute()


def _arrays(tree) -> dict[str, str]:
    """Lists the dtype and shape of every array, by its dotted name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (
            f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        )
        for path, leaf in leaves
    }


def _is_unreadable(error: Exception) -> bool:
    """Tells whether it is what Orbax raises for files that are missing, cut short or malformed.

    A truncated array raises a bare Exception, malformed JSON a ValueError, a missing file an
    OSError and a missing folder a KeyError. Anything else is no fault of the checkpoint.
    """
    return type(error) is Exception or isinstance(error, ValueError | OSError | KeyError)


def _brief(error: Exception) -> str:
    """Shortens an error to its kind and the beginning of its message, which may be pages long."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
