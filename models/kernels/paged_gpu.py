"""Decode attention over pools of key/value pages: Pallas kernels for GPU.

Axis letters: those of `paged_tpu`, but Q query heads of one key/value head, padded; W tokens of a
tile.

This is flash-decoding (Dao et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html): a
program attends to one split of a slot's prompt or response, for the query heads of one key/value
head, and a second kernel adds the splits up, in `tiles`' order: as `flash_gpu` does in rows. Tokens
that are in no page yet are put in the tile of their place. Programs of splits behind a slot's last
page end at once, so time follows the tokens that are there, and a slot's bits depend on these
alone.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from models.kernels import flash_gpu, tiles, triton
from models.kernels.xla import like

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

    Arguments and result are `paged_tpu.paged_attention`'s; the recent tokens are of one page. A
    slot's numbers do not depend on other slots, on X or on which pages it has. The page ids of live
    pages have to be valid: they are not checked. Beside its arguments it holds a float32 out_BNH
    for each split of X pages. Raises ValueError (unless interpreted) where H or C is no power of
    two from 16 on.
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
        hidden_B = jnp.maximum(prompt_tokens_B + tokens_B + recent_tokens_B - window, 0)
    split = triton.split_tokens(C)
    splits = pl.cdiv(page_BX.shape[1] * C, split) + 1  # the last of the prompt may be a part
    slots = (hidden_B, prompt_tokens_B, tokens_B, page_BX)
    q_rows = q_BNH.reshape(B * N, H)
    warps = 2 * q_BNH.dtype.itemsize  # float32 would run out of registers with 4
    sizes = {"heads": heads, "split": split, "tile": flash_gpu.tile_tokens(q_BNH, C)}

    def rows_of(count, *shape, dtype=jnp.float32):
        return like(q_BNH, (count * B * N, *shape), dtype)

    pieces = triton.call(
        functools.partial(_split_kernel, **sizes, interpret=interpret),
        *(slots, q_rows, prompt_pool, pool),
        grid=(K, B, splits),
        out_shape=[rows_of(splits, H), rows_of(splits), rows_of(splits)],
        name="paged_attention",
        interpret=interpret,
        warps=warps,
        stages=STAGES if H * q_BNH.dtype.itemsize < 1024 else 1,  # of shared memory on small GPUs
    )
    (out_rows,) = triton.call(
        functools.partial(_combine_kernel, **sizes, interpret=interpret),
        *(slots, recent_tokens_B, q_rows, recent, pool, *pieces),
        grid=(K, B),
        out_shape=[rows_of(1, H, dtype=q_BNH.dtype)],
        name="combine",
        interpret=interpret,
        warps=warps,
        stages=STAGES if H < 256 else 1,
    )
    return out_rows.reshape(B, N, H)


def _split_kernel(slots, q_ref, prompt_pool, pool, *pieces, heads, split, tile, interpret):
    """Attends to one split of a slot's pages, for the query heads of one key/value head."""
    h, b, s = (pl.program_id(axis) for axis in range(3))
    hidden_ref, prompt_tokens_ref, tokens_ref, page_ref = slots
    C, H = pool[1].shape[2:]
    prompt_tokens, tokens = prompt_tokens_ref[b], lax.div(tokens_ref[b], tile) * tile
    prompt_splits = pl.cdiv(prompt_tokens, split)
    q_QH, is_head_Q = _queries(q_ref, b, h, heads=heads)

    def attend(pool, tokens, s, before, hidden, sums):
        """Adds the tiles of split s of a prompt or a response.

        before: the slot's pages before its first. hidden: how many of its first tokens are not
        seen, if any may be.
        """

        k_ref, v_ref = pool

        def add_tile(t, sums):
            page, where = _place_in_pages(t, C, tile)
            page = page_ref[b, before + page]
            token_W = t * tile + jnp.arange(tile)
            is_live_W = token_W < tokens
            if hidden is not None:
                is_live_W &= token_W >= hidden
            # No mask: it would make these loads single tokens, and masked scores do as well.
            x_QW = triton.dot(q_QH, k_ref[page, h, :, where])
            # What does not live may be anything, NaN included, and 0 * NaN is NaN.
            v_WH = triton.load(v_ref.at[page, h, where, :], mask=is_live_W[:, None], other=0.0)
            x_QW = jnp.where(is_live_W[None], x_QW, -jnp.inf)
            return triton.add_tile(sums, x_QW, v_WH, interpret=interpret)

        begin, end = jnp.maximum(s, 0) * split, jnp.minimum((s + 1) * split, tokens)
        if hidden is not None:
            begin = jnp.maximum(begin, hidden)
        return lax.fori_loop(lax.div(begin, tile), pl.cdiv(end, tile), add_tile, sums)

    sums = tiles.nothing(q_QH.shape[:1], H)
    hidden = of_response = None
    if hidden_ref is not None:
        hidden, of_response = hidden_ref[b], hidden_ref[b] - prompt_tokens
    sums = attend(prompt_pool, prompt_tokens, s, 0, hidden, sums)
    prompt_pages = pl.cdiv(prompt_tokens, C)
    sums = attend(pool, tokens, s - prompt_splits, prompt_pages, of_response, sums)

    @pl.when(s < prompt_splits + pl.cdiv(tokens, split))
    def _():
        where = _place(s * pl.num_programs(1) + b, h, heads=heads)
        out_ref, *others = pieces
        triton.store(out_ref.at[where, :], sums.out, mask=is_head_Q[:, None])
        for ref, value_Q in zip(others, sums[1:], strict=True):
            triton.store(ref.at[where], value_Q, mask=is_head_Q)


