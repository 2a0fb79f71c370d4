"""Files of problems with ground-truth answers: parquet, JSON lines, JSON and CSV.

A file is read row by row; exact duplicates are merged and prompts with conflicting answers are
dropped, with memory bounded by the distinct prompts (DAPO-Math-17k as published holds every row
about 100 times). Nothing is dropped silently: a `DataReport` accounts for each row.
"""

import ast
import collections
import contextlib
import dataclasses
import io
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar

from etils import epath

from dapo_jax.tasks.formats import FORMATS, MAX_SHOWN_CHARS, DataError, parsed
from dapo_jax.types import Example, Message
from dapo_jax.verifier.math_rules import closing_brace

T = TypeVar("T")

# The prompt of DAPO, section 4.1.
PROMPT_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    "{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
TEMPLATES = {
    "none": "{problem}",
    "dapo": PROMPT_TEMPLATE,
    "boxed": "{problem}\n\nReason step by step, and put your final answer within \\boxed{}.",
}
BOX = "\\boxed"
NO_ANSWERS = ("proof", "notfound", "not found")  # what data sets write where there is none
SHOWN_REASONS = 5  # of bad rows


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
    **dict.fromkeys(("jsonl", "json", "csv"), Kind()),
}
_LEADING_ZEROS = re.compile(r"^([+-]?)0+(?=[0-9]+$)")
_TEXT_LIST = re.compile(r"""\s*\[\s*["'].*["']\s*\]\s*""")
_LAST_BOX = re.compile(
    r"(?s).*\\f?box(?:ed)?\s*(?:(?P<brace>\{)|(?P<bare>[^{$\n][^$\n]*?)\s*(?=\.?\s*(?:[$\n]|$)))"
)
_OF_ROW = re.compile(r"'[^']*'|\d+")  # in the reason why a row is bad
WHOLE_NUMBER = re.compile(r"^([+-]?[0-9]+)\.0+$")


@dataclasses.dataclass(frozen=True)
class DataReport:
    """Accounts for every row of a data set.

    rows = kept + duplicates + conflicting_rows + overlong + bad_rows, unless a note says that only
    the first of these are kept. A row is a duplicate when an earlier row has the same prompt and
    answer; all rows of a prompt with two answers are conflicting.
    """

    name: str
    rows: int
    kept: int
    duplicates: int = 0
    conflicting_prompts: int = 0
    conflicting_rows: int = 0
    bad_rows: int = 0
    bad_row_notes: tuple[str, ...] = ()  # the first ones, and why
    overlong: int = 0
    max_prompt_tokens: int = 0  # the limit, once prompts are tokenized
    mean_tokens: float = 0.0  # of the kept prompts
    longest_tokens: int = 0
    notes: tuple[str, ...] = ()  # what else a person should know of it

    def lines(self) -> list[str]:
        """Formats the report for the start banner, one string a line."""
        line = (
            f"{self.name}: {self.rows:,} rows, {self.duplicates:,} duplicates merged, "
            f"{self.conflicting_prompts:,} prompts with conflicting answers dropped "
            f"({self.conflicting_rows:,} rows), {self.bad_rows:,} bad rows skipped, "
            f"{self.overlong:,} prompts over {self.max_prompt_tokens:,} tokens dropped; "
            f"{self.kept:,} prompts kept ({self.mean_tokens:.0f} tokens on average, "
            f"{self.longest_tokens:,} at most)"
        )
        skipped = [f"  skipped {note}" for note in self.bad_row_notes]
        return [line, *skipped, *(f"  {note}" for note in self.notes)]


