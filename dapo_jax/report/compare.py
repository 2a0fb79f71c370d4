"""Arms compared over seeds: one number a run, means and spreads, differences from one arm."""

import csv
import dataclasses
import functools
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dapo_jax.report import statistics
from dapo_jax.report.runs import Run, by_arm, column, complete, mean_scores, own_metrics

TOKENS = "sampled_tokens_total"  # of a row
METHOD = f"""\
Means over a run's last {statistics.LAST_ROWS} steps, or its last third where that is shorter;
"clipped high" over all steps; evaluations after the last step. Differences are of runs of one seed,
d; their interval is Student's, 95 %: mean(d) ± t(n-1) · sd(d) / √n. * marks those that exclude
zero, as one in twenty does without any effect."""


@dataclasses.dataclass(frozen=True)
class Quantity:
    """One number of a run: its name, its function and its format."""

    name: str
    value: Callable[[Run], float]
    form: str = "{:z.1f}"


def averaged(
    average: Callable, name: str, key: str, *, scale: float = 1.0, form: str = "{:z.1f}"
) -> Quantity:
    """Returns the average of a metric over a run's rows, times a scale."""
    return Quantity(name, lambda run: scale * average(column(run.rows, key)), form)


last = functools.partial(averaged, statistics.last_mean)
mean = functools.partial(averaged, statistics.nan_mean)


def accuracy_over(budget_tokens: int) -> Quantity:
    """The mean accuracy of the first sampled tokens, in percent; NaN where a run has fewer.

    Each step counts by the tokens that it sampled, so it is an area under the curve over tokens.
    """

    def value(run: Run) -> float:
        spent = column(run.rows, TOKENS)
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


def nonzero_updates(run: Run) -> float:
    """Counts the updates that changed the weights; NaN where the rows do not."""
    return np.sum(column(run.rows, "updates") - column(run.rows, "updates_zero_gradient"))


WORK = (  # arms of equally many steps may differ in each
    averaged(lambda values: values[-1] / 1e3, "sampled tokens, thousands", TOKENS, form="{:z.0f}"),
    Quantity("non-zero updates", nonzero_updates, "{:z.0f}"),
    averaged(np.sum, "informative groups", "groups/informative", form="{:z.0f}"),
)
TRAINING = (
    last("train accuracy, %", "accuracy/mean", scale=100),
    last("reward", "reward/mean", form="{:z.3f}"),
    last("entropy, nats", "entropy", form="{:z.4f}"),
    mean("clipped high, % (all steps)", "clip_fraction/high", scale=100, form="{:z.3f}"),
    last("response tokens", "response_tokens/mean"),
    last("truncated, %", "response_tokens/truncated_fraction", scale=100),
    *WORK,
)


def quantities(runs: Mapping[str, Run]) -> list[Quantity]:
    """Lists the compared quantities that some run has: mean@k, TRAINING, own metrics."""
    # A set's name with settings is of `evaluate`.
    scores = [key for key in mean_scores(runs).values() if " " not in key[0]]
    own = [last(name, key, form="{:z.4g}") for key, name in own_metrics(runs).items()]
    return known([*(final_score(*key) for key in scores), *TRAINING, *own], runs)


def known(quantities: Sequence[Quantity], runs: Mapping[str, Run]) -> list[Quantity]:
    """The quantities of which some run has a value."""
    return [q for q in quantities if any(not math.isnan(q.value(run)) for run in runs.values())]


def numbers(quantity: Quantity, of_seed: Mapping[int, Run]) -> np.ndarray:
    """The quantity of each seed's run, where it is not NaN."""
    found = np.array([quantity.value(run) for run in of_seed.values()], np.float64)
    return found[~np.isnan(found)]


def spread_text(quantity: Quantity, of_seed: Mapping[int, Run]) -> str:
    """Mean ± standard deviation over the seeds; with their number where some have no value."""
    found = numbers(quantity, of_seed)
    if not len(found):
        return "-"
    text = quantity.form.format(found.mean())
    if len(found) > 1:
        text += f" ± {quantity.form.format(found.std(ddof=1))}"
    return text if len(found) == len(of_seed) else f"{text} (of {len(found)})"


def signed(quantity: Quantity, value: float) -> str:
    """The value with its sign; '-' for NaN."""
    return "-" if math.isnan(value) else quantity.form.replace("{:", "{:+").format(value)


def interval_text(quantity: Quantity, interval: statistics.Interval) -> str:
    """The bounds of an interval; '-' where there were too few values."""
    if math.isnan(interval.low):
        return "-"
    return f"[{signed(quantity, interval.low)}, {signed(quantity, interval.high)}]"


