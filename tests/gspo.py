"""GSPO (arXiv 2507.18071) as a loss added from outside: one importance ratio a response."""

import jax.numpy as jnp

from dapo_jax.learner import LOSSES, Loss, response_mean


def gspo(logp_BT, token, learning):
    """Clips the geometric mean of a response's ratios (Eq. 5 to 7; needs sequence_mean)."""
    ratio_BT = jnp.exp(response_mean(logp_BT - token.behavior_logp, token))
    low, high = 1 - learning.eps_low, 1 + learning.eps_high
    clipped_BT = jnp.clip(ratio_BT, low, high)
    loss_BT = -jnp.minimum(ratio_BT * token.advantage, clipped_BT * token.advantage)
    return loss_BT, {
        "clip_fraction/high": (token.advantage > 0) & (ratio_BT > high),
        "clip_fraction/low": (token.advantage < 0) & (ratio_BT < low),
    }


LOSSES["gspo"] = Loss(gspo, by_token=False)
