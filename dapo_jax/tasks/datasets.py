"""Data sets: a task's examples as tokenized prompts, and the endless stream that training reads."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import grain
import numpy as np

from dapo_jax.tasks.base import graded, load_examples, make_task
from dapo_jax.tasks.readers import DataError, DataReport, by_text
from dapo_jax.tasks.tokenizer import Tokenizer
from dapo_jax.types import Example, Group, Prompt


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Holds the prompts of a task, and how it grades their responses.

    grade: decodes and grades the responses of a group. report: accounts for each row of the data.
    same: tells which pairs of predictions are one answer, for their votes.
    """

    prompts: list[Prompt]
    grade: Callable[[Group], Group]
    report: DataReport
    same: Callable[[Sequence[tuple[str, str]]], list[bool]] = by_text


def load_dataset(
    key: str, settings: Mapping, tokenizer: Tokenizer, *, max_prompt_tokens: int
) -> Dataset:
    """Makes a data set's task, loads its examples and tokenizes them.

    key: the config key of the data set, for messages. settings: its values (`configs.base.dataset`)
    and those of the keys `rules` and `on_bad_row`; max_prompts of the prompts are kept (0: all).

    Raises FileNotFoundError for a missing file and DataError for a task that does not exist, bad
    rows, what is no example, a prompt of no tokens, or where no prompt is left.
    """
    task = make_task(key, settings)
    try:
        examples, report = load_examples(task, settings["task"] or key)
        prompts, overlong = tokenize(examples, tokenizer, key, max_prompt_tokens=max_prompt_tokens)
        notes = report.notes
        if 0 < (most := settings["max_prompts"]) < len(prompts):
            notes = (*notes, f"the first {most:,} of {len(prompts):,} usable prompts (max_prompts)")
            prompts = prompts[:most]
        lengths = [len(prompt.token_ids) for prompt in prompts]
        report = dataclasses.replace(
            report,
            kept=len(prompts),
            overlong=overlong,
            max_prompt_tokens=max_prompt_tokens,
            mean_tokens=float(np.mean(lengths)) if lengths else 0.0,
            longest_tokens=max(lengths, default=0),
            notes=notes,
        )
        if not prompts:
            change = "the task" if settings["task"] else "path, kind"
            raise DataError(
                f"No prompt is left: change {change} or rollout.max_prompt_tokens.\n"
                + "\n".join(report.lines())
            )
    except (DataError, FileNotFoundError) as error:
        # A message that begins with the name of a setting becomes one with the whole key.
        named = str(error).partition(" ")[0] in settings
        raise type(error)(f"{key}{'.' if named else ': '}{error}") from error
    grade = functools.partial(graded, task=task, tokenizer=tokenizer)
    return Dataset(prompts, grade, report, getattr(task, "same", by_text))


def tokenize(
    examples: Sequence[Example], tokenizer: Tokenizer, key: str, *, max_prompt_tokens: int
) -> tuple[list[Prompt], int]:
    """Tokenizes the examples of at most `max_prompt_tokens` tokens, and counts the longer ones.

    Raises DataError for an example of no tokens, which no model goes on from.
    """
    prompts = []
    for example in examples:
        token_ids = tokenizer.encode_chat(example.prompt)
        if not token_ids:
            raise DataError(
                f"{example.source}, row {example.row}: the prompt is empty, it has no tokens; "
                "remove it, or give the set a template"
            )
        if len(token_ids) <= max_prompt_tokens:
            prompts.append(Prompt(np.asarray(token_ids, np.int32), example, key))
    return prompts, len(examples) - len(prompts)


