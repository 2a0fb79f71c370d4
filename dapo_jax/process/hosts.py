"""The processes of one program: what they agree on, and how all end.

Every process takes every decision from values that all have, and calls what is collective at the
same point. What only one of them can know goes through `gather` or `on_main`. Threads of different
processes, which must not wait for devices, use the key-value store: `kv_put` and `kv_get`.

All end together: the first one that ends says with which line and status (`end`), and the others
follow. One that dies or falls silent cannot say it: the others notice, and leave with RETRYABLE, or
JAX's client aborts them (SIGABRT, status 134). The same command goes on after both.
"""

import atexit
import contextlib
import errno
import functools
import multiprocessing.util
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # its key-value store has no public name
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.process.failures import RETRYABLE, brief
from sharding.mesh import split_cpu

COORDINATOR, PROCESSES, PROCESS = "DAPO_COORDINATOR", "DAPO_PROCESSES", "DAPO_PROCESS"
# A process that has been silent for so long is taken for dead. JAX sends and counts heartbeats in
# threads of C++, which neither a compilation nor a long hold of the interpreter's lock stops.
HEARTBEAT_SECONDS = 12
WAITING_SECONDS = 10.0  # between the lines of what takes long
END = "end"  # key: how all processes end
PARTING_SECONDS = 3.0  # for the store, which may be gone, and for others to read it before it is
THREADS_SECONDS = 8.0  # for threads to end behind a command
# How a collective, the key-value store or a TPU says that another process is not there any more. A
# compiler's errors are pages of operations, an optimization_barrier among them.
GLOO = re.compile(r"[A-Z_]+: .*[Gg]loo", re.DOTALL)  # a ValueError
LOST = re.compile(
    r"(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED): |(?!RESOURCE_EXHAUSTED)[A-Z_]+: .*([Gg]loo"
    r"|[Cc]oordination service|heartbeat|\bBarrier |[Ss]hutdown barrier"
    r"|[Cc]onnection (reset|closed|refused)|[Bb]roken pipe|Socket closed|halted unexpectedly)",
    re.DOTALL,
)
# On TPUs JAX gives up like this on the name of a process 0 that is not there yet (its pod waits for
# a node), and on the machine's metadata.
AWAY = re.compile(r"Failed to recognize coordinator address|Getting metadata\[")
_ending = threading.Lock()  # taken once: one thread ends the process, and says why


