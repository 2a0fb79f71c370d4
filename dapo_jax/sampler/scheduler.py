"""Continuous batching: decides which request is in which slot, and which cache pages it has.

Host only, no jax and no token values: the session drives a `Scheduler` between blocks of decode
steps, and so do experiments/preflight and the tests, with scripted lengths:

    scheduler.submit(group, prompt_tokens, limits)     a group waits in the queue
    plan = scheduler.next_block()                      queue -> a shard's ready samples -> slots
    rows, page_P, row_N = scheduler.table(sizes, ...)  the block's rows, as the device reads them
    finished = scheduler.complete(used_N, stopped_N)   ended samples leave their slots

A group is an object or a number of the caller's. The same submissions and lengths give the same
schedule. Axis letters: D data shards, B slots of a shard, N occupied slots of all shards in order
of (shard, slot), P pages of a shard's pool, F and U full pages, E empty slots, K ready samples, R
rows of a prefill call, I and J as in `Cache`.
"""

import collections
import copy
import operator
from collections.abc import Hashable, Sequence
from itertools import islice

import numpy as np

from dapo_jax.sampler.cache import NULL_PAGE, WATERMARK_BLOCKS, Cache, round_up
from dapo_jax.sampler.plan import (
    NO_PAGES,
    UNADMITTED,
    Moves,
    Plan,
    Prefill,
    Prefix,
    Sample,
    copies,
    prefill_calls,
    ranks,
    rebalance,
)
from dapo_jax.sampler.slots import Pages, Slots


