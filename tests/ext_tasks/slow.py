"""An environment whose calls take a random time."""

import random
import time

from .retry import Retry


class Slow(Retry):
    """Answers as Retry does, after a while."""

    def step(self, text: str) -> str | None:
        """Reads a turn."""
        time.sleep(random.uniform(0.05, 0.2))
        return super().step(text)
