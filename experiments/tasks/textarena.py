"""Games of the package textarena for one player, with the game's own words and reward.

An optional extra: pip install textarena.
"""

import contextlib
import dataclasses
import importlib
import random
import threading
from collections.abc import Iterator

from dapo_jax.tasks.templates import templated
from dapo_jax.types import Example, Verdict

THE_GAME = -1  # among those who speak; the player is 0
_RANDOM = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Games:
    """Games of one kind; train and test share no seed.

    game: its name in the package. prompt: what stands before the game's own words.
    """

    game: str = "GuessTheNumber-v0"
    prompt: str = "Play a game."
    count: int = 600
    seed: int = 0
    split: str = "train"

    def load(self) -> list[Example]:
        """Lists the games by their seeds."""
        first = 2 * self.seed * self.count + (self.split == "test")
        prompt = templated(self.prompt, "none")
        return [
            Example(prompt, "", self.game, row, {"game": self.game, "seed": first + 2 * row})
            for row in range(self.count)
        ]

    def grade(self, response: str, example: Example) -> Verdict:
        """Is not asked: the environment rewards its episodes."""
        raise NotImplementedError(
            "set the data set's environment to experiments.tasks.textarena:Game"
        )


class Game:
    """A game: what it says to its player, and its reward from 0 to 1 as -1 to 1."""

    def reset(self, game: str, seed: int, **columns) -> str:
        """Begins a game."""
        self.game = importlib.import_module("textarena").make(f"{game}-raw")  # without wrappers
        self.seed, self.turns = seed, 0
        with seeded(seed):
            self.game.reset(num_players=1, seed=seed)
        return f"\n\n{self.said()}"

    def step(self, text: str) -> str | None:
        """Makes a move; returns what the game says to it."""
        self.turns += 1
        with seeded(self.seed, self.turns):
            done, _ = self.game.step(text)
        return None if done else self.said()

    def said(self) -> str:
        """Reads what the game has said since."""
        _, found = self.game.get_observation()
        return "\n".join(text for who, text, _ in found if who == THE_GAME)

    def get_reward(self) -> float:
        """Returns the game's reward; a game that was not ended has none."""
        rewards, _ = self.game.close()
        return 2 * min(max(rewards[0], 0.0), 1.0) - 1 if rewards else -1.0

    def correct(self) -> bool:
        """Returns whether the game was won, with all of its reward."""
        return self.get_reward() == 1


@contextlib.contextmanager
def seeded(*seed: int) -> Iterator[None]:
    """Seeds the module random, which games share with all threads, and gives it back."""
    with _RANDOM:
        before = random.getstate()
        random.seed(repr(seed))
        try:
            yield
        finally:
            random.setstate(before)