def start(*, several: bool, cpu_devices: int) -> None:
    """Joins the other processes, if there are `several`; to be called before JAX is used.

    On a TPU pod they find each other. Elsewhere the environment has DAPO_COORDINATOR (host:port of
    process 0), DAPO_PROCESSES and DAPO_PROCESS (0, 1, ...). cpu_devices: into how many the CPUs of
    all processes are split (0: as JAX does). Raises ValueError where a variable is missing.
    """
    if several:
        # Signals are handled by what saves; JAX would only record it.
        jax.config.update("jax_enable_preemption_service", False)
        cluster = _cluster_of_environment()
        try:
            with _saying_what_is_waited_for(cluster):
                jax.distributed.initialize(**cluster, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
        except RuntimeError as error:
            if not (isinstance(error, jax.errors.JaxRuntimeError) or AWAY.match(str(error))):
                raise
            leave(f"the processes did not find each other: {brief(error)}", RETRYABLE)
    processes = distributed.global_state.num_processes if several else 1
    if cpu_devices % processes:
        raise ValueError(
            f"mesh.cpu_devices = {cpu_devices} does not divide over {processes} processes"
        )
    split_cpu(cpu_devices // processes)
    if several:
        done = threading.Event()
        watch = threading.Thread(target=_watch, args=[done], name="watch", daemon=True)
        watch.start()
        # Before JAX leaves the others, which it registered earlier.
        atexit.register(lambda: (done.set(), watch.join()))


def _cluster_of_environment() -> dict[str, Any]:
    names = {COORDINATOR: "coordinator_address", PROCESSES: "num_processes", PROCESS: "process_id"}
    given = {name: os.environ[name] for name in names if name in os.environ}
    if given and len(given) < len(names):
        missing = sorted(names.keys() - given.keys())
        raise ValueError(f"{', '.join(given)} is set, but not {', '.join(missing)}: set all three")
    return {names[name]: text if name == COORDINATOR else int(text) for name, text in given.items()}


@contextlib.contextmanager
def saying_seconds(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Says every ten seconds for how long something has been going on."""
    done, start = threading.Event(), time.monotonic()

    def tell():
        while not done.wait(WAITING_SECONDS):
            say(f"{what}, {time.monotonic() - start:.0f} s")

    threading.Thread(target=tell, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextlib.contextmanager
def _saying_what_is_waited_for(cluster: dict[str, Any]) -> Iterator[None]:
    """Says whom this process waits for; ValueError where the port is taken.

    JAX would say neither, and a taken port looks like a process that may come back.
    """
    address = cluster.get("coordinator_address", "")
    port = address.rpartition(":")[2]
    if cluster.get("process_id") == 0 and port.isdecimal():
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("::", int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                message = f"{COORDINATOR}={address}: that port is in use here; give another"
                raise ValueError(message) from None
    who = f"{cluster.get('num_processes', 'all')} processes at {address or 'the pod'}"
    # Ctrl-C would wait for JAX, whose library then aborts with its stack.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with saying_seconds(f"waiting for {who}", _print):
            yield
    finally:
        signal.signal(signal.SIGINT, handler)


def started() -> bool:
    """Returns whether this process has joined others, without starting JAX's backends."""
    return distributed.global_state.client is not None


def count() -> int:
    """Counts the processes that run the program."""
    return jax.process_count()


def is_main_host() -> bool:
    """Returns whether this process writes the files that all processes would write alike."""
    return jax.process_index() == 0


def is_mine(number: int) -> bool:
    """Returns whether a numbered piece of host work is this process's; each is one's."""
    return number % jax.process_count() == jax.process_index()


def place(tree, shardings):
    """Makes global arrays from host arrays, equal on every process, by one sharding or a tree."""

    def one(array, sharding):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(one, tree, jax.tree.broadcast(shardings, tree))


def fetch(tree):
    """Returns global arrays as whole NumPy arrays on every process; all call it."""
    if count() == 1:
        return jax.device_get(tree)
    leaves, structure = jax.tree.flatten(tree)
    split = [leaf for leaf in leaves if not leaf.is_fully_replicated]
    if split:
        whole = iter(_replicate(split[0].sharding.mesh)(split))
        leaves = [leaf if leaf.is_fully_replicated else next(whole) for leaf in leaves]
    local = [leaf.addressable_data(0) for leaf in leaves]
    return jax.tree.unflatten(structure, jax.device_get(local))


@functools.cache
def _replicate(mesh):
    return jax.jit(lambda arrays: arrays, out_shardings=NamedSharding(mesh, PartitionSpec()))


def gather(value) -> list:
    """Returns every process's picklable value, in their order; all call it at the same point."""
    return [value] if count() == 1 else _exchanged(value, multihost_utils.process_allgather)


def on_main(decide: Callable[[], Any]):
    """Returns on all processes what `decide()` gives on the main host; raises its error on all."""
    if count() == 1:
        return decide()
    result = error = None
    if is_main_host():
        try:
            result = decide()
        except (ValueError, OSError) as raised:
            error = raised
    # A device holds that one alone, where `gather` would need as much for every process.
    ((result, error),) = _exchanged((result, error), multihost_utils.broadcast_one_to_all)
    if error is not None:
        raise error
    return result


def _exchanged(value, exchange: Callable) -> list:
    """Returns the values that an exchange of arrays brings: every process's, or the main one's."""
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = np.atleast_1d(exchange(np.int32(len(data))))
    # A power of two: each length would be another program.
    padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
    padded[: len(data)] = data[: len(padded)]
    rows = np.atleast_2d(exchange(padded))
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def kv_put(name: str, text: str) -> None:
    """Puts a text into the key-value store of all processes, over an older one of that name."""
    if started():
        distributed.global_state.client.key_value_set(f"dapo/{name}", text, allow_overwrite=True)


def kv_get(name: str, *, wait_seconds: float) -> str | None:
    """Reads the key-value store; None where no process has put that name after so many seconds."""
    if not started():
        return None
    client = distributed.global_state.client
    try:
        return client.blocking_key_value_get(f"dapo/{name}", max(1, int(1_000 * wait_seconds)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def fail(message: str, *, code: int = 1) -> None:
    """Ends all processes at once: the others would wait forever for this one. Alone it goes on.

    Asks JAX for nothing: it would start its backends, and wait there for the others.
    """
    if started():
        *before, line = message.strip().splitlines()
        if before:
            _print("\n".join(before))
        end(line, code)


def end(line: str, status: int) -> None:
    """Ends all processes with the line and the status, or as the first one that ended has said."""
    if not started():
        leave(line, status)
    failed = " failed" if status == 1 else ""
    mine = f"{status} process {distributed.global_state.process_id}{failed}: {line}"
    if theirs := _quickly(lambda: _first_end(mine), PARTING_SECONDS):
        _follow(theirs)
    leave(line, status)


def leave(line: str, status: int, *, say: Callable[[str], None] | None = None) -> None:
    """Ends this process, which says the line. The main one lets the others read the store first.

    say: prints the line; None: to standard error.
    """
    if not _ending.acquire(blocking=False):
        threading.Event().wait()  # another thread is at it
    with contextlib.suppress(Exception, SystemExit):  # nobody may be there to read it any more
        (say or _print)(line)
        sys.stdout.flush()
    if started() and distributed.global_state.process_id == 0:
        time.sleep(PARTING_SECONDS)  # JAX aborts who still runs without the store
    os._exit(status)


def leave_threads(code: str | int | None) -> None:
    """Ends this process, some seconds from here, where Python then still waits for others.

    It does for threads and processes of a tool's own that hang. The command is over, and all is
    saved. code: a SystemExit's.
    """

    def leave_them():
        time.sleep(THREADS_SECONDS)
        frame = sys._current_frames().get(threading.main_thread().ident)
        stack = {it.f_code for it, _ in traceback.walk_stack(frame)} if frame else set()
        if stack & {threading._shutdown.__code__, multiprocessing.util._exit_function.__code__}:
            if started():
                distributed.global_state.shutdown()
            status = code if isinstance(code, int) else int(code is not None)
            leave("threads or processes that do not end are left behind", status)

    threading.Thread(target=leave_them, name="end", daemon=True).start()


@contextlib.contextmanager
def ending_when_a_peer_is_lost() -> Iterator[None]:
    """Ends all processes with RETRYABLE where an error inside means that one of them is gone."""
    try:
        yield
    except Exception as error:
        if line := lost_line(error):
            end(line, RETRYABLE)
        raise


def lost_line(error: BaseException) -> str | None:
    """Says in one line that another process is gone, where that is what the error means."""
    if started() and is_lost(error):
        return f"another process is gone ({brief(error)}); give the command again"
    return None


def is_lost(error: BaseException) -> bool:
    """Returns whether JAX raised it because another process is gone."""
    if (LOST if isinstance(error, jax.errors.JaxRuntimeError) else GLOO).match(str(error)):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and is_lost(before)


def _first_end(text: str) -> str | None:
    """Puts how all end into the store; returns what another process has put there before, if so."""
    try:
        distributed.global_state.client.key_value_set(f"dapo/{END}", text)
    except jax.errors.JaxRuntimeError as error:
        return kv_get(END, wait_seconds=1.0) if "ALREADY_EXISTS" in str(error) else None
    return None


def _follow(text: str) -> None:
    status, _, line = text.partition(" ")
    leave(line, int(status))


def _quickly(call: Callable[[], Any], seconds: float) -> Any:
    """Returns what a call of the store does; None where it fails, or lasts: it may be gone."""
    results = []

    def attempt():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            results.append(call())

    thread = threading.Thread(target=attempt, name="store", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _watch(done: threading.Event) -> None:
    """Ends this process when another one has said that all end, or cannot be reached."""
    with ending_when_a_peer_is_lost():
        while not done.is_set():
            if (text := kv_get(END, wait_seconds=1.0)) is not None:
                _follow(text)
