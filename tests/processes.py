"""Processes that tests start: a program to its end, one that runs on several hosts, limits."""

import contextlib
import os
import pathlib
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from dapo_jax.process import hosts

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIRST_PORT, LAST_PORT = 20_000, 30_000  # below those that the kernel gives to connections


def free_port() -> int:
    """Returns a port that nobody listens on, nor will by chance before the caller does."""
    while True:
        port = random.randint(FIRST_PORT, LAST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port


def wait_for(ready: Callable[[], bool], *, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.01)


@contextlib.contextmanager
def small_files(size: int) -> Iterator[None]:
    """Lets no file of this process, and of those that it starts, grow over so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def ran(*arguments: object, status: int | None = 0, cwd=ROOT, **environment: str):
    """Runs `python ARGUMENTS` to its end; it has to have this status, None for any."""
    command = [sys.executable, *map(str, arguments)]
    env = os.environ | environment
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert status in (None, done.returncode), f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@contextlib.contextmanager
def started(
    arguments: list[str], *, program=(sys.executable,), processes: int = 1, outputs=(), stdin=None
) -> Iterator[list]:
    """Starts a program (Python) once, or as so many processes that join; kills what is left.

    outputs: the files that the processes write to, pipes by default. Each process counts its CPUs
    as so many devices as the program says, not as conftest.py does.
    """
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
    if processes > 1:
        env |= {hosts.COORDINATOR: f"localhost:{free_port()}", hosts.PROCESSES: str(processes)}
        # JAX keeps the programs of process 0 alone. It would wait for the others, which compile,
        # and gloo allows them 30 seconds.
        env |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    with contextlib.ExitStack() as stack:
        group = []
        for i, output in enumerate(outputs or [subprocess.PIPE] * processes):
            mine = {hosts.PROCESS: str(i)} if processes > 1 else {}
            process = subprocess.Popen(
                [*program, *arguments],
                cwd=ROOT,
                env=env | mine,
                text=True,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            group.append(process)
        yield group
