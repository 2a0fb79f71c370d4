"""Seconds by hand: rooflines, rings, and an engine that is simulated without tokens."""

import dataclasses
import re
import types

import numpy as np
import pytest
from processes import ran

from dapo_jax.preflight.chips import CHIPS, chip_of
from dapo_jax.sampler.cache import Cache
from experiments.preflight import measure
from experiments.preflight.estimate import attention, ranges, render, rollouts, simulate
from experiments.preflight.estimate.hlo_cost import Collective, Cost

CHIP = dataclasses.replace(
    CHIPS["v5e"], clock=1_000.0, hbm_rate=10.0, link_rate=2.0, dcn_rate=1.0, closes_at=4
)
EXACT = dataclasses.replace(simulate.FAST, cycles=1.0, links=1.0, hidden=0.0, rings=min)
LINE = simulate.Slice(CHIP, (4, 8), tuple((x, y) for x in range(4) for y in range(8)))


@pytest.fixture(autouse=True)
def no_latency(monkeypatch):
    monkeypatch.setattr(simulate, "COLLECTIVE_SECONDS", 0.0)


def collective(kind, *, size, group=(0, 8, 16, 24), times=1.0, between_slices=False, waits=True):
    """Over the first axis of LINE, which is a ring of 4 chips."""
    groups = () if between_slices else (tuple(group),)
    return Collective(kind, size, len(group), groups, waits, times)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("all-gather", 6.0), ("reduce-scatter", 6.0), ("all-reduce", 12.0), ("collective-permute", 8)],
)
def test_a_ring_passes_all_but_its_own_part(kind, expected):
    """32 bytes over 4 chips at 4 bytes a second; an all-reduce is a scatter and a gather."""
    assert LINE.exchange_seconds(collective(kind, size=32), EXACT) == expected
    thrice = collective(kind, size=32, times=3)
    assert LINE.exchange_seconds(thrice, EXACT) == 3 * expected


def test_parts_that_all_send_to_all_pass_others_on_their_way():
    """64 bytes on each of a ring of 8 chips: 1, 1, 2, 2, 3, 3 and 4 links for parts of 8 bytes."""
    ring = collective("all-to-all", size=64, group=range(8))
    assert LINE.exchange_seconds(ring, EXACT) == 16 * 8 / (2 * CHIP.link_rate)


def test_an_exchange_takes_time_to_begin(monkeypatch):
    monkeypatch.setattr(simulate, "COLLECTIVE_SECONDS", 0.5)
    assert LINE.exchange_seconds(collective("all-gather", size=32, times=3), EXACT) == 19.5


def test_a_part_of_an_axis_is_no_ring():
    """2 of the 4 chips pass 32 bytes to each other over one link."""
    pair = collective("all-gather", size=32, group=(0, 8))
    assert LINE.exchange_seconds(pair, EXACT) == 16 / 2


def test_a_group_over_two_axes_uses_both_or_one():
    """4 x 8 chips: at 8 bytes a second over both axes, at 4 over one."""
    whole = collective("all-gather", size=32, group=range(32))
    assert LINE.exchange_seconds(whole, EXACT) == 31 / 4
    both = dataclasses.replace(EXACT, rings=sum)
    assert LINE.exchange_seconds(whole, both) == 31 / 8


@pytest.mark.parametrize(
    ("chip", "shape", "closed"),
    [
        ("v5e", (8, 8), (False, False)),
        ("v6e", (16, 16), (True, True)),
        ("v5p", (2, 2, 4), (False, False, False)),
        ("tpu7x", (4, 4, 4), (True, True, True)),
    ],
)
def test_rings_close_where_the_slice_has_the_links(chip, shape, closed):
    """v5e and v6e from 16 chips on along an axis, the others in slices made of whole cubes."""
    for axis, is_ring in enumerate(closed):
        line = [tuple(n * (a == axis) for a in range(len(shape))) for n in range(shape[axis])]
        (rate,) = simulate.ring_rates(CHIPS[chip], shape, line)
        assert rate == CHIPS[chip].link_rate * (2 if is_ring else 1)


def test_eight_of_sixteen_chips_are_a_line():
    """mesh.model = 8 in v6e:16x16."""
    (rate,) = simulate.ring_rates(CHIPS["v6e"], (16, 16), [(x, 3) for x in range(8)])
    assert rate == CHIPS["v6e"].link_rate


def test_between_slices_the_network_is_slower():
    over = collective("all-reduce", size=32, group=(0, 1), between_slices=True)
    assert LINE.exchange_seconds(over, EXACT) == pytest.approx(32.0)


