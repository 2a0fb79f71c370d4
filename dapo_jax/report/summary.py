"""The table of several arms: means over seeds, and differences from one of them, as Markdown.

    python -m dapo_jax.report.summary --rows=FILE [--rows=FILE2 ...] [--baseline=ARM]

prints it from rows.jsonl.gz alone; a sweep writes the same to summary.md.
"""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from absl import app, flags

from dapo_jax.report import statistics
from dapo_jax.report.quantities import Quantity, finished_steps, quantities
from dapo_jax.report.rows import read_rows_file
from dapo_jax.report.runs import Run, labelled, merged
from dapo_jax.run.recipe import leftover

METHOD = f"""\
Means over a run's last {statistics.LAST_ROWS} steps, or its last third where that is shorter;
"clipped high" over all steps; evaluations after the last step. Intervals are Student's, 95 %.
Paired: of the differences d of runs of one seed, mean(d) ± t(n-1) · sd(d) / √n. Unpaired: Welch's,
to which seeds in common say nothing. Seeds needed: with w for half the width of the paired interval
here, the least number of seeds an arm that makes the unpaired one half as wide:
t(f) · √((var(a) + var(b)) / n) ≤ w / 2 with f = (n-1) (var(a) + var(b))² / (var(a)² + var(b)²).
* marks paired intervals that exclude zero, as one in twenty does without any effect."""


def by_arm(runs: Mapping[str, Run]) -> dict[str, dict[int, Run]]:
    """Arm -> seed -> run, in the order of the runs."""
    arms: dict[str, dict[int, Run]] = {}
    for run in runs.values():
        arms.setdefault(run.arm, {})[run.seed] = run
    return arms


def complete(runs: Mapping[str, Run]) -> tuple[dict[str, Run], list[str]]:
    """(the runs that have as many steps as their arm's recipe asks for, a text of each other)."""
    kept, short, wanted_of = {}, [], {}
    for label, run in runs.items():
        arm = run.arm or label
        wanted_of[arm] = max(wanted_of.get(arm, 0), run.config.get("num_steps", 0))
    for label, run in runs.items():
        finished, wanted = finished_steps(run), wanted_of[run.arm or label]
        if finished >= wanted:
            kept[label] = run
        else:
            short.append(f"{label} has {finished} of {wanted} steps")
    return kept, short


