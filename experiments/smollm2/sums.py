"""Sums of two numbers, asked and answered in plain sentences: a task that a small model can learn.

The last whole number of a response is its answer, wherever it stands. SmolLM2-135M is right in one
of ten samples before training; DAPO's long template, which asks for a line "Answer: ...", confuses
it.
"""

import dataclasses
import re

import numpy as np

from dapo_jax.tasks.arithmetic import Generated, Problem, examples_of
from dapo_jax.tasks.rows import DataError
from dapo_jax.types import Example, Verdict

WHOLE_NUMBER = re.compile(r"(?<![\d.,])\d+(?:,\d{3})*(?!\d|[.,]\d)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums(Generated):
    """Generated sums; train and test share none.

    least, largest: of the two numbers.
    """

    count: int = 600
    least: int = 2
    largest: int = 29

    def load(self) -> list[Example]:
        """Generates the questions; raises what `distinct` raises, and for wrong numbers."""
        if not 0 <= self.least <= self.largest:
            raise DataError(
                f"args.least is {self.least} and args.largest {self.largest}: must be "
                "0 <= least <= largest"
            )
        source = f"sums of {self.least} to {self.largest}"
        return examples_of(self.distinct(self._sample, source), source)

    def grade(self, response: str, example: Example) -> Verdict:
        """Grades the last whole number."""
        numbers = WHOLE_NUMBER.findall(response)
        if not numbers:
            return Verdict(False, None, "no_answer")
        prediction = numbers[-1].replace(",", "")
        correct = prediction == example.answer
        return Verdict(correct, prediction, "correct" if correct else "wrong")

    def _sample(self, rng: np.random.Generator) -> Problem:
        a, b = (int(n) for n in rng.integers(self.least, self.largest + 1, size=2))
        return Problem(f"What is {a} + {b}? Answer with a short sentence.", str(a + b))
