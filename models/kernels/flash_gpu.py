"""Attention inside packed rows on GPU: FlashAttention-2 in Triton, with segments and branches.

Axis letters beside the model's: Q query and S key tokens of a tile; G = N / K query heads of a
key/value head; I and J tiles of queries and of keys; X bounds of ranges of tiles.

A program has a tile of queries (forward, gradient of the queries) or of keys (gradients of keys and
values). It visits first those tiles of the other kind that are seen whole, without a mask, and then
those on the borders. The backward pass computes the weights again from the softmax's normaliser
(Dao 2023, arXiv 2307.08691, Algorithm 2). Scores and normaliser are to base 2.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from models.kernels import triton
from models.kernels.xla import ATTENTION, MASKED, like, padded

# For the forward pass, the gradient of queries and those of keys, by the bytes of a value and the
# size of a head that is not exceeded: tiles with the fewest cycles by count of an H100's
# instructions, among those that spill no registers there, on an A100 and on an RTX 4090. For
# bfloat16 and 64 the first two are the fastest measured on an H100 at 22,528 tokens. Those of 256
# are the first of a few that spill none, not counted.
TILES = {
    (2, 64): ((128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),
    (2, 128): ((128, 64, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2)),
    (2, 256): ((64, 32, 8, 1), (32, 32, 4, 1), (32, 32, 8, 1)),
    (4, 64): ((32, 32, 4, 2), (32, 16, 4, 2), (32, 16, 4, 2)),
    (4, 128): ((32, 16, 4, 2), (32, 16, 4, 2), (32, 16, 4, 2)),
    (4, 256): ((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
}
LOG2_E = math.log2(math.e)  # makes powers of e powers of 2
FEW = 512  # programs that may leave a GPU idle until the longest of them ends


def flash_attention(
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
    """Does what `packed.packed_attention` does; the head size is a power of two, 16 or more."""
    longest = max(max(tile[:2]) for tile in _tiles(q_BTNH))
    pad = functools.partial(padded, multiple=longest)
    until_BT = _until(pad(segment_BT), pad(branch_BT))
    rows = (until_BT, None if window is None else pad(position_BT))
    out_BTNH = _attention(interpret, window, *map(pad, (q_BTNH, k_BTKH, v_BTKH)), rows)
    return out_BTNH[:, : q_BTNH.shape[1]]


def _tiles(q_BTNH) -> tuple:
    size = next((size for size in (64, 128) if q_BTNH.shape[3] <= size), 256)
    return TILES[q_BTNH.dtype.itemsize, size]


def _call(kernel, tile, interpret: bool, *arrays, **more):
    Q, S, warps, stages = tile
    exp2 = functools.partial(triton.exp2, interpret=interpret)
    kernel = functools.partial(kernel, tile=(Q, S), exp2=exp2)
    return triton.call(kernel, *arrays, warps=warps, stages=stages, interpret=interpret, **more)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(interpret, window, q_BTNH, k_BTKH, v_BTKH, rows):
    return _forward(interpret, window, q_BTNH, k_BTKH, v_BTKH, rows)[0]


def _forward(interpret, window, q_BTNH, k_BTKH, v_BTKH, rows):
    B, T, N, _ = q_BTNH.shape
    tile, _, _ = _tiles(q_BTNH)
    out_BTNH, norm_BNT = _call(
        functools.partial(_forward_kernel, window=window),
        *(tile, interpret, _ranges(*rows, tile, window=window), rows, q_BTNH, k_BTKH, v_BTKH),
        grid=(N, B, T // tile[0]),
        out_shape=[like(q_BTNH), like(q_BTNH, (B, N, T), jnp.float32)],
        name="flash_attention",
    )
    out_BTNH = checkpoint_name(out_BTNH, ATTENTION)
    norm_BNT = checkpoint_name(norm_BNT, ATTENTION)
    return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, rows, out_BTNH, norm_BNT)


def _backward(interpret, window, residuals, d_out_BTNH):
    q_BTNH, k_BTKH, v_BTKH, rows, out_BTNH, norm_BNT = residuals
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    _, tile, tile_of_keys = _tiles(q_BTNH)
    dot_BTN = jnp.sum(d_out_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32), axis=3)
    ranges = functools.partial(_ranges, *rows, window=window)
    arrays = (rows, q_BTNH, k_BTKH, v_BTKH, d_out_BTNH, norm_BNT)
    arrays = (*arrays, dot_BTN.swapaxes(1, 2))
    (d_q_BTNH,) = _call(
        functools.partial(_queries_kernel, window=window),
        *(tile, interpret, ranges(tile), *arrays),
        grid=(N, B, T // tile[0]),
        out_shape=[like(q_BTNH)],
        name="flash_attention_d_queries",
    )
    # A program sums over the query heads of its keys; were there few, it has one, and the sum is
    # here. L are key heads of which one has `parts`.
    parts = 1 if B * K * T // tile_of_keys[1] >= FEW else N // K
    d_BTLH = like(k_BTKH, (B, T, K * parts, H), k_BTKH.dtype if parts == 1 else jnp.float32)
    gradients = _call(
        functools.partial(_keys_kernel, window=window),
        *(tile_of_keys, interpret, ranges(tile_of_keys, of_keys=True), *arrays),
        grid=(K * parts, B, T // tile_of_keys[1]),
        out_shape=[d_BTLH, d_BTLH],
        name="flash_attention_d_keys",
    )
    d_k_BTKH, d_v_BTKH = (
        d_BTLH.reshape(B, T, K, parts, H).sum(axis=3).astype(k_BTKH.dtype) for d_BTLH in gradients
    )
    return d_q_BTNH, d_k_BTKH, d_v_BTKH, None


_attention.defvjp(_forward, _backward)


def _until(segment_BT, branch_BT):
    """Finds behind which place of its row no token looks at a token: 0 of padding, for none does.

    Tokens of a segment stand side by side, and those of a branch behind their segment's prompt.
    """
    index_T = jnp.arange(segment_BT.shape[1])
    last_BT = jnp.diff(segment_BT, axis=1, append=-1) != 0
    last_2BT = jnp.stack([last_BT, last_BT | (jnp.diff(branch_BT, axis=1, append=-1) != 0)])
    end_2BT = jnp.where(last_2BT, index_T + 1, len(index_T))
    of_prompt_BT, of_branch_BT = lax.cummin(end_2BT, axis=2, reverse=True)
    until_BT = jnp.where(branch_BT == 0, of_prompt_BT, of_branch_BT)
    return jnp.where(segment_BT > 0, until_BT, 0)


def _ranges(until_BT, position_BT, tile, *, window: int | None = None, of_keys: bool = False):
    """Finds which tiles of keys each of queries visits, or of queries each of keys: bounds_BIX.

    Keys have two ranges, the prompt's and the branch's, or one where nothing is between. A range
    has four bounds: its tiles lie from the first to the last, those between the others are seen
    whole. With a window a prompt's last keys visit what is between the first queries of its
    branches, too.
    """
    Q, S, *_ = tile
    B, T = until_BT.shape
    begin_I1, begin_J = jnp.arange(0, T, Q)[:, None], jnp.arange(0, T, S)
    until_BJS = until_BT.reshape(B, -1, S)
    seen_BIJ = (until_BJS.max(axis=2)[:, None] > begin_I1) & (begin_J < begin_I1 + Q)
    whole_BIJ = (until_BJS.min(axis=2)[:, None] >= begin_I1 + Q) & (begin_J + S <= begin_I1 + 1)
    if window is not None:
        first_BT = jnp.where(until_BT > 0, position_BT, T)  # padding has no position
        first_BI, last_BI = first_BT.reshape(B, -1, Q).min(2), position_BT.reshape(B, -1, Q).max(2)
        first_BJ, last_BJ = first_BT.reshape(B, -1, S).min(2), position_BT.reshape(B, -1, S).max(2)
        seen_BIJ &= first_BI[:, :, None] - last_BJ[:, None] < window
        whole_BIJ &= last_BI[:, :, None] - first_BJ[:, None] < window
    if of_keys:
        seen_BIJ, whole_BIJ = seen_BIJ.swapaxes(1, 2), whole_BIJ.swapaxes(1, 2)
    tiles = seen_BIJ.shape[2]
    place_J = jnp.arange(tiles)

    def first(mask_BIJ):
        return jnp.where(mask_BIJ, place_J, tiles).min(axis=2, keepdims=True)

    def behind(mask_BIJ):
        return jnp.where(mask_BIJ, place_J + 1, 0).max(axis=2, keepdims=True)

    sides = [True]
    if not of_keys:
        gap_BI1 = behind(~seen_BIJ & (begin_J < begin_I1 + Q))
        sides = [place_J < gap_BI1, place_J >= gap_BI1]
    bounds = []
    for side_BIJ in sides:
        begin_BI1 = first(seen_BIJ & side_BIJ)
        end_BI1 = jnp.maximum(behind(seen_BIJ & side_BIJ), begin_BI1)
        whole_BI1 = jnp.minimum(first(whole_BIJ & side_BIJ), end_BI1)
        rest_BI1 = jnp.minimum(first(~whole_BIJ & (place_J >= whole_BI1)), end_BI1)
        bounds += [begin_BI1, whole_BI1, rest_BI1, end_BI1]
    return jnp.concatenate(bounds, axis=2)


def _visit(ranges_ref, b, program, turns: int, visit, state):
    """Runs state = visit(state, tile, turn, whole) over a program's ranges, `turns` times a tile.

    One loop goes over all that is seen whole, which needs no masks, and then one over the rest.
    """
    ranges = range(0, ranges_ref.shape[2], 4)
    for whole, parts in ((True, [1]), (False, [0, 2])):
        visited, shifts = 0, []
        for x in (first + part for part in parts for first in ranges):
            begin, end = ranges_ref[b, program, x], ranges_ref[b, program, x + 1]
            shifts.append((visited, begin - visited))
            visited += end - begin

        def body(index, state, shifts=shifts, whole=whole):
            count, turn = lax.div(index, turns), lax.rem(index, turns)
            shift = 0
            for before, begin in shifts:
                shift = jnp.where(count >= before, begin, shift)
            return visit(state, count + shift, turn, whole)

        state = lax.fori_loop(0, visited * turns, body, state)
    return state


def _seen(rows_ref, b, queries, keys, axis: int, window: int | None):
    """Says what the tokens of a tile of queries, which are along this axis, see of one of keys."""
    until_ref, position_ref = rows_ref
    query = jnp.expand_dims(queries.start + jnp.arange(queries.size), 1 - axis)
    key = jnp.expand_dims(keys.start + jnp.arange(keys.size), axis)
    seen = (query >= key) & (query < jnp.expand_dims(until_ref[b, keys], axis))
    if window is None:
        return seen
    query, key = (
        jnp.expand_dims(position_ref[b, of], a) for of, a in ((queries, 1 - axis), (keys, axis))
    )
    return seen & (query - key < window)


def _forward_kernel(ranges_ref, rows_ref, *refs, tile, exp2, window):
    q_ref, k_ref, v_ref, out_ref, norm_ref = refs
    # Later queries have more keys: they go first, lest the last programs be the longest.
    n, b, i = pl.program_id(0), pl.program_id(1), pl.num_programs(2) - 1 - pl.program_id(2)
    (Q, S), scale = tile, q_ref.shape[3] ** -0.5 * LOG2_E
    h = lax.div(n, q_ref.shape[2] // k_ref.shape[2])
    queries = pl.ds(i * Q, Q)
    q_QH = q_ref[b, queries, n, :]

    def visit(state, j, _, whole):
        max_Q1, sum_Q1, out_QH = state
        keys = pl.ds(j * S, S)
        x_QS = triton.dot(q_QH, k_ref[b, keys, h, :].T)
        if not whole:
            x_QS = jnp.where(_seen(rows_ref, b, queries, keys, 0, window), x_QS, MASKED)
        new_max_Q1 = jnp.maximum(max_Q1, x_QS.max(axis=1, keepdims=True))
        p_QS = exp2(x_QS, scale, -scale * new_max_Q1)
        decay_Q1 = exp2(max_Q1 - new_max_Q1, scale, 0.0)
        v_SH = v_ref[b, keys, h, :]
        out_QH = out_QH * decay_Q1 + triton.dot(p_QS.astype(v_SH.dtype), v_SH)
        return new_max_Q1, sum_Q1 * decay_Q1 + p_QS.sum(axis=1, keepdims=True), out_QH

    # The maximum stays so far above MASKED that this has no weight, however products are rounded.
    none = jnp.full((Q, 1), MASKED / 2), jnp.zeros((Q, 1)), jnp.zeros(q_QH.shape)
    max_Q1, sum_Q1, out_QH = _visit(ranges_ref, b, i, 1, visit, none)
    sum_Q1 = jnp.where(sum_Q1 > 0, sum_Q1, 1.0)
    out_ref[b, queries, n, :] = (out_QH / sum_Q1).astype(out_ref.dtype)
    norm_ref[b, n, queries] = (max_Q1 * scale + jnp.log2(sum_Q1))[:, 0]


def _queries_kernel(ranges_ref, rows_ref, *refs, tile, exp2, window):
    q_ref, k_ref, v_ref, d_out_ref, norm_ref, dot_ref, d_q_ref = refs
    n, b, i = pl.program_id(0), pl.program_id(1), pl.num_programs(2) - 1 - pl.program_id(2)
    (Q, S), H = tile, q_ref.shape[3]
    h = lax.div(n, q_ref.shape[2] // k_ref.shape[2])
    queries = pl.ds(i * Q, Q)
    q_QH, d_out_QH = q_ref[b, queries, n, :], d_out_ref[b, queries, n, :]
    norm_Q1, dot_Q1 = norm_ref[b, n, queries][:, None], dot_ref[b, n, queries][:, None]

    def visit(d_q_QH, j, _, whole):
        keys = pl.ds(j * S, S)
        k_SH, v_SH = k_ref[b, keys, h, :], v_ref[b, keys, h, :]
        p_QS = exp2(triton.dot(q_QH, k_SH.T), H**-0.5 * LOG2_E, -norm_Q1)
        if not whole:
            p_QS = jnp.where(_seen(rows_ref, b, queries, keys, 0, window), p_QS, 0.0)
        d_x_QS = p_QS * (triton.dot(d_out_QH, v_SH.T) - dot_Q1)
        return d_q_QH + triton.dot(d_x_QS.astype(k_SH.dtype), k_SH)

    d_q_QH = _visit(ranges_ref, b, i, 1, visit, jnp.zeros(q_QH.shape))
    d_q_ref[b, queries, n, :] = (d_q_QH * H**-0.5).astype(d_q_ref.dtype)


def _keys_kernel(ranges_ref, rows_ref, *refs, tile, exp2, window):
    """Has keys first in what it multiplies, so that nothing is transposed but references."""
    q_ref, k_ref, v_ref, d_out_ref, norm_ref, dot_ref, d_k_ref, d_v_ref = refs
    part, b, j = (pl.program_id(axis) for axis in range(3))
    (Q, S), H = tile, q_ref.shape[3]
    group = q_ref.shape[2] // d_k_ref.shape[2]
    h = lax.div(part, d_k_ref.shape[2] // k_ref.shape[2])
    keys = pl.ds(j * S, S)
    k_SH, v_SH = k_ref[b, keys, h, :], v_ref[b, keys, h, :]

    def visit(state, i, g, whole):
        d_k_SH, d_v_SH = state
        queries, n = pl.ds(i * Q, Q), part * group + g
        q_QH, d_out_QH = q_ref[b, queries, n, :], d_out_ref[b, queries, n, :]
        norm_1Q, dot_1Q = norm_ref[b, n, queries][None], dot_ref[b, n, queries][None]
        p_SQ = exp2(triton.dot(k_SH, q_QH.T), H**-0.5 * LOG2_E, -norm_1Q)
        if not whole:
            p_SQ = jnp.where(_seen(rows_ref, b, queries, keys, 1, window), p_SQ, 0.0)
        d_x_SQ = p_SQ * (triton.dot(v_SH, d_out_QH.T) - dot_1Q)
        d_k_SH += triton.dot(d_x_SQ.astype(q_QH.dtype), q_QH)
        d_v_SH += triton.dot(p_SQ.astype(d_out_QH.dtype), d_out_QH)
        return d_k_SH, d_v_SH

    zero_SH = jnp.zeros(k_SH.shape)
    d_k_SH, d_v_SH = _visit(ranges_ref, b, j, group, visit, (zero_SH, zero_SH))
    d_k_ref[b, keys, part, :] = (d_k_SH * H**-0.5).astype(d_k_ref.dtype)
    d_v_ref[b, keys, part, :] = d_v_SH.astype(d_v_ref.dtype)
