"""The curves of runs, before anybody draws them: a line an arm, its seeds' mean and their range.

An arm is what the runs of a sweep have in common that differ in their seed alone; a run of no sweep
is an arm of its own. The figures (plots.py) and the page (page.py) draw the same lines.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dapo_jax.report.runs import Run, column, tokens_before
from dapo_jax.run.metrics import METRICS, SECONDS, TASK

SMOOTHED_ROWS = 30  # shorter runs are drawn as they are
ACCURACY = "accuracy/mean"  # drawn with the evaluations
COST = (SECONDS, "tokens / s")  # panels that say what a run costs, not what it learns


@dataclasses.dataclass(frozen=True)
class Curve:
    """One quantity of every run: its name in a legend, and x (finished steps) and y of a run.

    key: the metric's, or that of an evaluation, eval/<set>/<score>. noisy: a value a step, drawn
    with its rolling mean; else a few exact ones, drawn with markers.
    """

    key: str
    name: str
    points: Callable[[Run], tuple[np.ndarray, np.ndarray]]
    noisy: bool = True


@dataclasses.dataclass(frozen=True)
class Panel:
    """One picture: its title, the unit of its curves, and whether its axis is logarithmic."""

    title: str
    unit: str
    log: bool
    curves: list[Curve]


@dataclasses.dataclass(frozen=True)
class Line:
    """A curve of an arm. All are [points]: x, finished steps; y, the mean over the arm's seeds.

    low, high: the lowest and the highest seed. count: the seeds that have the point. Noisy curves
    are smoothed seed by seed before. raw: the single values, where a single run was smoothed.
    """

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    count: np.ndarray
    raw: np.ndarray | None


def arms(runs: Mapping[str, Run]) -> dict[str, dict[str, Run]]:
    """Groups runs by label: arm -> its runs, both in order of first appearance."""
    found: dict[str, dict[str, Run]] = {}
    for label, run in runs.items():
        found.setdefault(run.arm or label, {})[label] = run
    return found


def rolling_mean(values: np.ndarray, *, window: int) -> np.ndarray:
    """Centred mean over `window` (odd) neighbours; at the ends over those that exist.

    NaNs are left out of every mean and stay NaN.
    """
    if not len(values):
        return values
    valid = np.isfinite(values)
    ones = np.ones(window)
    half = window // 2
    total = np.convolve(np.where(valid, values, 0.0), ones)[half : half + len(values)]
    count = np.convolve(valid.astype(float), ones)[half : half + len(values)]
    return np.where(valid, total / np.maximum(count, 1), math.nan)


def smoothing_window(rows: int) -> int:
    """Rows that the rolling mean of a run of so many rows takes; 1 where it is not smoothed."""
    return 1 if rows < SMOOTHED_ROWS else rows // 15 | 1


def line(runs: Sequence[Run], curve: Curve) -> Line | None:
    """The curve of an arm's runs; None where no run has a finite value of it.

    Where a seed has no value at a step, the mean is over the others: `count` says so.
    """
    found = [curve.points(run) for run in runs]
    window = smoothing_window(max(len(x) for x, _ in found)) if curve.noisy else 1
    x = np.unique(np.concatenate([steps for steps, _ in found]))
    y_RT = np.full((len(runs), len(x)), math.nan)
    smooth_RT = y_RT.copy()
    for i, (steps, values) in enumerate(found):
        place = np.searchsorted(x, steps)
        y_RT[i, place], smooth_RT[i, place] = values, rolling_mean(values, window=window)
    known = np.isfinite(smooth_RT).any(axis=0)
    if not known.any():
        return None
    x, y_RT, smooth_RT = x[known], y_RT[:, known], smooth_RT[:, known]
    return Line(
        x=x,
        y=np.nanmean(smooth_RT, axis=0),
        low=np.nanmin(smooth_RT, axis=0),
        high=np.nanmax(smooth_RT, axis=0),
        count=np.isfinite(smooth_RT).sum(axis=0),
        raw=y_RT[0] if len(runs) == 1 and not np.array_equal(y_RT, smooth_RT) else None,
    )


def metric_curve(key: str, name: str) -> Curve:
    """A metric over the steps."""
    return Curve(key, name, lambda run: (column(run.rows, "step"), column(run.rows, key)))


def evaluation_curve(name: str, score: str) -> Curve:
    """A score of an evaluation set over the finished steps."""

    def points(run):
        curve = run.evaluations.get((name, score), {})
        return np.array(list(curve)), np.array(list(curve.values()), dtype=np.float64)

    return Curve(f"eval/{name}/{score}", f"{name} {score}", points, noisy=False)


def mean_scores(runs: Mapping[str, Run]) -> list[Curve]:
    """The mean@k of the runs' evaluation sets, in order of first appearance."""
    pairs = dict.fromkeys(pair for run in runs.values() for pair in run.evaluations)
    return [evaluation_curve(*pair) for pair in pairs if pair[1].startswith("mean@")]


def panels(runs: Mapping[str, Run], *, split: bool) -> list[Panel]:
    """The panels that METRICS names, the evaluations with the accuracy in training.

    A curve of which no row has a value is left out, and a panel with no curve: a part of the
    package that the recipe does not use. Before the first row all are there. What is left of
    several curves has its name in the title.
    split: each curve in a panel of its own, as several arms need it.
    """
    rows = [row for run in runs.values() for row in run.rows]
    known = {key for row in rows for key, value in row.items() if value is not None}
    by_title: dict[str, Panel] = {}
    for metric in METRICS:
        if metric.panel and (metric.key in known or metric.key == ACCURACY or not known):
            panel = by_title.setdefault(
                metric.panel, Panel(metric.panel, metric.unit, metric.log, [])
            )
            name = "training" if metric.key == ACCURACY else metric.name
            panel.curves.append(metric_curve(metric.key, name))
            if metric.key == ACCURACY:
                panel.curves.extend(mean_scores(runs))
    for key in sorted(known):
        if key.startswith(TASK):
            name = key.removeprefix(TASK).replace("_", " ")
            by_title[key] = Panel(f"{name}, the task's own", "", False, [metric_curve(key, name)])
    titles = collections.Counter(metric.panel for metric in METRICS)
    found = []
    for panel in by_title.values():
        if len(panel.curves) == 1 and titles[panel.title] <= 1:
            found.append(panel)
        elif split or len(panel.curves) == 1:
            found += [
                dataclasses.replace(panel, title=f"{panel.title}: {curve.name}", curves=[curve])
                for curve in panel.curves
            ]
        else:
            found.append(panel)
    return found


def axes(runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    """What an arm has spent until so many finished steps, the mean over the seeds that know it.

    "tokens" sampled for training, those of discarded groups included, "updates" taken and "hours"
    of the steps: name -> finished steps -> value. A quantity that no row has is left out.
    """
    spent: dict[str, list[dict[int, float]]] = {"tokens": [], "updates": [], "hours": []}
    for run in runs:
        after = [0, *(row["step"] + 1 for row in run.rows)]
        spent["tokens"].append(tokens_before(run.rows))
        for name, key, unit in (("updates", "updates", 1), ("hours", "seconds/total", 3600)):
            each = np.nan_to_num(column(run.rows, key)) / unit
            total = np.concatenate([[0.0], np.cumsum(each)])
            spent[name].append(dict(zip(after, total.tolist(), strict=True)))
    result = {}
    for name, by_run in spent.items():
        steps = sorted({step for known in by_run for step in known})
        mean = {
            step: float(np.mean([known[step] for known in by_run if step in known]))
            for step in steps
        }
        if any(mean.values()):
            result[name] = mean
    return result
