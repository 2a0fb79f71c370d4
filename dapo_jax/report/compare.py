"""Arms compared over seeds: one number a run, means and spreads, differences from one arm.

    python -m dapo_jax.report.compare --rows FILE [FILE2 ...] [--baseline ARM]

prints the tables from rows.jsonl.gz alone; a sweep writes the same to summary.md.
"""

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dapo_jax.report import statistics
from dapo_jax.report.rows import read_rows_file
from dapo_jax.report.runs import Run, by_arm, column, complete, labelled, merged, spans
from dapo_jax.run.metrics import TASK

METHOD = f"""\
Means over a run's last {statistics.LAST_ROWS} steps, or its last third where that is shorter;
"clipped high" over all steps; evaluations after the last step. Intervals are Student's, 95 %.
Paired: of the differences d of runs of one seed, mean(d) ± t(n-1) · sd(d) / √n. Unpaired: Welch's,
to which seeds in common say nothing. Seeds needed: with w for half the width of the paired interval
here, the least number of seeds an arm that makes the unpaired one half as wide:
t(f) · √((var(a) + var(b)) / n) ≤ w / 2 with f = (n-1) (var(a) + var(b))² / (var(a)² + var(b)²).
* marks paired intervals that exclude zero, as one in twenty does without any effect."""


@dataclasses.dataclass(frozen=True)
class Quantity:
    """One number of a run: its name, its function and its format."""

    name: str
    value: Callable[[Run], float]
    form: str = "{:.1f}"


def last(name: str, key: str, *, scale: float = 1.0, form: str = "{:.1f}") -> Quantity:
    """The mean of a metric over a run's last steps (`statistics.last_mean`)."""
    return Quantity(name, lambda run: scale * statistics.last_mean(column(run.rows, key)), form)


def mean(name: str, key: str, *, scale: float = 1.0, form: str = "{:.1f}") -> Quantity:
    """The mean of a metric over all steps."""
    return Quantity(name, lambda run: scale * statistics.nan_mean(column(run.rows, key)), form)


def total(name: str, key: str) -> Quantity:
    """The sum of a metric over all steps; NaN where a step has none."""
    return Quantity(name, lambda run: float(np.sum(column(run.rows, key))), "{:.0f}")


def accuracy_over(budget_tokens: int) -> Quantity:
    """The mean accuracy of the first sampled tokens, in percent; NaN where a run has fewer.

    Each step counts by the tokens that it sampled, so it is an area under the curve over tokens.
    """

    def value(run: Run) -> float:
        spent = column(run.rows, "sampled_tokens_total")
        if spent[-1] < budget_tokens:
            return math.nan
        tokens = np.diff(np.minimum(spent, budget_tokens), prepend=0.0)
        counts = tokens > 0
        accuracy = column(run.rows, "accuracy/mean")[counts]
        return 100 * float(np.average(accuracy, weights=tokens[counts]))

    return Quantity(f"accuracy, mean of the first {budget_tokens // 1000} k tokens, %", value)


def final_score(name: str, score: str) -> Quantity:
    """Percent of a score after a run's last step; NaN where that was not evaluated."""

    def value(run: Run) -> float:
        return 100 * run.evaluations.get((name, score), {}).get(run.finished_steps, math.nan)

    return Quantity(f"{name} {score}, %", value)


def tokens_of(run: Run) -> float:
    """Thousands of tokens that the run sampled for training."""
    return float(column(run.rows, "sampled_tokens_total")[-1]) / 1e3


def nonzero_updates(run: Run) -> float:
    """The updates of the run that changed the weights; NaN where its rows do not count them."""
    return float(np.sum(column(run.rows, "updates") - column(run.rows, "updates_zero_gradient")))


