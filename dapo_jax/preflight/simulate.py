"""From the costs of programs and a distribution of lengths to the seconds of one RL step.

A roofline (Williams et al. 2009): a program takes as long as its arithmetic or its traffic to
memory, whichever is longer. Nothing here was calibrated on a TPU: what share of the published
rates is reached is assumed, and said with the results.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from dapo_jax.preflight.chips import Chip
from dapo_jax.preflight.hlo_cost import Collective

# Shares of the published rates that programs are taken to reach, and what the host needs between
# two blocks of decode steps.
PRODUCTS_REACH, MEMORY_REACHES, LINKS_REACH = 0.5, 0.75, 0.7
HOST_SECONDS_A_BLOCK = 0.010
# Spread of the logarithm of response lengths between and within problems, measured on 12,494
# generations of Qwen2.5-family models; and the prompt's mean, with Qwen2.5's tokenizer.
SIGMA_PROBLEMS, SIGMA_SAMPLES = 0.81, 0.61
PROMPT_TOKENS = 145
PAGE_MARGIN = 2  # blocks of growth that the engine keeps free


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one device: FLOP, bytes of memory, and what it exchanges with others."""

    flops: float
    hbm_bytes: float
    collectives: tuple[Collective, ...]


@dataclasses.dataclass(frozen=True)
class Seconds:
    """What a piece of work takes at least for each of its kinds, at the rates that are reached."""

    products: float
    memory: float
    exchange: float

    @property
    def overlapped(self) -> float:
        """Where weights come in behind the products, as in the update."""
        return max(self.products, self.memory, self.exchange)

    @property
    def in_turn(self) -> float:
        """Where what is exchanged is waited for, as in decoding."""
        return max(self.products, self.memory) + self.exchange


def seconds(work: Work, chip: Chip) -> Seconds:
    """At the rates that are reached."""
    return Seconds(
        work.flops / (chip.flop_rate * PRODUCTS_REACH),
        work.hbm_bytes / (chip.hbm_rate * MEMORY_REACHES),
        sum(exchange_seconds(c, chip) for c in work.collectives),
    )


def exchange_seconds(collective: Collective, chip: Chip) -> float:
    """A ring over one axis of the torus; between slices the data centre's network."""
    if not collective.groups:
        return collective.times * collective.bytes / (chip.dcn_rate * LINKS_REACH)
    others = (collective.group_size - 1) / collective.group_size
    rounds = {"all-reduce": 2 * others, "collective-permute": float(others > 0)}
    share = rounds.get(collective.kind, others)
    return collective.times * share * collective.bytes / (chip.ici_rate * LINKS_REACH)


def response_lengths(mean: float, *, groups: int, group_size: int, longest: int, seed: int):
    """Log-normal lengths [P, G] of the given mean after they are cut at `longest`."""
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
