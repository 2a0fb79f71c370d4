"""Runs libraries that grade in processes that cannot hang, harm or end this one.

A library (math-verify, or the scorers of reasoning-gym) may take forever on an answer, or all
memory. A worker is an interpreter that has imported it and forks itself for each answer: the child
has a limit of CPU time and of memory, and what it does ends with it, so that no verdict depends on
the answers before.
"""

import atexit
import contextlib
import functools
import gc
import importlib.util
import logging
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import queue
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dapo_jax.tasks import interpreter
from dapo_jax.tasks.math_rules import pairs, refuse
from dapo_jax.tasks.symbolic_rules import WARM_UP, decide, find_answer, grade_symbolic
from dapo_jax.types import Verdict

MAX_WORKERS = 32
ANSWER_CPU_SECONDS = 1.0
ANSWER_MEMORY_BYTES = 1 << 30  # beyond what a worker has when it is ready
# So many answers may use up their time before the next ones get less; a hundred others earn one.
PATIENCE = 100
IMPATIENT_CPU_SECONDS = 0.1
TRIES = 3
SILENCE_SECONDS = 12.0  # of a worker: it is stopped, as no busy host makes a second of CPU time
KILLED_STARTS = 8  # in a row, two minutes with the pauses between them
_MEMORY_STATUS = 3


class Workers:
    """Grades answers in processes: of each question once, as many at a time as there are workers.

    module: has `serve(pipe)`, which runs in a worker. name: of what it grades by, for messages.

    An answer that takes longer than `cpu_seconds` of a core's time (not of the wall's: a busy host
    changes no verdict) is a "timeout", one that wants over ANSWER_MEMORY_BYTES is "memory", one
    that ends its process is "crashed". A process that was killed from outside is no answer's fault:
    its answer is graded again, up to TRIES times. After PATIENCE timeouts that less than one answer
    in a hundred explains, answers get IMPATIENT_CPU_SECONDS each; only then do verdicts depend on
    the answers before. A worker that is silent for SILENCE_SECONDS (stopped, say) is replaced.

    Workers start at once and live until `close`, the end of the `with` block or of the process,
    and exit on their own when this process is gone. Safe to share by threads.

    Raises ValueError for a number of workers or a time that is not positive, and ChildProcessError
    where TRIES workers in a row end as they start, or KILLED_STARTS are killed or silent.
    """

    def __init__(self, num_workers: int, cpu_seconds: float, *, module: str, name: str) -> None:
        if num_workers < 1 or cpu_seconds <= 0:
            raise ValueError(
                f"{num_workers} workers with {cpu_seconds} seconds: both must be positive"
            )
        self._cpu_seconds, self._module, self._name = cpu_seconds, module, name
        self._patience = float(PATIENCE)
        self._lock = threading.Lock()
        self._closed = False
        self._workers = [_Worker(module) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix=name)
        atexit.register(self.close)

    def __enter__(self):
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the workers; safe to repeat."""
        atexit.unregister(self.close)
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
            self._workers = []
        self._threads.shutdown(cancel_futures=True)

    def worker_pids(self) -> list[int]:
        """Lists the process ids of the present workers, without those of replaced ones."""
        return [worker.process.pid for worker in self._workers]

    def grade(self, questions: Iterable[tuple]) -> dict[tuple, Verdict]:
        """Has each question (answer, what it is compared with) graded, equal ones once.

        Raises RuntimeError after `close`.
        """
        self.check_open()
        questions = dict.fromkeys(questions)
        return dict(zip(questions, self._threads.map(self._grade, questions), strict=True))

    def check_open(self) -> None:
        """Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} is closed")

    def _grade(self, question: tuple) -> Verdict:
        """Has a worker grade an answer; runs in a thread of its own for each worker."""
        with self._lock:
            patient = self._patience >= 1
        seconds = self._cpu_seconds if patient else min(IMPATIENT_CPU_SECONDS, self._cpu_seconds)
        for _ in range(TRIES):
            worker = self._idle.get()
            try:
                while not worker.is_ready():
                    worker = self._replaced(worker)
                verdict = worker.ask(*question, seconds)
            finally:
                self._idle.put(worker)
            if verdict is not None:
                break
        verdict = verdict or Verdict(False, question[0], "crashed")
        late = verdict.status in ("timeout", "memory")
        with self._lock:
            self._patience = min(PATIENCE, self._patience + 1 / 100) - late
        return verdict

    def _replaced(self, worker: "_Worker") -> "_Worker":
        """Starts a worker in the place of one that is gone, after a pause if none was ready."""
        worker.kill()
        tries = TRIES if worker.process.returncode >= 0 else KILLED_STARTS
        if worker.failed_starts >= tries:
            raise ChildProcessError(
                f"{worker.failed_starts} {self._name} workers in a row were never ready; the last "
                f"one {worker.failure}, and what it said is on the error output"
            )
        time.sleep(0.5 * (2**worker.failed_starts - 1))
        with self._lock:
            self.check_open()
            fresh = _Worker(self._module, worker.failed_starts)
            self._workers[self._workers.index(worker)] = fresh
            return fresh


