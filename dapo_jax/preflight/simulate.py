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

from dapo_jax.preflight.chips import Chip
from dapo_jax.preflight.compile import Program, mean_prompt
from dapo_jax.preflight.hlo_cost import Collective, Cost
from dapo_jax.run import build
from models.qwen2 import Qwen2Config, abstract_params
from sharding import rules

# Shares of the published rates that programs are taken to reach, and what the host needs between
# two blocks of decode steps.
PRODUCTS_REACH, MEMORY_REACHES, LINKS_REACH = 0.5, 0.75, 0.7
HOST_SECONDS_A_BLOCK = 0.010
INFORMATIVE = 0.5  # of the groups sampled; the paper's generation batches are three times a step's
# Spread of the logarithm of response lengths between and within problems, measured on 12,494
# generations of Qwen2.5-family models.
SIGMA_PROBLEMS, SIGMA_SAMPLES = 0.81, 0.61
PAGE_MARGIN = 2  # blocks of growth that the engine keeps free


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
    """What sampling took; occupancy: of slots and decode steps, while requests wait and in all."""

    seconds: float
    tokens: int
    blocks: int
    occupancy: float
    given_up_tokens: int


def simulate_rollout(
    lengths: Sequence[int],
    *,
    shards: int,
    slots: int,
    pages: int,
    page_tokens: int,
    block_tokens: int,
    step_seconds: Callable[[np.ndarray], np.ndarray],
    block_seconds: float,
) -> Rollout:
    """The engine's slots and pages without tokens: requests in order, refilled between blocks.

    step_seconds(live tokens of each shard) -> of a decode step. All shards wait for the slowest
    between blocks. As the engine does, a shard that runs out of pages gives up its youngest.
    """
    queue = [*range(len(lengths))][::-1]
    left_SB = np.zeros((shards, slots), int)
    drawn_SB = np.zeros((shards, slots), int)
    request_SB = np.full((shards, slots), -1)
    entered_SB = np.zeros((shards, slots), int)
    total = steps_offered = given_up = blocks = 0
    elapsed = 0.0

    def pages_taken():
        return np.where(request_SB >= 0, drawn_SB // page_tokens + 1, 0).sum(axis=1)

    while queue or (request_SB >= 0).any():
        blocks += 1
        # Slots are refilled in turn over the shards, those with most free ones first.
        growth_S = PAGE_MARGIN * (request_SB >= 0).sum(axis=1) * block_tokens // page_tokens
        spare_S = pages - 1 - pages_taken() - growth_S
        free = np.argwhere((request_SB < 0).T)[:, ::-1]
        for s, b in free:
            if not queue:
                break
            if spare_S[s] > 0:
                request = queue.pop()
                request_SB[s, b], entered_SB[s, b] = request, blocks
                left_SB[s, b], drawn_SB[s, b] = lengths[request], 0
                spare_S[s] -= 1
        for s in np.flatnonzero(pages_taken() > pages - 1):
            while pages_taken()[s] > pages - 1:
                b = int(np.argmax(np.where(request_SB[s] >= 0, entered_SB[s], -1)))
                given_up += drawn_SB[s, b]
                queue.append(int(request_SB[s, b]))
                request_SB[s, b] = -1
        active_SB = request_SB >= 0
        used_SB = np.where(active_SB, np.minimum(left_SB, block_tokens), 0)
        steps_S = used_SB.max(axis=1)
        live_S = np.where(active_SB, drawn_SB, 0).sum(axis=1)
        elapsed += float((steps_S * step_seconds(live_S)).max()) + block_seconds
        total += int(used_SB.sum())
        steps_offered += int(steps_S.max()) * shards * slots
        left_SB -= used_SB
        drawn_SB += used_SB
        request_SB[active_SB & (left_SB == 0)] = -1
    return Rollout(elapsed, total, blocks, total / steps_offered, int(given_up))


def micro_batches(entries: Sequence[int], *, row_tokens: int, rows: int) -> int:
    """Micro-batches of first-fit-decreasing rows, where every response has its own prompt."""
    room: list[int] = []
    for size in sorted(entries, reverse=True):
        row = next((r for r, left in enumerate(room) if left >= size), len(room))
        if row == len(room):
            room.append(row_tokens)
        room[row] -= size
    return -(-len(room) // rows)


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
    built: build.Programs, programs: dict[str, Program], chip: Chip, mean: float
) -> Step:
    """Simulates one RL step whose responses have a mean of so many tokens."""
    config, r = built.config, built.config.rollout
    groups = r.num_prompts
    if config.algo.dynamic_sampling:
        groups = math.ceil(r.num_prompts / INFORMATIVE)
    length_PG = response_lengths(
        mean, groups=groups, group_size=r.group_size, longest=r.max_response_tokens, seed=0
    )
    rollout = rollout_of(length_PG, built, programs["decode"], chip)
    kept_PG = length_PG[: r.num_prompts]
    prompt = mean_prompt(config)
    per_update = r.num_prompts // config.updates_per_step
    micro = sum(
        micro_batches(
            (kept_PG[i : i + per_update].reshape(-1) + prompt - 1).tolist(),
            row_tokens=config.learner.row_tokens,
            rows=config.learner.micro_batch_rows,
        )
        for i in range(0, r.num_prompts, per_update)
    )
    return Step(
        mean_response_tokens=round(float(length_PG.mean())),
        rollout=rollout.seconds,
        prefill=prefill_seconds(built, programs, chip, groups),
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
    """Simulates the decoding of responses of these lengths with the recipe's cache."""
    sizes, cache, engine = built.sizes, built.engine.cache, built.engine
    heads = sizes.num_kv_heads // built.mesh.shape["model"]
    token_bytes = 2 * sizes.num_layers * heads * sizes.head_dim * 2  # keys and values, bfloat16
    turn = seconds(decode.turn, chip)
    memory_rate = chip.hbm_rate * MEMORY_REACHES

    def step_seconds(live_tokens_S):
        # The kernel reads the live pages of the responses; the rest is counted in the program.
        memory_S = turn.memory + live_tokens_S * token_bytes / memory_rate
        return np.maximum(turn.products, memory_S) + turn.exchange

    return simulate_rollout(
        length_PG.reshape(-1),
        shards=engine.shards,
        slots=cache.slots,
        pages=cache.pages,
        page_tokens=cache.page_tokens,
        block_tokens=cache.block_tokens,
        step_seconds=step_seconds,
        block_seconds=seconds(decode.fixed, chip).in_turn + HOST_SECONDS_A_BLOCK,
    )


def prefill_seconds(
    built: build.Programs, programs: dict[str, Program], chip: Chip, groups: int
) -> float:
    """The time to prefill so many prompts of mean length."""
    bucket = built.engine.bucket(mean_prompt(built.config))
    if not bucket:
        return 0.0
    calls = math.ceil(groups / (built.engine.shards * built.engine.prefill_rows(bucket)))
    return calls * seconds(programs[f"prefill[{bucket}]"].fixed, chip).in_turn


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


def attention_flops(sizes: Qwen2Config, *, row_tokens: int, remat: str) -> float:
    """The FLOP of splash attention in one row, forward and backward: a kernel, not counted in HLO.

    It visits the blocks on and below the diagonal: T * T / 2 pairs. Forward it has two products,
    backward four for keys and values and three for queries, as it computes the scores in each.
    """
    recomputed = 2 if remat in ("full", "offload", "keep_products") else 0
    products = 2 + recomputed + 7
    pairs = row_tokens**2 / 2
    return products * 2 * pairs * sizes.num_heads * sizes.head_dim * sizes.num_layers


def parameter_count(sizes: Qwen2Config) -> int:
    """The number of the whole model's parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(sizes)[1]))
