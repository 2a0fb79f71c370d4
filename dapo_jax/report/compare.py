"""Arms compared over seeds: one number a run, means and spreads, differences of arms."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from dapo_jax.report import statistics
from dapo_jax.report.runs import TOKENS, Run, arms_of, complete, mean_scores, own_metrics
from dapo_jax.report.statistics import Interval

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

    def texts(self, interval: Interval) -> tuple[str, str]:
        """A difference and its bounds, with their signs; '-' for what is NaN."""
        form = self.form.replace("{:", "{:+")
        difference, *bounds = map(form.format, (interval.difference, interval.low, interval.high))
        return (
            "-" if math.isnan(interval.difference) else difference,
            "-" if math.isnan(interval.low) else f"[{', '.join(bounds)}]",
        )


def averaged(
    average: Callable, name: str, key: str, *, scale: float = 1.0, form: str = "{:z.1f}"
) -> Quantity:
    """Returns the average of a metric over a run's rows, times a scale."""
    return Quantity(name, lambda run: scale * average(run[key]), form)


last = functools.partial(averaged, statistics.last_mean)
mean = functools.partial(averaged, pd.Series.mean)


def accuracy_over(budget_tokens: int) -> Quantity:
    """The mean accuracy of the first sampled tokens, in percent; NaN where a run has fewer.

    Each step counts by the tokens that it sampled, so it is an area under the curve over tokens.
    """

    def value(run: Run) -> float:
        if run[TOKENS].iloc[-1] < budget_tokens:
            return math.nan
        tokens = np.diff(run[TOKENS].clip(upper=budget_tokens), prepend=0.0)
        return 100 * np.average(run["accuracy/mean"], weights=tokens)

    return Quantity(f"accuracy, mean of the first {budget_tokens // 1000} k tokens, %", value)


def final_score(name: str, score: str) -> Quantity:
    """Percent of a score after a run's last step; NaN where that was not evaluated."""

    def value(run: Run) -> float:
        return 100 * run[f"eval/{name}/{score}"].get(run.finished_steps, math.nan)

    return Quantity(f"{name} {score}, %", value)


