"""Attention inside packed rows on GPU: FlashAttention-2 in Triton, with segments and branches.

Axis letters beside the model's: Q query and S key tokens of a tile; G = N / K query heads of a
key/value head; I and J tiles of queries and of keys; X bounds of ranges of tiles.

A program has a tile of queries (forward, gradient of the queries) or of keys (gradients of keys and
values). It visits first those tiles of the other kind that are seen whole, without a mask, and then
those on the borders. The backward pass computes the weights again from the softmax's normaliser
(Dao 2023, arXiv 2307.08691, Algorithm 2). Scores and normaliser are to base 2.
"""

import functools
import itertools
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
    """Says how many tokens a kernel's tiles have, and how it is compiled (`triton.call`)."""

    queries: int
    keys: int
    warps: int
    stages: int


# For the forward pass, the gradient of queries and those of keys, by the bytes of a value and the
# size of a head that is not exceeded: tiles with the fewest cycles by count of an H100's
# instructions, among those that spill no registers there, on an A100 and on an RTX 4090.
FLOAT32 = Tile(32, 32, 4, 2), Tile(32, 16, 4, 2), Tile(32, 16, 4, 2)
TILES = {
    (2, 64): (Tile(128, 64, 4, 2), Tile(128, 32, 4, 2), Tile(64, 64, 4, 2)),
    (2, 128): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
    (4, 64): FLOAT32,
    (4, 128): FLOAT32,
}
FEW = 512  # programs that may leave a GPU idle until the longest of them ends


def flash_attention(q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT, *, interpret: bool = False):
    """Does what `packed.packed_attention` does; the head size is a power of two, 16 or more."""
    tokens = q_BTNH.shape[1]
    missing = -tokens % max(max(tile.queries, tile.keys) for tile in _tiles(q_BTNH))

    def pad(array):
        return jnp.pad(array, ((0, 0), (0, missing)) + ((0, 0),) * (array.ndim - 2))

    arrays = map(pad, (q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT))
    return _attention(interpret, *arrays)[:, :tokens]


def _tiles(q_BTNH) -> tuple[Tile, Tile, Tile]:
    return TILES[q_BTNH.dtype.itemsize, 64 if q_BTNH.shape[3] <= 64 else 128]


def _call(kernel, tile: Tile, interpret: bool, *arrays, **more):
    kernel = functools.partial(
        kernel,
        tile=(tile.queries, tile.keys),
        exp2=functools.partial(triton.exp2, interpret=interpret),
    )
    how = {"warps": tile.warps, "stages": tile.stages, "interpret": interpret}
    return triton.call(kernel, *arrays, **how, **more)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(interpret, q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT):
    return _forward(interpret, q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT)[0]


def _forward(interpret, q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT):
    B, T, N, _ = q_BTNH.shape
    tile, _, _ = _tiles(q_BTNH)
    keys_BIX = _keys_of_queries(segment_BT, branch_BT, tile)
    out_BTNH, norm_BNT = _call(
        _forward_kernel,
        *(tile, interpret, keys_BIX, segment_BT, branch_BT, q_BTNH, k_BTKH, v_BTKH),
        grid=(N, B, T // tile.queries),
        out_shape=[like(q_BTNH), like(q_BTNH, (B, N, T), jnp.float32)],
        name="flash_attention",
    )
    out_BTNH = checkpoint_name(out_BTNH, ATTENTION)
    norm_BNT = checkpoint_name(norm_BNT, ATTENTION)
    return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT, out_BTNH, norm_BNT)


