"""Classifies failed reads and writes: one line for a person, the exit status, and what to do.

Host only. Libraries hide the system's error in their own: tensorstore's is a ValueError with the
system's words in its text, a bucket's a status of HTTP. Both are looked for in the whole chain of
causes.
"""

import contextlib
import dataclasses
import errno
import logging
import os
import pathlib
import re
import shutil
import sys
import threading
import traceback
import urllib.parse
from collections.abc import Callable, Iterator

from sharding import hosts

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT = 300  # characters of a library's message; tensorstore's are pages long
AGAIN = "give the same command again"


@dataclasses.dataclass(frozen=True)
class Cause:
    """The reason why a read or write failed: in words, what a person does, whether it may pass."""

    words: str
    advice: str = f"mend that and {AGAIN}"
    transient: bool = False


LATER = Cause("the storage does not answer for the moment", AGAIN, transient=True)
DENIED = Cause("this user may not do that", "give the right to read and write it, or another path")
NO_BUCKET = Cause(
    "there is no such bucket, or this user may not see it",
    "make it, give the right storage.buckets.get, or another path",
)
TRANSIENT = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENETDOWN, errno.ENETUNREACH, errno.EAGAIN),
    *(errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ECONNRESET, errno.ECONNREFUSED, errno.EBUSY),
    *(errno.ECONNABORTED, errno.EREMOTEIO, errno.ENOTCONN),
)
# The errors of a path that leads nowhere: a flipped bit may be in the name of a file.
MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
MISSING_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # Orbax's have no errno
# tensorstore's words, where they are not the system's. ABORTED: it has tried for minutes.
TRANSIENT_TEXT = re.compile(r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED)\b|[Tt]imed out")
REFUSED_TEXT = re.compile(r"Too many open files|Cannot allocate|[Oo]ut of memory")
# What libraries write of the same: the system's own words, and what buckets answer.
SYSTEM_TEXTS = {
    os.strerror(number): number
    for number in (
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE),
        *(errno.EACCES, errno.ENOENT, errno.ENETDOWN, errno.ECONNRESET, errno.ECONNREFUSED),
    )
}
BUCKET_TEXTS = {
    r"too many requests|service unavailable|bad gateway|gateway time-?out|internal server error"
    r"|(rateLimitExceeded|backendError)|max retries exceeded|temporary failure in name resolution"
    r"|http[ _](status|response|error)?([ _]code)?[:=]?[ ']?(429|50[0234])"
    r"|retry attempts failed|curl error": LATER,  # tensorstore's, of a bucket
    r"http[ _]response[ _]code[:=][ ']?40[13]|permission_denied|unauthenticated|^forbidden"
    r"|default credentials were not found": DENIED,
    r"^bucket does not exist": NO_BUCKET,
}
OS_ERROR = re.compile(r"OS error (\d+)|os_error_code='(\d+)'")  # tensorstore's, by its version
# Their errors without a status of HTTP are of the way to a bucket: gcsfs lets them through.
NETWORK = ("aiohttp.", "requests.", "urllib3.", "google.auth.", "httpx.", "httpx2.")
STATUSES = {  # of HTTP
    **{status: (LATER, f"HTTP {status}") for status in (408, 429, 500, 502, 503, 504)},
    **{status: (DENIED, f"HTTP {status}") for status in (401, 403)},
}
PATH = re.compile(r"[\"'](/[^\"']+|\w+://[^\"']+)[\"']|(gs://[^\s\"':]+)")
RIGHT = re.compile(r"storage\.(?!googleapis)\w+\.\w+")  # that a bucket's answer says is missing
# The forms in which a bucket's API, and gcsfs, name it and an object in it.
IN_BUCKET = re.compile(r"(?:/v1/b/|: b/|^Bucket .*: )([^/?\s]+)(?:/o(?:/|\?name=)([^\s&?]+))?")


