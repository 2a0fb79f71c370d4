"""Simulates the seconds of one RL step, from the costs of programs and a distribution of lengths.

A roofline (Williams et al. 2009): a program takes as long as its arithmetic or its traffic to
memory, whichever is longer. Nothing here was calibrated on a TPU: what share of the published
rates is reached is assumed, and said with the results.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from dapo_jax.packing import plan_rows
from dapo_jax.preflight.chips import Chip
from dapo_jax.preflight.compile import Program, mean_prompt
from dapo_jax.preflight.hlo_cost import Collective, Cost
from dapo_jax.run import build
from dapo_jax.sampler.cache import Cache
from dapo_jax.sampler.engine import token_bytes
from dapo_jax.sampler.scheduler import Scheduler
from models.parameters import ModelConfig
from models.transformer import abstract_params
from sharding import rules

# Shares of the published rates that programs are taken to reach, and what the host needs between
# two blocks of decode steps.
PRODUCTS_REACH, MEMORY_REACHES, LINKS_REACH = 0.5, 0.75, 0.7
HOST_SECONDS_A_BLOCK = 0.010
INFORMATIVE = 0.5  # of the groups sampled; the paper's generation batches are three times a step's
# Spread of the logarithm of response lengths between and within problems, measured on 12,494
# generations of Qwen2.5-family models.
SIGMA_PROBLEMS, SIGMA_SAMPLES = 0.81, 0.61


@dataclasses.dataclass(frozen=True)
class Seconds:
    """The least time that a program needs for each kind of work, at the rates that are reached."""

    products: float
    memory: float
    exchange: float

    @property
    def overlapped(self) -> float:
        """The time where weights come in behind the products, as in the update."""
        return max(self.products, self.memory, self.exchange)

    @property
    def in_turn(self) -> float:
        """The time where what is exchanged is waited for, as in decoding."""
        return max(self.products, self.memory) + self.exchange


def seconds(cost: Cost, chip: Chip) -> Seconds:
    """The time for each kind of work of a program, at the rates that are reached."""
    return Seconds(
        cost.flops / (chip.flop_rate * PRODUCTS_REACH),
        cost.hbm_bytes / (chip.hbm_rate * MEMORY_REACHES),
        sum(exchange_seconds(c, chip) for c in cost.collectives),
    )


def exchange_seconds(collective: Collective, chip: Chip) -> float:
    """The time of a ring over one axis of the torus; between slices, of the network."""
    if not collective.groups:
        return collective.times * collective.bytes / (chip.dcn_rate * LINKS_REACH)
    others = (collective.group_size - 1) / collective.group_size
    rounds = {"all-reduce": 2 * others, "collective-permute": float(others > 0)}
    share = rounds.get(collective.kind, others)
    return collective.times * share * collective.bytes / (chip.ici_rate * LINKS_REACH)


def response_lengths(mean: float, *, groups: int, group_size: int, longest: int, seed: int):
    """Log-normal lengths [P, G], int, of the given mean after they are cut at `longest`."""
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
    """The sampling of a step, simulated.

    tokens: all that are sampled, among them discarded_tokens of responses that are preempted.
    occupancy: tokens as a part of decode steps times slots. prefills: calls of the program.
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
    step_seconds: Callable[[np.ndarray], np.ndarray],
    block_seconds: float,
) -> Rollout:
    """Runs the sampler's own scheduler on groups whose responses end after so many tokens.

    step_seconds(sampled tokens in the cache of each shard [D]) -> seconds of a decode step [D]. All
    shards wait for the slowest between blocks. prompt_tokens: of every prompt.
    """
    scheduler = Scheduler(cache, shards)
    for cursor, limits in enumerate(length_PG):
        scheduler.submit(cursor, prompt_tokens, limits)
    elapsed = 0.0
    tokens = blocks = prefills = slot_steps = 0
    while scheduler.unfinished:
        plan = scheduler.next_block()
        used_N = np.minimum(plan.left_N, cache.block_tokens)
        steps_D = np.zeros(shards, int)
        np.maximum.at(steps_D, plan.shard_N, used_N)
        live_D = np.bincount(plan.shard_N, plan.sampled_N, minlength=shards)
        elapsed += float((steps_D * step_seconds(live_D)).max()) + block_seconds
        tokens += int(used_N.sum())
        blocks += 1
        prefills += len(plan.prefills)
        slot_steps += int(steps_D.max()) * shards * cache.slots
        scheduler.complete(used_N, np.zeros(len(used_N), bool))
    return Rollout(
        elapsed, tokens, scheduler.discarded_tokens, blocks, prefills, tokens / slot_steps
    )


@dataclasses.dataclass(frozen=True)
class Step:
    """One simulated RL step at a mean response length; seconds."""

    mean_response_tokens: int
    rollout: float
    prefill: float
    update: float
    reshard: float
    sampled_tokens: int
    trained_tokens: int
    occupancy: float
    blocks: int
    micro_batches: int
    parameters: int
    flop_rate: float  # of all devices, published

    @property
    def total(self) -> float:
        return self.rollout + self.prefill + self.update + self.reshard

    @property
    def mfu_of_update(self) -> float:
        """6 FLOP a parameter and trained token, of what the devices could do in the time."""
        return 6 * self.parameters * self.trained_tokens / (self.update * self.flop_rate)


