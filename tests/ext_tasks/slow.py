"""Environments whose calls take a random time, or kill their process."""

import os
import pathlib
import random
import signal
import time

from .retry import Retry


class Slow(Retry):
    """Answers as Retry does, after a while."""

    seconds = 0.05, 0.2

    def step(self, text: str) -> str | None:
        """Reads a turn."""
        time.sleep(random.uniform(*self.seconds))
        return super().step(text)


class Deadly(Retry):
    """Kills process 1 in a call, once, where there is the file that KILL names."""

    def step(self, text: str) -> str | None:
        """Reads a turn."""
        file = pathlib.Path(os.environ["KILL"])
        if os.environ.get("DAPO_PROCESS") == "1" and file.exists():
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(text)
