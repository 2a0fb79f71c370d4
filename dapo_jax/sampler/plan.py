"""What the scheduler plans for a block: prefills, moves between shards, and the slots' work.

Host only, no jax. Axis letters: those of `scheduler`; M pages that are copied.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL_SLACK = 1 / 8  # of the mean: shards so far above it are worth the copies of levelling


@dataclasses.dataclass(eq=False)
class Prefix:
    """A prompt in pages of one shard, and the samples that share them, at most `Cache.readers`.

    limits: the greatest number of tokens of every sample of the group. pages: None while the prompt
    waits in the queue, and once all of its samples have ended. finished_tokens: of ended samples.
    """

    cursor: int
    prompt_tokens: int
    limits: Sequence[int]
    samples: range
    unfinished: int
    finished_tokens: int = 0
    shard: int = -1
    pages: np.ndarray | None = None


class Finished(NamedTuple):
    """A sample that ended, and the pages that held its tokens, in order.

    stopped: False where it reached its limit.
    """

    cursor: int
    sample: int
    tokens: int
    stopped: bool
    shard: int
    pages: np.ndarray


class Prefill(NamedTuple):
    """One prefill call, of R rows on all shards together, equally many on each.

    cursor_R: the group whose prompt is in a row, -1 where the row is unused. page_RI: the pages
    that the row is written to; I is the prompts' bucket.
    """

    cursor_R: np.ndarray
    page_RI: np.ndarray


class Moves(NamedTuple):
    """Samples that go to other shards before a block, and the pages that are copied for it.

    int32 [*, 4]: from which shard and slot (or page) to which shard and slot (or page). A copy is
    never of a page that another copy fills.
    """

    slots_N4: np.ndarray
    prompt_pages_M4: np.ndarray
    pages_M4: np.ndarray


@dataclasses.dataclass(frozen=True)
class Plan:
    """The work of one block of decode steps, with an entry for every occupied slot.

    sampled_N: tokens sampled before the block, 0 for samples that were just admitted. left_N:
    tokens until the limit. page_N: the slot's own page that the block writes to. waiting: whether
    samples are left to refill slots with. cache_use: the share of response pages that are taken, on
    the fullest shard.
    """

    prefills: list[Prefill]
    moves: Moves
    shard_N: np.ndarray
    slot_N: np.ndarray
    cursor_N: np.ndarray
    sample_N: np.ndarray
    sampled_N: np.ndarray
    left_N: np.ndarray
    page_N: np.ndarray
    waiting: bool
    cache_use: float


def level(count_D: np.ndarray) -> list[tuple[int, int]]:
    """Pairs (from, to) of shards between which one sample each has to move to make them level.

    None while the fullest shard is near the mean: all shards wait for it, but copies take time.
    """
    count_D, pairs = count_D.copy(), []
    if count_D.max() <= 1 + (1 + LEVEL_SLACK) * count_D.mean():
        return pairs
    while count_D.max() - count_D.min() > 1:
        pairs.append((int(count_D.argmax()), int(count_D.argmin())))
        count_D[pairs[-1][0]] -= 1
        count_D[pairs[-1][1]] += 1
    return pairs
