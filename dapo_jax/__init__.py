"""DAPO training in JAX; see README.md."""

import os
import signal
import sys


def _end_at_once(number: int, _) -> None:
    name = signal.Signals(number).name
    os.write(2, f"{name}: stopped, with nothing to save\n".encode())
    os._exit(75)


def _is_starting_a_command() -> bool:
    """Whether `python -m dapo_jax.COMMAND` imports this, and not another program or its package."""
    words = (word.removeprefix("-m") for word in sys.orig_argv)
    return sys.argv[:1] == ["-m"] and any(word.startswith("dapo_jax.") for word in words)


# The command's own imports, which come next, take seconds and would answer Ctrl-C with a traceback;
# after them the command listens itself (run/stops.py).
if _is_starting_a_command():
    for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(_number) is not signal.SIG_IGN:
            signal.signal(_number, _end_at_once)
