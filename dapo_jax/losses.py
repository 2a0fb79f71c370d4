"""The policy loss as four choices, each a table; a row of each makes a published loss.

    algo.ratio             RATIOS        how far the policy is from the one that sampled
    algo.policy_loss       POLICY_LOSSES what becomes of tokens whose ratio is far from 1
    algo.advantage_scale   ADVANTAGES    what a reward's distance from its group's mean is scaled by
    algo.loss_aggregation  AGGREGATIONS  how a mini-batch's losses are averaged, in algorithm.py

The first row of each is DAPO's (arXiv 2503.14476); configs/README.md has the index of the papers
that take others. algo.policy_loss and algo.advantage_scale may name a custom one,
"module:function" (on PYTHONPATH, or in the working directory). A custom policy loss is a function
of (logp_pair, logp, tokens, settings) that returns each token's loss, before its weight, and its
indicators. settings.args has the constants that algo.args gives it. With algo.ratio = "token" it is
called for a chunk of C tokens at a time, and the fields named _BT are [C]. With "sequence" it is
called once for whole rows [B, T], so that it sees whole responses (`response_mean`); the head is
then computed twice. Axes as in dapo_jax.algorithm, and B packed rows (dapo_jax.packing).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax import algorithm
from dapo_jax.outside import imported, running
from dapo_jax.types import Batch


def response_mean(value_BT, tokens: Batch):
    """Gives every token of the packed rows the mean of a value over its response's sampled ones."""

    def of_row(value_T, branch_T, counted_T):
        def total(terms_T):
            return jax.ops.segment_sum(terms_T, branch_T, num_segments=len(branch_T) + 1)

        sum_T = total(jnp.where(counted_T, value_T, 0.0))
        return (sum_T / jnp.maximum(total(counted_T.astype(value_T.dtype)), 1))[branch_T]

    return jax.vmap(of_row)(value_BT, tokens.branch_BT, tokens.is_response_BT)


# Ratios: two log-probabilities, of which the difference is log r.


def token_ratio(logp, tokens: Batch, settings):
    """Compares each token's own probabilities (Eq. 8), as algo.old_logprobs says."""
    of_learner = settings.old_logprobs == "learner"
    return logp, tokens.old_logp_BT if of_learner else tokens.behavior_logp_BT


def sequence_ratio(logp_BT, tokens: Batch, settings):
    """Compares whole responses by the geometric mean of their ratios (GSPO, 2507.18071, Eq. 7).

    To the learner's own old log-probabilities: its clip of 3e-4 is narrower than what the rounding
    between sampler and learner adds to the mean of a short response in bfloat16.
    """
    log_ratio_BT = response_mean(jnp.subtract(logp_BT, tokens.old_logp_BT), tokens)
    return log_ratio_BT, jnp.zeros_like(log_ratio_BT)


RATIOS = {"token": token_ratio, "sequence": sequence_ratio}


# Policy losses: from a ratio to each token's loss, and which bounds hold it.


def clip(logp_pair, logp, tokens: Batch, settings):
    """Bounds the objective (Eq. 8 with the dual clip): beyond a bound a token has no gradient."""
    loss, held = algorithm.token_policy_loss(
        *logp_pair,
        tokens.advantage_BT,
        eps_low=settings.eps_low,
        eps_high=settings.eps_high,
        dual_clip=settings.dual_clip,
    )
    return loss, {f"clip_fraction/{bound}": value for bound, value in held.items()}


def cispo(logp_pair, logp, tokens: Batch, settings):
    """Bounds the weight of log pi alone (CISPO, 2506.13585, Eq. 4 and 5): all keep a gradient."""
    ratio = algorithm.importance_ratio(*logp_pair)
    low, high = 1.0 - settings.eps_low, 1.0 + settings.eps_high
    weight = jax.lax.stop_gradient(jnp.clip(ratio, low, high))
    held = {"clip_fraction/high": ratio > high, "clip_fraction/low": ratio < low}
    return -weight * tokens.advantage_BT * logp, held


def unbounded(logp_pair, logp, tokens: Batch, settings):
    """Bounds nothing: the importance-weighted policy gradient, -r A."""
    return -algorithm.importance_ratio(*logp_pair) * tokens.advantage_BT, {}


POLICY_LOSSES = {"clip": clip, "cispo": cispo, "none": unbounded}


def function_of(key: str, name: str) -> Callable:
    """Returns the function that algo.<key> names; ValueError where it cannot be imported.

    A custom one raises ValueError where it fails, and a loss where it returns something else.
    """
    if ":" not in name:
        return CUSTOM[key][name]
    setting = f"algo.{key} = {name!r}"
    function = imported(setting, name)

    def custom(*arguments):
        with running(setting, name):
            returned = function(*arguments)
        if key == "policy_loss":
            require_loss(setting, returned, arguments[1])
        return returned

    return custom


# What an update has of its own, beside the indicators.
OWN = {"tokens", "on_policy", "entropy", "mean_prob", "ratio_gap", "kl"}
OWN |= {"loss", "grad_norm", "taken", "bad", "empty"}


