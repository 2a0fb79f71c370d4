"""Seconds of a step by hand: FLOP and bytes of a tiny model, and the scheduler on known lengths."""

import dataclasses
import re

import numpy as np
import pytest
from processes import ROOT, ran

from configs import qwen2_5_0_5b
from dapo_jax.preflight.chips import CHIPS, Chip
from dapo_jax.sampler.cache import Cache
from experiments.preflight import estimate, published
from experiments.preflight.estimate import Device
from models.qwen2 import Qwen2Config
from models.qwen3_moe import Qwen3MoeConfig

CHIP = Chip("toy", hbm_bytes=1.0, hbm_rate=10.0, flop_rate=100.0)
SIZES = (10, 4, 6, 2, 2, 1, 2)  # vocabulary, width, MLP; 2 layers; 2 heads, 1 of keys; 2 values
# Two layers of queries 16 + 4, keys and values 8 + 2 each, output 16, MLP 72, norms 8; norm, head.
WEIGHTS = 2 * (20 + 20 + 16 + 72 + 8) + 4 + 40


@pytest.mark.parametrize("tied", [False, True])
def test_flop_and_bytes_of_a_tiny_model(tied):
    """A token's keys and values have 16 bytes. Sequences of 3 and 2 tokens have 6 + 3 pairs."""
    device = Device(CHIP, Qwen2Config(*SIZES, tie_embeddings=tied))
    assert device.weights == WEIGHTS
    read, keys = 2 * WEIGHTS / 10, 5 * 16 / 10
    assert device.decode_seconds(3, 5) == pytest.approx(read + keys)
    assert device.decode_seconds(20, 5) == pytest.approx(2 * WEIGHTS * 20 / 100 + keys)
    flop = 6 * WEIGHTS * 8 + 12 * 9 * 2 * 2 * 2
    assert device.update_seconds(8, [3, 2], 2) == pytest.approx(flop / 200)
    lora = dataclasses.replace(device, lora=True)
    assert lora.update_seconds(8, [], 1) == pytest.approx(4 * WEIGHTS * 8 / 100)
    half = Device(CHIP, Qwen2Config(*SIZES[:5], 2, 2, tie_embeddings=tied), model_degree=2)
    whole = dataclasses.replace(half, model_degree=1)
    assert half.decode_seconds(3, 5) == pytest.approx(whole.decode_seconds(3, 5) / 2)


def test_what_a_nodes_links_carry():
    """Two of 4 devices share a copy of the weights, so halves go to the other one.

    Weights are gathered twice as 2 bytes, and gradients scattered as 4, by each micro-batch; a
    token's 4 numbers in two layers cross 11 times in an update, and 2 times there and back in
    decoding.
    """
    node = dataclasses.replace(CHIP, link_rate=5.0)
    device = Device(node, Qwen2Config(*SIZES[:5], 2, 2, tie_embeddings=True), model_degree=2)
    weights, activations = 8 * device.weights / 2 / 2, 4 * 2 * 2 / 2
    whole = 3 * weights + 11 * 7 * activations
    assert device.exchange_seconds(3, 7, data=2) == pytest.approx(whole / 5)
    lora = dataclasses.replace(device, lora=True)
    assert lora.exchange_seconds(3, 0, data=2) == pytest.approx(3 * weights / 2 / 5)
    alone = dataclasses.replace(device, chip=CHIP)
    assert alone.exchange_seconds(3, 7, data=2) == 0
    sums = device.decode_seconds(3, 0) - alone.decode_seconds(3, 0)
    assert sums == pytest.approx(2 * 2 * 3 * activations / 5)


def test_the_state_of_a_run_is_that_of_the_papers():
    """A third of the groups is informative where the record took its second batch: step 81."""
    assert estimate.course_at(0) == (740 / 20_480, 0.5, 0)
    tokens, informative, right = estimate.course_at(80 / 330)
    assert (tokens, right) == pytest.approx((1_550 / 20_480, 0.29))
    assert informative == pytest.approx(0.5 - 0.3 * 0.29 / 0.51)
    assert estimate.course_at(1)[1:] == pytest.approx((0.2, 0.51))
    assert estimate.over_run(np.array(estimate.POINTS)) == pytest.approx(0.5)
    took = published.batches_at(np.array([10, 75, 90, 330]), 512)
    assert took.tolist() == [1, 1, 2, 2]


