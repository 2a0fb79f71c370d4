"""The plan of a block: prefills, moves between shards, and the work of the slots.

Host only, no jax. Axis letters: those of `scheduler`; M pages that are copied.
"""

import dataclasses
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax.sampler.cache import NULL_PAGE

NO_PAGES = np.zeros(0, int)
UNADMITTED = sys.maxsize  # the admission of a sample that no slot has had
BALANCE_SLACK = 1 / 8  # of the mean: shards so far above it are worth the copies of rebalancing


@dataclasses.dataclass(eq=False)
class Prefix:
    """A prompt in pages of one shard, and the samples that share them, at most `Cache.readers`.

    pages: None while the prompt waits in the queue, and once all of its samples have ended. parks:
    whether a sample that ended keeps its pages, for an environment's answer.
    """

    group: Hashable
    prompt_tokens: int
    parks: bool
    samples: list["Sample"] = dataclasses.field(default_factory=list)
    unfinished: int = 0
    shard: int = -1
    pages: np.ndarray | None = None


@dataclasses.dataclass(eq=False)
class Sample:
    """A sample of a group, number `index` of it, until it ends.

    It waits for a slot, is in one, or is parked until its environment has answered. Outside of a
    slot: tokens that it has, or begins with; pages of these in order, none where they are computed
    again. admission: its number among all; the youngest sample has the greatest. stopped: whether
    it has ended, and not at its limit.
    """

    prefix: Prefix
    index: int
    limit: int
    tokens: int = 0
    pages: np.ndarray = dataclasses.field(default_factory=lambda: NO_PAGES)
    admission: int = UNADMITTED
    stopped: bool = False

    @property
    def key(self) -> tuple[Hashable, int]:
        """Names it: group and index."""
        return self.prefix.group, self.index


class Prefill(NamedTuple):
    """One prefill call, of R rows on all shards together, equally many on each.

    rows: of each row that is used the group, and the sample whose partial response is in it, None
    where the prompt is. page_RI: the pages that the row is written to; I is the bucket.
    """

    rows: dict[int, tuple[Hashable, Sample | None]]
    page_RI: np.ndarray


def prefill_calls(
    taken: Mapping[int, Sequence[Sequence[tuple[Hashable, Sample | None, np.ndarray]]]],
    buckets: Mapping[int, int],
) -> list[Prefill]:
    """Makes the calls for what each shard has taken: {bucket: (group, sample, pages) of shards}."""
    calls = []
    for bucket, taken_D in taken.items():
        R = buckets[bucket]
        for first in range(0, max(map(len, taken_D)), R):
            call = Prefill({}, np.full((len(taken_D) * R, bucket), NULL_PAGE, np.int32))
            for d, of_shard in enumerate(taken_D):
                here = of_shard[first : first + R]
                for r, (group, sample, pages) in enumerate(here, start=d * R):
                    call.rows[r] = group, sample
                    call.page_RI[r, : len(pages)] = pages
            calls.append(call)
    return calls


class Moves(NamedTuple):
    """The pages that are copied before a block, for samples that go to other shards.

    int32 [M, 4]: from which shard and page to which shard and page. A copy is never of a page that
    another copy fills.
    """

    prompt_pages_M4: np.ndarray
    pages_M4: np.ndarray


@dataclasses.dataclass(frozen=True)
class Plan:
    """The work of one block of decode steps, with an entry for every occupied slot.

    prefills: of prompts; recomputes: of partial responses, into the pages of samples that were just
    admitted. preempted: samples that lost their slots, as they were, and continue later from these
    tokens.
    sampled_N: tokens of the sample before the block. left_N: tokens until the limit. page_N: the
    slot's own page that the block writes to; newest_page_N: that of its newest token. waiting:
    whether samples are left to fill slots with. cache_use: the share of response pages that are
    taken, on the fullest shard.
    """

    prefills: list[Prefill]
    recomputes: list[Prefill]
    preempted: list[Sample]
    moves: Moves
    shard_N: np.ndarray
    group_N: np.ndarray
    sample_N: np.ndarray
    sampled_N: np.ndarray
    left_N: np.ndarray
    page_N: np.ndarray
    newest_page_N: np.ndarray
    waiting: bool
    cache_use: float


def rebalance(count_D: np.ndarray) -> list[tuple[int, int]]:
    """Pairs (from, to) of shards between which one sample each has to move to even them out.

    None while the fullest shard is near the mean: all shards wait for it, but copies take time.
    """
    count_D, pairs = count_D.copy(), []
    if count_D.max() <= 1 + (1 + BALANCE_SLACK) * count_D.mean():
        return pairs
    while count_D.max() - count_D.min() > 1:
        pairs.append((int(count_D.argmax()), int(count_D.argmin())))
        count_D[pairs[-1][0]] -= 1
        count_D[pairs[-1][1]] += 1
    return pairs


def ranks(shard_N: np.ndarray) -> np.ndarray:
    """Counts each entry's place among those of its shard; entries lie in order of shards."""
    return np.arange(len(shard_N)) - np.searchsorted(shard_N, shard_N)


def copies(d: int, page_M: np.ndarray, e: int, to_page_M: np.ndarray) -> list[tuple[int, ...]]:
    """Lists copies of pages of shard d to as many of shard e, as `Moves` has them."""
    return [(d, page, e, to) for page, to in zip(page_M.tolist(), to_page_M.tolist(), strict=True)]