def explain(error: BaseException) -> tuple[str, int]:
    """Returns (a line for a person, the exit status) of an error.

    The line has the path, the cause, the last saved step where `telling_saved_steps` knew it, and
    what to do. Status 75: the same command can go on as it is. Any other error is its own text.
    """
    found = cause_of(error)
    path, cause, name = found or (None, None, None)
    status = hosts.RETRYABLE if found and cause.transient else 1
    if found is None or is_refusal(error):
        return _brief(error), status
    if _own_text(error):
        place = f"{path}: " if path and path not in _own_text(error) else ""
        return f"{place}{_own_text(error)}; {cause.advice}", status
    saved = next((e.saved_steps for e in _chain(error) if hasattr(e, "saved_steps")), None)
    parts = [f"{path or 'the storage'}: {cause.words} ({name}{_free(path, name)})", saved]
    line = f"{'. '.join(part for part in parts if part)}; {cause.advice}"
    return line, status


def is_refusal(error: BaseException) -> bool:
    """Returns whether it is a check of ours, whose message is made for a person."""
    ours = isinstance(error, ValueError | OSError) and raised_by_us(error)
    return ours and getattr(error, "errno", None) is None


def is_explained(error: BaseException) -> bool:
    """Returns whether `explain` has more to say of an error than its traceback has."""
    return is_refusal(error) or cause_of(error) is not None


def of_errno(number: int) -> Cause:
    """Makes a cause of the system's error number, in the system's words."""
    if number in (errno.EACCES, errno.EPERM):
        return DENIED
    advice = AGAIN if number in TRANSIENT else f"mend that and {AGAIN}"
    return Cause(os.strerror(number), advice, number in TRANSIENT)


def cause_of(error: BaseException) -> tuple[str | None, Cause, str] | None:
    """Returns (path, cause, its short name) of a failed read or write; None for other errors."""
    for link in _chain(error):
        number, path = getattr(link, "errno", None), None
        if isinstance(link, OSError) and number is not None:
            path = link.filename2 or link.filename
        if isinstance(link, OSError) and number in errno.errorcode:
            return _text(path), of_errno(number), errno.errorcode[number]
        text, status = str(link), _http_status(link)
        if told := STATUSES.get(status) or (not raised_by_us(link) and _told(text)):
            cause, name = told
            right = RIGHT.search(text) if cause is DENIED else None
            return _text(path) or _place(text), cause, f"{name}, {right[0]}" if right else name
        lost = status is None and f"{type(link).__module__}.".startswith(NETWORK)
        if lost or isinstance(link, TimeoutError | ConnectionError):
            return _text(path), LATER, type(link).__name__
    return None


def _told(text: str) -> tuple[Cause, str] | None:
    """Returns the cause, and its short name, that a library's message has in its text."""
    match = OS_ERROR.search(text)
    numbers = [int(match[1] or match[2])] if match else []
    numbers += [number for words, number in SYSTEM_TEXTS.items() if words.lower() in text.lower()]
    for number in numbers:
        if number in errno.errorcode:
            return of_errno(number), errno.errorcode[number]
    for pattern, cause in BUCKET_TEXTS.items():
        if match := re.search(pattern, text, re.IGNORECASE):
            return cause, "HTTP 404" if cause is NO_BUCKET else match[0]
    return None


def is_transient(error: BaseException) -> bool:
    """Returns whether reading again, some time later, may well succeed."""
    if found := cause_of(error):
        return found[1].transient
    return bool(TRANSIENT_TEXT.search(str(error))) and not REFUSED_TEXT.search(str(error))


def is_damage(error: BaseException) -> bool:
    """Returns whether an error of reading a file is a fault of the file.

    Orbax and tensorstore raise errors of any type for cut or malformed files. Denied access, a lack
    of memory (the devices' too) and transient errors are no fault of a file.
    """
    if isinstance(error, MISSING_ERRORS):
        return True
    if found := cause_of(error):
        return found[2] in [errno.errorcode[number] for number in MISSING]
    if isinstance(error, OSError | MemoryError) or type(error).__name__ == "JaxRuntimeError":
        return False
    return not (TRANSIENT_TEXT.search(str(error)) or REFUSED_TEXT.search(str(error)))


