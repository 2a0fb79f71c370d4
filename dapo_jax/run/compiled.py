"""Keeps a command's compiled programs for its next start, in JAX's compilation cache.

JAX_COMPILATION_CACHE_DIR=DIR (or gs://...) says where they lie, JAX_ENABLE_COMPILATION_CACHE=false
that they are not kept. Without either they lie in $XDG_CACHE_HOME/dapo_jax, or ~/.cache/dapo_jax.
"""

import contextlib
import errno
import glob
import hashlib
import os
import pathlib
import re
import stat
import sys
import tempfile
import warnings

import jax

DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
SHORTEST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
MOST_BYTES, MOST_ENTRIES = 2 * 2**30, 10_000  # of the default folder, of all machines
# What a program for a CPU depends on; JAX's key has the numbers of devices, not these.
CPU_FIELDS = re.compile(
    r"^(vendor_id|cpu family|model|model name|flags|Features|CPU (?:implementer|variant|part))\s*:"
)
FAILED = re.compile(r"Error (reading|writing) persistent compilation cache entry for '([^']*)': ")


def keep(*, several: bool) -> None:
    """Has JAX keep what it compiles from here on, and load what an earlier start has compiled.

    several: whether the program runs on several hosts. They have no default: JAX writes only what
    process 0 compiles, so with a folder of its own it would wait for the others, which compile.
    """
    if jax.config.jax_enable_compilation_cache:
        _tell_failures_once()
    if several or DIRECTORY in os.environ or not jax.config.jax_enable_compilation_cache:
        return
    try:
        folder = default_folder()
        _prepare(folder)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _say(f"compiled programs are not kept for the next start: {where}{error.strerror or error}")
        return
    trim(folder.parent)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if SHORTEST not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def default_folder() -> pathlib.Path:
    """Returns this user's folder for programs compiled for this machine."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # the convention says to ignore it
        try:
            home = pathlib.Path.home()
        except RuntimeError as error:
            raise OSError("this user has no home directory") from error
        if not os.environ.get("HOME", "unset"):  # which Python takes for /
            raise OSError("HOME is empty")
        if not home.is_dir():  # which root could make
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(home))
        cache = home / ".cache"
    return cache / "dapo_jax" / "compiled" / machine()


def machine() -> str:
    """Names what decides, beside the key of JAX's cache, what XLA compiles for a CPU.

    XLA loads another CPU's program with no more than a message, and splits loops by the cores.
    """
    try:
        first, *_ = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")
    except OSError:
        first = ""
    # Where it cannot be read (macOS), hosts do not share programs.
    cpu = [line for line in first.splitlines() if CPU_FIELDS.match(line)] or os.uname().nodename
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    digest = hashlib.sha256(str(cpu).encode()).hexdigest()[:8]
    return f"{os.uname().machine}-{digest}-{cores}"


def trim(folder: pathlib.Path, most_bytes: int = MOST_BYTES, most_entries: int = MOST_ENTRIES):
    """Deletes the programs below a folder that were used longest ago, down to these limits."""
    found = []
    for path in folder.rglob("*-cache"):
        with contextlib.suppress(OSError):  # another process trims, too
            status = path.stat()
            found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    total = 0
    for i, (_, size, path) in enumerate(sorted(found, reverse=True)):
        total += size
        if total > most_bytes or i >= most_entries:
            with contextlib.suppress(OSError):
                path.unlink()


def _prepare(folder: pathlib.Path) -> None:
    """Makes the folder; raises OSError where it cannot be written, or another user could write it.

    A cached program is machine code that this process will run.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise OSError(f"{folder} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{folder} can be written by other users; chmod go-w makes it this user's")
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(4096))


def _tell_failures_once() -> None:
    """Shows JAX's warnings of the cache as one line for reading and one for writing.

    JAX compiles what it could not read, but does not replace a damaged entry of the default folder
    (a process was killed while writing it), so those of that name are deleted.
    """
    show, told = warnings.showwarning, set()

    def once(message, *details, **more):
        match = FAILED.match(str(message))
        if match is None:
            show(message, *details, **more)
            return
        folder, (act, name) = jax.config.jax_compilation_cache_dir, match.groups()
        if act == "reading" and DIRECTORY not in os.environ:
            for path in pathlib.Path(folder).glob(f"{glob.escape(name)}-*-cache"):
                with contextlib.suppress(OSError):
                    path.unlink()
        if act not in told:
            told.add(act)
            reason = " ".join(str(message)[match.end() :].split())[:200]
            _say(f"the compiled programs in {folder} fail at {act}, the run goes on: {reason}")

    warnings.showwarning = once


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
