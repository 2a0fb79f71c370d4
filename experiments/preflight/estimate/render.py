"""Shows an estimate: as lines for a person, as JSON, as a chart, and as a row of a table."""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from matplotlib.figure import Figure

from dapo_jax.preflight import render as memory
from dapo_jax.preflight.chips import GIB
from dapo_jax.preflight.examine import PARTS
from experiments.preflight.estimate import rollouts, simulate
from experiments.preflight.estimate.hlo_cost import Cost
from experiments.preflight.estimate.ranges import Estimate

TABLE_HEADER = (
    *("chips", "GiB sampling and update", "free", "mean tokens", "minutes: rollout", "update"),
    *("evaluation", "tokens/s", "MFU of update", "run: hours; chip-hours", "preflight s"),
)


def lines(estimated: Estimate) -> list[str]:
    """Returns the memory, the costs, the times and the assumptions for a person."""
    return [
        *memory.lines(estimated.found),
        "",
        *cost_lines(estimated),
        "",
        *step_lines(estimated),
        "",
        *assumed_lines(),
    ]


def choice_lines(candidates: Mapping[str, Estimate], taken: str) -> list[str]:
    """Returns the time and memory of each set of settings, and the one that is shown below."""
    out = []
    for name, estimated in candidates.items():
        minutes = between([step.total / 60 for step in estimated.steps], ".1f")
        headroom = estimated.found.headroom
        free = f"{headroom:.0%} free" if headroom >= 0 else "does not fit"
        out.append(f"{name}: {minutes} minutes a step, {free}")
    return [*out, f"the faster: {taken}", ""]


def assumed_lines() -> list[str]:
    """Returns the assumptions of both ends of the range."""
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
        "verifier is not counted",
    ]


def cost_lines(estimated: Estimate) -> list[str]:
    """Returns a table of each program's cost, and of one turn of its loop where it has one."""
    out = [
        f"{'a device, once':26}{'core s':>10}{'copied GB':>12}{'exchanged GB':>14}"
        f"{'times':>8}{'exchange s':>18}{'all s':>18}"
    ]
    for name, cost in estimated.costs.items():
        out += one_cost(name, cost.fixed, estimated.slice)
        if cost.turn.cycles:
            out += one_cost(f"  a turn of {name}", cost.turn, estimated.slice)
        if cost.plain_turn != cost.turn:
            out += one_cost("    not truncating", cost.plain_turn, estimated.slice)
    return [*out, "all s: without attention's kernels"]


def one_cost(label: str, cost: Cost, where: simulate.Slice) -> list[str]:
    """Returns a line of numbers, and one with the kinds of collectives where there are any."""
    kinds = collections.Counter()
    for c in cost.collectives:
        kinds[c.kind if c.groups else f"{c.kind} between slices"] += c.bytes * c.times
    ends = simulate.ENDS
    exchange = [sum(where.exchange_seconds(c, a) for c in cost.collectives) for a in ends]
    out = [
        f"{label:26}{cost.cycles / where.chip.clock:10.4f}{cost.copied_bytes / 1e9:12.3f}"
        f"{sum(kinds.values()) / 1e9:14.3f}{sum(c.times for c in cost.collectives):8.0f}"
        f"{between(exchange, '.4f'):>18}"
        f"{between([where.seconds(cost, a) for a in ends], '.4f'):>18}"
    ]
    if kinds:
        parts = (f"{kind} {size / 1e9:.3f} GB" for kind, size in kinds.items())
        out.append(f"{'':28}{', '.join(parts)}")
    return out


def between(ends: Sequence[float], form: str) -> str:
    """Returns both ends of a range, "8.1 to 13.2"; one where they are printed alike."""
    low, high = (f"{value:{form}}" for value in sorted(ends))
    return low if low == high else f"{low} to {high}"


def step_lines(estimated: Estimate) -> list[str]:
    """Returns the times of the simulated step, and of the run that is made of such steps."""
    step, found = estimated.steps[0], estimated.found
    rates = [step.sampled_tokens / step.total for step in estimated.steps]
    hours = estimated.run_hours

    def of(name: str, form: str, *, unit: float = 1.0) -> str:
        return between([getattr(step, name) / unit for step in estimated.steps], form)

    return [
        f"a simulated step, responses of {step.mean_response_tokens:,} tokens (mean), seconds:",
        f"  rollout {of('rollout', '.0f')} + prefill {of('prefill', '.1f')} (occupancy "
        f"{of('occupancy', '.0%')}, {of('blocks', ',.0f')} blocks), update {of('update', '.0f')} "
        f"({of('micro_batches', '.0f')} micro-batches, MFU {of('mfu_of_update', '.0%')}), reshard "
        f"{of('reshard', '.2f')} ({estimated.reshard_bytes / 1e9:.1f} GB to a device), its share "
        f"of evaluations {of('evaluation', '.0f')}, of saves {of('save', '.1f')}",
        f"  {of('total', '.1f', unit=60)} minutes; {between(rates, ',.0f')} sampled "
        "tokens a second",
        f"a run of {found.built.config.num_steps} steps: {between(hours, '.0f')} hours, "
        f"{between([h * found.chips for h in hours], ',.0f')} chip-hours (responses grow as the "
        f"paper's did, to {estimated.runs[0][-1].mean_response_tokens:,} tokens)",
    ]


