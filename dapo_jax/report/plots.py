"""Figures of one run or of several: the curves over the steps, and accuracy at equal budgets.

A line is an arm: the mean over its seeds, with a band from the lowest to the highest seed.
"""

import collections
import dataclasses
import io
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib import rc_context, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from dapo_jax.logs.metrics import METRICS
from dapo_jax.printable import shortened
from dapo_jax.report.runs import Run, arms_of, mean_scores, own_metrics, tokens_before

ACCURACY = "accuracy/mean"  # shares a panel with the evaluations
COLUMNS = 3  # panels beside each other
PANEL_INCHES = 4.5
LABEL = 48  # characters of a name in a legend


@dataclasses.dataclass(frozen=True)
class Panel:
    """A title, and the curves below it, name -> key; a "ratio" as unit has a logarithmic axis."""

    title: str
    unit: str
    curves: dict[str, str]


def panels(runs: Mapping[str, Run]) -> list[Panel]:
    """The panels that the metrics name, the evaluations beside the training accuracy.

    Leaves out curves of fewer than two points: parts of the package that the config does not use.
    Of several arms each curve has a panel of its own. A curve that is alone in a panel of several
    has its name in the title.
    """
    curves = []
    for metric in METRICS + own_metrics(runs):
        names = {metric.key.rpartition("/")[2].replace("_", " "): metric.key}
        if metric.key == ACCURACY:
            names = {"training": ACCURACY} | mean_scores(runs)
        if metric.panel:
            curves += [(metric.panel, metric.unit, *curve) for curve in names.items()]
    least = min(2, max(len(run.rows) for run in runs.values()))  # one step has points alone
    drawn = [curve for curve in curves if _most_points(runs, curve[-1]) >= least]
    named, here = (collections.Counter(title for title, *_ in part) for part in (curves, drawn))
    by_title: dict[str, Panel] = {}
    for title, unit, name, key in drawn:
        if named[title] > 1 and (here[title] == 1 or len(arms_of(runs)) > 1):
            title = f"{title}: {name}"
        by_title.setdefault(title, Panel(title, unit, {})).curves[name] = key
    return list(by_title.values())


def _most_points(runs: Mapping[str, Run], key: str) -> int:
    return max(run[key].count() for run in runs.values())


def curves(runs: Mapping[str, Run]) -> Figure:
    """A run, or the arms of several over each other, over the steps: the panels of METRICS."""
    return chosen(runs, panels(runs), title=titled(runs))


def accuracy_vs_tokens(runs: Mapping[str, Run]) -> Figure:
    """Accuracy in training and evaluations over the tokens sampled for training so far.

    Groups that dynamic sampling discards count: on this axis runs with and without it compare
    fairly. Over several seeds both are means.
    """
    scores = {"training samples": ACCURACY} | mean_scores(runs)
    shown = [Panel(name, "share", {name: key}) for name, key in scores.items()]
    shown = [it for it in shown if _most_points(runs, *it.curves.values()) > 1] or shown
    title = f"accuracy at equal sampling budgets: {titled(runs)}"
    return chosen(runs, shown, title=title, over_tokens=True)


@style.context("seaborn-v0_8-whitegrid")
def chosen(
    runs: Mapping[str, Run], panels: Sequence[Panel], *, title: str, over_tokens: bool = False
) -> Figure:
    """The arms over each other in the given panels; over_tokens: over those sampled so far."""
    arms = [[run for run in runs.values() if run.arm == arm] for arm in arms_of(runs)]
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(16, 1 + PANEL_INCHES * rows), dpi=100, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    for i, panel in enumerate(panels, start=1):
        ax = figure.add_subplot(rows, columns, i)
        _panel(ax, arms, panel, over_tokens=over_tokens)
    named = arms_of(runs) if len(arms) > 1 else []
    legend = figure.legend(
        [Line2D([], [], **_look(i) | {"linewidth": 4}) for i in range(len(named))],
        [f" {shortened(arm, limit=LABEL)}" for arm in named],  # "_a" would be hidden
        loc="outside upper left",
        ncols=4,
        fontsize=11,
        title=title,
        title_fontproperties={"size": 15, "weight": "bold"},
        alignment="left",
    )
    for text in (legend.get_title(), *legend.get_texts()):
        text.set_parse_math(False)
    return figure


def rendered(figure: Figure, form: str = "png") -> bytes:
    """Renders a figure as a file of a form, png, svg or pdf: text stays text, equal ones bytes."""
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "dapo_jax", "pdf.fonttype": 42}):
        figure.savefig(file := io.BytesIO(), format=form, metadata=undated)
    return file.getvalue()


def titled(runs: Mapping[str, Run]) -> str:
    """Names a single run, or counts runs and arms; explains the bands."""
    if len(runs) == 1:
        return shortened(next(iter(runs)), limit=2 * LABEL)
    text = f"{len(runs)} runs of {len(arms_of(runs))} arms"
    return f"{text}: means over the seeds, bands from the lowest to the highest"


def _look(index: int) -> dict:
    """A colour of matplotlib's ten; after these with another kind of line."""
    line = ("-", "--", ":", "-.")[index // 10 % 4]
    return {"color": f"C{index % 10}", "linewidth": 1.8, "linestyle": line}


def _panel(ax: Axes, arms: Sequence[Sequence[Run]], panel: Panel, *, over_tokens: bool) -> None:
    """Draws the curves of a panel: of several arms a colour an arm, of one a colour a curve."""
    ax.set_title(panel.title, loc="left", fontweight="bold", parse_math=False)
    for kind, (name, key) in enumerate(panel.curves.items()):
        for arm, runs in enumerate(arms):
            look = _look(kind if len(arms) == 1 else arm)
            if len(arms) == 1 and kind % 2:  # where two are equal both are seen
                look["linestyle"] = "--"
            _draw(ax, runs, key, look | {"label": name}, over_tokens=over_tokens)
    if len(panel.curves) > 1 and len(arms) == 1:
        ax.legend()
    if panel.unit == "share":
        ax.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    if panel.unit == "ratio" and any(y > 0 for drawn in ax.lines for y in drawn.get_ydata()):
        ax.set_yscale("log", nonpositive="mask")
    if over_tokens:
        ax.xaxis.set_major_formatter(EngFormatter(sep=" "))
        ax.set_xlabel("tokens sampled for training")
    else:
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        ax.set_xlabel("finished rollout steps")


def _draw(ax: Axes, runs: Sequence[Run], key: str, look: dict, *, over_tokens: bool) -> None:
    """Draws the mean of an arm's seeds, thin and dashed where some lack a value, and their band."""
    values = pd.concat([run[key] for run in runs], axis="columns").sort_index()
    values = values.dropna(how="all")
    x, y, count = values.index, values.mean(axis="columns"), values.count(axis="columns")
    if over_tokens:
        spent = pd.concat([tokens_before(run) for run in runs], axis="columns")
        x = spent.mean(axis="columns").reindex(x)
    if len(runs) > 1:
        band = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
        ax.fill_between(x, values.min(axis="columns"), values.max(axis="columns"), **band)
    if key.startswith("eval/") or len(x) == 1:  # scores are few, and a line needs two points
        look = look | {"marker": "o"}
    if (some := count < count.max()).any():
        ax.plot(x, y, **look | {"linewidth": 0.8, "linestyle": "--", "label": None})
    ax.plot(x, y.mask(some), **look)
