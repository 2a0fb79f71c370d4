"""Attention inside packed rows on TPU: the splash kernel that ships with JAX, with segments.

It visits all blocks on and below the diagonal, whatever the segments are, and knows no branches:
every response needs its prompt to itself.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha_single_device,
)

from models.kernels.xla import ATTENTION

BLOCK_TOKENS = 512


def splash_attention(q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT, *, interpret: bool = False):
    """Attends inside whole rows: out_BTNH in the queries' dtype.

    Token t looks at the tokens s <= t of its segment. `branch_BT` is not read: no segment may have
    more than one branch beside its prompt. What padding (segment 0) gives means nothing.
    """
    tokens, N, H = q_BTNH.shape[1:]
    block = min(BLOCK_TOKENS, tokens + -tokens % 128)

    def pad(array):
        return jnp.pad(array, ((0, 0), (0, -tokens % block)) + ((0, 0),) * (array.ndim - 2))

    q_BNTH, k_BKTH, v_BKTH = (pad(a).swapaxes(1, 2) for a in (q_BTNH, k_BTKH, v_BTKH))
    segment_BT = pad(segment_BT)
    T = segment_BT.shape[1]
    sides = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv")
    sizes = dict.fromkeys((*sides, "block_kv_dkv_compute", "block_q_dq", "block_kv_dq"), block)
    kernel = make_splash_mha_single_device(
        MultiHeadMask([CausalMask((T, T))] * N),
        block_sizes=BlockSizes(**sizes),
        residual_checkpoint_name=ATTENTION,
        interpret=interpret,
    )
    scaled_BNTH = (q_BNTH * H**-0.5).astype(q_BNTH.dtype)
    out_BNTH = jax.vmap(kernel)(scaled_BNTH, k_BKTH, v_BKTH, SegmentIds(segment_BT, segment_BT))
    return out_BNTH.swapaxes(1, 2)[:, :tokens]
