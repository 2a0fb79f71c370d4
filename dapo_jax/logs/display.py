"""The display of a run: plain lines for terminal and log alike, and one line of progress.

Text of the model, of data or of errors prints literally, whatever it holds.
"""

import collections
import datetime
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from dapo_jax.logs.metrics import METRICS, score_metric
from dapo_jax.printable import printable, shortened

QUIET_SECONDS = 60.0  # a log that has been silent for so long also shows the phases of a step
PROGRESS_COLUMNS = 79  # of the line of progress, which must not wrap
ETA_STEPS = 20  # the remaining time rests on the median of so many last steps
SHOWN_CHARACTERS = {"ground_truth": 60, "prediction": 60, "prompt": 120, "response": 400}


def format_duration(seconds: float) -> str:
    """Seconds as h:mm:ss, with days where there are some."""
    return str(datetime.timedelta(seconds=round(seconds)))


def evaluation_line(finished_steps: int, scores: Mapping[str, float]) -> str:
    """`eval/<set>/<metric>` values on one line."""
    by_set: dict[str, list[str]] = {}
    for key, value in scores.items():
        _, name, score = key.split("/", 2)
        by_set.setdefault(name, []).append(f"{score} {score_metric(key).text(float(value))}")
    sets = "; ".join(f"{name}: {', '.join(values)}" for name, values in by_set.items())
    return f"evaluation after {finished_steps} steps  {sets}"


class Display:
    """Prints a run's lines; in a terminal the last one is of progress, and is written over.

    num_steps: of the whole run. first_step: of this process. log: is given all that is printed for
    good; None: nothing is printed. Steps carry the number that metrics.jsonl has; the count beside
    it (1 after step 0) is that of finished steps.
    """

    def __init__(self, num_steps: int, first_step: int, log: Callable[[str], None] | None):
        self._log, self._is_terminal = log, sys.stdout.isatty()
        self._num_steps, self._done = num_steps, first_step
        self._step_seconds = collections.deque(maxlen=ETA_STEPS)
        self._last_line_seconds = time.monotonic()

    def phase(self, text: str) -> None:
        """Says what is going on now, for instance 'rollout: 24 of 32 groups, 61 graded'."""
        if self._is_terminal:
            progress = f"step {self._done}/{self._num_steps}, eta {self._eta()}, {printable(text)}"
            self._print(f"\r{progress[:PROGRESS_COLUMNS]:{PROGRESS_COLUMNS}}", end="")
        elif time.monotonic() - self._last_line_seconds >= QUIET_SECONDS:
            self.line(f"  ... {text}")

    def step(self, row: Mapping) -> None:
        """Shows a finished step's row (the keys of metrics.jsonl; missing ones show as '-')."""
        self._done = row["step"] + 1
        self._step_seconds.append(row["seconds/total"])
        digits = len(str(self._num_steps))
        step = f"step {row['step']:>{digits}} ({self._done:>{digits}}/{self._num_steps})"
        metrics = (f"{m.line} {m.text(row.get(m.key))}" for m in METRICS if m.line)
        self.line("  ".join([step, *metrics, f"eta {self._eta()}"]))

    def line(self, text: str) -> None:
        """Prints text, which may have several lines, as it is, over the line of progress."""
        self._last_line_seconds = time.monotonic()
        text = "\n".join(map(printable, text.split("\n")))
        self.close()
        self._print(text)
        if self._log:
            self._log(text)

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        """Prints sampled responses with their verdicts, rewards and ends."""
        self.line("\n".join([f"samples of step {step}", *map(described, rows)]))

    def close(self) -> None:
        """Takes the line of progress away."""
        if self._is_terminal:
            self._print(f"\r{'':{PROGRESS_COLUMNS}}\r", end="")

    def _print(self, text: str, end: str = "\n") -> None:
        if self._log:
            print(text, end=end, flush=True)

    def _eta(self) -> str:
        left, seconds = self._num_steps - self._done, self._step_seconds
        return format_duration(statistics.median(seconds) * left) if seconds else "-"


def described(row: Mapping) -> str:
    """Describes a response: a line with its verdict, then the ends of prompt and response."""
    shown = {
        key: printable(shortened((row[key] or "(none)").strip(), limit=limit))
        for key, limit in SHOWN_CHARACTERS.items()
    }
    verdict = "correct" if row["correct"] else "wrong"
    if row["status"] not in ("", verdict):
        verdict += f": {row['status']}"
    end = "truncated" if row["truncated"] else "stop"
    return (
        f"{verdict}, truth {shown['ground_truth']}, prediction {shown['prediction']}, reward "
        f"{row['reward']:+.2f}, {row['tokens']} tokens, {end}\n"
        f"  prompt    {shown['prompt']}\n  response  {shown['response']}"
    )
