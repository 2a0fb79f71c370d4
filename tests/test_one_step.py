"""One step of DAPO in numbers, in the order of `rl_step` in dapo_jax/train.py: to be read first."""

import contextlib

import jax
import numpy as np
from shared_programs import programs_compiled_once, small_config  # noqa: F401

from dapo_jax import learner, losses, train
from dapo_jax.logs.metrics import Stopwatch
from dapo_jax.setup import start


def test_one_step(tmp_path):
    """4 prompts with 8 responses of at most 48 tokens each, and two updates at a rate of 1e-3."""
    config = small_config(num_steps=1)
    with contextlib.ExitStack() as stack:
        run, state, progress = start.open_run(config, tmp_path, None, stack)

        # Sample: prompts are issued until 4 groups have right and wrong responses (Eq. 11).
        rollouts, *_ = train.sample(run, 0, state, progress, None, Stopwatch())
        is_mixed_P = rollouts.correct_PG.any(axis=1) & ~rollouts.correct_PG.all(axis=1)
        assert rollouts.kept.tolist() == np.flatnonzero(is_mixed_P)[:4].tolist()
        groups = [rollouts.sampled[p] for p in rollouts.kept]
        assert len(groups) == 4 <= len(rollouts.sampled) <= rollouts.issued
        assert "Answer:" in groups[0].prompt.example.text
        assert 28 < rollouts.length_PG.max() <= 48

        # Reward: 1 or -1 (Eq. 7), and 1/20 less for each of the last 20 of 48 tokens (Eq. 13).
        reward_PG = train.reward(config, rollouts)
        wanted_PG = np.where(rollouts.correct_PG, 1.0, -1.0)
        wanted_PG -= np.maximum(rollouts.length_PG - 28, 0) / 20
        np.testing.assert_allclose(reward_PG, wanted_PG, atol=1e-6)

        # Advantage: in units of the group's standard deviation, around its mean (Eq. 9).
        how = {"scale": config.algo.advantage_scale}
        kept, tokens_PG = rollouts.kept, rollouts.sampled_tokens_PG
        advantage_PG = losses.advantages(reward_PG, kept, tokens_PG, **how)
        kept_PG = reward_PG[kept]
        centred_PG = kept_PG - kept_PG.mean(axis=1, keepdims=True)
        spread_P1 = kept_PG.std(axis=1, ddof=1, keepdims=True)
        np.testing.assert_allclose(advantage_PG, centred_PG / spread_P1, rtol=1e-5)

        # Pack: a prompt, then responses to it, in rows of 192 tokens. The first update is for two
        # groups, of which all tokens weigh the same.
        settings, mesh = run.programs.settings, run.programs.mesh
        batch, _ = learner.minibatches(rollouts, advantage_PG, settings, mesh)
        is_response, weight = (np.asarray(a) for a in (batch.is_response_BT, batch.weight_BT))
        length_PG = rollouts.length_PG[rollouts.kept][:2]
        tokens = length_PG.sum()
        assert batch.tokens_BT.shape[2] == 192
        assert is_response.sum() == tokens
        np.testing.assert_allclose(weight[is_response], 1 / tokens, rtol=1e-6)  # Eq. 12
        assert not weight[~is_response].any()

        # Update: the policy is the sampler's yet, so that every ratio is 1 and nothing is clipped;
        # the loss is the weighted mean of -advantage (Eq. 8).
        before = jax.device_get(state.params)
        state, (first, second) = train.update(run, state, rollouts, advantage_PG, 1e-3)
        assert first["ratio_gap"] == first["clip_fraction/high"] == 0 < second["ratio_gap"]
        expected = -(advantage_PG[:2] * length_PG).sum() / tokens
        np.testing.assert_allclose(first["loss"], expected, atol=1e-6)
        change = jax.tree.map(lambda new, old: np.abs(new - old).max(), state.params, before)
        assert all(0 < size < 3e-3 for size in jax.tree.leaves(change))  # AdamW: about 1e-3 each