def plot(estimated: Estimate, path: pathlib.Path) -> None:
    """Draws the memory of every phase and the parts of a step's time, as bars."""
    found = estimated.found
    figure = Figure(figsize=(9, 6), layout="tight")
    sizes, times = figure.subplots(2, 1, height_ratios=(3, 1))
    names = [phase.name for phase in found.phases]
    left = np.zeros(len(names))
    for part in PARTS:
        size = np.array([phase.parts.get(part, 0) / GIB for phase in found.phases])
        if size.any():
            sizes.barh(names, size, left=left, label=part)
            left += size
    hbm_gib = found.chip.hbm_bytes / GIB
    sizes.axvline(hbm_gib, color="black", linestyle="--")
    sizes.set_xlabel(f"GiB a device; dashed: the {hbm_gib:g} that there are")
    sizes.invert_yaxis()
    sizes.set_xlim(0, 1.3 * hbm_gib)
    sizes.legend(loc="lower right", fontsize="small")
    sizes.set_title(f"{found.recipe} on {found.where}")
    for row, step in zip(("fast", "slow"), estimated.steps, strict=True):
        start = 0.0
        for n, name in enumerate(simulate.STEP_PARTS):
            seconds = getattr(step, name)
            label = name if row == "fast" else None
            times.barh([row], [seconds / 60], left=[start / 60], color=f"C{n}", label=label)
            start += seconds
    tokens = estimated.steps[0].mean_response_tokens
    times.set_xlabel(f"minutes, simulated, at {tokens:,} tokens a response")
    times.set_xlim(0, 1.3 * start / 60)
    times.invert_yaxis()
    times.legend(loc="center right", fontsize="small")
    figure.savefig(path, dpi=110)


def as_json(estimated: Estimate, *, seconds: float) -> dict:
    """Returns the findings and the estimate for a program; seconds: the time that they took."""
    found, cache = estimated.found, estimated.found.built.engine.cache
    programs = {
        name: {
            "arguments": program.arguments,
            "temporaries": program.temporaries,
            "compile_seconds": program.compile_seconds,
            "seconds": {
                part: [estimated.slice.seconds(cost, a) for a in simulate.ENDS]
                for part, cost in (
                    ("fixed", estimated.costs[name].fixed),
                    ("turn", estimated.costs[name].plain_turn),
                )
            },
            **dataclasses.asdict(estimated.costs[name]),
        }
        for name, program in found.programs.items()
    }
    return {
        "recipe": found.recipe,
        "topology": found.where,
        "chips": found.chips,
        "mesh": dict(found.built.mesh.shape),
        "slots_a_shard": cache.slots,
        "hbm_bytes": found.chip.hbm_bytes,
        "headroom": found.headroom,
        "phases": {phase.name: phase.parts for phase in found.phases},
        "programs": programs,
        "steps": [
            dataclasses.asdict(step) | {"total": step.total, "mfu_of_update": step.mfu_of_update}
            for step in estimated.steps
        ],
        "run_hours": estimated.run_hours,
        "chip_hours": [hours * found.chips for hours in estimated.run_hours],
        "seconds": seconds,
        "jax": jax.__version__,
    }


def write_json(estimated: Estimate, path: pathlib.Path, *, seconds: float) -> None:
    """Writes the findings and the estimate to a file."""
    path.write_text(json.dumps(as_json(estimated, seconds=seconds), indent=1) + "\n")


def table_row(found: dict | None) -> list[str]:
    """Returns the cells under TABLE_HEADER of an estimate written as JSON; None: there is none."""
    if found is None:
        return ["does not compile", *[""] * (len(TABLE_HEADER) - 1)]
    steps = found["steps"]
    phases = {name: sum(parts.values()) for name, parts in found["phases"].items()}
    sampling = max(size for name, size in phases.items() if not name.startswith("update"))
    update = max(size for name, size in phases.items() if name.startswith("update"))

    def both(value, form: str) -> str:
        return between([value(step) for step in steps], form)

    return [
        f"{found['chips']}, TP {found['mesh']['model']}",
        f"{sampling / GIB:.1f} and {update / GIB:.1f} of {found['hbm_bytes'] / GIB:.1f}",
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