def brief(error: BaseException) -> str:
    """Shortens an error to its kind and the beginning of its message, which may be pages long."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _place(text: str) -> str | None:
    """The path that a library's message names, if any."""
    if named := PATH.search(text):
        return _text(named[1] or named[2])
    if named := IN_BUCKET.search(text):
        return _text("/".join(["gs:/", *map(urllib.parse.unquote, filter(None, named.groups()))]))
    return None


def raised_by_us(error: BaseException) -> bool:
    """Returns whether our own check refused something: a library's error needs its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    innermost = pathlib.Path(frames[-1].filename)
    return innermost.is_relative_to(ROOT) and "site-packages" not in innermost.parts


@contextlib.contextmanager
def telling_saved_steps(latest_step: Callable[[], int | None], directory) -> Iterator[None]:
    """Lets `explain` say of an error that passes through how many steps are saved, and where.

    directory: the checkpoints', of which Orbax's errors often do not say that they are.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(directory)  # what we write ourselves has its name
        step = latest_step()
        error.saved_steps = (
            f"{step} finished steps are saved in {directory}" if step else "no step is saved yet"
        )
        raise


def quiet_threads() -> None:
    """Keeps threads of libraries from printing tracebacks of what the main thread is told as well.

    When a save fails, Orbax logs it in two threads before it raises it, asyncio that the errors of
    the other arrays were never looked at, and tensorstore's threads find Orbax's event loop closed.
    A thread of ours that fails to read or write says so in a line.
    """

    def new(record: logging.LogRecord) -> bool:
        told = record.name == "asyncio" or "orbax" in record.pathname
        return not (record.exc_info and told)

    def unraisable(args):
        error = args.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            sys.__unraisablehook__(args)

    def of_thread(args):
        if args.exc_value is not None and cause_of(args.exc_value):
            print(f"{args.thread.name}: {explain(args.exc_value)[0]}", file=sys.stderr, flush=True)
        else:
            threading.__excepthook__(args)

    for handler in logging.getLogger("absl").handlers + logging.getLogger().handlers:
        handler.addFilter(new)
    sys.unraisablehook, threading.excepthook = unraisable, of_thread


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what caused it, each once; what was handled before it is no cause."""
    seen, waiting = set(), [error]
    while waiting:
        link = waiting.pop(0)
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [*getattr(link, "exceptions", ()), link.__cause__]


def _http_status(error: BaseException) -> int | None:
    """The status of a bucket's answer: gcsfs, aiohttp, requests and google.api_core name it."""
    response = getattr(error, "response", None)
    for holder, name in ((response, "status_code"), (error, "status"), (error, "code")):
        status = getattr(holder, name, None)
        if isinstance(status, str) and status.isdigit():
            status = int(status)
        if isinstance(status, int) and not isinstance(error, SystemExit):
            return status
    return None


def _own_text(error: BaseException) -> str | None:
    """Returns the words that replace the system's in an error of the system."""
    text = error.strerror if isinstance(error, OSError) and error.errno is not None else None
    return text if text and text != os.strerror(error.errno) else None


def _free(path: str | None, name: str) -> str:
    """Returns the free space in words, where the disk is full."""
    if path is None or name != "ENOSPC" or "://" in path:
        return ""
    with contextlib.suppress(OSError):
        there = next(p for p in (pathlib.Path(path), *pathlib.Path(path).parents) if p.exists())
        return f", {shutil.disk_usage(there).free / 2**20:.1f} MiB free"
    return ""


def _text(path) -> str | None:
    """A path as text, without what Orbax adds to a checkpoint's until it is complete."""
    return None if path is None else os.fsdecode(path).partition(".orbax-checkpoint-tmp")[0]


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LIMIT or raised_by_us(error) else f"{text[:LIMIT]} ..."
