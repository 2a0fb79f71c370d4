"""Grouped-query attention inside packed rows, tile by tile, in memory linear in the row.

Axis letters beside the model's: C tokens of a tile of keys; M queries of a block, of all G = N / K
heads of a key/value head; Q query blocks of all rows; W query blocks computed together; Z tokens of
all rows.

Tiles of keys begin where a prompt or a response begins (`tiles`), wherever that is in the row. A
query block visits those tiles alone in which some query may look at a key, one after the other
(Milakov & Gimelshein 2018, arXiv 1805.02867). The backward pass computes the weights again from the
softmax's normaliser (Dao et al. 2022, arXiv 2205.14135, Algorithm 4).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from models.kernels import tiles
from models.kernels.xla import ATTENTION

BLOCK_TOKENS = 64  # of queries
BLOCKS = 16  # query blocks computed together (W)
TILE_TOKENS = 64


def packed_attention(
    q_BTNH,
    k_BTKH,
    v_BTKH,
    segment_BT,
    branch_BT,
    position_BT=None,
    window: int | None = None,
    *,
    tile_tokens: int = TILE_TOKENS,
):
    """Attends inside whole rows: out_BTNH in the values' dtype, zero for padding.

    Token t looks at the tokens s <= t of its segment that are of its branch or of branch 0, the
    prompt that the branches have in common. Numbers rise along a row; segment 0 is padding. With a
    window it looks at those alone whose position is less than `window` before its own; position_BT,
    each token's place in its sequence, is read only then.
    """
    rows_BT = (q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT)
    if window is not None:
        rows_BT = (*rows_BT, position_BT)
    rows_BT = (tiles.padded(array_BT, BLOCK_TOKENS, axis=1) for array_BT in rows_BT)
    return _attention(window, tile_tokens, *rows_BT)[:, : segment_BT.shape[1]]


@struct.dataclass
class _Visits:
    """Says which tiles every query block visits, and which keys a query sees.

    of_Z: each token's numbers, padded by a tile: its segment, branch, part (a prompt or a
    response), and position where there is a window. next_QT: the place in the row of the first tile
    to visit from each place on, T for none; count_Q: how many there are. order_IW: the query
    blocks, those with most first, W at a time; Q stands for none.
    """

    of_Z: dict[str, Any]
    next_QT: Any
    count_Q: Any
    order_IW: Any
    window: int | None = struct.field(pytree_node=False)
    tile_tokens: int = struct.field(pytree_node=False)

    def start(self, query_W, place_W):
        """Returns where tiles begin among the tokens of all rows [W]."""
        T = self.next_QT.shape[1] - 1
        return query_W * BLOCK_TOKENS // T * T + place_W

    def seen(self, query_W, place_W):
        """Says what the tokens of query blocks see of one tile each: seen_WTC.

        Nothing of one that begins behind their row.
        """
        first_W1 = self.start(query_W, place_W)[:, None]
        query_WT = query_W[:, None] * BLOCK_TOKENS + jnp.arange(BLOCK_TOKENS)
        key_WC = first_W1 + jnp.arange(self.tile_tokens)

        def at(name, token_WX):
            return self.of_Z[name].at[token_WX].get(mode="clip")

        tile_branch_W1 = at("branch", first_W1)
        reads_WT = at("segment", query_WT) == at("segment", first_W1)
        reads_WT &= (tile_branch_W1 == 0) | (at("branch", query_WT) == tile_branch_W1)
        is_tile_WC = at("part", key_WC) == at("part", first_W1)
        seen_WTC = reads_WT[:, :, None] & is_tile_WC[:, None]
        seen_WTC &= query_WT[:, :, None] >= key_WC[:, None]
        if self.window is not None:
            position_WT, key_position_WC = at("position", query_WT), at("position", key_WC)
            seen_WTC &= position_WT[:, :, None] - key_position_WC[:, None] < self.window
        return seen_WTC


def _visits(segment_BT, branch_BT, position_BT=None, *, window, tile_tokens: int) -> _Visits:
    B, T = segment_BT.shape
    C, S = tile_tokens, T // BLOCK_TOKENS
    place_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
    is_first_BT = (jnp.diff(segment_BT, axis=1, prepend=-1) != 0) | (
        jnp.diff(branch_BT, axis=1, prepend=-1) != 0
    )
    begin_BT = jax.lax.cummax(jnp.where(is_first_BT, place_BT, 0), axis=1)
    is_tile_BT = ((place_BT - begin_BT) % C == 0) & (segment_BT > 0)

    def of_blocks(number_BT, counted_BT):
        """Returns the least and the largest number of each block's counted tokens [B, S, 1]."""
        number_BSC, counted_BSC = (a.reshape(B, S, BLOCK_TOKENS) for a in (number_BT, counted_BT))
        least = jnp.where(counted_BSC, number_BSC, jnp.iinfo(jnp.int32).max)
        largest = jnp.where(counted_BSC, number_BSC, -1)
        return least.min(axis=2, keepdims=True), largest.max(axis=2, keepdims=True)

    def among(number_BT, counted_BT):
        least_BS1, largest_BS1 = of_blocks(number_BT, counted_BT)
        return (least_BS1 <= number_BT[:, None]) & (number_BT[:, None] <= largest_BS1)

    is_prompt_BT, is_used_BT = branch_BT == 0, segment_BT > 0
    visited_BST = jnp.where(
        is_prompt_BT[:, None], among(segment_BT, is_used_BT), among(branch_BT, ~is_prompt_BT)
    )
    last_S1 = (jnp.arange(S) * BLOCK_TOKENS + BLOCK_TOKENS - 1)[:, None]
    visited_BST &= is_tile_BT[:, None] & (place_BT[:, None] <= last_S1)
    of_BT = {"segment": segment_BT, "branch": branch_BT}
    of_BT["part"] = jnp.arange(B)[:, None] * T + begin_BT
    if window is not None:
        of_BT["position"] = position_BT
        first_BS1, _ = of_blocks(position_BT, is_used_BT)
        visited_BST &= first_BS1 - (position_BT[:, None] + C - 1) < window
    next_BST = jax.lax.cummin(jnp.where(visited_BST, place_BT[:, None], T), axis=2, reverse=True)
    count_Q = visited_BST.sum(axis=2).reshape(-1)
    W = min(BLOCKS, B * S)
    order_Q = jnp.pad(jnp.argsort(-count_Q, stable=True), (0, -(B * S) % W), constant_values=B * S)
    return _Visits(
        of_Z={name: jnp.pad(a_BT.reshape(-1), (0, C)) for name, a_BT in of_BT.items()},
        next_QT=jnp.pad(next_BST.reshape(B * S, T), ((0, 0), (0, 1)), constant_values=T),
        count_Q=count_Q,
        order_IW=order_Q.reshape(-1, W),
        window=window,
        tile_tokens=C,
    )


