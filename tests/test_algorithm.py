"""dapo_jax.algorithm: hand-computed equations, gradients, invariances, reference vectors.

To compile a program takes a second and to run it none: batches of all shapes are padded to one
(`padded`), for which the policy loss is compiled once a precision.
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
    ("x64", "tolerance"), [(False, 1e-5), (True, 1e-10)], ids=["float32", "float64"]
)
MODES = pytest.mark.parametrize("mode", algorithm.AGGREGATIONS)


def assert_near(actual, expected, tolerance: float, name: str = "") -> None:
    """Asserts an error of at most `tolerance`; in arrays also relative to the largest value.

    Scalars are sums of terms of both signs, whose rounding does not shrink with the result.
    """
    scale = 1.0 if np.ndim(expected) == 0 else min(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(actual, expected, rtol=0.0, atol=tolerance * scale, err_msg=name)


PADDED_SHAPE = (32, 257)  # the longest golden case


def padded(program):
    """Makes a program take arrays [R, T] of any shape, padded with zeros to PADDED_SHAPE."""
    jitted = jit(program)

    def run(*arrays_RT, clip):
        R, T = arrays_RT[0].shape
        full = [np.zeros(PADDED_SHAPE, np.asarray(array).dtype) for array in arrays_RT]
        for padded_RT, array_RT in zip(full, arrays_RT, strict=True):
            padded_RT[:R, :T] = array_RT
        outputs = jax.device_get(jitted(*full, clip))
        return jax.tree.map(lambda array: array[:R, :T] if np.ndim(array) else array, outputs)

    return run


@padded
def policy_update(logp_RT, behavior_logp_RT, advantage_RT, mask_RT, clip):
    """Computes token losses, log-ratios, indicators, and each aggregation's loss and gradient."""

    def loss(logp_RT, mode):
        loss_RT = algorithm.token_policy_loss(logp_RT, behavior_logp_RT, advantage_RT, **clip)
        weight_RT = algorithm.token_weights(mask_RT, mode=mode)
        return jnp.sum(jnp.where(weight_RT > 0, loss_RT, 0.0) * weight_RT)

    arguments = (logp_RT, behavior_logp_RT, advantage_RT)
    return (
        algorithm.token_policy_loss(*arguments, **clip),
        algorithm.clamped_log_ratio(logp_RT, behavior_logp_RT),
        algorithm.clip_indicators(*arguments, **clip),
        {mode: jax.value_and_grad(loss)(logp_RT, mode) for mode in algorithm.AGGREGATIONS},
    )


def loss_and_gradient(*batch, mode: str, clip: dict[str, float]):
    return policy_update(*batch, clip=clip)[-1][mode]


@padded
def partial_loss_and_gradient(logp_RT, behavior_logp_RT, advantage_RT, weight_RT, clip):
    """Computes one micro-batch's share, with weights of the whole mini-batch."""

    def loss(logp_RT):
        loss_RT = algorithm.token_policy_loss(logp_RT, behavior_logp_RT, advantage_RT, **clip)
        return jnp.sum(loss_RT * weight_RT)

    return jax.value_and_grad(loss)(logp_RT)


kl_k3 = jit(algorithm.kl_k3)