def test_groups_that_are_all_right_take_less_to_sample_and_are_not_trained_on():
    """Half of 128 groups is sampled only; all right, they have 0.54 of the tokens."""
    config = qwen2_5_0_5b.get_config()
    sizes = {"num_prompts": 64, "group_size": 4, "max_response_tokens": 256, "cache_mib": 192}
    config.rollout.update(sizes)
    config.model.path, config.updates_per_step = "", 2
    mesh, chip = estimate.mesh_of(config, "v5e:1x1"), CHIPS["v5e"]
    how = {"mean": 100, "informative": 0.5}
    wrong, right = (
        estimate.step_seconds(config, chip, mesh, **how, all_right=share) for share in (0.0, 0.5)
    )
    assert 0.5 < right[0] / wrong[0] < 0.95
    assert right[2] == pytest.approx(wrong[2], rel=0.2)
    assert right[3] == wrong[3] == 0


def test_one_efficiency_predicts_what_it_was_not_fitted_to():
    clock_N = np.array([10.0, 20.0, 40.0, 80.0])
    fitted_N = np.array([True, True, False, False])
    exact = published.prediction(clock_N / 4, clock_N, fitted_N)
    assert exact == pytest.approx((0.25, 0, 0))
    off = published.prediction(np.array([5.0, 10.0, 30.0, 20.0]), clock_N, fitted_N)
    assert off == pytest.approx((0.5, 0.5, 100 / 120 - 1))


@pytest.mark.slow
def test_the_page_has_what_the_published_run_is_priced_at():
    said = ran("-m", "experiments.preflight.published").stdout
    hours, ratios = re.search(r"steps: (\d+ to \d+); .* (0\.\d+ to 0\.\d+) times", said).groups()
    page = (ROOT / "experiments" / "preflight" / "README.md").read_text()
    assert hours in page and ratios in page
    efficiencies = re.findall(r"^(?:sampling|updates): (\d+)\.", said, re.M)
    errors = re.findall(r"predicted (\d+)% off", said)
    assert all(f"{number} %" in page for number in (*efficiencies, *errors))


def test_a_token_is_multiplied_with_its_own_experts():
    """2 of 4 experts of 12 values each, and a router of 16, in place of the MLP."""
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_width": 3}
    device = Device(CHIP, Qwen3MoeConfig(*SIZES, tie_embeddings=True, **experts))
    others = WEIGHTS - 2 * (72 + 4 + 4) + 2 * (16 + 2 * 2)  # no biases; norms of heads; the router
    assert device.weights == others + 2 * 4 * 36
    assert device.active == others + 2 * 2 * 36
    assert device.update_seconds(8, [], 1) == pytest.approx(6 * device.active * 8 / 100)
    assert device.decode_seconds(1, 0) == pytest.approx(2 * device.weights / 10)


def simulate(lengths, *, slots=2, pages=200, group_size=1, shards=1, prompt_tokens=1, **changes):
    """Blocks and pages of 4 tokens; a decode step takes a second for each 32 rows."""
    partial = changes.get("partial_rollout_steps", 0) > 0
    sizes = {"slots": slots, "pages": pages, "prompt_pages": 9, "readers": group_size}
    sizes |= {"page_tokens": 4, "block_tokens": 4, "max_prompt_tokens": 5}
    cache = Cache(**sizes, max_response_tokens=32, partial_rollouts=partial)
    how = {"shards": shards, "prompt_tokens": prompt_tokens}
    how["decode_seconds"] = lambda rows, live_D: np.full(len(live_D), rows / 32)
    return estimate.simulate(np.reshape(lengths, (-1, group_size)).tolist(), cache, **how | changes)


PARTIAL = {"partial_rollout_steps": 4, "every_steps": 99}


