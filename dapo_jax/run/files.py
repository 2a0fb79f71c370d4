"""The files of a run: metric rows (metrics.jsonl, TensorBoard) and sampled responses.

Host only. Numbers arrive as Python or 0-d array scalars; everything on disk is strict JSON.
"""

import contextlib
import datetime
import gzip
import hashlib
import itertools
import json
import os
import pathlib
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from dapo_jax.run import chain

LOG = "log.txt"
MAX_LINE_BYTES = 2**28  # of a gzip file; the rows of a long run have some MB
FOREIGN_SECONDS = 3_600.0  # a temporary file of another machine that is older is a dead one's


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator:
    """Opens a binary file that appears under `path` complete or not at all.

    The bytes go to a temporary neighbour, which is synced and renamed when the block ends, and
    removed when the block raises; one that a killed process left is `remove_leftovers`'. Its folder
    is made, the one around it is not: a run whose folder was moved shall not begin another there.
    The system's errors name `path`.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    with _naming(path):
        path.parent.mkdir(exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):  # the folder may be gone: the first error counts
                temporary.unlink()
            raise


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Names the file in the system's errors: those of a write say nothing, others a neighbour."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename, error.filename2 = str(path), None
        raise


def remove_leftovers(folder: str | os.PathLike) -> list[pathlib.Path]:
    """Removes the temporary files that dead processes left in a run's folder; returns them.

    Those of another machine's process, which cannot be asked for, when they are an hour old. Files
    that no `atomic_file` has named are somebody's own.
    """
    removed = []
    for path in (
        p for part in ("", "eval", "rollouts") for p in pathlib.Path(folder, part).glob("*.tmp")
    ):
        with contextlib.suppress(OSError):  # another process may remove it, or finish it
            if _is_left_over(path):
                path.unlink()
                removed.append(path)
    return removed


def _is_left_over(path: pathlib.Path) -> bool:
    place, _, pid = path.name.removesuffix(".tmp").rpartition(".")
    if not pid.isdigit():
        return False
    if not place.endswith(f".{socket.gethostname()}"):
        return time.time() - path.stat().st_mtime > FOREIGN_SECONDS
    if int(pid) == os.getpid():  # this process writes nothing yet: an earlier one had its number
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return False


def append_line(path: str | os.PathLike, row: Mapping) -> None:
    """Appends a row to a file of JSON lines and syncs it; a write that fails leaves no part of it.

    The file has to be there: a run whose rows, or whose folder, somebody moved has to stop.
    """
    path = pathlib.Path(path)
    with _naming(path), path.open("r+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        torn = size and os.pread(file.fileno(), 1, size - 1) != b"\n"  # by a kill in a line
        line = b"\n" * torn + json_line(row)
        try:
            while line:
                line = line[file.write(line) :]
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def append_log(workdir: str | os.PathLike, text: str) -> None:
    """Appends lines, each with the time (UTC), to the run's log.txt.

    What cannot be written is left out: where a disk is full, a row or a checkpoint says so.
    """
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    lines = "".join(f"{now}  {line}".rstrip() + "\n" for line in text.split("\n"))
    with (
        contextlib.suppress(OSError),
        pathlib.Path(workdir, LOG).open("a", encoding="utf-8", errors="backslashreplace") as file,
    ):
        file.write(lines)


def read_starts(path: str | os.PathLike) -> list[dict]:
    """Reads starts.jsonl, but for a part of a line, left by a kill in the middle of it."""
    path, starts = pathlib.Path(path), []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            starts.append(json.loads(line))
    return [start for start in starts if isinstance(start, dict)]


def read_json(path: str | os.PathLike) -> dict:
    """Reads a JSON object; ValueError, in one line with its path, where the file is cut or none."""
    path = path if hasattr(path, "read_bytes") else pathlib.Path(path)
    data = path.read_bytes()
    if not data.strip():
        raise ValueError(f"{path} is empty: put back a copy of it")
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON, it may be cut short ({error}): put back a copy of it"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object: put back a copy of it")
    return value


def json_line(row: Mapping) -> bytes:
    """One row as a line of strict JSON; a float reads back as the same double."""
    return json.dumps(chain.plain_value(row), allow_nan=False).encode() + b"\n"


def write_rollouts(path: str | os.PathLike, rows: Iterable[Mapping], *, level: int = 9) -> str:
    """Writes one response a line to a gzipped JSON-lines file, DIR/rollouts/<step>.jsonl.gz.

    Returns the SHA-256 of its bytes. Equal rows give equal bytes (no time or name in the gzip
    header). The file appears complete or not at all. NaN and infinities are written as null.
    level: of compression; 1 is seven times as fast as 9, for half as many bytes more.
    """
    with atomic_file(path) as file:
        hashed = _Hashed(file)
        with gzip.GzipFile(
            filename="", mode="wb", compresslevel=level, fileobj=hashed, mtime=0
        ) as zipped:
            for row in rows:
                zipped.write(json_line(row))
    return hashed.digest.hexdigest()


class _Hashed:
    """Writes to a file and keeps the digest of its bytes."""

    def __init__(self, file):
        self.digest, self._file = hashlib.sha256(), file

    def write(self, data) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def read_rollouts(path: str | os.PathLike) -> Iterator[dict]:
    """Yields the responses that `write_rollouts` wrote."""
    yield from map(json.loads, gzip_lines(path))


def gzip_lines(path: str | os.PathLike) -> Iterator[bytes]:
    """Yields the lines of a gzip file, which may be a stranger's.

    Raises ValueError for a line of more than MAX_LINE_BYTES, which a few bytes can stand for.
    """
    with gzip.open(path) as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"{path} has a line of more than {MAX_LINE_BYTES:,} bytes")
            yield line


def _read_lines(path: pathlib.Path) -> list[tuple[bytes, dict]]:
    """The file's lines, as written and as parsed; a torn last line is left out."""
    pairs = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        whole = line.endswith(b"\n")
        try:
            row = json.loads(line)
        except ValueError as error:
            if not whole:  # only the last line can lack its end: a kill in the middle of a write
                break
            raise ValueError(f"{path}, line {number}: not JSON ({error}): {line[:80]!r}") from None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise ValueError(f"{path}, line {number}: no row with an integer step: {line[:80]!r}")
        pairs.append((line if whole else line + b"\n", row))
    return pairs


