"""The files of a run: metric rows (metrics.jsonl, TensorBoard) and sampled responses.

Host only. Numbers arrive as Python or 0-d array scalars; everything on disk is strict JSON.
"""

import contextlib
import gzip
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator:
    """Opens a binary file that appears under `path` complete or not at all.

    The bytes go to a temporary neighbour, which is synced and renamed when the block ends, and
    removed when the block raises. Parent folders are made.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _plain_value(value):
    """A JSON-ready copy: 0-d arrays become Python scalars, NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {key: _plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_value(item) for item in value]
    if hasattr(value, "ndim"):
        value = _plain_value(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _json_line(row: Mapping) -> bytes:
    """One row as a line of strict JSON; a float reads back as the same double."""
    return json.dumps(_plain_value(row), allow_nan=False).encode() + b"\n"


def write_rollouts(path: str | os.PathLike, rows: Iterable[Mapping]) -> None:
    """Writes one response a line to a gzipped JSON-lines file, DIR/rollouts/<step>.jsonl.gz.

    Equal rows give equal bytes (no time or name in the gzip header). The file appears complete
    or not at all. NaN and infinities are written as null.
    """
    with (
        atomic_file(path) as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as zipped,
    ):
        for row in rows:
            zipped.write(_json_line(row))


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
            Rows after it (all rows for None) belong to work that will be done again: they are cut
            off, and a purge mark hides them from TensorBoard. A torn last line goes too. Kept
            lines keep their bytes. `cut_rows` counts the rows cut.

    NaN and infinities are written as null, which keeps the file strict JSON (rows read back as
    None), and are left out of TensorBoard.
    """

    def __init__(self, workdir: str | os.PathLike, *, resume_step: int | None):
        workdir = pathlib.Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self.path = workdir / "metrics.jsonl"
        first_step = 0 if resume_step is None else resume_step + 1
        old_bytes = self.path.read_bytes() if self.path.exists() else b""
        pairs = _read_lines(self.path) if old_bytes else []
        kept = [(line, row) for line, row in pairs if row["step"] < first_step]
        kept_bytes = b"".join(line for line, _ in kept)
        if kept_bytes != old_bytes:
            with atomic_file(self.path) as file:
                file.write(kept_bytes)
        self.cut_rows = len(pairs) - len(kept)
        self._steps = {row["step"] for _, row in kept}
        self._file = self.path.open("ab")
        # Here and not above: it imports a cloud's clients, a second that readers need not wait.
        import tensorboardX

        # Event files are named by the second: the suffix keeps a quick restart from overwriting one
        # and keeps the files in order.
        events = workdir / "tensorboard"
        earlier = len(list(events.glob("events.*"))) if events.exists() else 0
        self._tensorboard = tensorboardX.SummaryWriter(
            logdir=str(events),
            purge_step=first_step,
            flush_secs=10,
            filename_suffix=f".{earlier:05d}",
        )

    def has_row(self, step: int) -> bool:
        """Whether the file holds the row of this step."""
        return step in self._steps

    def write(self, row: Mapping) -> None:
        """Appends a row and syncs it to disk.

        Raises TypeError for a value that is not a number, ValueError for a step that does not come
        after the last one.
        """
        row = _plain_value(row)
        step = row.get("step")
        if type(step) is not int:
            raise TypeError(f"a metrics row needs an integer 'step', got {step!r}")
        if self._steps and step <= max(self._steps):
            raise ValueError(f"step {step} is not after the last step {max(self._steps)}")
        for key, value in row.items():
            if value is not None and not isinstance(value, (bool, int, float)):
                raise TypeError(f"metric {key!r} of step {step} is not a number: {value!r}")
        self._file.write(_json_line(row))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._steps.add(step)
        for key, value in row.items():
            if key != "step" and value is not None:
                self._tensorboard.add_scalar(key, value, step)

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception) -> None:
        self.close()
