"""Attention inside packed rows on GPU: the Triton kernel that ships with JAX, with segments.

It is flash attention (Dao 2023, arXiv 2307.08691), forward and backward. It knows no branches:
every response needs its prompt to itself. It visits all blocks up to the diagonal, those without a
pair of one segment too.
"""

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

from models.kernels.xla import ATTENTION

# The largest tiles with which no registers are spilled: heads of 128, an H100 and an RTX 4090.
QUERIES, KEYS, BACKWARD = 128, 64, 32
SIZES = BlockSizes(
    block_q=QUERIES,
    block_k=KEYS,
    block_q_dkv=BACKWARD,
    block_kv_dkv=BACKWARD,
    block_q_dq=BACKWARD,
    block_kv_dq=BACKWARD,
)


def flash_attention(q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT, *, interpret: bool = False):
    """Attends inside whole rows: out_BTNH in the queries' dtype.

    Token t looks at the tokens s <= t of its segment. `branch_BT` is not read: no segment may have
    more than one branch beside its prompt. What padding (segment 0) gives means nothing, but is
    finite. The kernel has as many key heads as query heads, so keys and values are repeated.
    """
    tokens, N, H = q_BTNH.shape[1:]
    K = k_BTKH.shape[2]

    def pad(array):
        return jnp.pad(array, ((0, 0), (0, -tokens % QUERIES)) + ((0, 0),) * (array.ndim - 2))

    q_BTNH, k_BTKH, v_BTKH, segment_BT = map(pad, (q_BTNH, k_BTKH, v_BTKH, segment_BT))
    k_BTNH, v_BTNH = (jnp.repeat(array, N // K, axis=2) for array in (k_BTKH, v_BTKH))
    out_BTNH = mha(
        q_BTNH,
        k_BTNH,
        v_BTNH,
        segment_BT,
        sm_scale=H**-0.5,
        causal=True,
        block_sizes=SIZES,
        interpret=interpret,
    )
    return checkpoint_name(out_BTNH, ATTENTION)[:, :tokens]
