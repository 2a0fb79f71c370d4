"""Files of problems with ground-truth answers: parquet, JSON lines, JSON and CSV.

A file is read row by row; exact duplicates are merged and prompts with conflicting answers are
dropped, with memory bounded by the distinct prompts (DAPO-Math-17k as published holds every row
about 100 times). Nothing is dropped silently: a `DataReport` accounts for each row.
"""

import ast
import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

from etils import epath

from dapo_jax.tasks.formats import FORMATS, DataError, cut, typed
from dapo_jax.types import Example, Message
from dapo_jax.verifier.math_rules import closing_brace

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
SHOWN_REASONS = 9
SHOWN_KEYS = 50


@dataclasses.dataclass(frozen=True)
class Kind:
    """A schema of files: the format and, where settings do not say otherwise, the fields.

    format: a name of FORMATS; "": by the path's ending. answer_mark: the answer is what follows the
    last occurrence of it; BOX: what the last box holds.
    """

    format: str = ""
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    answer_mark: str = ""


KINDS = {
    # DAPO-Math-17k and its AIME 2024 as published; their prompts carry the template.
    "dapo_parquet": Kind("parquet", answer_field="reward_model.ground_truth"),
    "gsm8k": Kind("", "question", answer_mark="####"),
    "gsm8k_jsonl": Kind("jsonl", "question", answer_mark="####"),
    "math": Kind("", "problem"),  # MATH-500, AIME and AMC
    "math_solutions": Kind("", "problem", "solution", BOX),  # MATH, Minerva
    "olympiad_bench": Kind("", "question", "final_answer"),
    "jsonl": Kind("jsonl"),
    "json": Kind("json"),
    "csv": Kind("csv"),
}
FORMAT_OF_ENDING = {f".{name}": name for name in FORMATS}
KIND_OF_ENDING = {**FORMAT_OF_ENDING, ".parquet": "dapo_parquet"}
_LEADING_ZEROS = re.compile(r"^([+-]?)0+(?=[0-9]+$)")
_TEXT_LIST = re.compile(r"""\s*\[\s*["'].*["']\s*\]\s*""")
_LAST_BOX = re.compile(
    r"(?s).*\\f?box(?:ed)?\s*(?:(?P<brace>\{)|(?P<bare>[^{$\n][^$\n]*?)\s*(?=\.?\s*(?:[$\n]|$)))"
)
_VALUES = re.compile(r"""'[^']*'|"[^"]*"|\d+""")  # what rows that are bad for one reason differ in
_WHOLE = re.compile(r"([+-]?[0-9]+)\.0+")


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
    bad_row_notes: tuple[str, ...] = ()  # for each reason its first row, and how many more
    overlong: int = 0
    max_prompt_tokens: int | None = None  # the limit, once prompts are tokenized
    mean_tokens: float = 0.0  # of the kept prompts
    longest_tokens: int = 0
    notes: tuple[str, ...] = ()  # what else a person should know of it

    def lines(self) -> list[str]:
        """Formats the report for the start banner, one string a line."""
        parts = [
            f"{self.rows:,} rows",
            f"{self.duplicates:,} duplicates merged",
            f"{self.conflicting_prompts:,} prompts with conflicting answers dropped "
            f"({self.conflicting_rows:,} rows)",
            f"{self.bad_rows:,} bad rows skipped",
        ]
        if self.max_prompt_tokens is not None:
            parts.append(
                f"{self.overlong:,} prompts over {self.max_prompt_tokens:,} tokens dropped"
            )
        kept = f"{self.kept:,} prompts kept"
        if self.max_prompt_tokens is not None and self.kept:
            kept += f" ({self.mean_tokens:.0f} tokens on average, {self.longest_tokens:,} at most)"
        lines = [f"{self.name}: {', '.join(parts)}; {kept}"]
        lines += [f"  skipped {note}" for note in self.bad_row_notes]
        return lines + [f"  {note}" for note in self.notes]


