"""Rounded weights and a clipped objective: the table and the figure of what was measured."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from dapo_jax.report.compare import table
from experiments.rounded_weights.measure import AS_IT_IS, OFF, ON, measure
from experiments.study import Measured

TITLE = "Rounded weights and Eq. 8's clip"
TITLES = {"135M": "SmolLM2-135M", "1M": "the 1 M model"}
STARTS = {OFF: "off the grid", ON: "on the grid", AS_IT_IS: AS_IT_IS}
COLORS = {"float32": "C0", "bfloat16": "C3", "dithered": "C1", "two terms": "C2", "float16": "C4"}
COLUMNS = {  # heading -> (what of a row, format); a row without it has "-"
    "moved": (lambda row: row["moved"], "{:.1%}"),
    "mean abs log r": (lambda row: row["mean"], "{:.2g}"),
    "99th percentile": (lambda row: row["p99"], "{:.2g}"),
    "clipped low": (lambda row: row["low"], "{:.2%}"),
    "clipped high": (lambda row: row["high"], "{:.2%}"),
    "formula": (lambda row: row["formula_low"] + row["formula_high"], "{:.2%}"),
    "extra, std": (lambda row: row["extra_std"], "{:.2g}"),
    "formula, std": (lambda row: row["formula_std"], "{:.2g}"),
    "of float32's": (lambda row: row["correlation"] ** 2, "{:.2f}"),
    "unclipped": (lambda row: row["unclipped"], "{:.2%}"),
}


def arms_of(rows: Sequence[dict]) -> dict[tuple, list[dict]]:
    """Groups the rows of all seeds: (model, start, rate, weights, activations) -> rows."""
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        key = (row["model"], row["start"], row["rate"], row["weights"], row["activations"])
        found.setdefault(key, []).append(row)
    return found


def mean(rows: Sequence[dict], of) -> float:
    """Averages over the seeds; NaN where the rows do not have it."""
    try:
        return float(np.mean([of(row) for row in rows]))
    except KeyError:
        return float("nan")


def result(rows: Sequence[dict]) -> str:
    """Tables: a model, a start and a kind of activations each; means over the seeds."""
    lines, arms = [f"# {TITLE}", ""], arms_of(rows)
    seeds = len({row["seed"] for row in rows})
    lines += [
        f"Means over {seeds} seeds. moved: the share of rounded weights that differ behind the "
        "step. formula: what it predicts of clipped tokens, low and high together. extra: log r "
        "less float32's. of float32's: the part of log r's variance that float32's explains. "
        "unclipped: the part of the sum of |weight * advantage| that Eq. 8 lets through.",
    ]
    parts = dict.fromkeys((model, start, acts) for model, start, _, _, acts in arms)
    for model, start, acts in parts:
        lines += ["", f"## {TITLES[model]}, start: {STARTS[start]}, activations {acts}", ""]
        body = []
        for (*where, rate, weights, its), found in arms.items():
            if (*where, its) != (model, start, acts):
                continue
            cells = [mean(found, of) for of, _ in COLUMNS.values()]
            forms = [form for _, form in COLUMNS.values()]
            texts = [
                "-" if np.isnan(cell) else form.format(cell)
                for cell, form in zip(cells, forms, strict=True)
            ]
            body.append([f"{rate:.0e}", weights, *texts])
        lines += table(["learning rate", "weights", *COLUMNS], body)
    return "\n".join([*lines, ""])


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
    def line(axes, grid, weights, of, **how):
        points = {
            rate: mean(found, of)
            for (m, g, rate, w, acts), found in arms.items()
            if (m, g, w, acts) == (model, grid, weights, "float32")
        }
        axes.plot(list(points), list(points.values()), color=COLORS[weights], **how)

    def both(row):
        return row["low"] + row["high"]

    for weights in COLORS:
        line(clip, OFF, weights, both, marker="o", label=weights)
    for weights in ("bfloat16", "float16"):
        formula = COLUMNS["formula"][0]
        line(clip, OFF, weights, formula, ls=":", label=f"{weights}, formula")
        line(extra, OFF, weights, lambda row: row["extra_std"], marker="o", label=weights)
        of_formula = COLUMNS["formula, std"][0]
        line(extra, OFF, weights, of_formula, ls=":", label=f"{weights}, formula")
    for grid, style in ((OFF, "-"), (ON, "--")):
        for weights in ("float32", "bfloat16", "dithered"):
            how = {"ls": style, "marker": "o", "label": f"{weights}, start {grid} the grid"}
            line(start, grid, weights, lambda row: row["mean"], **how)
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


STUDY = Measured(measure=measure, result=result, figure=figure)
