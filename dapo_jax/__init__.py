"""DAPO training in JAX; see README.md."""

import os
import signal
import sys


def _end_at_once(*_) -> None:
    os.write(2, b"SIGINT: stopped while starting, with nothing to save\n")
    os._exit(75)


# `python -m dapo_jax.COMMAND` imports this before the command's own imports, which take seconds and
# would answer Ctrl-C with a traceback; the command listens to signals itself (run/stops.py).
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end_at_once)
