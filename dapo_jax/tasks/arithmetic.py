"""Seeded arithmetic problems with integer answers, and worked solutions to learn from.

A problem of level n is a chain of n operations on small numbers, asked as an expression or as a
story. A question belongs to the train or the test split by a hash of its text, so the two never
share one, whatever the seeds.
"""

import bisect
import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.tasks.math_problems import MathTask
from dapo_jax.tasks.rows import DataError, DataReport
from dapo_jax.tasks.templates import templated
from dapo_jax.types import Example

MAX_VALUE = 99  # every intermediate result stays within 0..MAX_VALUE
TEST_SHARE = 8  # one question in eight belongs to the test split

# Of each story the opening, one clause for "+", "-" and "*", and the question.
_STORIES = """\
A box holds {} coins.
{} coins are added.
{} coins are taken out.
Then the coins become {} times as many.
How many coins are in the box?

Tom has {} apples.
He buys {} more.
He gives away {}.
He trades and now has {} times as many.
How many apples does Tom have?

A bus carries {} people.
{} people get on.
{} people get off.
At the station the number grows {} times.
How many people are on the bus?

Mia has saved {} dollars.
She earns {} dollars.
She spends {} dollars.
A prize makes it {} times as much.
How many dollars does Mia have?
"""
STORIES = [story.splitlines() for story in _STORIES.split("\n\n")]


class Problem(NamedTuple):
    """A question and its answer; extra: what else grading needs.

    Of a chain `steps` holds (operation, operand) after the value `start`.
    """

    question: str
    answer: str
    extra: Any = None
    start: int = 0
    steps: tuple[tuple[str, int], ...] = ()


# The probabilities of + and of + or -: Generator.choice draws the same from them, slowly.
OPERATIONS_BELOW = np.cumsum([0.45, 0.45, 0.1])[:2].tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """Problems that are drawn: `count` of the split "train" or "test", which share no question.

    The same fields give the same problems.
    """

    count: int = 10_000
    seed: int = 0
    split: str = "train"

    def distinct(
        self, sample: Callable[[np.random.Generator], Problem], source: str
    ) -> list[Problem]:
        """Samples the problems, no two with the same question.

        sample: makes one problem of either split. source: what the problems are made from, for
        messages. Raises DataError for an unknown split, a negative seed, or too few questions.
        """
        if self.seed < 0:
            raise DataError(f"seed is {self.seed}, but must be at least 0")
        rng = np.random.default_rng(self.seed)
        problems: dict[str, Problem] = {}
        for _ in range(50 * self.count + 1000):
            if len(problems) == self.count:
                return list(problems.values())
            problem = sample(rng)
            if is_of(self.split, problem.question):
                problems.setdefault(problem.question, problem)
        raise DataError(
            f"{source} gave only {len(problems)} distinct problems of the {self.count} asked for; "
            "ask for fewer or add more kinds"
        )


def examples_of(problems: Sequence[Problem], source: str, template: str = "none") -> list[Example]:
    """Makes examples of what was generated, one message of the user each, in a template."""
    return [
        Example(templated(it.question, template), it.answer, source, row, it.extra)
        for row, it in enumerate(problems)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arithmetic(Generated, MathTask):
    """Chains of operations; levels: how many, each number as often as the others."""

    levels: Sequence[int] = (1, 2, 3, 4)

    def load(self) -> tuple[list[Example], DataReport]:
        """Generates the problems, each in DAPO's template; raises what `problems` raises."""
        source = f"arithmetic (levels {','.join(map(str, self.levels))}, {self.split})"
        examples = examples_of(self.problems(), source, "dapo")
        return examples, DataReport(source, rows=len(examples), kept=len(examples))

    def problems(self) -> list[Problem]:
        """Generates the problems; raises what `distinct` raises, and for a level below 1."""
        levels = self.levels
        if not levels or not all(isinstance(level, int) and level >= 1 for level in levels):
            raise DataError(f"levels are {tuple(levels)}, but must be integers of at least 1")
        return self.distinct(
            lambda rng: _sample(levels[rng.integers(len(levels))], rng), f"levels {tuple(levels)}"
        )


def is_of(split: str, question: str) -> bool:
    """Returns True for a question of the split; DataError for an unknown split."""
    if split not in ("train", "test"):
        raise DataError(f"split is {split!r}, but must be 'train' or 'test'")
    return (zlib.crc32(question.encode()) % TEST_SHARE == 0) == (split == "test")


def apply(value: int, operation: str, operand: int) -> int:
    """Computes value + operand, value - operand or value * operand."""
    return {"+": value + operand, "-": value - operand, "*": value * operand}[operation]


def worked_solution(
    problem: Problem, rng: np.random.Generator, *, wrong: float, ramble: float, unformatted: float
) -> str:
    """Writes a solution, one operation a line, with the flaws of a weak student.

    It ends in "Answer: n".

    wrong: probability that a step's result is off; later steps build on it.
    ramble: probability that the student goes over a step again after each step, and again.
    unformatted: probability that the last line lacks the "Answer:" which the verifier looks for.
    """
    lines, value = [], problem.start
    for operation, operand in problem.steps:
        result = apply(value, operation, operand)
        if rng.random() < wrong:
            result = max(0, result + int(rng.choice((-10, -2, -1, 1, 2, 10))))
        line = f"{value}{operation}{operand}={result}"
        lines.append(line)
        while rng.random() < ramble:
            lines.append(f"Let me check: {line}")
        value = result
    lines.append(f"The result is {value}" if rng.random() < unformatted else f"Answer: {value}")
    return "\n".join(lines)


def _sample(level: int, rng: np.random.Generator) -> Problem:
    value = start = int(rng.integers(2, 100))
    steps = []
    while len(steps) < level:
        operation = "+-*"[bisect.bisect_right(OPERATIONS_BELOW, rng.random())]
        operand = int(rng.integers(2, 10 if operation == "*" else 100))
        result = apply(value, operation, operand)
        if 0 <= result <= MAX_VALUE:
            steps.append((operation, operand))
            value = result
    ask = expression if rng.random() < 0.5 else story
    return Problem(ask(start, steps, rng), str(value), start=start, steps=tuple(steps))


def expression(start: int, steps, rng: np.random.Generator) -> str:
    """Asks for the value of a chain as a formula."""
    text, has_sum = str(start), False
    for operation, operand in steps:
        if operation == "*" and has_sum:
            text, has_sum = f"({text})", False
        text = f"{text}{operation}{operand}"
        has_sum = has_sum or operation in "+-"
    return f"What is {text}?"


def story(start: int, steps, rng: np.random.Generator) -> str:
    """Asks for the value of a chain as one of STORIES."""
    opening, *clauses, question = STORIES[int(rng.integers(len(STORIES)))]
    by_operation = dict(zip("+-*", clauses, strict=True))
    parts = [by_operation[operation].format(operand) for operation, operand in steps]
    return " ".join([opening.format(start), *parts, question])
