"""Snapshots of a run, one after each step at which it can resume: saved if due, or cut short.

SIGTERM, Ctrl-C or SIGHUP (process/signals.py) may come while a program compiles or an update runs
for a minute: a thread of its own has the newest snapshot saved and ends the process (status 75).
Checkpoints are written from copies in the host's memory: a save neither waits for the devices nor
delays them. On a stop a save under way is finished first; a pending checkpoint that is older than
the newest snapshot is left out, since the seconds until the machine is gone are few.

Of several processes the main one puts the step to save next into the key-value store, and all save
that snapshot. A step begins with what all compute together, so none is ahead by more than one: the
named one is among the two that each keeps, or soon will be. Once a stop is under way it alone ends
the process: the main thread, whose collectives fail when the first of the others is gone, waits for
it. A process in which a grader or XLA raises asks the main one for the newest snapshot, and leaves
when all is saved.
"""

import collections
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax.checkpoints.progress import Progress
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.process import failures, hosts, signals

PENDING_CHECKPOINTS = 2  # the one being saved included; `take` waits while there are so many
POLL_SECONDS = 0.5
FAILED = "failed"  # put where a signal's name would be: an exception ends the run
HOST_MEMORY = "pinned_host"  # JAX's kind of the host's memory that devices copy to directly
_copied = functools.partial(jax.tree.map, jnp.copy)  # one function, which JAX compiles once


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """The content of a checkpoint.

    step: the number of finished steps. arrays: the description of each array of the state
    (`digests.of_arrays`), of all processes.
    """

    step: int
    state: Any
    progress: Progress
    arrays: Mapping[str, tuple[str, str]]


