"""Formats of files of rows: parquet, JSON lines, JSON and CSV.

A format reads an open file, on this machine or in a bucket; `path` is its name in messages. A
damaged file is a DataError.
"""

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

MAX_SHOWN_CHARS = 1000
MAX_TEXT_BYTES = 2**31  # of a file that is not parquet: one line or list may be all of it
# What pyarrow raises for a damaged file: UnicodeDecodeError for a name, OverflowError for a date.
PARQUET_ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError)

T = TypeVar("T")


class DataError(ValueError):
    """Data that cannot be used: the message names the file, the row and the setting to change."""


# A reader yields the number of each row and a function that returns the row as a dict, or raises
# ValueError where this one row is bad.
Records = Iterator[tuple[int, Callable[[], dict]]]


def _parquet(path: str, opened: BinaryIO, fields: Sequence[str]) -> Records:
    try:
        file = pq.ParquetFile(opened, page_checksum_verification=True)
        there = [file.schema.column(i).path for i in range(len(file.schema))]
        columns = ", ".join(f"{column.name}: {column.type}" for column in file.schema_arrow)
    except PARQUET_ERRORS as error:
        raise DataError(
            f"{path} is not a readable parquet file: {_one_line(error)} (path, kind)."
        ) from error
    missing = [name for name in fields if not any(f"{at}.".startswith(f"{name}.") for at in there)]
    if missing:
        raise DataError(
            f"{path} has no column {' and no column '.join(missing)}; it has {cut(columns)}. "
            "Change prompt_field, answer_field, path or kind."
        )
    row = 0
    for batch in _batches(path, file, fields):
        try:
            records = batch.to_pylist()
        except PARQUET_ERRORS:  # one bad row: read this batch row by row to name it
            records = None
        for offset in range(batch.num_rows):
            if records is None:
                yield row, lambda b=batch, o=offset: _record(b, o)
            else:
                yield row, lambda record=records[offset]: record
            row += 1


def _batches(path: str, file: pq.ParquetFile, fields: Sequence[str]) -> Iterator[pa.RecordBatch]:
    row, promised = 0, file.metadata.num_rows
    try:
        for batch in file.iter_batches(1024, columns=list(fields)):
            yield batch
            row += batch.num_rows
    except PARQUET_ERRORS as error:
        raise DataError(
            f"{path} is damaged at or after row {row} (from 0): {_one_line(error)}. Fetch the file "
            "again."
        ) from error
    if row != promised:  # a damaged count of values ends a column early, and no error with it
        raise DataError(
            f"{path} is damaged: it has {row} of {promised} rows. Fetch the file again."
        )


def _record(batch: pa.RecordBatch, row: int) -> dict:
    try:
        return batch.slice(row, 1).to_pylist()[0]
    except PARQUET_ERRORS as error:
        raise ValueError(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    return cut(" ".join(str(error).split()))


def cut(text: str) -> str:
    """Cuts a text of the file to what a message shows."""
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def _check_size(path: str, opened: BinaryIO) -> None:
    size = opened.seek(0, os.SEEK_END)
    opened.seek(0)
    if size > MAX_TEXT_BYTES:
        raise DataError(
            f"{path} has {size:,} bytes, more than the {MAX_TEXT_BYTES:,} that are read as text: "
            "write it as parquet (path, kind)."
        )


def _json_lines(path: str, opened: BinaryIO, fields: Sequence[str]) -> Records:
    _check_size(path, opened)
    for line_number, line in enumerate(opened, start=1):
        if line.strip():
            yield line_number, lambda line=line: typed(_parsed(line), dict, "the line")


def _json(path: str, opened: BinaryIO, fields: Sequence[str]) -> Records:
    """Reads a list of objects or, since files of that name often are, JSON lines."""
    _check_size(path, opened)
    try:
        records = _parsed(opened.read())
    except ValueError:
        records = None
    if not isinstance(records, list):
        yield from enumerate(record_of for _, record_of in _json_lines(path, opened, fields))
        return
    for row, record in enumerate(records):
        yield row, lambda record=record: typed(record, dict, "the row")


def _csv(path: str, opened: BinaryIO, fields: Sequence[str]) -> Records:
    _check_size(path, opened)
    text = io.TextIOWrapper(opened, encoding="utf-8-sig", newline="")
    try:
        for row, record in enumerate(csv.DictReader(text, strict=True)):
            yield row, lambda record=record: record
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is no readable CSV file in UTF-8: {error} (path, kind)."
        ) from error


FORMATS = {"parquet": _parquet, "jsonl": _json_lines, "json": _json, "csv": _csv}


def _parsed(text: bytes) -> object:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("invalid JSON (nested too deeply)") from error


def typed(value: object, kind: type[T], name: str) -> T:
    """Returns a value of that type; ValueError, with its name, for another."""
    if value is None:
        raise ValueError(f"{name} is null")
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}, not a {kind.__name__}")
    return value
