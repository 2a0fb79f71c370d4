"""Figures of one run or of several: the curves over the steps, and accuracy at equal budgets.

Every figure draws the same lines: one an arm, the mean over its seeds, with a band from the lowest
to the highest seed. A run without an arm is an arm of its own.
"""

import collections
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

from dapo_jax.logs.files import atomic_file
from dapo_jax.logs.metrics import METRICS, TASK
from dapo_jax.report import statistics
from dapo_jax.report.compare import Quantity
from dapo_jax.report.runs import Run, by_arm, column, shortened, tokens_before

SMOOTHED_ROWS = 30  # shorter runs are drawn as they are
ACCURACY = "accuracy/mean"  # shares a panel with the evaluations
COLUMNS = 3  # panels beside each other
PANEL_INCHES = 4.5
DPI = 100
LABEL = 48  # characters of a name in a legend

_COLORS = (
    *("#2364aa", "#d1495b", "#2a9d6f", "#e09f3e", "#7b5ea7"),
    *("#4d4d4d", "#3ab0c4", "#c06c9b", "#8a9a2b", "#8c5a3c"),
)
_LINES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_STYLE = {
    **{"font.size": 10.5, "axes.titlesize": 12, "legend.fontsize": 9.5, "legend.frameon": False},
    **{"axes.titleweight": "bold", "axes.titlelocation": "left", "axes.xmargin": 0.02},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#888888"},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": "#e6e6e6"},
}


@dataclasses.dataclass(frozen=True)
class Curve:
    """One quantity of every run: its name in a legend, and x (finished steps) and y of a run.

    noisy: a value a step, drawn with its rolling mean; otherwise a few values, drawn with markers.
    """

    name: str
    points: Callable[[Run], tuple[np.ndarray, np.ndarray]]
    noisy: bool = True


@dataclasses.dataclass(frozen=True)
class Panel:
    """A title, the unit of the curves below it, and a logarithmic axis or not."""

    title: str
    unit: str
    log: bool
    curves: list[Curve]


@dataclasses.dataclass(frozen=True)
class Line:
    """A curve of an arm. All are [points]: x, steps or tokens; y, the mean over the arm's seeds.

    low, high: the lowest and the highest seed. count: the seeds that have the point. Noisy curves
    are smoothed seed by seed before the mean. raw: the single values of a single smoothed run.
    """

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    count: np.ndarray
    raw: np.ndarray | None


def metric_curve(key: str, name: str) -> Curve:
    """A metric over the steps."""
    return Curve(name, lambda run: (column(run.rows, "step"), column(run.rows, key)))


def evaluation_curve(name: str, score: str) -> Curve:
    """A score of an evaluation set over the finished steps."""

    def points(run):
        curve = run.evaluations.get((name, score), {})
        return np.array(list(curve)), np.array(list(curve.values()), dtype=np.float64)

    return Curve(f"{name} {score}", points, noisy=False)


def mean_scores(runs: Mapping[str, Run]) -> list[Curve]:
    """The mean@k of the runs' evaluation sets, in order of first appearance."""
    pairs = dict.fromkeys(pair for run in runs.values() for pair in run.evaluations)
    return [evaluation_curve(*pair) for pair in pairs if pair[1].startswith("mean@")]


def panels(runs: Mapping[str, Run], *, split: bool) -> list[Panel]:
    """The panels that METRICS names, the evaluations beside the training accuracy.

    Leaves out curves without any value: parts of the package that the config does not use. Before
    the first row all are there. A curve that is alone in a panel of several has its name in the
    title. split: each curve in a panel of its own, for several arms.
    """
    rows = [row for run in runs.values() for row in run.rows]
    known = {key for row in rows for key, value in row.items() if value is not None}
    drawn: list[tuple[str, str, bool, Curve]] = []
    for metric in METRICS:
        if metric.panel and (metric.key in known or metric.key == ACCURACY or not known):
            of_metric = [metric_curve(metric.key, metric.name)]
            if metric.key == ACCURACY:
                of_metric = [metric_curve(ACCURACY, "training"), *mean_scores(runs)]
            drawn += [(metric.panel, metric.unit, metric.log, curve) for curve in of_metric]
    for key in sorted(key for key in known if key.startswith(TASK)):
        name = key.removeprefix(TASK).replace("_", " ")
        drawn.append((f"{name}, the task's own", "", False, metric_curve(key, name)))
    in_table = collections.Counter(metric.panel for metric in METRICS)
    here = collections.Counter(title for title, *_ in drawn)
    found: dict[str, Panel] = {}
    for title, unit, log, curve in drawn:
        if max(here[title], in_table[title]) > 1 and (split or here[title] == 1):
            title = f"{title}: {curve.name}"
        found.setdefault(title, Panel(title, unit, log, [])).curves.append(curve)
    return list(found.values())


