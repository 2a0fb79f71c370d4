"""DAPO's equations (arXiv 2503.14476), one pure function each, in the paper's order.

What is computed of log-probabilities takes NumPy or JAX arrays, inside and outside `jax.jit`.
Rewards, advantages and weights are NumPy's: the host needs them for ever new numbers of groups,
while the devices are at work. Axes: P prompts, G responses of one prompt, R = P*G responses, T
tokens. Losses are float32, or float64 where the inputs are (`jax.enable_x64`).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

AGGREGATIONS = ("token_mean", "sequence_mean", "prompt_mean", "constant")
FILTERS = ("correctness", "reward")
ADVANTAGE_EPSILON = 1e-6
LENGTH_EPSILON = 1e-8
MAX_LOG_RATIO = 20.0
MEAN_ROUNDING = 8 * float(np.finfo(np.float32).eps)  # of a mean, of its largest term


def correctness_reward(correct_PG: np.ndarray) -> np.ndarray:
    """Rewards a correct response with +1 and any other with -1 (Eq. 7).

    `correct_PG`: bool, or a number that is positive where the answer is correct; NaN is wrong.
    Any shape; returns float32 of the same shape.
    """
    return np.where(correct_PG > 0, 1.0, -1.0).astype(np.float32)


def outcome_reward(correct_PG: np.ndarray, score_PG: np.ndarray) -> np.ndarray:
    """Rewards each response with its task's score, or by Eq. 7 where the score is NaN.

    `correct_PG` as in `correctness_reward`; `score_PG`: floats of the same shape, any scale.
    Returns float32 of that shape.
    """
    reward_PG = np.where(np.isnan(score_PG), correctness_reward(correct_PG), score_PG)
    return reward_PG.astype(np.float32)


def clamped_log_ratio(logp_RT: ArrayLike, other_logp_RT: ArrayLike) -> jax.Array:
    """Computes `log(pi / pi_other)` of each token in nats, clamped to [-20, 20].

    The clamp keeps `exp` and its gradient finite; beyond it the gradient is zero.
    """
    return jnp.clip(jnp.subtract(logp_RT, other_logp_RT), -MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratio(logp_RT: ArrayLike, other_logp_RT: ArrayLike) -> jax.Array:
    """Computes each token's importance ratio `r = pi_theta / pi_other`, of Eq. 8 for pi_behavior.

    Both arguments are log-probabilities [R, T] in nats of the sampled tokens; r lies in
    [e^-20, e^20].
    """
    return jnp.exp(clamped_log_ratio(logp_RT, other_logp_RT))


def token_policy_loss(
    logp_RT: ArrayLike,
    other_logp_RT: ArrayLike,
    advantage_RT: ArrayLike,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes each token's clipped policy loss (Eq. 8, clip-higher Eq. 10), dual-clipped.

    `max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A)`, and for A < 0 at most `-dual_clip A`, so
    that a huge ratio cannot dominate the batch (dual clip, arXiv 1912.09729). The gradient is
    exactly zero where a bound holds, and that of the unclipped loss on the bound itself.

    `logp_RT`, `other_logp_RT`: [R, T] in nats; `advantage_RT`: [R, T] or [R, 1]. `dual_clip`
    is greater than 1; from e^20 = 4.9e8 on it never binds.

    Returns the loss to minimise, [R, T], and booleans [R, T] by the bound that holds it. high:
    A > 0 and r > 1 + eps_high. low: A < 0 and r < 1 - eps_low. dual: A < 0 and r > dual_clip. No
    token is in two of them. Padding is not masked out.
    """
    ratio_RT = importance_ratio(logp_RT, other_logp_RT)
    unclipped_RT = -advantage_RT * ratio_RT
    clipped_RT = -advantage_RT * jnp.clip(ratio_RT, 1.0 - eps_low, 1.0 + eps_high)
    # jnp.maximum splits the gradient of a tie, and r = 1 with eps = 0 is one: select instead.
    loss_RT = jnp.where(clipped_RT > unclipped_RT, clipped_RT, unclipped_RT)
    bound_RT = -advantage_RT * dual_clip
    loss_RT = jnp.where((advantage_RT < 0) & (bound_RT < loss_RT), bound_RT, loss_RT)
    return loss_RT, {
        "high": (advantage_RT > 0) & (ratio_RT > 1.0 + eps_high),
        "low": (advantage_RT < 0) & (ratio_RT < 1.0 - eps_low),
        "dual": (advantage_RT < 0) & (ratio_RT > dual_clip),
    }


def centred_reward(reward_PG: np.ndarray) -> np.ndarray:
    """Takes the group's mean away from each reward: the numerator of Eq. 9.

    A reward that is the mean but for float32's rounding gets exactly 0, and so does a whole group
    of equal ones: a mean over rewards such as -1.3 would otherwise leave advantages of 0.1 (the
    reference implementation trains on those), and a middle one the sign of its rounding.

    `reward_PG`: floats [P, G]. Returns the same shape and dtype.
    """
    mean_P1 = np.mean(reward_PG, axis=1, keepdims=True)
    equal_P1 = reward_PG.max(axis=1, keepdims=True) == reward_PG.min(axis=1, keepdims=True)
    rounding_P1 = MEAN_ROUNDING * np.abs(reward_PG).max(axis=1, keepdims=True)
    is_mean_PG = equal_P1 | (np.abs(reward_PG - mean_P1) <= rounding_P1)
    return np.where(is_mean_PG, 0.0, reward_PG - mean_P1)