class Scheduler:
    """The queue, slots and pages of all data shards."""

    def __init__(self, cache: Cache, shards: int):
        self.cache, self.shards = cache, shards
        self._groups: dict[Hashable, list[Prefix]] = {}  # of the unfinished ones
        self._queue: collections.deque[Prefix] = collections.deque()
        self._ready = [collections.deque[Sample]() for _ in range(shards)]
        self._slots = Slots(cache, shards)
        self._admissions = 0
        # By their keys: they keep their pages until their environments have answered.
        self._parked: dict[tuple[Hashable, int], Sample] = {}
        self._pages = Pages(shards, cache.pages)
        self._prompt_pages = Pages(shards, cache.prompt_pages)

    def submit(
        self,
        group: Hashable,
        prompt_tokens: int,
        limits: Sequence[int],
        *,
        first_tokens: Sequence[int | None] = (),
        parks: bool = False,
    ) -> None:
        """Queues a group: one sample of at most so many tokens for each of the limits.

        first_tokens: the number of tokens that each begins with, whole blocks; None: it has ended.
        parks: as of `Prefix`.
        """
        first_tokens = list(first_tokens) or [0] * len(limits)
        prefixes = self._groups[group] = []
        for i, (limit, tokens) in enumerate(zip(limits, first_tokens, strict=True)):
            if tokens is None:
                continue
            if not prefixes or prefixes[-1].unfinished == self.cache.readers:
                prefixes.append(Prefix(group, prompt_tokens, parks))
            prefixes[-1].samples.append(Sample(prefixes[-1], i, limit, tokens))
            prefixes[-1].unfinished += 1
        self._queue.extend(prefixes)

    def cancel(self, group: Hashable) -> None:
        """Forgets an unfinished group; the tokens sampled for it are lost."""
        for d, b in np.argwhere(self._slots.active_DB & (self._slots["group"] == group)):
            self._leave(d, b)
        for parked in [key for key in self._parked if key[0] == group]:
            self._unpark(parked)
        for prefix in self._groups.pop(group):
            if prefix.pages is not None:
                ready = (it for it in self._ready[prefix.shard] if it.prefix is not prefix)
                self._ready[prefix.shard] = collections.deque(ready)
                self._release(prefix)
        self._queue = collections.deque(p for p in self._queue if p.group != group)

    @property
    def occupied(self) -> dict[tuple[Hashable, int], Sample]:
        """Maps keys to the samples in slots."""
        samples = [self._slots.sample(*slot) for slot in zip(*self._slots.occupied(), strict=True)]
        return {sample.key: sample for sample in samples}

    @property
    def unfinished(self) -> list[Hashable]:
        """Lists the groups neither finished nor cancelled, in order of submission."""
        return list(self._groups)

    @property
    def has_work(self) -> bool:
        """Returns whether there is something to decode; parked samples have to be resumed."""
        return bool(self._queue) or any(self._ready) or bool(self._slots.active_DB.any())

    @property
    def idle_slots(self) -> int:
        """Counts the slots that no sample submitted so far will fill."""
        queued = sum(prefix.unfinished for prefix in self._queue)
        return max(0, int(self._wanted_D().sum()) - queued)

    def next_block(self, *, more: bool = False) -> Plan:
        """Assigns prompts to shards, gives pages to growing responses and fills the slots.

        more: whether groups will be submitted as slots fall idle; those fill the emptier shards.
        """
        # A sample in a slot comes before one that waits: it grows first, and if it must at the cost
        # of the youngest. Moves empty slots, which are then filled.
        prefills = self._assign()
        preempted = self._grow()
        moves = self._rebalance(wait=more or bool(self._queue))
        recomputes = self._admit()
        slots, occupied, C = self._slots, self._slots.occupied(), self.cache.page_tokens
        sampled_N = slots["sampled"][occupied]
        return Plan(
            prefills=prefills,
            recomputes=recomputes,
            preempted=preempted,
            moves=moves,
            shard_N=occupied[0],
            group_N=slots["group"][occupied],
            sample_N=slots["sample"][occupied],
            sampled_N=sampled_N,
            left_N=slots["limit"][occupied] - sampled_N,
            page_N=slots["response_pages"][*occupied, sampled_N // C],
            newest_page_N=slots["response_pages"][*occupied, np.maximum(sampled_N - 1, 0) // C],
            waiting=bool(self._queue) or any(self._ready),
            cache_use=1 - int(self._pages.free_D.min()) / (self.cache.pages - 1),
        )

    def table(self, sizes: Sequence[tuple[int, int]], behind_N) -> tuple[np.ndarray, ...]:
        """Returns (rows, page_P, row_N) of the planned block, in the smallest of the sizes.

        sizes: the (rows, pages) of a shard that are compiled, ascending. rows: `Cache.row_dtype`,
        on each shard those of its occupied slots first, and of these those that are not `behind_N`;
        row_N is the place of each. The caller fills in the columns stream, cursor, token, page and
        given. page_P: the full pages, which `response_pages` numbers; the whole pool if the size
        has it.
        """
        shard_N, slot_N = self._slots.occupied()
        full_N = self._slots["sampled"][shard_N, slot_N] // self.cache.page_tokens
        page_NJ = self._slots["response_pages"][shard_N, slot_N]
        n_F, place_F = np.nonzero(np.arange(page_NJ.shape[1]) < full_N[:, None])
        is_full_DP = np.zeros_like(self._pages.free_DP)
        is_full_DP[shard_N[n_F], page_NJ[n_F, place_F]] = True
        most_rows = np.bincount(shard_N, minlength=self.shards).max()
        most_pages = is_full_DP.sum(axis=1).max() + 1
        rows, pages = next(s for s in sizes if s[0] >= most_rows and s[1] >= most_pages)
        row_N = np.empty_like(shard_N)
        row_N[np.lexsort((behind_N, shard_N))] = shard_N * rows + ranks(shard_N)
        table = np.zeros(self.shards * rows, self.cache.row_dtype)
        for name in table.dtype.names:
            table[name][row_N] = self._slots[name][shard_N, slot_N]
        if pages == self.cache.pages:
            return table, np.tile(np.arange(pages, dtype=np.int32), self.shards), row_N
        number_DP = np.cumsum(is_full_DP, axis=1, dtype=np.int32)  # from 1: NULL_PAGE stays 0
        page_DP = np.full((self.shards, pages), NULL_PAGE, np.int32)
        shard_U, page_U = np.nonzero(is_full_DP)
        page_DP[shard_U, number_DP[shard_U, page_U]] = page_U
        pool_NJ = table["response_pages"][row_N]
        table["response_pages"][row_N] = number_DP[shard_N[:, None], pool_NJ]
        return table, page_DP.reshape(-1), row_N

    def complete(self, used_N: np.ndarray, stopped_N: np.ndarray) -> list[Sample]:
        """Ends the planned block, in which every occupied slot sampled `used_N` more tokens.

        Samples that stopped, or have reached their limit, leave their slots and are returned. Those
        that park keep their pages until they `resume` or `end`.
        """
        shard_N, slot_N = self._slots.occupied()
        sampled_N = self._slots["sampled"][shard_N, slot_N] + used_N
        self._slots["sampled"][shard_N, slot_N] = sampled_N
        finished = []
        ended_N = stopped_N | (sampled_N == self._slots["limit"][shard_N, slot_N])
        for n in np.flatnonzero(ended_N).tolist():
            parks = self._slots["occupant"][shard_N[n], slot_N[n]].prefix.parks
            sample = self._leave(shard_N[n], slot_N[n], keeps_pages=parks)
            sample.stopped = bool(stopped_N[n])
            finished.append(sample)
            if parks:
                self._parked[sample.key] = sample
            else:
                self._ended(sample.prefix)
        return finished

    def resume(self, group: Hashable, index: int, *, first_tokens: int = 0) -> None:
        """Lets a parked sample go on: the next free slot of its shard is its own.

        first_tokens: of whole blocks, whose keys and values are computed together; 0: it goes on in
        its pages, behind whole blocks, as a block is in one page.
        """
        sample = self._parked[group, index]
        sample.tokens = first_tokens or sample.tokens - sample.tokens % self.cache.block_tokens
        if first_tokens:
            self._free_pages(sample)
        self._ready[sample.prefix.shard].appendleft(sample)

    def end(self, group: Hashable, index: int) -> None:
        """Ends a parked sample."""
        self._ended(self._unpark((group, index)).prefix)

    def _unpark(self, key: tuple[Hashable, int]) -> Sample:
        """Frees the pages of a parked sample."""
        self._free_pages(self._parked[key])
        return self._parked.pop(key)

    def _drop(self, d: int, younger_than: int = -1) -> bool:
        """Takes the pages of the youngest sample that is parked on a shard.

        Returns False where there is none that began after the admission `younger_than`.
        """
        here = [it for it in self._parked.values() if it.prefix.shard == d and len(it.pages)]
        youngest = max(here, key=operator.attrgetter("admission"), default=None)
        if youngest is None or youngest.admission <= younger_than:
            return False
        self._free_pages(youngest)
        return True

    def _free_pages(self, sample: Sample) -> None:
        """Frees the pages of a parked sample: what it has is computed again when it goes on."""
        self._pages.give_back(sample.prefix.shard, sample.pages)
        sample.pages = NO_PAGES

    def _ended(self, prefix: Prefix) -> None:
        prefix.unfinished -= 1
        if prefix.unfinished == 0:
            self._release(prefix)
            if not any(other.unfinished for other in self._groups[prefix.group]):
                del self._groups[prefix.group]

    def _ready_D(self) -> np.ndarray:
        return np.array(list(map(len, self._ready)))

    def _wanted_D(self) -> np.ndarray:
        """Counts each shard's free slots less its ready samples; negative where those are more."""
        return self.cache.slots - self._slots.count_D - self._ready_D()

    def _assign(self) -> list[Prefill]:
        """Moves queued prompts, in order, to the shards with most slots to fill.

        A prefill call has rows for several prompts of one bucket: prompts whose samples find no
        slot yet take those that would stay empty.
        """
        taken: dict[int, list[list]] = {}  # bucket -> of each shard the rows of calls
        buckets, wanted_D = self.cache.buckets, self._wanted_D()
        free_D = self._prompt_pages.free_D
        while self._queue:
            prefix = self._queue[0]
            pages = self.cache.pages_of_prompt(prefix.prompt_tokens)
            bucket = next(it for it in (0, *buckets) if it >= pages)
            taken_D = taken.setdefault(bucket, [[] for _ in range(self.shards)])
            able_D = wanted_D > 0
            if bucket:  # a row of a call costs as much where it is empty
                filled_D = np.array(list(map(len, taken_D)))
                has_empty_row_D = filled_D < round_up(filled_D.max(), buckets[bucket])
                able_D |= has_empty_row_D
            able_D &= free_D >= pages
            if not able_D.any():
                break
            d = max(np.flatnonzero(able_D).tolist(), key=lambda shard: wanted_D[shard])
            self._queue.popleft()
            prefix.shard, prefix.pages = d, self._prompt_pages.take(d, pages)
            self._ready[d].extend(prefix.samples)
            taken_D[d].append((prefix.group, None, prefix.pages))
            wanted_D[d] -= len(prefix.samples)
            free_D[d] -= pages
        taken.pop(0, None)
        return prefill_calls(taken, buckets)

    def _grow(self) -> list[Sample]:
        """Gives a page to every response whose last one is full, the oldest sample first.

        Where a shard has too few, the youngest sample is preempted, as often as needed. Returns
        those that keep their tokens.
        """
        preempted, slots = [], self._slots
        full_DB = slots["sampled"] == slots["pages"] * self.cache.page_tokens
        full_DB &= slots.active_DB
        for d in range(self.shards):
            # The oldest always has its page, and ends: so nothing waits for ever.
            while full_DB[d].sum() > self._pages.count(d):
                admission_B = np.where(slots.active_DB[d], slots["admission"][d], -1)
                youngest = int(admission_B.argmax())
                # The only sample in a slot takes pages of parked ones, however old.
                is_alone = (admission_B >= 0).sum() == 1
                if not self._drop(d, younger_than=-1 if is_alone else admission_B[youngest]):
                    full_DB[d, youngest] = False
                    preempted += self._preempt(d, youngest)
        shard_N, slot_N = np.nonzero(full_DB)
        order = np.lexsort((slots["admission"][shard_N, slot_N], shard_N))
        self._give_pages(shard_N[order], slot_N[order])
        return preempted

    def _preempt(self, d: int, b: int) -> list[Sample]:
        """Makes a sample wait until there is room; returns it, as it was, if it keeps its tokens.

        Those that only its policy sampled are sampled again, to the same bits: computing them
        together would have all shards wait for one.
        """
        sample = self._leave(d, b)
        as_it_was = copy.copy(sample)
        keeps = self.cache.partial_rollouts or sample.prefix.parks
        sample.tokens, sample.pages = sample.tokens * keeps, NO_PAGES
        sample.admission = UNADMITTED
        self._ready[d].appendleft(sample)
        return [as_it_was] if keeps else []

    def _admit(self) -> list[Prefill]:
        """Moves ready samples to free slots, lowest slot first, above the watermark of free pages.

        The pages that occupied slots fill in WATERMARK_BLOCKS blocks stay free: a sample that is
        admitted too soon has to be preempted. Returns the calls that recompute partial responses.
        """
        cache, slots, occupied_D = self.cache, self._slots, self._slots.count_D
        for d, ready in enumerate(self._ready if self._parked else ()):
            # Those that keep pages first: they would never be free else.
            order = sorted(ready, key=operator.attrgetter("admission"))
            ready = self._ready[d] = collections.deque(order)
            begins = ready and not occupied_D[d]
            while begins and self._pages.count(d) < self._pages_to_enter(ready[0]):
                if not self._drop(d):
                    break
        most_D = np.minimum(cache.slots - occupied_D, self._ready_D())
        k_K = np.arange(most_D.max())
        growth_DK = WATERMARK_BLOCKS * (occupied_D[:, None] + k_K) * cache.block_tokens
        pages_DK = np.ones((self.shards, len(k_K)), np.int64)
        for pages_K, ready, most in zip(pages_DK, self._ready, most_D.tolist(), strict=True):
            pages_K[:most] = [self._pages_to_enter(it) for it in islice(ready, most)]
        free_DK = self._pages.free_D[:, None] - (pages_DK.cumsum(axis=1) - 1)
        fits_DK = (free_DK > growth_DK // cache.page_tokens) & (k_K < most_D[:, None])
        admitted_D = np.logical_and.accumulate(fits_DK, axis=1).sum(axis=1)
        shard_E, slot_E = np.nonzero(~slots.active_DB)  # the empty slots
        is_filled_E = ranks(shard_E) < admitted_D[shard_E]
        shard_N, slot_N = shard_E[is_filled_E], slot_E[is_filled_E]
        for d, b in zip(shard_N.tolist(), slot_N.tolist(), strict=True):
            self._enter(d, b, self._ready[d].popleft())
        begun_N = slots["sampled"][shard_N, slot_N]
        has_none_N = slots["pages"][shard_N, slot_N] == 0
        for page in range(int(begun_N.max(initial=0)) // cache.page_tokens + 1):
            needed_N = begun_N >= page * cache.page_tokens
            needed_N &= slots["pages"][shard_N, slot_N] <= page
            self._give_pages(shard_N[needed_N], slot_N[needed_N])
        begun_N = (begun_N > 0) & has_none_N  # parked ones have their pages
        return self._recomputes(shard_N[begun_N], slot_N[begun_N])

    def _pages_to_enter(self, sample: Sample) -> int:
        """Counts the pages that a ready sample needs beside those that it has."""
        return 1 + sample.tokens // self.cache.page_tokens - len(sample.pages)

    def _recomputes(self, shard_N: np.ndarray, slot_N: np.ndarray) -> list[Prefill]:
        """Makes the calls for partial responses in these slots, in order of shards."""
        taken: dict[int, list[list]] = {}  # as in `_assign`
        buckets = self.cache.buckets
        for d, b in zip(shard_N.tolist(), slot_N.tolist(), strict=True):
            sample = self._slots.sample(d, b)
            fed = self._slots["prompt_tokens"][d, b] + sample.tokens
            bucket = next(pages for pages in buckets if pages * self.cache.page_tokens >= fed)
            pages = sample.pages[: -(-sample.tokens // self.cache.page_tokens)]
            taken_D = taken.setdefault(bucket, [[] for _ in range(self.shards)])
            taken_D[d].append((sample.prefix.group, sample, pages))
        return prefill_calls(taken, buckets)

    def _rebalance(self, *, wait: bool) -> Moves:
        """Moves samples from full shards to others, unless to wait for prompts without a shard.

        First those that wait for a slot, then those with the fewest pages. Each takes a copy of its
        prompt; it stays where the other shard has too few pages for it.
        """
        moves, slots = Moves([], []), self._slots
        for d, e in [] if wait else rebalance(slots.count_D + self._ready_D()):
            if self._ready[d]:
                sample = self._ready[d][-1]
                if sample.key in self._parked:
                    continue  # its pages are here
                if self._has_room(e, sample):
                    self._ready[e].append(self._ready[d].pop())
                    self._follow(moves, sample, e)
            else:
                pages_B = np.where(slots.active_DB[d], slots["pages"][d], self.cache.pages)
                b, to = int(pages_B.argmin()), int(slots.active_DB[e].argmin())
                if self._has_room(e, slots.sample(d, b)):
                    sample = self._leave(d, b)
                    self._follow(moves, sample, e)
                    pages = self._pages.take(e, len(sample.pages))
                    moves.pages_M4.extend(copies(d, sample.pages, e, pages))
                    sample.pages = pages
                    slots.enter(e, to, sample)
        return Moves(*(np.array(rows, np.int32).reshape(-1, 4) for rows in moves))

    def _has_room(self, d: int, sample: Sample) -> bool:
        """Returns whether shard d has a sample's pages free, and those of a longest prompt."""
        free_prompt_pages = self._prompt_pages.count(d) - self.cache.pages_per_prompt
        has_prompts = free_prompt_pages >= len(sample.prefix.pages)
        return has_prompts and self._pages.count(d) >= len(sample.pages)

    def _follow(self, moves: Moves, sample: Sample, e: int) -> None:
        """Gives a sample that moves to shard e a copy of its prompt there."""
        old = sample.prefix
        pages = self._prompt_pages.take(e, len(old.pages))
        moves.prompt_pages_M4.extend(copies(old.shard, old.pages, e, pages))
        sample.prefix = Prefix(old.group, old.prompt_tokens, old.parks, [sample], 1, e, pages)
        self._groups[old.group].append(sample.prefix)
        self._ended(old)

    def _enter(self, d: int, b: int, sample: Sample) -> None:
        self._parked.pop(sample.key, None)
        sample.admission = min(sample.admission, self._admissions)
        self._admissions += 1
        self._slots.enter(d, b, sample)

    def _give_pages(self, shard_N: np.ndarray, slot_N: np.ndarray) -> None:
        """Gives each of the slots, which lie in order of shards, the lowest page that is free."""
        self._slots.add_pages(shard_N, slot_N, self._pages.take_one_each(shard_N))

    def _leave(self, d: int, b: int, *, keeps_pages: bool = False) -> Sample:
        """Frees a slot, and the pages of its sample unless it keeps them; returns the sample."""
        sample = self._slots.leave(d, b)
        if not keeps_pages:
            self._pages.give_back(d, sample.pages)
        return sample

    def _release(self, prefix: Prefix) -> None:
        self._prompt_pages.give_back(prefix.shard, prefix.pages)
        prefix.pages = None