def test_what_runs_behind_the_core_counts_in_the_slow_estimate_alone():
    """5 s of core, 6 s waited for, 3 s behind; 20 bytes copied in 2 s behind the core."""
    waited, behind = (
        collective("all-gather", size=32),
        collective("all-gather", size=16, waits=False),
    )
    cost = Cost(5_000.0, 20.0, (waited, behind))
    assert LINE.seconds(cost, EXACT) == pytest.approx(5 + 6 + 3)
    assert LINE.seconds(cost, dataclasses.replace(EXACT, hidden=1.0)) == pytest.approx(5 + 6)
    assert LINE.seconds(cost, EXACT, kernels=4.0) == pytest.approx(5 + 4 + 6 + 3)
    copied = dataclasses.replace(cost, copied_bytes=80.0)
    assert LINE.seconds(copied, EXACT) == pytest.approx(8 + 6 + 3)


def test_lengths_have_the_mean_that_was_asked_for():
    mean = 1_000
    length_PG = rollouts.response_lengths(mean, groups=400, group_size=16, longest=20_480, seed=1)
    assert length_PG.shape == (400, 16)
    assert length_PG.mean() == pytest.approx(mean, rel=0.01)
    assert length_PG.min() >= 1
    assert length_PG.max() <= 20_480
    between = np.log(length_PG).mean(axis=1).std()
    within = np.log(length_PG).std(axis=1).mean()
    assert between == pytest.approx(rollouts.SIGMA_PROBLEMS, rel=0.15)
    assert within == pytest.approx(rollouts.SIGMA_SAMPLES, rel=0.15)


def rollout(
    lengths, *, slots=2, pages=100, group_size=1, simulate=rollouts.simulate_rollout, **changes
):
    """Groups of one response, or more, with a prompt that is not prefilled."""
    sizes = {"slots": slots, "pages": pages, "prompt_pages": 1, "readers": group_size}
    sizes |= {"page_tokens": 4, "block_tokens": 4, "max_prompt_tokens": 1}
    cache = Cache(**sizes, max_response_tokens=32, carries=simulate is carrying)
    how = {
        "shards": 1,
        "prompt_tokens": 1,
        "step_seconds": {slots: lambda live_D, _: np.ones(len(live_D))},
        "block_seconds": {slots: 0.5},
        "copy_seconds": 0.0,
    }
    length_PG = np.reshape(lengths, (-1, group_size)).tolist()
    return simulate(length_PG, cache, **how | changes)


carrying = rollouts.simulate_carrying


def test_slots_are_refilled_between_blocks():
    """Lengths 8, 2, 3 in two slots: 4 steps (the second slot's last 2 idle), then 4 more."""
    found = rollout([8, 2, 3])
    assert (found.blocks, found.tokens, found.discarded_tokens) == (2, 13, 0)
    assert found.seconds == pytest.approx(4 + 4 + 2 * 0.5)
    assert found.occupancy == pytest.approx(13 / 16)


def test_a_block_ends_with_its_last_response_and_shards_wait_for_each_other():
    found = rollout([3, 1], shards=2, slots=1)
    assert found.seconds == pytest.approx(3 + 0.5)
    slow = rollout(
        [3, 1], shards=2, slots=1, step_seconds={1: lambda live_D, _: np.array([1.0, 9.0])}
    )
    assert slow.seconds == pytest.approx(9 + 0.5)


def test_copies_between_shards_take_their_time():
    """Two groups of 4 on two shards: when the short one ends, two samples of one page move."""
    how = {"shards": 2, "slots": 4, "group_size": 4}
    free, costly = (rollout([8] * 4 + [4] * 4, **how, copy_seconds=n) for n in (0.0, 10.0))
    assert costly.seconds == pytest.approx(free.seconds + 10)
    assert costly.tokens == free.tokens == 4 * 8 + 4 * 4


def test_a_step_costs_more_with_more_live_tokens():
    found = rollout([8], slots=1, step_seconds={1: lambda live_D, _: 1.0 + live_D})
    assert found.seconds == pytest.approx(4 * 1 + 4 * 5 + 2 * 0.5)


def test_a_tail_runs_in_the_program_with_fewer_rows():
    """Both slots for 4 steps of 1 second, then one for 8 of a quarter."""
    seconds = {1: lambda live_D, _: np.full(1, 0.25), 2: lambda live_D, _: np.ones(1)}
    found = rollout([4, 12], step_seconds=seconds, block_seconds={1: 0.1, 2: 0.5})
    assert found.seconds == pytest.approx(4 * 1 + 0.5 + 2 * (4 * 0.25 + 0.1))


def test_an_overlapped_evaluation_fills_idle_slots_and_its_steps_take_longer():
    """A response of 8 tokens is there first; a step beside it takes 1 + 2 seconds.

    Beside one response of 4 it adds 4 steps; beside two of 8, which need two slots, 8.
    """
    how = {"eval_PG": [[8]], "eval_seconds": lambda rows, slots_D: 2.0 * slots_D}
    assert rollout([4]).seconds == pytest.approx(4 + 0.5)
    assert rollout([4], **how).seconds == pytest.approx(8 * 3 + 2 * 0.5)
    assert rollout([8, 8], **how).seconds == pytest.approx(8 * 3 + 8 * 1 + 4 * 0.5)


