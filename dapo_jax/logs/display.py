"""The display of a run: live progress in a terminal, plain lines in a log, sampled responses.

Text of the model, of data or of errors prints literally, whatever it holds.
"""

import collections
import dataclasses
import io
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dapo_jax.logs.metrics import METRICS, score_metric
from dapo_jax.printable import printable

PLAIN_WIDTH = 140  # columns of a sample in a log file, which has no width of its own
QUIET_SECONDS = 60.0  # a log that has been silent for so long also shows the phases of a step
ETA_STEPS = 20  # the remaining time rests on the median of so many last steps
PROMPT_CHARACTERS = 120
RESPONSE_CHARACTERS = 400


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sampled response with its verdict, as shown to a person."""

    prompt: str
    response: str
    truth: str
    prediction: str | None
    correct: bool
    status: str  # the verifier's reason, for instance "no answer"
    reward: float
    response_tokens: int
    truncated: bool  # ran into the length limit instead of a stop token


def shorten_middle(text: str, *, limit: int) -> str:
    """At most `limit` characters from the two ends of a text, with the count of those left out."""
    if len(text) <= limit:
        return text
    head, tail = (limit + 1) // 2, limit // 2
    return f"{text[:head]} ...({len(text) - limit} more)... {text[len(text) - tail :]}"


def format_duration(seconds: float) -> str:
    """Seconds as h:mm:ss, with days where there are some."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hour}:{minute:02d}:{second:02d}"


def evaluation_line(finished_steps: int, scores: Mapping[str, float]) -> str:
    """`eval/<set>/<metric>` values on one line."""
    by_set: dict[str, list[str]] = {}
    for key, value in scores.items():
        _, name, score = key.split("/", 2)
        by_set.setdefault(name, []).append(f"{score} {score_metric(key).text(float(value))}")
    sets = "; ".join(f"{name}: {', '.join(values)}" for name, values in by_set.items())
    return f"evaluation after {finished_steps} steps  {sets}"


class Display:
    """Live progress in a terminal, aligned plain lines anywhere else. Use it as a context manager.

    Args:
        num_steps: rollout steps of the whole run.
        first_step: the first step that this process does (0, or the one after a restored step).
        console: where to print; None means standard output.
        quiet: print nothing.
        log: is given all that is printed for good, as plain text; of the live lines nothing.

    Steps carry the number that metrics.jsonl and rollouts/ use; the count beside it (1 after
    step 0) is that of finished steps.
    """

    def __init__(
        self,
        num_steps: int,
        first_step: int,
        *,
        console: Console | None = None,
        quiet: bool = False,
        log: Callable[[str], None] = lambda text: None,
    ):
        if console is None:
            console = Console(quiet=quiet)
            if not console.is_terminal:
                console.width = PLAIN_WIDTH
        self._console, self._log = console, log
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._num_steps = num_steps
        self._done = first_step
        self._step_seconds = collections.deque(maxlen=ETA_STEPS)
        self._last_line_seconds = time.monotonic()
        self._status = self._console.status("", spinner="line")  # ASCII: any encoding has it

    def __enter__(self) -> "Display":
        if self._is_live:
            self._status.start()
        return self

    def __exit__(self, *exception) -> None:
        if self._is_live:
            self._status.stop()

    def phase(self, text: str) -> None:
        """Says what is going on now, for instance 'rollout: 24/32 informative groups'."""
        if self._is_live:
            done = f"step {self._done}/{self._num_steps}, eta {self._eta()}, "
            self._status.update(Text(done + self._safe(text), overflow="fold"))
        elif time.monotonic() - self._last_line_seconds >= QUIET_SECONDS:
            self.line(f"  ... {text}")

    def step(self, row: Mapping) -> None:
        """Shows a finished step's row (the keys of metrics.jsonl; missing ones show as '-')."""
        self._done = int(row["step"]) + 1
        if row.get("seconds/total") is not None:
            self._step_seconds.append(float(row["seconds/total"]))
        self.line(self._step_line(row))

    def line(self, text: str) -> None:
        """Prints text, which may have several lines, as it is; in a terminal above the bar."""
        self._last_line_seconds = time.monotonic()
        for line in text.split("\n"):
            self._console.print(Text(self._safe(line)), soft_wrap=True, highlight=False)
        self._log("\n".join(map(printable, text.split("\n"))))

    def last_line(self, text: str) -> None:
        """Prints text and leaves the terminal as it was; for a process that ends at once."""
        self.line(text)
        self.__exit__()

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Prints sampled responses with their verdicts, rewards and ends."""
        self.line(f"samples of step {step}")
        for sample in samples:
            self._console.print(*self._sample(sample), sep="\n", highlight=False)
            plain = Console(file=io.StringIO(), width=PLAIN_WIDTH, color_system=None)
            plain.print(*self._sample(sample), sep="\n", highlight=False)
            self._log(plain.file.getvalue().removesuffix("\n"))

    def _safe(self, text: str) -> str:
        """Printable text in the console's encoding, which may be plain ASCII."""
        encoding = self._console.encoding
        return printable(text).encode(encoding, "backslashreplace").decode(encoding)

    def _eta(self) -> str:
        if not self._step_seconds:
            return "-"
        remaining_steps = max(0, self._num_steps - self._done)
        return format_duration(statistics.median(self._step_seconds) * remaining_steps)

    def _step_line(self, row: Mapping) -> str:
        digits = len(str(self._num_steps))
        seconds = row.get("seconds/total")
        parts = [
            f"step {row['step']:>{digits}} ({self._done:>{digits}}/{self._num_steps})",
            *(
                f"{metric.line} {metric.text(row.get(metric.key))}"
                for metric in METRICS
                if metric.line
            ),
            f"{'-' if seconds is None else f'{float(seconds):.1f}':>7} s",
            f"eta {self._eta()}",
        ]
        return "  ".join(parts)

    def _sample(self, sample: Sample) -> Iterator[Table | Text]:
        """A line with the verdict, then the ends of prompt and response."""

        def text(value: str, style: str = "", *, limit: int = 60) -> Text:
            shown = self._safe(shorten_middle(value, limit=limit))
            return Text(shown, style=style, overflow="fold")

        verdict = "correct" if sample.correct else "wrong"
        color = "green" if sample.correct else "red"
        if self._safe(sample.status) not in ("", verdict):
            verdict += f": {sample.status}"
        prediction = "(none)" if sample.prediction is None else sample.prediction
        end = ("truncated", "yellow") if sample.truncated else ("stop", "dim")
        numbers = f"reward {sample.reward:+.2f}, {sample.response_tokens} tokens, "
        yield Text.assemble(
            *(text(verdict, f"bold {color}"), ", truth ", text(sample.truth), ", prediction "),
            *(text(prediction), ", ", numbers, end),
            overflow="fold",
        )
        prompt = sample.prompt.strip()
        if len(prompt) > PROMPT_CHARACTERS:
            prompt = "..." + prompt[-PROMPT_CHARACTERS:]
        texts = Table.grid(padding=(0, 1), expand=True)
        texts.add_column(style="dim", no_wrap=True)
        texts.add_column(ratio=1, overflow="fold")
        texts.add_row("  prompt", text(prompt, "dim", limit=PROMPT_CHARACTERS + 3))
        texts.add_row("  response", text(sample.response, limit=RESPONSE_CHARACTERS))
        yield texts
