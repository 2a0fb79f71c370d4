"""Formats of files of rows: parquet, JSON lines, JSON and CSV.

A format reads an open file, on this machine or in a bucket; `path` is its name in messages. A
damaged file is a DataError.
"""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from dapo_jax.tasks.rows import DataError

MAX_SHOWN_CHARS = 1000


# Yields the number of each row and the row; of JSON lines the text, since one may be no JSON.
Records = Iterator[tuple[int, object | bytes]]


def _parquet(path: str, opened: BinaryIO, fields: Sequence[str]) -> Records:
    import pyarrow as pa  # takes a fifth of a second, which other data need not spend
    import pyarrow.parquet as pq

    row = 0
    try:
        file = pq.ParquetFile(opened, page_checksum_verification=True)
        names = set(file.schema_arrow.names)
        columns = {name if name in names else name.partition(".")[0] for name in fields}
        # Where one is missing the rows have all columns, which the message on it lists.
        chosen = columns if columns and columns <= names else names
        for batch in file.iter_batches(1024, columns=list(chosen)):
            yield from enumerate(batch.to_pylist(), start=row)
            row += batch.num_rows
        if row != file.metadata.num_rows:  # a damaged count of values ends a column early
            raise ValueError(f"it has {row} of {file.metadata.num_rows} rows")
    # What pyarrow raises for a damaged file: a UnicodeDecodeError for a name, another for a date.
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path} is no readable parquet file, at or after row {row} (from 0): "
            f"{' '.join(str(error).split())[:MAX_SHOWN_CHARS]} (path, kind)."
        ) from error


def _json_lines(path: str, opened: BinaryIO, fields: Sequence[str]) -> Records:
    for line_number, line in enumerate(opened, start=1):
        if line.strip():
            yield line_number, line


def _json(path: str, opened: BinaryIO, fields: Sequence[str]) -> Records:
    """Reads a list of objects or, since files of that name often are, JSON lines."""
    try:
        records = parsed(opened.read())
    except ValueError:
        records = None
    if isinstance(records, list):
        yield from enumerate(records)
    else:
        opened.seek(0)
        yield from enumerate(line for _, line in _json_lines(path, opened, fields))


def _csv(path: str, opened: BinaryIO, fields: Sequence[str]) -> Records:
    text = io.TextIOWrapper(opened, encoding="utf-8-sig", newline="")
    try:
        rows = csv.DictReader(text, strict=True)
        names = [name for name in rows.fieldnames or () if name]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise DataError(f"{path} has two columns {twice!r} (path).")
        yield from enumerate(rows)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is no readable CSV file in UTF-8: {error} (path, kind)."
        ) from error


FORMATS = {"parquet": _parquet, "jsonl": _json_lines, "json": _json, "csv": _csv}


def parsed(text: bytes) -> object:
    """Parses JSON; ValueError for what is none."""
    try:
        return json.loads(text.decode("utf-8-sig"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"invalid JSON ({error})") from error
