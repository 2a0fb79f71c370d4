"""Attention inside packed rows on GPU: FlashAttention-2 in Triton, with segments and branches.

Axis letters beside the model's: Q query and S key tokens of a tile; G = N / K query heads of a
key/value head; I and J tiles of queries and of keys.

A program has a tile of queries (forward, gradient of the queries) or of keys (gradients of keys and
values) and visits those of the other kind from the first to the last that its segments reach. The
backward pass computes the weights again from the softmax's normaliser (Dao 2023, arXiv 2307.08691,
Algorithm 2).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from models.kernels import triton
from models.kernels.xla import ATTENTION, MASKED, like

# Tiles (Q, S) forward and backward, by the bytes of a value: the largest of a few that were tried
# with which no registers are spilled, for heads of 128 on an H100 and on an RTX 4090.
TILES = {2: ((128, 64), (64, 32)), 4: ((32, 32), (32, 16))}


def flash_attention(q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT, *, interpret: bool = False):
    """Does what `packed.packed_attention` does; the head size is a power of two, 16 or more."""
    tokens = q_BTNH.shape[1]
    forward, backward = TILES[q_BTNH.dtype.itemsize]
    missing = -tokens % max(*forward, *backward)

    def pad(array):
        return jnp.pad(array, ((0, 0), (0, missing)) + ((0, 0),) * (array.ndim - 2))

    arrays = map(pad, (q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT))
    return _attention(interpret, *arrays)[:, :tokens]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(interpret, q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT):
    return _forward(interpret, q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT)[0]


def _forward(interpret, q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT):
    B, T, N, H = q_BTNH.shape
    tile, _ = TILES[q_BTNH.dtype.itemsize]
    first_BI, _ = _reach(segment_BT, tile)
    out_BTNH, norm_BNT = triton.call(
        functools.partial(_forward_kernel, tile=tile, group=N // k_BTKH.shape[2]),
        *(first_BI, segment_BT, branch_BT, q_BTNH, k_BTKH, v_BTKH),
        grid=(T // tile[0], B, N),
        out_shape=[like(q_BTNH), like(q_BTNH, (B, N, T), jnp.float32)],
        name="flash_attention",
        interpret=interpret,
        warps=4 if H <= 64 else 8,
        stages=2,
    )
    out_BTNH = checkpoint_name(out_BTNH, ATTENTION)
    norm_BNT = checkpoint_name(norm_BNT, ATTENTION)
    return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT, out_BTNH, norm_BNT)


def _backward(interpret, residuals, d_out_BTNH):
    q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT, out_BTNH, norm_BNT = residuals
    B, T, N, _ = q_BTNH.shape
    K = k_BTKH.shape[2]
    _, tile = TILES[q_BTNH.dtype.itemsize]
    first_BI, last_BJ = _reach(segment_BT, tile)
    dot_BTN = jnp.sum(d_out_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32), axis=3)
    arrays = (segment_BT, branch_BT, q_BTNH, k_BTKH, v_BTKH, d_out_BTNH, norm_BNT)
    arrays = (*arrays, dot_BTN.swapaxes(1, 2))
    call = functools.partial(triton.call, interpret=interpret, stages=2)
    (d_q_BTNH,) = call(
        functools.partial(_queries_kernel, tile=tile, group=N // K),
        *(first_BI, *arrays),
        grid=(T // tile[0], B, N),
        out_shape=[like(q_BTNH)],
        name="flash_attention_d_queries",
    )
    d_k_BTKH, d_v_BTKH = call(
        functools.partial(_keys_kernel, tile=tile, group=N // K),
        *(last_BJ, *arrays),
        grid=(T // tile[1], B, K),
        out_shape=[like(k_BTKH), like(v_BTKH)],
        name="flash_attention_d_keys",
    )
    return d_q_BTNH, d_k_BTKH, d_v_BTKH, None, None


_attention.defvjp(_forward, _backward)


def _reach(segment_BT, tile: tuple[int, int]):
    """Finds (the first tile of keys of each of queries, the last + 1 of queries of each of keys).

    Tokens of a segment stand side by side; each token of padding is by itself.
    """
    Q, S = tile
    index_T = jnp.arange(segment_BT.shape[1])
    begins_BT = (jnp.diff(segment_BT, axis=1, prepend=-1) != 0) | (segment_BT == 0)
    start_BT = lax.cummax(jnp.where(begins_BT, index_T, 0), axis=1)
    ends_BT = jnp.roll(begins_BT, -1, axis=1).at[:, -1].set(True)
    end_BT = lax.cummin(jnp.where(ends_BT, index_T, len(index_T)), axis=1, reverse=True)
    return start_BT[:, ::Q] // S, end_BT[:, S - 1 :: S] // Q + 1


def _seen(segment_ref, branch_ref, b, query, key, tile: tuple[int, int]):
    """Says what the tokens of a tile of queries see of one of keys: seen_QS."""
    Q, S = tile
    queries, keys = pl.ds(query * Q, Q), pl.ds(key * S, S)
    segment_Q, segment_S = segment_ref[b, queries], segment_ref[b, keys]
    branch_Q, branch_S = branch_ref[b, queries][:, None], branch_ref[b, keys][None]
    index_Q, index_S = query * Q + jnp.arange(Q), key * S + jnp.arange(S)
    own_QS = (segment_Q[:, None] == segment_S[None]) & (segment_Q > 0)[:, None]
    return own_QS & ((branch_S == 0) | (branch_S == branch_Q)) & (index_Q[:, None] >= index_S[None])


def _forward_kernel(
    first_ref,
    segment_ref,
    branch_ref,
    q_ref,
    k_ref,
    v_ref,
    out_ref,
    norm_ref,
    *,
    tile: tuple[int, int],
    group: int,
):
    i, b, n = (pl.program_id(axis) for axis in range(3))
    (Q, S), H, h = tile, q_ref.shape[3], lax.div(n, group)
    queries = pl.ds(i * Q, Q)
    q_QH = q_ref[b, queries, n, :]

    def visit(j, state):
        max_Q1, sum_Q1, out_QH = state
        keys = pl.ds(j * S, S)
        x_QS = triton.dot(q_QH, k_ref[b, keys, h, :].T) * H**-0.5
        x_QS = jnp.where(_seen(segment_ref, branch_ref, b, i, j, tile), x_QS, MASKED)
        new_max_Q1 = jnp.maximum(max_Q1, x_QS.max(axis=1, keepdims=True))
        # Where nothing was seen so far, what is summed here has no weight later.
        p_QS, decay_Q1 = jnp.exp(x_QS - new_max_Q1), jnp.exp(max_Q1 - new_max_Q1)
        v_SH = v_ref[b, keys, h, :]
        out_QH = out_QH * decay_Q1 + triton.dot(p_QS.astype(v_SH.dtype), v_SH)
        return new_max_Q1, sum_Q1 * decay_Q1 + p_QS.sum(axis=1, keepdims=True), out_QH

    none = jnp.full((Q, 1), MASKED), jnp.zeros((Q, 1)), jnp.zeros((Q, H))
    max_Q1, sum_Q1, out_QH = lax.fori_loop(first_ref[b, i], pl.cdiv((i + 1) * Q, S), visit, none)
    live_Q1 = max_Q1 > MASKED
    sum_Q1 = jnp.where(live_Q1, sum_Q1, 1.0)
    out_ref[b, queries, n, :] = jnp.where(live_Q1, out_QH / sum_Q1, 0.0).astype(out_ref.dtype)
    norm_ref[b, n, queries] = (max_Q1 + jnp.log(sum_Q1))[:, 0]


def _of_queries(refs, b, n, queries):
    """Loads what the backward pass has of queries: (q_QH, d_out_QH, norm_Q1, dot_Q1)."""
    q_ref, d_out_ref, norm_ref, dot_ref = refs
    q_QH, d_out_QH = q_ref[b, queries, n, :], d_out_ref[b, queries, n, :]
    return q_QH, d_out_QH, norm_ref[b, n, queries][:, None], dot_ref[b, n, queries][:, None]


def _weights_and_d_scores(of_queries, k_SH, v_SH, seen_QS):
    """Computes a tile's softmax weights p_QS again, and the gradient d_x_QS of q k^T."""
    q_QH, d_out_QH, norm_Q1, dot_Q1 = of_queries
    scale = q_QH.shape[1] ** -0.5
    p_QS = jnp.exp(triton.dot(q_QH, k_SH.T) * scale - norm_Q1)
    p_QS = jnp.where(seen_QS, p_QS, 0.0)
    return p_QS, p_QS * (triton.dot(d_out_QH, v_SH.T) - dot_Q1) * scale


