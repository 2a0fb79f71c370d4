"""The scheduler assigns slots and pages, driven with scripted lengths and without devices."""

import dataclasses

import numpy as np
import pytest
from engines import ROOMY as CACHE

from dapo_jax.sampler.cache import NULL_PAGE, decode_sizes
from dapo_jax.sampler.scheduler import Scheduler


class Script:
    """A scheduler whose requests have scripted lengths: {(group, sample): tokens}.

    A request whose script ends before its limit stops there.
    """

    def __init__(self, cache=CACHE, shards=1):
        self.scheduler = Scheduler(cache, shards)
        self.tokens = {}
        self.finished = {}

    def submit(self, group, tokens, *, prompt_tokens=9):
        self.tokens |= {(group, sample): n for sample, n in enumerate(tokens)}
        limits = [self.scheduler.cache.max_response_tokens] * len(tokens)
        self.scheduler.submit(group, prompt_tokens, limits)

    def step(self):
        """Plans a block, carries it out and returns the plan."""
        plan = self.scheduler.next_block()
        self.complete(plan)
        return plan

    def complete(self, plan):
        """Carries a plan out; nothing is lost or owned twice, and no shard waits for nobody."""
        owned_once(self.scheduler)
        assert all(d in plan.shard_N for d, ready in enumerate(self.scheduler._ready) if ready)
        names = zip(plan.group_N.tolist(), plan.sample_N.tolist(), strict=True)
        left_N = np.array([self.tokens[name] for name in names], int) - plan.sampled_N
        used_N = np.minimum(left_N, np.minimum(plan.left_N, self.scheduler.cache.block_tokens))
        for f in self.scheduler.complete(used_N, used_N == left_N):
            name = f.key
            assert name not in self.finished
            assert f.stopped == (f.tokens == self.tokens[name])
            self.finished[name] = f.tokens
        owned_once(self.scheduler)

    def drain(self):
        plans = []
        while self.scheduler.unfinished:
            plans.append(self.step())
        return plans


def owned_once(scheduler):
    """Asserts that every page but the null page is free or has one owner, as has every request."""
    slots = scheduler._slots
    active_DB = slots.active_DB
    assert not any(column_DB[~active_DB].any() for column_DB in slots._columns.values())
    prefixes = [p for group in scheduler._groups.values() for p in group if p.pages is not None]
    for d in range(scheduler.shards):
        pages_BJ = slots["response_pages"][d]
        assert np.array_equal(np.count_nonzero(pages_BJ, axis=1), slots["pages"][d])
        once(pages_BJ[pages_BJ != NULL_PAGE], scheduler._pages.free_DP[d])
        here = [p for p in prefixes if p.shard == d]
        prompt_pages = [page for p in here for page in p.pages.tolist()]
        once(np.array(prompt_pages, int), scheduler._prompt_pages.free_DP[d])
        samples = [*slots["occupant"][d][active_DB[d]], *scheduler._ready[d]]
        assert all(sample.prefix in here for sample in samples)
        names = [sample.key for sample in samples]
        assert len(set(names)) == len(names) == sum(p.unfinished for p in here)


def once(owned, free_P):
    assert len(set(owned.tolist())) == len(owned)
    assert not free_P[NULL_PAGE]
    expected = np.ones(len(free_P), bool)
    expected[[NULL_PAGE, *owned.tolist()]] = False
    assert np.array_equal(free_P, expected)


def all_free(scheduler):
    pools = (scheduler._pages, scheduler._prompt_pages)
    return all(pool.free_DP[:, 1:].all() for pool in pools)


