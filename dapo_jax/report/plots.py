"""Figures of runs as PNGs: the curves of one run or of several, and accuracy at equal budgets."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from dapo_jax.report.runs import Run, column, tokens_before
from dapo_jax.run.display import shorten_middle
from dapo_jax.run.files import atomic_file
from dapo_jax.run.metrics import METRICS, SECONDS, Metric

SMOOTHED_ROWS = 30  # shorter runs are drawn as they are
COLUMNS = 3  # panels beside each other
PANEL_INCHES = 4.5
DPI = 100
ACCURACY = "accuracy/mean"  # drawn with the evaluations

_COLORS = (
    *("#2364aa", "#d1495b", "#2a9d6f", "#e09f3e", "#7b5ea7"),
    *("#4d4d4d", "#3ab0c4", "#c06c9b", "#8a9a2b", "#8c5a3c"),
)
_LINES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_STYLE = {
    "font.size": 10.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.facecolor": "white",
}


@dataclasses.dataclass(frozen=True)
class Curve:
    """One quantity of every run: its name in a legend, and x and y of a run.

    noisy: a value a step, drawn with its rolling mean; else a few exact ones, drawn with markers.
    """

    name: str
    points: Callable[[Run], tuple[np.ndarray, np.ndarray]]
    noisy: bool = True


def rolling_mean(values: np.ndarray, *, window: int) -> np.ndarray:
    """Centred mean over `window` (odd) neighbours; at the ends over those that exist.

    NaNs are left out of every mean and stay NaN.
    """
    valid = np.isfinite(values)
    ones = np.ones(window)
    half = window // 2
    total = np.convolve(np.where(valid, values, 0.0), ones)[half : half + len(values)]
    count = np.convolve(valid.astype(float), ones)[half : half + len(values)]
    return np.where(valid, total / np.maximum(count, 1), math.nan)


def _label(text: str) -> str:
    """A legend text shown as it is: no mathematics, not hidden by a leading underscore."""
    text = shorten_middle(text, limit=48).replace("$", r"\$")
    return " " + text if text.startswith("_") else text


def _look(run: int, kind: int, *, num_runs: int, noisy: bool) -> dict:
    """Several runs: a colour a run, a line a quantity. A single run: a colour a quantity."""
    color = _COLORS[(kind if num_runs == 1 else run) % len(_COLORS)]
    line = "-" if num_runs == 1 else _LINES[kind % len(_LINES)]
    look = {"color": color, "linestyle": line, "linewidth": 1.8}
    if not noisy:
        marker = _MARKERS[kind % len(_MARKERS)]
        look |= {"marker": marker, "markeredgecolor": "white", "markeredgewidth": 0.7}
    return look


def _draw(ax: Axes, runs: Mapping[str, Run], title: str, curves: Sequence[Curve]) -> np.ndarray:
    """Draws curves of all runs with a legend, and returns their finite values, [values]."""
    ax.set_title(title, parse_math=False)
    drawn, names = [np.zeros(0)], {}
    for kind, curve in enumerate(curves):
        for index, run in enumerate(runs.values()):
            x, y = curve.points(run)
            if not np.isfinite(y).any():
                continue
            drawn.append(y[np.isfinite(y)])
            look = _look(index, kind, num_runs=len(runs), noisy=curve.noisy)
            # Where colours stand for runs, the legend of the quantities is grey.
            color = look["color"] if len(runs) == 1 else "#555555"
            names[curve.name] = Line2D([], [], **look | {"color": color})
            if curve.noisy:
                window = 1 if len(y) < SMOOTHED_ROWS else len(y) // 15 | 1
                if window > 1:
                    ax.plot(x, y, color=look["color"], linewidth=0.8, alpha=0.25)
                y = rolling_mean(y, window=window)
                if len(drawn[-1]) == 1:  # A line needs two points.
                    look["marker"] = "o"
            ax.plot(x, y, **look)
    if not names:
        ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", color="#999999")
        ax.set(xticks=[], yticks=[])
    elif len(curves) > 1:
        beside_title = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": len(names)}
        short = all(curve.noisy for curve in curves)  # the names of evaluations may be long
        place = beside_title if short else {"loc": "best"}
        labels = [_label(name) for name in names]
        ax.legend(
            names.values(), labels, **place, borderaxespad=0.1, columnspacing=1.0, handlelength=2.0
        )
    return np.concatenate(drawn)


def _metric_curve(key: str, name: str) -> Curve:
    """A metric over the steps."""
    return Curve(name, lambda run: (column(run.rows, "step"), column(run.rows, key)))


def _evaluation_curve(name: str, score: str) -> Curve:
    """A score of an evaluation set over the finished steps."""

    def points(run):
        curve = run.evaluations.get((name, score), {})
        return np.array(list(curve)), np.array(list(curve.values()), dtype=np.float64)

    return Curve(f"{name} {score}", points, noisy=False)


def _over_tokens(curve: Curve) -> Curve:
    """The same over the tokens sampled for training before."""

    def points(run):
        steps, y = curve.points(run)
        known = tokens_before(run.rows)
        return np.array([known.get(step, math.nan) for step in steps.tolist()]), y

    return dataclasses.replace(curve, points=points)


def _mean_scores(runs: Mapping[str, Run]) -> list[Curve]:
    """The mean@k of the runs' evaluation sets, in order of first appearance."""
    pairs = dict.fromkeys(pair for run in runs.values() for pair in run.evaluations)
    return [_evaluation_curve(*pair) for pair in pairs if pair[1].startswith("mean@")]


