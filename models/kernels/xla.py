"""Grouped-query attention in plain XLA: whole sequences, and one new token over a paged cache.

Axis letters beside the model's: B decoding slots, C tokens of a page, U pages of prompts, P pages
of responses, I and J a slot's pages of either, R readers of a page, E pieces, X tokens of an open
page. Cached keys are stored transposed, with the tokens last, which measured fastest. Scores and
softmax are float32; probabilities are cast to the values' dtype before their product. A page is a
tile (`tiles`): what a slot gets has the bits that the learner's rows have.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.kernels import tiles
from models.kernels.tiles import MASKED

UNROLLED = 16  # pieces of a slot that are added up in one operation
ATTENTION = "attention"  # the name of what attention over rows gives, for models.transformer.REMAT


def attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    """Computes scaled dot-product attention of whole sequences (Vaswani et al. 2017, Eq. 1).

    Query head n reads key/value head n // (N / K) (Ainslie et al. 2023, arXiv 2305.13245).
    `mask_BTS` is True where query t may look at key s. Returns out_BTNH in the values' dtype.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    score_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32
    )
    score_BKGTS = jnp.where(mask_BTS[:, None, None], score_BKGTS * H**-0.5, MASKED)
    prob_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", prob_BKGTS, v_BSKH).reshape(B, T, N, H)


class PageTable(NamedTuple):
    """Lists the pages that each of B decoding slots reads, in order. int32; no others are read.

    prompt_BI: pages of its prompt, which up to R slots of the group read, this one as reader
    `reader_B`; response_BJ: pages of its own. prompt_tokens_B, response_tokens_B: tokens in them.
    """

    prompt_BI: jax.Array
    response_BJ: jax.Array
    prompt_tokens_B: jax.Array
    response_tokens_B: jax.Array
    reader_B: jax.Array


