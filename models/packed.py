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

from models.attention import ATTENTION, MASKED

BLOCK_TOKENS = 64
BLOCKS = 16  # query blocks computed together (W)


def packed_attention(q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT):
    """Attention of whole rows: out_BTNH in the values' dtype, zero for padding.

    Token t looks at the tokens s <= t of its segment that are of its branch or of branch 0, the
    prompt that the branches have in common. Numbers rise along a row; segment 0 is padding.
    """
    tokens = segment_BT.shape[1]
    missing = -tokens % BLOCK_TOKENS

    def pad(array):
        return jnp.pad(array, ((0, 0), (0, missing)) + ((0, 0),) * (array.ndim - 2))

    out_BTNH = _attention(*map(pad, (q_BTNH, k_BTKH, v_BTKH)), *map(pad, (segment_BT, branch_BT)))
    return out_BTNH[:, :tokens]


@struct.dataclass
class _Pairs:
    """Which key blocks every query block visits, and in which order query blocks are taken.

    segment_QC, branch_QC, index_QC: of each token, the last its place in the row. key_QS: the key
    blocks, those with something to see first, `count_Q` of them. order_IW: the query blocks, those
    with most first, W at a time; Q stands for none.
    """

    segment_QC: Any
    branch_QC: Any
    index_QC: Any
    key_QS: Any
    count_Q: Any
    order_IW: Any

    def mask(self, query_W, key_W, real_W):
        """mask_WCS of what the tokens of query blocks see of one key block each."""

        def both(array_QC):
            return array_QC[query_W][:, :, None], array_QC[key_W][:, None, :]

        (segment, of_key), (branch, of_branch) = both(self.segment_QC), both(self.branch_QC)
        index, of_index = both(self.index_QC)
        seen = (segment == of_key) & ((of_branch == 0) | (of_branch == branch))
        return seen & (index >= of_index) & (segment > 0) & real_W[:, None, None]


def _pairs(segment_BT, branch_BT) -> _Pairs:
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
    live_BQS = (of_prompt | overlap(branches, branches)) & jnp.tril(jnp.ones((S, S), bool))
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
    )


def _blocks(array_BT, *axes):
    """[B, T, ...] as [Q, C, *axes]."""
    return array_BT.reshape(-1, BLOCK_TOKENS, *axes)


def _in_order(array_IW, pairs):
    """What was computed for order_IW, by query block."""
    place_Q = jnp.argsort(pairs.order_IW.reshape(-1))[: len(pairs.count_Q)]
    return array_IW.reshape(-1, *array_IW.shape[2:])[place_Q]


def _scores(q_WCKGH, k_WSKH, mask_WCS):
    score_WKGCS = jnp.einsum(
        "WCKGH,WSKH->WKGCS", q_WCKGH, k_WSKH, preferred_element_type=jnp.float32
    )
    score_WKGCS = score_WKGCS * q_WCKGH.shape[-1] ** -0.5
    return jnp.where(mask_WCS[:, None, None], score_WKGCS, MASKED)


@jax.custom_vjp
def _attention(q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT):
    return _forward(q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT)[0]


def _forward(q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT):
    (_, _, N, H), K = q_BTNH.shape, k_BTKH.shape[2]
    pairs, split = _pairs(segment_BT, branch_BT), (K, N // K, H)
    q_QCKGH, k_QCKH, v_QCKH = _blocks(q_BTNH, *split), _blocks(k_BTKH, K, H), _blocks(v_BTKH, K, H)

    def query_blocks(query_W):
        count_W = pairs.count_Q.at[query_W].get(mode="fill", fill_value=0)
        q_WCKGH = q_QCKGH.at[query_W].get(mode="clip")

        def visit(carry):
            i, max_WKGC, sum_WKGC, out_WKGCH = carry
            key_W = pairs.key_QS.at[query_W, i].get(mode="clip")
            mask_WCS = pairs.mask(query_W, key_W, i < count_W)
            score_WKGCS = _scores(q_WCKGH, k_QCKH[key_W], mask_WCS)
            new_WKGC = jnp.maximum(max_WKGC, score_WKGCS.max(axis=-1))
            # Where nothing was seen so far, what is summed here has no weight later.
            weight_WKGCS = jnp.exp(score_WKGCS - new_WKGC[..., None])
            decay_WKGC = jnp.exp(max_WKGC - new_WKGC)
            seen_WKGCH = jnp.einsum(
                "WKGCS,WSKH->WKGCH",
                weight_WKGCS.astype(v_QCKH.dtype),
                v_QCKH[key_W],
                preferred_element_type=jnp.float32,
            )
            sum_WKGC = sum_WKGC * decay_WKGC + weight_WKGCS.sum(axis=-1)
            return i + 1, new_WKGC, sum_WKGC, out_WKGCH * decay_WKGC[..., None] + seen_WKGCH

        zero_WKGC = jnp.zeros((len(query_W), *split[:2], BLOCK_TOKENS))
        start = (0, zero_WKGC + MASKED, zero_WKGC, jnp.zeros((*zero_WKGC.shape, H)))
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
    return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT, out_BTNH, norm_QKGC)


