"""Shows findings: as lines for a person, as JSON, as a chart, and as a row of a table."""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from matplotlib.figure import Figure

from dapo_jax.preflight import rollouts, simulate
from dapo_jax.preflight.chips import GIB
from dapo_jax.preflight.examine import PARTS, Findings
from dapo_jax.preflight.hlo_cost import Cost

TABLE_HEADER = (
    *("chips", "GiB sampling and update", "free", "mean tokens", "minutes: rollout", "update"),
    *("evaluation", "tokens/s", "MFU of update", "run: hours; chip-hours", "preflight s"),
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
        *assumed_lines(),
    ]


def choice_lines(candidates: Mapping[str, Findings], taken: str) -> list[str]:
    """What each set of settings would take, and which is shown below."""
    out = []
    for name, found in candidates.items():
        minutes = between([step.total / 60 for step in found.steps], ".1f")
        free = f"{found.headroom:.0%} free" if found.headroom >= 0 else "does not fit"
        out.append(f"{name}: {minutes} minutes a step, {free}")
    return [*out, f"the faster: {taken}", ""]


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


def assumed_lines() -> list[str]:
    """What both ends of the range assume."""
    fast, slow = (dataclasses.asdict(a) for a in simulate.ENDS)
    names = {"rings": {"sum": "all axes at once", "min": "one axis"}}
    ends = {
        key: [names.get(key, {}).get(getattr(v, "__name__", ""), v) for v in (fast[key], slow[key])]
        for key in fast
    }
    return [
        "assumed, fast to slow: "
        + "; ".join(f"{key} {low} to {high}" for key, (low, high) in ends.items()),
        f"and {1e6 * simulate.COLLECTIVE_SECONDS:.0f} us a collective, log-normal lengths (sigma "
        f"{rollouts.SIGMA_PROBLEMS} between, {rollouts.SIGMA_SAMPLES} within problems), "
        f"{simulate.PROBLEMS_A_SET} problems an evaluation set. No TPU has confirmed them. The "
        "verifier is not counted; steps are simulated without carry-over",
    ]


def cost_lines(found: Findings) -> list[str]:
    """A table of each program's cost, and of one turn of its loop where it has one."""
    out = [
        f"{'a device, once':26}{'core s':>10}{'copied GB':>12}{'exchanged GB':>14}"
        f"{'times':>8}{'exchange s':>18}{'all s':>18}"
    ]
    for name, program in found.programs.items():
        out += one_cost(name, program.fixed, found)
        if program.turn.cycles:
            out += one_cost(f"  a turn of {name}", program.turn, found)
        if program.plain_turn != program.turn:
            out += one_cost("    not truncating", program.plain_turn, found)
    return [*out, "all s: without attention's kernels"]


def one_cost(label: str, cost: Cost, found: Findings) -> list[str]:
    """A line of numbers, and one with the kinds of collectives where there are any."""
    kinds = collections.Counter()
    for c in cost.collectives:
        kinds[c.kind if c.groups else f"{c.kind} between slices"] += c.bytes * c.times
    ends = simulate.ENDS
    exchange = [sum(found.slice.exchange_seconds(c, a) for c in cost.collectives) for a in ends]
    out = [
        f"{label:26}{cost.cycles / found.chip.clock:10.4f}{cost.copied_bytes / 1e9:12.3f}"
        f"{sum(kinds.values()) / 1e9:14.3f}{sum(c.times for c in cost.collectives):8.0f}"
        f"{between(exchange, '.4f'):>18}"
        f"{between([found.slice.seconds(cost, a) for a in ends], '.4f'):>18}"
    ]
    if kinds:
        parts = (f"{kind} {size / 1e9:.3f} GB" for kind, size in kinds.items())
        out.append(f"{'':28}{', '.join(parts)}")
    return out


def between(ends: Sequence[float], form: str) -> str:
    """Both ends of a range, "8.1 to 13.2"; one where they are printed alike."""
    low, high = (f"{value:{form}}" for value in sorted(ends))
    return low if low == high else f"{low} to {high}"


def of_steps(found: Findings, name: str, form: str, *, unit: float = 1.0) -> str:
    """A field of the simulated steps as a range."""
    return between([getattr(step, name) / unit for step in found.steps], form)


def step_lines(found: Findings) -> list[str]:
    """The simulated step, and the run that is made of such steps."""
    step = found.steps[0]
    rates = [step.sampled_tokens / step.total for step in found.steps]
    hours = found.run_hours
    return [
        f"a simulated step, responses of {step.mean_response_tokens:,} tokens (mean), seconds:",
        f"  rollout {of_steps(found, 'rollout', '.0f')} + prefill "
        f"{of_steps(found, 'prefill', '.1f')} (occupancy {of_steps(found, 'occupancy', '.0%')}, "
        f"{of_steps(found, 'blocks', ',.0f')} blocks), update {of_steps(found, 'update', '.0f')} "
        f"({of_steps(found, 'micro_batches', '.0f')} micro-batches, MFU "
        f"{of_steps(found, 'mfu_of_update', '.0%')}), reshard {of_steps(found, 'reshard', '.2f')} "
        f"({found.reshard_bytes / 1e9:.1f} GB to a device), its share of evaluations "
        f"{of_steps(found, 'evaluation', '.0f')}, of saves {of_steps(found, 'save', '.1f')}",
        f"  {of_steps(found, 'total', '.1f', unit=60)} minutes; {between(rates, ',.0f')} sampled "
        "tokens a second",
        f"a run of {found.num_steps} steps: {between(hours, '.0f')} hours, "
        f"{between([h * found.chips for h in hours], ',.0f')} chip-hours (responses grow as the "
        f"paper's did, to {found.runs[0][-1].mean_response_tokens:,} tokens)",
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
    for row, step in zip(("fast", "slow"), found.steps, strict=True):
        start = 0.0
        for n, name in enumerate(simulate.STEP_PARTS):
            seconds = getattr(step, name)
            label = name if row == "fast" else None
            times.barh([row], [seconds / 60], left=[start / 60], color=f"C{n}", label=label)
            start += seconds
    tokens = found.steps[0].mean_response_tokens
    times.set_xlabel(f"minutes, simulated, at {tokens:,} tokens a response")
    times.set_xlim(0, 1.3 * start / 60)
    times.invert_yaxis()
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
        "steps": [
            dataclasses.asdict(step) | {"total": step.total, "mfu_of_update": step.mfu_of_update}
            for step in found.steps
        ],
        "run_hours": found.run_hours,
        "chip_hours": [hours * found.chips for hours in found.run_hours],
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
    steps = found["steps"]
    phases = {name: sum(parts.values()) for name, parts in found["phases"].items()}
    sampling = max(size for name, size in phases.items() if name != "update")

    def both(value, form: str) -> str:
        return between([value(step) for step in steps], form)

    return [
        f"{found['chips']}, TP {found['mesh']['model']}",
        f"{sampling / GIB:.1f} and {phases['update'] / GIB:.1f} of {found['hbm_bytes'] / GIB:.1f}",
        f"{found['headroom']:.0%}",
        f"{steps[0]['mean_response_tokens']:,}",
        both(lambda step: (step["rollout"] + step["prefill"]) / 60, ".1f"),
        both(lambda step: step["update"] / 60, ".1f"),
        both(lambda step: step["evaluation"] / 60, ".1f"),
        both(lambda step: step["sampled_tokens"] / step["total"], ",.0f"),
        both(lambda step: step["mfu_of_update"], ".0%"),
        f"{between(found['run_hours'], '.0f')}; {between(found['chip_hours'], ',.0f')}",
        f"{found['seconds']:.0f}",
    ]