def test_without_pages_the_youngest_is_preempted_and_recomputed():
    """Two responses of 12 tokens take 3 pages each at the end; there are 4 beside the null page."""
    found = rollout([12, 12], pages=5)
    assert found.discarded_tokens > 0
    assert found.tokens == 24 + found.discarded_tokens


def test_with_carry_over_no_slot_waits_and_checkpoints_cost_what_is_computed_again():
    """Lengths 8, 4 and 4 in two slots, two groups a step: 2 * 16 / 3 tokens, 4 a block and slot.

    With a checkpoint after every step, one step of three begins with the long response half done.
    """
    how = {"simulate": carrying, "groups": 2, "carry_over_steps": 9}
    found = rollout([8, 4, 4], every_steps=3, **how)
    assert (found.tokens, found.occupancy) == (pytest.approx(32 / 3), 1)
    assert found.seconds == pytest.approx(32 / 3 / 2 * (1 + 0.5 / 4))
    every_step = rollout([8, 4, 4], every_steps=1, **how, refill_seconds=8.0)
    assert every_step.seconds == pytest.approx(32 / 3 / 2 * (1 + 0.5 / 4) + 8 / 3, rel=0.03)


def test_short_responses_beside_a_long_one_do_not_run_ahead_for_ever():
    """The first step waits 32 steps for one response, while the other slot could begin eight.

    All steps that were counted found theirs complete, and an estimate divided by their 0 tokens.
    A mean of few steps was anything from 2 to 32 tokens, where 39 / 8 are trained on.
    """
    how = {"simulate": carrying, "groups": 1, "carry_over_steps": 1, "every_steps": 1}
    found = rollout([32, 1, 1, 1, 1, 1, 1, 1], **how)
    assert found.tokens == pytest.approx(39 / 8, rel=0.2)


def test_a_group_goes_to_one_shard_and_what_waits_there_to_idle_ones():
    found = rollout([4, 4, 4, 4], shards=4, slots=1, group_size=4)
    assert (found.blocks, found.occupancy) == (1, 1.0)


def test_micro_batches_are_those_of_the_packer():
    """9 responses of 55 tokens, each behind 9 of its prompt: 2 fit a row of 128."""
    how = {"prompt_tokens": 10, "row_lengths": (128,), "rows": 4}
    length_PG = np.full((3, 3), 55)
    segment_MBT = attention.micro_batches(length_PG, **how, share_prompts=False)
    assert segment_MBT.shape == (2, 4, 128)  # 5 rows
    two, one, none = (np.repeat([1, 2, 0], row) for row in ((64, 64, 0), (64, 0, 64), (0, 0, 128)))
    np.testing.assert_array_equal(segment_MBT.reshape(8, 128), [two] * 4 + [one] + [none] * 3)
    assert len(attention.micro_batches(length_PG[:2], **how, share_prompts=False)) == 1  # 3 rows


def test_micro_batches_begin_with_the_rows_that_have_the_most_work():
    """The packer begins with 7 tokens, but twice 6 have more pairs."""
    how = {"prompt_tokens": 1, "row_lengths": (12,), "rows": 1, "share_prompts": False}
    segment_MBT = attention.micro_batches(np.array([[6], [7], [6]]), **how)
    np.testing.assert_array_equal(segment_MBT[:, 0], [[1] * 6 + [2] * 6, [1] * 7 + [0] * 5])


SIZES = types.SimpleNamespace(num_heads=6, head_dim=16, num_layers=5)


def attention_seconds(segment_MBT, *, remat="none", row_degree=1, model_degree=1):
    """With a rate at which a product of a block of 2 x 2 tokens takes a second a head."""
    how = {"row_degree": row_degree, "model_degree": model_degree, "flop_rate": 2 * 2 * 2 * 16}
    return attention.attention_seconds(np.array(segment_MBT), SIZES, remat=remat, **how)


@pytest.fixture
def blocks_of_two(monkeypatch):
    monkeypatch.setattr(attention.splash_tpu, "BLOCK_TOKENS", 2)
    monkeypatch.setattr(attention, "STEP_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("segment_T", "visited"),
    [
        ([1, 1, 1, 1, 1, 1], 6),  # all that lie below the diagonal or on it
        ([1, 1, 2, 2, 3, 3], 3),
        ([1, 1, 1, 2, 2, 2], 5),  # not the last queries with the first keys
        ([1, 1, 1, 1, 0, 0], 4),  # padding: the diagonal
    ],
)
def test_attention_takes_its_products_of_visited_blocks(segment_T, visited, blocks_of_two):
    """7 products, or 9 where forward is computed twice, of 6 heads in 5 layers."""
    assert attention_seconds([[segment_T]]) == pytest.approx([visited * 7 * 30])
    assert attention_seconds([[segment_T]], remat="full") == pytest.approx([visited * 9 * 30])
    assert attention_seconds([[segment_T]], model_degree=2) == pytest.approx([visited * 7 * 15])


