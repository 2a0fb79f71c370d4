"""Grouped-query attention behind one signature: plain XLA, the reference on every platform.

Both functions round at the same points (scores and softmax in float32, normalised, then cast to
the values' dtype), so that the sampler and the learner agree on a token's probability.
"""

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: a row with nothing to attend to gives a uniform softmax, never NaN


def attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    """Scaled dot-product attention of whole sequences (Vaswani et al. 2017, Eq. 1).

    Query head n reads key/value head n // (N / K) (Ainslie et al. 2023, arXiv 2305.13245).
    `mask_BTS` is True where query t may look at key s. Returns out_BTNH in the values' dtype.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    score_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32
    )
    score_BKGTS = jnp.where(mask_BTS[:, None, None], score_BKGTS * H**-0.5, MASKED)
    prob_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", prob_BKGTS, v_BSKH).reshape(B, T, N, H)


def cache_attention(q_BNH, k_BKHS, v_BKSH, mask_BS):
    """Attention of one new token a row over a cache whose keys are stored transposed.

    The layout keeps the contracted axis next to the slots, which measured fastest on CPU.
    `mask_BS` is True at live cache slots. Returns out_BNH in the values' dtype.
    """
    B, N, H = q_BNH.shape
    K = k_BKHS.shape[1]
    q_BKGH = q_BNH.reshape(B, K, N // K, H)
    score_BKGS = jnp.einsum("BKGH,BKHS->BKGS", q_BKGH, k_BKHS, preferred_element_type=jnp.float32)
    score_BKGS = jnp.where(mask_BS[:, None, None], score_BKGS * H**-0.5, MASKED)
    prob_BKGS = jax.nn.softmax(score_BKGS, axis=-1).astype(v_BKSH.dtype)
    return jnp.einsum("BKGS,BKSH->BKGH", prob_BKGS, v_BKSH).reshape(B, N, H)
