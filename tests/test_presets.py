"""Each preset of base.LOSS_PRESETS: with every config, and two steps of training each."""

import importlib

import numpy as np
import pytest
from runs import rows_without_timings
from test_train import programs_compiled_once, small_config  # noqa: F401  a fixture

from configs import base
from dapo_jax import train
from dapo_jax.setup import checks

RECIPES = ("tiny", "forks", *(f"qwen2_5_{size}" for size in ("0_5b", "1_5b", "7b", "32b")))


@pytest.mark.parametrize("preset", base.LOSS_PRESETS)
def test_a_preset_goes_with_every_recipe_and_changes_the_loss_alone(preset):
    for name in RECIPES:
        module = importlib.import_module(f"configs.{name}")
        config, plain = module.get_config(preset), module.get_config()
        checks.check(config)
        before = dict(base.leaves(plain))
        differing = {key for key, value in base.leaves(config) if value != before[key]}
        assert differing <= base.LOSS_PRESETS[preset].keys()
        assert differing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "dtype", "bounds"),
    [("gspo", "bfloat16", {"high", "low", "dual"}), ("kl_cov", "float32", set())],
)
def test_a_preset_trains_by_ratios_to_the_learners_own_rounding(preset, dtype, bounds, tmp_path):
    """No weight had changed, and 24 to 38 % of the tokens of short responses were clipped.

    GSPO's clip is 3e-4 and 4e-4, narrower than bfloat16's rounding between sampler and learner. A
    forward pass of the learner rounds as its update does only where no program keeps excess
    precision.
    """
    config = small_config(preset)
    config.model.compute_dtype, config.learner.remat = dtype, "none"
    config.num_steps = config.updates_per_step = 1
    config.eval.every_steps = 0
    train.train(config, tmp_path)
    (row,) = rows_without_timings(tmp_path)
    clipped = {key: value for key, value in row.items() if key.startswith("clip_fraction/")}
    assert clipped == {f"clip_fraction/{bound}": 0 for bound in bounds}
    assert (row["ratio_gap"] > 1e-4) == (dtype == "bfloat16")  # still the sampler's
    assert row["updates"] == 1 and row["grad_norm"] > 0 and row["updates_zero_gradient"] == 0
    assert np.isfinite(row["loss"])