def rolling_mean(values: np.ndarray, *, window: int) -> np.ndarray:
    """Centred mean over `window` (odd) neighbours; at the ends over those that exist.

    NaNs are left out of every mean and stay NaN.
    """
    if not len(values):
        return values
    valid = np.isfinite(values)
    ones, half = np.ones(window), window // 2
    total = np.convolve(np.where(valid, values, 0.0), ones)[half : half + len(values)]
    count = np.convolve(valid.astype(float), ones)[half : half + len(values)]
    return np.where(valid, total / np.maximum(count, 1), math.nan)


def smoothing_window(rows: int) -> int:
    """Rows in the rolling mean of a run with this many rows; 1 without smoothing."""
    return 1 if rows < SMOOTHED_ROWS else rows // 15 | 1


def line(runs: Sequence[Run], curve: Curve, *, over_tokens: bool = False) -> Line | None:
    """The curve of an arm's runs; None where no run has a finite value of it.

    Where a seed has no value at a step, the mean is over the others: see `count`. over_tokens: x
    is the mean over the seeds of the tokens that they have sampled for training until then.
    """
    found = [curve.points(run) for run in runs]
    window = smoothing_window(max(len(x) for x, _ in found)) if curve.noisy else 1
    x = np.unique(np.concatenate([steps for steps, _ in found]))
    y_SX = np.full((len(runs), len(x)), math.nan)
    smooth_SX = y_SX.copy()
    for i, (steps, values) in enumerate(found):
        place = np.searchsorted(x, steps)
        y_SX[i, place], smooth_SX[i, place] = values, rolling_mean(values, window=window)
    known = np.isfinite(smooth_SX).any(axis=0)
    if not known.any():
        return None
    x, y_SX, smooth_SX = x[known], y_SX[:, known], smooth_SX[:, known]
    if over_tokens:
        spent = [tokens_before(run.rows) for run in runs]
        x = np.array([statistics.nan_mean([of.get(step, math.nan) for of in spent]) for step in x])
    return Line(
        x=x,
        y=np.nanmean(smooth_SX, axis=0),
        low=np.nanmin(smooth_SX, axis=0),
        high=np.nanmax(smooth_SX, axis=0),
        count=np.isfinite(smooth_SX).sum(axis=0),
        raw=y_SX[0] if len(runs) == 1 and not np.array_equal(y_SX, smooth_SX) else None,
    )


def curves(runs: Mapping[str, Run]) -> Figure:
    """A run, or the arms of several over each other, over the steps: the panels of METRICS.

    Thin lines are single steps, thick ones centred rolling means. An arm of several seeds is their
    mean, in a band from the lowest to the highest.
    """
    return chosen(runs, panels(runs, split=len(by_arm(runs)) > 1), title=_title(runs))


def accuracy_vs_tokens(runs: Mapping[str, Run]) -> Figure:
    """Accuracy in training and evaluations over the tokens sampled for training so far.

    Groups that dynamic sampling discards count: on this axis runs with and without it compare
    fairly. Over several seeds both are means.
    """
    scores = [metric_curve(ACCURACY, "training samples"), *mean_scores(runs)]
    shown = [Panel(curve.name, "share", False, [curve]) for curve in scores]
    title = f"accuracy at equal sampling budgets: {_title(runs)}"
    return chosen(runs, shown, title=title, over_tokens=True)


@matplotlib.rc_context(_STYLE)
def chosen(
    runs: Mapping[str, Run],
    panels: Sequence[Panel],
    quantities: Sequence[Quantity] = (),
    *,
    title: str,
    over_tokens: bool = False,
) -> Figure:
    """The arms over each other in the given panels, and each quantity, a column an arm.

    A quantity's panel shows every seed, the mean and its 95 % interval over the seeds.
    over_tokens: the others are over the tokens sampled so far and not over the steps.
    """
    figure, axes = _figure(runs, len(panels) + len(quantities), title=title)
    for ax, panel in zip(axes, panels, strict=False):
        _panel(ax, runs, panel, over_tokens=over_tokens)
    for ax, quantity in zip(axes[len(panels) :], quantities, strict=True):
        _columns(ax, quantity, [list(of_seed.values()) for of_seed in by_arm(runs).values()])
    return figure


def save(figure: Figure, path: str | pathlib.Path) -> None:
    """Writes a figure as a PNG, complete or not at all."""
    with atomic_file(path) as file:
        figure.savefig(file, format="png")


