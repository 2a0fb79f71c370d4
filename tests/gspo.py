"""GSPO (arXiv 2507.18071) as a policy loss from outside: algo.policy_loss = "gspo:gspo".

One importance ratio a response.
"""

import jax.numpy as jnp

from dapo_jax.losses import response_mean


def gspo(compared, logp_BT, token, learning):
    """Clips the geometric mean of a response's ratios (Eq. 5 to 7; needs sequence_mean).

    algo.ratio = "sequence" gives it whole rows.
    """
    ratio_BT = jnp.exp(response_mean(logp_BT - token.behavior_logp_BT, token))
    low, high = 1 - learning.eps_low, 1 + learning.eps_high
    clipped_BT = jnp.clip(ratio_BT, low, high)
    loss_BT = -jnp.minimum(ratio_BT * token.advantage_BT, clipped_BT * token.advantage_BT)
    return loss_BT, {
        "clip_fraction/high": (token.advantage_BT > 0) & (ratio_BT > high),
        "clip_fraction/low": (token.advantage_BT < 0) & (ratio_BT < low),
    }