TOKENS = Quantity("sampled tokens, thousands", tokens_of, "{:.0f}")
WORK = (  # arms of equally many steps may differ in each
    TOKENS,
    Quantity("non-zero updates", nonzero_updates, "{:.0f}"),
    total("informative groups", "groups/informative"),
)
TRAINING = (
    last("train accuracy, %", "accuracy/mean", scale=100),
    last("reward", "reward/mean", form="{:.3f}"),
    last("entropy, nats", "entropy", form="{:.4f}"),
    mean("clipped high, % (all steps)", "clip_fraction/high", scale=100, form="{:.3f}"),
    last("response tokens", "response_tokens/mean"),
    last("truncated, %", "response_tokens/truncated_fraction", scale=100),
    *WORK,
)


def quantities(runs: Mapping[str, Run]) -> list[Quantity]:
    """Lists the compared quantities that some run has: mean@k, TRAINING, the task's measures."""
    scores = dict.fromkeys(
        key
        for run in runs.values()
        for key in run.evaluations
        if key[1].startswith("mean@") and " " not in key[0]  # no settings: not of `evaluate`
    )
    measures = dict.fromkeys(key for run in runs.values() for row in run.rows for key in row)
    of_task = [
        last(f"{key.removeprefix(TASK).replace('_', ' ')}, the task's own", key, form="{:.4g}")
        for key in measures
        if key.startswith(TASK)
    ]
    found = [*(final_score(*key) for key in scores), *TRAINING, *of_task]
    return [q for q in found if any(not math.isnan(q.value(run)) for run in runs.values())]


def values(quantity: Quantity, of_seed: Mapping[int, Run]) -> dict[int, float]:
    """Seed -> the quantity of its run."""
    return {seed: quantity.value(run) for seed, run in of_seed.items()}


def numbers(by_seed: Mapping[int, float]) -> np.ndarray:
    """The values that are not NaN."""
    found = np.array(list(by_seed.values()), np.float64)
    return found[~np.isnan(found)]


def spread_text(quantity: Quantity, by_seed: Mapping[int, float]) -> str:
    """Mean ± standard deviation over the seeds; with their number where some have no value."""
    found = numbers(by_seed)
    if not len(found):
        return "-"
    text, sd = quantity.form.format(found.mean()), statistics.spread(found)
    text = text if math.isnan(sd) else f"{text} ± {quantity.form.format(sd)}"
    return text if len(found) == len(by_seed) else f"{text} (of {len(found)})"


def signed(quantity: Quantity, value: float) -> str:
    """The value with its sign; '-' for NaN."""
    return "-" if math.isnan(value) else quantity.form.replace("{:", "{:+").format(value)


