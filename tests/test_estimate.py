"""Seconds by hand: rooflines, rings, and an engine that is simulated without tokens."""

import dataclasses

import numpy as np
import pytest

from dapo_jax.preflight import simulate
from dapo_jax.preflight.chips import CHIPS, chip_of
from dapo_jax.preflight.hlo_cost import Collective, Cost
from dapo_jax.sampler.cache import Cache

CHIP = dataclasses.replace(
    CHIPS["v5e"],
    flop_rate=100.0 / simulate.PRODUCTS_REACH,
    hbm_rate=10.0 / simulate.MEMORY_REACHES,
    ici_rate=4.0 / simulate.LINKS_REACH,
    dcn_rate=1.0 / simulate.LINKS_REACH,
)


def collective(kind, *, size, group, times=1.0, between_slices=False):
    groups = () if between_slices else (tuple(range(group)),)
    return Collective(kind, size, group, groups, times)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("all-gather", 6.0), ("reduce-scatter", 6.0), ("all-reduce", 12.0), ("collective-permute", 8)],
)
def test_a_ring_passes_all_but_its_own_part(kind, expected):
    """32 bytes over 4 chips at 4 bytes a second; an all-reduce is a scatter and a gather."""
    assert simulate.exchange_seconds(collective(kind, size=32, group=4), CHIP) == expected
    thrice = collective(kind, size=32, group=4, times=3)
    assert simulate.exchange_seconds(thrice, CHIP) == 3 * expected


def test_between_slices_the_network_is_slower():
    over = collective("all-reduce", size=32, group=2, between_slices=True)
    assert simulate.exchange_seconds(over, CHIP) == pytest.approx(32.0)


def test_a_roofline_is_the_longer_of_products_and_memory():
    cost = Cost(500.0, 20.0, (collective("all-gather", size=32, group=4),))
    least = simulate.seconds(cost, CHIP)
    assert (least.products, least.memory, least.exchange) == pytest.approx((5.0, 2.0, 6.0))
    assert least.overlapped == pytest.approx(6.0)
    assert least.in_turn == pytest.approx(11.0)


@pytest.mark.parametrize("mean", [200, 1_000, 4_000])
def test_lengths_have_the_mean_that_was_asked_for(mean):
    length_PG = simulate.response_lengths(mean, groups=400, group_size=16, longest=20_480, seed=1)
    assert length_PG.shape == (400, 16)
    assert length_PG.mean() == pytest.approx(mean, rel=0.01)
    assert length_PG.min() >= 1
    assert length_PG.max() <= 20_480
    between = np.log(length_PG).mean(axis=1).std()
    within = np.log(length_PG).std(axis=1).mean()
    assert between == pytest.approx(simulate.SIGMA_PROBLEMS, rel=0.15)
    assert within == pytest.approx(simulate.SIGMA_SAMPLES, rel=0.15)


def rollout(lengths, *, slots=2, pages=100, group_size=1, **changes):
    """Groups of one response, or more, with a prompt that is not prefilled."""
    cache = Cache(
        slots=slots,
        pages=pages,
        prompt_pages=1,
        readers=group_size,
        page_tokens=4,
        block_tokens=4,
        max_prompt_tokens=1,
        max_response_tokens=32,
    )
    how = {
        "shards": 1,
        "prompt_tokens": 1,
        "step_seconds": lambda live_D: np.ones(len(live_D)),
        "block_seconds": 0.5,
    }
    length_PG = np.reshape(lengths, (-1, group_size)).tolist()
    return simulate.simulate_rollout(length_PG, cache, **how | changes)


def test_slots_are_refilled_between_blocks():
    """Lengths 8, 2, 3 in two slots: 4 steps (the second slot's last 2 idle), then 4 more."""
    found = rollout([8, 2, 3])
    assert (found.blocks, found.tokens, found.discarded_tokens) == (2, 13, 0)
    assert found.seconds == pytest.approx(4 + 4 + 2 * 0.5)
    assert found.occupancy == pytest.approx(13 / 16)


def test_a_block_ends_with_its_last_response_and_shards_wait_for_each_other():
    found = rollout([3, 1], shards=2, slots=1)
    assert found.seconds == pytest.approx(3 + 0.5)
    slow = rollout([3, 1], shards=2, slots=1, step_seconds=lambda live_D: np.array([1.0, 9.0]))
    assert slow.seconds == pytest.approx(9 + 0.5)


def test_a_step_costs_more_with_more_live_tokens():
    found = rollout([8], slots=1, step_seconds=lambda live_D: 1.0 + live_D)
    assert found.seconds == pytest.approx(4 * 1 + 4 * 5 + 2 * 0.5)


def test_without_pages_the_youngest_is_preempted_and_recomputed():
    """Two responses of 12 tokens take 3 pages each at the end; there are 4 beside the null page."""
    found = rollout([12, 12], pages=5)
    assert found.discarded_tokens > 0
    assert found.tokens == 24 + found.discarded_tokens


def test_a_group_stays_on_one_shard():
    """Its responses share a prompt: of 4 shards with a slot each, one decodes them in turn."""
    found = rollout([4, 4, 4, 4], shards=4, slots=1, group_size=4)
    assert (found.blocks, found.occupancy) == (4, 0.25)


def test_micro_batches_are_those_of_the_packer():
    """9 responses of 55 tokens, each behind 9 of its prompt: 2 fit a row of 128."""
    how = {"prompt_tokens": 10, "row_tokens": 128, "rows": 4}
    length_PG = np.full((3, 3), 55)
    assert simulate.micro_batches(length_PG, **how, share_prompts=False) == 2  # 5 rows
    assert simulate.micro_batches(length_PG[:2], **how, share_prompts=False) == 1  # 3 rows


def test_topologies_name_their_chips():
    assert chip_of("v5p:8x8x4").name == "v5p"
    assert chip_of("7x:4x4x4").name == chip_of("tpu7x:4x4x4").name == "tpu7x"
    with pytest.raises(ValueError, match=r"--topology=v9:2x2: there are v4, v5e, v5p, v6e, tpu7x"):
        chip_of("v9:2x2")
