"""Workers: fresh interpreters beside the run's own, for what may have to be ended."""

import json
import signal
import sys

# Forking is unsafe beside JAX's threads, and multiprocessing's own "spawn" would import the main
# module, and JAX with it, again in every worker.
_PROGRAM = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
importlib.import_module(sys.argv[2]).serve(*map(int, sys.argv[3:]))
"""


def command(module: str, *numbers: int) -> list[str]:
    """Gives the command of an interpreter that runs a module's `serve(*numbers)`."""
    path = json.dumps([str(place) for place in sys.path])
    return [sys.executable, "-P", "-W", "ignore", "-c", _PROGRAM, path, module, *map(str, numbers)]


def ends_at(number: signal.Signals) -> None:
    """Lets a signal end this process, though the run that began it may ignore or block it."""
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