def _queries(array_BTNH, K):
    """Cuts [B, T, N, H] into query blocks [Q, K, M, H]."""
    N, H = array_BTNH.shape[2:]
    array = array_BTNH.reshape(-1, BLOCK_TOKENS, K, N // K, H).transpose(0, 2, 3, 1, 4)
    return array.reshape(len(array), K, -1, H)


def _rows(array_QKMH, shape):
    """Undoes `_queries`; shape: (B, T, N, H)."""
    Q, K, _, H = array_QKMH.shape
    return array_QKMH.reshape(Q, K, -1, BLOCK_TOKENS, H).transpose(0, 3, 1, 2, 4).reshape(shape)


def _keys(array_BTKH, C: int):
    """Lists the tokens of all rows, with room for a tile behind: [K, Z + C, H]."""
    array_ZKH = array_BTKH.reshape(-1, *array_BTKH.shape[2:])
    return jnp.pad(array_ZKH, ((0, C), (0, 0), (0, 0))).swapaxes(0, 1)


def _tiles_at(array_KZH, start_W, C: int):
    """Takes the tiles that begin at some places: [W, K, C, H]."""
    return jax.vmap(lambda z: jax.lax.dynamic_slice_in_dim(array_KZH, z, C, axis=1))(start_W)


def _add_tiles(array_KZH, start_W, new_WKCH):
    """Adds to the tiles that begin at some places."""
    places = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2, 3), inserted_window_dims=(), scatter_dims_to_operand_dims=(1,)
    )
    return jax.lax.scatter_add(array_KZH, start_W[:, None], new_WKCH, places)


def _in_order(array_IW, visits: _Visits):
    place_Q = jnp.argsort(visits.order_IW.reshape(-1))[: len(visits.count_Q)]
    return array_IW.reshape(-1, *array_IW.shape[2:])[place_Q]


def _walk(visits: _Visits, query_W, visit, state):
    """Visits the tiles of query blocks in order: state = visit(state, start_W, seen_WTC)."""
    T = visits.next_QT.shape[1] - 1
    is_real_W = query_W < len(visits.count_Q)
    block_W = jnp.where(is_real_W, query_W, 0)

    def step(carry):
        place_W, *state = carry
        seen_WTC = visits.seen(block_W, place_W)
        state = visit(state, visits.start(block_W, place_W), seen_WTC)
        after_W = jnp.minimum(place_W + 1, T)
        return visits.next_QT[block_W, after_W], *state

    first_W = jnp.where(is_real_W, visits.next_QT[block_W, 0], T)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[0] < T), step, (first_W, *state))[1:]


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(window, tile_tokens, q_BTNH, k_BTKH, v_BTKH, *rows_BT):
    return _forward(window, tile_tokens, q_BTNH, k_BTKH, v_BTKH, *rows_BT)[0]


