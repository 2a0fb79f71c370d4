"""Configs: every key in one place, Table 1 as presets, impossible combinations refused."""

import importlib
import re

import jax
import pytest
from processes import ROOT

from configs import base
from dapo_jax.setup import checks, components

SIZES = ("0_5b", "1_5b", "3b", "7b", "14b", "32b")
CONFIGS = ("tiny", "forks", *(f"qwen2_5_{size}" for size in SIZES), "qwen3_8b", "qwen3_32b")
CONFIGS += ("gemma3_1b", "gemma3_4b", "gpu_node")


def config_of(name: str, preset: str = ""):
    return importlib.import_module(f"configs.{name}").get_config(preset)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_sets_only_keys_that_base_has_and_a_preset_changes_the_loss_alone(name):
    plain = dict(base.leaves(config_of(name)))
    assert base.KEYS.keys() <= plain.keys() and all(map(base.key_of, plain))
    for preset, keys in base.LOSS_PRESETS.items():
        config = config_of(name, preset)
        checks.check(config)
        differing = {key for key, value in base.leaves(config) if value != plain[key]}
        assert differing and differing <= keys.keys(), preset


def test_defaults_are_the_papers():
    config = base.get_config()
    assert (config.rollout.num_prompts, config.rollout.group_size) == (512, 16)
    assert (config.algo.eps_low, config.algo.eps_high, config.algo.dual_clip) == (0.2, 0.28, 10.0)
    assert config.rollout.max_response_tokens - config.algo.overlong_cache_tokens == 16_384
    assert (config.learner.learning_rate, config.learner.weight_decay) == (1e-6, 0.1)
    assert config.updates_per_step == 16
    assert (config.eval.temperature, config.eval.top_p) == (1.0, 0.7)


@pytest.mark.parametrize("name", CONFIGS)
def test_table_1_adds_one_technique_a_row(name):
    def techniques(preset):
        a = config_of(name, preset).algo
        found = {
            "clip_higher": a.eps_high > a.eps_low,
            "overlong_filtering": a.overlong_filtering,
            "soft_overlong": a.overlong_factor > 0,
            "token_level": a.loss_aggregation == "token_mean",
            "dynamic_sampling": a.dynamic_sampling,
        }
        return {technique for technique in found if found[technique]}

    on = {preset: techniques(preset) for preset in base.TABLE_1}
    assert on["naive_grpo"] == set()
    assert on["overlong_filtering"] == {"overlong_filtering"}
    assert on["clip_higher"] == {"overlong_filtering", "clip_higher"}
    assert on["soft_overlong"] == {"clip_higher", "soft_overlong"}
    assert on["token_level"] == {"clip_higher", "soft_overlong", "token_level"}
    assert on["dapo"] == on["token_level"] | {"dynamic_sampling"}
    assert config_of(name, "dapo").to_dict() == config_of(name).to_dict()


def test_the_32b_config_builds_its_model_shardings_and_cache_without_devices():
    """The cache is planned for responses of 20,480 tokens, 131,072 bytes each; CPUs copy half."""
    config = config_of("qwen2_5_32b")
    config.model.path, config.model.preset = "", "32b"
    config.mesh.model = 2
    checks.check(config)
    policy = components.programs(config, vocab_size=151_665)
    state = policy.state
    leaves = jax.tree.leaves(state)
    sharded = sum(x.size for x in leaves if x.sharding.shard_shape(x.shape) != x.shape)
    assert sharded / sum(x.size for x in leaves) > 0.999
    decoder = jax.tree.leaves(jax.eval_shape(policy.reshard, state.params, None))
    assert {leaf.dtype for leaf in decoder} == {jax.numpy.dtype("bfloat16")}

    cache = policy.engine.cache
    assert cache.pages_per_response == 160 < cache.pages
    assert cache.pages_per_prompt == 16 < cache.prompt_pages
    assert cache.slots * config.rollout.slot_tokens <= cache.pages * config.rollout.page_tokens
    tokens = (1.5 * cache.pages + cache.prompt_pages + cache.slots) * 128
    assert 0.95 < tokens * 131_072 / (config.rollout.cache_mib * 2**20) <= 1


def test_minutes_are_said_alike_wherever_a_reader_meets_them():
    """`make test` took four and a half minutes in three files, and six in a fourth."""
    front, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in ("train", "real", "test"):
        said = re.search(rf"make {target} +# (.*?) min", front)[1]
        assert re.search(rf"# make {target} .*\b{said} minutes\)", makefile), target
    studies = (ROOT / "experiments" / "README.md").read_text()
    assert re.search(r"\[tiny_dapo\].*\|4 minutes\|\n.*\[smollm2\].*\|8 to 17 minutes\|", studies)