def test_attention_takes_a_step_of_each_kernel_for_what_it_skips(blocks_of_two, monkeypatch):
    """6 of 9 blocks; 2 kernels, or 3."""
    monkeypatch.setattr(attention, "STEP_SECONDS", 1.0)
    row = [[[1, 1, 2, 2, 3, 3]]]
    assert attention_seconds(row) == pytest.approx([(3 * 7 + 6 * 2) * 30])
    assert attention_seconds(row, remat="full") == pytest.approx([(3 * 9 + 6 * 3) * 30])


def test_a_micro_batch_waits_for_the_device_with_the_most_attention(blocks_of_two):
    """Rows with 6, 3, 5 and 3 blocks: on one device, two or four; the second has 3 in each."""
    long, short, two = [1] * 6, [1, 1, 2, 2, 3, 3], [1, 1, 1, 2, 2, 2]
    micro = [[long, short, two, short], [short] * 4]
    for degree, blocks in ((1, [17, 12]), (2, [9, 6]), (4, [6, 3])):
        expected = [7 * 30 * n for n in blocks]
        assert attention_seconds(micro, row_degree=degree) == pytest.approx(expected)


def test_topologies_name_their_chips():
    assert chip_of("v5p:8x8x4").name == "v5p"
    assert chip_of("7x:4x4x4").name == chip_of("tpu7x:4x4x4").name == "tpu7x"
    with pytest.raises(ValueError, match=r"--topology=v9:2x2: there are v4, v5e, v5p, v6e, tpu7x"):
        chip_of("v9:2x2")


def estimate(*, minutes: tuple[float, float], headroom: float = 0.94) -> ranges.Estimate:
    """An estimate of a recipe whose steps take so long and leave so much memory."""
    of_steps = dict.fromkeys((f.name for f in dataclasses.fields(simulate.Step)), 0)
    steps = tuple(simulate.Step(**of_steps | {"rollout": 60 * time}) for time in minutes)
    found = types.SimpleNamespace(headroom=headroom)
    return ranges.Estimate(found=found, costs={}, slice=LINE, steps=steps, runs=([], []))


def test_a_proposal_that_is_slower_or_does_not_fit_is_not_taken():
    """For 0.5B on v5e:2x4 larger caches were proposed that made a step slower."""
    recipe, slower = estimate(minutes=(2, 4)), estimate(minutes=(1.9, 4.2))
    larger = estimate(minutes=(1, 2), headroom=-0.02)
    candidates = {"recipe": recipe, "slower": slower, "larger": larger, "same": recipe}
    assert ranges.fastest(candidates) == "recipe"
    assert render.choice_lines(candidates, "recipe") == [
        "recipe: 2.0 to 4.0 minutes a step, 94% free",
        "slower: 1.9 to 4.2 minutes a step, 94% free",
        "larger: 1.0 to 2.0 minutes a step, does not fit",
        "same: 2.0 to 4.0 minutes a step, 94% free",
        "the faster: recipe",
        "",
    ]
    quicker = estimate(minutes=(1.5, 3))
    assert ranges.fastest({"recipe": recipe, "quicker": quicker}) == "quicker"


def test_measured_programs_stand_beside_their_estimate():
    """A step of 2 ms where 1 to 4 were estimated, 8 ms a block of 16 included: 1.5 to 4.5."""
    found = {"decode": measure.Measured(2e-3, turns=16), "reshard": measure.Measured(5e-3)}
    estimated = {"programs": {"decode": {"seconds": {"fixed": [8e-3] * 2, "turn": [1e-3, 4e-3]}}}}
    assert measure.table(found, estimated).splitlines()[2:] == [
        "| a turn of decode | 2.00 | 1.50 to 4.50 | 0.44 to 1.33 |",
        "| reshard | 5.00 | - | - |",
    ]


@pytest.mark.slow
def test_a_recipes_programs_are_measured_on_the_devices_that_are_there():
    small = ["num_prompts=4", "group_size=4", "generation_prompts=4", "cache_mib=2"]
    flags = [f"--config.rollout.{setting}" for setting in small]
    done = ran("-m", "experiments.preflight.measure", "--config=configs/tiny.py", *flags)
    for name in ("reshard", "prefill[1]", "a turn of decode", "a turn of update"):
        assert re.search(rf"^\| {re.escape(name)} \| \d+\.\d\d \| - \| - \|$", done.stdout, re.M)
