"""Shows findings: as lines for a person, as JSON, as a chart, and as a row of a table."""

import collections
import dataclasses
import json
import pathlib

import jax
import numpy as np
from matplotlib.figure import Figure

from dapo_jax.preflight import simulate
from dapo_jax.preflight.chips import GIB
from dapo_jax.preflight.examine import PARTS, Findings
from dapo_jax.preflight.hlo_cost import Cost

TABLE_HEADER = (
    *("chips", "GiB sampling and update", "free", "mean tokens", "rollout + update, minutes"),
    *("tokens/s", "MFU of update", "run: hours; chip-hours", "preflight s"),
)


def lines(found: Findings) -> list[str]:
    """The findings for a person."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in found.mesh.items())
    return [
        f"{found.recipe} on {found.where}: {found.chips} chips, mesh {mesh}",
        f"a data shard has {found.slots} slots and {found.pages} pages",
        "",
        *memory_lines(found),
        "",
        *cost_lines(found),
        "",
        *step_lines(found),
        "",
        "assumed: "
        f"{simulate.PRODUCTS_REACH:.0%} of the published FLOP/s, {simulate.MEMORY_REACHES:.0%} of "
        f"the memory's rate, {simulate.LINKS_REACH:.0%} of the links' (rings over one axis of the "
        f"torus), {1e3 * simulate.HOST_SECONDS_A_BLOCK:.0f} ms of the host a block, "
        f"{simulate.INFORMATIVE:.0%} of the groups informative, log-normal lengths (sigma "
        f"{simulate.SIGMA_PROBLEMS} between, {simulate.SIGMA_SAMPLES} within problems). No TPU "
        "has confirmed them. Evaluations, saves and the verifier are not counted",
    ]


def memory_lines(found: Findings) -> list[str]:
    """A table of the memory of each phase, and what is free in the fullest."""
    out = [
        f"{'GiB a device':22}" + "".join(f"{name:>{len(name) + 3}}" for name in PARTS) + "   in all"
    ]
    for phase in found.phases:
        sizes = (f"{phase.parts.get(name, 0) / GIB:{len(name) + 3}.2f}" for name in PARTS)
        out.append(f"{phase.name:22}{''.join(sizes)}{phase.total / GIB:9.2f}")
    hbm_gib = found.chip.hbm_bytes / GIB
    return [*out, f"of {hbm_gib:.2f} GiB: {found.headroom:.1%} free in {found.fullest.name}"]


def cost_lines(found: Findings) -> list[str]:
    """A table of each program's cost, and of one turn of its loop where it has one."""
    out = [
        f"{'a device, once':22}{'TFLOP':>12}{'GB memory':>12}{'GB exchanged':>14}"
        f"{'products s':>12}{'memory s':>12}{'exchange s':>12}"
    ]
    for name, program in found.programs.items():
        out += one_cost(name, program.fixed, found)
        if program.turn.flops:
            out += one_cost(f"  a turn of {name}", program.turn, found)
    return out


def one_cost(label: str, cost: Cost, found: Findings) -> list[str]:
    """A line of numbers, and one with the kinds of collectives where there are any."""
    least = simulate.seconds(cost, found.chip)
    kinds = collections.Counter()
    for c in cost.collectives:
        kinds[c.kind if c.groups else f"{c.kind} between slices"] += c.bytes * c.times
    out = [
        f"{label:22}{cost.flops / 1e12:12.3f}{cost.hbm_bytes / 1e9:12.3f}"
        f"{sum(kinds.values()) / 1e9:14.3f}"
        f"{least.products:12.4f}{least.memory:12.4f}{least.exchange:12.4f}"
    ]
    if kinds:
        parts = (f"{kind} {size / 1e9:.3f} GB" for kind, size in kinds.items())
        out.append(f"{'':24}{', '.join(parts)}")
    return out