def page_order(table: PageTable, *, page_tokens: int):
    """Lists each slot's pages [B, I + J]: those that its prompt fills, then the response's."""
    I, J = table.prompt_BI.shape[1], table.response_BJ.shape[1]
    filled_B1 = -(-table.prompt_tokens_B // page_tokens)[:, None]
    place_1X = jnp.arange(I + J)[None]
    place_BX = jnp.where(place_1X < filled_B1, place_1X, place_1X + I - filled_B1)
    both_BX = jnp.concatenate([table.prompt_BI, table.response_BJ], axis=1)
    return jnp.take_along_axis(both_BX, jnp.minimum(place_BX, I + J - 1), axis=1)


def pieces(table: PageTable, *, prompt_pages: int, readers: int, pages: int, page_tokens: int):
    """Says what XLA needs of a table: (reader_URB, live_U, reader_P1B, live_P, entry_BX).

    Attention is computed page by page, for all readers of a page at once: U = prompt_pages pages of
    R = readers slots, and P = pages of one slot each. Readers are rows of zeros with a one: a
    product with them moves a query to its pages exactly, and measured ten times as fast as a gather
    on CPU. live: tokens of a page; of a response's those that are full. The pieces of each slot are
    where entry_BX says, E for none: in the order of `combine` U * R of prompts, P of responses, and
    one a slot for its open page.
    """
    U, R, P, C = prompt_pages, readers, pages, page_tokens
    B, I = table.prompt_BI.shape
    J = table.response_BJ.shape[1]
    slot_B1 = jnp.arange(B)[:, None]
    live_BI = jnp.clip(table.prompt_tokens_B[:, None] - C * jnp.arange(I), 0, C)
    live_BJ = C * (table.response_tokens_B[:, None] // C > jnp.arange(J))
    # An index past the end is dropped: pages that a slot does not have leave no trace.
    prompt_BI = jnp.where(live_BI > 0, table.prompt_BI, U)
    response_BJ = jnp.where(live_BJ > 0, table.response_BJ, P)
    none = U * R + P + B
    of_prompt_BI = jnp.where(live_BI > 0, prompt_BI * R + table.reader_B[:, None], none)
    of_response_BJ = jnp.where(live_BJ > 0, U * R + response_BJ, none)
    reader_URB = jnp.zeros((U, R, B)).at[prompt_BI, table.reader_B[:, None], slot_B1].set(1)
    live_U = jnp.zeros(U, jnp.int32).at[prompt_BI].set(live_BI)
    reader_P1B = jnp.zeros((P, 1, B)).at[response_BJ, 0, slot_B1].set(1)
    live_P = jnp.zeros(P, jnp.int32).at[response_BJ].set(live_BJ)
    entry_BX = jnp.concatenate([of_prompt_BI, of_response_BJ, U * R + P + slot_B1], axis=1)
    return reader_URB, live_U, reader_P1B, live_P, entry_BX


def of_readers(q_BNH, reader_PRB):
    """Gathers the queries q_PRNH of each page's readers."""
    reader_PRB = reader_PRB.astype(q_BNH.dtype)
    return jnp.einsum("PRB,BNH->PRNH", reader_PRB, q_BNH, precision=jax.lax.Precision.HIGHEST)


def window_pages(
    page_BX, prompt_tokens_B, tokens_B, recent_tokens_B, *, window: int, page_tokens: int
):
    """Leaves out the pages before a window: (page_BX, prompt_tokens_B, tokens_B, hidden_B).

    page_BX: `page_order`'s; the arguments of the kernels that attend to pages. A query, the last of
    the recent tokens, sees itself and the window - 1 tokens before it. hidden_B: how many tokens of
    the first page that is left it does not see; not above 0 where it sees all.
    """
    C, X = page_tokens, page_BX.shape[1]
    counts = prompt_tokens_B, tokens_B
    unseen_B = jnp.maximum(prompt_tokens_B + tokens_B + recent_tokens_B - window, 0)
    unseen = jnp.minimum(unseen_B, prompt_tokens_B), jnp.maximum(unseen_B - prompt_tokens_B, 0)
    dropped = [
        jnp.where(u_B >= count_B, -(-count_B // C), u_B // C)
        for u_B, count_B in zip(unseen, counts, strict=True)
    ]
    left = [jnp.maximum(n_B - C * d_B, 0) for n_B, d_B in zip(counts, dropped, strict=True)]
    # At most window - 1 tokens are seen; they begin and end inside a page, the prompt's last too.
    place_BX = sum(dropped)[:, None] + jnp.arange(min(X, (window - 2) // C + 3))
    page_BX = jnp.take_along_axis(page_BX, jnp.minimum(place_BX, X - 1), axis=1)
    return page_BX, *left, sum(left) + recent_tokens_B - window


def page_attention(q_PRNH, k_PKHC, v_PKCH, seen_PC) -> tiles.Sums:
    """Attends to every page for its R readers: P * R pieces, of [K, G] queries each.

    q_PRNH: `tiles.scaled`. seen_PC: the keys that count.
    """
    _, R, N, H = q_PRNH.shape
    P, K = k_PKHC.shape[:2]
    G = N // K
    q_PKQH = q_PRNH.reshape(P, R, K, G, H).swapaxes(1, 2).reshape(P, K, R * G, H)
    sums = tiles.tile(q_PKQH, k_PKHC, v_PKCH, seen_PC[:, None, None])

    def by_piece(a):
        a = a.reshape(P, K, R, G, *a.shape[3:])
        return a.swapaxes(1, 2).reshape(P * R, K, G, *a.shape[4:])

    return jax.tree.map(by_piece, sums)


def combine(parts: Sequence[tiles.Sums], entry_BX, *, dtype):
    """Adds the pieces of each slot: out_BNH.

    parts: pieces, one after the other. entry_BX: those of each slot in their order; E, the number
    of all, means none, but for the last, which each slot has.
    """
    out_EKGH, sum_EKG, power_EKG = (jnp.concatenate(a) for a in zip(*parts, strict=True))
    E, K, G = power_EKG.shape
    # From whole arrays: fused with what makes them, a CPU took ten times as long.
    both_EKGZ = jax.lax.optimization_barrier(jnp.append(out_EKGH, sum_EKG[..., None], axis=-1))
    has_BX11 = (entry_BX < E)[..., None, None]
    # For none the slot's own last, times 0: what is not finite stays in its slot.
    entry_BX = jnp.where(entry_BX < E, entry_BX, entry_BX[:, -1:])
    power_BXKG = jnp.where(has_BX11, power_EKG[entry_BX], MASKED)
    most_B1KG = jnp.max(power_BXKG, axis=1, keepdims=True)
    # A quotient, exact for all that is not 0, since a CPU computes other operations again for each
    # of the H values that they scale.
    less_BXKG = jnp.minimum(most_B1KG - power_BXKG, 127)
    scale_BXKG = jnp.where(less_BXKG < 127, 1 / tiles.power_of_two(less_BXKG), 0.0)

    def with_next(total_BKGZ, piece):
        scale_BKG, entry_B = piece
        return total_BKGZ + scale_BKG[..., None] * both_EKGZ[entry_B], None

    pieces = scale_BXKG.swapaxes(0, 1), entry_BX.T
    nothing = jnp.zeros((len(entry_BX), *both_EKGZ.shape[1:]))
    # In a loop: a response may have hundreds of pages. As `tiles.add` does, since factors are whole
    # powers of two.
    total_BKGZ, _ = jax.lax.scan(with_next, nothing, pieces, unroll=UNROLLED)
    total = tiles.Sums(total_BKGZ[..., :-1], total_BKGZ[..., -1], most_B1KG[:, 0])
    return tiles.attended(total).reshape(len(entry_BX), K * G, -1).astype(dtype)


def open_attention(q_BNH, page, offset_B, live_B, *, block_tokens: int, window=None) -> tiles.Sums:
    """Attends to the page that each slot fills, and to the first live_B tokens of a block.

    page: (k_BKHX, v_BKXH). Its last S = block_tokens places are the block's, wherever in the page
    it begins; the first offset_B <= X - S are those before it. The query is the last live one.
    """
    X, offset_B1, live_B1 = page[1].shape[2], offset_B[:, None], live_B[:, None]
    place_X, first = jnp.arange(X), X - block_tokens
    is_new_X = place_X >= first
    seen_BX = jnp.where(is_new_X, place_X < first + live_B1, place_X < offset_B1)
    if window is not None:
        index_BX = jnp.where(is_new_X, offset_B1 + place_X - first, place_X)
        seen_BX &= offset_B1 + live_B1 - 1 - index_BX < window
    return page_attention(q_BNH[:, None], *page, seen_BX)


def near_attention(prompt_pool, pool, table: PageTable, *, block_tokens: int, window: int):
    """Takes the pages of every slot that a window sees, from the first step of a block on.

    Returns attend(q_BNH, page, live_B) -> out_BNH, which sees them, the page that a slot fills and
    the first live_B tokens of a block (`open_attention`).
    """
    C = pool[1].shape[2]
    offset_B = table.response_tokens_B % C
    page_BX, prompt_B, tokens_B, hidden_B = window_pages(
        page_order(table, page_tokens=C),
        *(table.prompt_tokens_B, table.response_tokens_B - offset_B, offset_B + 1),
        window=window,
        page_tokens=C,
    )
    B, X = page_BX.shape
    prompt_B1, tokens_B1 = prompt_B[:, None], tokens_B[:, None]
    begin_BX = C * jnp.arange(X) + jnp.zeros_like(page_BX)
    filled_B1 = -(-prompt_B1 // C) * C
    of_prompt_BX = begin_BX < filled_B1
    place_BX = jnp.where(of_prompt_BX, begin_BX, begin_BX - filled_B1)
    live_BX = jnp.where(of_prompt_BX, prompt_B1, tokens_B1) - place_BX
    before_BX = jnp.where(of_prompt_BX, 0, prompt_B1) + place_BX
    near_pool = []
    for prompts, responses in zip(prompt_pool, pool, strict=True):
        pages = (a[jnp.minimum(page_BX, len(a) - 1)] for a in (prompts, responses))
        page_BXKHC = jnp.where(of_prompt_BX[..., None, None, None], *pages)
        near_pool.append(page_BXKHC.reshape(-1, *page_BXKHC.shape[2:]))

    def attend(q_BNH, page, live_B):
        q = tiles.scaled(q_BNH)
        recent = open_attention(q, page, offset_B, live_B, block_tokens=block_tokens, window=window)
        hidden_B1 = (hidden_B + live_B - 1)[:, None]
        token_BXC = jnp.arange(C) + jnp.zeros((B, X, 1), jnp.int32)
        seen_BXC = token_BXC < live_BX[..., None]
        seen_BXC &= token_BXC >= (hidden_B1 - before_BX)[..., None]
        q_Z1NH = jnp.repeat(q, X, axis=0)[:, None]
        near = page_attention(q_Z1NH, *near_pool, seen_BXC.reshape(-1, C))
        slot_B1 = jnp.arange(B)[:, None]
        of_page_BX = jnp.where(live_BX > 0, slot_B1 * X + jnp.arange(X), B * X + B)
        entry_BX = jnp.concatenate([of_page_BX, B * X + slot_B1], axis=1)
        return combine([near, recent], entry_BX, dtype=q_BNH.dtype)

    return attend


def copy_pages(pool, source_pool, page_M, source_page_M):
    """As `pages_tpu.copy_pages`."""

    def copied(array_P, source_P):
        def put(m, array_P):
            page = jax.lax.dynamic_index_in_dim(source_P, source_page_M[m], keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(array_P, page, page_M[m], axis=0)

        return jax.lax.fori_loop(0, len(page_M), put, array_P)

    return tuple(map(copied, pool, source_pool))


def write_pages(k_PKHC, v_PKCH, k_BKHS, v_BKSH, page_B, offset_B):
    """As `pages_tpu.write_pages`, for GPU: a kernel an array, which writes in place.

    Page 0 is nobody's: what slots write to it is left out, so that no two write to one place. Else
    their order would count, and a deterministic program sorts what it writes.
    """
    page_B1 = jnp.where(page_B > 0, page_B, len(k_PKHC) + jnp.arange(len(page_B)))[:, None]
    token_BS = offset_B[:, None] + jnp.arange(v_BKSH.shape[2])
    k_BSKH, v_BSKH = k_BKHS.transpose(0, 3, 1, 2), v_BKSH.swapaxes(1, 2)
    k_PKHC = k_PKHC.at[page_B1, :, :, token_BS].set(k_BSKH, mode="drop", unique_indices=True)
    v_PKCH = v_PKCH.at[page_B1, :, token_BS].set(v_BSKH, mode="drop", unique_indices=True)
    return k_PKHC, v_PKCH


def like(array, shape=None, dtype=None) -> jax.ShapeDtypeStruct:
    """Describes a kernel's output that varies over a mesh, inside shard_map, as an input does."""
    axes = jax.typeof(array).manual_axis_type
    shape, dtype = shape or array.shape, dtype or array.dtype
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes)
