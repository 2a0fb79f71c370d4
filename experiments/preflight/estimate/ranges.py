"""Estimates the seconds of a recipe's step and the hours of its run, as ranges."""

import dataclasses
import functools

import numpy as np

from dapo_jax.preflight.examine import Findings
from experiments.preflight.estimate import simulate
from experiments.preflight.estimate.hlo_cost import ProgramCost, program_cost
from experiments.preflight.estimate.simulate import Step

# Mean response lengths over a run, as parts of the greatest length: the paper's grew from 743 to
# 4,537 tokens of 20,480.
MEAN_LENGTHS = tuple(tokens / 20_480 for tokens in (743, 1_700, 2_650, 3_600, 4_537))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated times of a recipe on one topology.

    steps: at the length asked for, with the fast and the slow assumptions. runs: steps at the
    lengths of the paper's run, with either.
    """

    found: Findings
    costs: dict[str, ProgramCost]
    slice: simulate.Slice
    steps: tuple[Step, Step]
    runs: tuple[list[Step], list[Step]]

    @property
    def reshard_bytes(self) -> float:
        """The bytes that a device receives at a reshard."""
        return sum(c.bytes * c.times for c in self.costs["reshard"].fixed.collectives)

    @property
    def run_hours(self) -> tuple[float, float]:
        """The time of all rollout steps at the lengths of the paper's run, fast and slow."""
        num_steps = self.found.built.config.num_steps
        fast, slow = (float(np.mean([step.total for step in run])) for run in self.runs)
        return num_steps * fast / 3_600, num_steps * slow / 3_600


def estimate(found: Findings, *, mean: float | None = None) -> Estimate:
    """Simulates steps of a compiled recipe.

    mean: response length of the simulated step, tokens; None: the last one of the paper's run.
    """
    costs = {name: program_cost(program.text) for name, program in found.programs.items()}
    where = simulate.Slice.of(found.built.mesh, found.chip)
    simulators = [simulate.Simulator(found.built, costs, where, a) for a in simulate.ENDS]
    steps = [functools.cache(simulator.step) for simulator in simulators]
    longest = found.built.config.rollout.max_response_tokens
    mean = mean or round(MEAN_LENGTHS[-1] * longest)
    return Estimate(
        found=found,
        costs=costs,
        slice=where,
        steps=tuple(step(mean) for step in steps),
        runs=tuple([step(part * longest) for part in MEAN_LENGTHS] for step in steps),
    )


def fastest(candidates: dict[str, Estimate]) -> str:
    """Returns the name of the candidate with the fastest step, in the middle of its range.

    Those that fit come first, then the one that comes closest. Of equal ones the first is taken.
    """

    def slowness(name: str) -> tuple[float, float]:
        estimated = candidates[name]
        seconds = sum(step.total for step in estimated.steps)
        return max(0.0, -estimated.found.headroom), seconds

    return min(candidates, key=slowness)