def _backward(interpret, residuals, d_out_BTNH):
    q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT, out_BTNH, norm_BNT = residuals
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    _, tile, tile_of_keys = _tiles(q_BTNH)
    dot_BTN = jnp.sum(d_out_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32), axis=3)
    arrays = (segment_BT, branch_BT, q_BTNH, k_BTKH, v_BTKH, d_out_BTNH, norm_BNT)
    arrays = (*arrays, dot_BTN.swapaxes(1, 2))
    (d_q_BTNH,) = _call(
        _queries_kernel,
        *(tile, interpret, _keys_of_queries(segment_BT, branch_BT, tile), *arrays),
        grid=(N, B, T // tile.queries),
        out_shape=[like(q_BTNH)],
        name="flash_attention_d_queries",
    )
    # A program sums over the query heads of its keys; were there few, it has one, and the sum is
    # here. L are key heads of which one has `parts`.
    parts = 1 if B * K * T // tile_of_keys.keys >= FEW else N // K
    d_BTLH = like(k_BTKH, (B, T, K * parts, H), k_BTKH.dtype if parts == 1 else jnp.float32)
    gradients = _call(
        _keys_kernel,
        *(tile_of_keys, interpret, _queries_of_keys(segment_BT, branch_BT, tile_of_keys), *arrays),
        grid=(K * parts, B, T // tile_of_keys.keys),
        out_shape=[d_BTLH, d_BTLH],
        name="flash_attention_d_keys",
    )
    d_k_BTKH, d_v_BTKH = (
        d_BTLH.reshape(B, T, K, parts, H).sum(axis=3).astype(k_BTKH.dtype) for d_BTLH in gradients
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
    (start_BI, branch_start_BI), (end_BI, branch_end_BI) = (
        start_2BT[:, :, at_I],
        end_2BT[:, :, at_I],
    )
    prompt_end_BI = jnp.where(
        jnp.take_along_axis(branch_BT, start_BI, axis=1) == 0,
        jnp.take_along_axis(end_2BT[1], start_BI, axis=1),
        start_BI,
    )
    return (start_BI, end_BI), (start_BI, prompt_end_BI), (branch_start_BI, branch_end_BI)


def _range(begin_I, end_BI, whole_begin_I, whole_end_BI, size: int):
    """Turns ranges of tokens into bounds of tiles of this size: range_BIX.

    Tiles from bound 0 to 3 have a token of the range, those from 1 to 2 lie in the whole range.
    """
    begin_BI, end_BI = jnp.broadcast_arrays(begin_I, end_BI)
    first_BI = begin_BI // size
    last_BI = jnp.maximum(pl.cdiv(end_BI, size), first_BI)
    whole_BI = jnp.clip(pl.cdiv(whole_begin_I, size), first_BI, last_BI)
    rest_BI = jnp.clip(whole_end_BI // size, whole_BI, last_BI)
    return jnp.stack([first_BI, whole_BI, rest_BI, last_BI], axis=-1)


def _keys_of_queries(segment_BT, branch_BT, tile: Tile):
    """Finds for each tile of queries two ranges of tiles of keys: the prompt's, the branch's."""
    begin_I = jnp.arange(0, segment_BT.shape[1], tile.queries)
    end_I = begin_I + tile.queries
    # Earlier keys are seen through the first query's segment and branch alone.
    segment, prompt, branch = _spans(segment_BT, branch_BT, begin_I)
    in_segment_BI, in_branch_BI = segment[1] >= end_I, branch[1] >= end_I
    in_prompt_BI = branch[0] < prompt[1]
    prompt_end_BI = jnp.where(in_prompt_BI, prompt[0], prompt[1])
    whole_end_BI = jnp.where(in_segment_BI, prompt_end_BI, 0)
    prompt_BIX = _range(prompt[0], prompt_end_BI, prompt[0], whole_end_BI, tile.keys)
    start_BI = jnp.maximum(branch[0], prompt_BIX[..., 3] * tile.keys)
    whole_end_BI = jnp.where(in_branch_BI | (in_prompt_BI & in_segment_BI), begin_I, 0)
    branch_BIX = _range(start_BI, end_I, start_BI, whole_end_BI, tile.keys)
    return jnp.concatenate([prompt_BIX, branch_BIX], axis=-1)


def _queries_of_keys(segment_BT, branch_BT, tile: Tile):
    """Finds for each tile of keys the range of tiles of queries that see the last of them."""
    begin_J = jnp.arange(0, segment_BT.shape[1], tile.keys)
    last_J = begin_J + tile.keys - 1
    segment, prompt, branch = _spans(segment_BT, branch_BT, last_J)
    end_BJ = jnp.where(prompt[1] > begin_J, segment[1], branch[1])
    whole_end_BJ = jnp.where(branch[0] <= begin_J, end_BJ, 0)
    return _range(begin_J, end_BJ, last_J, whole_end_BJ, tile.queries)


def _visit(ranges_ref, b, program: int, turns: int, visit, state):
    """Runs state = visit(state, tile, turn, whole) over ranges: first what is seen whole.

    Loops without masks and loops with them are apart, and each goes over all ranges.
    """
    bounds_X = [ranges_ref[b, program, x] for x in range(ranges_ref.shape[2])]
    spans = list(itertools.pairwise(bounds_X))
    for whole, spans_ in ((True, spans[1::4]), (False, spans[::4] + spans[2::4])):
        behind, shifts = 0, []  # the tile is the loop's count and what spans are left out before
        previous = 0
        for begin, end in spans_:
            shifts.append((behind, begin - previous))
            behind, previous = behind + end - begin, end

        def turn(count, state, shifts=shifts, whole=whole):
            place = lax.div(count, turns)
            tile = place + sum(jnp.where(place >= after, shift, 0) for after, shift in shifts)
            return visit(state, tile, lax.rem(count, turns), whole)

        state = lax.fori_loop(0, behind * turns, turn, state)
    return state


def _seen(segment_ref, branch_ref, b, queries, keys, axis: int):
    """Says what the tokens of a tile of queries, which are along this axis, see of one of keys."""

    def both(of):
        return jnp.expand_dims(of(queries), 1 - axis), jnp.expand_dims(of(keys), axis)

    segment, of_key = both(lambda tokens: segment_ref[b, tokens])
    branch, of_branch = both(lambda tokens: branch_ref[b, tokens])
    index, of_index = both(lambda tokens: tokens.start + jnp.arange(tokens.size))
    own = (segment == of_key) & (segment > 0) & ((of_branch == 0) | (of_branch == branch))
    return own & (index >= of_index)


def _to_base_2(ref) -> float:
    """Gives the factor of scores with which a power of 2 is the softmax's power of e."""
    return ref.shape[3] ** -0.5 * math.log2(math.e)


def _forward_kernel(ranges_ref, segment_ref, branch_ref, *refs, tile: tuple[int, int], exp2):
    q_ref, k_ref, v_ref, out_ref, norm_ref = refs
    # Later queries have more keys: they go first, lest the last programs be the longest.
    n, b, i = pl.program_id(0), pl.program_id(1), pl.num_programs(2) - 1 - pl.program_id(2)
    (Q, S), scale = tile, _to_base_2(q_ref)
    h = lax.div(n, q_ref.shape[2] // k_ref.shape[2])
    queries = pl.ds(i * Q, Q)
    q_QH = q_ref[b, queries, n, :]

    def visit(state, j, _, whole):
        max_Q1, sum_Q1, out_QH = state
        keys = pl.ds(j * S, S)
        x_QS = triton.dot(q_QH, k_ref[b, keys, h, :].T)
        if not whole:
            x_QS = jnp.where(_seen(segment_ref, branch_ref, b, queries, keys, 0), x_QS, MASKED)
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


def _queries_kernel(ranges_ref, segment_ref, branch_ref, *refs, tile: tuple[int, int], exp2):
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
        p_QS = exp2(triton.dot(q_QH, k_SH.T), _to_base_2(q_ref), -norm_Q1)
        if not whole:
            p_QS = jnp.where(_seen(segment_ref, branch_ref, b, queries, keys, 0), p_QS, 0.0)
        d_x_QS = p_QS * (triton.dot(d_out_QH, v_SH.T) - dot_Q1)
        return d_q_QH + triton.dot(d_x_QS.astype(k_SH.dtype), k_SH)

    d_q_QH = _visit(ranges_ref, b, i, 1, visit, jnp.zeros(q_QH.shape))
    d_q_ref[b, queries, n, :] = (d_q_QH * H**-0.5).astype(d_q_ref.dtype)


def _keys_kernel(ranges_ref, segment_ref, branch_ref, *refs, tile: tuple[int, int], exp2):
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
        p_SQ = exp2(triton.dot(k_SH, q_QH.T), _to_base_2(q_ref), -norm_1Q)
        if not whole:
            p_SQ = jnp.where(_seen(segment_ref, branch_ref, b, queries, keys, 1), p_SQ, 0.0)
        d_x_SQ = p_SQ * (triton.dot(v_SH, d_out_QH.T) - dot_1Q)
        d_k_SH += triton.dot(d_x_SQ.astype(q_QH.dtype), q_QH)
        d_v_SH += triton.dot(p_SQ.astype(d_out_QH.dtype), d_out_QH)
        return d_k_SH, d_v_SH

    zero_SH = jnp.zeros(k_SH.shape)
    d_k_SH, d_v_SH = _visit(ranges_ref, b, j, group, visit, (zero_SH, zero_SH))
    d_k_ref[b, keys, part, :] = (d_k_SH * H**-0.5).astype(d_k_ref.dtype)
    d_v_ref[b, keys, part, :] = d_v_SH.astype(d_v_ref.dtype)
