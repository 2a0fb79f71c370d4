"""Runs the points of a sweep, each in its own process: some at once, stopped, resumed and retried.

Host only.
"""

import concurrent.futures
import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np

from dapo_jax.logs.display import format_duration
from dapo_jax.logs.files import read_rows
from dapo_jax.printable import printable
from dapo_jax.process import hosts
from dapo_jax.sweep.plan import Point

TRAIN = (sys.executable, "-m", "dapo_jax.train")
LOG = "output.txt"  # log.txt is the run's own
TRIES = 3  # of a run that does not come to its end
POLL_SECONDS = 0.05
GPU_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
SHOWN_LINES, SHOWN_CHARACTERS = 5, 300  # of a failed run's output


class Runner:
    """Runs points in their order, `jobs` at once; `stop` may be called by another thread.

    Each run has its share of the cores and of a GPU's memory. Points that are done are left alone.
    Prints a line an attempt, followed by the end of a failed one's output. done: the number of
    points that are. failed: the others, after `run` those that did not come to their end. stopped:
    whether `stop` was called. program: a command, which gets a point's arguments.
    """

    def __init__(self, points: Sequence[Point], *, jobs: int, program: Sequence[str] = TRAIN):
        self._points, self._jobs, self._program = len(points), jobs, program
        self.failed = [point for point in points if not is_done(point)]
        self.done = len(points) - len(self.failed)
        self.stopped = False
        self._slots = itertools.count()
        self._lock = threading.Lock()  # of what is said and counted

    def stop(self, _signal: str = "") -> None:
        """Has all running points stopped, which save; `run` returns when they have ended."""
        self.stopped = True

    def run(self) -> None:
        """Runs all points that are not done, until none is left or `stop` is called."""
        with concurrent.futures.ThreadPoolExecutor(self._jobs, initializer=self._bind) as pool:
            try:
                for _ in range(TRIES):
                    tried = zip(self.failed, pool.map(self._attempt, self.failed), strict=True)
                    self.failed = [point for point, done in tried if not done]
            except BaseException:  # an error of ours: the runs save, and no more begin
                self.stop()
                raise

    def _bind(self) -> None:
        """Gives a thread of the pool, and what it starts, its share of the cores."""
        if hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, share(cores, next(self._slots), self._jobs))

    def _attempt(self, point: Point) -> bool:
        """Runs a point's process to its end; tells whether the point is done."""
        if self.stopped:
            return False
        begin, log = time.monotonic(), point.workdir / LOG
        point.workdir.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*self._program, *point.arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment(self._jobs),
                start_new_session=True,  # a terminal's Ctrl-C is passed on by `stop`, once
            )
        print(f"{point.label} begins: {log}", flush=True)
        while process.poll() is None and not self.stopped:
            time.sleep(POLL_SECONDS)
        process.terminate()  # once, if it runs: at its end a process no longer catches a signal
        status = process.wait()
        done = status == 0 and is_done(point)
        with self._lock:
            self.done += done
            end = "stopped and saved" if status == hosts.RETRYABLE else f"ended with {status}"
            text = f"[{self.done}/{self._points}] {point.label}: {'done' if done else end}, "
            text += f"{finished_steps(point)} of {point.num_steps} steps "
            text += f"in {format_duration(time.monotonic() - begin)}"
            if not done and status != hosts.RETRYABLE:
                for line in log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]:
                    text += f"\n  {printable(line[:SHOWN_CHARACTERS])}"
            print(text, flush=True)
        return done


def is_done(point: Point) -> bool:
    """Tells whether a point has all its steps."""
    return finished_steps(point) >= point.num_steps


def finished_steps(point: Point) -> int:
    """Returns a point's finished steps; 0 where its rows cannot be read, as the run says."""
    with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
        return read_rows(point.workdir / "metrics.jsonl")[-1]["step"] + 1
    return 0


def environment(jobs: int) -> dict[str, str]:
    """Returns a run's environment, with its share of a GPU's memory unless one is set."""
    is_set = any(name.endswith("CLIENT_MEM_FRACTION") for name in os.environ)  # JAX has two
    return {**os.environ} if jobs == 1 or is_set else os.environ | {GPU_MEMORY: f"{0.9 / jobs:.3f}"}


def share(cores: Sequence[int], slot: int, jobs: int) -> list[int]:
    """Returns the cores of a slot: equal neighbouring parts, or a core that slots share."""
    return np.array_split(cores, jobs)[slot].tolist() or [cores[slot % len(cores)]]
