"""A part of the fault test: one kind of fault, injected many times."""

import contextlib
import dataclasses
import importlib
import os
import pathlib
import random
import signal
import socket
from collections.abc import Callable, Iterator

# A module of this package each, in the order of the table; every one has its Part as PART.
NAMES = ("kills", "flips", "inputs", "numbers", "answers", "disks", "processes")
CACHE = "JAX_COMPILATION_CACHE_DIR"
FIRST_PORT, LAST_PORT = 20_000, 30_000  # below those that the kernel gives to connections


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one injected fault.

    fault: what was injected, in a few words. survived: whether the result is bitwise that of an
    undisturbed run, or the program stopped before it computed or saved anything wrong, with all
    that was saved before still there. said: whether a message names the fault; None where there is
    nothing to say. lost: what was lost or went on wrong, "" where nothing was.
    """

    fault: str
    survived: bool
    said: bool | None = None
    lost: str = ""


@dataclasses.dataclass(frozen=True)
class Part:
    """One kind of fault.

    title: its row's name in the table. full, short: how many `make faults` injects, and how many
    tests/test_faults.py does. inject(count, seed, folder): injects so many, the same ones for the
    same seed, with `folder` (empty) for its files, and yields an Outcome for each.
    """

    title: str
    full: int
    short: int
    inject: Callable[[int, int, pathlib.Path], Iterator[Outcome]]


def load(name: str) -> Part:
    """Returns the part of the module of this package with that name."""
    return importlib.import_module(f"experiments.faults.{name}").PART


def compiled(folder: pathlib.Path) -> dict[str, str]:
    """Returns an environment whose processes share their compiled programs, in `folder` if new."""
    return os.environ | {
        CACHE: os.environ.get(CACHE) or str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def free_port() -> int:
    """Returns a port that nobody listens on, nor will by chance before the caller does."""
    while True:
        port = random.randint(FIRST_PORT, LAST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port


def let_children_hear() -> None:
    """Lets processes started from here receive SIGINT and SIGHUP where this one ignores them.

    Behind `nohup` or `&` both are ignored, which children inherit; a handler they do not.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
