"""Simulates a rollout: log-normal response lengths, and the sampler's own scheduler on them."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dapo_jax.sampler.cache import Cache
from dapo_jax.sampler.engine import COPIES
from dapo_jax.sampler.scheduler import Scheduler

# Spread of the logarithm of response lengths between and within problems, measured on 12,494
# generations of Qwen2.5-family models.
SIGMA_PROBLEMS, SIGMA_SAMPLES = 0.81, 0.61


def response_lengths(mean: float, *, groups: int, group_size: int, longest: int, seed: int):
    """Draws log-normal lengths [P, G], int, of the given mean after they are cut at `longest`."""
    rng = np.random.default_rng(seed)
    spread_P1 = SIGMA_PROBLEMS * rng.standard_normal((groups, 1))
    shape_PG = np.exp(spread_P1 + SIGMA_SAMPLES * rng.standard_normal((groups, group_size)))
    low, high = 0.0, float(longest)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if np.clip(middle * shape_PG, 1, longest).mean() < mean
            else (low, middle)
        )
    return np.clip(np.round(high * shape_PG), 1, longest).astype(int)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The simulated sampling of a step.

    tokens: all sampled ones, with the discarded_tokens of preempted responses. occupancy: tokens
    over decode steps times slots. prefills: calls of the program.
    """

    seconds: float
    tokens: int
    discarded_tokens: int
    blocks: int
    prefills: int
    occupancy: float


def simulate_rollout(
    length_PG: Sequence[Sequence[int]],
    cache: Cache,
    *,
    shards: int,
    prompt_tokens: int,
    step_seconds: Mapping[int, Callable[[np.ndarray, np.ndarray], np.ndarray]],
    block_seconds: Mapping[int, float],
    copy_seconds: float,
    eval_PG: Sequence[Sequence[int]] = (),
    eval_seconds: Callable[[int, np.ndarray], np.ndarray] = lambda rows, slots_D: 0.0,
) -> Rollout:
    """Runs the sampler's own scheduler on groups whose responses have these lengths.

    step_seconds: by the rows of a decoding program, (tokens that the slots of each shard read [D],
    occupied slots [D]) -> seconds of a step [D]. block_seconds: by the rows, the time of a block
    beside its steps. A block runs the smallest program that holds the fullest shard, and ends with
    its slowest shard. copy_seconds: of a call that copies pages between shards. prompt_tokens: of
    every prompt; a slot reads all but the last one. eval_PG: lengths of an overlapped evaluation,
    submitted first. eval_seconds: (rows, its slots on each shard [D]) -> the time that a step takes
    longer for it [D].
    """
    scheduler = Scheduler(cache, shards)
    for cursor, limits in enumerate([*eval_PG, *length_PG]):
        scheduler.submit(cursor, prompt_tokens, limits)
    elapsed = 0.0
    tokens = blocks = prefills = slot_steps = 0
    while scheduler.unfinished:
        plan = scheduler.next_block()
        used_N = np.minimum(plan.left_N, cache.block_tokens)
        steps_D = np.zeros(shards, int)
        np.maximum.at(steps_D, plan.shard_N, used_N)
        occupied_D = np.bincount(plan.shard_N, minlength=shards)
        live_D = np.bincount(plan.shard_N, plan.sampled_N, minlength=shards)
        live_D += occupied_D * (prompt_tokens - 1)
        rows = min(rows for rows in step_seconds if rows >= occupied_D.max())
        eval_D = np.bincount(plan.shard_N[plan.cursor_N < len(eval_PG)], minlength=shards)
        seconds_D = step_seconds[rows](live_D, occupied_D) + eval_seconds(rows, eval_D)
        elapsed += float((steps_D * seconds_D).max())
        elapsed += block_seconds[rows]
        elapsed += copy_seconds * sum(
            math.ceil(len(copies_M4) / COPIES) for copies_M4 in plan.moves[1:]
        )
        tokens += int(used_N.sum())
        blocks += 1
        prefills += len(plan.prefills)
        slot_steps += int(steps_D.max()) * shards * cache.slots
        scheduler.complete(used_N, np.zeros(len(used_N), bool))
    return Rollout(
        elapsed, tokens, scheduler.discarded_tokens, blocks, prefills, tokens / slot_steps
    )