def require_loss(setting: str, returned, logp) -> None:
    """Refuses what is no (loss, indicators) with a value for each token of logp (ValueError)."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise ValueError(f"{setting} has to return (the tokens' loss, a dict of indicators)")
    loss, indicators = returned
    for what, values in {"the loss": loss, **indicators}.items():
        if jnp.shape(values) != logp.shape:
            raise ValueError(
                f"{setting}: {what} is an array {list(jnp.shape(values))}: there has to be a value "
                f"for each token, {list(logp.shape)}"
            )
    if taken := ", ".join(sorted(OWN & indicators.keys())):
        raise ValueError(f"{setting}: rename the indicators {taken}, which an update has already")


def sampler_weight(tokens: Batch, *, cap: float):
    """Computes min(pi_old / pi_sampler, cap), and whether it is capped.

    Truncated importance sampling (fengyao.notion.site/off-policy-rl): pi_old is the learner's
    policy at the beginning of the step, which differs from the sampler's by rounding, and for
    partial rollouts by the steps between.
    """
    ratio = algorithm.importance_ratio(tokens.old_logp_BT, tokens.behavior_logp_BT)
    return jnp.minimum(ratio, cap), ratio > cap


# Advantages: reward_PG, sampled_tokens_PG of the groups that a step trains on -> [P, G]; NumPy.


def whitened(reward_PG, count_PG):
    """Gives centred rewards weighted mean 0 and unbiased deviation 1; count_PG: the weights."""
    value_PG, total = algorithm.centred_reward(reward_PG), count_PG.sum()
    centred_PG = value_PG - (value_PG * count_PG).sum() / max(total, 1)
    variance = (centred_PG**2 * count_PG).sum() / max(total - 1, 1)
    return (centred_PG / (np.sqrt(variance) + algorithm.ADVANTAGE_EPSILON)).astype(value_PG.dtype)


ADVANTAGES = {
    "group_std": lambda reward_PG, _: algorithm.group_advantage(reward_PG),  # Eq. 9
    # Over all responses (ScaleRL, 2510.13786, section 4; 2501.03262, Eq. 7).
    "batch_std": lambda reward_PG, tokens_PG: whitened(reward_PG, np.ones_like(tokens_PG)),
    "token_whiten": whitened,  # over all tokens (REINFORCE++ baseline, 2501.03262, Eq. 6 and 7)
    # Dr. GRPO, 2503.20783, section 3.2.
    "none": lambda reward_PG, _: algorithm.centred_reward(reward_PG),
}
CUSTOM = {"policy_loss": POLICY_LOSSES, "advantage_scale": ADVANTAGES}


def advantages(reward_PG: np.ndarray, kept: np.ndarray, tokens_PG, *, scale: str) -> np.ndarray:
    """Computes the kept groups' advantages by algo.advantage_scale; other groups' are 0."""
    advantage_PG, of_groups = np.zeros_like(reward_PG), function_of("advantage_scale", scale)
    kept_PG = np.asarray(of_groups(reward_PG[kept], tokens_PG[kept]))
    if kept_PG.shape != reward_PG[kept].shape:
        raise ValueError(
            f"algo.advantage_scale = {scale!r} gives an array {list(kept_PG.shape)}: there has to "
            f"be an advantage for each reward, {list(reward_PG[kept].shape)}"
        )
    advantage_PG[kept] = kept_PG
    return advantage_PG


def token_loss(logp, entropy, tokens: Batch, settings):
    """Computes each token's share of the mini-batch's loss, by the config's choices.

    Returns (loss, indicators): name -> a value for each token, such as whether a clip holds it, of
    which the metrics have the mean over the response tokens. With settings.tis_cap tokens have
    their `sampler_weight`; settings.kl_coef adds GRPO's KL term, and settings.entropy_coef takes
    entropy off. The weights were normalised over the whole mini-batch, so the sums of all
    micro-batches and devices add up to the true loss (Eq. 12).
    """
    # Padding has arbitrary log-probabilities: nothing of it may reach the loss.
    logp = jnp.where(tokens.is_response_BT, logp, 0.0)
    logp_pair = RATIOS[settings.ratio](logp, tokens, settings)
    loss, indicators = function_of("policy_loss", settings.policy_loss)(
        logp_pair, logp, tokens, settings
    )
    if settings.tis_cap > 0:
        weight, indicators["clip_fraction/tis"] = sampler_weight(tokens, cap=settings.tis_cap)
        loss *= weight
    kl = jnp.zeros_like(logp)
    if tokens.reference_logp_BT is not None:
        kl = algorithm.kl_k3(logp, jnp.where(tokens.is_response_BT, tokens.reference_logp_BT, 0.0))
        loss += settings.kl_coef * kl
    if settings.entropy_coef > 0:
        loss -= settings.entropy_coef * entropy
    return loss * tokens.weight_BT, indicators | {"kl": kl}


def takes_old_logp(settings) -> bool:
    """Returns whether the loss compares with the learner's own old log-probabilities."""
    return settings.old_logprobs == "learner" or settings.ratio == "sequence"
