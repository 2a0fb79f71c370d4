"""GSPO (arXiv 2507.18071) as a policy loss from outside: algo.policy_loss = "gspo:gspo".

One importance ratio a response.
"""

import jax.numpy as jnp

from dapo_jax.losses import response_mean


def gspo(logp_pair, logp_BT, tokens, settings):
    """Clips the geometric mean of a response's ratios (Eq. 5 to 7; needs sequence_mean).

    algo.ratio = "sequence" gives it whole rows.
    """
    ratio_BT = jnp.exp(response_mean(logp_BT - tokens.behavior_logp_BT, tokens))
    low, high = 1 - settings.eps_low, 1 + settings.eps_high
    clipped_BT = jnp.clip(ratio_BT, low, high)
    loss_BT = -jnp.minimum(ratio_BT * tokens.advantage_BT, clipped_BT * tokens.advantage_BT)
    return loss_BT, {
        "clip_fraction/high": (tokens.advantage_BT > 0) & (ratio_BT > high),
        "clip_fraction/low": (tokens.advantage_BT < 0) & (ratio_BT < low),
    }
