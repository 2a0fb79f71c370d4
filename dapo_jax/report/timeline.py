"""The slots of one step over time: where the device worked, and where it waited."""

import pathlib
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from dapo_jax.report import plots
from dapo_jax.types import BlockRecord

SHOWN_SLOTS = 256  # the first ones, of a larger engine
COLORS = matplotlib.colormaps["tab20"].colors


def stays(blocks: Sequence[BlockRecord]) -> list[tuple[int, float, float, int]]:
    """Lists (slot, start, end, cursor) of every stay of a request in a slot, in seconds.

    A stay ends inside its last block where the response did: a share of the block's steps.
    """
    zero = blocks[0].start_seconds
    ended, open_stays = [], {}
    for block in blocks:
        start, end = block.start_seconds - zero, block.end_seconds - zero
        taken = np.flatnonzero(block.cursor_B >= 0)
        for slot in taken.tolist():
            request = tuple(
                int(name_B[slot]) for name_B in (block.cursor_B, block.sample_B, block.stream_B)
            )
            stop = start + (end - start) * int(block.useful_B[slot]) / block.steps
            if slot in open_stays and open_stays[slot][0] == request:
                open_stays[slot][2] = stop
            else:
                if slot in open_stays:
                    ended.append((slot, open_stays[slot]))
                open_stays[slot] = [request, start, stop]
        for slot in set(open_stays) - set(taken.tolist()):
            ended.append((slot, open_stays.pop(slot)))
    ended += list(open_stays.items())
    return [(slot, start, stop, request[0]) for slot, (request, start, stop) in ended]


def plot_timeline(blocks: Sequence[BlockRecord], path: str | pathlib.Path) -> None:
    """Plots the slots of one step as a PNG: a bar a response, coloured by prompt; white is idle.

    Below it, the share of slots that sample useful tokens, and of cache pages in use.
    """
    if not blocks:
        raise ValueError("there is no block of decode steps to plot")
    num_slots = min(len(blocks[0].cursor_B), SHOWN_SLOTS)
    bars, colors = [], []
    for slot, start, stop, cursor in stays(blocks):
        if slot < num_slots:
            low, high = slot + 0.08, slot + 0.92
            bars.append([(start, low), (start, high), (stop, high), (stop, low)])
            colors.append(COLORS[cursor % len(COLORS)])
    zero = blocks[0].start_seconds
    edge_seconds = [block.start_seconds - zero for block in blocks]
    last_seconds = blocks[-1].end_seconds - zero
    busy = [block.useful_B.sum() / (block.steps * len(block.useful_B)) for block in blocks]
    steps = sum(block.steps for block in blocks)
    mean = sum(int(block.useful_B.sum()) for block in blocks) / (steps * len(blocks[0].useful_B))

    figure = Figure(figsize=(11, 6.5), dpi=130, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    top.add_collection(PolyCollection(bars, facecolors=colors, edgecolors="none"))
    top.set(ylim=(num_slots, 0), ylabel="slot", xlim=(0, last_seconds))
    top.set_title(
        f"{len(bars)} responses in {num_slots} slots: {mean:.0%} of slot-steps sample a token of "
        "one; white is idle",
        loc="left",
    )
    bottom.stairs(busy, [*edge_seconds, last_seconds], label="slots at work", color="#1f5fa8")
    cache = [block.cache_use for block in blocks]
    bottom.stairs(cache, [*edge_seconds, last_seconds], label="cache pages taken", color="#c4622d")
    queued = [seconds for seconds, block in zip(edge_seconds, blocks, strict=True) if block.waiting]
    if queued:
        for ax in (top, bottom):
            ax.axvline(queued[-1], color="black", linewidth=0.8, linestyle=":")
        bottom.annotate(
            "queue empty", (queued[-1], 0.05), xytext=(4, 0), textcoords="offset points"
        )
    bottom.set(ylim=(0, 1.05), xlabel="seconds", ylabel="share")
    bottom.legend(loc="lower left", frameon=False)
    for ax in (top, bottom):
        ax.spines[["top", "right"]].set_visible(False)
    plots.save(figure, path)