def _queries_kernel(
    first_ref,
    segment_ref,
    branch_ref,
    q_ref,
    k_ref,
    v_ref,
    d_out_ref,
    norm_ref,
    dot_ref,
    d_q_ref,
    *,
    tile: tuple[int, int],
    group: int,
):
    i, b, n = (pl.program_id(axis) for axis in range(3))
    (Q, S), H, h = tile, q_ref.shape[3], lax.div(n, group)
    queries = pl.ds(i * Q, Q)
    of_queries = _of_queries((q_ref, d_out_ref, norm_ref, dot_ref), b, n, queries)

    def visit(j, d_q_QH):
        keys = pl.ds(j * S, S)
        k_SH, v_SH = k_ref[b, keys, h, :], v_ref[b, keys, h, :]
        seen_QS = _seen(segment_ref, branch_ref, b, i, j, tile)
        _, d_x_QS = _weights_and_d_scores(of_queries, k_SH, v_SH, seen_QS)
        return d_q_QH + triton.dot(d_x_QS.astype(k_SH.dtype), k_SH)

    end = pl.cdiv((i + 1) * Q, S)
    d_q_QH = lax.fori_loop(first_ref[b, i], end, visit, jnp.zeros((Q, H)))
    d_q_ref[b, queries, n, :] = d_q_QH.astype(d_q_ref.dtype)


