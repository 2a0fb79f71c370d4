"""Configs: every key in one place, Table 1 as presets, impossible combinations refused."""

import importlib
import math
import pathlib
import re

import jax
import pytest
from processes import ROOT

from configs import base
from dapo_jax.setup import checks, components, start
from sharding.mesh import make_mesh

SIZES = ("0_5b", "1_5b", "3b", "7b", "14b", "32b")
CONFIGS = ("tiny", "forks", *(f"qwen2_5_{size}" for size in SIZES), "qwen3_8b", "qwen3_32b")
CONFIGS += ("gemma3_1b", "gemma3_4b")


def config_of(name: str, preset: str = ""):
    return importlib.import_module(f"configs.{name}").get_config(preset)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_sets_only_keys_that_base_has(name):
    names = {key for key, _ in base.leaves(config_of(name))}
    assert base.KEYS.keys() <= names and all(map(base.key_of, names))


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
        return {
            "clip_higher": a.eps_high > a.eps_low,
            "overlong_filtering": a.overlong_filtering,
            "soft_overlong": a.overlong_factor > 0,
            "token_level": a.loss_aggregation == "token_mean",
            "dynamic_sampling": a.dynamic_sampling,
        }

    on = {preset: {k for k, v in techniques(preset).items() if v} for preset in base.TABLE_1}
    assert on["naive_grpo"] == set()
    assert on["overlong_filtering"] == {"overlong_filtering"}
    assert on["clip_higher"] == {"overlong_filtering", "clip_higher"}
    assert on["soft_overlong"] == {"clip_higher", "soft_overlong"}
    assert on["token_level"] == {"clip_higher", "soft_overlong", "token_level"}
    assert on["dapo"] == on["token_level"] | {"dynamic_sampling"}
    assert config_of(name, "dapo").to_dict() == config_of(name).to_dict()
    with pytest.raises(ValueError, match=r"naive_gpro.*did you mean 'naive_grpo'"):
        config_of(name, "naive_gpro")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"updates_per_step": 5}, "num_prompts = 32 does not divide by updates_per_step = 5"),
        ({"algo.dual_clip": float("inf")}, "algo.dual_clip = inf, but must be greater than 1, and"),
        ({"algo.loss_aggregation": "token-mean"}, "token-mean.*token_mean, sequence_mean"),
        ({"algo.overlong_cache_tokens": 81}, "81 exceeds rollout.max_response_tokens = 80"),
        ({"learner.row_tokens": 174}, "learner.row_tokens = 174.*175"),
        ({"rollout.max_generation_batches": 1, "rollout.generation_prompts": 24}, "24 prompts"),
        ({"learner.lora_rank": 8, "learner.lora_targets": ("q", "qq")}, "lora_targets has 'qq'"),
        ({"learner.lora_rank": 8, "learner.lora_targets": ()}, "lora_targets is empty"),
    ],
)
def test_impossible_settings_name_the_value_and_the_key(changes, message):
    config = config_of("tiny")
    checks.check(config)
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        checks.check(config)


def test_refusals_are_said_together():
    """A user's own model and data took six corrections in six runs."""
    config = config_of("tiny")
    config.algo.overlong_cache_tokens, config.updates_per_step, config.seed = 81, 5, -1
    with pytest.raises(ValueError, match=r"\(1\).*seed = -1.*updates_per_step = 5.*\(3\).* 81 exc"):
        checks.check(config)
    config.model.preset, config.rollout.max_response_tokens = "0.5b", 40_000
    config.model.path = str(pathlib.Path(config.model.path).resolve())
    with pytest.raises(ValueError, match=r"updates_per_step = 5.*32768 positions.*model\.preset"):
        start.check(config)


