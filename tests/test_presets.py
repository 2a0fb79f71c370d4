"""Losses whose ratios are the learner's own: a step of training each."""

import numpy as np
import pytest
from runs import rows_without_timings
from shared_programs import programs_compiled_once, small_config  # noqa: F401  a fixture

from dapo_jax import train


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
    one = {"num_steps": 1, "updates_per_step": 1, "eval.every_steps": 0}
    how = {"model.compute_dtype": dtype, "learner.remat": "none"}
    train.train(small_config(preset, **one, **how), tmp_path)
    (row,) = rows_without_timings(tmp_path)
    clipped = {key: value for key, value in row.items() if key.startswith("clip_fraction/")}
    assert clipped == {f"clip_fraction/{bound}": 0 for bound in bounds}
    assert (row["ratio_gap"] > 1e-4) == (dtype == "bfloat16")  # still the sampler's
    assert row["updates"] == 1 and row["grad_norm"] > 0 and row["updates_zero_gradient"] == 0
    assert np.isfinite(row["loss"])
