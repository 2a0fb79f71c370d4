"""Snapshots of a run after each step: saved when due, and the newest one when SIGTERM comes.

SIGTERM may come at any time, while a program compiles or an update runs for a minute. A thread of
its own listens for it, has the newest snapshot saved and ends the process (status 75). Checkpoints
are written from copies in the host's memory: a save neither waits for the devices nor delays them.
On SIGTERM a save under way is finished first; a pending checkpoint that is older than the newest
snapshot is left out, since the seconds until the machine is gone are few.

Of several processes the main one leads: it puts the step to save next into the key-value store,
and all save that snapshot. A process is ahead of another by one snapshot at most, since a step
begins with what all compute together: whoever keeps two has the one that is named, or soon will.
"""

import collections
import dataclasses
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax.run.checkpoint import Checkpoints
from sharding import hosts

PENDING_CHECKPOINTS = 2  # the one being saved included; `take` waits while there are so many
POLL_SECONDS = 0.5
HOST_MEMORY = "pinned_host"  # JAX's kind of the host's memory that devices copy to directly


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """What a checkpoint holds; `step` is the number of finished steps."""

    step: int
    state: Any
    progress: dict


class Snapshots:
    """Saves snapshots to `checkpoints`: every so many steps, forced ones, the newest on SIGTERM.

    Use it as a context manager: leaving it waits for pending checkpoints. say: is called with the
    message before SIGTERM ends the process. The next `take`, or leaving, raises what a save raised.
    """

    def __init__(self, checkpoints: Checkpoints, *, every_steps: int, say: Callable[[str], None]):
        self.say = say
        self._checkpoints, self._every_steps = checkpoints, every_steps
        self._pending: collections.deque[Snapshot] = collections.deque()
        self._newest: collections.deque[Snapshot] = collections.deque(maxlen=2)
        self._changed = threading.Condition()
        self._closing = False
        self._stopped_at: float | None = None  # when SIGTERM came
        self._error: BaseException | None = None
        self._orders = 0

    def __enter__(self) -> "Snapshots":
        self._saver = threading.Thread(target=self._run, name="saver", daemon=True)
        self._saver.start()
        self._signals, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        # A handler in Python waits until the interpreter runs again; the pipe is written at once.
        self._former_fd = signal.set_wakeup_fd(self._wakeup)
        self._former_handler = signal.signal(signal.SIGTERM, lambda *_: None)
        self._listener = threading.Thread(target=self._listen, name="listener", daemon=True)
        self._listener.start()
        return self

    def __exit__(self, kind, *error) -> None:
        signal.set_wakeup_fd(self._former_fd)
        signal.signal(signal.SIGTERM, self._former_handler)
        os.close(self._wakeup)  # which ends the listener
        self._listener.join()
        os.close(self._signals)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if kind is None or hosts.count() == 1:  # else the leader may be gone
            self._saver.join()
        if kind is None:
            self._raise_error()

    def take(self, step: int, state: Any, progress: dict, *, force: bool = False) -> None:
        """Copies the state after `step` finished steps; saved if due, forced, or on SIGTERM."""
        snapshot = Snapshot(step, host_copy(state), progress)
        with self._changed:
            self._changed.wait_for(lambda: len(self._pending) < PENDING_CHECKPOINTS or self._error)
            self._raise_error()
            self._newest.append(snapshot)
            if force or step % self._every_steps == 0:
                self._pending.append(snapshot)
            self._changed.notify_all()

    def save_newest_after(self, kind, error, trace) -> None:
        """Has the newest snapshot saved, due or not, where a failed write of a file ends the run.

        To be pushed onto the stack that leaves these snapshots. With several processes the others
        are ended and cannot save with this one.
        """
        if isinstance(error, OSError) and hosts.count() == 1:
            with self._changed:
                if self._newest and self._newest[-1] not in self._pending:
                    self._pending.append(self._newest[-1])

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _listen(self) -> None:
        while signals := os.read(self._signals, 64):
            if signal.SIGTERM in signals:
                self._stop()

    def _stop(self) -> None:
        hosts.kv_put("stop", "SIGTERM")
        with self._changed:
            self._stopped_at = self._stopped_at or time.monotonic()
            self._changed.notify_all()

    def _run(self) -> None:
        """Runs the saver: it follows one order after the other, the same on every process."""
        try:
            while (order := self._next_order()) != "close":
                what, _, step = order.partition(" ")
                if what == "stop":
                    self._stopped_at = self._stopped_at or time.monotonic()
                saved = bool(step) and self._save(self._snapshot(int(step)))
                if what == "stop":
                    self._end(step, saved)
        except BaseException as error:
            if self._stopped_at is not None:
                self._exit(f"SIGTERM: the last finished step could not be saved: {error!r}")
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _save(self, snapshot: Snapshot) -> bool:
        saved = self._checkpoints.save(snapshot.step, snapshot.state, snapshot.progress)
        with self._changed:
            if snapshot in self._pending:
                self._pending.remove(snapshot)
            self._changed.notify_all()
        return saved

    def _end(self, step: str, saved: bool) -> None:
        if not step:
            self._exit("SIGTERM: no step was finished since the start: there is nothing to save")
        when = f"after {time.monotonic() - self._stopped_at:.1f} s" if saved else "they were before"
        self._exit(f"SIGTERM: {step} finished steps are saved ({when}); give the command again")

    def _exit(self, message: str) -> None:
        if hosts.is_main_host():
            self.say(message)
            sys.stdout.flush()
            time.sleep(
                1.0 if hosts.count() > 1 else 0.0
            )  # the store ends with it: the others go first
        os._exit(hosts.RETRYABLE)

    def _next_order(self) -> str:
        return self._order() if hosts.is_main_host() else self._received_order()

    def _order(self) -> str:
        """Gives the main host's next order: `save STEP`, `stop STEP`, `stop` or `close`."""
        while True:
            with self._changed:
                if self._stopped_at is not None:
                    order = f"stop {self._newest[-1].step}" if self._newest else "stop"
                elif self._pending:
                    order = f"save {self._pending[0].step}"
                elif self._closing:
                    order = "close"
                else:
                    self._changed.wait(POLL_SECONDS)
                    order = None
            if order is not None:
                hosts.kv_put(f"order/{self._orders}", order)
                self._orders += 1
                return order
            if hosts.kv_get("stop", wait_seconds=0) is not None:
                self._stop()

    def _received_order(self) -> str:
        """Waits for the main host's next order."""
        while (order := hosts.kv_get(f"order/{self._orders}", wait_seconds=60)) is None:
            pass
        self._orders += 1
        return order

    def _snapshot(self, step: int) -> Snapshot:
        """Waits until this process has taken that step's snapshot, and returns it."""
        with self._changed:

            def known():
                return next((b for b in (*self._pending, *self._newest) if b.step == step), None)

            self._changed.wait_for(known)
            return known()


def host_copy(state):
    """Copies arrays, where there is one into the host's memory that devices can write to.

    The copy survives the donation of `state`, and takes no memory of an accelerator.
    """

    def on_host(sharding):
        device = next(iter(sharding.addressable_devices))
        kinds = {memory.kind for memory in device.addressable_memories()}
        return sharding.with_memory_kind(HOST_MEMORY) if HOST_MEMORY in kinds else sharding

    shardings = jax.tree.map(lambda leaf: on_host(leaf.sharding), state)
    leaves, structure = jax.tree.flatten(shardings)
    return _copy(structure, tuple(leaves))(state)


@functools.cache
def _copy(structure, shardings):
    def copy(state):
        return jax.tree.map(jnp.copy, state)

    return jax.jit(copy, out_shardings=jax.tree.unflatten(structure, shardings))
