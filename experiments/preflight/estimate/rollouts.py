"""Simulates a rollout: log-normal response lengths, and the sampler's own scheduler on them."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dapo_jax.carry_over import IDLE_SHARE
from dapo_jax.sampler.cache import Cache
from dapo_jax.sampler.engine import COPIES
from dapo_jax.sampler.scheduler import Scheduler

# Spread of the logarithm of response lengths between and within problems, measured on 12,494
# generations of Qwen2.5-family models.
SIGMA_PROBLEMS, SIGMA_SAMPLES = 0.81, 0.61
MEAN_STEPS = 20  # with carry-over, at least: a step that ends late leaves less to the next


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
    over decode steps times slots. prefills: calls of the program. With carry-over all are means.
    """

    seconds: float
    tokens: float
    discarded_tokens: float
    blocks: float
    prefills: float
    occupancy: float


class Blocks:
    """Simulates blocks of the sampler's own scheduler on responses of known lengths."""

    def __init__(
        self,
        cache: Cache,
        *,
        shards: int,
        prompt_tokens: int,
        step_seconds: Mapping[int, Callable[[np.ndarray, np.ndarray], np.ndarray]],
        block_seconds: Mapping[int, float],
        copy_seconds: float,
        refill_seconds: float = 0.0,
        eval_groups: int = 0,
        eval_seconds: Callable[[int, np.ndarray], np.ndarray] = lambda rows, slots_D: 0.0,
    ):
        """Begins with empty slots.

        step_seconds: by the rows of a decoding program, (tokens that the slots of each shard read
        [D], occupied slots [D]) -> seconds of a step [D]. block_seconds: by the rows, the time of a
        block beside its steps. A block runs the smallest program that holds the fullest shard, and
        ends with its slowest shard. copy_seconds, refill_seconds: of a call that copies pages
        between shards, and of one that computes partial responses again. prompt_tokens: of every
        prompt; a slot reads all but the last one. eval_groups: the number of groups, the first
        ones, that are an evaluation's. eval_seconds: (rows, its slots on each shard [D]) -> the
        time that a step takes longer for it [D].
        """
        self._cache, self._shards, self._prompt_tokens = cache, shards, prompt_tokens
        self._step_seconds, self._block_seconds = step_seconds, block_seconds
        self._copy_seconds, self._refill_seconds = copy_seconds, refill_seconds
        self._eval_groups, self._eval_seconds = eval_groups, eval_seconds
        # Of unfinished groups: the tokens that each response begins with; None: it has ended.
        self._left: dict[int, list[int | None]] = {}
        self._limits: dict[int, Sequence[int]] = {}
        self._forget()
        self.begin_again()

    def _forget(self) -> None:
        self._seconds = 0.0
        self._tokens = self._blocks = self._prefills = self._slot_steps = 0

    @property
    def unfinished(self) -> list[int]:
        """Lists the groups that are unfinished, by number."""
        return self._scheduler.unfinished

    @property
    def idle_slots(self) -> int:
        """Counts the slots that nothing submitted so far will fill."""
        return self._scheduler.idle_slots

    def submit(self, limits: Sequence[int]) -> int:
        """Queues a group whose responses have these lengths; returns its number."""
        number = len(self._limits)
        self._limits[number], self._left[number] = limits, [0] * len(limits)
        self._scheduler.submit(number, self._prompt_tokens, limits, keeps=self._cache.carries)
        return number

    def begin_again(self) -> None:
        """Empties all slots; the responses under way are computed again from their tokens."""
        if self._left:
            for (number, sample), (*_, tokens) in self._scheduler.occupied.items():
                self._left[number][sample] = tokens
        self._scheduler, self._discarded = Scheduler(self._cache, self._shards), 0
        for number, first_tokens in self._left.items():
            limits = self._limits[number]
            self._scheduler.submit(
                number, self._prompt_tokens, limits, first_tokens=first_tokens, keeps=True
            )

    def run(self, *, more: bool = False) -> None:
        """Simulates a block; more: as of `Scheduler.next_block`."""
        shards, scheduler = self._shards, self._scheduler
        plan = scheduler.next_block(more=more)
        for lost in plan.preempted:
            self._left[lost.cursor][lost.sample] = lost.tokens
        used_N = np.minimum(plan.left_N, self._cache.block_tokens)
        steps_D = np.zeros(shards, int)
        np.maximum.at(steps_D, plan.shard_N, used_N)
        occupied_D = np.bincount(plan.shard_N, minlength=shards)
        live_D = np.bincount(plan.shard_N, plan.sampled_N, minlength=shards)
        live_D += occupied_D * (self._prompt_tokens - 1)
        rows = min(rows for rows in self._step_seconds if rows >= occupied_D.max())
        eval_D = np.bincount(plan.shard_N[plan.cursor_N < self._eval_groups], minlength=shards)
        seconds_D = self._step_seconds[rows](live_D, occupied_D) + self._eval_seconds(rows, eval_D)
        calls = sum(math.ceil(len(copies_M4) / COPIES) for copies_M4 in plan.moves[1:])
        self._seconds += float((steps_D * seconds_D).max()) + self._block_seconds[rows]
        self._seconds += self._copy_seconds * calls + self._refill_seconds * len(plan.refills)
        self._tokens += int(used_N.sum())
        self._blocks += 1
        self._prefills += len(plan.prefills)
        self._slot_steps += int(steps_D.max()) * shards * self._cache.slots
        for ended in scheduler.complete(used_N, np.zeros(len(used_N), bool)):
            left = self._left[ended.cursor]
            left[ended.sample] = None
            if left.count(None) == len(left):
                del self._left[ended.cursor]

    def rollout(self) -> Rollout:
        """Returns the work since the last call."""
        discarded, self._discarded = self._discarded, self._scheduler.discarded_tokens
        found = Rollout(
            seconds=self._seconds,
            tokens=self._tokens,
            discarded_tokens=self._discarded - discarded,
            blocks=self._blocks,
            prefills=self._prefills,
            occupancy=self._tokens / max(self._slot_steps, 1),
        )
        self._forget()
        return found


