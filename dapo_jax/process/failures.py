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
OURS = ("configs", "dapo_jax", "experiments", "models", "sharding")
RETRYABLE = 75  # exit status (EX_TEMPFAIL): no fault of the settings, the same command can go on
LIMIT = 300  # characters of a library's message; tensorstore's are pages long
AGAIN = "give the same command again"
MEND = f"mend that and {AGAIN}"
DENIED = ("this user may not do that", "give the right to read and write it, or another path")
LATER = ("the storage does not answer for the moment", AGAIN)
HTTP = r"HTTP[ _](status|response|error)?([ _]code)?[:=]?[ ']?"
# The system's names of errors, and what libraries write, a status of HTTP and tensorstore's own
# codes among it: in words, and what a person does.
KINDS = {
    rf"^(EACCES|EPERM)$|{HTTP}40[13]|PERMISSION_DENIED|UNAUTHENTICATED|^forbidden"
    r"|bucket does not exist|default credentials were not found": DENIED,
    r"^E(IO|STALE|AGAIN|BUSY|PIPE|REMOTEIO|TIMEDOUT|NOTCONN|(CONN|HOST|NET)[A-Z]+)$"
    rf"|{HTTP}(408|429|50[0234])|\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED):"
    r"|too many requests|service unavailable|bad gateway|gateway time-?out|internal server error"
    r"|rateLimitExceeded|backendError|max retries exceeded|temporary failure in name resolution"
    r"|curl error": LATER,
}
# The errors of a path that leads nowhere: a flipped bit may be in the name of a file.
MISSING = ("ENOENT", "ENOTDIR", "EISDIR", "ENAMETOOLONG")
OS_ERROR = re.compile(r"(?:OS error |os_error_code=')(\d+)")  # tensorstore's, by its version
# Their errors without a status of HTTP are of the way to a bucket: gcsfs lets them through.
NETWORK = ("aiohttp.", "requests.", "urllib3.", "google.auth.", "httpx.", "httpx2.")
PATH = re.compile(r"(?<=[\"'])(?:/|\w+://)[^\"']+(?=[\"'])|gs://[^\s\"':]+")
MEMORY_TEXT = re.compile("too many open files|cannot allocate|out of memory", re.IGNORECASE)


class Cause(NamedTuple):
    """The reason of a failed read or write: where, its short name, in words, what a person does."""

    path: str
    name: str
    words: str
    advice: str


def explain(error: BaseException) -> tuple[str, int]:
    """Returns (a line for a person, the exit status) of an error.

    The line has the path, the cause, and what to do. Status 75: the same command can go on as it
    is. Any other error is its own text.
    """
    cause, status = cause_of(error), RETRYABLE if is_transient(error) else 1
    if cause and not is_refusal(error):
        return f"{cause.path}: {cause.words} ({cause.name}); {cause.advice}", status
    text = " ".join(str(error).split()) or type(error).__name__
    is_short = len(text) <= LIMIT or raised_by_us(error)
    return text if is_short else f"{text[:LIMIT]} ...", status


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
    return cause is not None and cause.advice == AGAIN


def is_damage(error: BaseException) -> bool:
    """Returns whether an error of reading a file is a fault of the file.

    Orbax and tensorstore raise errors of any type for cut or malformed files. Denied access, a lack
    of memory (the devices' too) and transient errors are no fault of a file.
    """
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return True  # Orbax's have no errno
    if cause := cause_of(error):
        return cause.name in MISSING
    if isinstance(error, OSError | MemoryError) or type(error).__name__ == "JaxRuntimeError":
        return False
    return not MEMORY_TEXT.search(str(error))


def cause_of(error: BaseException) -> Cause | None:
    """Returns the cause of a failed read or write; None for other errors."""
    for link in _chain(error):
        status, number = _http_status(link), None
        text = (f"HTTP {status}: " if status else "") + " ".join(str(link).split())
        path = named[0] if (named := PATH.search(text)) else "the storage"
        if isinstance(link, OSError):
            number, path = link.errno, link.filename2 or link.filename or path
        theirs = not raised_by_us(link) and type(link).__name__ != "JaxRuntimeError"
        if theirs and (match := OS_ERROR.search(text)):
            number = int(match[1])
        # Without what Orbax adds to a checkpoint's until it is complete.
        path = f"{path}" if isinstance(path, int) else os.fsdecode(path)
        path = path.partition(".orbax-checkpoint-tmp")[0]
        system = errno.errorcode.get(number, "")
        name = system or (text if theirs or status else "")
        kinds = (it for pattern, it in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
        words, advice = next(kinds, ("", MEND))
        if system:
            return Cause(path, system, getattr(link, "strerror", "") or os.strerror(number), advice)
        if words:
            return Cause(path, name[:LIMIT], words, advice)
        lost = not status and f"{type(link).__module__}.".startswith(NETWORK)
        if lost or isinstance(link, TimeoutError | ConnectionError):
            return Cause(path, type(link).__name__, *LATER)
    return None


def brief(error: BaseException) -> str:
    """Shortens an error to its kind and the beginning of its message, which may be pages long."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def raised_by_us(error: BaseException) -> bool:
    """Returns whether our own check refused something: other errors need their traceback.

    Other modules of the clone's folder are the user's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    innermost = pathlib.Path(frames[-1].filename if frames else "")
    return any(innermost.is_relative_to(ROOT / name) for name in OURS)


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
    holders = ((response, "status_code"), (error, "status"), (error, "code"))
    values = (str(getattr(holder, name, "")) for holder, name in holders)
    return next((value for value in values if re.fullmatch(r"[45]\d\d", value)), "")
