"""Runs code that may hang, take all memory or die in other processes, within limits.

The one protocol for the algebra of answers, chat templates and the scorers of other packages:

1. A worker is a fresh interpreter; forking a process that has JAX's threads is unsafe.
2. It calls an entry "module:function", which imports, warms up and returns `prepare`.
3. A request is bytes: prepare(request) returns a function whose bytes are the answer.
4. A forking worker runs that function in a child, so that no answer depends on an earlier one.
   Another worker runs it, and `prepare`, itself and keeps its state.
5. The kernel ends the process after its seconds of CPU time: a busy host changes no answer.
   RLIMIT_AS leaves it MEMORY_BYTES beside the memory that it has at the start of the request.
6. A reply is one byte, a place in STATUSES, and the answer. The parent reads nothing but bytes.
7. A pool asks again where a process was killed from outside, and replaces a worker that is dead
   or silent for SILENCE_SECONDS, after a growing pause where it was never ready.
8. A worker ends with its object, and with the process that started it.
"""

import contextlib
import gc
import importlib
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

STATUSES = ("done", "timeout", "memory", "crashed", "killed")
MAX_WORKERS = 32
MEMORY_BYTES = 1 << 30
CPU_SECONDS = 1.0  # of one answer in a pool
# So many answers may use up their time before the next ones get less; a hundred others earn one.
PATIENCE = 100
IMPATIENT_CPU_SECONDS = 0.1
TRIES = 3
SILENCE_SECONDS = 12.0  # no busy host makes a second of CPU time so long
KILLED_STARTS = 8  # in a row, two minutes with the pauses between them
_MEMORY_EXIT = 3
# multiprocessing's own "spawn" would import the main module, and JAX with it, in every worker.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from dapo_jax.verifier import isolated
isolated.serve(*sys.argv[2:])
"""


class Reply(NamedTuple):
    """The outcome of a request: one of STATUSES and, with "done", the answer."""

    status: str
    answer: bytes = b""


class Worker:
    """A process that answers one request at a time.

    entry: "module:function". failed_starts: number of workers in its place, one after the other,
    that were never ready. failure: the end of this one in words.
    """

    def __init__(self, entry: str, *, forks: bool, failed_starts: int = 0) -> None:
        self._connection, far_end = multiprocessing.Pipe()
        command = [sys.executable, "-P", "-W", "ignore", "-c", _PROGRAM]
        command += [json.dumps([str(place) for place in sys.path]), entry]
        with far_end:
            self.process = subprocess.Popen(
                [*command, str(far_end.fileno()), "forks" * forks],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[far_end.fileno()],
                process_group=0,  # killed with its child; Ctrl-C is the parent's to handle
                env={**os.environ, "PYTHONHASHSEED": "0"},  # the order of sets reaches answers
            )
        self.kill = weakref.finalize(self, _end, self.process, self._connection)
        self.failed_starts, self.failure, self._ready = failed_starts, "", False

    def is_ready(self) -> bool:
        """Waits until a forking worker is ready; returns False where it never will be."""
        if self.kill.alive and not self._ready:
            seconds = SILENCE_SECONDS * 2 ** min(self.failed_starts, 3)
            self._ready = self._received(seconds) is not None
            self.failed_starts = 0 if self._ready else self.failed_starts + 1
        return self.kill.alive

    def ask(
        self, request: bytes, cpu_seconds: float | None, *, silence_seconds: float | None = None
    ) -> Reply:
        """Returns the reply; "killed" where the process is gone, or was silent for too long.

        cpu_seconds: of a forked child; a worker that does not fork gets so many more each time.
        None: no limits, of memory neither.
        """
        with contextlib.suppress(OSError):  # of a worker that has ended: there is no reply
            self._connection.send((request, cpu_seconds))
        reply = self._received(silence_seconds)
        if reply is None:
            late = self.process.returncode == -signal.SIGPROF
            return Reply("timeout" if late else "killed")
        return Reply(STATUSES[reply[0]], reply[1:])

    def _received(self, seconds: float | None) -> bytes | None:
        try:
            if self._connection.poll(seconds):
                return self._connection.recv_bytes()
            self.failure = f"was silent for {seconds:.0f} s"
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)  # its own status, not that of the kill
        self.kill()
        self.failure = self.failure or f"ended with status {self.process.returncode}"
        return None


def _end(process: subprocess.Popen, connection: multiprocessing.connection.Connection) -> None:
    with contextlib.suppress(OSError):  # a child may outlive a worker
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    connection.close()


class Pool:
    """Forking workers that answer requests, each once, as many at a time as there are workers.

    name: of the code that answers, for messages. After PATIENCE answers out of time or memory that
    less than one in a hundred explains, answers get IMPATIENT_CPU_SECONDS each: only then do
    answers depend on earlier ones. Threads may share a pool. Its workers live until `close`, the
    end of the `with` block or of the process.

    Raises ValueError for a number of workers or a time that is not positive, and ChildProcessError
    where TRIES workers in a row end as they start, or KILLED_STARTS are killed or silent.
    """

    def __init__(self, entry: str, *, name: str, num_workers: int, cpu_seconds: float) -> None:
        if num_workers < 1 or cpu_seconds <= 0:
            raise ValueError(
                f"{num_workers} workers with {cpu_seconds} seconds: both must be positive"
            )
        self._entry, self._name, self._cpu_seconds = entry, name, cpu_seconds
        self._patience = float(PATIENCE)
        self._lock = threading.Lock()
        self._closed = False
        self._workers = [Worker(entry, forks=True) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix=name)

    def __enter__(self):
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the workers; safe to repeat."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
            self._workers = []
        self._threads.shutdown(cancel_futures=True)

    def worker_pids(self) -> list[int]:
        """Lists the process ids of the present workers, without those of replaced ones."""
        return [worker.process.pid for worker in self._workers]

    def ask(self, requests: Iterable[bytes]) -> dict[bytes, Reply]:
        """Has each request answered, equal ones once; raises RuntimeError after `close`."""
        self.check_open()
        requests = dict.fromkeys(requests)
        return dict(zip(requests, self._threads.map(self._answered, requests), strict=True))

    def check_open(self) -> None:
        """Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} is closed")

    def _answered(self, request: bytes) -> Reply:
        """Has a worker answer; runs in one of as many threads as there are workers."""
        with self._lock:
            patient = self._patience >= 1
        seconds = self._cpu_seconds if patient else min(IMPATIENT_CPU_SECONDS, self._cpu_seconds)
        silence = max(SILENCE_SECONDS, 10 * seconds)
        for _ in range(TRIES):
            worker = self._idle.get()
            try:
                while not worker.is_ready():
                    worker = self._replaced(worker)
                reply = worker.ask(request, seconds, silence_seconds=silence)
            finally:
                self._idle.put(worker)
            if reply.status != "killed":
                break
        late = reply.status in ("timeout", "memory")
        with self._lock:
            self._patience = min(PATIENCE, self._patience + 1 / 100) - late
        return Reply("crashed") if reply.status == "killed" else reply

    def _replaced(self, worker: Worker) -> Worker:
        """Starts a worker in the place of one that is gone, after a pause if none was ready."""
        ended = (worker.process.returncode or 0) >= 0
        if worker.failed_starts >= (TRIES if ended else KILLED_STARTS):
            raise ChildProcessError(
                f"{worker.failed_starts} {self._name} workers in a row were never ready; the last "
                f"one {worker.failure}, and its last words are on the error output"
            )
        time.sleep(0.5 * (2**worker.failed_starts - 1))
        with self._lock:
            self.check_open()
            fresh = Worker(self._entry, forks=True, failed_starts=worker.failed_starts)
            self._workers[self._workers.index(worker)] = fresh
            return fresh