def by_text(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Tells which pairs of answers are equal texts."""
    return [one == other for one, other in pairs]


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
        that each row must have. make: (row) -> (messages, answer) or (messages, answer, extra); its
        ValueError makes the row a bad one. file_format: of FORMATS; "": by the path's ending.
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


class Columns(dict):
    """A row that an environment begins with: others of the same prompt are not merged with it."""


class Rows:
    """Collects the rows of one data set: merges, counts, and refuses or skips the bad ones.

    place: the file, or the generator. row_word: "line" (from 1) or "row" (from 0). same: as of
    `read_rows`. shard: the name of the file of several that is read.
    """

    shard = ""

    def __init__(self, place: str, row_word: str, on_bad_row: str, same=by_text):
        self._place = place
        self._name = pathlib.Path(place).name
        self._row_place = "line {}" if row_word == "line" else "row {} (from 0)"
        self._on_bad_row, self._same = on_bad_row, same
        self._row_count = 0
        self._bad: dict[str, tuple[str, int]] = {}  # kind of reason -> the first of them, how many
        self._first: dict[tuple, Example] = {}  # roles and texts of a prompt -> its first row
        self._occurrences: collections.Counter[tuple] = collections.Counter()
        self._conflicts: set[tuple] = set()

    @contextlib.contextmanager
    def reading(self, row: int) -> Iterator[None]:
        """Counts a row; a ValueError inside the block makes it a bad row."""
        self._row_count += 1
        try:
            yield
        except ValueError as error:
            shard = f"{self.shard}, " if self.shard else ""
            note = f"{shard}{self._row_place.format(row)}: {error}"
            kind = _OF_ROW.sub("", str(error))
            first, count = self._bad.get(kind, (note, 0))
            self._bad[kind] = first, count + 1

    def add(self, row: int, prompt: tuple[Message, ...], answer: str, extra: Any = None) -> None:
        """Takes a good row, unless its prompt is already there."""
        key = tuple((message["role"], message["content"]) for message in prompt)
        if isinstance(extra, Columns):
            key += (repr(extra),)
        self._occurrences[key] += 1
        example = Example(prompt, answer, self.shard or self._name, row, extra)
        first = self._first.setdefault(key, example).answer
        if first != answer and not self._same([(answer, first)])[0]:
            self._conflicts.add(key)

    def result(self) -> tuple[list[Example], DataReport]:
        """Returns the distinct examples without conflicts, and the account of all rows.

        Raises DataError where rows are bad and on_bad_row is "error".
        """
        bad_rows, notes = sum(count for _, count in self._bad.values()), []
        for first, count in self._bad.values():
            notes.append(f"{first} ({count:,} such rows)" if count > 1 else first)
        if len(notes) > SHOWN_REASONS:
            notes[SHOWN_REASONS:] = [f"... {bad_rows:,} bad rows in all"]
        if notes and self._on_bad_row != "skip":
            listed = "\n  ".join(notes)
            raise DataError(f"{self._place}, {listed}. Mend them, or set data.on_bad_row=skip.")
        kept = [example for key, example in self._first.items() if key not in self._conflicts]
        conflicting_rows = sum(self._occurrences[key] for key in self._conflicts)
        times, repeated = {*self._occurrences.values()}, ()
        if len(times) == 1 and (n := max(times)) > 1:
            repeated = (f"each prompt is there {n} times: in an evaluation, k is for that",)
        return kept, DataReport(
            name=self._name,
            rows=self._row_count,
            kept=len(kept),
            duplicates=self._row_count - bad_rows - conflicting_rows - len(kept),
            conflicting_prompts=len(self._conflicts),
            conflicting_rows=conflicting_rows,
            bad_rows=bad_rows,
            bad_row_notes=tuple(f"{self._name}, {note}" for note in notes),
            notes=repeated,
        )


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


def template_text(template: str) -> str:
    """Returns the text of a name of TEMPLATES, or a custom text; DataError for another."""
    if template in TEMPLATES:
        return TEMPLATES[template]
    if "{problem}" not in template:
        raise DataError(
            f"template = {template!r}: must be one of {', '.join(TEMPLATES)}, or a text of your "
            "own that has {problem} where the problem goes."
        )
    return template


def problem_of(prompt: str) -> str:
    """A prompt without the words that DAPO's template puts around the problem."""
    before, after = PROMPT_TEMPLATE.split("{problem}")
    return prompt.removeprefix(before).removesuffix(after)


def templated(problem: str, template: str) -> tuple[Message, ...]:
    """Makes a user's message of a problem in plain text; template: as `template_text` reads it."""
    return ({"role": "user", "content": template_text(template).replace("{problem}", problem)},)


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
        _, found, answer = answer.rpartition(mark)
        if not found:
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
