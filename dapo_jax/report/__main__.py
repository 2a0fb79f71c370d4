"""Curves and a self-contained HTML page from the folders of one or several runs.

    python -m dapo_jax.report --workdir=DIR [--workdir=DIR2 ...]

writes report.html, curves.png and accuracy_vs_tokens.png into the first folder. Row s of
metrics.jsonl describes responses of the policy after s finished steps, and eval/<n>.json the
policy after n: both share the axis "finished rollout steps".
"""

import base64
import dataclasses
import html
import io
import json
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence

import matplotlib
import numpy as np
from absl import app, flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from dapo_jax.run.metrics import atomic_file, format_duration, read_rows, shorten_middle

PHASES = ("rollout", "verify", "update", "evaluate", "save")
AVERAGED_STEPS = 10  # first and last values of noisy rows are means over at most so many steps
TABLE_ROWS = 30  # rows of metrics shown for a run in the page
SMOOTHED_ROWS = 30  # shorter runs are drawn as they are

_COLORS = (
    "#2364aa",
    "#d1495b",
    "#2a9d6f",
    "#e09f3e",
    "#7b5ea7",
    "#4d4d4d",
    "#3ab0c4",
    "#c06c9b",
    "#8a9a2b",
    "#8c5a3c",
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


# Reading a run.


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run's folder says.

    rows: metrics.jsonl, in order. evaluations: set and metric -> {finished steps: value}, for
    instance ("arithmetic", "mean@8") -> {0: 0.31, 10: 0.42}. config: dotted key -> value.
    """

    rows: list[dict]
    evaluations: dict[tuple[str, str], dict[int, float]]
    config: dict[str, object]


def load_run(workdir: str | pathlib.Path) -> Run:
    """Reads metrics.jsonl, eval/*.json and config.json; the last two may be absent.

    Raises FileNotFoundError for a folder without metrics.jsonl, ValueError for one without rows
    and for a broken file, with its name.
    """
    workdir = pathlib.Path(workdir)
    path = workdir / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: --workdir={workdir} holds no training run")
    rows = read_rows(path)
    if not rows:
        raise ValueError(f"{path} has no rows yet: the run in {workdir} has not finished a step")
    config_path = workdir / "config.json"
    config = _flatten(_read_json(config_path)) if config_path.is_file() else {}
    return Run(rows=rows, evaluations=_read_evaluations(workdir / "eval"), config=config)


def _read_json(path: pathlib.Path) -> dict:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def _read_evaluations(folder: pathlib.Path) -> dict[tuple[str, str], dict[int, float]]:
    curves: dict[tuple[str, str], dict[int, float]] = {}
    results = {path: _read_json(path) for path in folder.glob("*.json")}
    for path, result in results.items():
        if type(result.get("step")) is not int or not isinstance(result.get("sets"), dict):
            raise ValueError(f"{path} is no evaluation: it needs an integer 'step' and 'sets'")
    for result in sorted(results.values(), key=lambda result: result["step"]):
        for name, metrics in result["sets"].items():
            for metric, value in metrics.items():
                if metric.startswith(("mean@", "pass@", "maj@")) and value is not None:
                    curves.setdefault((name, metric), {})[result["step"]] = value
    return curves


def _flatten(tree: Mapping, prefix: str = "") -> dict[str, object]:
    """{"algo": {"eps_low": 0.2}} -> {"algo.eps_low": 0.2}."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def column(rows: Sequence[Mapping], key: str) -> np.ndarray:
    """The rows' values of a key, [rows] float64, NaN where missing."""
    values = [row.get(key) for row in rows]
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


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


def tokens_before(rows: Sequence[Mapping]) -> dict[int, float]:
    """Finished steps -> tokens sampled for training before: 0 -> 0, then each row's total."""
    known = (row for row in rows if row.get("sampled_tokens_total") is not None)
    return {0: 0.0, **{row["step"] + 1: float(row["sampled_tokens_total"]) for row in known}}


# First against last.


@dataclasses.dataclass(frozen=True)
class Change:
    """A quantity at a run's start and end; `best` and its step only where higher is better."""

    first: float
    last: float
    best: float | None
    best_step: int | None
    form: str  # format of the numbers

    def text(self, value: float) -> str:
        return self.form.format(value)


# label, key, format, whether higher is better
_WATCHED = (
    ("reward", "reward/mean", "{:+.3f}", True),
    ("train accuracy", "accuracy/mean", "{:.1%}", True),
    ("response tokens", "response_tokens/mean", "{:.1f}", False),
    ("truncated", "response_tokens/truncated_fraction", "{:.1%}", False),
    ("entropy", "entropy", "{:.3f}", False),
    ("mean token probability", "mean_prob", "{:.3f}", False),
    ("gradient norm", "grad_norm", "{:.3g}", False),
)


def averaged_rows(rows: Sequence[Mapping]) -> int:
    """How many rows `changes` averages at each end: a tenth of the run, 1 to AVERAGED_STEPS."""
    return min(AVERAGED_STEPS, max(1, len(rows) // 10))


def changes(run: Run) -> dict[str, Change]:
    """Name -> start and end of the evaluations and of the watched row quantities.

    Evaluations compare the first with the last file; row quantities the means of
    `averaged_rows(rows)` rows at either end.
    """
    result = {}
    for (name, metric), values in run.evaluations.items():
        steps = list(values)
        best_step = max(steps, key=lambda step, values=values: values[step])
        result[f"{name} {metric}"] = Change(
            first=values[steps[0]],
            last=values[steps[-1]],
            best=values[best_step],
            best_step=best_step,
            form="{:.1%}",
        )
    edge = averaged_rows(run.rows)
    for name, key, form, higher_is_better in _WATCHED:
        values = column(run.rows, key)
        valid = values[np.isfinite(values)]
        if not len(valid):
            continue
        best_row = int(np.nanargmax(values))
        result[name] = Change(
            first=float(valid[:edge].mean()),
            last=float(valid[-edge:].mean()),
            best=float(values[best_row]) if higher_is_better else None,
            best_step=run.rows[best_row]["step"] if higher_is_better else None,
            form=form,
        )
    return result


def totals(run: Run) -> dict[str, str]:
    """Name -> formatted sums over the rows: steps, time, tokens, tokens per second, skips."""
    result = {"rollout steps": str(len(run.rows))}
    seconds = float(np.nansum(column(run.rows, "seconds/total")))
    tokens = column(run.rows, "sampled_tokens_total")
    tokens = tokens[np.isfinite(tokens)]
    if seconds > 0:
        result["wall time"] = format_duration(seconds)
    if len(tokens):
        result["sampled tokens"] = f"{int(tokens[-1]):,}"
    if len(tokens) and seconds > 0:
        result["sampled tokens per second"] = f"{tokens[-1] / seconds:,.0f}"
    skipped = column(run.rows, "updates_skipped")
    if np.nansum(skipped) > 0:
        result["updates skipped"] = f"{np.nansum(skipped):.0f}"
    return result


def summary_lines(run: Run) -> list[str]:
    """The end of a run in a few aligned lines: first -> last (best), then the totals."""
    all_changes, all_totals = changes(run), totals(run)
    width = max(map(len, [*all_changes, *all_totals]))
    lines = []
    for name, change in all_changes.items():
        line = f"{name:<{width}}  {change.text(change.first):>8} -> {change.text(change.last):>8}"
        if change.best is not None:
            line += f"   best {change.text(change.best)} at step {change.best_step}"
        lines.append(line)
    return lines + [f"{name:<{width}}  {text:>8}" for name, text in all_totals.items()]


# Figures.


@dataclasses.dataclass(frozen=True)
class _Look:
    """Colour, line and marker of one quantity of one run."""

    color: str
    line: str
    marker: str


def _look(run_index: int, kind_index: int, *, num_runs: int) -> _Look:
    """Several runs: a colour a run, a line a quantity. A single run: a colour a quantity."""
    color_index = kind_index if num_runs == 1 else run_index
    return _Look(
        color=_COLORS[color_index % len(_COLORS)],
        line="-" if num_runs == 1 else _LINES[kind_index % len(_LINES)],
        marker=_MARKERS[kind_index % len(_MARKERS)],
    )


def _label(text: str) -> str:
    """A legend text shown as it is: no mathematics, not hidden by a leading underscore."""
    text = shorten_middle(text, limit=48).replace("$", r"\$")
    return " " + text if text.startswith("_") else text


def _smoothing_window(num_rows: int) -> int:
    """Odd window of about a fifteenth of the run; 1 (none) for short runs."""
    return 1 if num_rows < SMOOTHED_ROWS else num_rows // 15 | 1


def _draw_noisy(ax: Axes, x: np.ndarray, y: np.ndarray, look: _Look) -> None:
    """A faint line of every value and a strong one of the rolling mean."""
    window = _smoothing_window(len(y))
    if window > 1:
        ax.plot(x, y, color=look.color, linestyle="-", linewidth=0.8, alpha=0.25)
    smooth = rolling_mean(y, window=window)
    isolated = np.isfinite(smooth).sum() == 1
    ax.plot(
        x,
        smooth,
        color=look.color,
        linestyle=look.line,
        linewidth=1.8,
        marker=look.marker if isolated else None,
    )


def _draw_evaluation(ax: Axes, x: Sequence[float], y: Sequence[float], look: _Look) -> None:
    ax.plot(
        x,
        y,
        color=look.color,
        linestyle=look.line,
        linewidth=1.6,
        marker=look.marker,
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=0.7,
    )


def _line_handles(looks: Sequence[_Look], *, markers: bool) -> list[Line2D]:
    return [
        Line2D(
            [],
            [],
            color=look.color,
            linestyle=look.line,
            linewidth=1.8,
            marker=look.marker if markers else None,
        )
        for look in looks
    ]


def _kind_looks(num_kinds: int, *, num_runs: int) -> list[_Look]:
    """Looks of a legend that tells quantities apart; grey where colours stand for runs."""
    looks = [_look(0, kind, num_runs=num_runs) for kind in range(num_kinds)]
    return looks if num_runs == 1 else [dataclasses.replace(k, color="#555555") for k in looks]


def _nothing(ax: Axes) -> None:
    ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", va="center", color="#999999")


def _row_panel(
    ax: Axes,
    runs: Mapping[str, Run],
    title: str,
    kinds: Mapping[str, str],
    *,
    percent: bool = False,
    log: bool = False,
) -> None:
    """Draws the quantities `kinds` (legend text -> row key) of all runs over the steps."""
    ax.set_title(title)
    drawn: list[str] = []
    positive = False
    for kind_index, (kind, key) in enumerate(kinds.items()):
        for run_index, run in enumerate(runs.values()):
            values = column(run.rows, key)
            if not np.isfinite(values).any():
                continue
            look = _look(run_index, kind_index, num_runs=len(runs))
            _draw_noisy(ax, column(run.rows, "step"), values, look)
            drawn.append(kind)
            positive = positive or bool(np.nanmax(values) > 0)
    if not drawn:
        _nothing(ax)
        return
    if percent:
        ax.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    if log and positive:
        ax.set_yscale("log", nonpositive="mask")
    if len(kinds) > 1:
        looks = _kind_looks(len(kinds), num_runs=len(runs))
        shown = [(kind, look) for kind, look in zip(kinds, looks, strict=True) if kind in drawn]
        ax.legend(
            _line_handles([look for _, look in shown], markers=False),
            [kind for kind, _ in shown],
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),  # beside the title
            borderaxespad=0.1,
            ncols=len(shown),
            columnspacing=1.2,
            handlelength=2.2,
        )


def _mean_curves(runs: Mapping[str, Run]) -> list[tuple[str, str]]:
    """The (set, mean@k) pairs of all runs, in order of first appearance."""
    pairs = (pair for run in runs.values() for pair in run.evaluations)
    return list(dict.fromkeys(pair for pair in pairs if pair[1].startswith("mean@")))


def _accuracy_panel(ax: Axes, runs: Mapping[str, Run]) -> None:
    ax.set_title("accuracy in training and evaluations")
    pairs = _mean_curves(runs)
    any_training = False
    for run_index, run in enumerate(runs.values()):
        values = column(run.rows, "accuracy/mean")
        if np.isfinite(values).any():
            any_training = True
            look = _look(run_index, 0, num_runs=len(runs))
            _draw_noisy(ax, column(run.rows, "step"), values, look)
        for kind_index, pair in enumerate(pairs, start=1):
            curve = run.evaluations.get(pair, {})
            look = _look(run_index, kind_index, num_runs=len(runs))
            _draw_evaluation(ax, list(curve), list(curve.values()), look)
    if not any_training and not pairs:
        _nothing(ax)
        return
    ax.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    looks = _kind_looks(1 + len(pairs), num_runs=len(runs))
    names = ["training", *(f"{name} {metric}" for name, metric in pairs)]
    looks[0] = dataclasses.replace(looks[0], marker="")
    handles = _line_handles(looks, markers=True)
    ax.legend(handles, [_label(name) for name in names], loc="best", handlelength=2.6)


def _phase_seconds(rows: Sequence[Mapping]) -> dict[str, np.ndarray]:
    """Phase -> seconds a row; 'other' is what the total has beyond the phases."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("seconds/"))
    names = [key.removeprefix("seconds/") for key in keys if key != "seconds/total"]
    names.sort(key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES))
    phases = {name: np.nan_to_num(column(rows, f"seconds/{name}")) for name in names}
    spent = sum(phases.values(), start=np.zeros(len(rows)))
    other = np.nan_to_num(column(rows, "seconds/total") - spent)
    return {**phases, "other": np.maximum(other, 0.0)}


def _seconds_panel(ax: Axes, runs: Mapping[str, Run]) -> None:
    """Stacked seconds over the steps for one run; a stacked bar of means each for several."""
    ax.set_title("seconds a step" if len(runs) == 1 else "seconds a step, mean by phase")
    by_run = {label: _phase_seconds(run.rows) for label, run in runs.items()}
    if not any(values.any() for phases in by_run.values() for values in phases.values()):
        _nothing(ax)
        return
    names = list(dict.fromkeys(name for phases in by_run.values() for name in phases))
    names.sort(key="other".__eq__)
    color = {name: _COLORS[index % len(_COLORS)] for index, name in enumerate(names)}
    color["other"] = "#bbbbbb"
    if len(runs) == 1:
        (run,), (phases,) = runs.values(), by_run.values()
        edges = np.append(column(run.rows, "step"), run.rows[-1]["step"] + 1)
        bottom = np.zeros(len(run.rows))
        for name, values in phases.items():
            top = bottom + values
            ax.stairs(top, edges, baseline=bottom, fill=True, color=color[name], label=name)
            bottom = top
        # One slow step, a compilation for instance, would flatten all the others.
        limit = min(bottom.max(), 1.5 * np.quantile(bottom, 0.95))
        if limit < bottom.max():
            slowest = run.rows[int(bottom.argmax())]["step"]
            ax.set_title(f"seconds a step (cut off: {bottom.max():.0f} s at step {slowest})")
        ax.set_ylim(0, limit * 1.25)
    else:
        for position, phases in enumerate(by_run.values()):
            left = 0.0
            for name in names:
                mean = float(phases[name].mean()) if name in phases else 0.0
                ax.barh(
                    position,
                    mean,
                    left=left,
                    height=0.5,
                    color=color[name],
                    label=name if position == 0 else None,
                )
                left += mean
        for position, label in enumerate(runs):
            ax.text(0, position - 0.3, _label(label), va="bottom", fontsize=9.5)
        ax.set_yticks([])
        ax.set_ylim(len(runs) - 0.4, -0.45 - 0.35 * len(runs))  # room for the legend
        ax.set_xlabel("seconds")
        ax.grid(axis="y", visible=False)
    ax.legend(loc="upper right", ncols=3, columnspacing=1.0, handlelength=1.2)


def _figure(runs: Mapping[str, Run], *, height_inches: float, title: str) -> Figure:
    """An empty figure 1600 pixels wide; its title stands over the runs' colours, if several."""
    figure = Figure(figsize=(16, height_inches), dpi=100, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    if len(runs) == 1:
        figure.suptitle(title, x=0.012, ha="left", fontsize=15, fontweight="bold", parse_math=False)
        return figure
    colors = [_look(index, 0, num_runs=len(runs)).color for index in range(len(runs))]
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
    return figure


def _save(figure: Figure, path: str | pathlib.Path) -> None:
    with atomic_file(path) as file:
        figure.savefig(file, format="png")


def _title(runs: Mapping[str, Run]) -> str:
    return shorten_middle(next(iter(runs)), limit=100) if len(runs) == 1 else f"{len(runs)} runs"


def plot_curves(runs: Mapping[str, Run], path: str | pathlib.Path) -> None:
    """Draws a run, or several over each other, as twelve panels in one PNG 1600 pixels wide.

    Thin lines are single steps, thick ones centred rolling means (runs of SMOOTHED_ROWS rows or
    more). Missing keys leave a panel with "no data".
    """
    with matplotlib.rc_context(_STYLE):
        figure = _figure(runs, height_inches=18, title=_title(runs))
        axes = list(figure.subplots(4, 3).flat)
        panels: list[Callable[[Axes], None]] = [
            lambda ax: _row_panel(ax, runs, "mean reward", {"reward": "reward/mean"}),
            lambda ax: _accuracy_panel(ax, runs),
            lambda ax: _row_panel(
                ax,
                runs,
                "groups",
                {
                    "informative": "groups/informative",
                    "all correct": "groups/all_correct",
                    "all wrong": "groups/all_wrong",
                },
            ),
            lambda ax: _row_panel(
                ax, runs, "mean response length, tokens", {"mean": "response_tokens/mean"}
            ),
            lambda ax: _row_panel(
                ax,
                runs,
                "truncated responses",
                {"truncated": "response_tokens/truncated_fraction"},
                percent=True,
            ),
            lambda ax: _seconds_panel(ax, runs),
            lambda ax: _row_panel(ax, runs, "policy entropy, nats", {"entropy": "entropy"}),
            lambda ax: _row_panel(
                ax, runs, "mean probability of sampled tokens", {"probability": "mean_prob"}
            ),
            lambda ax: _row_panel(
                ax,
                runs,
                "tokens / s",
                {
                    "rollout": "tokens_per_second/rollout",
                    "update": "tokens_per_second/update",
                    "step": "tokens_per_second/step",
                },
            ),
            lambda ax: _row_panel(
                ax,
                runs,
                "clipped tokens",
                {
                    "high": "clip_fraction/high",
                    "low": "clip_fraction/low",
                    "dual": "clip_fraction/dual",
                },
                percent=True,
            ),
            lambda ax: _row_panel(ax, runs, "gradient norm before clipping", {"norm": "grad_norm"}),
            lambda ax: _row_panel(
                ax,
                runs,
                "sampler/learner gap, mean |ratio - 1|",
                {"gap": "ratio_gap"},
                log=True,
            ),
        ]
        for ax, draw in zip(axes, panels, strict=True):
            draw(ax)
        for ax in axes:
            if ax.get_xlabel() == "":
                ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        for ax in axes[-3:]:
            ax.set_xlabel("finished rollout steps")
        _save(figure, path)


def plot_accuracy_vs_tokens(runs: Mapping[str, Run], path: str | pathlib.Path) -> None:
    """Draws training and evaluation accuracy over the tokens sampled for training so far.

    This is the axis on which runs with and without dynamic sampling compare fairly: the groups
    that are sampled and filtered out count.
    """
    pairs = _mean_curves(runs)
    columns = min(3, 1 + len(pairs))
    lines = math.ceil((1 + len(pairs)) / columns)
    with matplotlib.rc_context(_STYLE):
        title = f"accuracy at equal sampling budgets: {_title(runs)}"
        figure = _figure(runs, height_inches=1 + 6 * lines, title=title)
        axes = list(figure.subplots(lines, columns, squeeze=False).flat)
        for ax in axes[1 + len(pairs) :]:
            ax.set_axis_off()
        panels = axes[: 1 + len(pairs)]
        panels[0].set_title("training samples")
        for run_index, run in enumerate(runs.values()):
            look = _look(run_index, 0, num_runs=len(runs))
            known = tokens_before(run.rows)
            tokens = np.array([known.get(row["step"], math.nan) for row in run.rows])
            _draw_noisy(panels[0], tokens, column(run.rows, "accuracy/mean"), look)
        for ax, (name, metric) in zip(panels[1:], pairs, strict=True):
            ax.set_title(f"{name} {metric}", parse_math=False)
            for run_index, run in enumerate(runs.values()):
                curve = run.evaluations.get((name, metric), {})
                known = tokens_before(run.rows)
                tokens = [known.get(step, math.nan) for step in curve]
                look = _look(run_index, 0, num_runs=len(runs))
                _draw_evaluation(ax, tokens, list(curve.values()), look)
        for ax in panels:
            ax.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
            ax.xaxis.set_major_formatter(EngFormatter(sep=" "))
            ax.set_xlabel("tokens sampled for training")
        _save(figure, path)


# The page.

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1640px; margin: 0 auto;
       padding: 24px; }}
h1 {{ font-size: 24px; }} h2 {{ font-size: 19px; margin-top: 36px; }} h3 {{ font-size: 16px; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 3px 12px; text-align: right; border-bottom: 1px solid #e4e4e4;
         white-space: nowrap; }}
th {{ background: #f5f6f8; }} th:first-child, td:first-child {{ text-align: left; }}
td.value {{ white-space: normal; overflow-wrap: anywhere; }}
td.edge, th.edge {{ border-left: 1px solid #ccc; }}
.wide {{ overflow-x: auto; }} .wide table {{ font-size: 12.5px; }}
img {{ max-width: 100%; }} .note {{ color: #666; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def _cell(text: str, *, tag: str = "td", attributes: str = "") -> str:
    return f"<{tag}{attributes}>{html.escape(text)}</{tag}>"


def _table(head_rows: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<tr>{row}</tr>" for row in head_rows)
    body = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return f'<div class="wide"><table><thead>{head}</thead>\n<tbody>{body}</tbody></table></div>'


def _summary_html(runs: Mapping[str, Run]) -> str:
    edge = ' class="edge"'
    run_cells = (_cell(label, tag="th", attributes=f' colspan="3"{edge}') for label in runs)
    columns = "".join(
        _cell("first", tag="th", attributes=edge)
        + _cell("last", tag="th")
        + _cell("best", tag="th")
        for _ in runs
    )
    by_run = [changes(run) for run in runs.values()]
    rows = []
    for name in dict.fromkeys(name for run_changes in by_run for name in run_changes):
        cells = [_cell(name)]
        for run_changes in by_run:
            change = run_changes.get(name)
            if change is None:
                texts = ["-", "-", "-"]
            else:
                best = "-"
                if change.best is not None:
                    best = f"{change.text(change.best)} (step {change.best_step})"
                texts = [change.text(change.first), change.text(change.last), best]
            cells += [_cell(texts[0], attributes=edge), *map(_cell, texts[1:])]
        rows.append(cells)
    totals_by_run = [totals(run) for run in runs.values()]
    for name in dict.fromkeys(name for run_totals in totals_by_run for name in run_totals):
        values = (run_totals.get(name, "-") for run_totals in totals_by_run)
        span = f' colspan="3"{edge}'
        rows.append([_cell(name), *(_cell(value, attributes=span) for value in values)])
    edges = ", ".join(str(averaged_rows(run.rows)) for run in runs.values())
    note = (
        "Evaluations: first and last file, the policy before training being step 0. "
        f"Other quantities: mean over the first and last steps (so many: {edges}); best is "
        "the best single step."
    )
    heads = [_cell("", tag="th") + "".join(run_cells), _cell("", tag="th") + columns]
    return f'{_table(heads, rows)}<p class="note">{html.escape(note)}</p>'


def config_differences(runs: Mapping[str, Run]) -> dict[str, list[str]]:
    """Dotted config keys on which the runs differ -> their values as JSON, '-' where absent."""
    keys = dict.fromkeys(key for run in runs.values() for key in run.config)
    texts = {
        key: [json.dumps(run.config[key]) if key in run.config else "-" for run in runs.values()]
        for key in keys
    }
    return {key: values for key, values in texts.items() if len(set(values)) > 1}


def _config_html(runs: Mapping[str, Run]) -> str:
    differences = config_differences(runs)
    if not differences:
        return "<p>The runs' configs are the same.</p>"
    head = _cell("key", tag="th") + "".join(_cell(label, tag="th") for label in runs)
    value = ' class="value"'
    rows = [
        [_cell(key), *(_cell(text, attributes=value) for text in texts)]
        for key, texts in differences.items()
    ]
    return _table([head], rows)


def thinned(rows: Sequence[Mapping], *, limit: int) -> list[Mapping]:
    """At most `limit` (2 or more) rows at even distances, the first and the last among them."""
    if len(rows) <= limit:
        return list(rows)
    return [rows[index] for index in np.linspace(0, len(rows) - 1, limit).round().astype(int)]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _rows_html(rows: Sequence[Mapping]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(_cell(key, tag="th") for key in keys)
    shown = thinned(rows, limit=TABLE_ROWS)
    table = _table([head], [[_cell(_number(row.get(key))) for key in keys] for row in shown])
    return f'<p class="note">{len(shown)} of {len(rows)} rows</p>{table}'


def _image_html(path: pathlib.Path, *, text: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{data}">'


def labelled(workdirs: Sequence[str | pathlib.Path]) -> dict[str, pathlib.Path]:
    """Distinct folders by name; by whole path where two share a name."""
    folders = list(dict.fromkeys(pathlib.Path(workdir).resolve() for workdir in workdirs))
    names = [folder.name for folder in folders]
    return {
        folder.name if names.count(folder.name) == 1 else str(folder): folder for folder in folders
    }


def write_report(workdirs: Sequence[str | pathlib.Path]) -> pathlib.Path:
    """Writes curves.png, accuracy_vs_tokens.png and report.html into the first folder.

    Returns the path of the page, which needs no other file. Raises as `load_run` does.
    """
    folders = labelled(workdirs)
    runs = {label: load_run(folder) for label, folder in folders.items()}
    target = next(iter(folders.values()))
    plot_curves(runs, target / "curves.png")
    plot_accuracy_vs_tokens(runs, target / "accuracy_vs_tokens.png")
    body = io.StringIO()
    body.write(f"<h2>First against last</h2>{_summary_html(runs)}\n")
    if len(runs) > 1:
        body.write(f"<h2>Config differences</h2>{_config_html(runs)}\n")
    body.write(f"<h2>Curves</h2>{_image_html(target / 'curves.png', text='training curves')}\n")
    tokens_image = _image_html(target / "accuracy_vs_tokens.png", text="accuracy over tokens")
    body.write(f"<h2>Accuracy over sampled tokens</h2>{tokens_image}\n<h2>Rows</h2>\n")
    for label, run in runs.items():
        body.write(f"<h3>{html.escape(label)}</h3>{_rows_html(run.rows)}\n")
    title = html.escape(f"DAPO: {', '.join(runs)}")
    page = target / "report.html"
    with atomic_file(page) as file:
        file.write(_PAGE.format(title=title, body=body.getvalue()).encode())
    return page


def main(argv: Sequence[str]) -> None:
    workdirs = [
        part for value in [*flags.FLAGS.workdir, *argv[1:]] for part in value.split(",") if part
    ]
    try:
        print(write_report(workdirs))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"dapo_jax.report: {error}")


if __name__ == "__main__":
    # Defined here and not at import: train.py imports this module and has a --workdir of its own.
    flags.DEFINE_multi_string(
        "workdir", None, "Folder of a run; repeat it or separate by commas.", required=True
    )
    app.run(main)
