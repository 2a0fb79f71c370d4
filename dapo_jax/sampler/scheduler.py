"""Continuous batching: decides which request is in which slot, and which cache pages it has.

Host only, no jax and no token values: the session drives a `Scheduler` between blocks of decode
steps, and so do preflight's simulation and the tests, with scripted lengths:

    scheduler.submit(group, prompt_tokens, limits)     a group waits in the queue
    plan = scheduler.next_block()                      queue -> a shard's ready samples -> slots
    rows, page_P, row_N = scheduler.table(sizes, ...)  the block's rows, as the device reads them
    finished = scheduler.complete(used_N, stopped_N)   ended samples leave their slots

A group is a number of the caller's. The same submissions and lengths give the same schedule. State
is kept in NumPy tables over all slots. Axis letters: D data shards, B slots of a shard, N occupied
slots of all shards in order of (shard, slot), P pages of a shard's pool, R rows of a prefill call,
I and J as in `Cache`.
"""

import collections
import dataclasses
from collections.abc import Sequence
from itertools import islice

import numpy as np

from dapo_jax.sampler.cache import NULL_PAGE, WATERMARK_BLOCKS, Cache
from dapo_jax.sampler.plan import (
    Held,
    Moves,
    Plan,
    Prefill,
    Prefix,
    copies,
    prefill_calls,
    ranks,
    rebalance,
)