def interval_text(quantity: Quantity, interval: statistics.Interval) -> str:
    """The bounds of an interval; '-' where there were too few values."""
    if math.isnan(interval.low):
        return "-"
    return f"[{signed(quantity, interval.low)}, {signed(quantity, interval.high)}]"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A quantity of one arm minus that of another: both intervals and the seeds needed.

    pairs: the number of seeds in both. needed: seeds an arm for an unpaired interval of half the
    width of the paired one; None where that is unknown.
    """

    pairs: int
    paired: statistics.Interval
    unpaired: statistics.Interval
    needed: int | None

    @classmethod
    def of(cls, ours: Mapping[int, float], theirs: Mapping[int, float]) -> "Comparison":
        """Compares values by seed, without those that are NaN."""
        shared = [s for s in ours if s in theirs and not math.isnan(ours[s] + theirs[s])]
        paired = statistics.paired_interval([ours[s] for s in shared], [theirs[s] for s in shared])
        a_S, b_S = numbers(ours), numbers(theirs)
        needed = statistics.seeds_for_unpaired(a_S, b_S, paired.half_width / 2)
        return cls(len(shared), paired, statistics.welch_interval(a_S, b_S), needed)

    def cells(self, quantity: Quantity) -> list[str]:
        """The cells of a table: pairs, difference, both intervals, the seeds needed."""
        return [
            str(self.pairs),
            signed(quantity, self.paired.difference),
            interval_text(quantity, self.paired) + " *" * self.paired.excludes_zero,
            interval_text(quantity, self.unpaired),
            "-" if self.needed is None else str(self.needed),
        ]


CLIPS = {"algo.eps_high": "high", "algo.eps_low": "low", "algo.dual_clip": "dual"}


def equal_lines(runs: Mapping[str, Run]) -> list[str]:
    """Says which arms end with the bits of an earlier arm, on which seeds, and in spite of what.

    Their differences measure nothing: no update of theirs depended on the settings that differ.
    """
    lines = {}
    for (first, theirs), (arm, ours) in itertools.combinations(by_arm(runs).items(), 2):
        seeds = [s for s in ours if s in theirs and ours[s].digest == theirs[s].digest != ""]
        if arm in lines or not seeds:
            continue
        pairs = [(ours[seed], theirs[seed]) for seed in sorted(seeds)]
        a, b = (run.config for run in pairs[0])
        keys = [key for key in {**a, **b} if a.get(key) != b.get(key)]
        sides = [CLIPS[key] for key in keys if key in CLIPS]
        clipped = [
            column(it.rows, f"clip_fraction/{side}") for side in sides for it in sum(pairs, ())
        ]
        nothing = f": nothing was clipped {' or '.join(sides)}" * bool(sides)
        lines[arm] = (
            f"{arm} has the bits of {first} on seed {spans(sorted(seeds))}, in all weights and "
            f"moments: {', '.join(keys)} changed no update there"
            f"{'' if any(map(np.nansum, clipped)) else nothing}."
        )
    return list(lines.values())


def markdown(runs: Mapping[str, Run], *, baseline: str = "", title: str = "Sweep") -> str:
    """The tables of the complete runs, against the baseline arm; "": the first arm.

    Raises ValueError for a baseline that is none of the arms.
    """
    kept, short = complete(runs)
    arms, known = by_arm(kept), by_arm(runs)
    if baseline and baseline not in known:
        raise ValueError(f"no arm is called {baseline!r}; there are {', '.join(known)}")
    lines = [f"# {title}", ""]
    if short:
        lines += [f"Left out, not finished: {'; '.join(short)}.", ""]
    if not arms:
        return "\n".join([*lines, "No run has finished.", ""])
    compared = quantities(kept)
    lines += ["## Mean ± standard deviation over seeds", ""]
    lines += table(
        ["arm", "steps", "seeds", *(q.name for q in compared)],
        [
            [
                arm,
                ", ".join(map(str, sorted({run.finished_steps for run in of_seed.values()}))),
                str(len(of_seed)),
                *(spread_text(q, values(q, of_seed)) for q in compared),
            ]
            for arm, of_seed in arms.items()
        ],
    )
    baseline = baseline or next(iter(known))
    others = [arm for arm in arms if arm != baseline]
    if baseline in arms and others:
        heads = ["quantity", "arm", "pairs", "difference", "paired 95 %", "unpaired 95 %"]
        lines += ["", f"## Differences from {baseline} on the same seed", ""]
        lines += [line + "\n" for line in equal_lines(kept)]
        lines += table(
            [*heads, "seeds needed, unpaired"],
            [
                [q.name, arm, *Comparison.of(values(q, arms[arm]), theirs).cells(q)]
                for q in compared
                for theirs in [values(q, arms[baseline])]
                for arm in others
            ],
        )
    return "\n".join([*lines, "", METHOD, ""])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table with aligned columns."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return [lines[0], rule, *lines[1:]]


def main() -> None:
    parser = argparse.ArgumentParser("dapo_jax.report.compare", allow_abbrev=False)
    parser.add_argument(
        "--rows", nargs="+", action="extend", required=True, metavar="FILE", help="a rows.jsonl.gz"
    )
    parser.add_argument("--baseline", default="", help="the arm to compare with; '': the first")
    given = parser.parse_args()
    try:
        files = labelled(given.rows, parts=2)
        runs = merged({name: read_rows_file(path) for name, path in files.items()})
        print(markdown(runs, baseline=given.baseline, title=", ".join(given.rows)))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"dapo_jax.report.compare: {error}")


if __name__ == "__main__":
    main()
