"""Each preset of base.LOSS_PRESETS: with every config, and two steps of training each."""

import dataclasses
import importlib
import json

import numpy as np
import pytest
from test_overlapped_evaluation import Killed, digests
from test_train import (
    programs_compiled_once,  # noqa: F401  a fixture
    rows_without_timings,
    small_config,
)

from configs import base
from dapo_jax import learner, train
from dapo_jax.cli import config_flags
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.setup import checks, components

RECIPES = ("tiny", "forks", *(f"qwen2_5_{size}" for size in ("0_5b", "1_5b", "7b", "32b")))


@pytest.mark.parametrize("preset", base.LOSS_PRESETS)
def test_a_preset_goes_with_every_recipe_and_changes_the_loss_alone(preset):
    for name in RECIPES:
        module = importlib.import_module(f"configs.{name}")
        config, plain = module.get_config(preset), module.get_config()
        checks.check(config)
        differing = {key for key, *_ in config_flags.differences(plain.to_dict(), config.to_dict())}
        assert differing <= base.LOSS_PRESETS[preset].keys()
        assert differing


@pytest.mark.slow
def test_gspo_clips_nothing_in_a_first_update_in_bfloat16():
    """No weight had changed, and 24 to 38 % of the tokens of short responses were clipped.

    GSPO's clip is 3e-4 and 4e-4, narrower than the rounding between sampler and learner. A forward
    pass of the learner rounds as its update does only where no program keeps excess precision.
    """
    config = small_config("gspo")
    config.model.compute_dtype, config.learner.remat = "bfloat16", "none"
    config.updates_per_step = 1
    tokenizer = components.tokenizer(config)
    programs = components.programs(config, tokenizer.vocab_size)
    data = components.load_data(config, tokenizer, training=True)
    state = programs.start_state()
    stream = Stream(
        components.key(config, components.ROLLOUT_STREAM), components.sampling(config, tokenizer)
    )
    session = Session(programs.engine, programs.reshard(state.params, None), stream)
    for cursor in range(config.rollout.num_prompts):
        session.submit(cursor, data.stream[cursor], group_size=8)
    groups = []
    while session.unfinished:
        groups += session.step()
    advantage_PG = np.tile(np.float32([1, -1] * 4), (len(groups), 1))
    batch = learner.minibatch(groups, advantage_PG, programs.learning, programs.mesh)
    old_logp = programs.compile_old_logprobs()(state.params, None, batch)
    assert np.abs(old_logp - batch.behavior_logp_BT).max() > 1e-3
    update, clipped = programs.compile_update(), {}
    for name, logp in {"sampler": batch.behavior_logp_BT, "learner": old_logp}.items():
        batch = dataclasses.replace(batch, old_logp_BT=logp)
        state, metrics = update(state, None, batch, 0.0)
        clipped[name] = sum(float(metrics[f"clip_fraction/{bound}"]) for bound in ("low", "high"))
    assert clipped["sampler"] > 0.1
    assert clipped["learner"] == 0
    assert metrics["ratio_gap"] > 1e-4  # still the sampler's


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["gspo", "kl_cov", "tis"])
def test_a_preset_trains(preset, tmp_path):
    """Two steps of two updates: every weight moves by finite gradients, and the row says so."""
    config = small_config(preset)
    config.num_steps = 2
    config.eval.every_steps = 0
    train.train(config, tmp_path)
    rows = rows_without_timings(tmp_path)
    assert [row["updates"] for row in rows] == [2, 2]
    for row in rows:
        assert np.isfinite(row["loss"])
        assert row["grad_norm"] > 0
        assert row["updates_zero_gradient"] == 0
        held = {key for key in row if key.startswith("clip_fraction/")}
        bounds = {"cispo": {"high", "low"}, "kl_cov": set()}.get(
            config.algo.policy_loss, {"high", "low", "dual"}
        )
        bounds |= {"tis"} if preset == "tis" else set()
        assert held == {f"clip_fraction/{bound}" for bound in bounds}


@pytest.mark.slow
def test_a_killed_run_that_retires_prompts_resumes_bitwise(tmp_path, monkeypatch):
    """Retired prompts are in the checkpoint; few prompts, so that epochs are short."""
    config = small_config()
    config.num_steps, config.eval.every_steps, config.checkpoint.every_steps = 5, 0, 1
    config.data.train.count, config.algo.retire_pass_rate = 10, 0.5
    whole, run, take_updates = tmp_path / "whole", tmp_path / "run", train.update

    def killed(*args):
        if (run / "checkpoints/3").is_dir():
            raise Killed
        return take_updates(*args)

    train.train(config, whole)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(train, "update", killed)
        train.train(config, run)
    progress = json.loads((run / "checkpoints/3/progress/metadata").read_text())
    train.train(config, run)
    rows = rows_without_timings(whole)
    assert rows[2]["prompts_retired"] == len(progress["retired"]) > 0
    assert rows[-1]["prompts_seen"] > 2 * 10
    assert rows_without_timings(run) == rows
    assert digests(run, 5) == digests(whole, 5)