def _figure(runs: Mapping[str, Run], panels: int, *, title: str) -> tuple[Figure, list[Axes]]:
    """A figure 1600 pixels wide and its axes; above them its title, and the arms' colours."""
    names = list(by_arm(runs))
    smoothed = smoothing_window(max(len(run.rows) for run in runs.values()))
    title += f"; curves smoothed over {smoothed} steps" if smoothed > 1 else ""
    columns = min(COLUMNS, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(16, 1 + PANEL_INCHES * rows), dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
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


def _title(runs: Mapping[str, Run]) -> str:
    """Names a run or an arm, or counts them; explains the bands."""
    arms = by_arm(runs)
    name = shortened(next(iter(arms)), limit=2 * LABEL)
    if len(runs) == len(arms):
        return name if len(runs) == 1 else f"{len(runs)} runs"
    name = name if len(arms) == 1 else f"{len(arms)} arms"
    return f"{name}, {len(runs)} runs: means over the seeds, bands from the lowest to the highest"


def _label(text: str) -> str:
    """A legend text shown as it is: no mathematics, not hidden by a leading underscore."""
    text = shortened(text, limit=LABEL).replace("$", r"\$")
    return " " + text if text.startswith("_") else text


def _look(arm: int, kind: int, *, num_arms: int, noisy: bool) -> dict:
    """Several arms: a colour an arm. A single one: a colour a quantity."""
    style, color = divmod(kind if num_arms == 1 else arm, len(_COLORS))
    look = {"color": _COLORS[color], "linewidth": 1.8, "linestyle": _LINES[style % len(_LINES)]}
    if not noisy:
        marker = _MARKERS[kind % len(_MARKERS)]
        look |= {"marker": marker, "markeredgecolor": "white", "markeredgewidth": 0.7}
    return look


def _panel(ax: Axes, runs: Mapping[str, Run], panel: Panel, *, over_tokens: bool) -> None:
    """Draws the curves of a panel: the lines of each curve and arm, with a legend of the curves."""
    ax.set_title(panel.title, parse_math=False)
    names, arms = {}, [list(of_seed.values()) for of_seed in by_arm(runs).values()]
    for kind, curve in enumerate(panel.curves):
        of_arm = [line(arm, curve, over_tokens=over_tokens) for arm in arms]
        for arm, found in enumerate(of_arm):
            if found is not None:
                look = _look(arm, kind, num_arms=len(of_arm), noisy=curve.noisy)
                names[curve.name] = Line2D([], [], **look)
                _draw(ax, found, look, band_alpha=min(0.18, 0.6 / len(of_arm)))
    if not names:
        ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", color="#999999")
        ax.set(xticks=[], yticks=[])
    elif len(panel.curves) > 1:
        ax.legend(names.values(), map(_label, names))
    if panel.unit == "share":
        ax.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    if panel.log and any(y > 0 for drawn in ax.lines for y in drawn.get_ydata()):
        ax.set_yscale("log", nonpositive="mask")
    if over_tokens:
        ax.xaxis.set_major_formatter(EngFormatter(sep=" "))
        ax.set_xlabel("tokens sampled for training")
    elif ax.has_data():
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        ax.set_xlabel("finished rollout steps")


def _draw(ax: Axes, found: Line, look: dict, *, band_alpha: float) -> None:
    """Draws a line with its band; thin and dashed where some seeds have ended or have no value."""
    color, most = look["color"], found.count.max()
    if found.raw is not None:
        ax.plot(found.x, found.raw, color=color, linewidth=0.8, alpha=0.25)
    if most > 1:
        ax.fill_between(found.x, found.low, found.high, color=color, alpha=band_alpha, linewidth=0)
    if len(found.x) == 1:  # a line needs two points
        look = look | {"marker": "o"}
    if (some := found.count < most).any():
        ax.plot(found.x, found.y, **look | {"linewidth": 0.8, "linestyle": "--"})
    ax.plot(found.x, np.where(some, np.nan, found.y), **look)


def _columns(ax: Axes, quantity: Quantity, arms: Sequence[Sequence[Run]]) -> None:
    """Draws a quantity's values, a column of dots an arm, each beside its mean and interval."""
    ax.set_title(quantity.name, parse_math=False)
    for arm, runs in enumerate(arms):
        values = np.array([quantity.value(run) for run in runs])
        color = _look(arm, 0, num_arms=len(arms), noisy=True)["color"]
        ax.plot(np.full(len(values), arm - 0.12), values, "o", color=color, alpha=0.4)
        known = values[np.isfinite(values)]
        around = statistics.paired_interval(known, np.zeros_like(known))
        # An interval of some of an arm's seeds would not be the arm's.
        half = np.nan_to_num(around.half_width) if len(known) == len(values) else 0.0
        ax.errorbar(arm + 0.12, around.difference, half, fmt="D", color=color, capsize=4)
    ax.set_xlim(-0.6, len(arms) - 0.4)
    ax.set_xticks([])
    if any(len(runs) > 1 for runs in arms):
        ax.set_xlabel("bars: 95 % interval, of their own arm")
