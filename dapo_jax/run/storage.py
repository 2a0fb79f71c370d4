"""What an error of reading means: to be read again, a fault of what was read, or neither."""

import errno
import os
import re
import time
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from dapo_jax.run.failures import CAUSES, cause_of
from sharding import hosts

RETRY_SECONDS = (1, 2, 4, 8, 15)  # between readings of a storage that fails for a while
# A flipped bit may be in the name of a file.
MISSING = [
    CAUSES[number] for number in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
]
MISSING_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # Orbax's have no errno
# tensorstore's words, where they are not the system's. ABORTED: it has tried for minutes.
TRANSIENT_TEXT = re.compile(r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED)\b|[Tt]imed out")
REFUSED_TEXT = re.compile(r"Too many open files|Cannot allocate|[Oo]ut of memory")


def is_transient(error: BaseException) -> bool:
    """Says whether reading again, some time later, may well succeed."""
    if found := cause_of(error):
        return found[1].transient
    return bool(TRANSIENT_TEXT.search(str(error))) and not REFUSED_TEXT.search(str(error))


def is_damage(error: BaseException) -> bool:
    """Says whether an error of reading a file is a fault of the file.

    What Orbax and tensorstore raise for cut or malformed files has any type; no fault of them are a
    denied access, a lack of memory and what may pass.
    """
    if isinstance(error, MISSING_ERRORS):
        return True
    if found := cause_of(error):
        return found[1] in MISSING
    if isinstance(error, OSError | MemoryError | jax.errors.JaxRuntimeError):
        return False
    return not (TRANSIENT_TEXT.search(str(error)) or REFUSED_TEXT.search(str(error)))


def patiently(read: Callable[[], Any], path) -> Any:
    """Calls `read` again after each passing error; in the end raises OSError with the path."""
    waits = iter(RETRY_SECONDS)
    while True:
        try:
            return read()
        except Exception as error:
            if not is_transient(error):
                raise
            if (seconds := next(waits, None)) is None:
                raise OSError(errno.ETIMEDOUT, brief(error), str(path)) from error
        time.sleep(seconds)


def absolute(path) -> epath.Path:
    """Makes a path absolute, as Orbax wants it; one with a scheme (gs://) is so already."""
    path = epath.Path(path)
    return path if "://" in str(path) else path.absolute()


def is_gone(directory: epath.Path, step: int | None) -> bool:
    """Says whether a step's checkpoint has gone, as the main process sees it; None: of no step."""
    return step is not None and hosts.is_main_host() and not (directory / str(step)).exists()


def not_there(path: epath.Path) -> FileNotFoundError:
    """Makes the system's own error of a path at which nothing is."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def brief(error: BaseException) -> str:
    """Shortens an error to its kind and the beginning of its message, which may be pages long."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
