"""Data sets: a task's examples as tokenized prompts, and the endless stream that training reads."""

import concurrent.futures
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import grain
import numpy as np

from dapo_jax.tasks.base import graded, load_examples, make_task
from dapo_jax.tasks.environments import EnvironmentFailed, Factory, retried
from dapo_jax.tasks.rows import UNANSWERED, DataError, DataReport, by_text
from dapo_jax.tasks.tokenizer import Tokenizer
from dapo_jax.types import Example, Group, Prompt

BEGUN_AT_ONCE, BEGIN_SECONDS = 8, 10.0  # episodes, while data is read
SAY_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Holds the prompts of a task, and how it grades their responses.

    grade: decodes and grades the responses of a group. report: accounts for each row of the data.
    same: tells which pairs of predictions are one answer, for their votes; None: there are no
    predictions. environment: makes what answers its episodes' turns. k: responses to each prompt of
    an evaluation set.
    """

    prompts: list[Prompt]
    grade: Callable[[Group], Group]
    report: DataReport
    same: Callable[[Sequence[tuple[str, str]]], list[bool]] | None = by_text
    environment: Factory | None = None
    k: int | None = None


def load_dataset(
    key: str,
    settings: Mapping,
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    environment_seconds: float = 60.0,
    open_environments: int = 0,
) -> Dataset:
    """Makes a data set's task, loads its examples and tokenizes them.

    key: the config key of the data set, for messages. settings: its values (`configs.base.dataset`)
    and those of the keys `rules` and `on_bad_row`; max_prompts of the prompts are kept (0: all).
    environment_seconds: the longest that a call of its environment may take. open_environments: so
    many at most are open at once; 0: any number.

    Raises FileNotFoundError for a missing file and DataError for a task that does not exist, bad
    rows, what is no example, a prompt of no tokens, or where no prompt is left.
    """
    task = make_task(key, settings)
    try:
        examples, report = load_examples(task, settings["task"] or key)
        examples = [with_system(example, settings["system"]) for example in examples]
        environment, tools, notes = None, None, [*report.notes]
        if name := settings["environment"]:
            environment = Factory.of(key, name, environment_seconds)
            tools = environment.schemas
            notes += tokenizer.check_turns(with_tools=not environment.is_stepped)
        limit = {"max_prompt_tokens": max_prompt_tokens, "tools": tools}
        prompts, overlong = tokenize(examples, tokenizer, key, **limit)
        if 0 < (most := settings["max_prompts"]) < len(prompts):
            notes.append(f"the first {most:,} of {len(prompts):,} usable prompts (max_prompts)")
            prompts = prompts[:most]
        if environment and prompts:
            at_once = min(BEGUN_AT_ONCE, open_environments or BEGUN_AT_ONCE)
            examples = [prompt.example for prompt in prompts]
            environment, examples = begun(environment, examples, key, at_once=at_once)
            if any(example.opening for example in examples):
                prompts, longer = tokenize(examples, tokenizer, key, **limit)
                overlong += longer
            else:
                pairs = zip(prompts, examples, strict=True)
                prompts = [dataclasses.replace(prompt, example=it) for prompt, it in pairs]
        lengths = [len(prompt.token_ids) for prompt in prompts]
        report = dataclasses.replace(
            report,
            kept=len(prompts),
            overlong=overlong,
            max_prompt_tokens=max_prompt_tokens,
            mean_tokens=float(np.mean(lengths)) if lengths else 0.0,
            longest_tokens=max(lengths, default=0),
            notes=tuple(notes),
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
    same = getattr(task, "same", by_text)
    if environment and environment.judges:
        same = None
    return Dataset(prompts, grade, report, same, environment, settings.get("k"))


def begun(
    factory: Factory, examples: Sequence[Example], key: str, *, at_once: int
) -> tuple[Factory, list[Example]]:
    """Begins an episode of each example, some at once, and closes it.

    Returns (the factory that knows who judges, the examples with what is said first). Raises
    DataError where one does not begin, or where the task is to judge and has no answer.
    """

    def tried(method: Callable, example: Example):
        try:
            return retried(min(factory.seconds, BEGIN_SECONDS), lambda: method(example))
        except EnvironmentFailed as error:
            raise DataError(f"{example.source}, row {example.row}: {error}") from error

    said_at, ready = time.monotonic(), []
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        for example in pool.map(functools.partial(tried, factory.introduced), examples):
            ready.append(example)
            if time.monotonic() - said_at > SAY_SECONDS:
                said_at = time.monotonic()
                progress = f"{key}: {len(ready):,} of {len(examples):,} episodes were begun"
                print(progress, file=sys.stderr, flush=True)
    judges = tried(factory.judges_in, ready[0])
    no_answer = next((it for it in ready if it.answer == UNANSWERED), None)
    if no_answer and not judges:
        why = getattr(no_answer.extra, "why", "")
        raise DataError(
            f"{no_answer.source}, row {no_answer.row} has no answer ({why}), and {factory.name} "
            "has no reward: give it get_reward, or set answer_field or kind"
        )
    return dataclasses.replace(factory, judges=judges), ready


def with_system(example: Example, text: str) -> Example:
    """Puts a system message before a prompt; DataError where it has one."""
    if not text:
        return example
    if any(message["role"] == "system" for message in example.prompt):
        where = f"{example.source}, row {example.row}"
        raise DataError(f"system = {text!r:.80}, but {where} has a system message; leave it empty")
    message = {"role": "system", "content": text}
    return dataclasses.replace(example, prompt=(message, *example.prompt))


def tokenize(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    key: str,
    *,
    max_prompt_tokens: int,
    tools: Sequence[Mapping] | None = None,
) -> tuple[list[Prompt], int]:
    """Tokenizes the examples of at most `max_prompt_tokens` tokens, and counts the longer ones.

    Raises DataError for an example of no tokens, which no model goes on from.
    """
    prompts = []
    for example in examples:
        *before, last = example.prompt
        if opening := example.opening:
            asked = last["content"].removesuffix(opening)
            last = {**last, "content": asked + tokenizer.plainly(opening)}
        token_ids = tokenizer.encode_chat((*before, last), tools)
        if not token_ids:
            raise DataError(
                f"{example.source}, row {example.row}: the prompt is empty, it has no tokens; "
                "remove it, or give the set a template"
            )
        if len(token_ids) <= max_prompt_tokens:
            prompts.append(Prompt(np.asarray(token_ids, np.int32), example, key))
    return prompts, len(examples) - len(prompts)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Holds the training sets and their weights, by config key; one set alone is a mixture too.

    Weights are above 0.
    """

    sets: Mapping[str, Dataset]
    weights: Mapping[str, float]

    @property
    def shares(self) -> dict[str, float]:
        """The part of the stream that each set has, by config key."""
        total = sum(self.weights.values())
        return {key: weight / total for key, weight in self.weights.items()}

    def stream(self, seed: int) -> grain.MapDataset:
        """Orders the prompts of all sets without end: stream[cursor] for every integer cursor >= 0.

        Epoch e of a set of n is stream[e * n] to stream[(e + 1) * n - 1]: each item once, in an
        order that depends on the seed and e alone. Of several sets, each is taken so, and the next
        prompt is of the set that is furthest behind its share: the order of the sets depends on the
        weights alone. Access is random, so the cursor is all the state there is. seed: 0 to
        2**32 - 1. The weights are counted to 1 % of the least.
        """
        # Of one seed, sets of the same length would be shuffled in the same order.
        others = [np.random.SeedSequence((seed, i)) for i in range(1, len(self.sets))]
        seeds = [seed, *(int(other.generate_state(1)[0]) for other in others)]
        endless = [
            grain.MapDataset.source(dataset.prompts).shuffle(seed=own).repeat()
            for dataset, own in zip(self.sets.values(), seeds, strict=True)
        ]
        weights = list(self.weights.values())
        return grain.MapDataset.mix(endless, weights) if len(endless) > 1 else endless[0]

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