class Snapshots:
    """Saves snapshots to `checkpoints`: every so many steps, forced ones, the newest on a stop.

    Use it as a context manager: leaving it waits for pending checkpoints. say: is called with the
    message before a stop ends the process. A failed save is raised by the next `take`, or leaving.
    """

    def __init__(self, checkpoints: Checkpoints, *, every_steps: int, say: Callable[[str], None]):
        self.say = say
        self._checkpoints, self._every_steps = checkpoints, every_steps
        self._pending: collections.deque[Snapshot] = collections.deque()
        self._newest: collections.deque[Snapshot] = collections.deque(maxlen=2)
        self._changed = threading.Condition()
        self._closing = False
        self._stopped: tuple[str, float] | None = None  # by which signal, when it came
        self._error: BaseException | None = None
        self._seconds = 0.0  # of `take`, not yet told

    def __enter__(self) -> "Snapshots":
        self._saver = threading.Thread(target=self._run, name="saver", daemon=True)
        self._saver.start()
        self._stops = signals.Signals(self._stop)
        self._stops.__enter__()
        return self

    def __exit__(self, kind, error, _) -> None:
        self._stops.settle()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if error is not None and not self._stopped:
            self._save_newest()
        # Behind the loss of a peer there is nobody to save with.
        if error is None or self._stopped or not hosts.lost_line(error):
            self._saver.join()
        self._stops.__exit__()
        if self._error and kind is None:
            raise self._error

    def take(
        self, step: int, state: Any, progress: Progress, arrays: Mapping, *, force: bool = False
    ) -> None:
        """Copies the state after so many steps; saved if due, or forced, which it waits for."""
        start = time.monotonic()
        snapshot = Snapshot(step, host_copy(state), progress, arrays)
        with self._changed:
            self._wait_for(lambda: len(self._pending) < PENDING_CHECKPOINTS)
            self._newest.append(snapshot)
            if force or step % self._every_steps == 0:
                self._pending.append(snapshot)
            self._changed.notify_all()
            if force:
                self._wait_for(lambda: snapshot not in self._pending)
        self._seconds += time.monotonic() - start

    def keep(self, step: int) -> None:
        """Saves the snapshot after so many steps, due or not; waits, as a stop leaves it out."""
        with self._changed:
            self._pending.extend(here := [it for it in self._newest if it.step == step])
            self._changed.notify_all()
            self._wait_for(lambda: not {*here} & {*self._pending})

    def spent_seconds(self) -> float:
        """Returns the seconds that `take` had since the last call."""
        spent, self._seconds = self._seconds, 0.0
        return spent

    def _save_newest(self) -> None:
        """Asks for the newest snapshot, due or not: of all processes, the main one decides."""
        if not hosts.is_main_host():
            hosts.kv_put("stop", FAILED)
            return
        with self._changed:
            if self._newest and self._newest[-1] not in self._pending:
                self._pending.append(self._newest[-1])
            self._closing = True
            self._changed.notify_all()

    def _wait_for(self, holds: Callable[[], bool]) -> None:
        """Waits until it holds; raises the error of a failed save."""
        self._changed.wait_for(lambda: holds() or self._error)
        if self._error:
            raise self._error

    def _stop(self, name: str) -> None:
        with self._changed:
            self._stopped = self._stopped or (name, time.monotonic())
            self._changed.notify_all()
        if not hosts.is_main_host():  # the store may not answer, and a signal's listener not wait
            threading.Thread(target=hosts.kv_put, args=("stop", name), daemon=True).start()

    def _run(self) -> None:
        """Runs the saver: it follows one order after the other, the same on every process."""
        try:
            for number in itertools.count():
                what, *arguments = self._shared_order(number).split()
                if what == "close":
                    return
                if what == "stop":
                    self._end(*arguments)
                elif snapshot := self._snapshot(int(arguments[0])):
                    self._save(snapshot)
                else:
                    return  # the error of the main thread ends all
        except Exception as error:
            self._fail(error)

    def _save(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot)
        except Exception as error:
            if hosts.count() > 1:
                raise
            self._error = error  # raised in the run, whose end tries again with the newest one
        with self._changed:
            if snapshot in self._pending:
                self._pending.remove(snapshot)
            self._changed.notify_all()

    def _write(self, snapshot: Snapshot) -> bool:
        progress = snapshot.progress.to_json()
        return self._checkpoints.save(snapshot.step, snapshot.state, progress, snapshot.arrays)

    def _fail(self, error: Exception) -> None:
        """Ends all processes: they wait for each other in a save, so none can go on without one."""
        lost = hosts.lost_line(error)
        line, status = (lost, hosts.RETRYABLE) if lost else failures.explain(error)
        if self._stopped:
            line = f"{self._stopped[0]}: the newest step to resume at could not be saved: {line}"
            hosts.end(line, hosts.RETRYABLE)
        hosts.end(lost or f"error: {line}", status)

    def _end(self, name: str, step: str = "") -> None:
        with self._changed:
            self._stopped = self._stopped or (name, time.monotonic())
        message = "no step to resume at is finished since the start: there is nothing to save"
        if step:
            saved = self._write(self._snapshot(int(step)))
            seconds = time.monotonic() - self._stopped[1]
            when = f"after {seconds:.1f} s" if saved else "they were before"
            message = f"{step} finished steps are saved ({when}); give the command again"
        # Only the main process has a display: the others say it as well, for their own logs.
        say = self.say if hosts.is_main_host() else None
        hosts.leave(f"{name}: {message}", hosts.RETRYABLE, say=say)

    def _order(self) -> str:
        """Gives the main host's next order: `save STEP`, `stop NAME [STEP]` or `close`."""
        while True:
            with self._changed:
                if self._stopped:
                    step = self._newest[-1].step if self._newest else ""
                    return f"stop {self._stopped[0]} {step}".strip()
                if self._pending:
                    return f"save {self._pending[0].step}"
                if self._closing:
                    return "close"
                self._changed.wait(POLL_SECONDS)
            if (name := hosts.kv_get("stop", wait_seconds=0)) == FAILED:
                self._save_newest()
            elif name is not None:
                self._stop(name)

    def _shared_order(self, number: int) -> str:
        """Gives the main host's order of that number, on every process."""
        name, order = f"order/{number}", self._order() if hosts.is_main_host() else None
        if order:
            hosts.kv_put(name, order)
        while not order:
            order = hosts.kv_get(name, wait_seconds=60)
        return order

    def _snapshot(self, step: int) -> Snapshot | None:
        """Waits until this process has taken that step's snapshot; None where it ends before."""
        with self._changed:

            def known():
                return next((b for b in (*self._pending, *self._newest) if b.step == step), None)

            self._changed.wait_for(lambda: known() or self._closing)
            return known()


def host_copy(state):
    """Copies arrays into the host's memory that devices can write to.

    The copy survives the donation of `state`, and takes no memory of an accelerator.
    """
    on_host = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind(HOST_MEMORY), state)
    return jax.jit(_copied, out_shardings=on_host)(state)