def read(
    path: str,
    *,
    kind: str = "",
    prompt_field: str = "",
    answer_field: str = "",
    template: str = "",
    default_template: str = "dapo",
    on_bad_row: str = "error",
    check_answer: Callable[[str], None] = lambda answer: None,
) -> tuple[list[Example], DataReport]:
    """Reads problems and their answers, merged as `read_rows` does.

    kind: a name of KINDS; "": by the ending of the path.
    prompt_field, answer_field: where a row has the prompt (text, or messages with role and
        content) and the answer (text, a number, or a list of one); "a.b" is field b of field a.
        "": the kind's.
    template: for prompts of plain text, as `template_text` reads it. "": default_template for
        those, which the report then says, and none for messages.
    check_answer: raises ValueError for an answer that makes its row a bad one.

    Raises what `read_rows` does, and DataError for a wrong setting.
    """
    if not path:
        raise DataError("path is empty: set it to the data set's file.")
    ending = pathlib.Path(path).suffix
    kind = kind or KIND_OF_ENDING.get(ending, "")
    if kind not in KINDS:
        raise DataError(
            f"kind = {kind!r}: must be one of {', '.join(KINDS)} or arithmetic"
            + ("." if kind else f"; the ending of path = {path!r} does not say which.")
        )
    spec = KINDS[kind]
    prompt_field = prompt_field or spec.prompt_field
    answer_field = answer_field or spec.answer_field
    text = template_text(template or default_template)
    file_format = spec.format or _format_of(path)
    plain = 0

    def make(row: dict) -> tuple[tuple[Message, ...], str]:
        nonlocal plain
        value = field(row, prompt_field)
        plain += isinstance(value, str)
        if not isinstance(value, str) and template not in ("", "none"):
            raise ValueError(f"{prompt_field} has messages, which take no template: set it to none")
        answer = _answer(field(row, answer_field), answer_field, spec.answer_mark)
        if file_format == "csv":  # it has no numbers: 27.0 is how they are written into one
            answer = _WHOLE.sub(r"\1", answer) if _WHOLE.fullmatch(answer) else answer
        if not spec.answer_mark and "####" in answer:
            raise ValueError(f'{answer_field} has "####" before its result: set kind=gsm8k')
        check_answer(answer)
        return _prompt(value, prompt_field, text), answer

    fields = [prompt_field, answer_field]
    examples, report = read_rows(path, fields, make, file_format=file_format, on_bad_row=on_bad_row)
    if plain and not template:
        known = default_template in TEMPLATES
        name = f"template {default_template}" if known else "task's own template"
        note = f"plain prompts are in the {name} (template=none: as they are)"
        report = dataclasses.replace(report, notes=(note,))
    return examples, report


def read_rows(
    path: str,
    fields: Sequence[str],
    make: Callable[[dict], tuple],
    *,
    file_format: str = "",
    on_bad_row: str = "error",
) -> tuple[list[Example], DataReport]:
    """Makes an example of each row of a file and merges them, in the order of their first rows.

    fields: those that each row must have. make: (row) -> (messages, answer) or (messages, answer,
        extra); its ValueError makes the row a bad one. file_format: a name of FORMATS; "": by the
        ending of the path.
    on_bad_row: "error" raises DataError where rows have bad UTF-8, invalid JSON, a missing field, a
        null, a wrong type, an empty prompt or an empty answer; "skip" leaves them out.

    Raises FileNotFoundError for a missing file, and DataError for bad rows as above and, always,
    for a file of another format and a parquet file without a needed column.
    """
    file_format = file_format or _format_of(path)
    rows = Rows(path, "line" if file_format == "jsonl" else "row", on_bad_row)
    file = pathlib.Path(path) if "://" not in str(path) else epath.Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"No data file at {path!r}: set path.")
    with io.BufferedReader(file.open("rb")) as opened:  # a bucket's own reads lines of any length
        for row, record_of in FORMATS[file_format](path, opened, fields):
            with rows.reading(row):
                record = record_of()
                for name in fields:
                    typed(field(record, name), object, name)
                messages, answer, *extra = make(record)
                rows.add(row, messages, _text(answer, "the answer"), *extra)
    return rows.result()


def _format_of(path: str) -> str:
    try:
        return FORMAT_OF_ENDING[pathlib.Path(path).suffix]
    except KeyError:
        endings = ", ".join(FORMAT_OF_ENDING)
        raise DataError(f"path = {path!r}: its ending must be one of {endings}.") from None


