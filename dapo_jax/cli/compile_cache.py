"""The folder of compiled programs, which JAX's compilation cache loads at the next start.

JAX_COMPILATION_CACHE_DIR=DIR (or gs://...) names another one, JAX_ENABLE_COMPILATION_CACHE=false
turns the cache off. Without either it is $XDG_CACHE_HOME/dapo_jax/programs, or
~/.cache/dapo_jax/programs, in a folder by CPU and number of cores.
"""

import hashlib
import os
import pathlib
import re
import sys

import jax

DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
SHORTEST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
MAX_BYTES = 2 * 2**30  # of the default folder; JAX drops the programs used longest ago
# The parts of /proc/cpuinfo that a program for a CPU depends on; JAX's key lacks them.
CPU_FIELDS = re.compile(
    r"^(vendor_id|cpu family|model|model name|flags|Features|CPU (?:implementer|variant|part))\s*:"
)


def enable(*, several: bool) -> None:
    """Turns JAX's cache on, in the default folder where the environment names none.

    several: whether the program runs on several hosts. They have no default: JAX writes only what
    process 0 compiles, so with a folder of its own it would wait for the others, which compile.
    """
    if several or DIRECTORY in os.environ or not jax.config.jax_enable_compilation_cache:
        return
    try:
        folder = default_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        print(f"compiled programs are not kept for the next start: {error}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    if SHORTEST not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def default_folder() -> pathlib.Path:
    """Returns this user's folder for programs compiled for this machine."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "dapo_jax" / "programs" / machine()


def machine() -> str:
    """Names the properties of this CPU that decide which compiled programs it can run.

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
