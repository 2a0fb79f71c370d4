"""Files that others made, a model's directory above all: read within bounds, or refused.

What was downloaded may hold anything: a link to a file elsewhere, a device that never ends, a pipe
that nobody writes to, JSON of any size, depth and type. A local file is looked at before it is
opened; in a bucket (gs://) there are no links, devices or pipes.
"""

import json
import os
import pathlib
import reprlib
import stat
from typing import Any

from etils import epath

MAX_JSON_BYTES = 16 * 2**20  # the largest real one, an index of a trillion weights, has 13 MB
MAX_SHOWN_CHARS = 120
MAX_SHOWN_NAMES = 20
KINDS = (
    (stat.S_ISDIR, "directory"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
    (stat.S_ISSOCK, "socket"),
)

_REPR = reprlib.Repr()
_REPR.maxlevel = 3
_REPR.maxdict = _REPR.maxlist = 8
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = MAX_SHOWN_CHARS


def quoted(value: object) -> str:
    """Shows a value in a message as Python writes it, and cut: on one line, nothing raw."""
    text = _REPR.repr(value)
    return text if len(text) <= 2 * MAX_SHOWN_CHARS else f"{text[: 2 * MAX_SHOWN_CHARS]}..."


def shown(name: str) -> str:
    """Shows a name in a message: as it is, or quoted where a terminal would obey it, and cut."""
    return name if name.isprintable() and len(name) <= MAX_SHOWN_CHARS else quoted(name)


def printable(text: str) -> str:
    """Text of unknown origin on one line: nothing in it can move the cursor or change colours.

    A line break becomes a return sign, every other unprintable character (control, bidirectional,
    surrogate) its Python escape.
    """
    return "".join(
        char
        if char.isprintable()
        else "⏎"
        if char == "\n"
        else char.encode("unicode_escape").decode()
        for char in text
    )


def printable_lines(text: str) -> str:
    """Text of unknown origin as `printable` has it, but for its line breaks and tabs."""
    return "".join(char if char in "\n\t" else printable(char) for char in text)


def listing(folder: epath.Path) -> str:
    """Names a directory's files, for messages."""
    names = sorted(path.name for path in folder.iterdir())
    more = f" and {len(names) - MAX_SHOWN_NAMES} more" if len(names) > MAX_SHOWN_NAMES else ""
    return ", ".join(map(shown, names[:MAX_SHOWN_NAMES])) + more or "nothing"


def is_local(path: str | os.PathLike) -> bool:
    """Returns whether a path is of this machine, not of a bucket."""
    return "://" not in os.fspath(path)


def present(file: epath.Path) -> bool:
    """Returns whether a directory has a file of that name; raises as `check_file` where it is none.

    A pipe or a link that leads nowhere is not taken for a file that is absent.
    """
    if not is_local(file):
        return file.is_file()
    if not os.path.lexists(file):
        return False
    check_file(file)
    return True


def check_file(file: epath.Path) -> None:
    """Raises ValueError unless an entry of a local directory is a regular file of its own.

    A link is followed inside the directory, and from a snapshot in Hugging Face's cache, whose
    entries are links, to blobs/ of its repository and the cache. Others may show a private file.
    """
    if not is_local(file):
        return
    local = pathlib.Path(file)
    try:
        mode = local.stat().st_mode
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        kind = next((kind for is_kind, kind in KINDS if is_kind(mode)), "special file")
        raise ValueError(f"{file} is a {kind}, but must be a regular file")
    folder, target = local.parent.resolve(), local.resolve()
    places = [folder]
    if folder.parent.name == "snapshots":
        ways = (folder.parents[1], folder.parents[2])
        places += [(way / "blobs").resolve() for way in ways]
    if not any(target.is_relative_to(place) for place in places):
        raise ValueError(
            f"{file} is a link to {shown(str(target))}, outside its directory; copy that file in, "
            "or give the directory that has it"
        )


def check_name(name: object, place: str) -> str:
    """Returns what a file says is a name in its directory; ValueError for a path, or no text."""
    if not isinstance(name, str) or not name.isprintable() or name in ("", ".", ".."):
        raise ValueError(f"{place} names {quoted(name)}, which is no file's name")
    if "/" in name or "\\" in name:
        raise ValueError(f"{place} names {quoted(name)}, but must name files of its own directory")
    return name


def read_bytes(file: epath.Path, *, limit: int) -> bytes:
    """Reads a file of at most `limit` bytes; ValueError for a larger one or what is no file."""
    check_file(file)
    with file.open("rb") as opened:
        content = opened.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{file} has more than the {limit:,} bytes that such a file may have")
    return content


def read_text(file: epath.Path, *, limit: int) -> str:
    """Reads a file of UTF-8 text, as `read_bytes` does."""
    try:
        return read_bytes(file, limit=limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error


def read_json(file: epath.Path) -> dict[str, Any]:
    """Reads a JSON object; raises ValueError, with the file, for anything else."""
    content = read_bytes(file, limit=MAX_JSON_BYTES)
    try:
        value = json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise ValueError(f"{file} is not JSON: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a JSON {type(value).__name__}, but must hold an object")
    return value