class Rows:
    """Collects the rows of one data set: merges, counts, and refuses or skips the bad ones.

    place: the file, or the generator. row_word: "line" (from 1) or "row" (from 0).
    """

    def __init__(self, place: str, row_word: str, on_bad_row: str):
        if on_bad_row not in ("error", "skip"):
            raise DataError(f'data.on_bad_row = {on_bad_row!r}: must be "error" or "skip".')
        self._place = place
        self._name = pathlib.Path(place).name
        self._row_word = row_word
        self._on_bad_row = on_bad_row
        self._row_count = 0
        self._bad: dict[str, list] = {}  # reason -> how many rows, the first in words
        self._first: dict[bytes, Example] = {}  # digest of the prompt -> its first row
        self._occurrences: dict[bytes, int] = {}
        self._conflicts: set[bytes] = set()

    @contextlib.contextmanager
    def reading(self, row: int) -> Iterator[None]:
        """Counts a row; a ValueError inside the block makes it a bad row."""
        self._row_count += 1
        try:
            yield
        except ValueError as error:
            place = f"{self._row_word} {row}" + (" (from 0)" if self._row_word == "row" else "")
            reason = self._bad.setdefault(_VALUES.sub("", str(error)), [0, f"{place}: {error}"])
            reason[0] += 1

    def add(self, row: int, prompt: tuple[Message, ...], answer: str, extra: Any = None) -> None:
        """Takes a good row, unless its prompt is already there."""
        parts = [(message["role"], message["content"]) for message in prompt]
        digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()
        self._occurrences[digest] = self._occurrences.get(digest, 0) + 1
        first = self._first.get(digest)
        if first is None:
            self._first[digest] = Example(prompt, answer, self._name, row, extra)
        elif first.answer != answer:
            self._conflicts.add(digest)

    def result(self) -> tuple[list[Example], DataReport]:
        """Returns the distinct examples without conflicts, and the account of all rows.

        Raises DataError where rows are bad and on_bad_row is "error".
        """
        bad_rows = sum(count for count, _ in self._bad.values())
        notes = [
            f"{first} ({count:,} such rows)" if count > 1 else first
            for count, first in itertools.islice(self._bad.values(), SHOWN_REASONS)
        ]
        if len(self._bad) > len(notes):
            notes.append(f"... for {len(self._bad):,} reasons in all")
        if self._on_bad_row == "error" and notes:
            what = "it" if bad_rows == 1 else f"these {bad_rows:,} rows"
            listed = "; ".join(notes)
            raise DataError(f"{self._place}, {listed}. Mend {what}, or set data.on_bad_row=skip.")
        kept = [example for digest, example in self._first.items() if digest not in self._conflicts]
        conflicting_rows = sum(self._occurrences[digest] for digest in self._conflicts)
        return kept, DataReport(
            name=self._name,
            rows=self._row_count,
            kept=len(kept),
            duplicates=self._row_count - bad_rows - conflicting_rows - len(kept),
            conflicting_prompts=len(self._conflicts),
            conflicting_rows=conflicting_rows,
            bad_rows=bad_rows,
            bad_row_notes=tuple(f"{self._name}, {note}" for note in notes),
        )


def _prompt(value: object, name: str, template: str) -> tuple[Message, ...]:
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


def _answer(value: object, name: str, mark: str) -> str:
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
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
        return f"{Decimal(str(value + 0)):f}".removesuffix(".0")  # -0.0 + 0 is 0.0
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} is a {type(value).__name__}, not a text or a number")
    answer = _text(value, name)
    if mark == BOX:
        name = f"the last box of {name}"
        answer = (box := _LAST_BOX.match(answer)) and (box["bare"] or _braced(answer, box.end()))
    elif mark:
        _, found, answer = answer.rpartition(mark)
        if not found:
            raise ValueError(f'{name} has no "{mark}" before its result')
        answer, name = answer.replace(",", ""), f'{name} after "{mark}"'
    return _LEADING_ZEROS.sub(r"\1", _text(answer, name).strip())


def _braced(text: str, begins: int) -> str | None:
    """Returns what the braces hold that open before `begins`; None where they do not close."""
    end = closing_brace(text, begins - 1)
    return None if end is None else text[begins:end]


def field(record: dict, name: str) -> object:
    """Looks up a field, or field b of field a under the name "a.b"."""
    if name in record:
        return record[name]
    outer, _, inner = name.partition(".")
    if outer not in record:
        there = cut(", ".join(map(repr, itertools.islice(record, SHOWN_KEYS))) or "none")
        raise ValueError(f"{outer!r} is missing; there are {there} (prompt_field, answer_field)")
    return field(typed(record[outer], dict, outer), inner)


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
