"""Data sets of prompts with ground-truth answers, and the endless stream that training reads.

A file is read row by row; exact duplicates are merged and prompts with conflicting answers are
dropped, with memory bounded by the distinct prompts (DAPO-Math-17k as published holds every row
about 100 times). Nothing is dropped silently: a `Report` accounts for each row.
"""

import codecs
import contextlib
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import grain
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dapo_jax.tasks import arithmetic
from dapo_jax.tasks.tokenizer import Tokenizer
from dapo_jax.types import Example, Message, Prompt

# The prompt of DAPO, section 4.1.
PROMPT_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    "{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
KINDS = ("dapo_parquet", "gsm8k_jsonl", "jsonl", "arithmetic")
SHOWN_BAD_ROWS = 5

T = TypeVar("T")


class DataError(ValueError):
    """Data that cannot be used: the message names the file, the row and the setting to change."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a data set comes from.

    kind: "dapo_parquet" (DAPO-Math-17k's and AIME 2024's schema; prompts carry the template),
        "gsm8k_jsonl" ({question, answer ending in "#### 42"}; we apply the template),
        "jsonl" ({prompt: text or messages, answer: text}; used as it is) or
        "arithmetic" (generated; we apply the template).
    path: the file, for every kind but "arithmetic".
    levels, count, seed, split: what `arithmetic.generate` takes.
    """

    kind: str
    path: str = ""
    levels: tuple[int, ...] = ()
    count: int = 0
    seed: int = 0
    split: str = "train"


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of every row of a data set.

    rows = kept + duplicates + conflicting_rows + overlong + bad_rows. A row is a duplicate when
    an earlier row has the same prompt and answer; all rows of a prompt that occurs with two
    answers are conflicting.
    """

    name: str
    rows: int
    kept: int
    duplicates: int
    conflicting_prompts: int
    conflicting_rows: int
    bad_rows: int
    bad_row_notes: tuple[str, ...]  # the first SHOWN_BAD_ROWS of them
    overlong: int = 0
    max_prompt_tokens: int | None = None  # the limit, once prompts are tokenized
    mean_tokens: float = 0.0  # of the kept prompts
    longest_tokens: int = 0

    def lines(self) -> list[str]:
        """The report for the start banner, one string a line."""
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
        if self.bad_rows > len(self.bad_row_notes):
            lines.append(f"  ... and {self.bad_rows - len(self.bad_row_notes):,} more")
        return lines


def load_prompts(
    source: Source, tokenizer: Tokenizer, *, max_prompt_tokens: int, on_bad_row: str
) -> tuple[list[Prompt], Report]:
    """Reads, cleans and tokenizes a data set.

    Raises what `load_examples` raises, and DataError where no prompt is left.
    """
    examples, report = load_examples(source, on_bad_row=on_bad_row)
    prompts, overlong = tokenize(examples, tokenizer, max_prompt_tokens=max_prompt_tokens)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    report = dataclasses.replace(
        report,
        kept=len(prompts),
        overlong=overlong,
        max_prompt_tokens=max_prompt_tokens,
        mean_tokens=float(np.mean(lengths)) if lengths else 0.0,
        longest_tokens=max(lengths, default=0),
    )
    if not prompts:
        raise DataError(
            "No prompt is left: change data.path, data.kind or rollout.max_prompt_tokens.\n"
            + "\n".join(report.lines())
        )
    return prompts, report


def load_examples(source: Source, *, on_bad_row: str) -> tuple[list[Example], Report]:
    """Reads a data set and merges its rows, in the order of their first occurrence.

    on_bad_row: "error" raises DataError at the first row that has bad UTF-8, invalid JSON, a
        missing key, a null, a wrong type, an empty prompt or an empty answer; "skip" counts it.

    Raises FileNotFoundError for a missing file, and DataError for bad rows as above and, always,
    for an unknown kind, a file of another format and a parquet file without a needed column.
    """
    if on_bad_row not in ("error", "skip"):
        raise DataError(f'data.on_bad_row = {on_bad_row!r}: must be "error" or "skip".')
    if source.kind not in KINDS:
        raise DataError(f"data.kind = {source.kind!r}: must be one of {', '.join(KINDS)}.")
    if source.kind == "arithmetic":
        levels = ",".join(map(str, source.levels))
        rows = _Rows(f"arithmetic (levels {levels}, {source.split})", "row", on_bad_row)
        _read_arithmetic(source, rows)
        return rows.result()
    path = pathlib.Path(source.path)
    if not path.is_file():
        raise FileNotFoundError(f"No data file at {source.path!r}: set data.path.")
    if source.kind == "dapo_parquet":
        rows = _Rows(str(path), "row", on_bad_row)
        _read_dapo_parquet(path, rows)
    else:
        rows = _Rows(str(path), "line", on_bad_row)
        _read_jsonl(path, rows, _gsm8k if source.kind == "gsm8k_jsonl" else _prompt_and_answer)
    return rows.result()


def tokenize(
    examples: Sequence[Example], tokenizer: Tokenizer, *, max_prompt_tokens: int
) -> tuple[list[Prompt], int]:
    """The examples of at most `max_prompt_tokens` tokens, tokenized; and how many were longer."""
    prompts = [
        Prompt(np.asarray(token_ids, np.int32), example)
        for example in examples
        if len(token_ids := tokenizer.encode_chat(example.prompt)) <= max_prompt_tokens
    ]
    return prompts, len(examples) - len(prompts)


class PromptStream(Generic[T]):
    """The endless stream of training prompts: stream[cursor] for every integer cursor >= 0.

    Epoch e is stream[e * n] to stream[(e + 1) * n - 1], n = len(stream): each item once, in an
    order that depends on the seed and e alone. Access is random and costs the same anywhere, so
    the cursor is all the state there is. seed: 0 to 2**32 - 1.
    """

    def __init__(self, items: Sequence[T], *, seed: int):
        if len(items) == 0:
            raise DataError("No training prompts: change data.path.")
        if not 0 <= seed < 2**32:
            raise DataError(f"The data seed is {seed}: must be 0 to 2**32 - 1.")
        self._epoch_items = len(items)
        self._dataset = grain.MapDataset.source(items).shuffle(seed=seed).repeat()

    def __len__(self) -> int:
        """Number of items of one epoch."""
        return self._epoch_items

    def __getitem__(self, cursor: int) -> T:
        if cursor < 0:
            raise IndexError(f"The prompt cursor is {cursor}: must be 0 or more.")
        return self._dataset[int(cursor)]

    def __iter__(self) -> Iterator[T]:
        raise TypeError("A PromptStream has no end: take stream[cursor].")


class _Rows:
    """Collects the rows of one data set: merges, counts, and refuses or skips the bad ones."""

    def __init__(self, place: str, row_word: str, on_bad_row: str):
        self._place = place
        self._name = pathlib.Path(place).name
        self._row_word = row_word
        self._on_bad_row = on_bad_row
        self._row_count = 0
        self._bad_rows = 0
        self._bad_row_notes: list[str] = []
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
            counted = f"{self._row_word} {row}" + (" (from 0)" if self._row_word == "row" else "")
            if self._on_bad_row == "error":
                raise DataError(
                    f'{self._place}, {counted}: {error}. Mend it, or set data.on_bad_row="skip".'
                ) from error
            self._bad_rows += 1
            if len(self._bad_row_notes) < SHOWN_BAD_ROWS:
                self._bad_row_notes.append(f"{self._name}, {counted}: {error}")

    def add(self, row: int, prompt: tuple[Message, ...], answer: str) -> None:
        """Takes a good row, unless its prompt is already there."""
        parts = [(message["role"], message["content"]) for message in prompt]
        digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()
        self._occurrences[digest] = self._occurrences.get(digest, 0) + 1
        first = self._first.get(digest)
        if first is None:
            self._first[digest] = Example(prompt, answer, self._name, row)
        elif first.answer != answer:
            self._conflicts.add(digest)

    def result(self) -> tuple[list[Example], Report]:
        """The distinct examples without conflicts, and the account of all rows."""
        kept = [example for digest, example in self._first.items() if digest not in self._conflicts]
        conflicting_rows = sum(self._occurrences[digest] for digest in self._conflicts)
        return kept, Report(
            name=self._name,
            rows=self._row_count,
            kept=len(kept),
            duplicates=self._row_count - self._bad_rows - conflicting_rows - len(kept),
            conflicting_prompts=len(self._conflicts),
            conflicting_rows=conflicting_rows,
            bad_rows=self._bad_rows,
            bad_row_notes=tuple(self._bad_row_notes),
        )


def _read_dapo_parquet(path: pathlib.Path, rows: _Rows) -> None:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is not a readable parquet file: {error} (data.path, data.kind)."
        ) from error
    with file:
        _check_dapo_columns(path, file.schema_arrow)
        row = 0
        for batch in _batches(path, file):
            try:
                records = batch.to_pylist()
            except UnicodeDecodeError:  # one bad row: read this batch row by row to name it
                records = None
            for offset in range(batch.num_rows):
                with rows.reading(row):
                    record = records[offset] if records is not None else _record(batch, offset)
                    prompt = _messages(record["prompt"])
                    reward_model = _typed(record["reward_model"], dict, "reward_model")
                    answer = _text(reward_model["ground_truth"], "reward_model.ground_truth")
                    rows.add(row, prompt, answer.strip())
                row += 1


def _record(batch: pa.RecordBatch, offset: int) -> dict:
    return batch.slice(offset, 1).to_pylist()[0]


def _check_dapo_columns(path: pathlib.Path, schema: pa.Schema) -> None:
    missing = [name for name in ("prompt", "reward_model") if name not in schema.names]
    if not missing:
        reward_type = schema.field("reward_model").type
        fields = [f.name for f in reward_type] if pa.types.is_struct(reward_type) else []
        if "ground_truth" not in fields:
            missing = ["reward_model.ground_truth"]
    if missing:
        raise DataError(
            f"{path} has no column {' and no column '.join(missing)}; it has "
            f"{', '.join(str(field.name) + ': ' + str(field.type) for field in schema)}. "
            "Change data.path or data.kind."
        )


def _batches(path: pathlib.Path, file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    row = 0
    try:
        for batch in file.iter_batches(1024, columns=["prompt", "reward_model.ground_truth"]):
            yield batch
            row += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is damaged at or after row {row} (from 0): {error}. Fetch the file again "
            "(data.path)."
        ) from error


def _read_jsonl(path: pathlib.Path, rows: _Rows, parse) -> None:
    with path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            if line_number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                with rows.reading(line_number):
                    rows.add(line_number, *parse(_json_object(line)))


def _json_object(line: bytes) -> dict:
    try:
        record = json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("invalid JSON (nested too deeply)") from error
    return _typed(record, dict, "the line")


def _prompt_and_answer(record: dict) -> tuple[tuple[Message, ...], str]:
    prompt, answer = _get(record, "prompt"), _get(record, "answer")
    return _messages(prompt), _text(answer, "answer").strip()


def _gsm8k(record: dict) -> tuple[tuple[Message, ...], str]:
    question = _text(_get(record, "question"), "question")
    solution = _text(_get(record, "answer"), "answer")
    _, mark, answer = solution.rpartition("####")
    if not mark:
        raise ValueError('answer has no "####" before its result')
    answer = answer.replace(",", "").strip()
    return _templated(question), _text(answer, 'answer after "####"')


def _read_arithmetic(source: Source, rows: _Rows) -> None:
    problems = arithmetic.generate(source.levels, source.count, source.seed, split=source.split)
    for row, problem in enumerate(problems):
        with rows.reading(row):
            rows.add(row, _templated(problem.question), _text(problem.answer, "answer"))


def _templated(problem: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": PROMPT_TEMPLATE.format(problem=problem)},)


def _messages(prompt: object) -> tuple[Message, ...]:
    """A prompt as messages; a plain text is one message of the user."""
    if isinstance(prompt, str):
        return ({"role": "user", "content": _text(prompt, "prompt")},)
    messages = []
    for i, message in enumerate(_typed(prompt, list, "prompt")):
        message = _typed(message, dict, f"prompt[{i}]")
        messages.append(
            {key: _text(_get(message, key), f"prompt[{i}].{key}") for key in ("role", "content")}
        )
    if not messages:
        raise ValueError("prompt is empty")
    return tuple(messages)


def _get(record: dict, key: str) -> object:
    if key not in record:
        raise ValueError(f"{key!r} is missing; there are {', '.join(map(repr, record)) or 'none'}")
    return record[key]


def _typed(value: object, kind: type[T], name: str) -> T:
    if value is None:
        raise ValueError(f"{name} is null")
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _text(value: object, name: str) -> str:
    """Text that is not blank and can be encoded (JSON escapes allow half a surrogate pair)."""
    text = _typed(value, str, name)
    if not text.strip():
        raise ValueError(f"{name} is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode ({error})") from error
    return text
