"""A game of several turns: find a number that is said to be higher or lower than each guess."""

import dataclasses
import re

import numpy as np

from dapo_jax.tasks.rows import Columns, DataReport, Rows
from dapo_jax.tasks.templates import templated
from dapo_jax.types import Example, Verdict

NUMBER = re.compile(r"\d+")
TRIES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guesses:
    """Generated games; train and test share no range.

    size: of the range of numbers that the secret one is in.
    """

    count: int = 600
    seed: int = 0
    split: str = "train"
    size: int = 8

    def load(self) -> tuple[list[Example], DataReport]:
        """Generates the games, one user message each; their secrets are for the environment."""
        rng, rows = np.random.default_rng(self.seed), Rows(f"guess ({self.split})", "row", "error")
        firsts = [first for first in range(1, 90) if (first % 5 == 0) == (self.split == "test")]
        for row in range(self.count):
            first = int(rng.choice(firsts))
            secret, last = int(rng.integers(first, first + self.size)), first + self.size - 1
            text = f"Guess my number. It is between {first} and {last}. Answer with one number."
            with rows.reading(row):
                columns = Columns(secret=secret)
                rows.add(row, templated(text, "none"), str(secret), columns)
        return rows.result()

    def grade(self, response: str, example: Example) -> Verdict:
        """Is not asked: the environment rewards its episodes."""
        raise NotImplementedError("set the data set's environment to experiments.tasks.guess:Guess")


class Guess:
    """The game: TRIES guesses, and after each "higher" or "lower".

    says: whether it says which; a control says nothing of use.
    """

    says = True

    def reset(self, secret: int, **columns) -> None:
        """Begins a game."""
        self.secret, self.tries, self.correct = secret, 0, False

    def step(self, text: str) -> str | None:
        """Reads a guess, the first number of a turn; returns the answer to it."""
        self.tries += 1
        found = NUMBER.search(text)
        guess = int(found[0]) if found else None
        self.correct = guess == self.secret
        if self.correct or self.tries == TRIES:
            return None
        if guess is None:
            return "Answer with one number."
        if not self.says:
            return f"My number is not {guess}."
        return f"My number is {'higher' if self.secret > guess else 'lower'} than {guess}."

    def get_reward(self) -> float:
        """Rewards a number that is found."""
        return 1.0 if self.correct else -1.0


class Silent(Guess):
    """The control: it says only that a guess is wrong."""

    says = False
