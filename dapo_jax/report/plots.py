"""Figures of runs as PNGs: the curves of one run or of several, and accuracy at equal budgets."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from dapo_jax.report.curves import (
    ACCURACY,
    Curve,
    Line,
    Panel,
    arms,
    axes,
    line,
    mean_scores,
    metric_curve,
    panels,
    smoothing_window,
)
from dapo_jax.report.quantities import Quantity
from dapo_jax.report.runs import Run, column
from dapo_jax.report.statistics import paired_interval
from dapo_jax.run.display import shorten_middle
from dapo_jax.run.files import atomic_file
from dapo_jax.run.metrics import METRICS, SECONDS

COLUMNS = 3  # panels beside each other; one more where there are many
MANY_PANELS = 12
PANEL_INCHES = 4.5
DPI = 100

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


def _label(text: str) -> str:
    """A legend text shown as it is: no mathematics, not hidden by a leading underscore."""
    text = shorten_middle(text, limit=48).replace("$", r"\$")
    return " " + text if text.startswith("_") else text


def _look(arm: int, kind: int, *, num_arms: int, noisy: bool) -> dict:
    """Several arms: a colour an arm. A single one: a colour a quantity."""
    number = kind if num_arms == 1 else arm
    lines = 1 if num_arms == 1 else number // len(_COLORS)
    look = {"color": _COLORS[number % len(_COLORS)], "linewidth": 1.8}
    look["linestyle"] = "-" if num_arms == 1 else _LINES[lines % len(_LINES)]
    if not noisy:
        marker = _MARKERS[kind % len(_MARKERS)]
        look |= {"marker": marker, "markeredgecolor": "white", "markeredgewidth": 0.7}
    return look


def _draw(ax: Axes, title: str, lines: Mapping[str, Sequence[Line | None]], *, noisy) -> np.ndarray:
    """Draws lines, by curve and arm, with a legend, and returns their finite values, [values].

    noisy: curve -> whether it has a value a step.
    """
    ax.set_title(title, parse_math=False)
    drawn, names = [np.zeros(0)], {}
    for kind, (name, by_arm) in enumerate(lines.items()):
        for arm, found in enumerate(by_arm):
            if found is None:
                continue
            drawn += [found.low, found.high]
            look = _look(arm, kind, num_arms=len(by_arm), noisy=noisy[name])
            names[name] = Line2D([], [], **look)
            if found.raw is not None:
                drawn.append(found.raw[np.isfinite(found.raw)])
                ax.plot(found.x, found.raw, color=look["color"], linewidth=0.8, alpha=0.25)
            if found.count.max() > 1:
                band = {"color": look["color"], "alpha": 0.18, "linewidth": 0}
                ax.fill_between(found.x, found.low, found.high, **band)
            if len(found.x) == 1:  # A line needs two points.
                look["marker"] = "o"
            some = found.count < found.count.max()  # seeds that have ended, or were not evaluated
            if some.any():
                ax.plot(found.x, found.y, **look | {"linewidth": 0.8, "linestyle": "--"})
            ax.plot(found.x, np.where(some, np.nan, found.y), **look)
    if not names:
        ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", color="#999999")
        ax.set(xticks=[], yticks=[])
    elif len(lines) > 1:
        beside_title = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": len(names)}
        room = ax.get_subplotspec().get_gridspec().ncols <= COLUMNS
        # Names of evaluation sets may be long.
        place = beside_title if room and all(noisy.values()) else {"loc": "best"}
        labels = [_label(name) for name in names]
        ax.legend(
            names.values(), labels, **place, borderaxespad=0.1, columnspacing=1.0, handlelength=2.0
        )
    return np.concatenate(drawn)


def _lines(runs: Mapping[str, Run], curves: Sequence[Curve]) -> dict[str, list[Line | None]]:
    """Name -> the line of each arm."""
    by_arm = [list(arm.values()) for arm in arms(runs).values()]
    return {curve.name: [line(arm, curve) for arm in by_arm] for curve in curves}


def _panel(ax: Axes, runs: Mapping[str, Run], panel: Panel) -> None:
    """Draws the curves of a panel."""
    noisy = {curve.name: curve.noisy for curve in panel.curves}
    values = _draw(ax, panel.title, _lines(runs, panel.curves), noisy=noisy)
    if panel.unit == "share":
        ax.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    if panel.log and (values > 0).any():
        ax.set_yscale("log", nonpositive="mask")


def _seconds_panel(ax: Axes, runs: Mapping[str, Run]) -> None:
    """Stacked seconds over the steps for one run; a stacked bar of means each arm for several."""
    title, metrics = SECONDS, [metric for metric in METRICS if metric.panel == SECONDS]
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
        _draw(ax, title, {}, noisy={})
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
        by_arm = arms(runs)
        arm_of = {label: i for i, arm in enumerate(by_arm.values()) for label in arm}
        left = np.zeros(len(by_arm))
        for name, by_run in spent.items():
            of_arm = [[] for _ in by_arm]
            for label, seconds in zip(runs, by_run, strict=True):
                of_arm[arm_of[label]].append(seconds)
            means = np.array([np.concatenate(seconds).mean() for seconds in of_arm])
            ax.barh(range(len(by_arm)), means, 0.5, left, color=color[name], label=name)
            left += means
        for position, label in enumerate(by_arm):
            ax.text(0, position - 0.3, _label(label), va="bottom", fontsize=9.5)
        # Room for the legend above the first bar.
        ax.set(title=f"{title}, mean by phase", xlabel="seconds", yticks=[])
        ax.set_ylim(len(by_arm) - 0.4, -0.45 - 0.35 * len(by_arm))
        ax.grid(axis="y", visible=False)
    if spent:
        ax.legend(loc="upper right", ncols=3, columnspacing=1.0, handlelength=1.2)


def _figure(names: Sequence[str], panels: int, *, title: str) -> tuple[Figure, list[Axes]]:
    """A figure 1600 pixels wide and its axes; above them its title, and the arms' colours."""
    columns = min(COLUMNS + (panels > MANY_PANELS), panels)
    lines = -(-panels // columns)
    figure = Figure(figsize=(16, 1 + PANEL_INCHES * lines), dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for ax in axes[panels:]:
        ax.set_axis_off()
    if len(names) == 1:
        figure.suptitle(title, x=0.012, ha="left", fontsize=15, fontweight="bold", parse_math=False)
    else:
        looks = [_look(i, 0, num_arms=len(names), noisy=True) for i in range(len(names))]
        figure.legend(
            [Line2D([], [], **look | {"linewidth": 4}) for look in looks],
            [_label(name) for name in names],
            loc="outside upper left",
            ncols=4,
            fontsize=11,
            title=title,
            title_fontproperties={"size": 15, "weight": "bold"},
            alignment="left",
        )
    return figure, axes[:panels]


def _smoothing(runs: Mapping[str, Run]) -> str:
    """Says over how many steps the longest run's curves are smoothed, where they are."""
    steps = smoothing_window(max(len(run.rows) for run in runs.values()))
    return f"; curves smoothed over {steps} steps" if steps > 1 else ""


def _title(runs: Mapping[str, Run]) -> str:
    """Names a run, or counts them; says what a band is where there is one, and the smoothing."""
    by_arm = arms(runs)
    if len(runs) == len(by_arm):
        name = shorten_middle(next(iter(runs)), limit=100)
        return (name if len(runs) == 1 else f"{len(runs)} runs") + _smoothing(runs)
    name = shorten_middle(next(iter(by_arm)), limit=80)
    name = name if len(by_arm) == 1 else f"{len(by_arm)} arms"
    over = "means over the seeds, bands from the lowest to the highest"
    return f"{name}, {len(runs)} runs: {over}{_smoothing(runs)}"


@matplotlib.rc_context(_STYLE)
def curves(runs: Mapping[str, Run]) -> Figure:
    """A run, or the arms of several over each other, over the steps: the panels of METRICS.

    Thin lines are single steps, thick ones centred rolling means (runs of SMOOTHED_ROWS rows or
    more). An arm of several seeds is their mean, in a band from the lowest to the highest.
    """
    names = list(arms(runs))
    shown = {  # the seconds, of which there may be several, are one
        SECONDS if panel.title.startswith(SECONDS) else panel.title: panel
        for panel in panels(runs, split=len(names) > 1)
    }
    figure, axes = _figure(names, len(shown), title=_title(runs))
    for ax, (title, panel) in zip(axes, shown.items(), strict=True):
        _seconds_panel(ax, runs) if title == SECONDS else _panel(ax, runs, panel)
        if ax.has_data() and not ax.get_xlabel():
            ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
            ax.set_xlabel("finished rollout steps")
    return figure


@matplotlib.rc_context(_STYLE)
def chosen(
    runs: Mapping[str, Run], panels: Sequence[Panel], quantities: Sequence[Quantity], *, title: str
) -> Figure:
    """The arms over each other in the panels asked for, and each quantity, a column an arm.

    Of a quantity it shows every seed, the mean and its 95 % interval over the seeds.
    """
    by_arm = arms(runs)
    title += _smoothing(runs)
    figure, axes = _figure(list(by_arm), len(panels) + len(quantities), title=title)
    for ax, panel in zip(axes, panels, strict=False):
        _panel(ax, runs, panel)
        ax.set_xlabel("finished rollout steps")
    for ax, quantity in zip(axes[len(panels) :], quantities, strict=True):
        _columns(ax, quantity, [list(arm.values()) for arm in by_arm.values()])
    return figure


def _columns(ax: Axes, quantity: Quantity, by_arm: Sequence[Sequence[Run]]) -> None:
    """Draws a quantity's values, a column of dots an arm, each beside its mean and interval."""
    ax.set_title(quantity.name, parse_math=False)
    for arm, runs in enumerate(by_arm):
        values = np.array([quantity.value(run) for run in runs])
        color = _look(arm, 0, num_arms=len(by_arm), noisy=True)["color"]
        ax.plot(np.full(len(values), arm - 0.12), values, "o", color=color, alpha=0.4)
        known = values[np.isfinite(values)]
        around = paired_interval(known, np.zeros_like(known))
        # Of some of an arm's seeds it would not be the arm's.
        half = np.nan_to_num(around.half_width) if len(known) == len(values) else 0.0
        ax.errorbar(arm + 0.12, around.difference, half, fmt="D", color=color, capsize=4)
    ax.set_xlim(-0.6, len(by_arm) - 0.4)
    ax.set_xticks([])
    if any(len(runs) > 1 for runs in by_arm):
        ax.set_xlabel("bars: 95 % interval, of their own arm")


@matplotlib.rc_context(_STYLE)
def accuracy_vs_tokens(runs: Mapping[str, Run]) -> Figure:
    """Accuracy in training and evaluations over the tokens sampled for training so far.

    This is the axis on which runs with and without dynamic sampling compare fairly: the groups
    that are sampled and filtered out count. Over several seeds both are means.
    """
    by_arm = arms(runs)
    spent = [axes(list(arm.values())).get("tokens", {0: 0.0}) for arm in by_arm.values()]
    scores = [metric_curve(ACCURACY, "training samples"), *mean_scores(runs)]
    title = f"accuracy at equal sampling budgets: {_title(runs)}"
    figure, all_axes = _figure(list(by_arm), len(scores), title=title)
    for ax, curve in zip(all_axes, scores, strict=True):
        (lines,) = _lines(runs, [curve]).values()
        over = [
            found and dataclasses.replace(found, x=_looked_up(tokens, found.x))
            for found, tokens in zip(lines, spent, strict=True)
        ]
        _draw(ax, curve.name, {curve.name: over}, noisy={curve.name: curve.noisy})
        ax.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
        ax.xaxis.set_major_formatter(EngFormatter(sep=" "))
        ax.set_xlabel("tokens sampled for training")
    return figure


def _looked_up(known: Mapping[int, float], steps: np.ndarray) -> np.ndarray:
    """The known value at each step; NaN, which is not drawn, elsewhere."""
    return np.array([known.get(step, math.nan) for step in steps.tolist()])


def save(figure: Figure, path: str | pathlib.Path) -> None:
    """Writes a figure as a PNG, complete or not at all."""
    with atomic_file(path) as file:
        figure.savefig(file, format="png")