def markdown(runs: Mapping[str, Run], *, baseline: str = "", title: str = "Sweep") -> str:
    """The tables of the runs that are complete, against the baseline; "": the first arm.

    Raises ValueError for a baseline that is none of the arms.
    """
    kept, short = complete(runs)
    arms = by_arm(kept)
    if baseline and baseline not in {run.arm for run in runs.values()}:
        raise ValueError(f"no arm is called {baseline!r}; there are {', '.join(by_arm(runs))}")
    lines = [f"# {title}", ""]
    if short:
        lines += [f"Left out, not finished: {'; '.join(short)}.", ""]
    if not arms:
        return "\n".join([*lines, "No run has finished.", ""])
    chosen = quantities(kept)
    # [arm][quantity][seed]
    values = {
        arm: [{seed: q.value(run) for seed, run in of_seed.items()} for q in chosen]
        for arm, of_seed in arms.items()
    }
    shown = [
        i for i in range(len(chosen)) if any(numbers(of_arm[i]).size for of_arm in values.values())
    ]
    lines += ["## Mean ± standard deviation over seeds", ""]
    lines += table(
        ["arm", "steps", "seeds", *(chosen[i].name for i in shown)],
        [
            [
                arm,
                _steps_text(arms[arm]),
                str(len(of_arm[0])),
                *(spread_text(chosen[i], of_arm[i]) for i in shown),
            ]
            for arm, of_arm in values.items()
        ],
    )
    baseline = baseline or next(iter(by_arm(runs)))
    others = [arm for arm in arms if arm != baseline]
    if baseline in arms and others:
        heads = ["quantity", "arm", "pairs", "difference", "paired 95 %", "unpaired 95 %"]
        lines += ["", f"## Differences from {baseline} on the same seed", ""]
        lines += table(
            [*heads, "seeds needed, unpaired"],
            [
                [
                    chosen[i].name,
                    arm,
                    *Comparison.of(values[arm][i], values[baseline][i]).cells(chosen[i]),
                ]
                for i in shown
                for arm in others
            ],
        )
    return "\n".join([*lines, "", METHOD, ""])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A quantity of one arm less that of another: with both intervals, and the seeds needed.

    pairs: seeds that both have. needed: seeds an arm for an unpaired interval of half the width of
    the paired one here; None where the samples cannot tell.
    """

    pairs: int
    paired: statistics.Interval
    unpaired: statistics.Interval
    needed: int | None

    @classmethod
    def of(cls, ours: Mapping[int, float], theirs: Mapping[int, float]) -> "Comparison":
        """Compares values by seed; NaN is none."""
        shared = [s for s in ours if s in theirs and not math.isnan(ours[s] + theirs[s])]
        a_S, b_S = [ours[s] for s in shared], [theirs[s] for s in shared]
        all_a, all_b = numbers(ours), numbers(theirs)
        paired = statistics.paired_interval(a_S, b_S)
        needed = statistics.seeds_for_unpaired(all_a, all_b, paired.half_width / 2)
        return cls(len(shared), paired, statistics.welch_interval(all_a, all_b), needed)

    def cells(self, quantity: Quantity) -> list[str]:
        """The cells of a table: pairs, difference, both intervals, the seeds needed."""
        return [
            str(self.pairs),
            signed(quantity, self.paired.difference),
            interval_text(quantity, self.paired) + (" *" if self.paired.excludes_zero else ""),
            interval_text(quantity, self.unpaired),
            "-" if self.needed is None else str(self.needed),
        ]


def numbers(by_seed: Mapping[int, float]) -> np.ndarray:
    """The values that are not NaN."""
    values = np.array(list(by_seed.values()), np.float64)
    return values[~np.isnan(values)]


def spread_text(quantity: Quantity, by_seed: Mapping[int, float]) -> str:
    """Mean ± standard deviation over the seeds; with their number where some have no value."""
    values = numbers(by_seed)
    if not len(values):
        return "-"
    mean, sd = quantity.form.format(values.mean()), statistics.spread(values)
    text = mean if math.isnan(sd) else f"{mean} ± {quantity.form.format(sd)}"
    return text if len(values) == len(by_seed) else f"{text} (of {len(values)})"


def _steps_text(by_seed: Mapping[int, Run]) -> str:
    return ", ".join(map(str, sorted({finished_steps(run) for run in by_seed.values()})))


def signed(quantity: Quantity, value: float) -> str:
    """The value with its sign; '-' for NaN."""
    return "-" if math.isnan(value) else quantity.form.replace("{:", "{:+").format(value)


def interval_text(quantity: Quantity, interval: statistics.Interval) -> str:
    """The bounds of an interval; '-' where there were too few values."""
    if math.isnan(interval.low):
        return "-"
    return f"[{signed(quantity, interval.low)}, {signed(quantity, interval.high)}]"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown whose columns are aligned, to be read as they are too."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return [lines[0], rule, *lines[1:]]


def main(argv: Sequence[str]) -> None:
    if argv[1:]:
        sys.exit(f"dapo_jax.report.summary: {leftover(argv[1:], flags.FLAGS, None)}")
    try:
        files = labelled(flags.FLAGS.rows, parts=2)
        runs = merged({name: read_rows_file(path) for name, path in files.items()})
        print(markdown(runs, baseline=flags.FLAGS.baseline, title=", ".join(flags.FLAGS.rows)))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"dapo_jax.report.summary: {error}")


if __name__ == "__main__":
    flags.DEFINE_multi_string("rows", None, "A file rows.jsonl.gz; repeat it.", required=True)
    flags.DEFINE_string("baseline", "", "The arm that others are compared with; '': the first.")
    app.run(main)
