"""Environments of one's own, to copy: an answer that is wrong may be given again.

    PYTHONPATH=tests/ext_tasks python -m dapo_jax.train --config=configs/tiny.py --workdir=DIR \
        --config.data.train.environment=retry:Retry
"""

import re

ANSWER = re.compile(r"Answer: (-?\d+)")


class Retry:
    """Says whether an answer is right; three tries, and a reward of 1, 1/2 or 1/4."""

    def reset(self, answer: str, **columns) -> None:
        self.answer, self.tries, self.correct = answer, 0, False

    def step(self, text: str) -> str | None:
        """Reads a turn; returns what the model reads next, None at the end."""
        self.tries += 1
        found = ANSWER.search(text)
        self.correct = bool(found) and found[1] == self.answer
        if self.correct or self.tries == 3:
            return None
        return "No. Again:"

    def get_reward(self) -> float:
        """Rewards an early right answer most."""
        return 0.5 ** (self.tries - 1) if self.correct else -1.0