total = functools.partial(pd.Series.sum, skipna=False)  # NaN where a step lacks the number
WORK = (  # arms of equally many steps may differ in each
    Quantity("sampled tokens, thousands", lambda run: run[TOKENS].iloc[-1] / 1e3, "{:z.0f}"),
    Quantity(
        "non-zero updates",
        lambda run: total(run["updates"] - run["updates_zero_gradient"]),
        "{:z.0f}",
    ),
    Quantity("informative groups", lambda run: total(run["groups/informative"]), "{:z.0f}"),
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


def measured(quantities: Sequence[Quantity], runs: Mapping[str, Run]) -> pd.DataFrame:
    """Returns the quantities of the runs: a column each, a row for each (arm, seed)."""
    keys = [[run.arm for run in runs.values()], [run.seed for run in runs.values()]]
    index = pd.MultiIndex.from_arrays(keys, names=("arm", "seed"))
    values = [[quantity.value(run) for quantity in quantities] for run in runs.values()]
    return pd.DataFrame(values, index, quantities, dtype=float)


def spreads(values: pd.DataFrame) -> pd.DataFrame:
    """Returns mean ± standard deviation over the seeds, as text: a row an arm, a column a quantity.

    With the number of seeds where some have no value; '-' where none has.
    """

    def spread(value_S: pd.Series) -> str:
        if not (n := value_S.count()):
            return "-"
        text = " ± ".join(map(value_S.name.form.format, [value_S.mean(), value_S.std()][:n]))
        return text if n == len(value_S) else f"{text} (of {n})"

    return values.groupby("arm", sort=False).agg(spread)


def paired(values: pd.DataFrame, quantity: Quantity, arm: str, than: str) -> tuple[int, Interval]:
    """Returns (the number of seeds on which both have it, the interval of arm - than there)."""
    of_arm = values[quantity].unstack("arm").reindex(columns=[arm, than])
    d_S = of_arm[arm] - of_arm[than]
    return d_S.count(), statistics.paired_interval(d_S)


Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, heads, rows


def means(values: pd.DataFrame, runs: Mapping[str, Run]) -> Table:
    """Returns the table of the arms' spreads, with the numbers of steps and seeds of each."""
    seeds, rows = values.groupby("arm").size(), []
    for arm, *cells in spreads(values).itertuples():
        steps = sorted({run.finished_steps for run in runs.values() if run.arm == arm})
        rows.append([arm, ", ".join(map(str, steps)) or "-", str(seeds[arm]), *cells])
    heads = ["arm", "steps", "seeds", *(quantity.name for quantity in values)]
    return "Mean ± standard deviation over seeds", heads, rows


def differences(values: pd.DataFrame, pairs: Sequence[tuple[str, str]]) -> list[Table]:
    """Returns the table of the differences of pairs of arms; none where no pair shares a seed.

    A difference in which all seeds are equal is called so: nothing is measured there.
    """
    rows = []
    for quantity, (arm, than) in itertools.product(values, pairs):
        n, interval = paired(values, quantity, arm, than)
        difference, bounds = quantity.texts(interval)
        if interval.low == interval.high == 0:
            bounds = "equal on each seed"
        elif interval.p < statistics.ALPHA:
            bounds += " *"
        if n:
            rows.append([quantity.name, f"{arm} - {than}", str(n), difference, bounds])
    heads = ["quantity", "arms", "pairs", "difference", "paired 95 %"]
    return [("Differences on the same seed", heads, rows)] if rows else []


def tables(runs: Mapping[str, Run], *, baseline: str = "") -> tuple[list[Table], list[str]]:
    """(tables of the complete runs, notes on what is compared).

    The tables are the arms' means and, of several arms, the differences from the baseline ("": the
    first arm). Raises ValueError for a baseline that is none of the arms.
    """
    arms, (kept, short) = arms_of(runs), complete(runs)
    if (baseline := baseline or arms[0]) not in arms:
        raise ValueError(f"no arm is called {baseline!r}; there are {', '.join(arms)}")
    notes = [f"Left out of the comparison, not finished: {'; '.join(short)}."] * bool(short)
    if others := of_other_prompts(kept):
        notes.append(f"Trained on other prompts: {'; '.join(others)}.")
    if not kept:
        return [], notes
    values, pairs = compared(kept), [(arm, baseline) for arm in arms if arm != baseline]
    return [means(values, kept), *differences(values, pairs)], notes


def of_other_prompts(runs: Mapping[str, Run]) -> list[str]:
    """Names the runs whose prompts differ from those of the first run with the same seed."""
    first, others = {}, []
    for label, run in runs.items():
        if prompts := run.starts and run.starts[-1].get("prompts"):
            than, same = first.setdefault(run.seed, (label, prompts))
            others += [f"{label} than {than}"] * (prompts != same)
    return others


def csv_text(runs: Mapping[str, Run]) -> str:
    """Returns the arms' means and standard deviations as CSV, unrounded; empty where unknown."""
    values = compared(complete(runs)[0])
    of_arm = values.groupby("arm", sort=False)
    table = pd.DataFrame({"seeds": of_arm.size()})
    for quantity in values:
        table[quantity.name] = of_arm[quantity].mean()
        table[f"{quantity.name} ±"] = of_arm[quantity].std()
    return table.to_csv(lineterminator="\n")


def compared(runs: Mapping[str, Run]) -> pd.DataFrame:
    """Returns mean@k, TRAINING and own metrics, those that some run has: see `measured`.

    They begin with the first step that all have: a fork has none of its parent's. Tokens are
    counted from there too, where a run has the step before.
    """
    # A set's name with settings is of `evaluate`.
    scores = [key.split("/")[1:] for key in mean_scores(runs).values() if " " not in key]
    quantities = [
        *(final_score(*score) for score in scores),
        *TRAINING,
        *(last(it.summary, it.key, form="{:z.4g}") for it in own_metrics(runs)),
    ]
    begin = max((run.rows.index[0] for run in runs.values()), default=0)
    spent = max((run[TOKENS].get(begin - 1, 0) for run in runs.values()), default=0)
    since = {}
    for label, run in runs.items():
        rows = run.rows.assign(**{TOKENS: run[TOKENS] - spent})
        rows = rows if run.finished_steps <= begin else rows.loc[begin:]
        since[label] = dataclasses.replace(run, rows=rows)
    return measured(quantities, since).dropna(axis="columns", how="all")


def markdown(runs: Mapping[str, Run], *, baseline: str = "", title: str) -> str:
    """Returns `tables` as Markdown."""
    parts, notes = tables(runs, baseline=baseline)
    lines = [line for note in notes for line in (note, "")]
    return "\n".join([f"# {title}", "", *lines, *lines_of(parts), METHOD, ""])


def lines_of(tables: Sequence[Table]) -> list[str]:
    """Returns the lines of tables with their titles as Markdown."""
    lines = [[f"## {title}", "", *table(heads, rows), ""] for title, heads, rows in tables]
    return list(itertools.chain(*lines))


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
