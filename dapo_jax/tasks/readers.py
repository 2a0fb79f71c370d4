"""Files of problems with ground-truth answers: parquet, JSON lines, JSON and CSV, row by row."""

import ast
import contextlib
import io
import math
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import NamedTuple, TypeVar

from etils import epath

from dapo_jax.tasks.formats import FORMATS, MAX_SHOWN_CHARS, parsed
from dapo_jax.tasks.rows import DataError, DataReport, Rows, by_text
from dapo_jax.tasks.templates import templated
from dapo_jax.types import Example, Message
from dapo_jax.verifier.finding import closing_brace

T = TypeVar("T")

BOX = "\\boxed"
NO_ANSWERS = ("proof", "notfound", "not found")  # what data sets write where there is none


class Kind(NamedTuple):
    """A schema of files: the fields where settings do not name others.

    answer_mark: the answer is what follows the last occurrence of it; BOX: what the last box holds.
    """

    prompt_field: str = "prompt"
    answer_field: str = "answer"
    answer_mark: str = ""


KINDS = {
    # DAPO-Math-17k and its AIME 2024 as published; their prompts carry the template.
    "dapo_parquet": Kind(answer_field="reward_model.ground_truth"),
    **dict.fromkeys(("gsm8k", "gsm8k_jsonl"), Kind("question", answer_mark="####")),
    "math": Kind("problem"),  # MATH-500, AIME and AMC
    "math_solutions": Kind("problem", "solution", BOX),  # MATH, Minerva
    "olympiad_bench": Kind("question", "final_answer"),
    **dict.fromkeys(("jsonl", "json", "csv", "parquet"), Kind()),
}
_LEADING_ZEROS = re.compile(r"^([+-]?)0+(?=[0-9]+$)")
_TEXT_LIST = re.compile(r"""\s*\[\s*["'].*["']\s*\]\s*""")
_LAST_BOX = re.compile(
    r"(?s).*\\f?box(?:ed)?\s*(?:(?P<brace>\{)|(?P<bare>[^{$\n][^$\n]*?)\s*(?=\.?\s*(?:[$\n]|$)))"
)
WHOLE_NUMBER = re.compile(r"^([+-]?[0-9]+)\.0+$")


def read_rows(
    path: str,
    fields: Sequence[str],
    make: Callable[[dict], tuple],
    *,
    file_format: str = "",
    on_bad_row: str = "error",
    same: Callable[[Sequence[tuple[str, str]]], list[bool]] = by_text,
) -> tuple[list[Example], DataReport]:
    """Makes an example of each row of a file and merges them, in the order of their first rows.

    path: its last part may have a "*", which stands for the shards of one data set. fields: those
        that each row must have, and that are read of a parquet file; []: all. make: (row) ->
        (prompt, answer) or (prompt, answer, extra), where a prompt is messages or a text; its
        ValueError makes the row a bad one.
    file_format: of FORMATS; "": by the path's ending.
    on_bad_row: "error" raises DataError for bad rows, "skip" leaves them out.
    same: which pairs of answers to one prompt are no conflict.

    Raises FileNotFoundError for a missing file, and DataError for a damaged one.
    """
    file_format = file_format or format_of(path)
    rows = Rows(path, "line" if file_format == "jsonl" else "row", on_bad_row, same)
    place = pathlib.Path(path) if "://" not in str(path) else epath.Path(path)
    is_shards = "*" in place.name and not place.exists()
    files = sorted(place.parent.glob(place.name)) if is_shards else [place]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"No data file at {path!r}: set path.")
    for file in files:
        rows.shard = file.name if is_shards else ""
        # A bucket's own reader reads lines of any length.
        with io.BufferedReader(file.open("rb")) as opened:
            for row, record in FORMATS[file_format](str(file), opened, fields):
                with rows.reading(row):
                    record = parsed(record) if isinstance(record, bytes) else record
                    record = typed(record, dict, "the row")
                    if cells := record.get(None):  # csv's name of what has no column
                        raise ValueError(
                            f"there is no column for {cells[0]!r:.50}; a text with commas or line "
                            "breaks stands in quotes"
                        )
                    for name in fields:
                        typed(field(record, name), object, name)
                    messages, answer, *extra = make(record)
                    rows.add(row, messages, _text(answer, "the answer"), *extra)
    return rows.result()


