"""Sizes that a training config leaves open (0): what is chosen for them, and what is printed."""

from types import SimpleNamespace

import numpy as np
import pytest
from small_config import get_config as small_config

from configs import any_model, base, one_gpu, qwen2_5_0_5b, tiny
from dapo_jax.setup import auto_sizes, checks, components, start
from experiments.smollm2 import sums

OPEN = ("learner.row_tokens", "learner.micro_batch_rows", "rollout.slot_tokens")
OPEN += ("rollout.cache_mib",)


def left_open(config, *keys):
    config.update_from_flattened_dict(dict.fromkeys(keys or OPEN, 0))
    config.mesh.cpu_devices = 0
    checks.check(config)
    return config


def values(config):
    of = dict(base.leaves(config))
    return [of[key] for key in OPEN]


def test_what_is_set_stays_and_nothing_is_said():
    config = tiny.get_config()
    before = values(config)
    assert auto_sizes.fit_training(config) == []
    assert values(config) == before
    left_open(config, "rollout.cache_mib")
    (line,) = auto_sizes.fit_training(config)
    assert values(config)[:3] == before[:3] and "slot_tokens" not in line


def test_a_directory_and_data_are_enough_to_train(tmp_path):
    """The user's model and data took six corrections: template, positions, cache, sets, sizes."""
    config = any_model.get_config()
    config.model.path = tiny.get_config().model.path
    config.data.train = base.dataset(kind="arithmetic", count=100)
    start.check(config)
    parts = start.prepare(config, tmp_path)
    r, of = config.rollout, dict(base.leaves(config))
    names = ("model.family", "model.compute_dtype", "tokenizer.chat")
    assert [of[name] for name in names] == ["qwen2", "float32", "none"]
    longest = max(len(prompt.token_ids) for prompt in parts.data.train.prompts)
    assert (r.max_prompt_tokens, r.max_response_tokens) == (longest, 4_096)
    assert (r.generation_prompts, config.algo.overlong_cache_tokens) == (100, 819)
    assert all(f"{key} = {of[key]!r}" in parts.chosen[0] for key in (*OPEN, "tokenizer.chat"))
    assert not parts.data.eval_sets
    (tmp_path / "config.json").write_text(config.to_json_best_effort())
    again = any_model.get_config()
    again.model.path, again.data.train = config.model.path, config.data.train
    checks.check_same_config(again, tmp_path)  # what is open is what the run has chosen


@pytest.mark.parametrize("model", [1, 2])
def test_rows_hold_the_longest_sequence_and_an_update_has_two_micro_batches_or_more(model):
    config = left_open(tiny.get_config())
    config.mesh.model = model
    (line,) = auto_sizes.fit_training(config)
    c, r, degree = config.learner, config.rollout, 4 // model
    assert c.row_tokens >= r.max_prompt_tokens + r.max_response_tokens - 1
    assert c.row_tokens % components.ROW_MULTIPLE == 0
    assert c.micro_batch_rows % degree == 0
    tokens = c.row_tokens * c.micro_batch_rows / degree
    assert tokens <= auto_sizes.MICRO_BATCH_TOKENS["cpu"]
    group = r.max_prompt_tokens + r.group_size * auto_sizes.MEAN_SHARE * r.max_response_tokens
    expected = r.num_prompts / config.updates_per_step * group / degree
    assert tokens <= expected / 2 + components.ROW_MULTIPLE
    for key, value in zip(OPEN, values(config), strict=True):
        assert f"{key} = {value}" in line
    assert auto_sizes.fit_training(config) == []  # the second start of a run finds them set


def test_sizes_that_differ_between_processes_are_refused_before_any_is_chosen(monkeypatch):
    """A process with an open cache waited for ever for one that had it."""
    config = left_open(tiny.get_config(), "rollout.cache_mib")
    others = {"rollout.cache_mib": 64}
    monkeypatch.setattr(auto_sizes.hosts, "gather", lambda given: [given, given | others])
    with pytest.raises(ValueError, match=r"process 1 has .*'rollout.cache_mib': 64.*, process 0"):
        auto_sizes.fit_training(config)


