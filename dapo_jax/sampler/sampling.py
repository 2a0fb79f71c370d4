"""Drawing one token a row: truncation, an inverse-CDF draw, and keys that name the request."""

import jax
import jax.numpy as jnp

from models.attention import MASKED

RANGE_NATS = 32.0  # tokens this far below the best one have no mass that any top-p looks at
BISECTIONS = 26  # finds the threshold to 5e-7 nats or better
CDF_BLOCK = 128


def request_keys(run_key, cursor_P, *, group_size):
    """key_R of every (prompt cursor, sample index) request, prompt-major.

    A sample's randomness is fold_in(fold_in(fold_in(run_key, cursor), sample), position): it
    depends on nothing else, neither the batch, nor the device, nor a restart.
    """

    def group(cursor):
        prompt_key = jax.random.fold_in(run_key, cursor)
        return jax.vmap(lambda i: jax.random.fold_in(prompt_key, i))(jnp.arange(group_size))

    return jax.vmap(group)(cursor_P).reshape(-1)


def uniform_at(key_R, position):
    """One uniform number in [0, 1) a request at a response position."""
    return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, position)))(key_R)


def truncate(logits_RV, *, top_p: float, top_k: int):
    """Mask what top-k (0: off), then top-p (1.0: off), leave out (Holtzman et al. 2020).

    Top-p keeps the smallest set of most probable tokens whose mass reaches `top_p`; tokens that tie
    with the last one kept stay too. The threshold is bisected, since sorting a 152k vocabulary
    costs more than the model's head.
    """
    if top_k > 0:
        kth_R1 = jax.lax.top_k(logits_RV, min(top_k, logits_RV.shape[1]))[0][:, -1:]
        logits_RV = jnp.where(logits_RV >= kth_R1, logits_RV, MASKED)
    if top_p < 1.0:
        prob_RV = jax.nn.softmax(logits_RV, axis=-1)
        high_R1 = jnp.max(logits_RV, axis=-1, keepdims=True)

        def halve(_, bounds):
            low_R1, high_R1 = bounds  # the mass above `low` reaches top_p, above `high` it does not
            mid_R1 = (low_R1 + high_R1) / 2
            mass_R1 = jnp.sum(jnp.where(logits_RV >= mid_R1, prob_RV, 0.0), axis=-1, keepdims=True)
            enough_R1 = mass_R1 >= top_p
            return jnp.where(enough_R1, mid_R1, low_R1), jnp.where(enough_R1, high_R1, mid_R1)

        # From the least logit where the row is flat: the steps are as fine as the row needs.
        least_R1 = jnp.min(
            jnp.where(logits_RV > MASKED, logits_RV, jnp.inf), axis=-1, keepdims=True
        )
        low_R1 = jnp.maximum(least_R1, high_R1 - RANGE_NATS)
        low_R1, _ = jax.lax.fori_loop(0, BISECTIONS, halve, (low_R1, high_R1))
        logits_RV = jnp.where(logits_RV >= low_R1, logits_RV, MASKED)
    return logits_RV


def draw(logits_RV, uniform_R):
    """(token_R, logp_R): one draw from softmax(logits) by the inverse of its distribution function.

    One uniform number a row. The running sum is taken over blocks first, then inside the block
    that is hit: a 152k-long float32 sum would lose the tail. `logp_R` is the log-probability
    under exactly this (temperature-scaled, truncated) distribution.
    """
    R, V = logits_RV.shape
    logz_R1 = jax.nn.logsumexp(logits_RV, axis=-1, keepdims=True)
    prob_RV = jnp.exp(logits_RV - logz_R1)
    prob_RNC = jnp.pad(prob_RV, ((0, 0), (0, -V % CDF_BLOCK))).reshape(R, -1, CDF_BLOCK)
    block_cdf_RN = jnp.cumsum(jnp.sum(prob_RNC, axis=-1), axis=-1)
    target_R = uniform_R * block_cdf_RN[:, -1]
    block_R = jnp.sum(block_cdf_RN <= target_R[:, None], axis=-1)
    block_R = jnp.minimum(block_R, block_cdf_RN.shape[1] - 1)
    before_R = jnp.where(
        block_R > 0, jnp.take_along_axis(block_cdf_RN, block_R[:, None] - 1, axis=1)[:, 0], 0.0
    )
    inner_RC = jnp.take_along_axis(prob_RNC, block_R[:, None, None], axis=1)[:, 0]
    inner_cdf_RC = before_R[:, None] + jnp.cumsum(inner_RC, axis=-1)
    token_R = block_R * CDF_BLOCK + jnp.sum(inner_cdf_RC <= target_R[:, None], axis=-1)
    # Rounding between the two sums may point past the block's last likely token.
    chosen_R = jnp.take_along_axis(prob_RV, jnp.minimum(token_R, V - 1)[:, None], axis=1)[:, 0]
    likely_R = (token_R < V) & (chosen_R > 0)
    token_R = jnp.where(likely_R, token_R, jnp.argmax(logits_RV, axis=-1)).astype(jnp.int32)
    logp_R = jnp.take_along_axis(logits_RV - logz_R1, token_R[:, None], axis=1)[:, 0]
    return token_R, logp_R