def paired(
    quantity: Quantity, ours: Mapping[int, Run], theirs: Mapping[int, Run]
) -> tuple[int, statistics.Interval]:
    """Returns (the number of seeds on which both have it, the interval of ours - theirs there)."""
    pairs = [(quantity.value(ours[s]), quantity.value(theirs[s])) for s in ours if s in theirs]
    pairs = [pair for pair in pairs if not math.isnan(sum(pair))]
    return len(pairs), statistics.paired_interval([a for a, _ in pairs], [b for _, b in pairs])


Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, heads, rows


def tables(runs: Mapping[str, Run], *, baseline: str = "") -> tuple[list[Table], list[str]]:
    """(tables of the complete runs, why each other run is left out).

    The tables are the arms' means and, of several arms, the differences from the baseline ("": the
    first arm). A difference in which all seeds are equal is called so: nothing is measured there.
    Raises ValueError for a baseline that is none of the arms.
    """
    known_arms, (kept, short) = list(by_arm(runs)), complete(runs)
    if (baseline := baseline or known_arms[0]) not in known_arms:
        raise ValueError(f"no arm is called {baseline!r}; there are {', '.join(known_arms)}")
    if not kept:
        return [], short
    kept = since_all_run(kept)
    arms, compared = by_arm(kept), quantities(kept)
    means = [
        [
            arm,
            ", ".join(map(str, sorted({run.finished_steps for run in of_seed.values()}))),
            str(len(of_seed)),
            *(spread_text(quantity, of_seed) for quantity in compared),
        ]
        for arm, of_seed in arms.items()
    ]
    heads = ["arm", "steps", "seeds", *(quantity.name for quantity in compared)]
    found: list[Table] = [("Mean ± standard deviation over seeds", heads, means)]
    theirs, differences = arms.pop(baseline, {}), []
    for quantity, (arm, ours) in itertools.product(compared, arms.items()):
        pairs, interval = paired(quantity, ours, theirs)
        text = interval_text(quantity, interval) + " *" * interval.excludes_zero
        if interval.low == interval.high == 0:
            text = "equal on each seed"
        difference = signed(quantity, interval.difference)
        if pairs:
            differences.append([quantity.name, arm, str(pairs), difference, text])
    if differences:
        heads = ["quantity", "arm", "pairs", "difference", "paired 95 %"]
        found.append((f"Differences from {baseline} on the same seed", heads, differences))
    return found, short


def csv_text(runs: Mapping[str, Run]) -> str:
    """Returns the arms' means and standard deviations as CSV, unrounded; empty where unknown."""
    kept = since_all_run(complete(runs)[0])
    compared, rows = quantities(kept), csv.writer(text := io.StringIO(), lineterminator="\n")
    rows.writerow(["arm", "seeds", *(q.name + of for q in compared for of in ("", " ±"))])
    for arm, of_seed in by_arm(kept).items():
        row = [arm, len(of_seed)]
        for found in (numbers(quantity, of_seed) for quantity in compared):
            row += [found.mean() if len(found) else "", found.std(ddof=1) if len(found) > 1 else ""]
        rows.writerow(row)
    return text.getvalue()


def since_all_run(runs: Mapping[str, Run]) -> dict[str, Run]:
    """Returns the runs from the first step that all of them have: a fork has none of its parent's.

    Tokens are counted from there too, where a run has the step before.
    """
    begin = max((run.rows[0]["step"] for run in runs.values()), default=0)
    all_rows = [row for run in runs.values() for row in run.rows]
    spent = max((row.get(TOKENS, 0) for row in all_rows if row["step"] == begin - 1), default=0)

    found = {}
    for label, run in runs.items():
        rows = [row for row in run.rows if row["step"] >= begin]
        if spent:
            rows = [{**row, TOKENS: row[TOKENS] - spent} for row in rows]
        found[label] = dataclasses.replace(run, rows=rows or run.rows)
    return found


def markdown(runs: Mapping[str, Run], *, baseline: str = "", title: str) -> str:
    """Returns `tables` as Markdown."""
    found, short = tables(runs, baseline=baseline)
    lines = [f"# {title}", ""]
    if short:
        lines += [f"Left out, not finished: {'; '.join(short)}.", ""]
    for head, heads, rows in found:
        lines += [f"## {head}", "", *table(heads, rows), ""]
    return "\n".join([*lines, METHOD, ""])


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, aligned: bool = True
) -> list[str]:
    """Lines of a Markdown table; aligned: with columns that a terminal shows below each other."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (heads, *rows)]
    if not aligned:
        lines = ["|" + "|".join(row) + "|" for row in cells]
        return [lines[0], "|" + "---|" * len(heads), *lines[1:]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return [lines[0], rule, *lines[1:]]