def format_of(path: str) -> str:
    """Returns the name of FORMATS that a path ends in; DataError for another ending."""
    ending = pathlib.Path(path).suffix.removeprefix(".")
    if ending not in FORMATS:
        raise DataError(f"path = {path!r}: its ending must be one of .{', .'.join(FORMATS)}.")
    return ending


def messages_of(value: object, name: str, template: str) -> tuple[Message, ...]:
    """Reads a prompt as messages; a plain text is one message of the user, in the template."""
    if isinstance(value, str):
        return templated(_text(value, name), template)
    messages = []
    for i, message in enumerate(typed(value, list, name)):
        message = typed(message, dict, f"{name}[{i}]")
        role, content = (
            typed(field(message, key), str, f"{name}[{i}].{key}") for key in ("role", "content")
        )
        if content or role != "system":  # an empty system message says: no default one
            _text(content, f"{name}[{i}].content")
        messages.append({"role": _text(role, f"{name}[{i}].role"), "content": content})
    if not messages:
        raise ValueError(f"{name} is empty")
    return tuple(messages)


def answer_of(value: object, name: str, mark: str) -> str:
    """Reads an answer; a number is written out in decimals: 42.0 is "42", 1e-7 is "0.0000001".

    A list of one answer is that answer, also as a text: '["42"]' is 42. An integer as text has no
    leading zeros: AIME's 025 is 25.
    """
    if isinstance(value, str) and _TEXT_LIST.fullmatch(value):
        with contextlib.suppress(SyntaxError, ValueError):  # a lone backslash is LaTeX's
            value = ast.literal_eval(re.sub(r"(?<!\\)\\(?!\\)", r"\\\\", value.strip()))
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"{name} has {len(value)} answers, not one")
        value = value[0]
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float):
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value}")
            digits = repr(value).partition("e")[0].strip("-0.").replace(".", "")
            if len(digits) > sys.float_info.dig:  # more than a double holds of any decimal
                raise ValueError(f"{name} is {value}, rounded by a computation: write it as a text")
        return f"{Decimal(str(value + 0)):f}".removesuffix(".0")  # -0.0 + 0 is 0.0
    answer = _text(value, name)
    if answer.strip().lower() in NO_ANSWERS:
        raise ValueError(f"{name} is {answer!r}: the problem has no answer to compare with")
    if mark == BOX:
        name = f"the last box of {name}"
        answer = _boxed(answer)
    elif mark:
        _, has_mark, answer = answer.rpartition(mark)
        if not has_mark:
            raise ValueError(f'{name} has no "{mark}" before its result')
        answer, name = answer.replace(",", ""), f'{name} after "{mark}"'
    return _LEADING_ZEROS.sub(r"\1", _text(answer, name).strip())


def _boxed(text: str) -> str | None:
    """Returns what the last box holds; None without one, or where its braces do not close."""
    if (box := _LAST_BOX.match(text)) is None or box["bare"]:
        return box and box["bare"]
    end = closing_brace(text, box.end() - 1)
    return None if end is None else text[box.end() : end]


def field(record: dict, name: str) -> object:
    """Looks up a field, or field b of field a under the name "a.b"."""
    if name in record:
        return record[name]
    outer, _, inner = name.partition(".")
    if outer not in record:
        there = ", ".join(map(repr, record))[:MAX_SHOWN_CHARS] or "none"
        fit = [kind for kind, it in KINDS.items() if {it[0], it[1]} <= {*record}]
        advice = f"prompt_field, answer_field{', or kind=' if fit else ''}{' or '.join(fit)}"
        raise ValueError(f"{outer!r} is missing; there are {there} ({advice})")
    return field(typed(record[outer], dict, outer), inner)


def typed(value: object, kind: type[T], name: str) -> T:
    """Returns a value of that type; ValueError, with its name, for another."""
    if value is None:
        raise ValueError(f"{name} is null")
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _text(value: object, name: str) -> str:
    """Checks that a text is not blank and can be encoded (JSON allows half a surrogate pair)."""
    text = typed(value, str, name)
    if not text.strip():
        raise ValueError(f"{name} is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode ({error})") from error
    return text
