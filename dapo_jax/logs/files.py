"""The files of a run: the lock, metric rows (metrics.jsonl) and sampled responses.

Host only. Numbers arrive as Python or 0-d array scalars; everything on disk is strict JSON.
"""

import contextlib
import datetime
import gzip
import hashlib
import io
import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import filelock

LOG, LOCK = "log.txt", "run.lock"


def locked(folder: pathlib.Path) -> contextlib.AbstractContextManager:
    """Takes the lock of a folder, which is made if absent: at most one running process has it.

    Leaving the returned context gives it back. Raises ValueError where another process has it. The
    kernel's lock ends with its process; where a file system has none (a bucket mounted as a
    folder), the lock file of a dead host is removed by hand.
    """
    path = folder / LOCK
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return filelock.FileLock(path).acquire(blocking=False)
    except filelock.Timeout:
        last = (read_starts(folder / "starts.jsonl") or [{}])[-1]
        who = "process {pid} on {host}, since {time}; ".format(**last) if "pid" in last else ""
        raise ValueError(
            f"{folder} belongs to a run that is going on ({who}{path}); end that one, or give "
            "another --workdir (and checkpoint.directory)"
        ) from None


def write_file(path: pathlib.Path, content: bytes) -> None:
    """Writes a file that appears under `path` complete or not at all.

    The bytes go to PATH.tmp, which is synced and renamed at the end; the next writer of `path`
    replaces one that an error or a kill left. Its folder is made, the one around it is not: a run
    whose folder was moved shall not begin another there.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with _naming(path):
        path.parent.mkdir(exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Names the file in the system's errors: those of a write say nothing, others a neighbour."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename, error.filename2 = str(path), None
        raise


def append_line(path: pathlib.Path, row: Mapping) -> None:
    """Appends a row to a file of JSON lines and syncs it; an error or a kill may leave a part.

    `read_rows` drops that part, and `begin_rows` takes it out. The file has to be there: a run
    whose rows, or whose folder, somebody moved has to stop.
    """
    with _naming(path), path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(json_line(row))
        file.flush()
        os.fsync(file.fileno())


def append_log(workdir: pathlib.Path, text: str) -> None:
    """Appends lines, each with the time (UTC), to the run's log.txt.

    What cannot be written is left out: where a disk is full, a row or a checkpoint says so.
    """
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    lines = "".join(f"{now}  {line}".rstrip() + "\n" for line in text.split("\n"))
    with contextlib.suppress(OSError), (workdir / LOG).open("ab") as file:
        file.write(lines.encode(errors="backslashreplace"))


def read_starts(path: pathlib.Path) -> list[dict]:
    """Reads starts.jsonl; [] where there is none."""
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.is_file() else []


def read_json(path: pathlib.Path) -> dict:
    """Reads a JSON object; ValueError, in one line with its path, where the file is cut or none."""
    with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(path.read_bytes()), dict):
            return value
    raise ValueError(f"{path} is not JSON of an object, it may be cut short: put back a copy of it")


def json_line(value) -> bytes:
    """One value as a line of strict JSON: arrays are lists or scalars, NaN and infinities null.

    A float reads back as the same double.
    """
    text = json.dumps(value, default=lambda it: dict(it) if hasattr(it, "keys") else it.tolist())
    return json.dumps(json.loads(text, parse_constant=lambda _: None)).encode() + b"\n"


def json_digest(value: Any) -> str:
    """Returns the digest of a JSON-able value, whatever the order of its keys."""
    as_read = json.loads(json.dumps(value))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()[:32]


def write_zipped_rows(path: pathlib.Path, rows: Iterable[Mapping], *, level: int = 9) -> None:
    """Writes rows to a gzipped file of JSON lines, whole or not at all; equal ones as equal bytes.

    level: of compression; 1 is seven times as fast as 9, for half as many bytes more.
    """
    content = io.BytesIO()
    with gzip.GzipFile("", "wb", level, content, mtime=0) as zipped:
        zipped.writelines(map(json_line, rows))
    write_file(path, content.getvalue())


def read_zipped_rows(path: pathlib.Path) -> Iterator[dict]:
    """Yields the rows that `write_zipped_rows` wrote."""
    with gzip.open(path) as lines:
        yield from map(json.loads, lines)


def read_rows(path: pathlib.Path) -> list[dict]:
    """Reads metrics.jsonl: one dict a rollout step.

    A last line without its end, left by a kill in the middle of a write, is dropped if it does
    not parse. Raises ValueError, with file and line, for any other broken line, and
    FileNotFoundError.
    """
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            row = json.loads(line)
            if type(row["step"]) is not int:
                raise TypeError("its step is no integer")
        except (KeyError, TypeError, ValueError) as error:
            if not line.endswith(b"\n"):
                break
            raise ValueError(f"{path}, line {number}: no row ({error}): {line[:80]!r}") from None
        rows.append(row)
    return rows


def begin_rows(
    workdir: pathlib.Path, first_step: int, begin_step: int = 0, last_row: Mapping | None = None
) -> list[str]:
    """Leaves in workdir/metrics.jsonl the rows before `first_step`, at which work begins.

    The others belong to work that will be done again: they go to metrics.cut-<n>.jsonl. A torn last
    line goes too. begin_step: the run's first step; a fork's is not 0. last_row: of the step
    before, which a checkpoint has; added where the file lacks it. Returns what a person should know
    of the rows found.
    """
    path, notes = workdir / "metrics.jsonl", []
    rows = read_rows(path) if path.exists() else []
    kept = {row["step"]: row for row in rows if row["step"] < first_step}
    if cut := [row for row in rows if row["step"] >= first_step]:
        names = (workdir / f"metrics.cut-{n}.jsonl" for n in itertools.count(1))
        copy = next(name for name in names if not name.exists())
        write_file(copy, b"".join(map(json_line, cut)))
        notes.append(
            f"{len(cut)} rows from step {cut[0]['step']} on are of work that is done again; "
            f"kept in {copy}"
        )
    if (steps := first_step - begin_step) > 0:
        kept.setdefault(first_step - 1, last_row)
    write_file(path, b"".join(map(json_line, kept.values())))
    if (missing := steps - len(kept)) > 0:
        notes.append(
            f"{path} lacks {missing} of the {steps} rows before step {first_step}: it was deleted "
            "or cut short; the run itself goes on from its checkpoint"
        )
    return notes


def write_json(path: pathlib.Path, content: Mapping) -> None:
    """Writes a JSON file."""
    write_file(path, (json.dumps(content, indent=1) + "\n").encode())