def test_the_cache_has_a_slot_for_every_request_of_the_first_generation_batch():
    config = left_open(tiny.get_config(), "rollout.cache_mib", "rollout.slot_tokens")
    auto_sizes.fit_training(config)
    programs = components.programs(config, vocab_size=0)
    wanted = config.rollout.generation_prompts * config.rollout.group_size / 4
    assert wanted <= programs.engine.cache.slots < 1.5 * wanted


def test_on_an_accelerator_the_cache_leaves_room_for_the_training_state():
    """0.5 B parameters: 5.9 GB of state and 1 GB of the sampler's weights in bfloat16."""
    config = qwen2_5_0_5b.get_config()
    config.model.path = ""
    left_open(config, "rollout.cache_mib")
    config.mesh.model, config.mesh.data = 1, 1
    config.mesh.slices = 1
    one = components.jax.devices()[:1]
    auto_sizes.fit_training(config, devices=one, device_bytes=10 * 2**30)
    left = 10 * 2**30 - 12 * 494e6 - 2 * 494e6
    assert config.rollout.cache_mib <= auto_sizes.CACHE_SHARE * left / 2**20
    config.rollout.cache_mib = 0
    with pytest.raises(ValueError, match=r"does not fit in the .* MiB that a device of 6,656"):
        auto_sizes.fit_training(config, devices=one, device_bytes=6_656 * 2**20)


def test_a_cpu_gets_as_many_slots_as_keep_its_products_busy():
    slots = []
    for config in (tiny.get_config(), qwen2_5_0_5b.get_config()):
        left_open(config, "rollout.cache_mib")
        config.model.path = "" if config.model.preset else config.model.path
        r = config.rollout
        r.generation_prompts, r.max_prompt_tokens, r.max_response_tokens = 10_000, 32, 32
        r.page_tokens = r.slot_tokens = 16
        auto_sizes.fit_training(config)
        slots.append(components.programs(config, vocab_size=0).engine.cache.slots)
    assert auto_sizes.MOST_SLOTS <= slots[0] < 1.2 * auto_sizes.MOST_SLOTS
    assert auto_sizes.FEWEST_CPU_SLOTS <= slots[1] < 2 * auto_sizes.FEWEST_CPU_SLOTS


def test_padding_is_predicted_as_packing_has_it():
    """One prompt of 11 tokens with 4 responses: 0.3 of 100 tokens on average is 120 in all."""
    config = small_config()
    config.rollout.num_prompts = config.updates_per_step = 1
    config.rollout.group_size, config.rollout.max_response_tokens = 4, 100
    config.learner.row_tokens, config.learner.micro_batch_rows = 260, 1

    of_set = SimpleNamespace(prompts=[], report=SimpleNamespace(mean_tokens=11.0))
    data = SimpleNamespace(
        train=SimpleNamespace(sets={"data.train": of_set}, shares={"data.train": 1.0})
    )
    programs = SimpleNamespace(
        learning=SimpleNamespace(kernels=auto_sizes.kernels_for("xla", "cpu"))
    )
    line = auto_sizes.padding_line(config, programs, data)
    lengths = np.ceil(np.linspace(0.5, 1.5, 4) * 30)
    padding = 1 - (10 + lengths.sum()) / 260
    assert f"{padding:.0%} at 30%" in line


def test_the_last_whole_number_of_a_response_is_its_answer():
    (example, *_), _ = sums.Sums(count=3).load()
    answers = {"17 + 8 is 25.": "25", "The sum is 1,234": "1234"}
    answers |= dict.fromkeys(["2.5", "5,6", "none"])
    for response, prediction in answers.items():
        assert sums.Sums().grade(response, example).prediction == prediction


@pytest.mark.parametrize(
    ("preset", "lora_rank", "device_gib"),
    [("0.5b", 0, 17), ("1.5b", 0, 34), ("3b", 0, 68), ("7b", 32, 34)],
)
def test_the_recipe_for_one_gpu_finds_room(preset, lora_rank, device_gib):
    """Three quarters of 24, 48, 80 and 48 GB, or more where the config says so."""
    config = one_gpu.get_config()
    config.model.path, config.model.preset, config.learner.lora_rank = "", preset, lora_rank
    auto_sizes.fit_training(
        config, devices=components.jax.devices()[:1], device_bytes=device_gib * 2**30
    )
    checks.check(config)
    assert 0 < config.rollout.cache_mib < auto_sizes.CACHE_SHARE * device_gib * 2**10