def _combine_kernel(
    slots, recent_tokens_ref, q_ref, recent, pool, *refs, heads, split, tile, interpret
):
    """Adds the pieces of a slot's splits in order; the last has its recent tokens, too."""
    h, b = (pl.program_id(axis) for axis in range(2))
    hidden_ref, prompt_tokens_ref, tokens_ref, page_ref = slots
    (k_recent_ref, v_recent_ref), (k_ref, v_ref), (*pieces, out_ref) = recent, pool, refs
    H, C = k_ref.shape[2:]
    q_QH, is_head_Q = _queries(q_ref, b, h, heads=heads)
    prompt_tokens, tokens = prompt_tokens_ref[b], tokens_ref[b]
    prompt_splits = pl.cdiv(prompt_tokens, split)
    end = tokens + recent_tokens_ref[b]
    hidden = 0 if hidden_ref is None else hidden_ref[b]
    of_response = jnp.maximum(hidden - prompt_tokens, 0)

    def piece(s, is_there=True):
        where, mask = _place(s * pl.num_programs(1) + b, h, heads=heads), is_head_Q & is_there
        out_ref, sum_ref, power_ref = pieces
        return tiles.Sums(
            triton.load(out_ref.at[where, :], mask=mask[:, None], other=0.0),
            triton.load(sum_ref.at[where], mask=mask, other=0.0),
            triton.load(power_ref.at[where], mask=mask, other=tiles.MASKED),
        )

    def add_tile(t, sums):
        page, where = _place_in_pages(t, C, tile)
        token_W = t * tile + jnp.arange(tile)
        is_closed_W, is_live_W = token_W < tokens, (token_W < end) & (token_W >= of_response)
        page = page_ref[b, jnp.where(t * tile < tokens, pl.cdiv(prompt_tokens, C) + page, 0)]
        recent_W = jnp.clip(token_W - tokens, 0, k_recent_ref.shape[3] - 1)
        head_H = jnp.arange(H)
        x_QW = jnp.where(
            is_closed_W[None],
            triton.dot(q_QH, k_ref[page, h, :, where]),
            triton.dot(q_QH, k_recent_ref[b, h, head_H[:, None], recent_W[None]]),
        )
        v_WH = jnp.where(
            is_closed_W[:, None],
            v_ref[page, h, where, :],
            v_recent_ref[b, h, recent_W[:, None], head_H[None]],
        )
        x_QW = jnp.where(is_live_W[None], x_QW, -jnp.inf)
        v_WH = jnp.where(is_live_W[:, None], v_WH, 0)
        return triton.add_tile(sums, x_QW, v_WH, interpret=interpret)

    def add_piece(s, sums):
        return tiles.add(sums, piece(s))

    nothing = tiles.nothing(q_QH.shape[:1], H)
    sums = lax.fori_loop(lax.div(hidden, split), prompt_splits, add_piece, nothing)
    first, last = (lax.div(n, split) + prompt_splits for n in (of_response, tokens))
    sums = lax.fori_loop(first, last, add_piece, sums)
    is_there = lax.rem(tokens, split) >= tile
    open_tiles = lax.div(jnp.maximum(tokens, of_response), tile), pl.cdiv(end, tile)
    last_sums = lax.fori_loop(*open_tiles, add_tile, piece(last, is_there))
    out_QH = tiles.attended(tiles.add(sums, last_sums)).astype(out_ref.dtype)
    triton.store(out_ref.at[_place(b, h, heads=heads), :], out_QH, mask=is_head_Q[:, None])


def _place_in_pages(t, page_tokens: int, tile: int):
    """Finds where tile t of a prompt or a response lies: (page, tokens of it)."""
    count = page_tokens // tile
    return lax.div(t, count), pl.ds(lax.rem(t, count) * tile, tile)


def _queries(q_ref, b, h, *, heads: int):
    """Loads the queries q_QH of a slot that read key/value head h, and which of Q there are."""
    is_head_Q = jnp.arange(triton.padded(heads)) < heads
    where = _place(b, h, heads=heads)
    return triton.load(q_ref.at[where, :], mask=is_head_Q[:, None], other=0.0), is_head_Q


def _place(row, h, *, heads: int):
    """Finds the query heads of a key/value head among all rows' heads, and some more to make Q."""
    return pl.ds((row * pl.num_programs(0) + h) * heads, triton.padded(heads))
