"""DAPO training in JAX; see README.md."""

import os
import signal
import sys


def _end_at_once(number: int, _) -> None:
    name = signal.Signals(number).name
    os.write(2, f"{name}: stopped, with nothing to save\n".encode())
    os._exit(75)


# `python -m dapo_jax.COMMAND` imports this before the command's own imports, which take seconds and
# would answer Ctrl-C with a traceback; after them the command listens itself (run/stops.py).
if sys.argv[:1] == ["-m"]:
    for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(_number) is not signal.SIG_IGN:
            signal.signal(_number, _end_at_once)
