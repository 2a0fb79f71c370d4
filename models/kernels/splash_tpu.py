"""Attention inside packed rows on TPU: the splash kernel that ships with JAX, with segments.

It is told at run time which blocks of pairs to visit: those that hold two tokens of one segment.
It knows no branches: every response needs its prompt to itself.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from models.kernels.xla import ATTENTION, padded

# Smaller blocks hold fewer pairs of different segments, but the kernel has a step for every block,
# visited or not. Blocks of 2,048 do not fit the 16 MiB of VMEM that a kernel may have on v5e.
BLOCK_TOKENS = 1024


def visited_blocks(segment_BT, block: int, window: int | None = None):
    """Says which blocks [B, queries, keys] of rows the kernel visits, forward and backward: bool.

    Those that hold a pair of one segment whose key is not behind its query, nor before the query's
    window, and all on the diagonal, so that padding (segment 0) has keys too. T must be a multiple
    of block, and the tokens of a segment must stand side by side.
    """
    begins_BT = (jnp.diff(segment_BT, prepend=0) != 0) | (segment_BT == 0)
    run_BT = jnp.cumsum(begins_BT, axis=1)  # of one segment; each token of padding is its own
    run_BIC = run_BT.reshape(len(run_BT), -1, block)
    visited_BIJ = jnp.tril(run_BIC[:, :, :1] <= run_BIC[:, None, :, -1])
    if window is None:
        return visited_BIJ
    begin_I = block * jnp.arange(run_BIC.shape[1])
    return visited_BIJ & (begin_I[:, None] - (begin_I + block - 1) < window)


def fetched_blocks(visited_IJ):
    """Says which keys (forward), queries (backward) lie in memory at each step: [I, J] x 2.

    At a step that visits nothing it is those that are visited next, which arrive meanwhile, or
    still the last ones.
    """
    i_I1, j_J = jnp.arange(len(visited_IJ))[:, None], jnp.arange(len(visited_IJ))
    first_I1 = i_I1 + 1 - jnp.sum(visited_IJ, axis=1, keepdims=True)
    last_J = j_J - 1 + jnp.sum(visited_IJ, axis=0)
    keys_IJ = jnp.where(j_J > i_I1, jnp.roll(first_I1, -1), jnp.maximum(j_J, first_I1))
    return keys_IJ, jnp.clip(i_I1, j_J, last_J)


def cores(*, interpret: bool) -> int:
    """Counts the cores that a device has: two on v4 and v5p. Interpreted, it stands for v5p."""
    return 2 if interpret else pltpu.get_tpu_info().num_cores


def splash_attention(
    q_BTNH,
    k_BTKH,
    v_BTKH,
    segment_BT,
    branch_BT,
    position_BT=None,
    window: int | None = None,
    *,
    interpret: bool = False,
):
    """Attends inside whole rows: out_BTNH in the queries' dtype.

    Token t looks at the tokens s <= t of its segment, which stand side by side; with a window at
    itself and the window - 1 before it. `branch_BT` and `position_BT` are not read: no segment may
    have more than one branch beside its prompt. What padding (segment 0) gives means nothing, but
    is finite.
    """
    tokens, N, H = q_BTNH.shape[1:]
    block = min(BLOCK_TOKENS, tokens + -tokens % 128)
    pad = functools.partial(padded, multiple=block)
    q_BNTH, k_BKTH, v_BKTH = (pad(a).swapaxes(1, 2) for a in (q_BTNH, k_BTKH, v_BTKH))
    segment_BT = pad(segment_BT)
    T = segment_BT.shape[1]
    sides = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv")
    mask = splash.CausalMask((T, T))
    if window is not None:
        mask = splash.LocalMask((T, T), (window - 1, 0), 0)
    sizes = splash.BlockSizes(**dict.fromkeys(sides, block), use_fused_bwd_kernel=True)

    def attend(row):
        q_NTH, k_KTH, v_KTH, segment_T, visited_IJ = row
        kernel = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([mask]),
            block_sizes=sizes,
            residual_checkpoint_name=ATTENTION,
            interpret=interpret,
        )
        keys_IJ, queries_IJ = fetched_blocks(visited_IJ)
        for name, fetched_IJ in (("fwd", keys_IJ), ("dkv", queries_IJ)):
            info = getattr(kernel, f"{name}_mask_info")._replace(
                data_next=fetched_IJ[None], block_mask=visited_IJ[None].astype(jnp.int32)
            )
            setattr(kernel, f"{name}_mask_info", info)
        heads = functools.partial(kernel, segment_ids=splash.SegmentIds(segment_T, segment_T))
        if cores(interpret=interpret) == 1:
            return heads(q_NTH, k_KTH, v_KTH)
        # The backward goes over its heads on one core. The steps that vmap adds are split over the
        # two: every head is one, and writes its own gradients of keys and values, summed here.
        q_KG1TH = q_NTH.reshape(len(k_KTH), -1, 1, T, H)
        each = jax.vmap(jax.vmap(heads, in_axes=(0, None, None)))
        return each(q_KG1TH, k_KTH[:, None], v_KTH[:, None]).reshape(N, T, H)

    scaled_BNTH = (q_BNTH * H**-0.5).astype(q_BNTH.dtype)
    visited_BIJ = visited_blocks(segment_BT, block, window)
    out_BNTH = jax.lax.map(attend, (scaled_BNTH, k_BKTH, v_BKTH, segment_BT, visited_BIJ))
    return out_BNTH.swapaxes(1, 2)[:, :tokens]