def one_a_core() -> int:
    """Counts the workers of a pool: one a core, and MAX_WORKERS at most."""
    affinity = getattr(os, "sched_getaffinity", None)  # not every system has it
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, MAX_WORKERS)


# In the worker.


def serve(entry: str, pipe: str, forks: str) -> None:
    """Answers the requests that come through the pipe until its other end is closed."""
    logging.disable(logging.CRITICAL)
    # The parent may ignore or block the signal, which a process inherits.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    module, _, name = entry.partition(":")
    prepare = getattr(importlib.import_module(module), name)()
    gc.collect()
    gc.freeze()  # a child's collector need not touch, and so copy, all that was imported
    connection = multiprocessing.connection.Connection(int(pipe))
    if forks:
        connection.send_bytes(b"")
    while True:
        try:
            request, cpu_seconds = connection.recv()
        except (EOFError, OSError):
            return
        if forks:
            reply = answered_in_child(prepare(request), cpu_seconds)
        else:
            reply = _answered_here(prepare, request, cpu_seconds)
        with contextlib.suppress(OSError):  # the parent is gone
            connection.send_bytes(reply)


def _reply(status: str, answer: bytes = b"") -> bytes:
    return bytes([STATUSES.index(status)]) + answer


def _answered_here(prepare: Callable, request: bytes, cpu_seconds: float | None) -> bytes:
    try:
        if cpu_seconds is not None:
            _limit(cpu_seconds)
        return _reply("done", prepare(request)())
    except MemoryError:
        return _reply("memory")


def answered_in_child(answer: Callable[[], bytes], cpu_seconds: float) -> bytes:
    """Runs a function in a forked process with limits, and returns the reply of this worker."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _limit(cpu_seconds)
            os.write(writer, answer())
            status = 0
        except MemoryError:
            status = _MEMORY_EXIT
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        sent = pipe.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended == 0:
        return _reply("done", sent)
    ends = {-signal.SIGPROF: "timeout", _MEMORY_EXIT: "memory", -signal.SIGKILL: "killed"}
    return _reply(ends.get(ended, "crashed"))


def _limit(cpu_seconds: float) -> None:
    """Limits this process: the kernel ends it by SIGPROF after so much more CPU time."""
    left, _ = signal.getitimer(signal.ITIMER_PROF)
    signal.setitimer(signal.ITIMER_PROF, left + cpu_seconds)
    with contextlib.suppress(ValueError, OSError):  # not every system has what follows
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        used = pages * resource.getpagesize()
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, hard_limit))