def group_advantage(reward_PG: np.ndarray) -> np.ndarray:
    """Computes each response's advantage in its group (Eq. 9): `(R - mean) / (std + 1e-6)`.

    The standard deviation is unbiased (divides by G - 1). A group of one has nothing to compare
    with: mean 0, standard deviation 1. A group of equal rewards gets exactly 0.

    `reward_PG`: floats [P, G]. Returns the same shape and dtype.
    """
    if reward_PG.shape[1] == 1:
        return reward_PG / (1.0 + ADVANTAGE_EPSILON)
    std_P1 = np.std(reward_PG, axis=1, keepdims=True, ddof=1)
    return centred_reward(reward_PG) / (std_P1 + ADVANTAGE_EPSILON)


def informative_groups(correct_PG: np.ndarray) -> np.ndarray:
    """Marks the groups that dynamic sampling keeps (Eq. 11): 0 < correct responses < G.

    `correct_PG` [P, G] is correctness as in `correctness_reward`, or `above_lowest`. Returns
    bool [P].
    """
    correct_PG = correct_PG > 0
    return correct_PG.any(axis=1) & ~correct_PG.all(axis=1)


def above_lowest(reward_PG: np.ndarray) -> np.ndarray:
    """Marks the responses whose reward is above the lowest of their group.

    Given these in place of correctness, `informative_groups` keeps the groups whose rewards are not
    all equal, as verl does with `filter_groups.metric=seq_final_reward`. With shaped rewards
    (Eq. 13) all-wrong groups pass whose lengths differ: the policy then learns length alone.

    `reward_PG`: floats [P, G]. Returns bool [P, G]; with a NaN in a group none of it is marked.
    """
    return reward_PG > np.min(reward_PG, axis=1, keepdims=True)


def token_weights(mask_PGT: np.ndarray, *, mode: str, max_tokens: int = 0) -> np.ndarray:
    """Weighs each token's loss in one update, by a name of AGGREGATIONS.

    token_mean: `1 / sum_i |o_i|`, every token alike (Eq. 12). sequence_mean: `1 / (R |o_i|)`, every
    response alike (GRPO, arXiv 2402.03300, Eq. 3). prompt_mean: every prompt alike, and every token
    of its responses (ScaleRL, 2510.13786, sections 3.2 and 4). constant: `1 / (R max_tokens)`,
    whatever the lengths (Dr. GRPO, 2503.20783, Listing 1). A response or prompt without tokens
    (empty, or masked by overlong filtering) does not count, as in the reference implementation.

    `mask_PGT`: nonzero at response tokens, of the WHOLE mini-batch: weights are computed once,
    before the split into micro-batches and devices, so that partial sums of `loss * weight` add up
    to the true mean. [R, T] are the responses of one prompt. max_tokens: of a response at most.
    Returns floats of that shape; masked tokens weigh 0.
    """
    mask_PGT = mask_PGT != 0
    tokens_PG1 = np.sum(mask_PGT, axis=-1, keepdims=True)
    tokens_P11 = np.sum(tokens_PG1, axis=-2, keepdims=True)
    divisors = {
        "token_mean": max(np.sum(mask_PGT), 1),
        # The reference's epsilon: invisible in float32, and it spares empty rows a division by 0.
        "sequence_mean": max(np.sum(tokens_PG1 > 0), 1) * (tokens_PG1 + LENGTH_EPSILON),
        "prompt_mean": max(np.sum(tokens_P11 > 0), 1) * np.maximum(tokens_P11, 1),
        "constant": tokens_PG1.size * max_tokens,
    }
    return mask_PGT / divisors[mode]


def soft_overlong_penalty(
    length_tokens: np.ndarray, *, max_tokens: int, cache_tokens: int, factor: float
) -> np.ndarray:
    """Punishes length softly (Eq. 13): `factor` times 0 .. -1, to be added to the reward.

    0 up to `max_tokens - cache_tokens`, then linear to -1 at `max_tokens`, and -1 beyond. Without
    a cache (0): 0 up to `max_tokens`, -1 beyond.

    `length_tokens`: generated tokens with the end-of-sequence token, integers of any shape.
    Returns floats of that shape.
    """
    spare_tokens = (max_tokens - cache_tokens) - length_tokens
    # Lengths are whole, so a cache of 0 is the step that a divisor of 1 gives.
    return factor * np.clip(spare_tokens / max(cache_tokens, 1), -1.0, 0.0)


def shaped_reward(
    correct_PG: np.ndarray, score_PG: np.ndarray, length_tokens: np.ndarray, **overlong
) -> np.ndarray:
    """Rewards each response by its outcome (Eq. 7) and its length (Eq. 13): the sum of both.

    `correct_PG`, `score_PG` as in `outcome_reward`; `length_tokens` and `overlong` as in
    `soft_overlong_penalty`. Returns floats of their one shape, which may be any.
    """
    return outcome_reward(correct_PG, score_PG) + soft_overlong_penalty(length_tokens, **overlong)


def kl_k3(logp_RT: ArrayLike, reference_logp_RT: ArrayLike) -> jax.Array:
    """Estimates each token's KL(pi_theta || pi_ref) (GRPO, arXiv 2402.03300, Eq. 4).

    `exp(d) - d - 1` with `d = reference_logp - logp` clamped to [-20, 20]; unbiased and never
    negative. DAPO has no KL term: this is for the naive GRPO baseline. Log-probabilities [R, T] in
    nats; returns [R, T].
    """
    log_ratio_RT = clamped_log_ratio(reference_logp_RT, logp_RT)
    # expm1, because exp(d) - 1 loses all digits where the policies are close.
    return jnp.expm1(log_ratio_RT) - log_ratio_RT
