"""Puts together what was found for one recipe on one topology: memory by phase, time by part."""

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np
from ml_collections import ConfigDict

from dapo_jax.preflight import simulate
from dapo_jax.preflight.chips import GIB, Chip, chip_of
from dapo_jax.preflight.compile import DoesNotFit, Program, compiled_programs
from dapo_jax.preflight.simulate import Step
from dapo_jax.run import build, checks
from dapo_jax.run.dry_run import device_bytes

# Mean response lengths over a run, as parts of the greatest length: the paper's grew from 743 to
# 4,537 tokens of 20,480.
MEAN_LENGTHS = tuple(tokens / 20_480 for tokens in (743, 1_700, 2_650, 3_600, 4_537))
WANTED_HEADROOM = 0.10
KEPT_FOR_PROGRAMS = 0.15  # of the memory, where settings are proposed

PARTS = ("state", "sampler's weights", "keys and values", "batch and start weights", "temporaries")


@dataclasses.dataclass(frozen=True)
class Phase:
    """The memory that a device uses while something runs; parts: one of PARTS -> bytes."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class Findings:
    """All that was found for one recipe on one topology.

    slots, pages: of a data shard. reshard_bytes: to a device. steps: at the length asked for, with
    the fast and the slow assumptions; runs: steps at the lengths of the paper's run, with either.
    seconds: the time that finding it took.
    """

    recipe: str
    where: str
    chip: Chip
    chips: int
    mesh: dict[str, int]
    slots: int
    pages: int
    reshard_bytes: float
    programs: dict[str, Program]
    phases: list[Phase]
    slice: simulate.Slice
    steps: tuple[Step, Step]
    runs: tuple[list[Step], list[Step]]
    num_steps: int
    seconds: float

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def headroom(self) -> float:
        """The share of the memory that is left in the fullest phase."""
        return 1 - self.fullest.total / self.chip.hbm_bytes

    @property
    def run_hours(self) -> tuple[float, float]:
        """The time of all rollout steps at the lengths of the paper's run, fast and slow."""
        fast, slow = (float(np.mean([step.total for step in run])) for run in self.runs)
        return self.num_steps * fast / 3_600, self.num_steps * slow / 3_600

    @property
    def advice(self) -> str:
        """The setting to change where it does not fit, or hardly."""
        over = self.fullest.total - (1 - WANTED_HEADROOM) * self.chip.hbm_bytes
        mib = math.ceil(over / 2**20)
        if self.fullest.name == "update":
            return (
                "lower learner.micro_batch_rows or learner.row_tokens, set learner.remat to "
                "offload, or raise mesh.model: the update needs the most"
            )
        return f"lower rollout.cache_mib by {mib} or raise mesh.model: sampling needs the most"


def examine(
    config: ConfigDict, devices, *, recipe: str, where: str, mean: float, say: Callable[[str], None]
) -> Findings:
    """Compiles everything for these devices and simulates steps.

    mean: response length of the simulated step, tokens. say: reports what is ready. Raises
    ValueError for settings that cannot work, DoesNotFit where a program does not.
    """
    start = time.perf_counter()
    chip = chip_of(where)
    checks.check(config)
    built = build.programs(config, build.model_sizes(config).vocab_size, devices=devices)
    checks.check_divides(config, built.mesh)
    cache = built.engine.cache
    if cache.slots < 1:
        raise DoesNotFit("rollout.cache_mib holds no slot")
    programs = compiled_programs(built, say=say)
    where_chips = simulate.Slice.of(built.mesh, chip)
    simulators = [
        simulate.Simulator(built, programs, where_chips, assumed) for assumed in simulate.ENDS
    ]
    longest = config.rollout.max_response_tokens
    return Findings(
        recipe=recipe,
        where=where,
        chip=chip,
        chips=len(devices) // chip.devices_per_chip,
        mesh=dict(built.mesh.shape),
        slots=cache.slots,
        pages=cache.pages,
        reshard_bytes=sum(c.bytes * c.times for c in programs["reshard"].fixed.collectives),
        programs=programs,
        phases=memory_phases(built, programs),
        slice=where_chips,
        steps=tuple(simulator.step(mean) for simulator in simulators),
        runs=tuple([s.step(part * longest) for part in MEAN_LENGTHS] for s in simulators),
        num_steps=config.num_steps,
        seconds=time.perf_counter() - start,
    )


def fastest(candidates: dict[str, Findings]) -> tuple[str, Findings]:
    """The one whose step takes the least time, in the middle of its range, of those that fit.

    The first of them where they are equal; if none fits, the one that comes closest.
    """

    def slowness(item: tuple[str, Findings]) -> tuple[float, float]:
        found = item[1]
        return max(0.0, -found.headroom), sum(step.total for step in found.steps)

    return min(candidates.items(), key=slowness)


def memory_phases(built: build.Programs, programs: dict[str, Program]) -> list[Phase]:
    """The memory of a device while each program runs."""
    state = device_bytes(built.state)
    weights, pages = device_bytes(built.engine.params), device_bytes(built.engine.pages)
    sampling = {"state": state, "sampler's weights": weights, "keys and values": pages}
    resharding = {"state": state, "sampler's weights": weights}
    phases = []
    for name, program in programs.items():
        if name == "update":
            parts = {"state": state, "batch and start weights": program.arguments - state}
        else:
            parts = resharding if name == "reshard" else sampling
        phases.append(Phase(name, parts | {"temporaries": program.temporaries}))
    return phases


def suggested(config: ConfigDict, devices, chip: Chip, *, slices: int) -> dict[str, int]:
    """Settings of mesh and batch that should fit, by arithmetic alone.

    The fewest chips for a copy of the sampler's weights that leave room for the state, for half as
    much of keys and values and for the programs: less is exchanged then. Raises ValueError where
    none do.
    """
    sizes = build.model_sizes(config)
    parameters, chips = simulate.parameter_count(sizes), len(devices) // slices
    usable = (1 - WANTED_HEADROOM - KEPT_FOR_PROGRAMS) * chip.hbm_bytes
    state = 12 * parameters / chips
    ways = [n for n in range(1, sizes.num_kv_heads + 1) if sizes.num_kv_heads % n == 0]
    for model in (n for n in ways if chips % n == 0 and sizes.num_heads % n == 0):
        weights = 2 * parameters / model
        cache = usable - state - weights
        if cache > weights / 2:
            rows = chips // model * slices
            return {
                "mesh.slices": slices,
                "mesh.data": -1,
                "mesh.model": model,
                "learner.micro_batch_rows": rows,
                "rollout.cache_mib": int(cache / 2**20) // 64 * 64,
            }
    raise ValueError(
        f"{parameters / 1e9:.1f} billion parameters do not fit {chips} chips of {chip.name}: "
        f"{state / GIB:.1f} GiB of state and {2 * parameters / ways[-1] / GIB:.1f} of weights over "
        f"{ways[-1]} chips, of {chip.hbm_bytes / GIB:g}; take a larger topology"
    )
