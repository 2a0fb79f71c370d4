"""Classifies failed reads and writes: one line for a person, and the exit status.

Host only. Libraries hide the system's error in their own: tensorstore's is a ValueError with the
system's number in its text, a bucket's a status of HTTP. Both are looked for in the whole chain of
causes.
"""

import errno
import logging
import os
import pathlib
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
RETRYABLE = 75  # exit status (EX_TEMPFAIL): no fault of the settings, the same command can go on
LIMIT = 300  # characters of a library's message; tensorstore's are pages long
AGAIN = "give the same command again"
TRANSIENT = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENETDOWN, errno.ENETUNREACH, errno.EAGAIN),
    *(errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ECONNRESET, errno.ECONNREFUSED, errno.EBUSY),
    *(errno.ECONNABORTED, errno.EREMOTEIO, errno.ENOTCONN, errno.EPIPE),
)
# The errors of a path that leads nowhere: a flipped bit may be in the name of a file.
MISSING = ("ENOENT", "ENOTDIR", "EISDIR", "ENAMETOOLONG")
MISSING_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # Orbax's have no errno
OS_ERROR = re.compile(r"OS error (\d+)|os_error_code='(\d+)'")  # tensorstore's, by its version
# Their errors without a status of HTTP are of the way to a bucket: gcsfs lets them through.
NETWORK = ("aiohttp.", "requests.", "urllib3.", "google.auth.", "httpx.", "httpx2.")
PATH = re.compile(r"[\"'](/[^\"']+|\w+://[^\"']+)[\"']|(gs://[^\s\"':]+)")
MEMORY_TEXT = re.compile("too many open files|cannot allocate|out of memory", re.IGNORECASE)


class Cause(NamedTuple):
    """The reason of a failed read or write: in words, what a person does, whether it may pass."""

    words: str
    advice: str = f"mend that and {AGAIN}"
    transient: bool = False


LATER = Cause("the storage does not answer for the moment", AGAIN, transient=True)
DENIED = Cause("this user may not do that", "give the right to read and write it, or another path")
HTTP = r"HTTP[ _](status|response|error)?([ _]code)?[:=]?[ ']?"
# What libraries write, a status of HTTP and tensorstore's own codes among it, and its cause.
TEXTS = {
    rf"{HTTP}40[13]|PERMISSION_DENIED|UNAUTHENTICATED|^forbidden|bucket does not exist"
    r"|default credentials were not found": DENIED,
    rf"{HTTP}(408|429|50[0234])|\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED):"
    r"|too many requests|service unavailable|bad gateway|gateway time-?out|internal server error"
    r"|rateLimitExceeded|backendError|max retries exceeded|temporary failure in name resolution"
    r"|curl error": LATER,
}


def explain(error: BaseException) -> tuple[str, int]:
    """Returns (a line for a person, the exit status) of an error.

    The line has the path, the cause, and what to do. Status 75: the same command can go on as it
    is. Any other error is its own text.
    """
    found = cause_of(error)
    status = RETRYABLE if found and found[1].transient else 1
    if found is None or is_refusal(error):
        text = " ".join(str(error).split()) or type(error).__name__
        short = len(text) <= LIMIT or raised_by_us(error)
        return text if short else f"{text[:LIMIT]} ...", status
    path, cause, name = found
    return f"{path or 'the storage'}: {cause.words} ({name}); {cause.advice}", status


def is_refusal(error: BaseException) -> bool:
    """Returns whether it is a check of ours, whose message is made for a person."""
    ours = isinstance(error, ValueError | OSError) and raised_by_us(error)
    return ours and getattr(error, "errno", None) is None


def is_explained(error: BaseException) -> bool:
    """Returns whether `explain` has more to say of an error than its traceback has."""
    return is_refusal(error) or cause_of(error) is not None


def is_transient(error: BaseException) -> bool:
    """Returns whether reading again, some time later, may well succeed."""
    cause = cause_of(error)
    return cause is not None and cause[1].transient