def read_rows(path: str | os.PathLike) -> list[dict]:
    """Reads metrics.jsonl: one dict a rollout step, null read as None.

    A last line without its end, left by a kill in the middle of a write, is dropped if it does
    not parse. Raises ValueError, with file and line, for any other broken line, and
    FileNotFoundError.
    """
    return [row for _, row in _read_lines(pathlib.Path(path))]


class MetricsWriter:
    """Appends one row a rollout step to workdir/metrics.jsonl and to workdir/tensorboard.

    Args:
        workdir: the run's folder; made if absent.
        resume_step: the last step that the restored state contains; None at the start of a run.
            Rows after it (all rows for None) belong to work that will be done again: they go to
            metrics.cut-<n>.jsonl, and a purge mark hides them from TensorBoard. A torn last line
            goes too. Kept lines keep their bytes. `cut_rows` counts the rows cut.
        begin_step: the run's first step; a fork's is not 0.
        texts: what TensorBoard has of the whole run, name -> Markdown.
        hparams, scores: keys of the recipe with their values, and the metrics' tags, by which
            TensorBoard compares runs.

    NaN and infinities are written as null, which keeps the file strict JSON (rows read back as
    None), and are left out of TensorBoard. notes: what a person should know of the rows found.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        resume_step: int | None,
        begin_step: int = 0,
        texts: Mapping[str, str] = MappingProxyType({}),
        hparams: Mapping[str, bool | float | str] = MappingProxyType({}),
        scores: Sequence[str] = (),
    ):
        workdir = pathlib.Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self.path = workdir / "metrics.jsonl"
        self.notes: list[str] = []
        first_step = 0 if resume_step is None else resume_step + 1
        old_bytes = self.path.read_bytes() if self.path.exists() else b""
        pairs = _read_lines(self.path) if old_bytes else []
        kept = [(line, row) for line, row in pairs if row["step"] < first_step]
        cut = [(line, row) for line, row in pairs if row["step"] >= first_step]
        kept_bytes = b"".join(line for line, _ in kept)
        self.cut_rows = len(cut)
        if cut:
            self._keep_cut_rows(cut[0][1]["step"], [line for line, _ in cut])
        if kept_bytes != old_bytes or not self.path.exists():
            with atomic_file(self.path) as file:
                file.write(kept_bytes)
        self._steps = {row["step"] for _, row in kept}
        # The row of resume_step itself comes back from the checkpoint.
        if lost := len(set(range(begin_step, first_step - 1)) - self._steps):
            self.notes.append(
                f"{self.path} lacks {lost} of the {first_step - begin_step} rows before step "
                f"{first_step}: it was deleted or cut short; the run itself goes on from its "
                "checkpoint"
            )
        purge_step = max(0, first_step - 1)
        self._events = EventFile(workdir / "tensorboard", purge_step=purge_step)
        if self._events.is_first or purge_step <= begin_step:  # else an earlier file has them
            self._events.write_run(begin_step, texts, hparams, scores)
        # The last row may not have reached TensorBoard before the stop; the mark hides it if so.
        rows = [row for _, row in kept]
        last = [row for row in rows[-1:] if row["step"] == resume_step]
        for row in rows if self._events.is_first else last:
            self._events.write(row)

    def _keep_cut_rows(self, first: int, lines: list[bytes]) -> None:
        names = (self.path.with_name(f"metrics.cut-{n}.jsonl") for n in itertools.count(1))
        path = next(name for name in names if not name.exists())
        with atomic_file(path) as file:
            file.write(b"".join(lines))
        self.notes.append(
            f"{len(lines)} rows from step {first} on are of work that is done again; kept in {path}"
        )

    def has_row(self, step: int) -> bool:
        """Whether the file holds the row of this step."""
        return step in self._steps

    def write(self, row: Mapping) -> None:
        """Appends a row and syncs it to disk, TensorBoard's as well.

        Raises TypeError for a value that is not a number, ValueError for a step that does not come
        after the last one.
        """
        row = chain.plain_value(row)
        step = row.get("step")
        if type(step) is not int:
            raise TypeError(f"a metrics row needs an integer 'step', got {step!r}")
        if self._steps and step <= max(self._steps):
            raise ValueError(f"step {step} is not after the last step {max(self._steps)}")
        for key, value in row.items():
            if isinstance(value, str) and chain.is_text(key):
                continue
            if value is not None and not isinstance(value, (bool, int, float)):
                raise TypeError(f"metric {key!r} of step {step} is not a number: {value!r}")
        append_line(self.path, row)
        self._steps.add(step)
        self._events.write(row)

    def write_events(self, row: Mapping) -> None:
        """Appends numbers to TensorBoard's files alone."""
        self._events.write(chain.plain_value(row))

    def write_text(self, step: int, name: str, text: str) -> None:
        """Appends a text, in Markdown, to TensorBoard's files alone."""
        self._events.write_run(step, {name: text}, {}, ())

    def close(self) -> None:
        self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class EventFile:
    """Appends rows to a new file of TensorBoard's; each is on disk when `write` returns.

    tensorboardX's own writer has a thread and a queue: what they hold is lost when the process is
    ended, and on a full disk the thread dies and the queue, once full, never returns.

    purge_step: TensorBoard hides earlier files' rows from this step on. is_first: whether the
    folder had no such file.
    """

    def __init__(self, folder: pathlib.Path, *, purge_step: int):
        # Here and not above: it imports a cloud's clients, a second that readers need not wait.
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2

        self._scalar, self._event, self._folder = summary.scalar, event_pb2.Event, folder
        with _naming(folder):
            folder.mkdir(parents=True, exist_ok=True)
            earlier = len(list(folder.glob("events.*")))
            self.is_first = earlier == 0
            # Event files are named by the second: the suffix keeps a quick restart from overwriting
            # one and keeps the files in order.
            self._writer = event_file_writer.EventsWriter(
                str(folder / "events"), filename_suffix=f".{earlier:05d}"
            )
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(self._event(session_log=start), purge_step)

    def write(self, row: Mapping) -> None:
        """Appends the numbers of a row."""
        event = self._event()
        for key, value in row.items():
            if key != "step" and value is not None and not isinstance(value, str):
                event.summary.value.extend(self._scalar(key, value).value)
        with _naming(self._folder):
            self._add(event, row["step"])

    def write_run(self, step: int, texts: Mapping, hparams: Mapping, scores: Sequence) -> None:
        """Appends texts, and a run's hyperparameters with the tags of its scores."""
        from tensorboardX import summary

        event = self._event()
        for name, text in texts.items():
            event.summary.value.extend(summary.text(name, text).value)
        if hparams:
            tags = dict.fromkeys(self._scalar(name, 0.0).value[0].tag for name in scores)
            for part in summary.hparams(dict(hparams), tags):
                event.summary.value.extend(part.value)
        if event.summary.value:
            with _naming(self._folder):
                self._add(event, step)

    def _add(self, event, step: int) -> None:
        event.step, event.wall_time = step, time.time()
        self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written has been said
            self._writer.close()
