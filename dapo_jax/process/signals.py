"""Signals that stop a command: SIGTERM, Ctrl-C (SIGINT) and a closed terminal (SIGHUP).

The first one stops it in order, which ends with status 75: the same command can go on. A second
Ctrl-C ends it at once, with status 130. A signal that the process was started to ignore (nohup, or
a shell's background job) stays ignored.
"""

import os
import signal
import threading
import time
from collections.abc import Callable

from dapo_jax.process import hosts

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
AGAIN_SECONDS = 1.0  # a terminal and a launcher may both send what was one Ctrl-C
SETTLE = 0  # no signal has this number
AT_ONCE = 128 + signal.SIGINT


class Signals:
    """Calls `stop`, which may not wait, with the first signal's name; the main thread enters it.

    A thread of its own listens: the main one may be in a compiler or wait for devices for minutes.
    Inside another one, this one has the signals until it is left. A process that is forked inside,
    as by a tool that limits code, has Python's own handlers.
    """

    def __init__(self, stop: Callable[[str], None]):
        self._stop = stop
        self._first_at: float | None = None
        self._settled = threading.Event()

    def __enter__(self) -> "Signals":
        self._signals, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        # A handler in Python waits until the interpreter runs again; the pipe is written at once.
        self._former_fd = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._former = {
            number: signal.signal(number, _noted)
            for number in SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        self._listener = threading.Thread(target=self._listen, name="listener", daemon=True)
        self._listener.start()
        return self

    def __exit__(self, *_) -> None:
        signal.set_wakeup_fd(self._former_fd)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        os.close(self._wakeup)  # which ends the listener
        self._listener.join()
        os.close(self._signals)

    def settle(self) -> None:
        """Returns when the signals that have come are taken."""
        os.write(self._wakeup, bytes([SETTLE]))
        self._settled.wait()

    def _listen(self) -> None:
        while numbers := os.read(self._signals, 64):
            for number in numbers:
                self._take(number)

    def _take(self, number: int) -> None:
        now = time.monotonic()
        if self._first_at is None and number in SIGNALS:
            self._first_at = now
            self._stop(signal.Signals(number).name)
        elif number == SETTLE:
            self._settled.set()
        elif number == signal.SIGINT and now - self._first_at > AGAIN_SECONDS:
            os.write(2, b"SIGINT again: ended at once, without a save\n")
            os._exit(AT_ONCE)


def _noted(*_) -> None:
    """Is the handler in Python: the pipe has the signal already."""


def _forget_in_child() -> None:
    """Gives a forked process Python's own handlers: the pipe is its parent's."""
    for number in SIGNALS:
        if signal.getsignal(number) is _noted:
            signal.set_wakeup_fd(-1)
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)


def end_command(name: str) -> None:
    """Ends a command that has nothing to save, and the processes it runs with, in one line."""
    hosts.end(f"{name}: stopped, with nothing to save; give the command again", hosts.RETRYABLE)