def simulate_rollout(
    length_PG: Sequence[Sequence[int]],
    cache: Cache,
    *,
    eval_PG: Sequence[Sequence[int]] = (),
    **of_blocks,
) -> Rollout:
    """Simulates the sampling of groups whose responses have these lengths.

    eval_PG: lengths of an overlapped evaluation, submitted first. of_blocks: as of `Blocks`.
    """
    blocks = Blocks(cache, eval_groups=len(eval_PG), **of_blocks)
    for limits in [*eval_PG, *length_PG]:
        blocks.submit(limits)
    while blocks.unfinished:
        blocks.run()
    return blocks.rollout()


def simulate_carrying(
    length_PG: Sequence[Sequence[int]],
    cache: Cache,
    *,
    groups: int,
    every_steps: int,
    carry_over_steps: int,
    shards: int,
    **of_blocks,
) -> Rollout:
    """Simulates the mean step with carry-over, once the slots are full (`carry_over`).

    length_PG: of the groups in prompt order, again from the beginning where they end. groups: that
    a step needs complete; no more are begun than this and the next carry_over_steps steps need. Of
    every so many steps one computes the responses under way again. The first steps, until the slots
    are in balance, are not counted. of_blocks: as of `Blocks`.
    """
    blocks, found, begun = Blocks(cache, shards=shards, **of_blocks), [], []
    first, counted = (
        math.ceil(steps / every_steps) * every_steps
        for steps in (2 * (carry_over_steps + 1), MEAN_STEPS)
    )

    def more(step: int) -> bool:
        return len(begun) < groups * (step + 1 + carry_over_steps)

    def ends(step: int) -> bool:
        waiting = set(blocks.unfinished)
        if not step:
            return len(begun) >= groups and min(waiting, default=groups) >= groups
        old = (number for number in waiting if step - begun[number] >= carry_over_steps)
        return len(begun) - len(waiting) >= groups * (step + 1) and next(old, None) is None

    for step in range(first + counted):
        if step % every_steps == 0:
            blocks.begin_again()
        while not ends(step):
            if blocks.idle_slots >= IDLE_SHARE * shards * cache.slots:
                while blocks.idle_slots and more(step):
                    blocks.submit(length_PG[len(begun) % len(length_PG)])
                    begun.append(step)
            blocks.run(more=more(step))
        found.append(blocks.rollout())
    totals = map(sum, zip(*map(dataclasses.astuple, found[first:]), strict=True))
    return Rollout(*(total / counted for total in totals))
