"""A run's step boundaries: saved when due, and the last one when the run is told to stop.

SIGTERM may come at any time, while a program compiles or an update runs for a minute. A thread
of its own hears it, saves the newest boundary and ends the process (status 75); it saves from
copies in the host's memory, so that it neither waits for what the devices do nor is waited for.

Of several processes the main one leads: it leaves a note which boundary is saved next, and all
save that one. A process is ahead of another by one boundary at most, since a step begins with what
all compute together: whoever keeps two has the one that the main host names, or soon will.
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

WAITING_SAVES = 2  # due boundaries that may wait for the one being saved
POLL_SECONDS = 0.5


@dataclasses.dataclass(frozen=True, eq=False)
class Boundary:
    """What a checkpoint holds; `step` is the number of finished steps."""

    step: int
    state: Any
    progress: dict


class Boundaries:
    """Saves step boundaries to `checkpoints`: every so many steps, the forced ones, and the last.

    say: what becomes of a message, where SIGTERM ends the process. A failed save is raised by the
    next call.
    """

    def __init__(self, checkpoints: Checkpoints, *, every_steps: int, say: Callable[[str], None]):
        self.say = say
        self._checkpoints, self._every_steps = checkpoints, every_steps
        self._due: collections.deque[Boundary] = collections.deque()
        self._last: collections.deque[Boundary] = collections.deque(maxlen=2)
        self._changed = threading.Condition()
        self._closing = False
        self._stopped_at: float | None = None  # when SIGTERM came
        self._error: BaseException | None = None
        self._orders = 0

    def __enter__(self) -> "Boundaries":
        self._saver = threading.Thread(target=self._run, name="saver", daemon=True)
        self._saver.start()
        self._heard, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        # The interpreter's own handler waits for Python code; the pipe is written at once.
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
        os.close(self._heard)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if kind is None or hosts.count() == 1:  # else the leader may be gone
            self._saver.join()
        if kind is None:
            self._raise_error()

    def passed(self, step: int, state: Any, progress: dict, *, force: bool = False) -> None:
        """`step` steps are finished: keep a copy, to be saved if it is due or if SIGTERM comes."""
        boundary = Boundary(step, host_copy(state), progress)
        with self._changed:
            self._changed.wait_for(lambda: len(self._due) < WAITING_SAVES or self._error)
            self._raise_error()
            self._last.append(boundary)
            if force or step % self._every_steps == 0:
                self._due.append(boundary)
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _listen(self) -> None:
        while signals := os.read(self._heard, 64):
            if signal.SIGTERM in signals:
                self._stop()

    def _stop(self) -> None:
        hosts.tell("stop", "SIGTERM")
        with self._changed:
            self._stopped_at = self._stopped_at or time.monotonic()
            self._changed.notify_all()

    def _run(self) -> None:
        """The saver: one order after the other, the same ones on every process."""
        try:
            while (order := self._next_order()) != "close":
                what, _, step = order.partition(" ")
                if what == "stop":
                    self._stopped_at = self._stopped_at or time.monotonic()
                saved = bool(step) and self._save(self._boundary(int(step)))
                if what == "stop":
                    self._end(step, saved)
        except BaseException as error:
            if self._stopped_at is not None:
                self._exit(f"SIGTERM: the last boundary could not be saved: {error!r}")
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _save(self, boundary: Boundary) -> bool:
        saved = self._checkpoints.save(boundary.step, boundary.state, boundary.progress)
        with self._changed:
            if boundary in self._due:
                self._due.remove(boundary)
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
            time.sleep(1.0 if hosts.count() > 1 else 0.0)  # it has the notes: the others go first
        os._exit(hosts.COME_AGAIN)

    def _next_order(self) -> str:
        return self._order() if hosts.is_main_host() else self._heard_order()

    def _order(self) -> str:
        """The main host's next order: `save STEP`, `stop STEP`, `stop` or `close`."""
        while True:
            with self._changed:
                if self._stopped_at is not None:
                    order = f"stop {self._last[-1].step}" if self._last else "stop"
                elif self._due:
                    order = f"save {self._due[0].step}"
                elif self._closing:
                    order = "close"
                else:
                    self._changed.wait(POLL_SECONDS)
                    order = None
            if order is not None:
                hosts.tell(f"order/{self._orders}", order)
                self._orders += 1
                return order
            if hosts.told("stop", wait_seconds=0) is not None:
                self._stop()

    def _heard_order(self) -> str:
        """The main host's next order, as the others hear it."""
        while (order := hosts.told(f"order/{self._orders}", wait_seconds=60)) is None:
            pass
        self._orders += 1
        return order

    def _boundary(self, step: int) -> Boundary:
        """That one, which this process may still be on its way to."""
        with self._changed:

            def known():
                return next((b for b in (*self._due, *self._last) if b.step == step), None)

            self._changed.wait_for(known)
            return known()


def host_copy(state):
    """A copy that no donation deletes, in the host's memory where devices have another one."""

    def kept(sharding):
        on_host = {memory.kind for memory in _device(sharding).addressable_memories()}
        if _device(sharding).platform == "cpu" or "pinned_host" not in on_host:
            return sharding
        return sharding.with_memory_kind("pinned_host")

    shardings = jax.tree.map(lambda leaf: kept(leaf.sharding), state)
    leaves, structure = jax.tree.flatten(shardings)
    return _copy(structure, tuple(leaves))(state)


def _device(sharding):
    return next(iter(sharding.addressable_devices))


@functools.cache
def _copy(structure, shardings):
    def copy(state):
        return jax.tree.map(jnp.copy, state)

    return jax.jit(copy, out_shardings=jax.tree.unflatten(structure, shardings))
