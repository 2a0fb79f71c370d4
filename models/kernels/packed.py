"""Grouped-query attention inside packed rows, block by block, in memory linear in the row.

Axis letters beside the model's: C tokens of a block; Q query blocks and S key blocks of all rows;
W query blocks computed together; G = N / K query heads of a key/value head.

Of the pairs (query block, key block) only those are computed in which some token may look at
another. A query block's key blocks are visited one after the other with a running softmax (Milakov
& Gimelshein 2018, arXiv 1805.02867); the backward pass computes the weights again from the
softmax's normaliser (Dao et al. 2022, arXiv 2205.14135, Algorithm 4).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from models.kernels.xla import ATTENTION, MASKED, padded

BLOCK_TOKENS = 64
BLOCKS = 16  # query blocks computed together (W)


def packed_attention(
    q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT, position_BT=None, window: int | None = None
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
    out_BTNH = _attention(window, *(padded(array_BT, BLOCK_TOKENS) for array_BT in rows_BT))
    return out_BTNH[:, : segment_BT.shape[1]]


@struct.dataclass
class _Pairs:
    """Says which key blocks every query block visits, and in which order those are taken.

    segment_QC, branch_QC, index_QC: of each token, the last its place in the row; and position_QC,
    where there is a window. key_QS: the key blocks, those with something to see first, `count_Q` of
    them. order_IW: the query blocks, those with most first, W at a time; Q stands for none.
    """

    segment_QC: Any
    branch_QC: Any
    index_QC: Any
    key_QS: Any
    count_Q: Any
    order_IW: Any
    position_QC: Any = None
    window: int | None = struct.field(pytree_node=False, default=None)

    def seen(self, query_W, key_W, real_W):
        """Says what the tokens of query blocks see of one key block each: seen_WCS."""

        def both(array_QC):
            return array_QC[query_W][:, :, None], array_QC[key_W][:, None, :]

        (segment, of_key), (branch, of_branch) = both(self.segment_QC), both(self.branch_QC)
        index, of_index = both(self.index_QC)
        own = (segment == of_key) & ((of_branch == 0) | (of_branch == branch))
        if self.window is not None:
            position, of_position = both(self.position_QC)
            own &= position - of_position < self.window
        return own & (index >= of_index) & (segment > 0) & real_W[:, None, None]


def _pairs(segment_BT, branch_BT, position_BT=None, *, window: int | None = None) -> _Pairs:
    B, T = segment_BT.shape
    C = BLOCK_TOKENS
    S = T // C
    segment_BSC, branch_BSC = segment_BT.reshape(B, S, C), branch_BT.reshape(B, S, C)

    def ranges(number_BSC, counted_BSC):
        least_BS = jnp.where(counted_BSC, number_BSC, T + 1).min(axis=2)
        return least_BS, jnp.where(counted_BSC, number_BSC, -1).max(axis=2)

    def overlap(query, key):
        (low_BQ, high_BQ), (low_BS, high_BS) = query, key
        return (low_BQ[:, :, None] <= high_BS[:, None]) & (low_BS[:, None] <= high_BQ[:, :, None])

    used_BSC, prompt_BSC = segment_BSC > 0, branch_BSC == 0
    of_prompt = overlap(ranges(segment_BSC, used_BSC), ranges(segment_BSC, used_BSC & prompt_BSC))
    branches = ranges(branch_BSC, ~prompt_BSC)
    of_branch = overlap(branches, branches)
    if window is not None:
        position_BSC = position_BT.reshape(B, S, C)
        first_BQ, _ = ranges(position_BSC, used_BSC)
        for_prompt, for_branch = (
            first_BQ[:, :, None] - ranges(position_BSC, counted)[1][:, None] < window
            for counted in (used_BSC & prompt_BSC, ~prompt_BSC)
        )
        of_prompt, of_branch = of_prompt & for_prompt, of_branch & for_branch
    live_BQS = (of_prompt | of_branch) & jnp.tril(jnp.ones((S, S), bool))
    first_B11 = S * jnp.arange(B)[:, None, None]
    key_BQS = first_B11 + jnp.argsort(~live_BQS, axis=2, stable=True)
    count_Q = live_BQS.sum(axis=2).reshape(-1)
    order_Q = jnp.argsort(-count_Q, stable=True)
    W = min(BLOCKS, B * S)
    order_IW = jnp.pad(order_Q, (0, -(B * S) % W), constant_values=B * S).reshape(-1, W)
    return _Pairs(
        segment_QC=segment_BT.reshape(-1, C),
        branch_QC=branch_BT.reshape(-1, C),
        index_QC=jnp.tile(jnp.arange(T).reshape(S, C), (B, 1)),
        key_QS=key_BQS.reshape(-1, S),
        count_Q=count_Q,
        order_IW=order_IW,
        position_QC=None if window is None else position_BT.reshape(-1, C),
        window=window,
    )


def _queries(array_BTNH, K):
    """Cuts [B, T, N, H] into query blocks [Q, K, G, C, H]."""
    N, H = array_BTNH.shape[2:]
    return array_BTNH.reshape(-1, BLOCK_TOKENS, K, N // K, H).transpose(0, 2, 3, 1, 4)


def _keys(array_BTKH):
    """Cuts [B, T, K, H] into key blocks [S, K, C, H] of C tokens."""
    return array_BTKH.reshape(-1, BLOCK_TOKENS, *array_BTKH.shape[2:]).swapaxes(1, 2)


def _in_order(array_IW, pairs):
    place_Q = jnp.argsort(pairs.order_IW.reshape(-1))[: len(pairs.count_Q)]
    return array_IW.reshape(-1, *array_IW.shape[2:])[place_Q]


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(window, q_BTNH, k_BTKH, v_BTKH, *rows_BT):
    return _forward(window, q_BTNH, k_BTKH, v_BTKH, *rows_BT)[0]


def _forward(window, q_BTNH, k_BTKH, v_BTKH, *rows_BT):
    K, H = k_BTKH.shape[2:]
    pairs = _pairs(*rows_BT, window=window)
    q_QKGCH, k_QKHS, v_QKSH = _queries(q_BTNH, K), _keys(k_BTKH).swapaxes(2, 3), _keys(v_BTKH)

    def query_blocks(query_W):
        count_W = pairs.count_Q.at[query_W].get(mode="fill", fill_value=0)
        q_WKGCH = q_QKGCH.at[query_W].get(mode="clip")

        def visit(carry):
            i, max_WKGC, sum_WKGC, out_WKGCH = carry
            key_W = pairs.key_QS.at[query_W, i].get(mode="clip")
            seen_WCS = pairs.seen(query_W, key_W, i < count_W)
            score_WKGCS = _product("WKGCH,WKHS->WKGCS", q_WKGCH, k_QKHS[key_W]) * H**-0.5
            score_WKGCS = jnp.where(seen_WCS[:, None, None], score_WKGCS, MASKED)
            new_WKGC = jnp.maximum(max_WKGC, score_WKGCS.max(axis=-1))
            # Where nothing was seen so far, what is summed here has no weight later.
            weight_WKGCS = jnp.exp(score_WKGCS - new_WKGC[..., None])
            decay_WKGC = jnp.exp(max_WKGC - new_WKGC)
            weighted_WKGCH = _product(
                "WKGCS,WKSH->WKGCH", weight_WKGCS.astype(v_QKSH.dtype), v_QKSH[key_W]
            )
            sum_WKGC = sum_WKGC * decay_WKGC + weight_WKGCS.sum(axis=-1)
            return i + 1, new_WKGC, sum_WKGC, out_WKGCH * decay_WKGC[..., None] + weighted_WKGCH

        zero_WKGC = jnp.zeros(q_WKGCH.shape[:-1])
        start = (0, zero_WKGC + MASKED, zero_WKGC, jnp.zeros(q_WKGCH.shape))
        _, max_WKGC, sum_WKGC, out_WKGCH = jax.lax.while_loop(
            lambda carry: carry[0] < count_W.max(), visit, start
        )
        live_WKGC = max_WKGC > MASKED
        sum_WKGC = jnp.where(live_WKGC, sum_WKGC, 1.0)
        out_WKGCH = jnp.where(live_WKGC[..., None], out_WKGCH, 0.0) / sum_WKGC[..., None]
        return out_WKGCH.transpose(0, 3, 1, 2, 4).astype(v_BTKH.dtype), max_WKGC + jnp.log(sum_WKGC)

    out_IWCKGH, norm_IWKGC = jax.lax.map(query_blocks, pairs.order_IW)
    out_BTNH = checkpoint_name(_in_order(out_IWCKGH, pairs).reshape(q_BTNH.shape), ATTENTION)
    norm_QKGC = checkpoint_name(_in_order(norm_IWKGC, pairs), ATTENTION)
    return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, *rows_BT, out_BTNH, norm_QKGC)


def _backward(window, residuals, d_out_BTNH):
    """Has weights and scores with keys first: what is large is never transposed."""
    q_BTNH, k_BTKH, v_BTKH, *rows_BT, out_BTNH, norm_QKGC = residuals
    K, H = k_BTKH.shape[2:]
    pairs = _pairs(*rows_BT, window=window)
    q_QKGCH, d_out_QKGCH = _queries(q_BTNH, K), _queries(d_out_BTNH, K)
    k_QKSH, v_QKSH = _keys(k_BTKH), _keys(v_BTKH)
    k_QKHS = k_QKSH.swapaxes(2, 3)
    dot_BTN1 = jnp.sum(
        d_out_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32), axis=-1, keepdims=True
    )
    dot_QKGC = _queries(dot_BTN1, K)[..., 0]

    def query_blocks(carry, query_W):
        count_W = pairs.count_Q.at[query_W].get(mode="fill", fill_value=0)
        q_WKGCH, d_out_WKGCH, norm_WKGC, dot_WKGC = (
            array.at[query_W].get(mode="clip")
            for array in (q_QKGCH, d_out_QKGCH, norm_QKGC, dot_QKGC)
        )
        q_WKHGC, d_out_WKHGC = (jnp.moveaxis(array, 4, 2) for array in (q_WKGCH, d_out_WKGCH))

        def visit(carry):
            i, d_q_WKHGC, d_k_QKSH, d_v_QKSH = carry
            key_W = pairs.key_QS.at[query_W, i].get(mode="clip")
            seen_WSC = pairs.seen(query_W, key_W, i < count_W).swapaxes(1, 2)
            score_WKSGC = _product("WKSH,WKHGC->WKSGC", k_QKSH[key_W], q_WKHGC) * H**-0.5
            weight_WKSGC = jnp.exp(score_WKSGC - norm_WKGC[:, :, None])
            weight_WKSGC = jnp.where(seen_WSC[:, None, :, None], weight_WKSGC, 0.0)
            d_weight_WKSGC = _product("WKSH,WKHGC->WKSGC", v_QKSH[key_W], d_out_WKHGC)
            d_score_WKSGC = weight_WKSGC * (d_weight_WKSGC - dot_WKGC[:, :, None]) * H**-0.5
            d_score_WKSGC = d_score_WKSGC.astype(k_QKSH.dtype)
            weight_WKSGC = weight_WKSGC.astype(v_QKSH.dtype)
            d_v_WKSH = _product("WKSGC,WKGCH->WKSH", weight_WKSGC, d_out_WKGCH)
            d_k_WKSH = _product("WKSGC,WKGCH->WKSH", d_score_WKSGC, q_WKGCH)
            d_q_WKHGC += _product("WKHS,WKSGC->WKHGC", k_QKHS[key_W], d_score_WKSGC)
            d_k_QKSH, d_v_QKSH = d_k_QKSH.at[key_W].add(d_k_WKSH), d_v_QKSH.at[key_W].add(d_v_WKSH)
            return i + 1, d_q_WKHGC, d_k_QKSH, d_v_QKSH

        start = (0, jnp.zeros(q_WKHGC.shape), *carry)
        _, d_q_WKHGC, *carry = jax.lax.while_loop(
            lambda carry: carry[0] < count_W.max(), visit, start
        )
        return tuple(carry), d_q_WKHGC.transpose(0, 4, 1, 3, 2).astype(q_BTNH.dtype)

    zero_QKSH = jnp.zeros(k_QKSH.shape, jnp.float32)
    (d_k_QKSH, d_v_QKSH), d_q_IWCKGH = jax.lax.scan(
        query_blocks, (zero_QKSH, zero_QKSH), pairs.order_IW
    )
    d_q_BTNH = _in_order(d_q_IWCKGH, pairs).reshape(q_BTNH.shape)
    d_k_BTKH, d_v_BTKH = (
        d_QKSH.swapaxes(1, 2).reshape(k_BTKH.shape).astype(k_BTKH.dtype)
        for d_QKSH in (d_k_QKSH, d_v_QKSH)
    )
    return d_q_BTNH, d_k_BTKH, d_v_BTKH, *[None] * len(rows_BT)


_attention.defvjp(_forward, _backward)
