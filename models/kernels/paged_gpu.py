"""Decode attention over pools of key/value pages: Pallas kernels for GPU.

Axis letters: those of `paged_tpu`, but Q query heads of one key/value head, padded; W tokens of a
tile, F tiles of a page, M pages of a split.

This is flash-decoding (Dao et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html): a
slot's live pages, its prompt's and then its response's, are divided into splits of M pages, and a
program attends to one split for the query heads of one key/value head. It gives what `xla.combine`
calls a piece, and a second kernel adds up the pieces of a slot, after the tokens that are in no
page yet. Programs of splits behind a slot's last page end at once, so time follows the tokens that
are there. Splits have a fixed size and a slot's pieces are added up in order: a slot's bits depend
on its own tokens alone.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from models.kernels import triton
from models.kernels.xla import MASKED, accumulate, like, window_pages

SPLIT_TOKENS = 512  # of one head, 128 to 256 KiB of keys and values in bfloat16
TILE_TOKENS = 64
STAGES = 3  # of a loop: a page's number is read, then its tile, while another one is multiplied


def paged_attention(
    q_BNH,
    recent,
    recent_tokens_B,
    prompt_pool,
    pool,
    page_BX,
    prompt_tokens_B,
    tokens_B,
    *,
    window: int | None = None,
    interpret: bool,
):
    """Attends with a token a slot to the slot's closed pages and to its most recent tokens.

    Arguments and result are `paged_tpu.paged_attention`'s. A slot's numbers do not depend on other
    slots, on X or on which pages it has. The page ids of live pages have to be valid: they are not
    checked. Beside its arguments it holds a float32 out_BNH for each split of X pages. Raises
    ValueError (unless interpreted) where H or C is no power of two from 16 on.
    """
    B, N, H = q_BNH.shape
    _, K, C, _ = pool[1].shape
    heads, hidden_B = N // K, None
    if not interpret and any(size < triton.ROWS or size & (size - 1) for size in (H, C)):
        raise ValueError(
            f"head size {H} with pages of {C} tokens: the GPU's kernels need powers of two, 16 or "
            'more; set rollout.page_tokens to one, or model.kernels = "xla"'
        )
    if window is not None:
        page_BX, prompt_tokens_B, tokens_B, hidden_B = window_pages(
            page_BX, prompt_tokens_B, tokens_B, recent_tokens_B, window=window, page_tokens=C
        )
    pages = pages_per_split(C)
    splits = pl.cdiv(page_BX.shape[1], pages)
    tokens = (prompt_tokens_B, tokens_B)
    q_rows = q_BNH.reshape(B * N, H)

    def rows_of(count, *shape, dtype=jnp.float32):
        return like(q_BNH, (count * B * N, *shape), dtype)

    pieces = triton.call(
        functools.partial(_split_kernel, heads=heads, pages=pages),
        hidden_B,
        *tokens,
        page_BX,
        q_rows,
        *prompt_pool,
        *pool,
        grid=(K, B, splits),
        out_shape=[rows_of(splits, H), rows_of(splits), rows_of(splits)],
        name="paged_attention",
        interpret=interpret,
        warps=2 * q_BNH.dtype.itemsize,  # float32 would run out of registers with 4
        stages=STAGES if H * q_BNH.dtype.itemsize < 1024 else 1,  # of shared memory on small GPUs
    )
    k_BKHR, v_BKRH = recent
    missing = triton.padded(v_BKRH.shape[2]) - v_BKRH.shape[2]
    (out_rows,) = triton.call(
        functools.partial(_combine_kernel, heads=heads, pages=pages, page_tokens=C, window=window),
        *tokens,
        recent_tokens_B,
        q_rows,
        jnp.pad(k_BKHR, ((0, 0),) * 3 + ((0, missing),)),
        jnp.pad(v_BKRH, ((0, 0),) * 2 + ((0, missing), (0, 0))),
        *pieces,
        grid=(K, B),
        out_shape=[rows_of(1, H, dtype=q_BNH.dtype)],
        name="combine",
        interpret=interpret,
        stages=STAGES,
    )
    return out_rows.reshape(B, N, H)


def pages_per_split(page_tokens: int) -> int:
    """Counts the pages of a split; depends on the tokens of a page alone."""
    return max(1, SPLIT_TOKENS // page_tokens)


def _split_kernel(
    hidden_ref,
    prompt_tokens_ref,
    tokens_ref,
    page_ref,
    q_ref,
    k_prompts_ref,
    v_prompts_ref,
    k_responses_ref,
    v_responses_ref,
    out_ref,
    max_ref,
    sum_ref,
    *,
    heads: int,
    pages: int,
):
    """Attends to one split of a slot's pages, for the query heads of one key/value head."""
    h, b, split = (pl.program_id(axis) for axis in range(3))
    H, C = k_responses_ref.shape[2:]
    W = min(C, TILE_TOKENS)
    F = C // W
    prompt_tokens, tokens = prompt_tokens_ref[b], tokens_ref[b]
    prompt_pages, first = pl.cdiv(prompt_tokens, C), split * pages
    q_QH, is_head_Q = _queries(q_ref, b, h, heads=heads)
    token_W = jnp.arange(W)

    def attend(k_ref, v_ref, tokens, first, before, hidden, state):
        """Adds tiles of `pages` pages, of which the first is number `first` of its pool's.

        before: the slot's pages of other pools before this one's. hidden: how many of the pool's
        first tokens are not seen, if any may be.
        """

        def add_tile(tile, state):
            page = page_ref[b, before + lax.div(tile, F)]
            is_live_W = token_W < tokens - tile * W
            if hidden is not None:
                is_live_W &= token_W >= hidden - tile * W
            where = pl.ds(lax.rem(tile, F) * W, W)
            # No mask: it would make these loads single tokens, and masked scores do as well.
            x_QW = triton.dot(q_QH, k_ref[page, h, :, where]) * H**-0.5
            # What does not live may be anything, NaN included, and 0 * NaN is NaN.
            v_WH = triton.load(v_ref.at[page, h, where, :], mask=is_live_W[:, None], other=0.0)
            x_QW = jnp.where(is_live_W[None], x_QW, MASKED)
            return accumulate(state, x_QW, v_WH, triton.dot)

        begin, end = (jnp.maximum(first + i, 0) * F for i in (0, pages))
        return lax.fori_loop(begin, jnp.minimum(end, pl.cdiv(tokens, W)), add_tile, state)

    state = _no_tokens(q_QH)
    hidden = of_response = None
    if hidden_ref is not None:
        hidden = hidden_ref[b]
        of_response = hidden - prompt_tokens
    state = attend(k_prompts_ref, v_prompts_ref, prompt_tokens, first, 0, hidden, state)
    pool = (k_responses_ref, v_responses_ref, tokens)
    state = attend(*pool, first - prompt_pages, prompt_pages, of_response, state)

    @pl.when(first < prompt_pages + pl.cdiv(tokens, C))
    def _():
        where = _place(split * pl.num_programs(1) + b, h, heads=heads)
        max_Q1, sum_Q1, out_QH = state
        triton.store(out_ref.at[where, :], out_QH, mask=is_head_Q[:, None])
        triton.store(max_ref.at[where], max_Q1[:, 0], mask=is_head_Q)
        triton.store(sum_ref.at[where], sum_Q1[:, 0], mask=is_head_Q)