def _forward(window, tile_tokens, q_BTNH, k_BTKH, v_BTKH, *rows_BT):
    K, H = k_BTKH.shape[2:]
    visits = _visits(*rows_BT, window=window, tile_tokens=tile_tokens)
    q_QKMH = _queries(tiles.scaled(q_BTNH), K)
    k_KZH, v_KZH = _keys(k_BTKH, tile_tokens), _keys(v_BTKH, tile_tokens)

    def query_blocks(query_W):
        q_WKMH = q_QKMH.at[query_W].get(mode="clip")
        W, _, M, _ = q_WKMH.shape

        def visit(sums, start_W, seen_WTC):
            seen_WKMC = jnp.tile(seen_WTC[:, None], (1, 1, M // BLOCK_TOKENS, 1))
            k_WKCH, v_WKCH = (_tiles_at(a, start_W, tile_tokens) for a in (k_KZH, v_KZH))
            part = tiles.tile(q_WKMH, k_WKCH.swapaxes(2, 3), v_WKCH, seen_WKMC)
            return tiles.add(tiles.Sums(*sums), part)

        sums = tiles.Sums(*_walk(visits, query_W, visit, tiles.nothing((W, K, M), H)))
        norm_WKM = sums.power * math.log(2) + jnp.log(jnp.where(sums.sum > 0, sums.sum, 1.0))
        return tiles.attended(sums).astype(v_BTKH.dtype), norm_WKM

    out_IWKMH, norm_IWKM = jax.lax.map(query_blocks, visits.order_IW)
    out_BTNH = checkpoint_name(_rows(_in_order(out_IWKMH, visits), q_BTNH.shape), ATTENTION)
    norm_QKM = checkpoint_name(_in_order(norm_IWKM, visits), ATTENTION)
    return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, *rows_BT, out_BTNH, norm_QKM)


def _backward(window, tile_tokens, residuals, d_out_BTNH):
    """Has weights and scores with keys first: what is large is never transposed."""
    q_BTNH, k_BTKH, v_BTKH, *rows_BT, out_BTNH, norm_QKM = residuals
    K, H = k_BTKH.shape[2:]
    visits = _visits(*rows_BT, window=window, tile_tokens=tile_tokens)
    dot_BTN1 = jnp.sum(
        d_out_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32), axis=-1, keepdims=True
    )
    q_QKMH, d_out_QKMH, dot_QKM1 = (_queries(a, K) for a in (q_BTNH, d_out_BTNH, dot_BTN1))
    of_queries = q_QKMH, d_out_QKMH, norm_QKM, dot_QKM1[..., 0]
    k_KZH, v_KZH = _keys(k_BTKH, tile_tokens), _keys(v_BTKH, tile_tokens)

    def query_blocks(carry, query_W):
        q_WKMH, d_out_WKMH, norm_WKM, dot_WKM = (a.at[query_W].get(mode="clip") for a in of_queries)
        q_WKHM, d_out_WKHM = q_WKMH.swapaxes(2, 3), d_out_WKMH.swapaxes(2, 3)
        heads = q_WKMH.shape[2] // BLOCK_TOKENS

        def visit(state, start_W, seen_WTC):
            d_q_WKHM, d_k_KZH, d_v_KZH = state
            seen_WKCM = jnp.tile(seen_WTC.swapaxes(1, 2)[:, None], (1, 1, 1, heads))
            k_WKCH, v_WKCH = (_tiles_at(a, start_W, tile_tokens) for a in (k_KZH, v_KZH))
            score_WKCM = _product("WKCH,WKHM->WKCM", k_WKCH, q_WKHM) * H**-0.5
            weight_WKCM = jnp.exp(score_WKCM - norm_WKM[:, :, None])
            weight_WKCM = jnp.where(seen_WKCM, weight_WKCM, 0.0)
            d_weight_WKCM = _product("WKCH,WKHM->WKCM", v_WKCH, d_out_WKHM)
            d_score_WKCM = weight_WKCM * (d_weight_WKCM - dot_WKM[:, :, None]) * H**-0.5
            d_score_WKCM = d_score_WKCM.astype(k_KZH.dtype)
            d_v_WKCH = _product("WKCM,WKMH->WKCH", weight_WKCM.astype(v_KZH.dtype), d_out_WKMH)
            d_k_WKCH = _product("WKCM,WKMH->WKCH", d_score_WKCM, q_WKMH)
            d_q_WKHM += _product("WKCH,WKCM->WKHM", k_WKCH, d_score_WKCM)
            return (
                d_q_WKHM,
                _add_tiles(d_k_KZH, start_W, d_k_WKCH),
                _add_tiles(d_v_KZH, start_W, d_v_WKCH),
            )

        d_q_WKHM, *carry = _walk(visits, query_W, visit, (jnp.zeros(q_WKHM.shape), *carry))
        return tuple(carry), d_q_WKHM.swapaxes(2, 3).astype(q_BTNH.dtype)

    zero_KZH = jnp.zeros(k_KZH.shape, jnp.float32)
    (d_k_KZH, d_v_KZH), d_q_IWKMH = jax.lax.scan(
        query_blocks, (zero_KZH, zero_KZH), visits.order_IW
    )
    d_q_BTNH = _rows(_in_order(d_q_IWKMH, visits), q_BTNH.shape)
    d_k_BTKH, d_v_BTKH = (
        d_KZH.swapaxes(0, 1)[:-tile_tokens].reshape(k_BTKH.shape).astype(k_BTKH.dtype)
        for d_KZH in (d_k_KZH, d_v_KZH)
    )
    return d_q_BTNH, d_k_BTKH, d_v_BTKH, *[None] * len(rows_BT)


_attention.defvjp(_forward, _backward)