def _keys_kernel(
    last_ref,
    segment_ref,
    branch_ref,
    q_ref,
    k_ref,
    v_ref,
    d_out_ref,
    norm_ref,
    dot_ref,
    d_k_ref,
    d_v_ref,
    *,
    tile: tuple[int, int],
    group: int,
):
    """Sums over the query heads that share the key head too, in float32."""
    j, b, h = (pl.program_id(axis) for axis in range(3))
    (Q, S), H = tile, q_ref.shape[3]
    keys = pl.ds(j * S, S)
    k_SH, v_SH = k_ref[b, keys, h, :], v_ref[b, keys, h, :]

    def visit(turn, state):
        d_k_SH, d_v_SH = state
        i, n = lax.div(turn, group), h * group + lax.rem(turn, group)
        refs = q_ref, d_out_ref, norm_ref, dot_ref
        q_QH, d_out_QH, *_ = of_queries = _of_queries(refs, b, n, pl.ds(i * Q, Q))
        seen_QS = _seen(segment_ref, branch_ref, b, i, j, tile)
        p_QS, d_x_QS = _weights_and_d_scores(of_queries, k_SH, v_SH, seen_QS)
        d_k_SH += triton.dot(d_x_QS.T.astype(q_QH.dtype), q_QH)
        d_v_SH += triton.dot(p_QS.T.astype(d_out_QH.dtype), d_out_QH)
        return d_k_SH, d_v_SH

    zero_SH = jnp.zeros((S, H))
    begin, end = lax.div(j * S, Q) * group, last_ref[b, j] * group
    d_k_SH, d_v_SH = lax.fori_loop(begin, end, visit, (zero_SH, zero_SH))
    d_k_ref[b, keys, h, :] = d_k_SH.astype(d_k_ref.dtype)
    d_v_ref[b, keys, h, :] = d_v_SH.astype(d_v_ref.dtype)
