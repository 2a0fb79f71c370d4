"""A study: arms of a recipe over seeds, predictions made before, a table and a figure after.

    python -m experiments.study NAME --workdir=DIR
    python -m experiments.study NAME

The first makes the runs, goes on where it stopped, and copies their rows to experiments/NAME; both
write result.md and figure.png there from rows.jsonl.gz. experiments/NAME/study.py has the Study.
"""

import dataclasses
import importlib
import math
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from absl import app, flags

from dapo_jax.report import plots, statistics
from dapo_jax.report.curves import Panel, evaluation_curve, metric_curve
from dapo_jax.report.quantities import Quantity
from dapo_jax.report.rows import read_rows_file
from dapo_jax.report.runs import Run
from dapo_jax.report.summary import by_arm, interval_text, signed, spread_text, table
from dapo_jax.run.files import atomic_file
from dapo_jax.run.metrics import METRICS

HERE = pathlib.Path(__file__).parent
ROWS, RESULT, FIGURE = "rows.jsonl.gz", "result.md", "figure.png"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A prediction: the quantity of an arm lies above (+1) or below (-1) another arm's."""

    quantity: str
    arm: str
    sign: int
    than: str

    @property
    def text(self) -> str:
        """The prediction in words."""
        return f"{self.quantity}: {self.arm} {'above' if self.sign > 0 else 'below'} {self.than}"


@dataclasses.dataclass(frozen=True)
class Study:
    """What is run and how it is read.

    title: for the figure. config: the recipe. arms: name -> "KEY=V KEY=V", as `dapo_jax.sweep`
    takes them; the first is the baseline. settings: of all arms, dotted key -> value as text.
    quantities: the columns of the table. drawn: the keys of the figure's curves, of metrics or
    eval/<set>/<score>, with their titles. claims: made before the runs.
    """

    title: str
    config: str
    arms: Mapping[str, str]
    quantities: Sequence[Quantity]
    drawn: Mapping[str, str]
    claims: Sequence[Claim]
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seeds: str = "5"

    def command(self, workdir: str, jobs: int) -> list[str]:
        """The sweep's command line, after the interpreter."""
        return [
            *("-m", "dapo_jax.sweep", f"--config={self.config}", f"--workdir={workdir}"),
            *(f"--config.{key}={value}" for key, value in self.settings.items()),
            *(f"--arm={name}: {settings}" for name, settings in self.arms.items()),
            *(f"--seeds={self.seeds}", f"--jobs={jobs}"),
        ]


def load(name: str) -> Study:
    """The Study of a folder; raises ValueError, with what there is, for another name."""
    names = sorted(file.parent.name for file in HERE.glob("*/study.py"))
    if name not in names:
        raise ValueError(f"there is no study {name!r}; there are {', '.join(names)}")
    return importlib.import_module(f"experiments.{name}.study").STUDY


def verdict(claim: Claim, interval: statistics.Interval) -> str:
    """Whether the runs confirm a claim, refute it, or leave it open."""
    if not interval.excludes_zero:
        return "open"
    return "confirmed" if interval.difference * claim.sign > 0 else "refuted"


def result(study: Study, runs: Mapping[str, Run]) -> str:
    """The study's tables as Markdown: each arm's quantities, each claim with its intervals."""
    arms = {arm: found for arm, found in by_arm(runs).items() if arm in study.arms}
    # [quantity][arm][seed]
    values = {
        q.name: {
            arm: {seed: q.value(run) for seed, run in found.items()} for arm, found in arms.items()
        }
        for q in study.quantities
    }
    lines = [f"# {study.title}", "", "Mean ± standard deviation over the seeds.", ""]
    lines += table(
        ["arm", "seeds", *values],
        [
            [arm, str(len(found)), *(spread_text(q, values[q.name][arm]) for q in study.quantities)]
            for arm, found in arms.items()
        ],
    )
    lines += ["", "Predictions, with 95 % intervals of the difference of means.", ""]
    heads = ["prediction", "difference", "paired by seed", "unpaired", "verdict", "seeds needed"]
    cells = [_judged(study, claim, values[claim.quantity]) for claim in study.claims]
    lines += table(heads, cells)
    return "\n".join([*lines, "", NOTE, "", *_origin(runs), ""])