class Scheduler:
    """The queue, slots and pages of all data shards."""

    def __init__(self, cache: Cache, shards: int):
        self.cache, self.shards = cache, shards
        self._groups: dict[int, list[Prefix]] = {}  # the unfinished ones, by number
        self._queue: collections.deque[Prefix] = collections.deque()
        self._ready = [collections.deque[tuple[Prefix, int]]() for _ in range(shards)]  # samples
        # pages: how many of the response. age: admissions before the slot's.
        own = np.dtype([("prefix", object), *((it, np.int64) for it in ("group", "pages", "age"))])
        self._rows_DB = {  # of the slots: a table a column, a block looks at few
            name: np.zeros((shards, cache.slots, *dtype.shape), dtype.base)
            for name, (dtype, _) in {**cache.row_dtype.fields, **own.fields}.items()
        }
        self._admissions = 0
        # By group and sample: they keep their pages until their environments have answered.
        self._parked: dict[tuple[int, int], Held] = {}
        self._free_DP = np.ones((shards, cache.pages), bool)
        self._free_prompt_DP = np.ones((shards, cache.prompt_pages), bool)
        self._free_DP[:, NULL_PAGE] = self._free_prompt_DP[:, NULL_PAGE] = False

    def submit(
        self,
        group: int,
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
        readers, first_tokens = self.cache.readers, list(first_tokens) or [0] * len(limits)
        samples = [i for i, tokens in enumerate(first_tokens) if tokens is not None]
        parts = [samples[i : i + readers] for i in range(0, len(samples), readers)]
        prefixes = [
            Prefix(group, prompt_tokens, limits, first_tokens, part, len(part), parks)
            for part in parts
        ]
        self._queue.extend(prefixes)
        self._groups[group] = prefixes

    def cancel(self, group: int) -> None:
        """Forgets an unfinished group; the tokens sampled for it are lost."""
        for d, b in np.argwhere(self._active_DB & (self._rows_DB["group"] == group)):
            self._leave(d, b)
        for parked in [key for key in self._parked if key[0] == group]:
            self._unpark(parked)
        for prefix in self._groups.pop(group):
            if prefix.pages is not None:
                ready = (r for r in self._ready[prefix.shard] if r[0] is not prefix)
                self._ready[prefix.shard] = collections.deque(ready)
                self._release(prefix)
        self._queue = collections.deque(p for p in self._queue if p.group != group)

    @property
    def occupied(self) -> dict[tuple[int, int], Held]:
        """Maps the (group, sample) in each occupied slot to what it holds."""
        held = [self._held(d, b) for d, b in np.argwhere(self._active_DB).tolist()]
        return {(it.prefix.group, it.sample): it for it in held}

    @property
    def unfinished(self) -> list[int]:
        """Lists the groups neither finished nor cancelled, in order of submission."""
        return list(self._groups)

    @property
    def has_work(self) -> bool:
        """Returns whether there is something to decode; parked samples have to be resumed."""
        return bool(self._queue) or any(self._ready) or bool(self._active_DB.any())

    @property
    def idle_slots(self) -> int:
        """Counts the slots that no sample submitted so far will fill."""
        queued = sum(prefix.unfinished for prefix in self._queue)
        return max(0, int(self._wanted_D().sum()) - queued)

    def next_block(self, *, more: bool = False) -> Plan:
        """Assigns prompts to shards, gives pages to growing responses and fills the slots.

        more: whether groups will be submitted as slots fall idle; those fill the emptier shards.
        """
        prefills = self._assign()
        preempted = self._grow()
        moves = self._rebalance(wait=more or bool(self._queue))
        recomputes = self._admit()
        rows_DB, occupied = self._rows_DB, np.nonzero(self._active_DB)
        sampled_N, C = rows_DB["sampled"][occupied], self.cache.page_tokens
        return Plan(
            prefills=prefills,
            recomputes=recomputes,
            preempted=preempted,
            moves=moves,
            shard_N=occupied[0],
            group_N=rows_DB["group"][occupied],
            sample_N=rows_DB["sample"][occupied],
            sampled_N=sampled_N,
            left_N=rows_DB["limit"][occupied] - sampled_N,
            page_N=rows_DB["response_pages"][*occupied, sampled_N // C],
            newest_page_N=rows_DB["response_pages"][*occupied, np.maximum(sampled_N - 1, 0) // C],
            waiting=bool(self._queue) or any(self._ready),
            cache_use=1 - int(self._free_DP.sum(axis=1).min()) / (self.cache.pages - 1),
        )

    def table(self, sizes: Sequence[tuple[int, int]], behind_N) -> tuple[np.ndarray, ...]:
        """Returns (rows, page_P, row_N) of the planned block, in the smallest of the sizes.

        sizes: the (rows, pages) of a shard that are compiled, ascending. rows: `Cache.row_dtype`,
        on each shard those of its occupied slots first, and of these those that are not `behind_N`;
        row_N is the place of each. The caller fills in the columns stream, cursor, token, page and
        given.
        page_P: the pages that `response_pages` numbers, those that are full; where the size has the
        whole pool, as the pool does.
        """
        shard_N, slot_N = np.nonzero(self._active_DB)
        full_N = self._rows_DB["sampled"][shard_N, slot_N] // self.cache.page_tokens
        page_NJ = self._rows_DB["response_pages"][shard_N, slot_N]
        n_F, place_F = np.nonzero(np.arange(page_NJ.shape[1]) < full_N[:, None])
        is_full_DP = np.zeros_like(self._free_DP)
        is_full_DP[shard_N[n_F], page_NJ[n_F, place_F]] = True
        most_rows = np.bincount(shard_N, minlength=self.shards).max()
        most_pages = is_full_DP.sum(axis=1).max() + 1
        rows, pages = next(s for s in sizes if s[0] >= most_rows and s[1] >= most_pages)
        row_N = np.empty_like(shard_N)
        row_N[np.lexsort((behind_N, shard_N))] = shard_N * rows + ranks(shard_N)
        table = np.zeros(self.shards * rows, self.cache.row_dtype)
        for name in table.dtype.names:
            table[name][row_N] = self._rows_DB[name][shard_N, slot_N]
        if pages == self.cache.pages:
            return table, np.tile(np.arange(pages, dtype=np.int32), self.shards), row_N
        number_DP = np.cumsum(is_full_DP, axis=1, dtype=np.int32)  # from 1: NULL_PAGE stays 0
        page_DP = np.full((self.shards, pages), NULL_PAGE, np.int32)
        shard_U, page_U = np.nonzero(is_full_DP)
        page_DP[shard_U, number_DP[shard_U, page_U]] = page_U
        pool_NJ = table["response_pages"][row_N]
        table["response_pages"][row_N] = number_DP[shard_N[:, None], pool_NJ]
        return table, page_DP.reshape(-1), row_N

    def complete(self, used_N: np.ndarray, stopped_N: np.ndarray) -> list[Held]:
        """Ends the planned block, in which every occupied slot sampled `used_N` more tokens.

        Samples that stopped, or have reached their limit, leave their slots and are returned. Those
        that park keep their pages until `resume`, behind whole blocks, or `end`.
        """
        shard_N, slot_N = np.nonzero(self._active_DB)
        sampled_N = self._rows_DB["sampled"][shard_N, slot_N] + used_N
        self._rows_DB["sampled"][shard_N, slot_N] = sampled_N
        finished = []
        ended_N = stopped_N | (sampled_N == self._rows_DB["limit"][shard_N, slot_N])
        for n in np.flatnonzero(ended_N).tolist():
            it = self._leave(shard_N[n], slot_N[n])._replace(stopped=bool(stopped_N[n]))
            finished.append(it)
            if it.prefix.parks:
                whole = it.tokens - it.tokens % self.cache.block_tokens  # a block is in one page
                self._parked[it.prefix.group, it.sample] = it._replace(tokens=whole)
                self._free_DP[it.prefix.shard, it.pages] = False
            else:
                self._ended(it.prefix)
        return finished

    def resume(self, group: int, sample: int, *, first_tokens: int = 0) -> None:
        """Lets a parked sample go on: the next free slot of its shard is its own.

        first_tokens: of whole blocks, whose keys and values are computed together; 0: it goes on in
        its pages.
        """
        prefix = self._parked[group, sample].prefix
        if first_tokens:
            self._free_pages((group, sample), tokens=first_tokens)
        self._ready[prefix.shard].appendleft((prefix, sample))

    def end(self, group: int, sample: int) -> None:
        """Ends a parked sample."""
        self._ended(self._unpark((group, sample)))

    def _unpark(self, key: tuple[int, int]) -> Prefix:
        """Frees the pages of a parked sample; returns its prompt."""
        self._free_pages(key)
        return self._parked.pop(key).prefix

    def _drop(self, d: int, younger_than: int = -1) -> bool:
        """Takes the pages of the youngest sample that is parked on a shard.

        Returns False where there is none that began after the admission `younger_than`.
        """
        here = [(it.age, key) for key, it in self._parked.items() if it.prefix.shard == d]
        held = [it for it in here if it[0] > younger_than and len(self._parked[it[1]].pages)]
        if held:
            self._free_pages(max(held)[1])
        return bool(held)

    def _free_pages(self, key: tuple[int, int], **changes) -> None:
        """Frees the pages of a parked sample: what it has is computed again when it goes on."""
        held = self._parked[key]
        self._free_DP[held.prefix.shard, held.pages] = True
        self._parked[key] = held._replace(pages=np.zeros(0, int), **changes)

    def _ended(self, prefix: Prefix) -> None:
        prefix.unfinished -= 1
        if prefix.unfinished == 0:
            self._release(prefix)
            if not any(other.unfinished for other in self._groups[prefix.group]):
                del self._groups[prefix.group]

    @property
    def _active_DB(self) -> np.ndarray:
        return self._rows_DB["active"] > 0

    def _ready_D(self) -> np.ndarray:
        return np.array(list(map(len, self._ready)))

    def _wanted_D(self) -> np.ndarray:
        """Counts each shard's free slots less its ready samples; negative where those are more."""
        return (~self._active_DB).sum(axis=1) - self._ready_D()

    def _assign(self) -> list[Prefill]:
        """Moves queued prompts, in order, to the shards with most slots to fill.

        A prefill call has a row for several prompts of a bucket: prompts whose samples find no slot
        yet take the rows that would stay empty.
        """
        taken: dict[int, list[list]] = {}  # bucket -> of each shard the rows of calls
        buckets, wanted_D = self.cache.buckets, self._wanted_D()
        free_D = self._free_prompt_DP.sum(axis=1)
        while self._queue:
            prefix = self._queue[0]
            pages = self.cache.pages_of_prompt(prefix.prompt_tokens)
            bucket = next(it for it in (0, *buckets) if it >= pages)
            taken_D = taken.setdefault(bucket, [[] for _ in range(self.shards)])
            able_D = wanted_D > 0
            if bucket:
                filled_D = np.array(list(map(len, taken_D)))
                rows = buckets[bucket]
                able_D |= filled_D < -(-filled_D.max() // rows) * rows
            able_D &= free_D >= pages
            if not able_D.any():
                break
            d = int(np.where(able_D, wanted_D, np.iinfo(np.int64).min).argmax())
            self._queue.popleft()
            self._place(prefix, d, pages)
            self._ready[d].extend((prefix, sample) for sample in prefix.samples)
            taken_D[d].append((prefix.group, None, prefix.pages))
            wanted_D[d] -= len(prefix.samples)
            free_D[d] -= pages
        taken.pop(0, None)
        return prefill_calls(taken, buckets)

    def _place(self, prefix: Prefix, d: int, pages: int) -> None:
        """Gives a prompt the lowest free pages of shard d."""
        prefix.shard, prefix.pages = d, np.flatnonzero(self._free_prompt_DP[d])[:pages]
        self._free_prompt_DP[d, prefix.pages] = False

    def _grow(self) -> list[Held]:
        """Gives a page to every response whose last one is full, the oldest sample first.

        Where a shard has too few, the youngest sample is preempted, as often as needed. Returns
        those that keep their tokens.
        """
        preempted = []
        full_DB = self._rows_DB["sampled"] == self._rows_DB["pages"] * self.cache.page_tokens
        full_DB &= self._active_DB
        for d in range(self.shards):
            while full_DB[d].sum() > self._free_DP[d].sum():
                age_B = np.where(self._active_DB[d], self._rows_DB["age"][d], -1)
                youngest = int(age_B.argmax())
                # The only sample that goes on does not wait for those that do.
                is_alone = (age_B >= 0).sum() == 1
                if not self._drop(d, younger_than=-1 if is_alone else age_B[youngest]):
                    full_DB[d, youngest] = False
                    preempted += self._preempt(d, youngest)
        shard_N, slot_N = np.nonzero(full_DB)
        order = np.lexsort((self._rows_DB["age"][shard_N, slot_N], shard_N))
        self._give_pages(shard_N[order], slot_N[order])
        return preempted

    def _preempt(self, d: int, b: int) -> list[Held]:
        """Makes a sample wait until there is room; returns it if it keeps its tokens.

        Those that only its policy sampled are sampled again, to the same bits: computing them
        together would have all shards wait for one.
        """
        lost = self._leave(d, b)
        self._ready[d].appendleft((lost.prefix, lost.sample))
        if not (self.cache.partial_rollouts or lost.prefix.parks):
            return []
        lost.prefix.first_tokens[lost.sample] = lost.tokens
        return [lost]

    def _admit(self) -> list[Prefill]:
        """Moves ready samples to free slots, lowest slot first, above the watermark of free pages.

        The pages that occupied slots fill in WATERMARK_BLOCKS blocks stay free: a sample that is
        admitted too soon has to be preempted. Returns the calls that recompute partial responses.
        """
        cache, occupied_D = self.cache, self._active_DB.sum(axis=1)
        for d, ready in enumerate(self._ready if self._parked else ()):
            # Those that keep pages first: they would never be free else.
            order = sorted(ready, key=lambda it: self._before(*it).age)
            ready = self._ready[d] = collections.deque(order)
            begins = ready and not occupied_D[d]
            while begins and self._free_DP[d].sum() < self._pages_to_enter(*ready[0]):
                if not self._drop(d):
                    break
        most_D = np.minimum(cache.slots - occupied_D, self._ready_D())
        k_K = np.arange(most_D.max())
        growth_DK = WATERMARK_BLOCKS * (occupied_D[:, None] + k_K) * cache.block_tokens
        pages_DK = np.ones((self.shards, len(k_K)), np.int64)
        for pages_K, ready, most in zip(pages_DK, self._ready, most_D.tolist(), strict=True):
            pages_K[:most] = [self._pages_to_enter(*it) for it in islice(ready, most)]
        free_DK = self._free_DP.sum(axis=1)[:, None] - (pages_DK.cumsum(axis=1) - 1)
        fits_DK = (free_DK > growth_DK // cache.page_tokens) & (k_K < most_D[:, None])
        admitted_D = np.logical_and.accumulate(fits_DK, axis=1).sum(axis=1)
        shard_N, slot_N = np.nonzero(~self._active_DB)
        first_N = ranks(shard_N) < admitted_D[shard_N]
        shard_N, slot_N = shard_N[first_N], slot_N[first_N]
        for d, b in zip(shard_N.tolist(), slot_N.tolist(), strict=True):
            self._enter(d, b, *self._ready[d].popleft())
        begun_N = self._rows_DB["sampled"][shard_N, slot_N]
        has_none_N = self._rows_DB["pages"][shard_N, slot_N] == 0
        for page in range(int(begun_N.max(initial=0)) // cache.page_tokens + 1):
            needed_N = begun_N >= page * cache.page_tokens
            needed_N &= self._rows_DB["pages"][shard_N, slot_N] <= page
            self._give_pages(shard_N[needed_N], slot_N[needed_N])
        begun_N = (begun_N > 0) & has_none_N  # parked ones have their pages
        return self._recomputes(shard_N[begun_N], slot_N[begun_N])

    def _before(self, prefix: Prefix, sample: int) -> Held:
        """Returns what a ready sample begins with: what it has parked, or its first tokens."""
        anew = Held(prefix, sample, self._admissions, prefix.first_tokens[sample])
        return self._parked.get((prefix.group, sample), anew)

    def _pages_to_enter(self, prefix: Prefix, sample: int) -> int:
        """Counts the pages that a ready sample needs beside those that it has."""
        before = self._before(prefix, sample)
        return 1 + before.tokens // self.cache.page_tokens - len(before.pages)

    def _recomputes(self, shard_N: np.ndarray, slot_N: np.ndarray) -> list[Prefill]:
        """Makes the calls for partial responses in these slots, in order of shards."""
        taken: dict[int, list[list]] = {}  # as in `_assign`
        buckets = self.cache.buckets
        for d, b in zip(shard_N.tolist(), slot_N.tolist(), strict=True):
            it = self._held(d, b)
            fed = self._rows_DB["prompt_tokens"][d, b] + it.tokens
            bucket = next(it for it in buckets if it * self.cache.page_tokens >= fed)
            pages = it.pages[: -(-it.tokens // self.cache.page_tokens)]
            taken_D = taken.setdefault(bucket, [[] for _ in range(self.shards)])
            taken_D[d].append((it.prefix.group, it, pages))
        return prefill_calls(taken, buckets)

    def _rebalance(self, *, wait: bool) -> Moves:
        """Moves samples from full shards to others, unless to wait for prompts without a shard.

        First those that wait for a slot, then those with the fewest pages. Each takes a copy of its
        prompt; it stays where the other shard has too few pages for it.
        """
        moves = Moves([], [])
        count_D = self._active_DB.sum(axis=1) + self._ready_D()
        for d, e in [] if wait else rebalance(count_D):
            if self._ready[d]:
                prefix, sample = self._ready[d][-1]
                if (prefix.group, sample) in self._parked:
                    continue  # its pages are here
                if self._has_room(e, len(prefix.pages), pages=0):
                    self._ready[d].pop()
                    self._ready[e].append((self._part(moves, prefix, sample, e), sample))
            else:
                pages_DB = self._rows_DB["pages"]
                pages_B = np.where(self._active_DB[d], pages_DB[d], self.cache.pages)
                b, c = int(pages_B.argmin()), int(self._active_DB[e].argmin())
                prefix, sample, *_ = self._held(d, b)
                if self._has_room(e, len(prefix.pages), pages=pages_B[b]):
                    self._move(moves, self._part(moves, prefix, sample, e), (d, b), (e, c))
        return Moves(*(np.array(rows, np.int32).reshape(-1, 4) for rows in moves))

    def _has_room(self, d: int, prompt_pages: int, *, pages: int) -> bool:
        """Returns whether shard d has these pages free, and those of a longest prompt."""
        free_prompt_pages = self._free_prompt_DP[d].sum() - self.cache.pages_per_prompt
        return free_prompt_pages >= prompt_pages and self._free_DP[d].sum() >= pages

    def _part(self, moves: Moves, prefix: Prefix, sample: int, e: int) -> Prefix:
        part = dataclasses.replace(prefix, samples=[sample], unfinished=1, shard=-1, pages=None)
        self._groups[prefix.group].append(part)
        self._place(part, e, len(prefix.pages))
        moves.prompt_pages_M4.extend(copies(prefix.shard, prefix.pages, e, part.pages))
        self._ended(prefix)
        return part

    def _move(
        self, moves: Moves, prefix: Prefix, old: tuple[int, int], new: tuple[int, int]
    ) -> None:
        for column_DB in self._rows_DB.values():
            column_DB[new] = column_DB[old]
        self._rows_DB["prefix"][new], self._rows_DB["reader"][new] = prefix, 0
        self._rows_DB["prompt_pages"][new][: len(prefix.pages)] = prefix.pages
        pages = np.flatnonzero(self._free_DP[prefix.shard])[: self._rows_DB["pages"][old]]
        self._rows_DB["response_pages"][new][: len(pages)] = pages
        self._free_DP[prefix.shard, pages] = False
        moves.pages_M4.extend(copies(old[0], self._leave(*old).pages, prefix.shard, pages))

    def _enter(self, d: int, b: int, prefix: Prefix, sample: int) -> None:
        _, _, age, tokens, pages, _ = self._before(prefix, sample)
        self._parked.pop((prefix.group, sample), None)
        self._admissions += 1
        row = {
            "active": 1,
            "prefix": prefix,
            "group": prefix.group,
            "sample": sample,
            "sampled": tokens,
            "limit": prefix.limits[sample],
            "prompt_tokens": prefix.prompt_tokens - 1,
            "reader": prefix.samples.index(sample),
            "pages": len(pages),
            "age": age,
        }
        for name, value in row.items():
            self._rows_DB[name][d, b] = value
        self._rows_DB["prompt_pages"][d, b, : len(prefix.pages)] = prefix.pages
        self._rows_DB["response_pages"][d, b, : len(pages)] = pages

    def _give_pages(self, shard_N: np.ndarray, slot_N: np.ndarray) -> None:
        """Gives each of the slots, which lie in order of shards, the lowest page that is free.

        So pages in use stay together at the pool's beginning.
        """
        count_D = np.bincount(shard_N, minlength=self.shards)
        shards = zip(self._free_DP, count_D, strict=True)
        page_N = np.concatenate([np.flatnonzero(free_P)[:count] for free_P, count in shards])
        self._free_DP[shard_N, page_N] = False
        pages_N = self._rows_DB["pages"][shard_N, slot_N]
        self._rows_DB["response_pages"][shard_N, slot_N, pages_N] = page_N
        self._rows_DB["pages"][shard_N, slot_N] = pages_N + 1

    def _held(self, d: int, b: int) -> Held:
        sample, age, tokens, pages = (
            int(self._rows_DB[name][d, b]) for name in ("sample", "age", "sampled", "pages")
        )
        pages_J = self._rows_DB["response_pages"][d, b, :pages].copy()
        return Held(self._rows_DB["prefix"][d, b], sample, age, tokens, pages_J)

    def _leave(self, d: int, b: int) -> Held:
        """Frees a slot and its sample's own pages; returns what it held."""
        held = self._held(d, b)
        self._free_DP[d, held.pages] = True
        for column_DB in self._rows_DB.values():
            column_DB[d, b] = 0
        return held

    def _release(self, prefix: Prefix) -> None:
        self._free_prompt_DP[prefix.shard, prefix.pages] = True
        prefix.pages = None
