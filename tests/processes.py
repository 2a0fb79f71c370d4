"""Starts the processes of a program that runs on several hosts, here all on this one."""

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

from experiments.faults.parts import free_port
from sharding import hosts

ROOT = pathlib.Path(__file__).resolve().parent.parent


def ran(*arguments: object, status: int | None = 0, cwd=ROOT, **environment: str):
    """Runs `python ARGUMENTS` to its end; it has to have this status, None for any."""
    command = [sys.executable, *map(str, arguments)]
    env = os.environ | environment
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert status in (None, done.returncode), f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@contextlib.contextmanager
def started(
    arguments: list[str], *, processes: int = 1, outputs=(), stdin=None, more=None
) -> Iterator[list]:
    """Starts `python ARGUMENTS` once, or as so many processes that join; kills what is left.

    outputs: the files that the processes write to, pipes by default. more: variables beside those
    of this process. Each process counts its devices as the program says, not as conftest.py does.
    """
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"PYTHONPATH": str(ROOT)} | (more or {})
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
                [sys.executable, *arguments],
                cwd=ROOT,
                env=env | mine,
                text=True,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.kill)
            group.append(process)
        yield group