@pytest.mark.parametrize(
    ("lengths", "how", "seconds"),
    [
        ([8, 2, 3], {}, 8),  # the third begins after 4 steps; a slot idles meanwhile
        ([3, 1], {"shards": 2, "slots": 1}, 3),  # shards wait for each other
        ([4] * 33 + [12], {"slots": 64}, 4 * 2 + 8),  # the last one in a program of 32 rows
        ([4] * 4, {"shards": 4, "slots": 1, "group_size": 4}, 4),  # a group's samples spread
        # With partial rollouts no slot waits: half of its tokens, whole blocks, in two slots.
        ([16, 4], PARTIAL, 10),
        ([32, 4, 4, 4], PARTIAL, 22),
        # A step waits for responses that are old: one of 32 steps beside seven of 4, in 8 slots.
        ([32, *[4] * 7], PARTIAL | {"slots": 8, "partial_rollout_steps": 1}, 16),
        ([32, *[4] * 7], PARTIAL | {"slots": 8, "partial_rollout_steps": 9}, 7.5),
    ],
)
def test_a_rollout_takes_the_steps_of_its_schedule(lengths, how, seconds):
    assert simulate(lengths, **how) == (seconds, 0)


def test_without_pages_a_response_waits():
    """Two responses of 12 tokens take 3 pages each at the end; there are 4 beside the null page."""
    assert simulate([12, 12], pages=5)[0] > simulate([12, 12])[0] == 12


def test_a_step_reads_the_prompt_and_what_is_sampled():
    """Two blocks: 4 tokens of the prompt, then 4 of the response more; a prompt is prefilled."""
    read = {"decode_seconds": lambda rows, live_D: live_D}
    assert simulate([8], prompt_tokens=5, **read) == (4 * 4 + 4 * 8, 4)


@pytest.mark.parametrize(
    ("topology", "settings", "shape"),
    [
        ("v5p:8x8x4", {"model": 8}, (1, 32, 8)),
        ("v5e:2x4", {"slices": 2}, (2, 8, 1)),
        ("tpu7x:2x2x1", {"data": 4, "model": 2}, (1, 4, 2)),  # two devices a chip
        ("v5e:2x4", {"model": 3}, r"mesh.model = 3 do not cover the 8 devices of --topology=v5e"),
        ("v5e:2xa", {}, r"--topology=v5e:2xa: give the chips along each axis, as in v5p:8x8x4"),
        ("h100:8", {"model": 4}, (1, 2, 4)),
        ("v9:2x2", {}, r"--topology=v9:2x2: there are v4, v5e, v5p, v6e, tpu7x"),
    ],
)
def test_a_mesh_covers_the_topology_or_is_refused(topology, settings, shape):
    config = qwen2_5_0_5b.get_config()
    config.mesh.update(settings)
    if isinstance(shape, tuple):
        assert tuple(estimate.mesh_of(config, topology).shape.values()) == shape
        return
    with pytest.raises(ValueError, match=shape):
        estimate.mesh_of(config, topology)


def test_the_command_prints_a_table_and_what_it_leaves_out():
    small = ("num_prompts=8", "group_size=4", "generation_prompts=8", "max_response_tokens=256")
    flags = [*(f"--config.rollout.{it}" for it in small), "--config.algo.overlong_cache_tokens=64"]
    command = ("-m", "experiments.preflight.estimate", "--config=configs/qwen2_5_0_5b.py")
    done = ran(*command, "--topology=v5e:2x2", *flags, "--decode=0.01", "--update=0.02")
    lines = re.findall(r"^(\w+) +([\d.]+) +([\d.]+)  ", done.stdout, re.M)
    low, high = ({name: float(ends[i]) for name, *ends in lines} for i in (0, 1))
    for seconds in (low, high):
        assert list(seconds) == ["rollout", "update", "step", "hours"]
        assert seconds["hours"] == pytest.approx(300 * seconds["step"] / 3_600, abs=0.06)
        assert seconds["step"] == pytest.approx(seconds["rollout"] + seconds["update"], abs=0.11)
    assert all(0 < low[name] <= high[name] for name in low)
    assert "left out: exchanges between chips" in done.stdout
    assert "decoding has\n(0.01, 0.01), the rest (0.02, 0.02)" in done.stdout
    assert "responses of 9 tokens at first, 57 at the end" in done.stdout
