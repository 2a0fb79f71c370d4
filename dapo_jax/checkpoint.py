"""The only module that knows Orbax: a run's checkpoints, written atomically in the background."""

import pathlib
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp


class Checkpoints:
    """Checkpoints of (state, progress) in `directory`, named by the rollout step they follow.

    state: the pytree of arrays, sharded as they are. progress: a JSON-able dict with the host's
    side (prompt cursor, counters, the step's metrics row). The newest `keep` are kept.
    """

    def __init__(self, directory, *, every_steps: int, keep: int):
        options = ocp.CheckpointManagerOptions(
            save_interval_steps=every_steps, max_to_keep=keep, enable_async_checkpointing=True
        )
        self._manager = ocp.CheckpointManager(
            pathlib.Path(directory).absolute(),
            options=options,
            item_names=("state", "progress"),
        )

    def save(self, step: int, state: Any, progress: dict, *, force: bool = False) -> bool:
        """Save if `step` is due, or `force`d and not saved yet. Returns whether it was."""
        if step in self._manager.all_steps():
            return False
        return self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(progress)
            ),
            force=force,
        )

    def restore_latest(self, abstract_state: Any, *, report: Callable[[str], None]):
        """(step, state, progress) of the newest checkpoint that can be read; None without any.

        abstract_state: ShapeDtypeStructs with shardings, the mesh's of this run. A broken newest
        checkpoint is reported and the one before is taken; if all are broken, the newest one's
        error is raised, since starting anew would overwrite the run.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        errors = []
        for step in steps:
            try:
                return step, *self.restore(step, abstract_state)
            except (ValueError, OSError, KeyError) as error:
                errors.append(error)
                report(f"checkpoint {step} cannot be read ({error}); trying the one before")
        if errors:
            raise errors[0]
        return None

    def restore(self, step: int, abstract_state: Any):
        """(state, progress) of one checkpoint; FileNotFoundError names those there are."""
        steps = sorted(self._manager.all_steps())
        if step not in steps:
            raise FileNotFoundError(f"there is no checkpoint {step}, only {steps}")
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract_state), progress=ocp.args.JsonRestore()
            ),
        )
        return restored["state"], restored["progress"]

    def latest_step(self) -> int | None:
        """The newest checkpoint's step."""
        return self._manager.latest_step()

    def close(self) -> None:
        """Wait until the last checkpoint is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()