def simulated_step(
    built: build.Programs,
    programs: dict[str, Program],
    chip: Chip,
    mean: float,
    *,
    informative: float = INFORMATIVE,
) -> Step:
    """Simulates one RL step whose responses have a mean of so many tokens.

    informative: the share of groups that can be trained on, where the recipe samples until it has
    enough of them.
    """
    config, r = built.config, built.config.rollout
    cache, groups = built.engine.cache, r.num_prompts
    if config.algo.dynamic_sampling:
        groups = math.ceil(r.num_prompts / informative)
    length_PG = response_lengths(
        mean, groups=groups, group_size=r.group_size, longest=r.max_response_tokens, seed=0
    )
    rollout = rollout_of(length_PG, built, programs["decode"], chip)
    kept_PG, prompt = length_PG[: r.num_prompts], mean_prompt(config)
    bucket = cache.bucket(prompt)
    prefill = seconds(programs[f"prefill[{bucket}]"].fixed, chip).in_turn if bucket else 0.0
    micro = sum(
        micro_batches(
            update_PG,
            prompt_tokens=prompt,
            row_tokens=config.learner.row_tokens,
            rows=config.learner.micro_batch_rows,
            share_prompts=built.learning.kernels.shares_prompts,
        )
        for update_PG in np.split(kept_PG, config.updates_per_step)
    )
    return Step(
        mean_response_tokens=round(float(length_PG.mean())),
        rollout=rollout.seconds,
        prefill=rollout.prefills * prefill,
        update=update_seconds(built, programs["update"], chip, micro),
        reshard=seconds(programs["reshard"].fixed, chip).in_turn,
        sampled_tokens=rollout.tokens,
        trained_tokens=int(kept_PG.sum()) + kept_PG.size * prompt,
        occupancy=rollout.occupancy,
        blocks=rollout.blocks,
        micro_batches=micro,
        parameters=parameter_count(built.sizes),
        flop_rate=built.mesh.size * chip.flop_rate,
    )


def rollout_of(length_PG, built: build.Programs, decode: Program, chip: Chip) -> Rollout:
    """Simulates the sampling of responses of these lengths with the recipe's cache."""
    read = token_bytes(built.sizes, bytes_per_value=2, model_ways=built.mesh.shape["model"])
    turn = seconds(decode.turn, chip)
    memory_rate = chip.hbm_rate * MEMORY_REACHES

    def step_seconds(live_D):
        # The kernel reads the live pages of the responses; the rest is counted in the program.
        memory_D = turn.memory + live_D * read / memory_rate
        return np.maximum(turn.products, memory_D) + turn.exchange

    return simulate_rollout(
        length_PG.tolist(),
        built.engine.cache,
        shards=built.engine.shards,
        prompt_tokens=mean_prompt(built.config),
        step_seconds=step_seconds,
        block_seconds=seconds(decode.fixed, chip).in_turn + HOST_SECONDS_A_BLOCK,
    )


def micro_batches(
    length_PG, *, prompt_tokens: int, row_tokens: int, rows: int, share_prompts: bool
) -> int:
    """The number of micro-batches that the learner packs an update's responses into."""
    packed = plan_rows(
        [prompt_tokens] * len(length_PG),
        length_PG.tolist(),
        row_tokens=row_tokens,
        share_prompts=share_prompts,
    )
    return math.ceil(len(packed) / rows)


def update_seconds(built: build.Programs, update: Program, chip: Chip, micro_batches: int) -> float:
    """The time of a step's updates, which have so many micro-batches in all."""
    config = built.config
    rows = config.learner.micro_batch_rows / rules.row_ways(built.mesh)
    kernel = attention_flops(
        built.sizes, row_tokens=config.learner.row_tokens, remat=config.learner.remat
    )
    flops = update.turn.flops + rows * kernel / built.mesh.shape["model"]
    one = seconds(dataclasses.replace(update.turn, flops=flops), chip).overlapped
    return micro_batches * one + config.updates_per_step * seconds(update.fixed, chip).overlapped


def attention_flops(sizes: ModelConfig, *, row_tokens: int, remat: str) -> float:
    """The FLOP of splash attention in one row, forward and backward: a kernel, not counted in HLO.

    It visits the blocks on and below the diagonal: T * T / 2 pairs. Forward it has two products,
    backward four for keys and values and three for queries, as it computes the scores in each.
    """
    recomputed = 2 if remat in ("full", "offload", "keep_products") else 0
    products = 2 + recomputed + 7
    pairs = row_tokens**2 / 2
    return products * 2 * pairs * sizes.num_heads * sizes.head_dim * sizes.num_layers


def parameter_count(sizes: ModelConfig) -> int:
    """The number of the whole model's parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(sizes)[1]))
