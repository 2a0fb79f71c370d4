"""The rows of a data set: examples, merged by their prompts, and an account of each row.

Exact duplicates are merged and prompts with conflicting answers are dropped, with memory bounded by
the distinct prompts (DAPO-Math-17k as published holds every row about 100 times). Nothing is
dropped silently: a `DataReport` accounts for each row.
"""

import collections
import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from dapo_jax.types import Example, Message

SHOWN_REASONS = 5  # of bad rows

_OF_ROW = re.compile(r"'[^']*'|\d+")  # in the reason why a row is bad


class DataError(ValueError):
    """Data that cannot be used: the message names the file, the row and the setting to change."""


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
    overlong: int = 0
    max_prompt_tokens: int = 0  # the limit, once prompts are tokenized
    mean_tokens: float = 0.0  # of the kept prompts
    longest_tokens: int = 0
    notes: tuple[str, ...] = ()  # the first bad rows, and what else a person should know of it

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
        return [line, *(f"  {note}" for note in self.notes)]


def by_text(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Tells which pairs of answers are equal texts."""
    return [one == other for one, other in pairs]


UNANSWERED = "the environment's"  # the answer of a row that has none, beside an environment


class Columns(dict):
    """A row that an environment begins with: others of the same prompt are not merged with it.

    why: why it has no answer that a task could grade by; "" where it has one.
    """

    why = ""


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

    def add(
        self, row: int, prompt: tuple[Message, ...] | str, answer: str, extra: Any = None
    ) -> None:
        """Takes a good row, unless its prompt is already there."""
        example = Example(prompt, answer, self.shard or self._name, row, extra)
        key = tuple((message["role"], message["content"]) for message in example.prompt)
        if isinstance(extra, Columns):
            key += (repr(extra),)
        self._occurrences[key] += 1
        first = self._first.setdefault(key, example).answer
        if first != answer and not self._same([(answer, first)])[0]:
            self._conflicts.add(key)

    def result(self) -> tuple[list[Example], DataReport]:
        """Returns the distinct examples without conflicts, and the account of all rows.

        Raises DataError where rows are bad and on_bad_row is "error".
        """
        reasons = self._bad.values()
        bad_rows = sum(count for _, count in reasons)
        notes = [f"{first} ({n:,} such rows)" if n > 1 else first for first, n in reasons]
        if len(notes) > SHOWN_REASONS:
            notes[SHOWN_REASONS:] = [f"... {bad_rows:,} bad rows in all"]
        if notes and self._on_bad_row != "skip":
            listed = "\n  ".join(notes)
            raise DataError(f"{self._place}, {listed}. Mend them, or set data.on_bad_row=skip.")
        kept = [example for key, example in self._first.items() if key not in self._conflicts]
        conflicting_rows = sum(self._occurrences[key] for key in self._conflicts)
        notes = [f"skipped {self._name}, {note}" for note in notes]
        times = {*self._occurrences.values()}
        if len(times) == 1 and (n := max(times)) > 1:
            notes.append(f"each prompt is there {n} times: in an evaluation, k is for that")
        return kept, DataReport(
            name=self._name,
            rows=self._row_count,
            kept=len(kept),
            duplicates=self._row_count - bad_rows - conflicting_rows - len(kept),
            conflicting_prompts=len(self._conflicts),
            conflicting_rows=conflicting_rows,
            bad_rows=bad_rows,
            notes=tuple(notes),
        )
