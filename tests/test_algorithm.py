"""dapo_jax.algorithm: hand-computed equations, gradients, invariances, reference vectors.

Batches of all shapes are padded to one, for which the policy loss is compiled once (`update`).
"""

import math

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import jit

from dapo_jax import algorithm

CLIP = {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 10.0}
# The golden inputs are float32 numbers, so they are exact in both precisions.
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-10)], ids=["float32", "float64"]
)


def assert_near(actual, expected, tolerance: float, name: str = "") -> None:
    """Asserts an error of at most `tolerance`; in arrays also relative to the largest value.

    Scalars are sums of terms of both signs, whose rounding does not shrink with the result.
    """
    scale = 1.0 if np.ndim(expected) == 0 else min(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(actual, expected, rtol=0.0, atol=tolerance * scale, err_msg=name)


PADDED_SHAPE = (32, 257)  # the longest golden case


@jit
def padded_update(logp_RT, behavior_logp_RT, advantage_RT, weight_RT, clip):
    def loss(logp_RT):
        loss_RT = algorithm.token_policy_loss(logp_RT, behavior_logp_RT, advantage_RT, **clip)
        return jnp.sum(loss_RT * weight_RT), loss_RT

    (total, loss_RT), gradient_RT = jax.value_and_grad(loss, has_aux=True)(logp_RT)
    log_ratio_RT = algorithm.clamped_log_ratio(logp_RT, behavior_logp_RT)
    held = algorithm.clip_indicators(logp_RT, behavior_logp_RT, advantage_RT, **clip)
    return total, gradient_RT, {"loss": loss_RT, "log_ratio": log_ratio_RT, **held}


def update(logp_RT, behavior_logp_RT, advantage_RT, weight_RT, clip=CLIP):
    """Computes an update's (loss, gradient_RT, name -> [R, T]); the loss has these weights."""
    R, T = logp_RT.shape
    given = [logp_RT, behavior_logp_RT, advantage_RT, weight_RT.astype(logp_RT.dtype)]
    full = [np.zeros(PADDED_SHAPE, logp_RT.dtype) for _ in given]
    for padded_RT, array_RT in zip(full, given, strict=True):
        padded_RT[:R, :T] = array_RT
    outputs = jax.device_get(padded_update(*full, clip))
    return jax.tree.map(lambda array: array[:R, :T] if np.ndim(array) else array, outputs)


def test_rewards_are_the_tasks_score_or_plus_or_minus_one():
    # Only a positive number is correct: neither -1 nor NaN is ever rewarded.
    reward_PG = algorithm.correctness_reward(np.array([[1.0, 0.0, -1.0, np.nan]]))
    np.testing.assert_array_equal(reward_PG, [[1.0, -1.0, -1.0, -1.0]])
    correct_PG = np.array([[True, False, True], [False, False, True]])
    score_PG = np.array([[np.nan, np.nan, 0.25], [0.0, -3.5, np.nan]])
    reward_PG = algorithm.outcome_reward(correct_PG, score_PG)
    assert reward_PG.dtype == np.float32
    np.testing.assert_array_equal(reward_PG, [[1.0, -1.0, 0.25], [0.0, -3.5, 1.0]])


@pytest.mark.parametrize(
    ("max_tokens", "cache_tokens", "factor", "penalties"),
    [
        (20_480, 4_096, 1.0, {1: 0, 16_384: 0, 16_385: -1 / 4_096, 18_432: -0.5, 30_000: -1}),
        (16, 4, 0.5, {12: 0, 13: -0.125, 14: -0.25, 15: -0.375, 16: -0.5, 17: -0.5}),
        (16, 0, 2.0, {1: 0, 16: 0, 17: -2, 40: -2}),
    ],
    ids=["the paper's", "half", "without a cache"],
)
def test_soft_overlong_penalty_by_hand(max_tokens, cache_tokens, factor, penalties):
    limits = {"max_tokens": max_tokens, "cache_tokens": cache_tokens, "factor": factor}
    actual = algorithm.soft_overlong_penalty(np.array([*penalties]), **limits)
    np.testing.assert_array_equal(actual, [*penalties.values()])


@PRECISIONS
def test_advantages_by_hand(dtype, tolerance):
    """The deviation is unbiased and that of the own group; a group of one keeps its reward."""
    one_of_16 = np.full((1, 16), -1.0)
    one_of_16[0, 3] = 1.0
    two_groups = np.array([[0.0, 1.0, 2.0, 3.0], [30.0, 20.0, 10.0, 0.0]])
    # sqrt((1.5^2 + .5^2 + .5^2 + 1.5^2) / 3) = sqrt(5/3), and ten times that.
    centred, std = np.array([[-1.5, -0.5, 0.5, 1.5], [15, 5, -5, -15]]), math.sqrt(5 / 3)
    ones = np.array([[1.0], [-0.25]])
    for reward_PG, centred_PG, std_P1 in (
        (one_of_16, np.where(one_of_16 > 0, 1.875, -0.125), 0.5),
        (two_groups, centred, np.array([[std], [10 * std]])),
        (ones, ones, 1.0),
    ):
        actual = algorithm.group_advantage(reward_PG.astype(dtype))
        np.testing.assert_allclose(actual, centred_PG / (std_P1 + 1e-6), rtol=tolerance)


def test_the_first_mixed_groups_are_taken_in_prompt_order():
    correct_PG = np.array([[1, 1], [0, 1], [0, 0], [1, 0], [1, 0]])
    assert algorithm.informative_groups(correct_PG).tolist() == [False, True, False, True, True]
    assert not algorithm.informative_groups(np.array([[1], [0]])).any()


def test_on_policy_the_full_gradient_passes_though_both_bounds_are_one():
    advantage_RT, logp_RT = np.float32([[1.0, -1.0]]), np.full((1, 2), -1.0, np.float32)
    clip = CLIP | {"eps_low": 0.0, "eps_high": 0.0}
    _, gradient_RT, _ = update(logp_RT, logp_RT, advantage_RT, np.ones((1, 2)), clip)
    np.testing.assert_array_equal(gradient_RT, -advantage_RT)


@pytest.mark.parametrize("advantage", [3.0, -3.0, 0.0])
@pytest.mark.parametrize("dual_clip", [10.0, 1e9])
def test_extreme_log_ratios_stay_finite_without_gradient(advantage, dual_clip):
    logp_RT = np.array([[-1e4, -200.0, -21.0, -1e-6, 0.0, -np.inf, -1.0]], np.float32)
    behavior_logp_RT = np.array([[-1e-6, 0.0, -1e-6, -21.0, -1e4, -1.0, -np.inf]], np.float32)
    advantage_RT, weight_RT = np.full_like(logp_RT, advantage), np.ones_like(logp_RT)
    clip = CLIP | {"dual_clip": dual_clip}
    loss, gradient_RT, _ = update(logp_RT, behavior_logp_RT, advantage_RT, weight_RT, clip)
    assert np.isfinite(loss)
    np.testing.assert_array_equal(gradient_RT, np.zeros_like(logp_RT))


@jit
def kl_and_slope(logp_T, reference_logp_T):
    value_T, pull = jax.vjp(lambda logp_T: algorithm.kl_k3(logp_T, reference_logp_T), logp_T)
    return value_T, pull(jnp.ones_like(value_T))[0]


def test_kl_k3_by_hand_and_finite_for_extreme_policies():
    logp_T, reference_logp_T = np.float32([[-1, -1, -2, -1e4, 0], [-1, -2, -1, 0, -1e4]])
    value_T, slope_T = kl_and_slope(logp_T, reference_logp_T)
    np.testing.assert_allclose(value_T[:3], [0.0, 1 / math.e, math.e - 2.0], rtol=1e-6)
    assert np.isfinite(value_T).all()
    # d/dlogp = 1 - exp(reference - logp) inside the clamp, 0 beyond it.
    np.testing.assert_allclose(slope_T, [0, 1 - 1 / math.e, 1 - math.e, 0, 0], rtol=1e-6)


def test_kl_k3_is_accurate_and_never_negative_near_zero():
    d = np.concatenate([s * np.logspace(-8, 1, 2000) for s in (-1.0, 1.0)]).astype(np.float32)
    kl = np.asarray(kl_and_slope(np.zeros_like(d), d)[0])
    assert kl.min() >= 0.0
    exact = np.expm1(d.astype(np.float64)) - d
    middle = np.abs(d) > 1e-3
    np.testing.assert_allclose(kl[middle], exact[middle], rtol=1e-3)


def test_token_weights_by_hand():
    """Two of the prompts and three of the responses have tokens: no other changes a weight."""
    mask_PGT = np.array([[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [0, 0, 0]], [[0] * 3] * 2])
    by_hand = {
        "token_mean": mask_PGT / 6,
        "sequence_mean": mask_PGT / np.array([[[9.0], [3.0]], [[6.0], [3.0]], [[1.0], [1.0]]]),
        "prompt_mean": mask_PGT / np.array([[[8.0]], [[4.0]], [[1.0]]]),
        "constant": mask_PGT / (6 * 10),
    }
    assert tuple(by_hand) == algorithm.AGGREGATIONS
    for mode, expected in by_hand.items():
        weight_PGT = algorithm.token_weights(mask_PGT, mode=mode, max_tokens=10)
        np.testing.assert_allclose(weight_PGT, expected, rtol=1e-6, err_msg=mode)
        assert not algorithm.token_weights(0 * mask_PGT, mode=mode, max_tokens=10).any()


@PRECISIONS
def test_golden_losses_gradients_and_clip_fractions(shared, dtype, tolerance):
    modes = {"token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean"}
    with jax.enable_x64(dtype == np.float64):
        for name, stored in golden.cases(shared, "pl"):
            given = [stored[f"in/{key}"].astype(dtype) for key in ("new", "old", "adv")]
            clip = dict(zip(CLIP, stored["in/clip"].tolist(), strict=True))
            mask_RT = stored["in/mask"]
            for mode, theirs in modes.items():
                weight_RT = algorithm.token_weights(mask_RT, mode=mode)
                loss, gradient_RT, found = update(*given, weight_RT, clip)
                assert found["loss"].dtype == dtype
                assert_near(loss, stored[f"{theirs}/loss64"], tolerance, name)
                assert_near(gradient_RT, stored[f"{theirs}/grad64"], tolerance, name)
                assert_near(found["loss"], stored["mat64"], tolerance, name)
            measured = {
                "pg_clipfrac64": found["high"] | found["low"],
                "pg_clipfrac_lower64": found["dual"],
                "ppo_kl64": -found["log_ratio"],
            }
            # The reference divides these by the number of tokens + 1e-8.
            num_tokens = mask_RT.sum(dtype=np.float64) + 1e-8
            for key, value_RT in measured.items():
                mean = np.sum(value_RT * mask_RT, dtype=np.float64) / num_tokens
                assert_near(mean, stored[key], tolerance, f"{name} {key}")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_golden_group_advantages(shared, dtype):
    for name, stored in golden.cases(shared, "grpo/"):
        groups = (len(np.unique(stored["in/group"])), -1)  # whose rows follow each other
        first_token_R1 = stored["in/mask"].argmax(axis=1, keepdims=True)
        expected_PG = np.take_along_axis(stored["adv"], first_token_R1, axis=1).reshape(groups)
        reward_PG = stored["in/token_level_rewards"].sum(axis=1).reshape(groups)
        advantage_PG = algorithm.group_advantage(reward_PG.astype(dtype))
        assert advantage_PG.dtype == dtype
        if name == "grpo/zero_var_frac":
            # Equal rewards of -1.3: the reference's float32 mean leaves 0.1 where Eq. 9 has 0.
            assert expected_PG.max() > 0.1
            assert not advantage_PG.any()
        else:
            assert_near(advantage_PG, expected_PG, 1e-5, name)


def test_golden_overlong_rewards(shared):
    for name, stored in golden.cases(shared, "overlong/"):
        names = ("max_tokens", "cache_tokens", "factor")
        limits = dict(zip(names, stored["in/cfg"].tolist(), strict=True))
        length_R, correct_R = stored["in/length"], stored["in/score"] > 0
        unscored_R = np.full(correct_R.shape, np.nan)
        reward_R = algorithm.shaped_reward(correct_R, unscored_R, length_R, **limits)
        assert_near(reward_R, stored["reward"], 1e-10, name)


def test_golden_dynamic_sampling_on_the_shaped_score_keeps_all_wrong_groups_too(shared):
    """As algo.filter_groups = "reward" does; by correctness the case is in test_rollout.py."""
    (row,) = (row for row in golden.dynamic_sampling(shared) if row["metric"] == "score")
    batches = row["gen_batches"][: row["num_gen_batches"]]
    correct_PG, reward_PG = (
        np.concatenate([batch[key] for batch in batches]) for key in ("acc", "reward")
    )
    reference = np.unique(np.array(row["kept_trajectories"]) // correct_PG.shape[1])
    marked_PG = algorithm.above_lowest(reward_PG)
    ours = np.flatnonzero(algorithm.informative_groups(marked_PG))[: row["train_batch_size"]]
    np.testing.assert_array_equal(ours, reference)
    # Among them are groups that nobody solved, which Eq. 11 leaves out.
    dropped = reference[~algorithm.informative_groups(correct_PG)[reference]]
    assert len(dropped) > 0
    assert not correct_PG[dropped].any()