def group_advantages(rewards: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Computes the advantages of each array of rewards twice: in NumPy and in JAX."""
    jitted = jit(lambda rewards: [algorithm.group_advantage(reward_PG) for reward_PG in rewards])
    numpy = [algorithm.group_advantage(reward_PG) for reward_PG in rewards]
    return list(zip(numpy, jax.device_get(jitted(rewards)), strict=True))


def case_inputs(case: golden.Case, *, x64: bool):
    dtype = np.float64 if x64 else np.float32
    arrays = [
        array.astype(dtype) for array in (case.logp_RT, case.behavior_logp_RT, case.advantage_RT)
    ]
    clip = {"eps_low": case.eps_low, "eps_high": case.eps_high, "dual_clip": case.dual_clip}
    return arrays, clip


def random_batch(seed: int, *, responses: int = 6, tokens: int = 20):
    """Samples logp, behaviour logp, advantages and a ragged mask in which row 2 is empty."""
    rng = np.random.default_rng(seed)
    behavior_logp_RT = -rng.exponential(1.0, (responses, tokens)).astype(np.float32)
    logp_RT = behavior_logp_RT + rng.normal(0.0, 0.5, (responses, tokens)).astype(np.float32)
    advantage_R1 = rng.normal(0.0, 1.0, (responses, 1)).astype(np.float32)
    length_R = rng.integers(1, tokens + 1, responses)
    length_R[2] = 0
    return logp_RT, behavior_logp_RT, advantage_R1, np.arange(tokens) < length_R[:, None]


def token_loss_and_slope(ratio: float, advantage: float, **clip: float) -> tuple[float, float]:
    """Computes the loss of one token, sampled with probability 1/e, and d loss / d logp."""
    logp, behavior_logp, advantage, weight = (
        np.full((1, 1), value, np.float32) for value in (math.log(ratio) - 1.0, -1.0, advantage, 1)
    )
    loss, slope = partial_loss_and_gradient(logp, behavior_logp, advantage, weight, clip=clip)
    return float(loss), float(slope[0, 0])


# Rewards, advantages, dynamic sampling


def test_correctness_reward_is_plus_or_minus_one():
    reward_PG = algorithm.correctness_reward(np.array([[True, False], [False, False]]))
    assert reward_PG.dtype == jnp.float32
    np.testing.assert_array_equal(reward_PG, [[1.0, -1.0], [-1.0, -1.0]])
    # Only a positive number is correct: neither -1 nor NaN is ever rewarded.
    np.testing.assert_array_equal(
        algorithm.correctness_reward(np.array([[1.0, 0.0, -1.0, np.nan]])),
        [[1.0, -1.0, -1.0, -1.0]],
    )


def test_outcome_reward_is_the_tasks_score_where_it_has_one():
    correct_PG = np.array([[True, False, True], [False, False, True]])
    nan = np.nan
    score_PG = np.array([[nan, nan, 0.25], [0.0, -3.5, nan]])
    reward_PG = algorithm.outcome_reward(correct_PG, score_PG)
    assert isinstance(reward_PG, np.ndarray)
    assert reward_PG.dtype == np.float32
    np.testing.assert_array_equal(reward_PG, [[1.0, -1.0, 0.25], [0.0, -3.5, 1.0]])
    np.testing.assert_array_equal(
        algorithm.outcome_reward(correct_PG, np.full((2, 3), nan)),
        algorithm.correctness_reward(correct_PG),
    )


@pytest.mark.parametrize(
    ("length_tokens", "penalty"),
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)],
)
def test_soft_overlong_penalty_in_the_three_branches(length_tokens, penalty):
    actual = algorithm.soft_overlong_penalty(
        length_tokens, max_tokens=20480, cache_tokens=4096, factor=1.0
    )
    assert float(actual) == penalty


def test_soft_overlong_penalty_scales_with_the_factor():
    lengths = np.array([12, 13, 14, 15, 16, 17])
    actual = algorithm.soft_overlong_penalty(lengths, max_tokens=16, cache_tokens=4, factor=0.5)
    np.testing.assert_array_equal(actual, [0.0, -0.125, -0.25, -0.375, -0.5, -0.5])
    off = algorithm.soft_overlong_penalty(lengths, max_tokens=16, cache_tokens=4, factor=0.0)
    np.testing.assert_array_equal(off, np.zeros(6))


def test_soft_overlong_penalty_without_a_cache_is_a_step():
    actual = algorithm.soft_overlong_penalty(
        np.array([1, 16, 17, 40]), max_tokens=16, cache_tokens=0, factor=2.0
    )
    np.testing.assert_array_equal(actual, [0.0, 0.0, -2.0, -2.0])


def test_advantages_by_hand():
    one_of_16 = np.full((1, 16), -1.0, np.float32)
    one_of_16[0, 3] = 1.0
    expected = np.full((1, 16), -0.25)
    expected[0, 3] = 3.75
    # The deviation is unbiased and that of the own group: sqrt((1.5^2 + .5^2 + .5^2 + 1.5^2) / 3)
    # = sqrt(5/3), and ten times that.
    two_groups = np.array([[0.0, 1.0, 2.0, 3.0], [30.0, 20.0, 10.0, 0.0]], np.float32)
    row = np.array([-1.5, -0.5, 0.5, 1.5]) / math.sqrt(5 / 3)
    groups_of_one = np.array([[1.0], [-0.25]], np.float32)  # keep their reward
    both = group_advantages([one_of_16, two_groups, groups_of_one])
    for i in (0, 1):
        np.testing.assert_allclose(both[0][i], expected, atol=1e-5)
        np.testing.assert_allclose(both[1][i], [row, -row], atol=2e-6)
        np.testing.assert_allclose(both[2][i], [[1.0], [-0.25]], rtol=2e-6)


def test_equal_rewards_have_no_advantage_at_all():
    reward_P = np.array([1.0, -1.0, -1.3, 0.1], np.float32)
    for both in group_advantages([np.repeat(reward_P[:, None], G, 1) for G in (2, 3, 16, 17)]):
        for advantage_PG in both:
            assert not advantage_PG.any()


def test_an_all_wrong_group_with_length_penalties_trains_but_is_not_informative():
    correct_PG = np.zeros((1, 2), bool)
    penalty_PG = np.array([[0.0, -0.5]])
    advantage_PG = algorithm.group_advantage(algorithm.correctness_reward(correct_PG) + penalty_PG)
    np.testing.assert_allclose(advantage_PG, [[0.5**0.5, -(0.5**0.5)]], rtol=1e-5)
    assert not algorithm.informative_groups(correct_PG).any()


def test_informative_groups_are_mixed_groups():
    correct_PG = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
    for correct in (correct_PG, correct_PG.astype(bool), correct_PG.astype(np.float32)):
        np.testing.assert_array_equal(
            algorithm.informative_groups(correct), [False, True, True, False]
        )
    np.testing.assert_array_equal(algorithm.informative_groups(np.array([[1], [0]])), [False] * 2)


def test_first_informative_keeps_prompt_order_and_returns_what_there_is():
    correct_PG = np.array([[1, 1], [0, 1], [0, 0], [1, 0], [1, 0]])
    assert algorithm.first_informative(correct_PG, num_prompts=2).tolist() == [1, 3]
    assert algorithm.first_informative(correct_PG, num_prompts=9).tolist() == [1, 3, 4]
    assert algorithm.first_informative(correct_PG[:1], num_prompts=2).tolist() == []


# The policy loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # A > 0: only a ratio above 1 + eps_high is held.
        (0.5, 2.0, -1.0, -1.0),
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 2.0, -2.5, -2.5),
        (1.5, 2.0, -2.56, 0.0),
        (1000.0, 2.0, -2.56, 0.0),
        # A < 0: a ratio below 1 - eps_low is held, and one above the dual clip.
        (0.5, -2.0, 1.6, 0.0),
        (0.9, -2.0, 1.8, 1.8),
        (1.0, -2.0, 2.0, 2.0),
        (1.5, -2.0, 3.0, 3.0),
        (9.0, -2.0, 18.0, 18.0),
        (11.0, -2.0, 20.0, 0.0),
        # A = 0: nothing, at any ratio.
        (0.5, 0.0, 0.0, 0.0),
        (11.0, 0.0, 0.0, 0.0),
    ],
)
def test_loss_and_gradient_in_every_region(ratio, advantage, loss, slope):
    actual_loss, actual_slope = token_loss_and_slope(ratio, advantage, **CLIP)
    assert actual_loss == pytest.approx(loss, rel=1e-5)
    if slope == 0.0:
        assert actual_slope == 0.0
    else:
        assert actual_slope == pytest.approx(slope, rel=1e-5)


def test_clip_higher_moves_only_the_upper_bound():
    symmetric = {**CLIP, "eps_high": 0.2}
    assert token_loss_and_slope(1.25, 1.0, **symmetric)[1] == 0.0
    assert token_loss_and_slope(1.25, 1.0, **CLIP)[1] == pytest.approx(-1.25, rel=1e-5)
    assert token_loss_and_slope(0.7, -1.0, **symmetric) == token_loss_and_slope(0.7, -1.0, **CLIP)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_zero_is_a_value_for_the_clip_range(advantage):
    none = {"eps_low": 0.0, "eps_high": 0.0, "dual_clip": 10.0}
    # On policy every ratio is exactly 1, on both bounds: the full gradient must pass.
    assert token_loss_and_slope(1.0, advantage, **none) == (-advantage, -advantage)
    held = 1.01 if advantage > 0 else 0.99
    assert token_loss_and_slope(held, advantage, **none) == (-advantage, 0.0)


def test_the_dual_clip_can_be_put_out_of_reach():
    loss, slope = token_loss_and_slope(math.e**30, -1.0, **{**CLIP, "dual_clip": 1e9})
    assert loss == pytest.approx(math.e**20, rel=1e-5)
    assert slope == 0.0


@pytest.mark.parametrize("advantage", [3.0, -3.0, 0.0])
def test_extreme_log_ratios_stay_finite(advantage):
    logp_RT = np.array([[-1e4, -200.0, -21.0, -1e-6, 0.0, -np.inf]], np.float32)
    behavior_logp_RT = np.array([[-1e-6, 0.0, -1e-6, -21.0, -1e4, -1.0]], np.float32)
    for dual_clip in (10.0, 1e9):
        loss, gradient_RT = loss_and_gradient(
            logp_RT,
            behavior_logp_RT,
            np.full((1, 1), advantage, np.float32),
            np.ones((1, 6), bool),
            mode="token_mean",
            clip={**CLIP, "dual_clip": dual_clip},
        )
        assert np.isfinite(loss)
        np.testing.assert_array_equal(gradient_RT, np.zeros((1, 6)))


def test_indicators_mark_exactly_the_tokens_whose_gradient_is_held():
    rng = np.random.default_rng(0)
    log_ratio_RT = rng.normal(0.0, 2.0, (8, 200)).astype(np.float32)
    behavior_logp_RT = np.full_like(log_ratio_RT, -1.0)
    advantage_R1 = rng.normal(0.0, 1.0, (8, 1)).astype(np.float32)
    arguments = (behavior_logp_RT + log_ratio_RT, behavior_logp_RT, advantage_R1)
    update = policy_update(*arguments, np.ones(log_ratio_RT.shape, bool), clip=CLIP)
    _, gradient_RT = update[-1]["token_mean"]
    high, low, dual = update[-2]
    assert high.any()
    assert low.any()
    assert dual.any()
    marks = np.stack([high, low, dual]).astype(int).sum(axis=0)
    np.testing.assert_array_equal(marks, np.asarray(gradient_RT == 0.0))
    ratio_RT = np.exp(arguments[0] - arguments[1])
    np.testing.assert_array_equal(high, (advantage_R1 > 0) & (ratio_RT > 1.28))
    np.testing.assert_array_equal(low, (advantage_R1 < 0) & (ratio_RT < 0.8))
    np.testing.assert_array_equal(dual, (advantage_R1 < 0) & (ratio_RT > 10.0))


# The KL estimate


def test_kl_k3_by_hand():
    logp_RT = np.array([[-1.0, -1.0, -2.0]], np.float32)
    reference_logp_RT = np.array([[-1.0, -2.0, -1.0]], np.float32)
    expected = [[0.0, 1 / math.e, math.e - 2.0]]
    np.testing.assert_allclose(kl_k3(logp_RT, reference_logp_RT), expected, rtol=1e-6)


def test_kl_k3_is_accurate_and_never_negative_near_zero():
    d = np.concatenate([s * np.logspace(-8, 1, 2000) for s in (-1.0, 1.0)]).astype(np.float32)
    kl = np.asarray(kl_k3(np.zeros_like(d), d))
    assert kl.min() >= 0.0
    exact = np.expm1(d.astype(np.float64)) - d
    middle = np.abs(d) > 1e-3
    np.testing.assert_allclose(kl[middle], exact[middle], rtol=1e-3)


def test_kl_k3_averages_to_the_divergence():
    policy_V, reference_V = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    estimate_V = kl_k3(np.log(policy_V), np.log(reference_V))
    exact = np.sum(policy_V * np.log(policy_V / reference_V))
    assert np.sum(policy_V * estimate_V) == pytest.approx(exact, rel=1e-5)


def test_kl_k3_and_its_gradient_are_finite_for_extreme_policies():
    logp_T, reference_logp_T = np.float32([[-1e4, 0.0, -1.0], [0.0, -1e4, -2.0]])

    @jit
    def value_and_gradient(logp_T):
        value_T, pull = jax.vjp(lambda logp_T: algorithm.kl_k3(logp_T, reference_logp_T), logp_T)
        return value_T, pull(jnp.ones_like(value_T))[0]

    value_T, gradient_T = value_and_gradient(logp_T)
    assert np.isfinite(value_T).all()
    # d/dlogp = 1 - exp(reference - logp) inside the clamp, 0 beyond it.
    np.testing.assert_allclose(gradient_T, [0.0, 0.0, 1 - 1 / math.e], rtol=1e-6)


# Aggregation


def test_token_weights_by_hand():
    mask_RT = np.array([[1, 1, 1], [1, 0, 0]])
    np.testing.assert_allclose(
        algorithm.token_weights(mask_RT, mode="token_mean"), mask_RT / 4, rtol=1e-6
    )
    np.testing.assert_allclose(
        algorithm.token_weights(mask_RT, mode="sequence_mean"),
        [[1 / 6, 1 / 6, 1 / 6], [1 / 2, 0, 0]],
        rtol=1e-6,
    )


@MODES
def test_empty_responses_change_nothing(mode):
    *_, mask_RT = random_batch(3)
    keep = mask_RT.any(axis=1)
    assert not keep.all()
    weight_RT = algorithm.token_weights(mask_RT, mode=mode)
    np.testing.assert_array_equal(
        weight_RT[keep], algorithm.token_weights(mask_RT[keep], mode=mode)
    )
    assert not weight_RT[~keep].any()


@MODES
def test_a_batch_without_tokens_is_zero_with_zero_gradient(mode):
    logp_RT, behavior_logp_RT, advantage_R1, mask_RT = random_batch(4)
    nothing_RT = np.zeros_like(mask_RT)
    np.testing.assert_array_equal(algorithm.token_weights(nothing_RT, mode=mode), nothing_RT)
    loss, gradient_RT = loss_and_gradient(
        logp_RT, behavior_logp_RT, advantage_R1, nothing_RT, mode=mode, clip=CLIP
    )
    assert float(loss) == 0.0
    np.testing.assert_array_equal(gradient_RT, np.zeros_like(logp_RT))


def test_an_unknown_aggregation_is_named_with_the_choices_and_the_setting():
    with pytest.raises(ValueError) as error:
        algorithm.token_weights(np.ones((2, 3)), mode="token-mean")
    for part in ("'token-mean'", *algorithm.AGGREGATIONS, "config.algo.loss_aggregation"):
        assert part in str(error.value)


@MODES
@pytest.mark.parametrize("num_micro_batches", [2, 6])
def test_micro_batches_add_up_to_the_whole(mode, num_micro_batches):
    batch = random_batch(5)
    loss, gradient_RT = loss_and_gradient(*batch, mode=mode, clip=CLIP)
    weight_RT = np.asarray(algorithm.token_weights(batch[3], mode=mode))
    parts = [
        partial_loss_and_gradient(*part, clip=CLIP)
        for part in zip(
            *(np.split(a, num_micro_batches) for a in (*batch[:3], weight_RT)), strict=True
        )
    ]
    assert float(sum(part for part, _ in parts)) == pytest.approx(float(loss), rel=1e-5)
    np.testing.assert_allclose(np.concatenate([g for _, g in parts]), gradient_RT, atol=1e-7)


@MODES
def test_neither_padding_nor_row_order_matters(mode):
    batch = random_batch(6)
    loss, gradient_RT = loss_and_gradient(*batch, mode=mode, clip=CLIP)
    num_tokens = batch[0].shape[1]

    order = np.random.default_rng(0).permutation(len(batch[0]))
    shuffled_loss, shuffled_RT = loss_and_gradient(*(a[order] for a in batch), mode=mode, clip=CLIP)
    assert float(shuffled_loss) == pytest.approx(float(loss), rel=1e-5)
    np.testing.assert_allclose(shuffled_RT, gradient_RT[order], atol=1e-7)

    logp_RT, behavior_logp_RT, advantage_R1, mask_RT = batch
    wide = [
        np.pad(a, ((0, 0), (0, 13)), constant_values=filling)
        for a, filling in ((logp_RT, -2.0), (behavior_logp_RT, -1.0), (mask_RT, False))
    ]
    wide_loss, wide_RT = loss_and_gradient(
        wide[0], wide[1], advantage_R1, wide[2], mode=mode, clip=CLIP
    )
    assert float(wide_loss) == pytest.approx(float(loss), rel=1e-5)
    np.testing.assert_allclose(wide_RT[:, :num_tokens], gradient_RT, atol=1e-7)
    assert not wide_RT[:, num_tokens:].any()


# The reference vectors


@PRECISIONS
def test_golden_token_losses_and_clip_fractions(shared, x64, tolerance):
    with jax.enable_x64(x64):
        for case in golden.policy_loss_cases(shared):
            arrays, clip = case_inputs(case, x64=x64)
            loss_RT, log_ratio_RT, held, _ = policy_update(*arrays, case.mask_RT, clip=clip)
            assert loss_RT.dtype == (jnp.float64 if x64 else jnp.float32)
            assert_near(loss_RT, case.loss_RT, tolerance, case.name)

            measured = {
                "clip_fraction": held.high | held.low,
                "dual_clip_fraction": held.dual,
                "mean_log_ratio": log_ratio_RT,
            }
            # The reference divides these by the number of tokens + 1e-8.
            num_tokens = case.mask_RT.sum(dtype=np.float64) + 1e-8
            for name, value_RT in measured.items():
                mean = np.sum(value_RT * case.mask_RT, dtype=np.float64) / num_tokens
                assert_near(mean, getattr(case, name), tolerance, f"{case.name} {name}")


@PRECISIONS
@MODES
def test_golden_losses_and_gradients(shared, mode, x64, tolerance):
    with jax.enable_x64(x64):
        for case in golden.policy_loss_cases(shared):
            arrays, clip = case_inputs(case, x64=x64)
            loss, gradient_RT = loss_and_gradient(*arrays, case.mask_RT, mode=mode, clip=clip)
            expected = case.aggregated[mode]
            assert_near(loss, expected.loss, tolerance, case.name)
            assert_near(gradient_RT, expected.gradient_RT, tolerance, case.name)


@PRECISIONS
@MODES
def test_golden_accumulation_is_the_true_mean(shared, mode, x64, tolerance):
    with jax.enable_x64(x64):
        for case in golden.accumulation_cases(shared):
            arrays, clip = case_inputs(case, x64=x64)
            weight_RT = np.asarray(algorithm.token_weights(case.mask_RT, mode=mode))
            total = 0.0
            gradient_RT = np.zeros_like(arrays[0])
            for rank_micro in np.unique(case.rank_micro_R2, axis=0):
                rows = np.flatnonzero((case.rank_micro_R2 == rank_micro).all(axis=1))
                loss, gradient_RT[rows] = partial_loss_and_gradient(
                    *(array[rows] for array in (*arrays, weight_RT)), clip=clip
                )
                total += float(loss)
            assert_near(total, case.true[mode].loss, tolerance, case.name)
            assert_near(gradient_RT, case.true[mode].gradient_RT, tolerance, case.name)


def test_golden_accumulation_of_the_reference_is_not_the_token_mean(shared):
    for case in golden.accumulation_cases(shared):
        true, legacy = case.true["token_mean"], case.legacy["token_mean"]
        error = np.linalg.norm(legacy.gradient_RT - true.gradient_RT)
        assert error > 0.15 * np.linalg.norm(true.gradient_RT), case.name


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
def test_golden_group_advantages(shared, x64):
    with jax.enable_x64(x64):
        cases = golden.advantage_cases(shared)
        dtype = np.float64 if x64 else np.float32
        both = group_advantages([case.reward_PG.astype(dtype) for case in cases])
        computed = [(case, a) for case, pair in zip(cases, both, strict=True) for a in pair]
        for case, advantage_PG in computed:
            assert advantage_PG.dtype == dtype
            if case.name == "grpo/zero_var_frac":
                # Equal rewards of -1.3: the reference's float32 mean leaves 0.1 where Eq. 9 has 0.
                assert case.advantage_PG.max() > 0.1
                assert not advantage_PG.any()
                continue
            assert_near(advantage_PG, case.advantage_PG, 1e-5, case.name)
            if x64:
                assert_near(advantage_PG, advantage_by_hand(case.reward_PG), 1e-10, case.name)


def advantage_by_hand(reward_PG: np.ndarray) -> np.ndarray:
    """Computes Eq. 9 in float64: the stored advantages are float32 and cannot show 1e-10."""
    reward_PG = reward_PG.astype(np.float64)
    group_size = reward_PG.shape[1]
    if group_size == 1:
        return reward_PG / (1 + 1e-6)
    centred_PG = reward_PG - reward_PG.mean(axis=1, keepdims=True)
    variance_P1 = (centred_PG**2).sum(axis=1, keepdims=True) / (group_size - 1)
    return centred_PG / (np.sqrt(variance_P1) + 1e-6)


@PRECISIONS
def test_golden_overlong_rewards(shared, x64, tolerance):
    with jax.enable_x64(x64):
        for case in golden.overlong_cases(shared):
            penalty_R = algorithm.soft_overlong_penalty(
                case.length_R,
                max_tokens=case.max_tokens,
                cache_tokens=case.cache_tokens,
                factor=case.factor,
            )
            assert_near(penalty_R, case.penalty_R, tolerance, case.name)
            reward_R = algorithm.correctness_reward(case.correct_R) + penalty_R
            assert_near(reward_R, case.reward_R, tolerance, case.name)


def first_kept(case: golden.Case) -> tuple[np.ndarray, int]:
    """Finds the prompts that we keep of a script, and the generation batches that it took."""
    for num_batches in range(1, case.max_generation_batches + 1):
        correct_PG = np.concatenate(case.correct_NPG[:num_batches])
        kept = algorithm.first_informative(correct_PG, num_prompts=case.num_prompts)
        if len(kept) == case.num_prompts:
            break
    return kept, num_batches


def test_golden_dynamic_sampling_keeps_the_first_informative_groups(shared):
    compared = 0
    for case in golden.dynamic_sampling_cases(shared):
        kept, num_batches = first_kept(case)
        if case.error is not None:
            # The reference raises at the cap; ours reports what there is, for the caller to decide.
            assert num_batches == case.max_generation_batches, case.name
            assert len(kept) < case.num_prompts, case.name
        elif case.filtered_by != "score":
            group_size = case.correct_NPG.shape[2]
            responses = kept[:, None] * group_size + np.arange(group_size)
            assert responses.ravel().tolist() == case.kept_responses, case.name
            assert num_batches == case.generation_batches, case.name
            compared += 1
    assert compared > 0


def test_golden_dynamic_sampling_on_the_shaped_score_would_keep_all_wrong_groups(shared):
    cases = [c for c in golden.dynamic_sampling_cases(shared) if c.filtered_by == "score"]
    assert cases
    for case in cases:
        correct_PG, reward_PG = (
            np.concatenate(a[: case.generation_batches])
            for a in (case.correct_NPG, case.reward_NPG)
        )
        reference = np.unique(np.array(case.kept_responses) // correct_PG.shape[1])
        varied = np.flatnonzero(reward_PG.std(axis=1) > 0)
        np.testing.assert_array_equal(reference, varied[: case.num_prompts], err_msg=case.name)
        # Among them are groups that nobody solved, which Eq. 11 leaves out.
        dropped = reference[~np.asarray(algorithm.informative_groups(correct_PG))[reference]]
        assert len(dropped) > 0, case.name
        assert not correct_PG[dropped].any(), case.name