def _panel(ax: Axes, runs: Mapping[str, Run], title: str, metrics: Sequence[Metric]) -> None:
    """Draws the metrics of a panel; the evaluations too, beside the accuracy in training."""
    curves = [_metric_curve(metric.key, metric.name) for metric in metrics]
    if metrics[0].key == ACCURACY:
        curves = [_metric_curve(ACCURACY, "training"), *curves[1:], *_mean_scores(runs)]
    values = _draw(ax, runs, title, curves)
    if metrics[0].unit == "share":
        ax.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    if any(metric.log for metric in metrics) and (values > 0).any():
        ax.set_yscale("log", nonpositive="mask")


def _seconds_panel(
    ax: Axes, runs: Mapping[str, Run], title: str, metrics: Sequence[Metric]
) -> None:
    """Stacked seconds over the steps for one run; a stacked bar of means each for several."""
    spent = {
        metric.name: [np.nan_to_num(column(run.rows, metric.key)) for run in runs.values()]
        for metric in metrics
    }
    totals = [np.nan_to_num(column(run.rows, "seconds/total")) for run in runs.values()]
    spent["other"] = [
        np.maximum(total - sum(parts), 0.0)
        for total, *parts in zip(totals, *spent.values(), strict=True)
    ]
    color = dict(zip(spent, [*_COLORS[: len(metrics)], "#bbbbbb"], strict=True))
    spent = {name: by_run for name, by_run in spent.items() if any(s.any() for s in by_run)}
    if not spent:
        _draw(ax, runs, title, ())
    elif len(runs) == 1:
        rows = next(iter(runs.values())).rows
        edges = np.append(column(rows, "step"), rows[-1]["step"] + 1)
        top = np.zeros(len(rows))
        for name, (seconds,) in spent.items():
            bottom, top = top, top + seconds
            ax.stairs(top, edges, baseline=bottom, fill=True, color=color[name], label=name)
        # One slow step, a compilation for instance, would flatten all the others.
        limit = min(top.max(), 1.5 * np.quantile(top, 0.95))
        if limit < top.max():
            slowest = rows[int(top.argmax())]["step"]
            title += f" (cut off: {top.max():.0f} s at step {slowest})"
        ax.set(title=title, ylim=(0, limit * 1.25))
    else:
        left = np.zeros(len(runs))
        for name, by_run in spent.items():
            means = np.array([seconds.mean() for seconds in by_run])
            ax.barh(range(len(runs)), means, 0.5, left, color=color[name], label=name)
            left += means
        for position, label in enumerate(runs):
            ax.text(0, position - 0.3, _label(label), va="bottom", fontsize=9.5)
        # Room for the legend above the first bar.
        ax.set(title=f"{title}, mean by phase", xlabel="seconds", yticks=[])
        ax.set_ylim(len(runs) - 0.4, -0.45 - 0.35 * len(runs))
        ax.grid(axis="y", visible=False)
    if spent:
        ax.legend(loc="upper right", ncols=3, columnspacing=1.0, handlelength=1.2)