def _combine_kernel(
    prompt_tokens_ref,
    tokens_ref,
    recent_tokens_ref,
    q_ref,
    k_recent_ref,
    v_recent_ref,
    out_pieces_ref,
    max_ref,
    sum_ref,
    out_ref,
    *,
    heads: int,
    pages: int,
    page_tokens: int,
    window: int | None,
):
    """Attends to a slot's recent tokens and adds the pieces of its splits, one after the other."""
    h, b = (pl.program_id(axis) for axis in range(2))
    H, R = k_recent_ref.shape[2:]
    q_QH, is_head_Q = _queries(q_ref, b, h, heads=heads)
    x_QR = triton.dot(q_QH, k_recent_ref[b, h]) * H**-0.5
    is_live_R = jnp.arange(R) < recent_tokens_ref[b]
    if window is not None:
        is_live_R &= jnp.arange(R) >= recent_tokens_ref[b] - window
    x_QR = jnp.where(is_live_R[None], x_QR, MASKED)
    state = accumulate(_no_tokens(q_QH), x_QR, v_recent_ref[b, h], triton.dot)
    slot_pages = sum(pl.cdiv(ref[b], page_tokens) for ref in (prompt_tokens_ref, tokens_ref))

    def add_piece(split, state):
        max_Q1, sum_Q1, out_QH = state
        where = _place(split * pl.num_programs(1) + b, h, heads=heads)
        other_max_Q1 = triton.load(max_ref.at[where], mask=is_head_Q, other=MASKED)[:, None]
        other_sum_Q1 = triton.load(sum_ref.at[where], mask=is_head_Q, other=0.0)[:, None]
        other_QH = triton.load(out_pieces_ref.at[where, :], mask=is_head_Q[:, None], other=0.0)
        new_max_Q1 = jnp.maximum(max_Q1, other_max_Q1)
        decay_Q1, weight_Q1 = jnp.exp(max_Q1 - new_max_Q1), jnp.exp(other_max_Q1 - new_max_Q1)
        sum_Q1 = sum_Q1 * decay_Q1 + other_sum_Q1 * weight_Q1
        return new_max_Q1, sum_Q1, out_QH * decay_Q1 + other_QH * weight_Q1

    _, sum_Q1, out_QH = lax.fori_loop(0, pl.cdiv(slot_pages, pages), add_piece, state)
    out_QH = (out_QH / sum_Q1).astype(out_ref.dtype)
    triton.store(out_ref.at[_place(b, h, heads=heads), :], out_QH, mask=is_head_Q[:, None])


def _queries(q_ref, b, h, *, heads: int):
    """Loads the queries q_QH of a slot that read key/value head h, and which of Q there are."""
    is_head_Q = jnp.arange(triton.padded(heads)) < heads
    where = _place(b, h, heads=heads)
    return triton.load(q_ref.at[where, :], mask=is_head_Q[:, None], other=0.0), is_head_Q


def _place(row, h, *, heads: int):
    """Finds the query heads of a key/value head among all rows' heads, and some more to make Q."""
    return pl.ds((row * pl.num_programs(0) + h) * heads, triton.padded(heads))


def _no_tokens(q_QH):
    """Makes the state (max_Q1, sum_Q1, out_QH) of a running softmax before its first token."""
    Q, H = q_QH.shape
    return jnp.full((Q, 1), MASKED), jnp.zeros((Q, 1)), jnp.zeros((Q, H))