class SymbolicVerifier(Workers):
    """Grades by the rules "math_verify" (`symbolic_rules`), the algebra in processes of its own.

    Raises ImportError without math-verify, and what `Workers` raises.
    """

    def __init__(self, num_workers: int, cpu_seconds: float = ANSWER_CPU_SECONDS) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError('the rules "math_verify" need the package math-verify')
        super().__init__(num_workers, cpu_seconds, module=__name__, name="math_verify")

    def verify(self, response: str, ground_truth: str) -> Verdict:
        """Grades one pair, as `verify_many` does."""
        return self.verify_many([response], [ground_truth])[0]

    def verify_many(self, responses: Sequence[str], ground_truths: Sequence[str]) -> list[Verdict]:
        """Grades pairs, as many at a time as there are workers; verdicts come in the pairs' order.

        Raises ValueError where the lengths differ, RuntimeError after `close`.
        """
        self.check_open()
        decided = [
            refuse(response, truth) or decide_locally(response, truth)
            for response, truth in pairs(responses, ground_truths)
        ]
        answers = self.grade(it for it in decided if not isinstance(it, Verdict))
        return [it if isinstance(it, Verdict) else answers[it] for it in decided]


def decide_locally(response: str, truth: str) -> Verdict | tuple[str, str]:
    """Returns the verdict on a response where no worker is needed, else what to ask one."""
    answer, rest = find_answer(response)
    return decide(answer, truth, rest)


class _Worker:
    """A worker is an interpreter that grades one pair at a time, in a child each, over a pipe.

    failed_starts: how many in its place, one after the other, were never ready. failure: what
    became of this one, once it is no longer alive.
    """

    def __init__(self, module: str, failed_starts: int = 0) -> None:
        self.connection, far_end = multiprocessing.Pipe()
        self.process = subprocess.Popen(
            interpreter.command(module, far_end.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[far_end.fileno()],
            process_group=0,  # to be killed with its child; Ctrl-C is the parent's to handle
            env={**os.environ, "PYTHONHASHSEED": "0"},  # the order of sets reaches verdicts
        )
        far_end.close()
        self.alive, self.failure = True, ""
        self.failed_starts, self._ready = failed_starts, False

    def is_ready(self) -> bool:
        """Waits until it is ready to be asked; False where it never will be."""
        if self.alive and not self._ready:
            self._receive(SILENCE_SECONDS * 2 ** min(self.failed_starts, 3))
            self._ready = self.alive
            self.failed_starts = 0 if self._ready else self.failed_starts + 1
        return self.alive

    def ask(self, answer: str, truth: str | bytes, cpu_seconds: float) -> Verdict | None:
        """Returns its verdict; None where it, or its child, was killed, or where it is silent."""
        with contextlib.suppress(OSError):  # of one that has ended, which `_receive` finds
            self.connection.send((answer, truth, cpu_seconds))
        return self._receive(max(SILENCE_SECONDS, 10 * cpu_seconds))

    def _receive(self, seconds: float) -> Verdict | None:
        try:
            if self.connection.poll(seconds):
                return self.connection.recv()
            self.failure = f"was silent for {seconds:.0f} s"
        except (EOFError, OSError):
            self.failure = "ended"
        self.alive = False
        return None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.process.returncode is None:  # else its number may be another's
                os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        if self.failure == "ended":
            self.failure = f"ended with status {status}"
        self.connection.close()


@functools.cache
def default_verifier() -> SymbolicVerifier:
    """Starts the pool that this process shares, one worker a core, at the first call."""
    return SymbolicVerifier(one_a_core())


def one_a_core() -> int:
    """Counts the workers of a pool: one a core, and MAX_WORKERS at most."""
    affinity = getattr(os, "sched_getaffinity", None)  # not every system has it
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, MAX_WORKERS)


def serve(pipe: int) -> None:
    """Grades by math-verify, inside a worker, what comes through the pipe."""
    serve_by(grade_symbolic, pipe, warm_up=WARM_UP)


def serve_by(
    grade: Callable[[str, Any], Verdict],
    pipe: int,
    *,
    warm_up: Iterable[tuple] = (),
    prepared: Callable[[Any], Any] = lambda truth: truth,
) -> None:
    """Grades, inside a worker, what comes through the pipe until its other end is closed.

    warm_up: is graded first. prepared: makes, in the worker itself, what its children compare
    answers with.
    """
    logging.disable(logging.CRITICAL)
    for answer, truth in warm_up:
        grade(answer, truth)
    gc.collect()
    gc.freeze()  # a child's collector need not touch, and so copy, all that was imported
    connection = multiprocessing.connection.Connection(pipe)
    with contextlib.suppress(EOFError, OSError):
        connection.send(None)
        while True:
            answer, truth, cpu_seconds = connection.recv()
            connection.send(_grade_in_child(grade, answer, prepared(truth), cpu_seconds))


def _grade_in_child(grade: Callable, answer: str, truth: Any, cpu_seconds: float) -> Verdict | None:
    """Grades in a forked process with limits; None where something outside killed it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _limit(cpu_seconds)
            os.write(writer, pickle.dumps(grade(answer, truth)))
            status = 0
        except MemoryError:
            status = _MEMORY_STATUS
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        sent = pipe.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended == 0:
        return pickle.loads(sent)
    if ended == -signal.SIGKILL:
        return None
    late, full = ended == -signal.SIGPROF, ended == _MEMORY_STATUS
    return Verdict(False, answer, "timeout" if late else "memory" if full else "crashed")


def _limit(cpu_seconds: float) -> None:
    """Limits this process: the kernel ends it by SIGPROF after so much CPU time."""
    interpreter.ends_at(signal.SIGPROF)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # not every system has what follows
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        used = pages * resource.getpagesize()
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + ANSWER_MEMORY_BYTES, hard_limit))