def _backward(residuals, d_out_BTNH):
    q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT, out_BTNH, norm_QKGC = residuals
    (_, _, N, H), K = q_BTNH.shape, k_BTKH.shape[2]
    pairs, split = _pairs(segment_BT, branch_BT), (K, N // K, H)
    q_QCKGH, k_QCKH, v_QCKH = _blocks(q_BTNH, *split), _blocks(k_BTKH, K, H), _blocks(v_BTKH, K, H)
    d_out_QCKGH = _blocks(d_out_BTNH, *split)
    dot_BTN = jnp.sum(d_out_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32), axis=-1)
    dot_QKGC = _blocks(dot_BTN, *split[:2]).transpose(0, 2, 3, 1)

    def query_blocks(carry, query_W):
        count_W = pairs.count_Q.at[query_W].get(mode="fill", fill_value=0)
        q_WCKGH, d_out_WCKGH, norm_WKGC, dot_WKGC = (
            array.at[query_W].get(mode="clip")
            for array in (q_QCKGH, d_out_QCKGH, norm_QKGC, dot_QKGC)
        )
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

        def visit(carry):
            i, d_q_WCKGH, d_k_QCKH, d_v_QCKH = carry
            key_W = pairs.key_QS.at[query_W, i].get(mode="clip")
            mask_WCS = pairs.mask(query_W, key_W, i < count_W)
            k_WSKH, v_WSKH = k_QCKH[key_W], v_QCKH[key_W]
            score_WKGCS = _scores(q_WCKGH, k_WSKH, mask_WCS)
            weight_WKGCS = jnp.exp(score_WKGCS - norm_WKGC[..., None])
            weight_WKGCS = jnp.where(mask_WCS[:, None, None], weight_WKGCS, 0.0)
            d_weight_WKGCS = product("WCKGH,WSKH->WKGCS", d_out_WCKGH, v_WSKH)
            d_score_WKGCS = weight_WKGCS * (d_weight_WKGCS - dot_WKGC[..., None]) * H**-0.5
            d_score_WKGCS = d_score_WKGCS.astype(k_WSKH.dtype)
            weight_WKGCS = weight_WKGCS.astype(v_WSKH.dtype)
            d_v_WSKH = product("WKGCS,WCKGH->WSKH", weight_WKGCS, d_out_WCKGH)
            d_k_WSKH = product("WKGCS,WCKGH->WSKH", d_score_WKGCS, q_WCKGH)
            d_q_WCKGH += product("WKGCS,WSKH->WCKGH", d_score_WKGCS, k_WSKH)
            return (
                i + 1,
                d_q_WCKGH,
                d_k_QCKH.at[key_W].add(d_k_WSKH),
                d_v_QCKH.at[key_W].add(d_v_WSKH),
            )

        start = (0, jnp.zeros(q_WCKGH.shape), *carry)
        _, d_q_WCKGH, *carry = jax.lax.while_loop(
            lambda carry: carry[0] < count_W.max(), visit, start
        )
        return tuple(carry), d_q_WCKGH.astype(q_BTNH.dtype)

    zero_QCKH = jnp.zeros(k_QCKH.shape, jnp.float32)
    (d_k_QCKH, d_v_QCKH), d_q_IWCKGH = jax.lax.scan(
        query_blocks, (zero_QCKH, zero_QCKH), pairs.order_IW
    )
    d_q_BTNH = _in_order(d_q_IWCKGH, pairs).reshape(q_BTNH.shape)
    d_k_BTKH, d_v_BTKH = (
        d.reshape(k_BTKH.shape).astype(k_BTKH.dtype) for d in (d_k_QCKH, d_v_QCKH)
    )
    return d_q_BTNH, d_k_BTKH, d_v_BTKH, None, None


_attention.defvjp(_forward, _backward)
