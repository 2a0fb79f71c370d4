"""Sizes that a config leaves open (0): what is chosen for them, and what is printed."""

import os

import jax
import pytest

from configs import any_model, base, one_gpu, tiny
from dapo_jax import learner
from dapo_jax.preflight import examine
from dapo_jax.setup import auto_sizes, checks, components, memory, start

OPEN = ("learner.row_tokens", "learner.micro_batch_rows", "rollout.slot_tokens")
OPEN += ("rollout.cache_mib",)
MODEL = tiny.get_config().model.path


def left_open(config):
    config.update_from_flattened_dict(dict.fromkeys(OPEN, 0))
    config.mesh.cpu_devices = 0
    checks.check(config)
    return config


def slots(config):
    return components.programs(config, vocab_size=0).engine.cache.slots


def test_a_directory_and_data_are_enough_to_train(tmp_path):
    config = any_model.get_config()
    config.model.path = MODEL
    config.data.train = base.dataset(kind="arithmetic", count=100)
    run = start.plan_training(config, tmp_path, None)
    config = run.config
    r, of = config.rollout, dict(base.leaves(config))
    names = ("model.family", "model.compute_dtype", "tokenizer.chat")
    assert [of[name] for name in names] == ["qwen2", "float32", "none"]
    assert (r.max_prompt_tokens, r.max_response_tokens) == (run.data.longest_prompt(), 4_096)
    assert (r.generation_prompts, config.algo.overlong_cache_tokens) == (100, 819)
    assert all(f"{key} = {of[key]!r}" in run.chosen[0] for key in (*OPEN, "tokenizer.chat"))
    assert not run.data.eval_sets


def test_a_plan_keeps_arguments_as_they_are_and_the_wish_does_not_change(tmp_path):
    """Arguments may have dicts in lists, as the tools of an environment."""
    wish, arguments = left_open(tiny.get_config()), {"tools": [{"name": "add"}], "widths": [1, 2]}
    wish.algo.args = arguments
    before = dict(base.leaves(wish))
    run = start.plan_training(wish, tmp_path, None)
    assert run.config.algo.args.to_dict() == arguments
    assert "algo.args" not in run.chosen[0]
    assert dict(base.leaves(wish)) == before


def test_what_is_open_stays_as_the_run_has_chosen_it(tmp_path):
    """A run begun on a GPU in bfloat16 was refused on a CPU, which chose float32 for it."""
    wish = tiny.get_config()
    wish.model.compute_dtype = ""
    chosen = start.plan_training(wish, tmp_path / "new", None).config
    assert chosen.model.compute_dtype == "float32"
    chosen.model.compute_dtype = "bfloat16"
    (tmp_path / "config.json").write_text(chosen.to_json_best_effort())
    assert start.plan_training(wish, tmp_path, None).config.model.compute_dtype == "bfloat16"


@pytest.mark.parametrize("model", [1, 2])
def test_rows_hold_the_longest_sequence_and_an_update_has_two_micro_batches_or_more(model):
    config = left_open(tiny.get_config())
    config.mesh.model = model
    auto_sizes.fit_training(config)
    c, r, degree = config.learner, config.rollout, 4 // model
    assert c.row_tokens >= r.max_prompt_tokens + r.max_response_tokens - 1
    assert c.row_tokens % learner.ROW_MULTIPLE == 0
    assert c.micro_batch_rows % degree == 0
    tokens = c.row_tokens * c.micro_batch_rows / degree
    assert tokens <= auto_sizes.MICRO_BATCH_TOKENS["cpu"]
    group = r.max_prompt_tokens + r.group_size * auto_sizes.MEAN_SHARE * r.max_response_tokens
    expected = r.num_prompts / config.updates_per_step * group / degree
    assert tokens <= expected / 2 + learner.ROW_MULTIPLE
    chosen = config.to_dict()
    auto_sizes.fit_training(config)
    assert config.to_dict() == chosen  # what is set stays


@pytest.mark.parametrize(
    ("preset", "lora_rank", "device_gib"), [("0.5b", 0, 17), ("0.5b", 0, 7.3), ("7b", 32, 34)]
)
def test_the_config_for_one_gpu_leaves_room_for_the_training_state(preset, lora_rank, device_gib):
    """Three quarters of 24 and of 48 GB; on less the sampler's own head had no room."""
    config = one_gpu.get_config()
    config.model.path, config.model.preset, config.learner.lora_rank = "", preset, lora_rank
    one, gib = jax.devices()[:1], 2**30
    auto_sizes.fit_training(config, devices=one, device_bytes=int(device_gib * gib))
    checks.check(config)
    held = 0 if lora_rank else (12 + 2) * 0.494e9  # of 0.5B: state, the sampler's weights
    held += 0 if lora_rank else 2 * 151_936 * 896  # and its head
    assert 0 < config.rollout.cache_mib * 2**20 < 0.8 * (device_gib * gib - held)
    config.rollout.cache_mib = 0
    with pytest.raises(ValueError, match=r"does not fit in the 0 MiB that a device of 1,024 has"):
        auto_sizes.fit_training(config, devices=one, device_bytes=gib)


def fitted(prompt_tokens, requests, **changes):
    config = any_model.get_config()
    config.model.path = MODEL
    config.update_from_flattened_dict(changes)
    auto_sizes.fit_model(config)
    auto_sizes.fit_lengths(config, prompt_tokens)
    auto_sizes.fit_cache(config, requests)
    checks.check(config)
    return config


def test_a_model_alone_gets_its_lengths_and_cache(monkeypatch):
    config, few = fitted(100, 200), {"rollout.max_response_tokens": 64}
    assert (config.model.family, config.model.compute_dtype) == ("qwen2", "float32")
    r = config.rollout
    assert (r.max_prompt_tokens, r.max_response_tokens) == (100, 20_480)
    assert r.slot_tokens == 10_240  # it was 0: responses longer than a page were preempted
    assert slots(fitted(100, 200, **few)) * 4 >= 200
    assert fitted(30_000, 1).rollout.max_response_tokens == 32_768 - 30_000
    assert fitted(100, 1, **few).rollout.max_response_tokens == 64
    with pytest.raises(ValueError, match=r"tokens = 32768 leaves no position for a prompt"):
        fitted(1, 1, **{"rollout.max_response_tokens": 32_768})
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    share = 8 * 2**20 * jax.local_device_count() / host_bytes  # 8 MiB: fewer slots than requests
    monkeypatch.setattr(auto_sizes, "HOST_SHARE", share)
    assert 1 <= slots(fitted(100, 200, **few)) < 50
    monkeypatch.setattr(memory, "device_limit", lambda: 3 * 2**20)  # 2 MiB are weights
    message = r"of 20,480 \(.*--max_tokens\) does not fit .*mesh\.model"
    with pytest.raises(ValueError, match=message):
        fitted(100, 1)


def test_preflight_plans_what_training_would_though_it_reads_no_data():
    config, devices = any_model.get_config(), jax.devices()
    config.model.path = MODEL
    run = examine.planned(config, devices, 2**34)
    r = run.config.rollout
    assert (r.max_prompt_tokens, r.max_response_tokens, r.generation_prompts) == (2048, 4096, 128)
    assert run.programs.engine.cache.slots > 0
