"""What an error of storage means: to be read again, a fault of what was read, or another's."""

import errno
import re
import time
from collections.abc import Callable
from typing import Any

import jax

RETRY_SECONDS = (1, 2, 4, 8, 15)  # between readings of a storage that fails for a while
# What can be read again: this system's errors, and a bucket's, of which tensorstore and fsspec give
# the text alone.
TRANSIENT_ERRNOS = tuple(
    getattr(errno, name)
    for name in (
        *("EIO", "ESTALE", "ETIMEDOUT", "EAGAIN", "EINTR", "EBUSY", "EREMOTEIO", "EPIPE"),
        *("ECONNRESET", "ECONNREFUSED", "ECONNABORTED", "EHOSTUNREACH", "ENETUNREACH"),
    )
    if hasattr(errno, name)
)
TRANSIENT_TEXT = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|Input/output error|Stale file handle|[Tt]imed out|"
    r"Connection (reset|refused|aborted)|Too Many Requests|Service Unavailable)\b"
    r"|(HTTP|[Ss]tatus|[Cc]ode|[Rr]esponse)\D{0,20}\b(408|429|500|502|503|504)\b"
)
REFUSED_TEXT = re.compile(
    r"PERMISSION_DENIED|UNAUTHENTICATED|Permission denied|Too many open files|"
    r"Cannot allocate memory|Out of memory|out of memory"
)
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def is_transient(error: BaseException) -> bool:
    """Says whether reading again, some time later, may well succeed."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in TRANSIENT_ERRNOS
    return bool(TRANSIENT_TEXT.search(str(error))) and not isinstance(error, MISSING)


def is_damage(error: BaseException) -> bool:
    """Says whether an error of reading a file is a fault of the file.

    What Orbax and tensorstore raise for cut or malformed files has any type; no fault of them are a
    denied access, a lack of memory and what may pass.
    """
    if isinstance(error, MISSING):
        return True
    if isinstance(error, OSError | MemoryError | jax.errors.JaxRuntimeError):
        return False
    return not (is_transient(error) or REFUSED_TEXT.search(str(error)))


def patiently(read: Callable[[], Any], message: str) -> Any:
    """Calls `read` again after each passing error; in the end raises OSError with the message."""
    waits = iter(RETRY_SECONDS)
    while True:
        try:
            return read()
        except Exception as error:
            if not is_transient(error):
                raise
            if (seconds := next(waits, None)) is None:
                raise OSError(errno.ETIMEDOUT, f"{message} ({brief(error)})") from error
        time.sleep(seconds)


def brief(error: BaseException) -> str:
    """Shortens an error to its kind and the beginning of its message, which may be pages long."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
