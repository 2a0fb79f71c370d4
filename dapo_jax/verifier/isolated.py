"""Runs code that may hang, take all memory or die in other processes, within limits.

For the algebra of answers, and the scorers of other packages:

1. A worker is a fresh interpreter; forking a process that has JAX's threads is unsafe.
2. It calls an entry "module:function", which imports, warms up and returns `prepare`.
3. A request is bytes: prepare(request) returns a function whose bytes are the answer.
4. The worker runs that function in a child, so that no answer depends on an earlier one.
5. The kernel ends the child after its seconds of CPU time: a busy host changes no answer.
   RLIMIT_AS leaves it MEMORY_BYTES beside what the worker has.
6. A worker that is dead or silent is replaced, and its request asked again.
7. A worker ends with its pool; where its starter is gone, once it has answered.
"""

import contextlib
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pkgutil
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

MAX_WORKERS = 32
MEMORY_BYTES = 1 << 30
CPU_SECONDS = 1.0  # of one answer
TRIES = 5  # of an answer whose worker is killed from outside, or never ready
START_SECONDS = 120.0
SILENCE_SECONDS = 12.0  # no busy host makes a second of CPU time so long
_MEMORY_EXIT = 3
# multiprocessing's own "spawn" would import the main module, and JAX with it, in every worker.
_PROGRAM = "import sys; from dapo_jax.verifier.isolated import serve; serve(*sys.argv[1:])"


class Reply(NamedTuple):
    """The outcome of a request: done (with the answer), timeout, memory, crashed or killed."""

    status: str
    answer: bytes = b""


class Worker:
    """A process that answers one request at a time; entry: "module:function"."""

    def __init__(self, entry: str) -> None:
        self._connection, far_end = multiprocessing.Pipe()
        paths = os.pathsep.join(map(str, sys.path))
        with far_end:
            pipe = far_end.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-c", _PROGRAM, entry, str(pipe)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[pipe],
                process_group=0,  # killed with its child; Ctrl-C is the parent's to handle
                # The order of sets reaches answers.
                env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"},
            )
        self.is_ready = False

    def ask(self, request: bytes, cpu_seconds: float) -> Reply:
        """Returns the reply; "killed" where the process is gone, or was silent for too long."""
        with contextlib.suppress(EOFError, OSError):  # of a worker that has ended
            if not self.is_ready and self._connection.poll(START_SECONDS):
                self.is_ready = self._connection.recv()
            if self.is_ready:
                self._connection.send((request, cpu_seconds))
                if self._connection.poll(max(SILENCE_SECONDS, 10 * cpu_seconds)):
                    return self._connection.recv()
        self.kill()
        return Reply("killed")

    def kill(self) -> None:
        """Ends the process, and the child that may outlive it."""
        if self.process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._connection.close()


class Pool(contextlib.AbstractContextManager):
    """Workers that answer requests, each once, as many at a time as there are workers.

    Threads may share a pool. Its workers live until the end of the `with` block or of the process.
    Raises ChildProcessError where a request finds no worker that is ever ready.
    """

    def __init__(self, entry: str, num_workers: int, cpu_seconds: float = CPU_SECONDS) -> None:
        self._entry, self._cpu_seconds = entry, cpu_seconds
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix=entry)
        self._workers = [Worker(entry) for _ in range(num_workers)]
        self._idle, self._is_open = [*range(num_workers)], True

    def __exit__(self, *exception: object) -> None:
        """Kills the workers, at whatever they are."""
        self._is_open = False
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)

    def ask(self, requests: Mapping[Any, bytes]) -> dict[Any, Reply]:
        """Has each request answered, by its key; RuntimeError behind the `with` block."""
        replies = self._threads.map(self._answered, requests.values())
        return dict(zip(requests, replies, strict=True))

    def _answered(self, request: bytes) -> Reply:
        """Has a worker answer; runs in one of as many threads as there are workers."""
        place = self._idle.pop()
        try:
            for attempt in range(TRIES):
                if self._is_open and self._workers[place].process.poll() is not None:
                    time.sleep(attempt)  # what kills workers may pass
                    self._workers[place] = Worker(self._entry)
                reply = self._workers[place].ask(request, self._cpu_seconds)
                if reply.status != "killed":
                    return reply
        finally:
            self._idle.append(place)
        if self._workers[place].is_ready:
            return Reply("crashed")
        raise ChildProcessError(
            f"{TRIES} workers of {self._entry} in a row were never ready or were killed; what they "
            "said is on the error output"
        )


def one_a_core() -> int:
    """Counts the workers of a pool: one a core, and MAX_WORKERS at most."""
    is_linux = hasattr(os, "sched_getaffinity")
    return min(len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1, MAX_WORKERS)


# In the worker.


def serve(entry: str, pipe: str) -> None:
    """Answers the requests that come through the pipe until its other end is closed."""
    logging.disable(logging.CRITICAL)
    # The parent may ignore or block the signal, which a process inherits.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prepare = pkgutil.resolve_name(entry)()
    gc.collect()
    gc.freeze()  # a child's collector need not touch, and so copy, all that was imported
    connection = multiprocessing.connection.Connection(int(pipe))
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        connection.send(True)  # ready
        while True:
            request, cpu_seconds = connection.recv()
            connection.send(answered_in_child(prepare(request), cpu_seconds))


def answered_in_child(answer: Callable[[], bytes], cpu_seconds: float) -> Reply:
    """Runs a function in a forked process with limits, and returns the reply of this worker."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # the kernel ends it by SIGPROF
            with contextlib.suppress(ValueError, OSError):  # not every system has what follows
                pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
                most = pages * resource.getpagesize() + MEMORY_BYTES
                _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
                resource.setrlimit(resource.RLIMIT_AS, (most, hard_limit))
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
    ends = {-signal.SIGPROF: "timeout", _MEMORY_EXIT: "memory", -signal.SIGKILL: "killed"}
    return Reply("done", sent) if ended == 0 else Reply(ends.get(ended, "crashed"))
