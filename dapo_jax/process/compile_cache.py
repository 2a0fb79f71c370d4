"""The folder of compiled programs, which JAX's compilation cache loads at the next start.

setup/README.md says where it is, and how another one is named.
"""

import hashlib
import os
import pathlib
import re

import jax

from dapo_jax.process import hosts

MAX_BYTES = 2 * 2**30  # of the default folder; JAX drops the programs used longest ago


def enable() -> None:
    """Turns JAX's cache on, in the default folder where the environment names none.

    Several hosts have no default: JAX writes only what process 0 compiles, so with a folder of its
    own it would wait for the others, which compile.
    """
    if not hosts.started() and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = cache / "dapo_jax" / "programs" / machine()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def machine() -> str:
    """Names what of this CPU decides which compiled programs it can run; JAX's key lacks it.

    XLA loads another CPU's program with no more than a message, and splits loops by the cores.
    """
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
        cpu = sorted({*re.findall(r"^(?:model name|flags|Features)\b.*", text, re.MULTILINE)})
    except OSError:  # macOS: hosts do not share programs
        cpu = os.uname().nodename
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    digest = hashlib.sha256(str(cpu).encode()).hexdigest()[:8]
    return f"{os.uname().machine}-{digest}-{cores}"
