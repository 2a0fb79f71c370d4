"""Grades by symbolic equivalence (the library math-verify), in processes that cannot hang this one.

The library may take forever on an answer, or all memory: each worker grades one pair at a time
over a pipe, and one that is late or gone is replaced.
"""

import atexit
import contextlib
import functools
import importlib
import importlib.util
import json
import logging
import multiprocessing
import multiprocessing.connection
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from dapo_jax.tasks.math_rules import TAIL_CHARS, compare, last_answer, pairs, refuse
from dapo_jax.types import Verdict

SYMBOLIC_TAIL_CHARS = 1000
DEFAULT_WORKERS = 2
DEFAULT_TIMEOUT_SECONDS = 5.0
WORKER_START_SECONDS = 120.0
WORKER_MEMORY_BYTES = 4 << 30

# A fresh interpreter: forking is unsafe beside JAX's threads, and multiprocessing's own "spawn"
# would import the main module, and JAX with it, again in every worker.
_WORKER_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from dapo_jax.tasks.symbolic import _serve
_serve(int(sys.argv[2]), float(sys.argv[3]))
"""
_MATH_MARKUP = re.compile(r"\$|\\\(|\\\[|\\boxed")


class SymbolicVerifier:
    """Grades by the rules "math_verify", in processes that cannot hang or harm this one.

    It reads the last "Answer:" line as "strict" does; without one, the library looks for an answer
    (boxed, a formula, a number) in the last SYMBOLIC_TAIL_CHARS of the response. The library is
    lenient by design: `41=42` is 42, `3+2` is 5, `0.5` is 50%.

    A worker that takes longer than `timeout_seconds` for one pair, or dies, is replaced; the answer
    is wrong, with the status "timeout" or "crashed". Workers start at once and live until `close`,
    the end of the `with` block or of the process, and exit on their own when this process is gone.
    Safe to share by threads.

    Raises ImportError without math-verify, ValueError for a number of workers or a time that is not
    positive, and RuntimeError where a worker dies or hangs before it is ready.
    """

    def __init__(self, num_workers: int, timeout_seconds: float) -> None:
        if num_workers < 1 or timeout_seconds <= 0:
            raise ValueError(
                f"{num_workers} workers with {timeout_seconds} seconds: both must be positive"
            )
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError('the rules "math_verify" need the package math-verify')
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._workers = [_Worker(timeout_seconds) for _ in range(num_workers)]
        atexit.register(self.close)

    def __enter__(self) -> "SymbolicVerifier":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the workers; safe to repeat."""
        atexit.unregister(self.close)
        with self._lock:
            for worker in self._workers:
                worker.kill()
            self._workers = []

    def worker_pids(self) -> list[int]:
        """Lists the process ids of the present workers, without those of replaced ones."""
        return [worker.process.pid for worker in self._workers]

    def verify(self, response: str, ground_truth: str) -> Verdict:
        """Grades one pair, as `verify_many` does."""
        return self.verify_many([response], [ground_truth])[0]

    def verify_many(self, responses: Sequence[str], ground_truths: Sequence[str]) -> list[Verdict]:
        """Grades pairs, as many at a time as there are workers; verdicts come in the pairs' order.

        Raises ValueError where the lengths differ, RuntimeError after `close`.
        """
        verdicts: dict[int, Verdict] = {}
        jobs: deque[_Job] = deque()
        for index, (response, truth) in enumerate(pairs(responses, ground_truths)):
            if refused := refuse(response, truth):
                verdicts[index] = refused
                continue
            answer = last_answer(response)
            answers = _spellings(answer) if answer else [response[-SYMBOLIC_TAIL_CHARS:]]
            if answer == "" or not response.strip() or not truth.strip():
                verdicts[index] = compare(answer, truth)
            else:
                jobs.append(_Job(index, answers, _spellings(truth)))
        with self._lock:
            self._run(jobs, verdicts)
        return [verdicts[index] for index in range(len(responses))]

    def _run(self, jobs: "deque[_Job]", verdicts: dict[int, Verdict]) -> None:
        if not self._workers:
            raise RuntimeError("this SymbolicVerifier is closed")
        try:
            while jobs or any(worker.job for worker in self._workers):
                for worker in list(self._workers):
                    if jobs and worker.ready and not worker.job:
                        self._ask(worker, jobs)
                self._collect(verdicts)
        finally:  # after an exception: no answer to this call may reach the next one
            for worker in [worker for worker in self._workers if worker.job]:
                self._replace(worker)

    def _ask(self, worker: "_Worker", jobs: "deque[_Job]") -> None:
        try:
            worker.connection.send((jobs[0].answers, jobs[0].truths))
        except OSError:
            self._replace(worker)  # it died idle, which is no answer's fault
            return
        worker.job = jobs.popleft()
        worker.deadline = time.monotonic() + self._timeout_seconds

    def _collect(self, verdicts: dict[int, Verdict]) -> None:
        """Waits until a busy or starting worker answers or the first deadline passes."""
        waited = [worker for worker in self._workers if worker.job or not worker.ready]
        patience = min((worker.deadline for worker in waited), default=0.0) - time.monotonic()
        readable = multiprocessing.connection.wait(
            [worker.connection for worker in waited], max(0.0, patience)
        )
        for worker in waited:
            if worker.connection in readable:
                verdict = worker.receive()
            elif time.monotonic() < worker.deadline:
                continue
            else:
                verdict = Verdict(False, None, "timeout")
            if not worker.ready and verdict is not None:
                raise RuntimeError(
                    f"a math_verify worker was not ready within {WORKER_START_SECONDS:.0f} s "
                    f"(exit code {worker.process.poll()}); its messages are on the error output"
                )
            if worker.job and verdict is not None:
                verdicts[worker.job.index] = verdict
            worker.job, worker.ready = None, True
            if verdict is not None and verdict.status in ("timeout", "crashed"):
                self._replace(worker)

    def _replace(self, worker: "_Worker") -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = _Worker(self._timeout_seconds)