NOTE = """\
A prediction is confirmed or refuted where the paired interval excludes zero, and open elsewhere.
Paired: Student's, of the differences of runs of one seed; unpaired: Welch's. Seeds needed: an arm,
for intervals of half the width of the paired one here; paired / unpaired."""


def _judged(study: Study, claim: Claim, by_seed: Mapping[str, Mapping[int, float]]) -> list[str]:
    quantity = next(q for q in study.quantities if q.name == claim.quantity)
    ours, theirs = by_seed.get(claim.arm, {}), by_seed.get(claim.than, {})
    shared = [s for s in ours if s in theirs and not math.isnan(ours[s] + theirs[s])]
    a_S, b_S = [ours[s] for s in shared], [theirs[s] for s in shared]
    paired, welch = statistics.paired_interval(a_S, b_S), statistics.welch_interval(a_S, b_S)
    half = paired.half_width / 2
    needed = [
        statistics.seeds_for_paired(a_S, b_S, half),
        statistics.seeds_for_unpaired(a_S, b_S, half),
    ]
    return [
        claim.text,
        signed(quantity, paired.difference),
        interval_text(quantity, paired),
        interval_text(quantity, welch),
        verdict(claim, paired),
        " / ".join("-" if n is None else str(n) for n in needed),
    ]


def _origin(runs: Mapping[str, Run]) -> list[str]:
    """Of which commits and versions the rows are, and how long the runs took."""
    starts = [start for run in runs.values() for start in run.starts]
    commits = dict.fromkeys(
        start["commit"][:9] + (" and changes" if start.get("changed") else "") for start in starts
    )
    jax = dict.fromkeys(start["versions"]["jax"] for start in starts)
    hours = sum(row.get("seconds/total", 0.0) for run in runs.values() for row in run.rows) / 3600
    return [
        f"{len(runs)} runs, {hours:.1f} hours; commit {', '.join(commits)}; JAX {', '.join(jax)}."
    ]


def figure(study: Study, runs: Mapping[str, Run]) -> plots.Figure:
    """The study's curves, and a column an arm for each quantity."""
    shown = {label: run for label, run in runs.items() if run.arm in study.arms}
    unit = {metric.key: metric.unit for metric in METRICS}
    panels = []
    for key, title in study.drawn.items():
        if key.startswith("eval/"):
            name, _, score = key.removeprefix("eval/").partition("/")
            panels.append(Panel(title, "share", False, [evaluation_curve(name, score)]))
        else:
            panels.append(Panel(title, unit.get(key, ""), False, [metric_curve(key, title)]))
    seeds = len({run.seed for run in shown.values()})
    title = f"{study.title}: means over {seeds} seeds, bands from the lowest to the highest"
    return plots.chosen(shown, panels, study.quantities, title=title)


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        sys.exit(f"give the name of one study, not {argv[1:]}")
    try:
        study = load(argv[1])
    except ValueError as error:
        sys.exit(f"experiments.study: {error}")
    folder = HERE / argv[1]
    if workdir := flags.FLAGS.workdir:
        command = study.command(workdir, flags.FLAGS.jobs)
        print(shlex.join(["python", *command]), flush=True)
        status = subprocess.run([sys.executable, *command], check=False).returncode
        if status:
            sys.exit(status)
        shutil.copyfile(pathlib.Path(workdir) / ROWS, folder / ROWS)
    runs = read_rows_file(folder / ROWS)
    text = result(study, runs)
    with atomic_file(folder / RESULT) as file:
        file.write(text.encode())
    plots.save(figure(study, runs), folder / FIGURE)
    print(text)


if __name__ == "__main__":
    flags.DEFINE_string("workdir", "", "Where the runs are made; '': read the committed rows.")
    flags.DEFINE_integer("jobs", 2, "Runs at once.", lower_bound=1)
    app.run(main)
