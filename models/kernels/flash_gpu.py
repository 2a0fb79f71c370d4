"""Attention inside packed rows on GPU: FlashAttention-2 in Triton, with segments and branches.

Axis letters beside the model's: Q query and S key tokens of a tile; G = N / K query heads of a
key/value head; I and J tiles of queries and of keys; X numbers of a tile.

A program has a tile of queries (forward, gradient of the queries) or of keys (gradients of keys and
values). Of the tiles of the other kind those that are seen whole need no mask. The forward pass
adds up in the order of `tiles`, where a tile is a split of a prompt or a response, of 512 tokens or
a page, which it adds up S keys at a time: as `paged_gpu` does. The backward pass computes the
weights again from the softmax's normaliser (Dao 2023, arXiv 2307.08691, Algorithm 2). Scores and
normaliser are to base 2.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from models.kernels import tiles, triton
from models.kernels.xla import ATTENTION, like

# For the forward pass, the gradient of queries and those of keys, by the bytes of a value and the
# size of a head that is not exceeded: tiles with the fewest cycles by count of an H100's
# instructions, among those that spill no registers in a loop over tiles there, on an A100 and on an
# RTX 4090: what waits for the end of a split may. Pages have the first's keys at a time, too. For
# bfloat16 and 64 the first two were the fastest measured on an H100 at 22,528 tokens.
TILES = {
    (2, 64): ((128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),
    (2, 128): ((128, 64, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2)),
    (2, 256): ((64, 64, 8, 1), (32, 32, 4, 1), (32, 32, 8, 1)),
    (4, 64): ((32, 32, 4, 2), (32, 16, 4, 2), (32, 16, 4, 2)),
    (4, 128): ((32, 32, 8, 2), (32, 16, 4, 2), (32, 16, 4, 2)),
    (4, 256): ((16, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
}
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
    tile_tokens: int = triton.SPLIT_TOKENS,
    interpret: bool = False,
):
    """Does what `packed.packed_attention` does; the head size is a power of two, 16 or more.

    tile_tokens: those of a page, where results shall have the bits that pages give.
    """
    longest = max(max(tile[:2]) for tile in _tiles(q_BTNH))
    pad = functools.partial(tiles.padded, multiple=longest, axis=1)
    rows = pad(segment_BT), pad(branch_BT), None if window is None else pad(position_BT)
    how = interpret, window, tile_tokens
    return _attention(how, *map(pad, (q_BTNH, k_BTKH, v_BTKH)), rows)[:, : q_BTNH.shape[1]]


def _tiles(q_BTNH) -> tuple:
    return TILES[
        q_BTNH.dtype.itemsize, next(size for size in (64, 128, 256) if q_BTNH.shape[-1] <= size)
    ]


def tile_tokens(q, page_tokens: int) -> int:
    """Counts the keys that are added up at once, of which pages have a multiple."""
    return min(page_tokens, _tiles(q)[0][1])


def _call(kernel, tile, how, *arrays, split=None, **more):
    Q, S, warps, stages = tile
    interpret, window, _ = how
    kernel = functools.partial(kernel, tile=(Q, S), interpret=interpret, window=window)
    if split is not None:
        kernel = functools.partial(kernel, split=split)
    return triton.call(kernel, *arrays, warps=warps, stages=stages, interpret=interpret, **more)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(how, q_BTNH, k_BTKH, v_BTKH, rows):
    return _forward(how, q_BTNH, k_BTKH, v_BTKH, rows)[0]


def _forward(how, q_BTNH, k_BTKH, v_BTKH, rows):
    B, T, N, _ = q_BTNH.shape
    _, window, page_tokens = how
    Q, _, *resources = _tiles(q_BTNH)[0]
    split = triton.split_tokens(page_tokens)
    out_BTNH, norm_BNT = _call(
        *(_forward_kernel, (Q, tile_tokens(q_BTNH, page_tokens), *resources), how),
        *(_rows(*rows, Q=Q, split=split, window=window), q_BTNH, k_BTKH, v_BTKH),
        split=split,
        grid=(N, B, T // Q),
        out_shape=[like(q_BTNH), like(q_BTNH, (B, N, T), jnp.float32)],
        name="flash_attention",
    )
    out_BTNH = checkpoint_name(out_BTNH, ATTENTION)
    norm_BNT = checkpoint_name(norm_BNT, ATTENTION)
    return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, rows, out_BTNH, norm_BNT)


def _backward(how, residuals, d_out_BTNH):
    q_BTNH, k_BTKH, v_BTKH, rows, out_BTNH, norm_BNT = residuals
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    _, tile, tile_of_keys = _tiles(q_BTNH)
    dot_BTN = jnp.sum(d_out_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32), axis=3)
    rows = _rows(*rows, Q=tile[0], split=T, window=how[1])
    arrays = (rows, q_BTNH, k_BTKH, v_BTKH, d_out_BTNH, norm_BNT, dot_BTN.swapaxes(1, 2))
    (d_q_BTNH,) = _call(
        *(_queries_kernel, tile, how, *arrays),
        split=T,
        grid=(N, B, T // tile[0]),
        out_shape=[like(q_BTNH)],
        name="flash_attention_d_queries",
    )
    # A program sums over the query heads of its keys; were there few, it has one, and the sum is
    # here. L are key heads of which one has `parts`.
    parts = 1 if B * K * T // tile_of_keys[1] >= FEW else N // K
    d_BTLH = like(k_BTKH, (B, T, K * parts, H), k_BTKH.dtype if parts == 1 else jnp.float32)
    gradients = _call(
        *(_keys_kernel, tile_of_keys, how, _bounds(rows[2], tile_of_keys, how[1]), *arrays),
        grid=(K * parts, B, T // tile_of_keys[1]),
        out_shape=[d_BTLH, d_BTLH],
        name="flash_attention_d_keys",
    )
    d_k_BTKH, d_v_BTKH = (
        d_BTLH.reshape(B, T, K, parts, H).sum(axis=3).astype(k_BTKH.dtype) for d_BTLH in gradients
    )
    return d_q_BTNH, d_k_BTKH, d_v_BTKH, None


_attention.defvjp(_forward, _backward)


def _rows(segment_BT, branch_BT, position_BT, *, Q: int, split: int, window: int | None):
    """Describes packed rows to the kernels: (block_BIX, end_BT, until_BT, position_BT).

    end_BT: where a token's part (a prompt or a response) ends. until_BT: behind which place no
    token looks at a token; 0 of padding. Each block of Q queries sees splits from a first place
    on; from where its prompt ends it goes on elsewhere (block_BIX), and with a window there are the
    least position of the first segment's queries and the largest of all.

    Tokens of a segment stand side by side, and those of a branch behind their segment's prompt.
    """
    T = segment_BT.shape[1]
    place_BT = jnp.broadcast_to(jnp.arange(T), segment_BT.shape)
    changes = [jnp.diff(segment_BT, axis=1) != 0]
    changes += [changes[0] | (jnp.diff(branch_BT, axis=1) != 0)]
    begins, ends = [], []  # of segments, of parts
    for change_BT in changes:
        begin_BT = jnp.where(jnp.pad(change_BT, ((0, 0), (1, 0))), place_BT, 0)
        end_BT = jnp.where(jnp.pad(change_BT, ((0, 0), (0, 1))), place_BT + 1, T)
        begins += [lax.cummax(begin_BT, axis=1)]
        ends += [lax.cummin(end_BT, axis=1, reverse=True)]
    is_prompt_BT = branch_BT == 0
    until_BT = jnp.where(segment_BT > 0, jnp.where(is_prompt_BT, *ends), 0)

    def at(array_BT, where):
        return jnp.take_along_axis(array_BT, where, axis=1)

    block = [begin_BT[:, ::Q] for begin_BT in begins]
    if window is not None:
        # The last queries that see a prompt's last keys are in its last branch.
        last_BT = jnp.maximum(at(begins[1], ends[0] - 1), ends[1])
        over_BT = place_BT + window - ends[1]
        over_BT = jnp.where(is_prompt_BT & (over_BT > 0), last_BT, ends[1]) + over_BT
        until_BT = jnp.minimum(until_BT, over_BT)
        segment_BIQ, position_BIQ = (a.reshape(len(a), -1, Q) for a in (segment_BT, position_BT))
        is_first_BIQ = segment_BIQ == segment_BIQ[:, :, :1]
        least = jnp.where(is_first_BIQ, position_BIQ, T).min(axis=2)
        end = at(ends[1], block[0])
        for x in range(2):
            hidden = least - window + 1 - at(position_BT, block[x])
            block[x] += jnp.maximum(hidden, 0) // split * split
        block = [jnp.where(block[0] < end, *block), block[1], least]
    return jnp.stack(block, axis=2), ends[1], until_BT, position_BT


def _bounds(until_BT, tile, window: int | None):
    """Finds the tiles of queries that see one of keys, from the first to the last: bounds_BJX.

    Those between the other two bounds see all of it.
    """
    Q, S, *_ = tile
    until_BJS = until_BT.reshape(len(until_BT), -1, S)
    begin_J, until_BJ = jnp.arange(0, until_BT.shape[1], S), until_BJS.min(axis=2)
    if window is not None:
        until_BJ = jnp.minimum(until_BJ, begin_J + window)
    last_BJ = pl.cdiv(until_BJS.max(axis=2), Q)
    whole_BJ = jnp.minimum(pl.cdiv(begin_J + S - 1, Q), last_BJ)
    bounds = begin_J // Q + 0 * last_BJ, whole_BJ, jnp.maximum(until_BJ // Q, whole_BJ), last_BJ
    return jnp.stack(bounds, axis=2)


def _walk(rows, keys_and_values, where, tile, visit, add_split, state, *, split, window):
    """Visits the tiles of keys that a block of queries sees, which begin where parts begin.

    where: row, block and key head. Tiles are visited in their order, split by split: state =
    add_split(state, run), where run(state) is state = visit(state, k_SH, v_SH, seen_QS) for the
    tiles of a split; seen_QS is None where the queries see all of it.
    """
    block_ref, end_ref, until_ref, position_ref = rows
    (b, i, h), (Q, S) = where, tile
    begin = i * Q

    def next_split(carry):
        place, state = carry
        end = end_ref[b, place]  # of the part
        until = until_ref[b, jnp.minimum(place + split, end) - 1]
        if window is None:
            whole = jnp.where(until >= begin + Q, jnp.minimum(end, begin + 1) - place, 0)
            first = lax.div(jnp.clip(whole, 0, split), S)
        else:
            position = window - 1 + position_ref[b, place]
            hidden = jnp.where(place < begin, block_ref[b, i, 2] - position, 0)
            first = lax.div(jnp.maximum(hidden, 0), S)

        def load(keys, **mask):
            return (triton.load(ref.at[b, keys, h, :], **mask) for ref in keys_and_values)

        def visit_whole(tile, state):
            return visit(state, *load(pl.ds(place + tile * S, S)), None)

        def visit_rest(tile, state):
            keys = pl.ds(place + tile * S, S)
            query_Q, key_S = begin + jnp.arange(Q), keys.start + jnp.arange(S)
            last_Q = jnp.where(query_Q < until, jnp.minimum(query_Q, end - 1), -1)
            seen_QS = key_S <= last_Q[:, None]
            if window is not None:
                first_Q = place + position_ref[b, pl.ds(begin, Q)] - position
                seen_QS &= key_S >= first_Q[:, None]
            return visit(state, *load(keys, mask=(key_S < end)[:, None], other=0.0), seen_QS)

        def run(state):
            if window is None:
                state = lax.fori_loop(0, first, visit_whole, state)
            rest = jnp.where(until > begin, jnp.minimum(end, begin + Q) - place, 0)
            return lax.fori_loop(first, pl.cdiv(jnp.minimum(rest, split), S), visit_rest, state)

        state = add_split(state, run)
        own = jnp.maximum(end, block_ref[b, i, 1])
        return jnp.where(place + split < end, place + split, own), state

    carry = block_ref[b, i, 0], state
    return lax.while_loop(lambda carry: carry[0] < begin + Q, next_split, carry)[1]


def _forward_kernel(rows, *refs, tile, interpret, split, window):
    q_ref, k_ref, v_ref, out_ref, norm_ref = refs
    # Later queries have more keys: they go first, lest the last programs be the longest.
    n, b, i = pl.program_id(0), pl.program_id(1), pl.num_programs(2) - 1 - pl.program_id(2)
    h = lax.div(n, q_ref.shape[2] // k_ref.shape[2])
    queries = pl.ds(i * tile[0], tile[0])
    q_QH = q_ref[b, queries, n, :]

    def visit(sums, k_SH, v_SH, seen_QS):
        x_QS = triton.dot(q_QH, k_SH.T)
        if seen_QS is not None:
            x_QS = jnp.where(seen_QS, x_QS, -jnp.inf)
        return triton.add_tile(sums, x_QS, v_SH, interpret=interpret)

    none = tiles.nothing(q_QH.shape[:1], q_QH.shape[1])
    sums = _walk(
        *(rows, (k_ref, v_ref), (b, i, h), tile, visit),
        *(lambda sums, run: tiles.add(sums, run(none)), none),
        split=split,
        window=window,
    )
    out_ref[b, queries, n, :] = tiles.attended(sums).astype(out_ref.dtype)
    norm_ref[b, n, queries] = sums.power + jnp.log2(jnp.where(sums.sum > 0, sums.sum, 1.0))


def _queries_kernel(rows, *refs, tile, interpret, split, window):
    q_ref, k_ref, v_ref, d_out_ref, norm_ref, dot_ref, d_q_ref = refs
    n, b, i = pl.program_id(0), pl.program_id(1), pl.num_programs(2) - 1 - pl.program_id(2)
    H = q_ref.shape[3]
    h = lax.div(n, q_ref.shape[2] // k_ref.shape[2])
    queries = pl.ds(i * tile[0], tile[0])
    q_QH, d_out_QH = q_ref[b, queries, n, :], d_out_ref[b, queries, n, :]
    norm_Q1, dot_Q1 = norm_ref[b, n, queries][:, None], dot_ref[b, n, queries][:, None]

    def visit(d_q_QH, k_SH, v_SH, seen_QS):
        x_QS = triton.dot(q_QH, k_SH.T)
        p_QS = triton.exp2(x_QS, tiles.scale(H), -norm_Q1, interpret=interpret)
        if seen_QS is not None:
            p_QS = jnp.where(seen_QS, p_QS, 0.0)
        d_x_QS = p_QS * (triton.dot(d_out_QH, v_SH.T) - dot_Q1)
        return d_q_QH + triton.dot(d_x_QS.astype(k_SH.dtype), k_SH)

    d_q_QH = _walk(
        *(rows, (k_ref, v_ref), (b, i, h), tile, visit),
        *(lambda d_q_QH, run: run(d_q_QH), jnp.zeros(q_QH.shape)),
        split=split,
        window=window,
    )
    d_q_ref[b, queries, n, :] = (d_q_QH * H**-0.5).astype(d_q_ref.dtype)


def _keys_kernel(bounds_ref, rows, *refs, tile, interpret, window):
    """Has keys first in what it multiplies, so that nothing is transposed but references."""
    q_ref, k_ref, v_ref, d_out_ref, norm_ref, dot_ref, d_k_ref, d_v_ref = refs
    part, b, j = (pl.program_id(axis) for axis in range(3))
    (Q, S), H = tile, q_ref.shape[3]
    group = q_ref.shape[2] // d_k_ref.shape[2]
    h = lax.div(part, d_k_ref.shape[2] // k_ref.shape[2])
    keys = pl.ds(j * S, S)
    k_SH, v_SH = k_ref[b, keys, h, :], v_ref[b, keys, h, :]
    first, whole, rest, last = (bounds_ref[b, j, x] for x in range(4))
    _, _, until_ref, position_ref = rows
    key_S1, until_S1 = j * S + jnp.arange(S)[:, None], until_ref[b, keys][:, None]
    if window is not None:
        position_S1 = position_ref[b, keys][:, None]

    def visit(index, state, whole_only):
        d_k_SH, d_v_SH = state
        count, g = lax.div(index, group), lax.rem(index, group)
        if whole_only:
            i = whole + count
        else:
            i = count + jnp.where(count < whole - first, first, rest - (whole - first))
        queries, n = pl.ds(i * Q, Q), part * group + g
        q_QH, d_out_QH = q_ref[b, queries, n, :], d_out_ref[b, queries, n, :]
        norm_1Q, dot_1Q = norm_ref[b, n, queries][None], dot_ref[b, n, queries][None]
        x_SQ = triton.dot(k_SH, q_QH.T)
        p_SQ = triton.exp2(x_SQ, tiles.scale(H), -norm_1Q, interpret=interpret)
        if not whole_only:
            query_1Q = queries.start + jnp.arange(Q)[None]
            seen_SQ = (key_S1 <= query_1Q) & (query_1Q < until_S1)
            if window is not None:
                seen_SQ &= position_ref[b, queries][None] - position_S1 < window
            p_SQ = jnp.where(seen_SQ, p_SQ, 0.0)
        d_x_SQ = p_SQ * (triton.dot(v_SH, d_out_QH.T) - dot_1Q)
        d_k_SH += triton.dot(d_x_SQ.astype(q_QH.dtype), q_QH)
        d_v_SH += triton.dot(p_SQ.astype(d_out_QH.dtype), d_out_QH)
        return d_k_SH, d_v_SH

    state = jnp.zeros(k_SH.shape), jnp.zeros(k_SH.shape)
    for whole_only, count in ((True, rest - whole), (False, whole - first + last - rest)):
        body = functools.partial(visit, whole_only=whole_only)
        state = lax.fori_loop(0, count * group, body, state)
    d_k_SH, d_v_SH = state
    d_k_ref[b, keys, part, :] = (d_k_SH * H**-0.5).astype(d_k_ref.dtype)
    d_v_ref[b, keys, part, :] = d_v_SH.astype(d_v_ref.dtype)
