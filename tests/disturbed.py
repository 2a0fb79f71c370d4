"""Real training commands on the small config, for tests that disturb them and give them again."""

import contextlib
import pathlib
import signal
import time
from collections.abc import Callable, Iterator

import runs
from processes import started, wait_for


@contextlib.contextmanager
def training(workdir: pathlib.Path, *flags: str) -> Iterator:
    """Starts a run that saves each step and evaluates nothing; kills it if it is not done."""
    own = ("checkpoint.every_steps=1", "checkpoint.keep=2", "eval.every_steps=0", *flags)
    command = ["-m", "dapo_jax.train", "--config=tests/small_config.py", f"--workdir={workdir}"]
    with started([*command, *(f"--config.{flag}" for flag in own)]) as (process,):
        yield process


def rows_of(workdir: pathlib.Path, *flags: str) -> list[dict]:
    """Gives the command (again) until it is done: its rows, without timings."""
    with training(workdir, *flags) as process:
        output, _ = process.communicate()
    assert process.returncode == 0, output[-2_000:]
    return runs.rows_without_timings(workdir)


def refused(process, code: str) -> None:
    """Waits for the end of a run, which is to be one line with the system's name of an error."""
    output, _ = process.communicate()
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code in line and process.returncode == 1, output
    assert "Traceback" not in output and "Exception ignored" not in output, output


def names(folder: pathlib.Path) -> set[str]:
    """Lists what is in a folder, half-written checkpoints too."""
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def killed(process, *, seconds: float, saving: pathlib.Path | None = None) -> bool:
    """Kills a process after so many seconds; False if it was done before.

    saving: a folder of checkpoints; the seconds count from its next save.
    """
    before = names(saving) if saving else ()
    if saving:
        wait_for(lambda: process.poll() is not None or not names(saving) <= before)
    time.sleep(seconds)
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def has(condition: Callable[[], bool], process) -> None:
    """Waits for a condition, or the end of the process."""
    wait_for(lambda: process.poll() is not None or condition())