def step_lines(found: Findings) -> list[str]:
    """The simulated step, and the run that is made of such steps."""
    step = found.step
    return [
        f"a simulated step, responses of {step.mean_response_tokens:,} tokens in the mean:",
        f"  rollout {step.rollout:.0f} s + prefill {step.prefill:.1f} s (occupancy "
        f"{step.occupancy:.0%}, {step.blocks:,} blocks), update {step.update:.0f} s "
        f"({step.micro_batches} micro-batches, MFU {step.mfu_of_update:.0%}), reshard "
        f"{step.reshard:.2f} s ({found.reshard_bytes / 1e9:.1f} GB to a device)",
        f"  {step.total / 60:.1f} minutes; {step.sampled_tokens / step.total:,.0f} sampled tokens "
        f"a second, {step.sampled_tokens / step.rollout:,.0f} in the rollout",
        f"a run of {found.num_steps} steps: {found.run_hours:.0f} hours, "
        f"{found.run_hours * found.chips:,.0f} chip-hours (responses grow as the paper's did, to "
        f"{found.run[-1].mean_response_tokens:,} tokens)",
    ]


def plot(found: Findings, path: pathlib.Path) -> None:
    """Draws the memory of every phase, and where a step's time goes, as bars."""
    figure = Figure(figsize=(9, 6), layout="tight")
    memory, times = figure.subplots(2, 1, height_ratios=(3, 1))
    names = [phase.name for phase in found.phases]
    left = np.zeros(len(names))
    for part in PARTS:
        size = np.array([phase.parts.get(part, 0) / GIB for phase in found.phases])
        if size.any():
            memory.barh(names, size, left=left, label=part)
            left += size
    hbm_gib = found.chip.hbm_bytes / GIB
    memory.axvline(hbm_gib, color="black", linestyle="--")
    memory.set_xlabel(f"GiB a device; dashed: the {hbm_gib:g} that there are")
    memory.invert_yaxis()
    memory.set_xlim(0, 1.3 * hbm_gib)
    memory.legend(loc="lower right", fontsize="small")
    memory.set_title(f"{found.recipe} on {found.where}")
    step, start = found.step, 0.0
    for name in ("prefill", "rollout", "reshard", "update"):
        seconds = getattr(step, name)
        times.barh(["one step"], [seconds / 60], left=[start / 60], label=name)
        start += seconds
    times.set_xlabel(f"minutes, simulated, at {step.mean_response_tokens:,} tokens a response")
    times.set_xlim(0, 1.3 * start / 60)
    times.legend(loc="center right", fontsize="small")
    figure.savefig(path, dpi=110)


def as_json(found: Findings) -> dict:
    """The findings for a program."""
    return {
        "recipe": found.recipe,
        "topology": found.where,
        "chips": found.chips,
        "mesh": found.mesh,
        "slots_a_shard": found.slots,
        "hbm_bytes": found.chip.hbm_bytes,
        "headroom": found.headroom,
        "phases": {phase.name: phase.parts for phase in found.phases},
        "programs": {name: dataclasses.asdict(program) for name, program in found.programs.items()},
        "step": dataclasses.asdict(found.step)
        | {"total": found.step.total, "mfu_of_update": found.step.mfu_of_update},
        "run_hours": found.run_hours,
        "chip_hours": found.run_hours * found.chips,
        "seconds": found.seconds,
        "jax": jax.__version__,
    }


def write_json(found: Findings, path: pathlib.Path) -> None:
    """Writes the findings to a file."""
    path.write_text(json.dumps(as_json(found), indent=1) + "\n")


def table_row(found: dict | None) -> list[str]:
    """The cells under TABLE_HEADER for findings that were written as JSON; None: no findings."""
    if found is None:
        return ["does not compile", *[""] * (len(TABLE_HEADER) - 1)]
    step = found["step"]
    phases = {name: sum(parts.values()) for name, parts in found["phases"].items()}
    sampling = max(size for name, size in phases.items() if name != "update")
    return [
        f"{found['chips']}, TP {found['mesh']['model']}",
        f"{sampling / GIB:.1f} and {phases['update'] / GIB:.1f} of {found['hbm_bytes'] / GIB:.1f}",
        f"{found['headroom']:.0%}",
        f"{step['mean_response_tokens']:,}",
        f"{(step['rollout'] + step['prefill']) / 60:.1f} + {step['update'] / 60:.1f}",
        f"{step['sampled_tokens'] / step['total']:,.0f}",
        f"{step['mfu_of_update']:.0%}",
        f"{found['run_hours']:.0f}; {found['chip_hours']:,.0f}",
        f"{found['seconds']:.0f}",
    ]