def is_damage(error: BaseException) -> bool:
    """Returns whether an error of reading a file is a fault of the file.

    Orbax and tensorstore raise errors of any type for cut or malformed files. Denied access, a lack
    of memory (the devices' too) and transient errors are no fault of a file.
    """
    if isinstance(error, MISSING_ERRORS):
        return True
    if cause := cause_of(error):
        return cause[2] in MISSING
    if isinstance(error, OSError | MemoryError) or type(error).__name__ == "JaxRuntimeError":
        return False
    return not MEMORY_TEXT.search(str(error))


def cause_of(error: BaseException) -> tuple[str | None, Cause, str] | None:
    """Returns (path, cause, its short name) of a failed read or write; None for other errors."""
    for link in _chain(error):
        number = getattr(link, "errno", None)
        if isinstance(link, OSError) and number in errno.errorcode:
            cause = of_errno(number)._replace(words=str(link.strerror))
            return _text(link.filename2 or link.filename), cause, errno.errorcode[number]
        status = _http_status(link)
        text = f"HTTP {status}: {link}" if status else str(link)
        named = PATH.search(text)
        path = _text(named[1] or named[2]) if named else None
        theirs = not raised_by_us(link) and type(link).__name__ != "JaxRuntimeError"
        if theirs and (match := OS_ERROR.search(text)):
            number = int(match[1] or match[2])
            return path, of_errno(number), errno.errorcode.get(number, str(number))
        for pattern, cause in TEXTS.items() if theirs or status else ():
            if re.search(pattern, text, re.IGNORECASE):
                return path, cause, " ".join(text.split())[:LIMIT]
        lost = not status and f"{type(link).__module__}.".startswith(NETWORK)
        if lost or isinstance(link, TimeoutError | ConnectionError):
            return path, LATER, type(link).__name__
    return None


def of_errno(number: int) -> Cause:
    """Makes a cause of the system's error number, in the system's words."""
    if number in (errno.EACCES, errno.EPERM):
        return DENIED
    return (LATER if number in TRANSIENT else Cause(""))._replace(words=os.strerror(number))


def brief(error: BaseException) -> str:
    """Shortens an error to its kind and the beginning of its message, which may be pages long."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def raised_by_us(error: BaseException) -> bool:
    """Returns whether our own check refused something: a library's error needs its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    innermost = pathlib.Path(frames[-1].filename)
    return innermost.is_relative_to(ROOT) and "site-packages" not in innermost.parts


def quiet_threads() -> None:
    """Keeps threads of Orbax, asyncio and tensorstore from printing what the main thread is told.

    A thread that fails to read or write, as TensorBoard's on a full disk, says so in a line.
    """

    def is_new(record: logging.LogRecord) -> bool:
        told = record.name == "asyncio" or "orbax" in record.pathname
        return not (record.exc_info and told)

    def unraisable(args):
        code = getattr(args.object, "cr_code", None)
        if str(args.exc_value) != "Event loop is closed" and "orbax" not in str(code):
            sys.__unraisablehook__(args)

    def of_thread(args):
        if args.exc_value is not None and cause_of(args.exc_value):
            print(f"{args.thread.name}: {explain(args.exc_value)[0]}", file=sys.stderr, flush=True)
        else:
            threading.__excepthook__(args)

    for handler in logging.getLogger("absl").handlers + logging.getLogger().handlers:
        handler.addFilter(is_new)
    sys.unraisablehook, threading.excepthook = unraisable, of_thread


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what caused it; what was handled before it is no cause."""
    yield error
    for cause in (*getattr(error, "exceptions", ()), error.__cause__):
        if cause is not None:
            yield from _chain(cause)


def _http_status(error: BaseException) -> str:
    """The status of a bucket's answer: gcsfs, aiohttp, requests and google.api_core name it."""
    response = getattr(error, "response", None)
    for holder, name in ((response, "status_code"), (error, "status"), (error, "code")):
        if re.fullmatch(r"[45]\d\d", status := str(getattr(holder, name, ""))):
            return status
    return ""


def _text(path) -> str | None:
    """A path as text, without what Orbax adds to a checkpoint's until it is complete."""
    return None if path is None else os.fsdecode(path).partition(".orbax-checkpoint-tmp")[0]
