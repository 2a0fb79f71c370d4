"""Runs the points of a sweep, each in a process of its own: some at once, stopped and retried.

Host only. points.jsonl in the sweep's folder gets a line an attempt; it says which points are done.
"""

import collections
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from dapo_jax.report.runs import sweep_label
from dapo_jax.run.files import append_line
from dapo_jax.sweep.plan import Point
from sharding import hosts

TRAIN = (sys.executable, "-m", "dapo_jax.train")
ATTEMPTS = "points.jsonl"
LOG = "output.txt"  # log.txt is the run's own
AGAIN_LIMIT = 5  # status 75 so often in a row is a failure
AGAIN_SECONDS = 10.0  # a storage that does not answer shall have some time
POLL_SECONDS = 0.2
TAIL_BYTES = 65_536  # holds a row of metrics.jsonl, and the end of a log
ERROR_LINES, ERROR_CHARACTERS = 5, 300


@dataclasses.dataclass
class Progress:
    """How a point stands: waiting, running, done or failed; its newest row; its last error."""

    state: str = "waiting"
    row: Mapping = dataclasses.field(default_factory=dict)
    error: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def finished_steps(self) -> int:
        return self.row.get("step", -1) + 1

    @property
    def reason(self) -> str:
        """The line of the error that says most: what a command of ours says, or the last."""
        said = [line for line in self.error if line.startswith("error:")]
        return (said or self.error or ["-"])[-1]


@dataclasses.dataclass
class _Attempt:
    """A point to run: how often it has failed, and ended with 75 in a row; not before a time."""

    point: Point
    failures: int = 0
    agains: int = 0
    not_before: float = 0.0


@dataclasses.dataclass
class _Running:
    attempt: _Attempt
    process: subprocess.Popen
    started: float
    log_start: int


