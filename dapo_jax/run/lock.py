"""One live run a directory: a lock file that says who has it, and that the dead give up.

Host only. The kernel's lock on the file decides between processes of one machine, and of several
where the file system passes it on: it ends with its process, however that ends. Where a file
system does not pass it on (some NFS mounts, buckets mounted as folders), a thread touches the file
every few seconds, and a starting process watches whether another machine's still moves.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

NAME = "run.lock"
HEARTBEAT_SECONDS = 5.0
WATCHED_SECONDS = 20.0  # a heartbeat that has not moved for so long is a dead one's
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def locked(folder, *, say: Callable[[str], None] = print) -> Iterator[None]:
    """Holds the lock of a folder, which is made if absent.

    Raises ValueError, in one line with host, process, time and file, where a live run has it.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    descriptor = _take(path, say)
    stopped = threading.Event()
    beat = threading.Thread(target=_beat, args=(descriptor, stopped), name="lock", daemon=True)
    beat.start()
    try:
        yield
    finally:
        stopped.set()
        beat.join()
        with contextlib.suppress(OSError):  # the folder may be gone, or read-only by now
            if _is_at(descriptor, path):
                path.unlink()  # while it is held: nobody else can have it between the two
        os.close(descriptor)


def _take(path: pathlib.Path, say: Callable[[str], None]) -> int:
    """Returns the open lock file, locked and with this process's name in it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not _lock(descriptor):
                raise _refusal(path, _patient_owner(descriptor))
            owner = _owner(descriptor)
            if owner and _lives(owner, path, say):
                raise _refusal(path, owner)
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(_myself()).encode() + b"\n", 0)
                os.fsync(descriptor)
                return descriptor
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(path)
            raise
        os.close(descriptor)  # its last owner has just removed it: the name is another file's now


def _lock(descriptor: int) -> bool:
    """Takes the kernel's lock; False where another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def _beat(descriptor: int, stopped: threading.Event) -> None:
    while not stopped.wait(HEARTBEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(descriptor)


def _lives(owner: dict, path: pathlib.Path, say: Callable[[str], None]) -> bool:
    """Says whether the process that a lock file names still runs, the kernel's lock being free."""
    if (owner.get("host"), owner.get("boot")) == (socket.gethostname(), _boot()):
        if owner.get("pid") == os.getpid():  # an earlier run of this process
            return False
        return owner.get("born") is not None and owner["born"] == _born(owner.get("pid"))
    if owner.get("host") == socket.gethostname():
        return False  # the machine was started again
    say(f"watching for {WATCHED_SECONDS:.0f} s whether the run on {owner.get('host')} still lives")
    before, until = _touched(path), time.monotonic() + WATCHED_SECONDS
    while before and time.monotonic() < until:
        time.sleep(min(1.0, WATCHED_SECONDS / 10))
        if (now := _touched(path)) != before:
            return now is not None
    return False


def _touched(path: pathlib.Path) -> int | None:
    """When the file was touched last; opened for it, since NFS remembers times from the opening."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _patient_owner(descriptor: int) -> dict:
    """Who has the lock; waits for one that has just taken it and not yet written its name."""
    for _ in range(20):
        if owner := _owner(descriptor):
            return owner
        time.sleep(0.05)
    return {}


def _owner(descriptor: int) -> dict:
    """What the lock file says; empty where it is new, or its owner could not write it."""
    try:
        found = json.loads(os.pread(descriptor, 4_096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _refusal(path: pathlib.Path, owner: dict) -> ValueError:
    who = "process {pid} on {host}, since {time}".format(
        **{"pid": "?", "host": "?", "time": "?"} | owner
    )
    return ValueError(
        f"{path.parent} belongs to a run that is going on ({who}; {path}); end that one, or give "
        "another --workdir (and checkpoint.directory)"
    )


def _myself() -> dict:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    pid = os.getpid()
    host = socket.gethostname()
    return {"host": host, "pid": pid, "time": now, "boot": _boot(), "born": _born(pid)}


def _boot() -> str | None:
    """What the running kernel calls this start of the machine; None where it does not say."""
    with contextlib.suppress(OSError):
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def _born(pid) -> int | None:
    """When a process began, in ticks since the machine did; a later one of its number differs."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None


def _identity(descriptor: int) -> tuple[int, int]:
    there = os.fstat(descriptor)
    return there.st_dev, there.st_ino


def _is_at(descriptor: int, path: pathlib.Path) -> bool:
    """Whether the open file still has its name."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == _identity(descriptor)