class _Job(NamedTuple):
    index: int
    answers: list[str]
    truths: list[str]


class _Worker:
    """A worker is an interpreter that grades one pair at a time over a pipe.

    `ready` once its imports are done; `deadline` (time.monotonic) is for them, then for `job`.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.connection, far_end = multiprocessing.Pipe()
        arguments = [
            json.dumps([str(path) for path in sys.path]),
            str(far_end.fileno()),
            str(timeout_seconds),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-c", _WORKER_PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[far_end.fileno()],
        )
        far_end.close()
        self.job: _Job | None = None
        self.ready = False
        self.deadline = time.monotonic() + WORKER_START_SECONDS

    def receive(self) -> Verdict | None:
        """Returns its verdict, "crashed" if it is gone, or None: it is ready."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return Verdict(False, None, "crashed")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


@functools.cache
def default_verifier() -> SymbolicVerifier:
    """Starts the pool that all callers of this process share, at the first call."""
    return SymbolicVerifier(DEFAULT_WORKERS, DEFAULT_TIMEOUT_SECONDS)


def _serve(pipe: int, timeout_seconds: float) -> None:
    """Grades, inside a worker, what comes through the pipe until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, hard_limit))
    logging.disable(logging.CRITICAL)
    importlib.import_module("math_verify")
    connection = multiprocessing.connection.Connection(pipe)
    connection.send(None)
    while True:
        try:
            answers, truths = connection.recv()
        except (EOFError, OSError):
            return
        # The parent kills a late worker; an orphan is ended by this alarm's default action.
        signal.setitimer(signal.ITIMER_REAL, 2 * timeout_seconds + 1)
        try:
            verdict = _grade_symbolic(answers, truths)
        except Exception:
            return  # the closed pipe says "crashed", and a fresh worker takes over
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(verdict)


def _spellings(text: str) -> list[str]:
    """Spells the text as the library wants it: without math markup, as a formula first."""
    return [text] if _MATH_MARKUP.search(text) else [f"${text}$", text]


def _grade_symbolic(answers: list[str], truths: list[str]) -> Verdict:
    """Asks the library, inside a worker, because it may take forever."""
    import math_verify

    answer, truth = _read_symbolic(answers), _read_symbolic(truths)
    if not answer:
        return Verdict(False, None, "unreadable_answer")
    prediction = next((part for part in answer if isinstance(part, str)), answers[-1])
    prediction = prediction[:TAIL_CHARS]
    if not truth:
        return Verdict(False, prediction, "unreadable_ground_truth")
    correct = math_verify.verify(truth, answer, timeout_seconds=None)
    return Verdict(correct, prediction, "correct" if correct else "wrong")


def _read_symbolic(spellings: list[str]) -> list:
    """Returns what the library reads in the first of the spellings that it can read."""
    import math_verify

    targets = [
        math_verify.LatexExtractionConfig(boxed_match_priority=0),
        math_verify.ExprExtractionConfig(),
    ]
    for text in spellings:
        if readings := math_verify.parse(text, targets, parsing_timeout=None):
            return readings
    return []
