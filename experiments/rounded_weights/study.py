"""Rounded weights and a clipped objective: the table and the figure of what was measured."""

import pathlib
import types
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from experiments.rounded_weights.measure import AS_IT_IS, OFF, ON, SPLIT_RATE, measure
from experiments.study import read_lines, table, write_lines

TITLE = "Rounded weights and Eq. 8's clip"
TITLES = {"135M": "SmolLM2-135M", "1M": "the 1 M model"}
STARTS = {OFF: "off the grid", ON: "on the grid", AS_IT_IS: AS_IT_IS}
COLORS = {"float32": "C0", "bfloat16": "C3", "dithered": "C1", "two terms": "C2", "float16": "C4"}
COLUMNS = {  # heading -> (key of a row, format); a row without it has "-"
    "moved": ("moved", "{:.1%}"),
    "mean abs log r": ("mean", "{:.2g}"),
    "clipped low": ("low", "{:.2%}"),
    "clipped high": ("high", "{:.2%}"),
    "extra": ("extra_std", "{:.2g}"),
    "formula": ("formula_std", "{:.2g}"),
}


def arms_of(rows: Sequence[dict]) -> dict[tuple, list[dict]]:
    """Groups the rows of all seeds: (model, start, rate, weights, activations) -> rows."""
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        key = (row["model"], row["start"], row["rate"], row["weights"], row["activations"])
        found.setdefault(key, []).append(row)
    return found


def mean(rows: Sequence[dict], *keys: str) -> float:
    """Averages the sum of these keys over the seeds; NaN where no row has them."""
    if not set(keys) <= set(rows[0]):
        return float("nan")
    return float(np.mean([sum(row[key] for key in keys) for row in rows]))


def result(rows: Sequence[dict]) -> str:
    """A table of means over the seeds, of all arms at one rate; the figure has the other rates."""
    cells = [
        [TITLES[model], STARTS[start], weights, activations]
        + [
            "-" if np.isnan(found := mean(of_arm, key)) else form.format(found)
            for key, form in COLUMNS.values()
        ]
        for (model, start, rate, weights, activations), of_arm in arms_of(rows).items()
        if rate == SPLIT_RATE
    ]
    seeds = len({row["seed"] for row in rows})
    lines = [
        f"# {TITLE}",
        "",
        f"Means over {seeds} seeds. moved: the share of rounded weights that differ behind the "
        "step. extra: the standard deviation of log r less float32's; formula: what it predicts "
        "of that. rows.jsonl has the rest.",
        "",
        f"At a learning rate of {SPLIT_RATE:.0e}:",
        "",
        *table(["model", "start", "weights", "activations", *COLUMNS], cells),
        "",
    ]
    return "\n".join(lines)


def figure(rows: Sequence[dict]) -> Figure:
    """Clipped tokens, what rounding adds, and |log r| by start, over the learning rate.

    A model has a row.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    drawn = Figure(figsize=(13, 4.2 * len(models)), layout="constrained")
    for model, axes in zip(models, drawn.subplots(len(models), 3, squeeze=False), strict=True):
        _draw(model, arms_of(rows), *axes)
    drawn.suptitle(TITLE)
    return drawn


def _draw(model: str, arms, clip, extra, start) -> None:
    def line(axes, grid, weights, *keys, **how):
        points = {
            rate: mean(found, *keys)
            for (m, g, rate, w, acts), found in arms.items()
            if (m, g, w, acts) == (model, grid, weights, "float32")
        }
        axes.plot(list(points), list(points.values()), color=COLORS[weights], **how)

    for weights in COLORS:
        line(clip, OFF, weights, "low", "high", marker="o", label=weights)
    for weights in ("bfloat16", "float16"):
        line(extra, OFF, weights, "extra_std", marker="o", label=weights)
        line(extra, OFF, weights, "formula_std", ls=":", label=f"{weights}, formula")
    for grid, style in ((OFF, "-"), (ON, "--")):
        for weights in ("float32", "bfloat16", "dithered"):
            how = {"ls": style, "marker": "o", "label": f"{weights}, start {grid} the grid"}
            line(start, grid, weights, "mean", **how)
    titles = {
        clip: f"{TITLES[model]}: tokens that Eq. 8 clips",
        extra: "what rounding adds to log r, std",
        start: "mean |log r|, by where the start lies",
    }
    for axes, title in titles.items():
        axes.set(title=title, xlabel="learning rate", xscale="log")
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    clip.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    extra.set_yscale("log")
    start.set_yscale("log")


def read(folder: pathlib.Path, made: pathlib.Path | None, seeds: Sequence[int]):
    """Returns (the text, the figure); measures these seeds first where `made` is a folder."""
    file = folder / "rows.jsonl"
    if made:
        kept = [row for row in read_lines(file) if row["seed"] not in seeds]
        rows = kept + measure(made, seeds)
        write_lines(file, sorted(rows, key=lambda row: row["seed"]))
    rows = read_lines(file)
    return result(rows), figure(rows)


STUDY = types.SimpleNamespace(seeds=(0, 1, 2), read=read)
