"""Formats of files of rows: parquet, JSON lines, JSON and CSV, each within bounds.

A format reads an open file, of this machine or in a bucket; `path` is what messages call it.

A file may be damaged at any byte, or be made to fill the memory: either is a DataError.
"""

import codecs
import csv
import io
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import IO, AnyStr, BinaryIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

MAX_SHOWN_CHARS = 1000
MAX_ROW_BYTES = 2**24  # of a line of text; the longest prompts have a few hundred thousand
MAX_LIST_BYTES = 2**31  # of a JSON list, which is read whole
# What pyarrow raises for a damaged file: UnicodeDecodeError for a name, OverflowError for a date.
PARQUET_ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError)

T = TypeVar("T")


class DataError(ValueError):
    """Data that cannot be used: the message names the file, the row and the setting to change."""


# Each format's reader yields a row's number and a function that returns the row as a dict, or
# raises ValueError where this one row is bad.
Records = Iterator[tuple[int, Callable[[], dict]]]


def _parquet(path: str, opened: BinaryIO, fields: Sequence[str]) -> Records:
    try:
        file = pq.ParquetFile(opened, page_checksum_verification=True)
        schema = file.schema_arrow
    except PARQUET_ERRORS as error:
        raise DataError(
            f"{path} is not a readable parquet file: {_one_line(error)} (path, kind)."
        ) from error
    _check_columns(path, schema, fields)
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


def _check_columns(path: str, schema: pa.Schema, fields: Sequence[str]) -> None:
    missing = [name for field in fields if (name := _missing_column(schema, field))]
    if missing:
        columns = cut(", ".join(f"{column.name}: {column.type}" for column in schema))
        raise DataError(
            f"{path} has no column {' and no column '.join(missing)}; it has {columns}. Change "
            "prompt_field, answer_field, path or kind."
        )


def _missing_column(schema: pa.Schema, field: str) -> str | None:
    """Returns the first part of a dotted field that the schema lacks; None where it has all."""
    if field in schema.names:
        return None
    columns, found = {column.name: column.type for column in schema}, []
    for part in field.split("."):
        found.append(part)
        if part not in columns:
            return ".".join(found)
        inside = columns[part]
        columns = {c.name: c.type for c in inside} if pa.types.is_struct(inside) else {}
    return None


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


def _lines(path: str, file: IO[AnyStr]) -> Iterator[AnyStr]:
    """Reads lines of at most MAX_ROW_BYTES: a file without line breaks would fill the memory."""
    for number in itertools.count(1):
        line = file.readline(MAX_ROW_BYTES)
        if not line:
            return
        if len(line) == MAX_ROW_BYTES:
            raise DataError(f"{path}, line {number} is longer than {MAX_ROW_BYTES:,} (path, kind).")
        yield line


def _json_lines(path: str, opened: BinaryIO, fields: Sequence[str]) -> Records:
    for line_number, line in enumerate(_lines(path, opened), start=1):
        if line_number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield line_number, lambda line=line: typed(_parsed(line), dict, "the line")


def _json(path: str, opened: BinaryIO, fields: Sequence[str]) -> Records:
    """Reads a list of objects, or, since files of that name often are, JSON lines."""
    size = opened.seek(0, os.SEEK_END)
    opened.seek(0)
    if size > MAX_LIST_BYTES:
        raise DataError(
            f"{path} has {size:,} bytes, more than the {MAX_LIST_BYTES:,} that are read at once: "
            "write it as JSON lines (kind=jsonl)."
        )
    try:
        records = _parsed(opened.read().removeprefix(codecs.BOM_UTF8))
    except ValueError:
        records = None
    if not isinstance(records, list):
        opened.seek(0)
        yield from enumerate(record_of for _, record_of in _json_lines(path, opened, fields))
        return
    for row, record in enumerate(records):
        yield row, lambda record=record: typed(record, dict, "the row")


def _csv(path: str, opened: BinaryIO, fields: Sequence[str]) -> Records:
    text = io.TextIOWrapper(opened, encoding="utf-8-sig", newline="")
    try:
        for row, record in enumerate(csv.DictReader(_lines(path, text), strict=True)):
            yield row, lambda record=record: record
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is no readable CSV file in UTF-8: {error} (path, kind)."
        ) from error


FORMATS = {"parquet": _parquet, "jsonl": _json_lines, "json": _json, "csv": _csv}


def _parsed(text: bytes) -> object:
    try:
        return json.loads(text.decode("utf-8"))
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