def test_too_little_data_and_wrong_batches_are_refused_before_anything_compiles():
    config = config_of("tiny")
    tokenizer = components.tokenizer(config)
    config.data.train.count = 20
    with pytest.raises(ValueError, match=r"20 usable prompts.*generation_prompts = 48"):
        components.load_data(config, tokenizer, training=True)
    config.learner.micro_batch_rows = 18
    with pytest.raises(
        ValueError, match=r"micro_batch_rows = 18 .* data 4 = 4 groups.*nearest.* 16"
    ):
        checks.check_divides(config, make_mesh(data=4, model=1))
    checks.check_divides(config, make_mesh(data=2, model=2))
    with pytest.raises(ValueError, match="tokenizer has 999 ids, but the model only 384"):
        components.programs(config_of("tiny"), 999)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.page_tokens": 20}, "page_tokens = 20 is not a multiple of .*block_tokens = 8"),
        ({"mesh.model": 4}, "mesh.model = 4 does not divide the model's 2 key/value heads"),
        (
            {"rollout.cache_mib": 1},
            r"cache_mib = 1 does not hold .* 96 tokens and .* 80 on a device; 2 does",
        ),
    ],
)
def test_an_engine_that_cannot_be_is_refused_before_anything_compiles(changes, message):
    config = config_of("tiny")
    config.update_from_flattened_dict(changes)
    checks.check(config)
    with pytest.raises(ValueError, match=message):
        components.programs(config, 384)


def test_the_32b_config_builds_its_model_shardings_and_cache_without_devices():
    """Every parameter and moment of the paper's 32B model gets a sharding; nothing is allocated.

    The cache is planned for responses of 20,480 tokens on a model of 131,072 bytes a token; a CPU
    copies 3/4 at most.
    """
    config = config_of("qwen2_5_32b")
    config.model.path, config.model.preset = "", "32b"
    config.mesh.model = 2
    checks.check(config)
    policy = components.programs(config, vocab_size=151_665)
    state = policy.state
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == 32_763_876_352
    sharded = [x for x in jax.tree.leaves(state) if not x.sharding.is_fully_replicated]
    whole = sum(x.size for x in jax.tree.leaves(state))
    assert sum(x.size for x in sharded) / whole > 0.999
    assert all(x.sharding.shard_shape(x.shape) != x.shape for x in sharded)
    decoder = jax.tree.leaves(jax.eval_shape(policy.reshard, state.params, None))
    assert {leaf.dtype for leaf in decoder} == {jax.numpy.dtype("bfloat16")}

    cache = policy.engine.cache
    assert cache.pages_per_response == 160 < cache.pages
    assert cache.pages_per_prompt == 16 < cache.prompt_pages
    assert cache.slots * config.rollout.slot_tokens <= cache.pages * config.rollout.page_tokens
    tokens = (1.75 * cache.pages + cache.prompt_pages) * 128 + cache.slots * 16
    assert 0.95 < tokens * 131_072 / (config.rollout.cache_mib * 2**20) <= 1
    config.rollout.cache_mib = 2_048
    with pytest.raises(ValueError, match=r"cache_mib = 2048 does not hold .* 20480 on") as refused:
        components.programs(config, vocab_size=151_665)
    config.rollout.cache_mib = math.ceil(float(re.search(r"; (\d+) does", str(refused.value))[1]))
    components.programs(config, vocab_size=151_665)


def test_every_key_beside_the_peers_names_exists():
    """A row of configs/README.md named a key that was gone."""
    text = (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    table = text.split("|verl|TRL|here|\n|---|---|---|\n")[1].split("\n\n")[0]
    known = {*base.KEYS, *(f"data.train.{name}" for name in base.DATASET)}
    known |= {f"eval.sets.NAME.{name}" for name in base.DATASET}
    named = []
    for row in table.split("\n"):
        _, _, _, here, _ = row.split("|")
        names = [name.partition("=") for name in re.findall(r"`([\w.]+=?\w*)`", here)]
        named += [(name, value) for name, _, value in names if "." in name or name in base.KEYS]
    assert len(named) > 50
    assert [name for name, _ in named if name not in known] == []
    for name, value in named:
        key = base.key_of(name)
        assert not value or not key.allowed() or value in key.allowed(), (name, value)