class Runner:
    """Runs points in their order, `jobs` at once; `stop` may be called by another thread.

    Args:
        folder: the sweep's.
        points: in the order to run them. Those that are done already are left alone.
        jobs: how many run at once; each is bound to its share of the cores.
        retries: how often a failed point is run again, after all others.
        program: what is run with a point's arguments.
        say: is told of the end of each attempt: the point, its status, its progress.
        look: is called several times a second.
        again_seconds: the wait before a point that ended with 75 twice in a row is run again.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        points: Sequence[Point],
        *,
        jobs: int,
        retries: int,
        program: Sequence[str] = TRAIN,
        say: Callable[[Point, int, Progress], None] = lambda *_: None,
        look: Callable[[], None] = lambda: None,
        again_seconds: float = AGAIN_SECONDS,
    ):
        self._folder, self._jobs, self._retries = folder, jobs, retries
        self._program, self.say, self.look = program, say, look
        self._again_seconds = again_seconds
        self._running: dict[int, _Running] = {}  # by slot, which has its cores
        self._stopping = threading.Event()
        done = done_points(folder)
        self.progress = {point: Progress(row=last_row(point.workdir)) for point in points}
        for point, progress in self.progress.items():
            if done.get(point.label, 0) >= point.num_steps <= progress.finished_steps:
                progress.state = "done"

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def stop(self, _signal: str = "") -> None:
        """Has `run` end all running points in order, which save, and return when they have."""
        self._stopping.set()

    def run(self) -> None:
        """Runs what is not done, until nothing is left or `stop` is called."""
        (self._folder / ATTEMPTS).touch()
        waiting = collections.deque(
            _Attempt(point) for point, at in self.progress.items() if at.state != "done"
        )
        failed: list[_Attempt] = []
        told = False
        try:
            while self._running or ((waiting or failed) and not self.stopped):
                if not waiting and not self._running:
                    waiting, failed = collections.deque(failed), []
                self._fill(waiting)
                if self._stopping.wait(POLL_SECONDS):
                    if not told:  # once: at its end a process no longer catches a signal
                        self._terminate_all()
                    told = True
                    time.sleep(POLL_SECONDS)
                for slot, running in list(self._running.items()):
                    if (status := running.process.poll()) is not None:
                        del self._running[slot]
                        self._end(running, status, waiting, failed)
                    else:
                        self._refresh(running)
                self.look()
        except BaseException:  # an error of ours: nothing may run on unwatched
            if not told:
                self._terminate_all()
            for running in self._running.values():
                running.process.wait()
            raise

    def _fill(self, waiting: collections.deque) -> None:
        """Starts what waits in the slots that are free."""
        for slot in range(self._jobs):
            if slot in self._running or self.stopped:
                continue
            now = time.monotonic()
            if (ready := next((at for at in waiting if at.not_before <= now), None)) is not None:
                waiting.remove(ready)
                self._start(slot, ready)

    def _start(self, slot: int, attempt: _Attempt) -> None:
        point = attempt.point
        point.workdir.mkdir(parents=True, exist_ok=True)
        with (point.workdir / LOG).open("ab") as log:
            running = _Running(
                attempt=attempt,
                # Its own session: a terminal's Ctrl-C is for us, who pass it on once.
                process=subprocess.Popen(
                    [*self._program, *point.arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                ),
                started=time.monotonic(),
                log_start=log.tell(),
            )
        bind(running.process.pid, slot, self._jobs)
        self.progress[point].state = "running"
        self._running[slot] = running

    def _terminate_all(self) -> None:
        for running in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                running.process.send_signal(signal.SIGTERM)

    def _refresh(self, running: _Running) -> None:
        progress = self.progress[running.attempt.point]
        progress.seconds = time.monotonic() - running.started
        progress.row = last_row(running.attempt.point.workdir)

    def _end(self, running: _Running, status: int, waiting, failed: list) -> None:
        """Records the end of an attempt, and what becomes of its point."""
        attempt, point = running.attempt, running.attempt.point
        progress = self.progress[point]
        self._refresh(running)
        complete = progress.finished_steps >= point.num_steps
        progress.error = [] if status == 0 else last_lines(point.workdir / LOG, running.log_start)
        if status == 0 and not complete:
            status = 1
            progress.error = [
                f"ended with status 0, but metrics.jsonl has {progress.finished_steps} of "
                f"{point.num_steps} steps"
            ]
        line = {
            "arm": point.arm,
            "seed": point.seed,
            "status": status,
            "seconds": round(progress.seconds, 1),
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "num_steps": point.num_steps,
            "finished_steps": progress.finished_steps,
            "error": progress.error,
        }
        append_line(self._folder / ATTEMPTS, line)
        attempt.agains = attempt.agains + 1 if status == hosts.RETRYABLE else 0
        if status == 0:
            progress.state = "done"
        elif self.stopped:
            progress.state = "waiting"
        elif 0 < attempt.agains <= AGAIN_LIMIT:
            progress.state = "waiting"
            attempt.not_before = time.monotonic() + self._again_seconds * (attempt.agains > 1)
            waiting.appendleft(attempt)
        else:
            progress.state = "failed"
            attempt.failures, attempt.agains = attempt.failures + 1, 0
            if attempt.failures <= self._retries:
                failed.append(attempt)
        self.say(point, status, progress)


def done_points(folder: pathlib.Path) -> dict[str, int]:
    """Returns label -> the most steps with which a point has ended with status 0."""
    path, done = folder / ATTEMPTS, {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, KeyError):  # cut by a kill: it is run again
            found = json.loads(line)
            if found["status"] == 0:
                label = sweep_label(found["arm"], found["seed"])
                done[label] = max(done.get(label, 0), found["num_steps"])
    return done


def last_row(workdir: pathlib.Path) -> dict:
    """Returns the newest whole row of a run's metrics.jsonl; {} where there is none."""
    for line in reversed(_tail(workdir / "metrics.jsonl").split(b"\n")):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                return row
    return {}


def last_lines(path: pathlib.Path, start: int) -> list[str]:
    """Returns the last lines of a log that say something, from what was written after `start`."""
    text = _tail(path, start).decode(errors="replace")
    lines = [line.rstrip()[:ERROR_CHARACTERS] for line in text.splitlines() if line.strip()]
    return lines[-ERROR_LINES:]


def _tail(path: pathlib.Path, start: int = 0) -> bytes:
    """The last bytes of a file, none of those before `start`; b"" where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - TAIL_BYTES))
            return file.read()
    except FileNotFoundError:
        return b""


def bind(pid: int, slot: int, jobs: int) -> None:
    """Binds a process to its share of this one's cores, where there is more than one job."""
    if jobs > 1 and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(pid, share(sorted(os.sched_getaffinity(0)), slot, jobs))


def share(cores: Sequence[int], slot: int, jobs: int) -> list[int]:
    """Returns the cores of a slot: equal neighbouring parts, or one that several slots have."""
    if len(cores) < jobs:
        return [cores[slot % len(cores)]]
    return list(cores[len(cores) * slot // jobs : len(cores) * (slot + 1) // jobs])
