"""Attention inside packed rows on GPU: FlashAttention-2 in Triton, with segments and branches.

Axis letters beside the model's: Q query and S key tokens of a tile; G = N / K query heads of a
key/value head; I and J tiles of queries and of keys; X the bounds of ranges of tiles.

A program has a tile of queries (forward, gradient of the queries) or of keys (gradients of keys and
values). It visits first those tiles of the other kind that are seen whole, without a mask, and then
those on the borders. The backward pass computes the weights again from the softmax's normaliser
(Dao 2023, arXiv 2307.08691, Algorithm 2). Scores and normaliser are to base 2.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from models.kernels import triton
from models.kernels.xla import ATTENTION, MASKED, like


class Tile(NamedTuple):
    """How large a kernel's tiles are, and how it is compiled (see triton.call)."""

    queries: int
    keys: int
    warps: int
    stages: int


# Tiles of the kernels (forward, gradient of queries, gradients of keys), by the bytes of a value
# and the size of a head up to which they serve.
TILES = {
    (2, 64): (Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    (2, 128): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    (4, 64): (Tile(32, 32, 4, 2), Tile(32, 16, 4, 2), Tile(32, 16, 4, 2)),
    (4, 128): (Tile(32, 32, 4, 2), Tile(32, 16, 4, 2), Tile(32, 16, 4, 2)),
}
FEW = 512  # programs, too few to keep a GPU busy until the last of them ends


def tiles(array_BTNH) -> tuple[Tile, Tile, Tile]:
    return TILES[array_BTNH.dtype.itemsize, 64 if array_BTNH.shape[3] <= 64 else 128]


def flash_attention(q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT, *, interpret: bool = False):
    """Does what `packed.packed_attention` does; the head size is a power of two, 16 or more."""
    tokens = q_BTNH.shape[1]
    missing = -tokens % max(max(tile[:2]) for tile in tiles(q_BTNH))

    def pad(array):
        return jnp.pad(array, ((0, 0), (0, missing)) + ((0, 0),) * (array.ndim - 2))

    arrays = map(pad, (q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT))
    return _attention(interpret, *arrays)[:, :tokens]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(interpret, q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT):
    return _forward(interpret, q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT)[0]


def _call(kernel, tile, group, name, interpret, *arrays, **more):
    return triton.call(
        functools.partial(
            kernel, tile=tile[:2], group=group, exp2=functools.partial(triton.exp2, interpret=interpret)
        ),
        *arrays,
        name=name,
        interpret=interpret,
        warps=tile.warps,
        stages=tile.stages,
        **more,
    )


def _forward(interpret, q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT):
    B, T, N, _ = q_BTNH.shape
    tile, *_ = tiles(q_BTNH)
    out_BTNH, norm_BNT = _call(
        _forward_kernel,
        tile,
        N // k_BTKH.shape[2],
        "flash_attention",
        interpret,
        *(_keys_of_queries(segment_BT, branch_BT, tile), segment_BT, branch_BT, q_BTNH, k_BTKH, v_BTKH),
        grid=(N, B, T // tile.queries),
        out_shape=[like(q_BTNH), like(q_BTNH, (B, N, T), jnp.float32)],
    )
    out_BTNH = checkpoint_name(out_BTNH, ATTENTION)
    norm_BNT = checkpoint_name(norm_BNT, ATTENTION)
    return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT, out_BTNH, norm_BNT)


def _backward(interpret, residuals, d_out_BTNH):
    q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT, out_BTNH, norm_BNT = residuals
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    _, of_queries, of_keys = tiles(q_BTNH)
    dot_BTN = jnp.sum(d_out_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32), axis=3)
    arrays = (segment_BT, branch_BT, q_BTNH, k_BTKH, v_BTKH, d_out_BTNH, norm_BNT)
    arrays = (*arrays, dot_BTN.swapaxes(1, 2))
    (d_q_BTNH,) = _call(
        _queries_kernel,
        of_queries,
        N // K,
        "flash_attention_d_queries",
        interpret,
        *(_keys_of_queries(segment_BT, branch_BT, of_queries), *arrays),
        grid=(N, B, T // of_queries.queries),
        out_shape=[like(q_BTNH)],
    )
    # Few programs have one query head each; what they find is summed here.
    parts = 1 if B * K * T // of_keys.keys >= FEW else N // K
    part = like(k_BTKH, (B, T, K * parts, H), k_BTKH.dtype if parts == 1 else jnp.float32)
    gradients = _call(
        _keys_kernel,
        of_keys,
        N // K // parts,
        "flash_attention_d_keys",
        interpret,
        *(_queries_of_keys(segment_BT, branch_BT, of_keys), *arrays),
        grid=(K * parts, B, T // of_keys.keys),
        out_shape=[part, part],
    )
    d_k_BTKH, d_v_BTKH = (
        array.reshape(B, T, K, parts, H).sum(axis=3).astype(k_BTKH.dtype) for array in gradients
    )
    return d_q_BTNH, d_k_BTKH, d_v_BTKH, None, None


_attention.defvjp(_forward, _backward)


def _spans(segment_BT, branch_BT, at_I):
    """Finds where (segment, its prompt, branch) of the tokens at these places begin and end.

    Tokens of each stand side by side; each token of padding is by itself.
    """
    index_T = jnp.arange(segment_BT.shape[1])
    begins_BT = (jnp.diff(segment_BT, axis=1, prepend=-1) != 0) | (segment_BT == 0)
    begins_2BT = jnp.stack([begins_BT, begins_BT | (jnp.diff(branch_BT, axis=1, prepend=-1) != 0)])
    start_2BT = lax.cummax(jnp.where(begins_2BT, index_T, 0), axis=2)
    ends_2BT = jnp.roll(begins_2BT, -1, axis=2).at[:, :, -1].set(True)
    end_2BT = lax.cummin(jnp.where(ends_2BT, index_T + 1, len(index_T)), axis=2, reverse=True)
    (start_BI, branch_start_BI), (end_BI, branch_end_BI) = start_2BT[:, :, at_I], end_2BT[:, :, at_I]
    first_end_BI = jnp.take_along_axis(end_2BT[1], start_BI, axis=1)
    has_prompt_BI = jnp.take_along_axis(branch_BT, start_BI, axis=1) == 0
    prompt_end_BI = jnp.where(has_prompt_BI, first_end_BI, start_BI)
    return (start_BI, end_BI), (start_BI, prompt_end_BI), (branch_start_BI, branch_end_BI)


def _range(begin, end, whole_begin, whole_end, size: int):
    """Gives bounds of tiles of this size: the first, the first seen whole, and behind their last."""
    begin, end = jnp.broadcast_arrays(begin, end)
    first, last = begin // size, jnp.maximum(pl.cdiv(end, size), begin // size)
    first_whole = jnp.clip(pl.cdiv(whole_begin, size), first, last)
    last_whole = jnp.clip(whole_end // size, first_whole, last)
    return jnp.stack([first, first_whole, last_whole, last], axis=-1)


def _keys_of_queries(segment_BT, branch_BT, tile: Tile):
    """Finds two ranges of tiles of keys for each of queries: of the prompt, and from the branch."""
    Q, S = tile[:2]
    at_I = jnp.arange(0, segment_BT.shape[1], Q)
    (start, end), (_, prompt_end), (branch_start, branch_end) = _spans(segment_BT, branch_BT, at_I)
    # Behind the prompt's tokens come others that see them, behind a branch's none.
    end_of_seeing = jnp.where(branch_start < prompt_end, end, branch_end)
    prompt_end = jnp.minimum(prompt_end, branch_start)
    whole_end = jnp.where(end >= at_I + Q, prompt_end, 0)
    prompt_BIX = _range(start, prompt_end, start, whole_end, S)
    branch_start = jnp.maximum(branch_start, prompt_BIX[..., 3] * S)
    whole_end = jnp.where(end_of_seeing >= at_I + Q, at_I, 0)
    own_BIX = _range(branch_start, at_I + Q, branch_start, whole_end, S)
    return jnp.concatenate([prompt_BIX, own_BIX], axis=-1)


def _queries_of_keys(segment_BT, branch_BT, tile: Tile):
    """Finds the range of tiles of queries for each of keys."""
    Q, S = tile[:2]
    begin_J = jnp.arange(0, segment_BT.shape[1], S)
    (_, end), (_, prompt_end), (branch_start, branch_end) = _spans(
        segment_BT, branch_BT, begin_J + S - 1
    )
    end = jnp.where(prompt_end > begin_J, end, branch_end)
    whole_end = jnp.where(branch_start <= begin_J, end, 0)
    return _range(begin_J, end, begin_J + S - 1, whole_end, Q)


def _visit(ranges_ref, b, tile, turns: int, visit, state):
    """Runs state = visit(state, tile, turn, whole) over a program's ranges."""
    bounds = [ranges_ref[b, tile, x] for x in range(ranges_ref.shape[2])]
    spans = list(zip(bounds, bounds[1:]))
    whole, border = spans[1::4], [span for x in (0, 2) for span in spans[x::4]]
    for is_whole, spans in ((True, whole), (False, border)):
        lengths = [end - begin for begin, end in spans]

        def body(turn, state, spans=spans, lengths=lengths, is_whole=is_whole):
            place = lax.div(turn, turns)
            other, behind = place + spans[0][0], 0
            for length, (_, end), (begin, _) in zip(lengths, spans, spans[1:]):
                behind += length
                other += jnp.where(place >= behind, begin - end, 0)
            return visit(state, other, lax.rem(turn, turns), is_whole)

        state = lax.fori_loop(0, sum(lengths) * turns, body, state)
    return state


def _seen(segment_ref, branch_ref, b, queries, keys, axis: int):
    """Says what the tokens of a tile of queries see of one of keys; queries are along the axis."""

    def both(of):
        return jnp.expand_dims(of(queries), 1 - axis), jnp.expand_dims(of(keys), axis)

    (segment, of_key), (branch, of_branch) = (
        both(lambda tokens: ref[b, tokens]) for ref in (segment_ref, branch_ref)
    )
    index, of_index = both(lambda tokens: tokens.start + jnp.arange(tokens.size))
    own = (segment == of_key) & (segment > 0) & ((of_branch == 0) | (of_branch == branch))
    return own & (index >= of_index)


def _base_2(H: int) -> float:
    """The factor of scores whose powers of two are what powers of e are of attention's."""
    return H**-0.5 * math.log2(math.e)


def _forward_kernel(
    ranges_ref, segment_ref, branch_ref, q_ref, k_ref, v_ref, out_ref, norm_ref, *, tile, group, exp2
):
    n, b, i = pl.program_id(0), pl.program_id(1), pl.num_programs(2) - 1 - pl.program_id(2)
    (Q, S), H, h = tile, q_ref.shape[3], lax.div(n, group)
    queries, scale = pl.ds(i * Q, Q), _base_2(q_ref.shape[3])
    q_QH = q_ref[b, queries, n, :]

    def visit(state, j, _, whole):
        max_Q1, sum_Q1, out_QH = state
        keys = pl.ds(j * S, S)
        x_QS = triton.dot(q_QH, k_ref[b, keys, h, :].T)
        if not whole:
            seen_QS = _seen(segment_ref, branch_ref, b, queries, keys, 0)
            x_QS = jnp.where(seen_QS, x_QS, MASKED)
        new_max_Q1 = jnp.maximum(max_Q1, x_QS.max(axis=1, keepdims=True))
        p_QS = exp2(x_QS, scale, -scale * new_max_Q1)
        decay_Q1 = exp2(max_Q1 - new_max_Q1, scale, 0.0)
        v_SH = v_ref[b, keys, h, :]
        out_QH = out_QH * decay_Q1 + triton.dot(p_QS.astype(v_SH.dtype), v_SH)
        return new_max_Q1, sum_Q1 * decay_Q1 + p_QS.sum(axis=1, keepdims=True), out_QH

    # What is masked has no weight, however the products with the scale are rounded.
    none = jnp.full((Q, 1), MASKED / 2), jnp.zeros((Q, 1)), jnp.zeros((Q, H))
    max_Q1, sum_Q1, out_QH = _visit(ranges_ref, b, i, 1, visit, none)
    sum_Q1 = jnp.where(sum_Q1 > 0, sum_Q1, 1.0)
    out_ref[b, queries, n, :] = (out_QH / sum_Q1).astype(out_ref.dtype)
    norm_ref[b, n, queries] = (max_Q1 * scale + jnp.log2(sum_Q1))[:, 0]


def _queries_kernel(
    ranges_ref,
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
    tile,
    group,
    exp2,
):
    n, b, i = pl.program_id(0), pl.program_id(1), pl.num_programs(2) - 1 - pl.program_id(2)
    (Q, S), H, h = tile, q_ref.shape[3], lax.div(n, group)
    queries = pl.ds(i * Q, Q)
    q_QH, d_out_QH = q_ref[b, queries, n, :], d_out_ref[b, queries, n, :]
    norm_Q1, dot_Q1 = norm_ref[b, n, queries][:, None], dot_ref[b, n, queries][:, None]

    def visit(d_q_QH, j, _, whole):
        keys = pl.ds(j * S, S)
        k_SH, v_SH = k_ref[b, keys, h, :], v_ref[b, keys, h, :]
        p_QS = exp2(triton.dot(q_QH, k_SH.T), _base_2(H), -norm_Q1)
        if not whole:
            p_QS = jnp.where(_seen(segment_ref, branch_ref, b, queries, keys, 0), p_QS, 0.0)
        d_x_QS = p_QS * (triton.dot(d_out_QH, v_SH.T) - dot_Q1)
        return d_q_QH + triton.dot(d_x_QS.astype(k_SH.dtype), k_SH)

    d_q_QH = _visit(ranges_ref, b, i, 1, visit, jnp.zeros((Q, H)))
    d_q_ref[b, queries, n, :] = (d_q_QH * H**-0.5).astype(d_q_ref.dtype)


def _keys_kernel(
    ranges_ref,
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
    tile,
    group,
    exp2,
):
    """Sums over `group` query heads that share the key head too, in float32."""
    part, b, j = (pl.program_id(axis) for axis in range(3))
    (Q, S), H = tile, q_ref.shape[3]
    h = lax.div(part * k_ref.shape[2], d_k_ref.shape[2])
    keys = pl.ds(j * S, S)
    k_SH, v_SH = k_ref[b, keys, h, :], v_ref[b, keys, h, :]

    def visit(state, i, turn, whole):
        """Has keys first, so that weights enter the products as they are."""
        d_k_SH, d_v_SH = state
        n, queries = part * group + turn, pl.ds(i * Q, Q)
        q_QH, d_out_QH = q_ref[b, queries, n, :], d_out_ref[b, queries, n, :]
        norm_1Q, dot_1Q = norm_ref[b, n, queries][None], dot_ref[b, n, queries][None]
        p_SQ = exp2(triton.dot(k_SH, q_QH.T), _base_2(H), -norm_1Q)
        if not whole:
            p_SQ = jnp.where(_seen(segment_ref, branch_ref, b, queries, keys, 1), p_SQ, 0.0)
        d_v_SH += triton.dot(p_SQ.astype(d_out_QH.dtype), d_out_QH)
        d_x_SQ = p_SQ * (triton.dot(v_SH, d_out_QH.T) - dot_1Q)
        d_k_SH += triton.dot(d_x_SQ.astype(q_QH.dtype), q_QH)
        return d_k_SH, d_v_SH

    zero_SH = jnp.zeros((S, H))
    d_k_SH, d_v_SH = _visit(ranges_ref, b, j, group, visit, (zero_SH, zero_SH))
    d_k_ref[b, keys, part, :] = (d_k_SH * H**-0.5).astype(d_k_ref.dtype)
    d_v_ref[b, keys, part, :] = d_v_SH.astype(d_v_ref.dtype)
