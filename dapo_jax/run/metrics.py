"""What a run leaves behind and what a person sees: metric rows, rollout files, timings, display.

Host only. Numbers arrive as Python or 0-d array scalars; everything on disk is strict JSON.
"""

import collections
import contextlib
import dataclasses
import gzip
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import tensorboardX
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 140  # columns of a sample table in a log file, which has no width of its own
STACKED_BELOW = 120  # narrower displays show a sample as a block of lines, not as a table row
ELAPSED_FROM = 50  # narrower terminals show only the remaining time beside the bar
QUIET_SECONDS = 60.0  # a log that has been silent for so long also shows the phases of a step
ETA_STEPS = 20  # the remaining time rests on the median of so many last steps
PROMPT_CHARACTERS = 120
RESPONSE_CHARACTERS = 400


# Files.


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator:
    """Opens a binary file that appears under `path` complete or not at all.

    The bytes go to a temporary neighbour, which is synced and renamed when the block ends, and
    removed when the block raises. Parent folders are made.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _plain_value(value):
    """A JSON-ready copy: 0-d arrays become Python scalars, NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {key: _plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_value(item) for item in value]
    if hasattr(value, "ndim"):
        value = _plain_value(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _json_line(row: Mapping) -> bytes:
    """One row as a line of strict JSON; a float reads back as the same double."""
    return json.dumps(_plain_value(row), allow_nan=False).encode() + b"\n"


def write_rollouts(path: str | os.PathLike, rows: Iterable[Mapping]) -> None:
    """Writes one response a line to a gzipped JSON-lines file, DIR/rollouts/<step>.jsonl.gz.

    Equal rows give equal bytes (no time or name in the gzip header). The file appears complete
    or not at all. NaN and infinities are written as null.
    """
    with (
        atomic_file(path) as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as zipped,
    ):
        for row in rows:
            zipped.write(_json_line(row))


# Metric rows.


def _read_lines(path: pathlib.Path) -> list[tuple[bytes, dict]]:
    """The file's lines, as written and as parsed; a torn last line is left out."""
    pairs = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        whole = line.endswith(b"\n")
        try:
            row = json.loads(line)
        except ValueError as error:
            if not whole:  # only the last line can lack its end: a kill in the middle of a write
                break
            raise ValueError(f"{path}, line {number}: not JSON ({error}): {line[:80]!r}") from None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise ValueError(f"{path}, line {number}: no row with an integer step: {line[:80]!r}")
        pairs.append((line if whole else line + b"\n", row))
    return pairs


def read_rows(path: str | os.PathLike) -> list[dict]:
    """Reads metrics.jsonl: one dict a rollout step, null read as None.

    A last line without its end, left by a kill in the middle of a write, is dropped if it does
    not parse. Raises ValueError, with file and line, for any other broken line, and
    FileNotFoundError.
    """
    return [row for _, row in _read_lines(pathlib.Path(path))]


class MetricsWriter:
    """Appends one row a rollout step to workdir/metrics.jsonl and to workdir/tensorboard.

    Args:
        workdir: the run's folder; made if absent.
        resume_step: the last step that the restored state contains; None at the start of a run.
            Rows after it (all rows for None) belong to work that will be done again: they are cut
            off, and a purge mark hides them from TensorBoard. A torn last line goes too. Kept
            lines keep their bytes. `cut_rows` counts the rows cut.

    NaN and infinities are written as null, which keeps the file strict JSON (rows read back as
    None), and are left out of TensorBoard.
    """

    def __init__(self, workdir: str | os.PathLike, *, resume_step: int | None):
        workdir = pathlib.Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self.path = workdir / "metrics.jsonl"
        first_step = 0 if resume_step is None else resume_step + 1
        old_bytes = self.path.read_bytes() if self.path.exists() else b""
        pairs = _read_lines(self.path) if old_bytes else []
        kept = [(line, row) for line, row in pairs if row["step"] < first_step]
        kept_bytes = b"".join(line for line, _ in kept)
        if kept_bytes != old_bytes:
            with atomic_file(self.path) as file:
                file.write(kept_bytes)
        self.cut_rows = len(pairs) - len(kept)
        self._steps = {row["step"] for _, row in kept}
        self._file = self.path.open("ab")
        # Event files are named by the second: the suffix keeps a quick restart from overwriting one
        # and keeps the files in order.
        events = workdir / "tensorboard"
        earlier = len(list(events.glob("events.*"))) if events.exists() else 0
        self._tensorboard = tensorboardX.SummaryWriter(
            logdir=str(events),
            purge_step=first_step,
            flush_secs=10,
            filename_suffix=f".{earlier:05d}",
        )

    def has_row(self, step: int) -> bool:
        """Whether the file holds the row of this step."""
        return step in self._steps

    def write(self, row: Mapping) -> None:
        """Appends a row and syncs it to disk.

        Raises TypeError for a value that is not a number, ValueError for a step that does not come
        after the last one.
        """
        row = _plain_value(row)
        step = row.get("step")
        if type(step) is not int:
            raise TypeError(f"a metrics row needs an integer 'step', got {step!r}")
        if self._steps and step <= max(self._steps):
            raise ValueError(f"step {step} is not after the last step {max(self._steps)}")
        for key, value in row.items():
            if value is not None and not isinstance(value, (bool, int, float)):
                raise TypeError(f"metric {key!r} of step {step} is not a number: {value!r}")
        self._file.write(_json_line(row))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._steps.add(step)
        for key, value in row.items():
            if key != "step" and value is not None:
                self._tensorboard.add_scalar(key, value, step)

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


# Timings.


class Stopwatch:
    """Collects the wall seconds of one step's phases: `with watch("rollout"): ...`.

    A phase may be entered again; its seconds add up, also when the block raises. The total runs
    from the making of the watch.
    """

    def __init__(self):
        self._start_seconds = time.perf_counter()
        self._phase_seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start_seconds = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start_seconds
            self._phase_seconds[phase] = self.seconds(phase) + spent

    def seconds(self, phase: str) -> float:
        """Seconds spent in a phase so far; 0 for one never entered."""
        return self._phase_seconds.get(phase, 0.0)

    def row(self) -> dict[str, float]:
        """`seconds/<phase>` for each phase in order of first use, then `seconds/total`."""
        row = {f"seconds/{phase}": seconds for phase, seconds in self._phase_seconds.items()}
        return {**row, "seconds/total": time.perf_counter() - self._start_seconds}


# What a person sees.


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


def printable(text: str) -> str:
    """Text of unknown origin on one line: nothing in it can move the cursor or change colours.

    A line break becomes a return sign, every other unprintable character (control, bidirectional,
    surrogate) its Python escape.
    """
    return "".join(
        char
        if char.isprintable()
        else "⏎"
        if char == "\n"
        else char.encode("unicode_escape").decode()
        for char in text
    )


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


# label, key, format, width of the number in a log line
_SHOWN = (
    ("reward", "reward/mean", "{:+.3f}", 6),
    ("accuracy", "accuracy/mean", "{:.1%}", 6),
    ("tokens", "response_tokens/mean", "{:.1f}", 7),
    ("truncated", "response_tokens/truncated_fraction", "{:.1%}", 6),
    ("entropy", "entropy", "{:.3f}", 5),
    ("tokens/s", "tokens_per_second/step", "{:.0f}", 6),
)


def _shown_numbers(row: Mapping) -> list[tuple[str, str, int]]:
    """(label, formatted number, width) of the quantities worth watching; '-' where missing."""
    return [
        (label, "-" if row.get(key) is None else form.format(float(row[key])), width)
        for label, key, form, width in _SHOWN
    ]


def evaluation_line(row: Mapping) -> str | None:
    """The row's `eval/<set>/<metric>` values on one line; None where it has none."""
    by_set: dict[str, list[str]] = {}
    for key, value in row.items():
        if key.startswith("eval/") and value is not None:
            name, _, metric = key.removeprefix("eval/").rpartition("/")
            by_set.setdefault(name, []).append(f"{metric} {float(value):.1%}")
    if not by_set:
        return None
    sets = "; ".join(f"{name}: {', '.join(values)}" for name, values in by_set.items())
    return f"evaluation after {row['step'] + 1} steps  {sets}"


class Display:
    """Live progress in a terminal, aligned plain lines anywhere else. Use it as a context manager.

    Args:
        num_steps: rollout steps of the whole run.
        first_step: the first step that this process does (0, or the one after a restored step).
        console: where to print; None means standard output.
        quiet: print nothing.

    Steps carry the number that metrics.jsonl and rollouts/ use; the count beside it (1 after
    step 0) is that of finished steps. Text of the model, of data or of errors prints literally.
    """

    def __init__(
        self,
        num_steps: int,
        first_step: int,
        *,
        console: Console | None = None,
        quiet: bool = False,
    ):
        if console is None:
            console = Console(quiet=quiet)
            if not console.is_terminal:
                console.width = PLAIN_WIDTH
        self._console = console
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._num_steps = num_steps
        self._done = first_step
        self._row: Mapping = {}
        self._phase_text: str | None = None
        self._step_seconds = collections.deque(maxlen=ETA_STEPS)
        self._start_seconds = self._phase_start_seconds = time.monotonic()
        self._last_line_seconds = self._start_seconds
        self._spinner = Spinner("line", style="cyan")  # ASCII: any terminal's encoding has it
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=4,
            vertical_overflow="crop",
        )

    def __enter__(self) -> "Display":
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *exception) -> None:
        self._phase_text = None
        if self._is_live:
            self._live.stop()

    def phase(self, text: str) -> None:
        """Says what is going on now, for instance 'rollout: 24/32 informative groups'."""
        text = self._safe(text)
        now = time.monotonic()
        if _phase_name(text) != _phase_name(self._phase_text or ""):
            self._phase_start_seconds = now
        self._phase_text = text
        if not self._is_live and now - self._last_line_seconds >= QUIET_SECONDS:
            self.line(f"  ... {text}")

    def step(self, row: Mapping) -> None:
        """Shows a finished step's row (the keys of metrics.jsonl; missing ones show as '-')."""
        self._row = row
        self._phase_text = None
        self._done = int(row["step"]) + 1
        if row.get("seconds/total") is not None:
            self._step_seconds.append(float(row["seconds/total"]))
        if self._is_live:
            self._live.refresh()
        else:
            self.line(self._step_line(row))
        evaluation = evaluation_line(row)
        if evaluation is not None:
            self.line(evaluation)

    def line(self, text: str) -> None:
        """Prints text, which may have several lines, as it is; in a terminal above the bar."""
        self._last_line_seconds = time.monotonic()
        for line in text.split("\n"):
            self._console.print(Text(self._safe(line)), soft_wrap=True, highlight=False)

    def last_line(self, text: str) -> None:
        """Prints text and leaves the terminal as it was; for a process that ends at once."""
        self.line(text)
        self.__exit__()

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Prints a table of sampled responses with their verdicts, rewards and ends."""
        self.line(f"samples of step {step}")
        narrow = self._console.width < STACKED_BELOW
        draw = self._sample_blocks if narrow else self._sample_table
        self._console.print(draw(samples), highlight=False)

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
            *(f"{label} {number:>{width}}" for label, number, width in _shown_numbers(row)),
            f"{'-' if seconds is None else f'{float(seconds):.1f}':>7} s",
            f"eta {self._eta()}",
        ]
        return "  ".join(parts)

    def _render(self) -> Group:
        times = f"eta {self._eta()}"
        if self._console.width >= ELAPSED_FROM:
            times = f"{format_duration(time.monotonic() - self._start_seconds)}  {times}"
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        bar.add_row(
            Text(f"step {self._done}/{self._num_steps}", style="bold", overflow="crop"),
            ProgressBar(total=max(1, self._num_steps), completed=self._done),
            Text(times, style="dim", overflow="crop"),
        )
        lines = [bar]
        if self._row:
            numbers = (
                Text.assemble((label, "dim"), " ", (number, "bold"))
                for label, number, _ in _shown_numbers(self._row)
            )
            lines.append(Columns(numbers, padding=(0, 3)))
        if self._phase_text is not None:
            seconds = format_duration(time.monotonic() - self._phase_start_seconds)
            self._spinner.update(text=Text(f"{self._phase_text}  ({seconds})", overflow="fold"))
            lines.append(self._spinner)
        return Group(*lines)

    def _sample_cells(self, sample: Sample) -> dict[str, Text]:
        """The seven things to show of a sample, by column name."""
        prompt = sample.prompt.strip()
        if len(prompt) > PROMPT_CHARACTERS:
            prompt = "..." + prompt[-PROMPT_CHARACTERS:]
        verdict = "correct" if sample.correct else "wrong"
        if self._safe(sample.status) not in ("", verdict):
            verdict += f": {sample.status}"
        prediction = "(none)" if sample.prediction is None else sample.prediction
        end, end_style = ("truncated", "yellow") if sample.truncated else ("stop", "dim")

        def text(value: str, *, limit: int, style: str) -> Text:
            return Text(
                self._safe(shorten_middle(value, limit=limit)), style=style, overflow="fold"
            )

        return {
            "prompt": text(prompt, limit=PROMPT_CHARACTERS + 3, style="dim"),
            "response": text(sample.response, limit=RESPONSE_CHARACTERS, style=""),
            "truth": text(sample.truth, limit=60, style=""),
            "prediction": text(prediction, limit=60, style=""),
            "verdict": text(verdict, limit=60, style="green" if sample.correct else "red"),
            "reward": text(f"{sample.reward:+.2f}", limit=60, style=""),
            "tokens": text(f"{sample.response_tokens} {end}", limit=60, style=end_style),
        }

    def _sample_table(self, samples: Sequence[Sample]) -> Table:
        table = Table(expand=True, show_lines=True)
        table.add_column("prompt", ratio=2, overflow="fold")
        table.add_column("response", ratio=4, overflow="fold")
        table.add_column("truth", max_width=12, overflow="fold")
        table.add_column("prediction", max_width=12, overflow="fold")
        table.add_column("verdict", max_width=14, overflow="fold")
        table.add_column("reward", justify="right", no_wrap=True)
        table.add_column("tokens", justify="right", min_width=9)
        for sample in samples:
            table.add_row(*self._sample_cells(sample).values())
        return table

    def _sample_blocks(self, samples: Sequence[Sample]) -> Group:
        blocks = []
        for number, sample in enumerate(samples, start=1):
            block = Table.grid(padding=(0, 1), expand=True)
            block.add_column(style="bold", no_wrap=True)
            block.add_column(ratio=1, overflow="fold")
            for name, cell in self._sample_cells(sample).items():
                block.add_row(name, cell)
            blocks += [Text(f"-- {number} of {len(samples)}", style="dim"), block]
        return Group(*blocks)


def _phase_name(text: str) -> str:
    """'rollout' of 'rollout: 24/32 informative groups'."""
    return text.partition(":")[0]
