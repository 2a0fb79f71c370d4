"""DAPO training in JAX; see README.md."""

import os
import signal
import sys


def _end_at_once(number: int, _) -> None:
    name = signal.Signals(number).name
    os.write(2, f"{name}: stopped, with nothing to save\n".encode())
    os._exit(75)


def _starting_command() -> str | None:
    """Returns X where `python -m X` imports this for X = dapo_jax.COMMAND, and no other program."""
    words = (word.removeprefix("-m") for word in sys.orig_argv)
    found = (word for word in words if word.startswith("dapo_jax."))
    return next(found, None) if sys.argv[:1] == ["-m"] else None


# The command's own imports, which come next, take seconds and would answer Ctrl-C with a traceback;
# after them the command listens itself (run/stops.py).
if _command := _starting_command():
    for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(_number) is not signal.SIG_IGN:
            signal.signal(_number, _end_at_once)

    from dapo_jax import opening

    opening.begin(_command, sys.argv[1:])
