"""The display of a sweep: a table over all runs in a terminal, a line a finished run in a log."""

import statistics
import time
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dapo_jax.run.display import PLAIN_WIDTH, format_duration, printable
from dapo_jax.run.metrics import METRICS
from dapo_jax.sweep.plan import Point
from dapo_jax.sweep.points import LOG, Progress
from sharding import hosts

SHOWN = ("accuracy/mean", "entropy", "clip_fraction/high")  # of each run's newest row
HEADS = ("accuracy", "entropy", "clipped high")
FORMS = {"clip_fraction/high": "{:.2%}"}
REFRESH_SECONDS = 1.0


class SweepDisplay:
    """Shows how the points stand. Use it as a context manager.

    jobs: how many run at once, for the time left. console: where to print; None: standard output.
    """

    def __init__(
        self, progress: Mapping[Point, Progress], *, jobs: int, console: Console | None = None
    ):
        if console is None:
            console = Console()
            if not console.is_terminal:
                console.width = PLAIN_WIDTH
        self._console, self._progress, self._jobs = console, progress, jobs
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        self._start_seconds, self._looked_at = time.monotonic(), 0.0
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> "SweepDisplay":
        if self._is_live:
            self._live.start()
            self.look()
        return self

    def __exit__(self, *exception) -> None:
        if self._is_live:
            self._live.update(self.table(), refresh=True)
            self._live.stop()

    def look(self) -> None:
        """Draws the table again, where that is due."""
        if self._is_live and time.monotonic() - self._looked_at >= REFRESH_SECONDS:
            self._looked_at = time.monotonic()
            self._live.update(self.table(), refresh=True)

    def end(self, point: Point, status: int, progress: Progress) -> None:
        """Says in a line how an attempt ended."""
        done = sum(at.state == "done" for at in self._progress.values())
        parts = [
            f"[{done}/{len(self._progress)}] {point.label}: {_ending(point, status, progress)}"
        ]
        if progress.row:
            numbers = zip(HEADS, map(_newest(progress).get, SHOWN), strict=True)
            parts.append("  ".join(f"{head} {text}" for head, text in numbers))
        parts.append(f"{minutes_left(self._progress, self._jobs)} left")
        self.line("  ".join(parts))
        if progress.error and status not in (0, hosts.RETRYABLE):
            self.line(f"  {progress.reason}  ({point.workdir / LOG})")

    def line(self, text: str) -> None:
        """Prints a line; in a terminal above the table."""
        encoding = self._console.encoding
        safe = printable(text).encode(encoding, "backslashreplace").decode(encoding)
        self._console.print(Text(safe), soft_wrap=True, highlight=False)

    def table(self) -> Table:
        """A row an arm, then one of all."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_footer=True)
        elapsed = format_duration(time.monotonic() - self._start_seconds)
        points = list(self._progress)
        for head, foot in (
            ("arm", f"all, after {elapsed}"),
            *((state, self._count(points, state)) for state in ("done", "running", "failed")),
            ("steps", self._steps(points)),
            *((head, "") for head in HEADS),
            ("minutes left", minutes_left(self._progress, self._jobs).removesuffix(" min")),
        ):
            justify = "left" if head == "arm" else "right"
            table.add_column(head, Text(foot), justify=justify, no_wrap=True, overflow="ellipsis")
        for arm in dict.fromkeys(point.arm for point in points):
            here = [point for point in points if point.arm == arm]
            rows = [self._progress[point].row for point in here]
            numbers = [_mean_text(key, rows) for key in SHOWN]
            left = minutes_left(self._progress, self._jobs, arm=arm).removesuffix(" min")
            states = [self._count(here, state) for state in ("done", "running", "failed")]
            cells = [printable(arm), *states, self._steps(here), *numbers, left]
            table.add_row(*map(Text, cells))
        return table

    def _count(self, points: list[Point], state: str) -> str:
        number = sum(self._progress[point].state == state for point in points)
        return f"{number}/{len(points)}" if state == "done" else str(number or "-")

    def _steps(self, points: list[Point]) -> str:
        done = statistics.mean(self._progress[point].finished_steps for point in points)
        return f"{done:.0f}/{max(point.num_steps for point in points)}"


def minutes_left(progress: Mapping[Point, Progress], jobs: int, *, arm: str | None = None) -> str:
    """Returns how long the points that are not done still take, of all arms or of one.

    Steps left times the mean seconds of a step, of the arm's newest rows or of all where it has
    none, over the jobs that run at once. Failed points count no more.
    """
    seconds: dict[str, list[float]] = {}
    for point, at in progress.items():
        if at.row.get("seconds/total") is not None:
            seconds.setdefault(point.arm, []).append(at.row["seconds/total"])
    if not seconds:
        return "-"
    overall = statistics.mean(value for values in seconds.values() for value in values)
    left = sum(
        (point.num_steps - at.finished_steps) * statistics.mean(seconds.get(point.arm, [overall]))
        for point, at in progress.items()
        if at.state in ("waiting", "running") and arm in (None, point.arm)
    )
    return f"{left / jobs / 60:.0f} min"


def _ending(point: Point, status: int, progress: Progress) -> str:
    steps, spent = progress.finished_steps, format_duration(progress.seconds)
    if status == 0:
        return f"done, {steps} steps in {spent}"
    if status == hosts.RETRYABLE:
        return f"stopped after {steps} of {point.num_steps} steps, saved"
    told = f"killed by signal {-status}" if status < 0 else f"failed with status {status}"
    return f"{told} after {steps} of {point.num_steps} steps and {spent}"


def _newest(progress: Progress) -> dict[str, str]:
    return {key: _mean_text(key, [progress.row]) for key in SHOWN}


def _mean_text(key: str, rows: list[Mapping]) -> str:
    """The mean of a metric over the rows that have it."""
    values = [row[key] for row in rows if row.get(key) is not None]
    form = FORMS.get(key) or next(metric.form for metric in METRICS if metric.key == key)
    return form.format(statistics.mean(values)).strip() if values else "-"
