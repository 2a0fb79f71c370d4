"""Runs the points of a sweep, each in its own process: some at once, stopped, resumed and retried.

Host only.
"""

import collections
import concurrent.futures
import contextlib
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape

from dapo_jax.logs.display import format_duration
from dapo_jax.logs.files import read_rows
from dapo_jax.printable import printable
from dapo_jax.sweep.plan import Point
from sharding import hosts

TRAIN = (sys.executable, "-m", "dapo_jax.train")
LOG = "output.txt"  # log.txt is the run's own
PROGRESS_SECONDS = 5.0  # between two looks at the running points, for a terminal
AGAIN_LIMIT = 5  # status 75 more often in a row is a failure
AGAIN_SECONDS = 10.0  # a storage that does not answer shall have some time
ERROR_LINES, ERROR_CHARACTERS = 5, 300


class Runner:
    """Runs points in their order, `jobs` at once; `stop` may be called by another thread.

    done: the number of points that are. failed: point -> the last lines of its log.

    Args:
        points: in the order to run them; those that are done are left alone.
        jobs: the number of runs at once; each is bound to its share of the cores.
        retries: how often a failed point is run again, after all others.
        program: a command, which gets a point's arguments.
        say: shows a line a finished attempt, followed by the end of a failed one's log.
        again_seconds: the wait before a point that ended with 75 twice in a row is run again.
    """

    def __init__(
        self,
        points: Sequence[Point],
        *,
        jobs: int,
        retries: int,
        program: Sequence[str] = TRAIN,
        say: Callable[[str], None] = print,
        again_seconds: float = AGAIN_SECONDS,
    ):
        self._points, self._jobs = len(points), jobs
        self._retries, self._program = retries, program
        self._say, self._again_seconds = say, again_seconds
        self._waiting = collections.deque(point for point in points if not is_done(point))
        self.done = len(points) - len(self._waiting)
        self.failed: dict[Point, list[str]] = {}
        self._failures: collections.Counter[Point] = collections.Counter()
        self._running: dict[subprocess.Popen, Point] = {}
        self._stopping, self._lock = threading.Event(), threading.Lock()

    @property
    def stopped(self) -> bool:
        """True after `stop`."""
        return self._stopping.is_set()

    def stop(self, _signal: str = "") -> None:
        """Sends SIGTERM to all running points, which save; `run` returns when they have ended."""
        with self._lock:
            if not self.stopped:  # once: at its end a process no longer catches a signal
                self._stopping.set()
                for process in self._running:
                    process.terminate()

    def run(self) -> None:
        """Runs all points that are not done, until none is left or `stop` is called.

        A terminal sees below the lines of `say` how far the running ones are.
        """
        console = Console()
        wait = {"timeout": PROGRESS_SECONDS if console.is_terminal else None}
        wait["return_when"] = concurrent.futures.FIRST_COMPLETED
        with (
            concurrent.futures.ThreadPoolExecutor(self._jobs) as pool,
            console.status("starting", spinner="line") as status,
        ):
            slots = {pool.submit(self._work, slot) for slot in range(self._jobs)}
            try:
                while slots:
                    ended, slots = concurrent.futures.wait(slots, **wait)
                    for slot in ended:
                        slot.result()
                    status.update(escape(self.progress()))
            except BaseException:  # an error of ours: no run may go on unwatched
                self.stop()
                raise

    def progress(self) -> str:
        """Says how far the points are that run now."""
        with self._lock:
            points = list(self._running.values())
        steps = (f"{it.label}: {last_row(it)['step'] + 1} of {it.num_steps} steps" for it in points)
        return "; ".join([f"{self.done} of {self._points} runs done", *steps])

    def _work(self, slot: int) -> None:
        """Runs one waiting point after the other on a slot's cores."""
        while not self.stopped:
            try:
                point = self._waiting.popleft()
            except IndexError:
                return
            for again in range(AGAIN_LIMIT + 1):
                status, error = self._attempt(point, slot)
                wait = self._again_seconds if again else 0
                if status != hosts.RETRYABLE or self._stopping.wait(wait):
                    break
            if status == 0:
                self.failed.pop(point, None)
            elif not self.stopped:
                self.failed[point] = error
                self._failures[point] += 1
                if self._failures[point] <= self._retries:
                    self._waiting.append(point)

    def _attempt(self, point: Point, slot: int) -> tuple[int, list[str]]:
        """Runs a point's process to its end; returns its status and the last lines of its log."""
        begin = time.monotonic()
        point.workdir.mkdir(parents=True, exist_ok=True)
        with (point.workdir / LOG).open("ab") as log, self._lock:
            log_start = log.tell()
            process = subprocess.Popen(
                [*self._program, *point.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C is passed on by `stop`, once
            )
            bind(process.pid, slot, self._jobs)
            self._running[process] = point
            if self.stopped:
                process.terminate()
        status = process.wait()
        error = last_lines(point.workdir / LOG, log_start) if status else []
        if status == 0 and not is_done(point):
            status, error = 1, [f"ended with status 0 after {len(rows(point))} steps"]
        with self._lock:
            del self._running[process]
            self._tell(point, status, error, time.monotonic() - begin)
        return status, error

    def _tell(self, point: Point, status: int, error: list[str], seconds: float) -> None:
        self.done += status == 0
        ends = {0: "done", hosts.RETRYABLE: "stopped and saved"}
        failed = f"killed by signal {-status}" if status < 0 else f"failed with status {status}"
        row = last_row(point)
        text = f"[{self.done}/{self._points}] {point.label}: {ends.get(status, failed)}, "
        text += f"{row['step'] + 1} of {point.num_steps} steps in {format_duration(seconds)}"
        if row.get("accuracy/mean") is not None:
            text += f", accuracy {row['accuracy/mean']:.1%}"
        if status not in ends:
            text += "".join(f"\n  {printable(line)}" for line in error)
        self._say(text)


def is_done(point: Point) -> bool:
    """Tells whether a point has all its steps."""
    return last_row(point)["step"] + 1 >= point.num_steps


def rows(point: Point) -> list[dict]:
    """Returns the rows of a point's metrics.jsonl; [] where it cannot be read, as the run says."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return read_rows(point.workdir / "metrics.jsonl")
    return []


def last_row(point: Point) -> dict:
    """Returns the last of a point's rows; one of step -1 where there is none."""
    return (rows(point) or [{"step": -1}])[-1]


def last_lines(path: pathlib.Path, start: int) -> list[str]:
    """Returns the last lines of a log from byte `start` on; the last one says most."""
    text = path.read_bytes()[start:].decode(errors="replace")
    lines = [line.rstrip()[:ERROR_CHARACTERS] for line in text.splitlines() if line.strip()]
    return [line for line in lines if not line.startswith("(--debug")][-ERROR_LINES:]


def bind(pid: int, slot: int, jobs: int) -> None:
    """Binds a process to its share of this one's cores, where there is more than one job."""
    if jobs > 1 and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(pid, share(sorted(os.sched_getaffinity(0)), slot, jobs))


def share(cores: Sequence[int], slot: int, jobs: int) -> list[int]:
    """Returns the cores of a slot: equal neighbouring parts, or a core that slots share."""
    return np.array_split(cores, jobs)[slot].tolist() or [cores[slot % len(cores)]]