class PromptStream:
    """Orders the training prompts without end: stream[cursor] for every integer cursor >= 0.

    Epoch e of one set is stream[e * n] to stream[(e + 1) * n - 1], n = len(stream): each item once,
    in an order that depends on the seed and e alone. Of several sets, each is taken so, and the
    next prompt is of the set that is furthest behind its share: the order of the sets depends on
    the weights alone. Access is random and costs the same anywhere, so the cursor is all the state
    there is. seed: 0 to 2**32 - 1. weights: one for each set, above 0, counted to 1 % of the least.
    """

    def __init__(self, *sets: Sequence[Prompt], seed: int, weights: Sequence[float] | None = None):
        self._items = sum(map(len, sets))
        # Of one seed, sets of the same length would be shuffled in the same order.
        others = [np.random.SeedSequence((seed, i)) for i in range(1, len(sets))]
        seeds = [seed, *(int(other.generate_state(1)[0]) for other in others)]
        endless = [
            grain.MapDataset.source(items).shuffle(seed=own).repeat()
            for items, own in zip(sets, seeds, strict=True)
        ]
        self._dataset = grain.MapDataset.mix(endless, weights) if len(sets) > 1 else endless[0]
        self._places = grain.MapDataset.range(len(sets[0])).shuffle(seed=seed).repeat()
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Number of items, of all sets."""
        return self._items

    def __getitem__(self, cursor: int) -> Prompt:
        return self._dataset[int(cursor)]

    def order(self, epoch: int) -> np.ndarray:
        """Lists the items of an epoch, in order, as places in the data; for a stream of one set."""
        if epoch not in self._orders:
            first = epoch * len(self)
            order = [self._places[cursor] for cursor in range(first, first + len(self))]
            self._orders[epoch] = np.array(order)
        return self._orders[epoch]


class RemainingStream:
    """Leaves retired items out of the later epochs of a stream (ScaleRL, 2510.13786, section 3.2).

    retired: an item's place in the data -> the first epoch without it. An epoch that would have
    fewer than `at_least` items has all of them again. Cursors count what remains: those gone
    through mean the same, whatever is retired after them.
    """

    def __init__(self, stream: PromptStream, retired: Mapping[int, int], *, at_least: int):
        self._stream = stream
        self._at_least = at_least
        self._retired = dict(retired)
        self._first_epochs = np.sort(list(retired.values()))
        self._remaining: dict[int, np.ndarray] = {}

    def __getitem__(self, cursor: int) -> Prompt:
        if not self._retired:
            return self._stream[cursor]
        epoch, i = self._find(cursor)
        return self._stream[epoch * len(self._stream) + self._remains(epoch)[i]]

    def retire(self, cursors: Sequence[int], *, next_cursor: int) -> dict[int, int]:
        """Retires the items at `cursors` from each later epoch; returns all retired items."""
        epoch, i = self._find(next_cursor)
        found = {}
        for cursor in cursors:
            of_epoch, j = self._find(cursor)
            place = self._stream.order(of_epoch)[self._remains(of_epoch)[j]]
            found[int(place)] = epoch + (i > 0)
        return found | self._retired

    def _find(self, cursor: int) -> tuple[int, int]:
        """Returns the epoch of a cursor, and its place among the items that remain there."""
        epoch = 0
        while cursor >= (size := self.size(epoch)):
            cursor, epoch = cursor - size, epoch + 1
        return epoch, cursor

    def size(self, epoch: int) -> int:
        """Counts the items of an epoch."""
        gone = int(np.searchsorted(self._first_epochs, epoch, side="right"))
        remaining = len(self._stream) - gone
        return remaining if remaining >= max(1, self._at_least) else len(self._stream)

    def _remains(self, epoch: int) -> np.ndarray:
        """Lists the places that remain of an epoch, in its order."""
        if epoch not in self._remaining:
            gone = [place for place, first in self._retired.items() if first <= epoch]
            if self.size(epoch) == len(self._stream):
                gone = []
            remains = ~np.isin(self._stream.order(epoch), gone)
            self._remaining[epoch] = np.flatnonzero(remains)
        return self._remaining[epoch]


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Holds the training sets and their weights, by config key; one set alone is a mixture too."""

    sets: Mapping[str, Dataset]
    weights: Mapping[str, float]

    @property
    def shares(self) -> dict[str, float]:
        """The part of the stream that each set has, by config key."""
        total = sum(self.weights.values())
        return {key: weight / total for key, weight in self.weights.items()}

    def stream(self, seed: int) -> PromptStream:
        """Orders the prompts of all sets."""
        prompts = [dataset.prompts for dataset in self.sets.values()]
        return PromptStream(*prompts, seed=seed, weights=list(self.weights.values()))

    def grade(self, group: Group) -> Group:
        """Grades a group as its set does; of several sets, each measures its own accuracy.

        accuracy@train is data.train's, accuracy@mixture.NAME that of another set; a task's own
        measures, which are identifiers, cannot have such a name.
        """
        key = group.prompt.key
        group = self.sets[key].grade(group)
        if len(self.sets) == 1:
            return group
        texts, verdicts = group.grades
        name = f"accuracy@{key.removeprefix('data.')}"
        measured = [
            verdict._replace(measures={**(verdict.measures or {}), name: float(verdict.correct)})
            for verdict in verdicts
        ]
        return group.graded(texts, measured)
