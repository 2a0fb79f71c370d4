"""Sums of two numbers, asked and answered in plain sentences: a task that a small model can learn.

The last whole number of a response is its answer, wherever it stands. SmolLM2-135M is right in one
of ten samples before training; DAPO's long template, which asks for a line "Answer: ...", confuses
it.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dapo_jax.tasks import arithmetic
from dapo_jax.tasks.rows import DataError
from dapo_jax.tasks.templates import templated
from dapo_jax.types import Example, Verdict

WHOLE_NUMBER = re.compile(r"(?<![\d.,])\d+(?:,\d{3})*(?!\d|[.,]\d)")


class Asked(NamedTuple):
    """A question and what its answer must have."""

    question: str
    answer: str


def generated(sample: Callable[[np.random.Generator], Asked], task, source: str) -> list[Example]:
    """Makes examples of a task's count, seed and split, one user message each, none twice.

    sample: draws a question of either split. source: what they are, for messages. Raises DataError
    for an unknown split, a negative seed, or too few questions.
    """
    asked = arithmetic.distinct(sample, task.count, task.seed, split=task.split, source=source)
    return [
        Example(templated(question, "none"), answer, source, row)
        for row, (question, answer) in enumerate(asked)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """Generated sums; train and test share none.

    least, largest: of the two numbers.
    """

    count: int = 600
    seed: int = 0
    split: str = "train"
    least: int = 2
    largest: int = 29

    def load(self) -> list[Example]:
        """Generates the questions; raises what `generated` raises, and for wrong numbers."""
        if not 0 <= self.least <= self.largest:
            raise DataError(
                f"args.least is {self.least} and args.largest {self.largest}: must be "
                "0 <= least <= largest"
            )
        return generated(self._sample, self, f"sums of {self.least} to {self.largest}")

    def grade(self, response: str, example: Example) -> Verdict:
        """Grades the last whole number."""
        numbers = WHOLE_NUMBER.findall(response)
        if not numbers:
            return Verdict(False, None, "no_answer")
        prediction = numbers[-1].replace(",", "")
        correct = prediction == example.answer
        return Verdict(correct, prediction, "correct" if correct else "wrong")

    def _sample(self, rng: np.random.Generator) -> Asked:
        a, b = (int(n) for n in rng.integers(self.least, self.largest + 1, size=2))
        return Asked(f"What is {a} + {b}? Answer with a short sentence.", str(a + b))
