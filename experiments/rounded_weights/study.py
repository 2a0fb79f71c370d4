"""Rounded weights and a clipped objective: the table and the figure of what was measured."""

import json
import pathlib
import types
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from dapo_jax.logs.files import json_line, write_file
from experiments.rounded_weights.measure import AS_IT_IS, OFF, ON, SPLIT_RATE, measure
from experiments.study import table

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


def result(rows: pd.DataFrame) -> str:
    """A table of means over the seeds, of all arms at one rate; the figure has the other rates."""
    keys = [key for key, _ in COLUMNS.values()]
    arms = ["model", "start", "weights", "activations"]
    means = rows[rows["rate"] == SPLIT_RATE].groupby(arms, sort=False)[keys].mean()
    forms = dict(COLUMNS.values())
    cells = [
        [TITLES[model], STARTS[start], weights, activations]
        + ["-" if np.isnan(it) else forms[key].format(it) for key, it in row.items()]
        for (model, start, weights, activations), row in means.iterrows()
    ]
    lines = [
        f"# {TITLE}",
        "",
        f"Means over {rows['seed'].nunique()} seeds. moved: the share of rounded weights that "
        "differ behind the step. extra: the standard deviation of log r less float32's; formula: "
        "what it predicts of that. rows.jsonl has the rest.",
        "",
        f"At a learning rate of {SPLIT_RATE:.0e}:",
        "",
        *table(["model", "start", "weights", "activations", *COLUMNS], cells),
        "",
    ]
    return "\n".join(lines)


def figure(rows: pd.DataFrame) -> Figure:
    """Clipped tokens, what rounding adds, and |log r| by start, over the learning rate.

    A model has a row.
    """
    of_model = rows[rows["activations"] == "float32"].groupby("model", sort=False)
    drawn = Figure(figsize=(13, 4.2 * len(of_model)), layout="constrained")
    panels = drawn.subplots(len(of_model), 3, squeeze=False)
    for (model, of_one), axes in zip(of_model, panels, strict=True):
        means = of_one.groupby(["start", "weights", "rate"]).mean(numeric_only=True)
        _draw(model, means.assign(clipped=means["low"] + means["high"]), *axes)
    drawn.suptitle(TITLE)
    return drawn


def _draw(model: str, means: pd.DataFrame, clip, extra, start) -> None:
    def line(axes, grid, weights, key, **how):
        axes.plot(means.loc[(grid, weights), key], color=COLORS[weights], **how)

    for weights in COLORS:
        line(clip, OFF, weights, "clipped", marker="o", label=weights)
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
        kept = [row for row in map(json.loads, file.open()) if row["seed"] not in seeds]
        rows = sorted(kept + measure(made, seeds), key=lambda row: row["seed"])
        write_file(file, b"".join(map(json_line, rows)))
    rows = pd.read_json(file, lines=True, precise_float=True)
    return result(rows), figure(rows)


STUDY = types.SimpleNamespace(seeds=(0, 1, 2), read=read)