def test_slots_are_filled_while_requests_wait():
    """Then the blocks are at most a slot's mean load and one longest request (Graham 1969)."""
    rng = np.random.default_rng(0)
    length_P4 = np.where(rng.random((15, 4)) < 0.2, 20, rng.integers(1, 6, (15, 4)))
    script, slots = Script(), CACHE.slots
    assert script.scheduler.idle_slots == slots
    for group, tokens in enumerate(length_P4.tolist()):
        script.submit(group, tokens)
        assert script.scheduler.idle_slots == max(0, slots - 4 * (group + 1))
    blocks = 0
    while script.scheduler.unfinished:
        left = length_P4.size - len(script.finished)
        plan = script.step()
        assert len(plan.shard_N) == min(left, slots)
        assert plan.waiting == (left > slots)
        left = length_P4.size - len(script.finished)
        assert script.scheduler.idle_slots == max(0, slots - left)
        blocks += 1
    assert script.finished == dict(np.ndenumerate(length_P4))
    blocks_P4 = -(-length_P4 // CACHE.block_tokens)
    assert blocks <= blocks_P4.sum() / slots + blocks_P4.max()


def test_prompts_go_to_the_shard_with_most_slots_to_fill():
    """They go in order of submission; shards' loads differ by no more than one group."""
    script = Script(dataclasses.replace(CACHE, slots=8, pages=40), shards=3)
    for group in range(6):
        script.submit(group, [20, 20])
    plan = script.step()
    taken = sorted(zip(plan.group_N.tolist(), plan.shard_N.tolist(), strict=True))
    assert taken[::2] == [(group, group % 3) for group in range(6)]
    script.submit(6, [20] * 4)
    script.submit(7, [20] * 4)
    plan = script.step()
    assert set(plan.shard_N[plan.group_N == 6]) == {0}
    assert set(plan.shard_N[plan.group_N == 7]) == {1}
    script.drain()
    assert all_free(script.scheduler)


def test_a_prompts_pages_are_shared_by_at_most_the_readers():
    """Nine samples of four readers have three copies of it; a prompt of one token needs no page."""
    script = Script(dataclasses.replace(CACHE, slots=12, pages=40))
    script.submit(0, [20] * 9, prompt_tokens=17)
    script.submit(1, [20] * 3, prompt_tokens=1)
    plan = script.scheduler.next_block()
    prefilled = [
        call.page_RI[r].tolist()
        for call in plan.prefills
        for r, (group, _) in call.rows.items()
        if group == 0
    ]
    sizes = decode_sizes(script.scheduler.cache, kernel=False)
    rows, _, row_N = script.scheduler.table(sizes, np.zeros(len(plan.group_N), bool))
    mine = rows[row_N[plan.group_N == 0]]
    assert mine["reader"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert len(np.unique(mine["prompt_pages"], axis=0)) == 3
    assert np.unique(mine["prompt_pages"]).tolist() == [NULL_PAGE, *range(1, 7)]
    assert prefilled == [[1, 2], [3, 4], [5, 6]]
    assert not rows[row_N[plan.group_N == 1]]["prompt_pages"].any()


@pytest.mark.parametrize("pages", [12, 60, 97, 200])
def test_plain_xla_copies_half_of_the_pool_at_most_and_has_few_rows_for_few_slots(pages):
    """The plan of the cache counts half; the last long responses paid for all slots' rows."""
    cache = dataclasses.replace(CACHE, slots=32, pages=pages, rows=8, max_response_tokens=40)
    sizes = decode_sizes(cache, kernel=False)
    assert all(size == pages or size <= (pages + 1) // 2 for _, size in sizes)
    rows, most = sizes[-1]
    assert (rows, sizes[0][0]) == (32, 8)
    assert most >= min(pages, 1 + 32 * 4)  # every slot's full pages; CACHE's have 8 tokens


def test_admission_leaves_the_watermark_of_pages_free():
    """Each occupant keeps what it takes in two blocks: here one page each."""
    script = Script(dataclasses.replace(CACHE, slots=8, pages=11))
    script.submit(0, [20] * 4)
    script.submit(1, [20] * 4)
    plan = script.step()
    # With n in slots, 10 - n pages are free, and the next one needs more than n of them.
    assert len(plan.shard_N) == 5
    assert plan.waiting
    assert plan.cache_use == 0.5


@pytest.mark.parametrize("seed", range(6))
def test_every_page_has_one_owner_and_comes_back(seed):
    """The oldest request of a shard is never preempted, and all end that are not cancelled."""
    rng = np.random.default_rng(seed)
    slots, pages = int(rng.integers(1, 7)), int(rng.integers(4, 14))
    cache = dataclasses.replace(CACHE, slots=slots, pages=pages, prompt_pages=7)
    script = Script(cache, shards=int(rng.integers(1, 4)))
    groups, lost, oldest = list(rng.permutation(16)), set(), {}
    while groups or script.scheduler.unfinished:
        for _ in range(min(len(groups), rng.integers(0, 5))):
            tokens = rng.integers(1, 25, rng.integers(1, 10)).tolist()
            prompt_tokens = int(rng.choice([1, 8, 9, 10, 18]))
            script.submit(int(groups.pop()), tokens, prompt_tokens=prompt_tokens)
        unfinished = script.scheduler.unfinished
        if unfinished and rng.random() < 0.1:
            lost.add(int(rng.choice(unfinished)))
            script.scheduler.cancel(*lost.intersection(unfinished))
            owned_once(script.scheduler)
        plan = script.step()
        here = set(zip(plan.group_N.tolist(), plan.sample_N.tolist(), strict=True))
        stay = [name for name in oldest.values() if name[0] not in lost]
        assert all(name in here or name in script.finished for name in stay)
        oldest = first_in(script.scheduler)
    kept = {name: n for name, n in script.finished.items() if name[0] not in lost}
    assert kept == {name: min(n, 20) for name, n in script.tokens.items() if name[0] not in lost}
    assert lost
    assert all_free(script.scheduler)
    assert script.scheduler.idle_slots == script.scheduler.shards * slots


def first_in(scheduler):
    """Finds the request of each shard that was admitted first: {shard: (group, sample)}."""
    found = {}
    for d in range(scheduler.shards):
        if samples := [it for it in scheduler.occupied.values() if it.prefix.shard == d]:
            found[d] = min(samples, key=lambda sample: sample.admission).key
    return found


def test_samples_move_to_other_shards_once_none_waits():
    """The two of four with the fewest pages move, and a prompt of two pages with each."""
    script = Script(dataclasses.replace(CACHE, slots=4), shards=2)
    script.submit(0, [20, 20], prompt_tokens=17)
    script.submit(1, [8] * 4)
    first = script.step()
    script.submit(2, [20, 20], prompt_tokens=17)
    _, third, *_ = rest = script.drain()
    assert [len(plan.moves.pages_M4) for plan in (first, *rest)] == [0, 0, 2 * 1, 0, 0, 0]
    assert third.shard_N.tolist() == [0, 0, 1, 1]
    assert third.group_N.tolist() == [0, 0, 2, 2]
    assert third.sampled_N.tolist() == [8, 8, 4, 4]
    assert len(third.moves.prompt_pages_M4) == 2 * 2
    assert script.finished == script.tokens
    assert all_free(script.scheduler)


def test_nothing_moves_while_groups_will_be_submitted():
    script = Script(dataclasses.replace(CACHE, slots=4), shards=2)
    script.submit(0, [20] * 4)
    for more, moves in ((True, 0), (True, 0), (False, 2)):
        plan = script.scheduler.next_block(more=more)
        assert len(plan.moves.prompt_pages_M4) == moves
        script.complete(plan)


@pytest.mark.parametrize(("prompt_pages", "moves"), [(8, 2), (7, 1), (5, 0)])
def test_a_sample_stays_where_the_other_shard_has_too_few_pages(prompt_pages, moves):
    """Prompts have two pages, and three stay free; one of a pool is the null page."""
    script = Script(dataclasses.replace(CACHE, slots=4, prompt_pages=prompt_pages), shards=2)
    script.submit(0, [20] * 4, prompt_tokens=17)
    script.submit(1, [1] * 4)
    assert sum(len(plan.moves.prompt_pages_M4) for plan in script.drain()) == 2 * moves
    assert script.finished == script.tokens


@pytest.mark.parametrize("both", [False, True])
def test_a_sample_that_begins_anew_takes_the_pages_of_those_that_wait(both):
    """Some were free, but too few for a long answer, and nothing went on.

    both: the other has an answer too, and would fit; but the older one enters first.
    """
    cache = dataclasses.replace(CACHE, slots=2, pages=6, max_response_tokens=40, turns=True)
    scheduler = Scheduler(cache, 1)
    scheduler.submit(0, 9, [40, 40], parks=True)
    turns_N = np.array([4, 16])
    while scheduler.has_work:
        plan = scheduler.next_block()
        left_N = turns_N[plan.sample_N] - plan.sampled_N
        scheduler.complete(np.minimum(left_N, 4), left_N <= 4)
    assert not scheduler.next_block().sample_N.size
    scheduler.resume(0, 0, first_tokens=24)  # 4 pages of 8 tokens with what comes next; 3 are free
    if both:
        scheduler.resume(0, 1)
    plan = scheduler.next_block()
    assert (plan.sample_N.tolist(), plan.sampled_N.tolist()) == ([0], [24])
    ((rows, pages),) = plan.recomputes
    found = [sample.key for _, sample in rows.values()]
    assert (found, np.count_nonzero(pages)) == ([(0, 0)], 3)