def _figure(runs: Mapping[str, Run], panels: int, *, title: str) -> tuple[Figure, list[Axes]]:
    """A figure 1600 pixels wide and its axes; above them its title, and the runs' colours."""
    columns = min(COLUMNS, panels)
    lines = -(-panels // columns)
    figure = Figure(figsize=(16, 1 + PANEL_INCHES * lines), dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for ax in axes[panels:]:
        ax.set_axis_off()
    if len(runs) == 1:
        figure.suptitle(title, x=0.012, ha="left", fontsize=15, fontweight="bold", parse_math=False)
    else:
        colors = [_look(i, 0, num_runs=len(runs), noisy=True)["color"] for i in range(len(runs))]
        figure.legend(
            [Line2D([], [], color=color, linewidth=4) for color in colors],
            [_label(label) for label in runs],
            loc="outside upper left",
            ncols=4,
            fontsize=11,
            title=title,
            title_fontproperties={"size": 15, "weight": "bold"},
            alignment="left",
        )
    return figure, axes[:panels]


def _title(runs: Mapping[str, Run]) -> str:
    return shorten_middle(next(iter(runs)), limit=100) if len(runs) == 1 else f"{len(runs)} runs"


@matplotlib.rc_context(_STYLE)
def curves(runs: Mapping[str, Run]) -> Figure:
    """A run, or several over each other, over the steps: the panels that METRICS names.

    Thin lines are single steps, thick ones centred rolling means (runs of SMOOTHED_ROWS rows or
    more). Missing keys leave a panel with "no data".
    """
    panels: dict[str, list[Metric]] = {}
    for metric in METRICS:
        if metric.panel:
            panels.setdefault(metric.panel, []).append(metric)
    figure, axes = _figure(runs, len(panels), title=_title(runs))
    for ax, (title, metrics) in zip(axes, panels.items(), strict=True):
        (_seconds_panel if title == SECONDS else _panel)(ax, runs, title, metrics)
        if ax.has_data() and not ax.get_xlabel():
            ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
            ax.set_xlabel("finished rollout steps")
    return figure


@matplotlib.rc_context(_STYLE)
def accuracy_vs_tokens(runs: Mapping[str, Run]) -> Figure:
    """Accuracy in training and evaluations over the tokens sampled for training so far.

    This is the axis on which runs with and without dynamic sampling compare fairly: the groups
    that are sampled and filtered out count.
    """
    scores = [_metric_curve(ACCURACY, "training samples"), *_mean_scores(runs)]
    title = f"accuracy at equal sampling budgets: {_title(runs)}"
    figure, axes = _figure(runs, len(scores), title=title)
    for ax, curve in zip(axes, scores, strict=True):
        _draw(ax, runs, curve.name, [_over_tokens(curve)])
        ax.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
        ax.xaxis.set_major_formatter(EngFormatter(sep=" "))
        ax.set_xlabel("tokens sampled for training")
    return figure


def save(figure: Figure, path: str | pathlib.Path) -> None:
    """Writes a figure as a PNG, complete or not at all."""
    with atomic_file(path) as file:
        figure.savefig(file, format="png")
