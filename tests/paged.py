"""Cases of decode attention over pages, and what every kernel that attends has to give for them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.kernels.xla import PageTable, page_order, window_pages

# Tokens of responses and of prompts in pages of C: neither, either, one token, part of a page,
# whole pages, and more blocks than are read ahead.
LENGTHS_IN_PAGES = (1.3, 6.2, 0.0, 7.0, 0.1, 11.6, 0.0, 1.0, 0.0, 3.4, 1.5)
PROMPTS_IN_PAGES = (0.5, 1.2, 1.2, 2.0, 0.0, 0.7, 0.0, 3.1, 0.1, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel and its arguments. Whatever no slot may look at is NaN."""

    attend: Callable
    q_BNH: Any
    recent: tuple[Any, Any]
    recent_tokens_B: Any
    prompt_pool: tuple[Any, Any]
    pool: tuple[Any, Any]
    page_BX: Any
    prompt_tokens_B: Any
    tokens_B: Any
    window: int | None = None

    @property
    def arguments(self):
        return [value for name, value in vars(self).items() if name not in ("attend", "window")]

    def __call__(self, *, interpret=True):
        how = {} if self.window is None else {"window": self.window}
        return np.asarray(self.attend(*self.arguments, **how, interpret=interpret))

    def of_slots(self, slot_B):
        """The case with its slots in another order."""
        names = ("q_BNH", "recent_tokens_B", "page_BX", "prompt_tokens_B", "tokens_B")
        changes = {name: getattr(self, name)[slot_B] for name in names}
        return dataclasses.replace(self, recent=tuple(x[slot_B] for x in self.recent), **changes)


def make_case(attend, *, heads, kv_heads, head_dim, page_tokens, dtype=jnp.float32):
    """A case; the prompts of the second and the third slot are one, in the same pages.

    attend: the kernel, jitted, with `window` and `interpret` static.
    """
    N, K, H, C = heads, kv_heads, head_dim, page_tokens
    rng = np.random.default_rng(0)
    tokens_B, prompt_tokens_B = (
        np.round(np.array(lengths) * C).astype(np.int32)
        for lengths in (LENGTHS_IN_PAGES, PROMPTS_IN_PAGES)
    )
    B = len(tokens_B)

    def pool(tokens_B):
        """(pages, page_BJ) of so many tokens a slot; entries without any name any page."""
        pages_B = -(-tokens_B // C)
        P = pages_B.sum() + 5
        free = iter(rng.permutation(P))
        k_PKCH, v_PKCH = np.full((2, P, K, C, H), np.nan, np.float32)
        page_BJ = rng.integers(0, P, (B, pages_B.max() + 1), np.int32)
        for b in range(B):
            for j in range(pages_B[b]):
                page = page_BJ[b, j] = next(free)
                live = min(C, tokens_B[b] - j * C)
                k_PKCH[page, :, :live], v_PKCH[page, :, :live] = rng.normal(size=(2, K, live, H))
        return (k_PKCH.swapaxes(2, 3).astype(dtype), v_PKCH.astype(dtype)), page_BJ

    prompt_pool, prompt_BI = pool(prompt_tokens_B)
    prompt_BI[2] = prompt_BI[1]
    response_pool, response_BJ = pool(tokens_B)
    table = PageTable(prompt_BI, response_BJ, prompt_tokens_B, tokens_B, np.arange(B))
    recent = tuple(rng.normal(size=shape).astype(dtype) for shape in ((B, K, H, 8), (B, K, 8, H)))
    return Case(
        attend,
        (3 * rng.normal(size=(B, N, H))).astype(dtype),
        recent,
        rng.integers(1, 7, B, np.int32),
        prompt_pool,
        response_pool,
        np.asarray(page_order(table, page_tokens=C)),
        prompt_tokens_B,
        tokens_B,
    )


def live_tokens(case, b):
    """(k_SKH, v_SKH) that slot b sees, in order, the recent ones last, float32."""
    C = case.pool[1].shape[2]
    pages, lives = iter(case.page_BX[b].tolist()), []
    for pool, tokens in (
        (case.prompt_pool, case.prompt_tokens_B[b]),
        (case.pool, case.tokens_B[b]),
    ):
        lives += [(pool, next(pages), min(C, tokens - start)) for start in range(0, tokens, C)]
    lives.append((case.recent, b, case.recent_tokens_B[b]))
    for i in (0, 1):
        parts = [np.asarray(pool[i][page], np.float32) for pool, page, _ in lives]
        parts = [part.swapaxes(1, 2) if i == 0 else part for part in parts]
        kept = [p[:, :n].swapaxes(0, 1) for p, (*_, n) in zip(parts, lives, strict=True)]
        yield np.concatenate(kept)[-(case.window or 0) :]


def reference(case, b):
    """out_NH of a slot, from the definition."""
    k_SKH, v_SKH = live_tokens(case, b)
    N, H = case.q_BNH.shape[1:]
    of_head_N = np.arange(N) // (N // k_SKH.shape[1])
    x_NS = np.einsum("NH,SNH->NS", case.q_BNH[b].astype(np.float32), k_SKH[:, of_head_N])
    weight_NS = np.exp(x_NS / np.sqrt(H))
    out_NH = np.einsum("NS,SNH->NH", weight_NS, v_SKH[:, of_head_N])
    return out_NH / weight_NS.sum(axis=1)[:, None]


def matches_the_definition(case):
    """Every slot: the definition over its live and its recent tokens, and nothing else."""
    out_BNH = case()
    assert out_BNH.dtype == case.q_BNH.dtype
    # In bfloat16 the weights are rounded once more than in the reference, and the result is.
    rounding = 1e-5 if case.q_BNH.dtype == jnp.float32 else 1e-2
    for b, out_NH in enumerate(out_BNH.astype(np.float32)):
        np.testing.assert_allclose(out_NH, reference(case, b), rtol=rounding, atol=rounding)


def sees_a_window(case, window):
    """As the definition says; pages before the windows are left out, and may hold NaN."""
    C, case = case.pool[1].shape[2], dataclasses.replace(case, window=window)
    pools, seen, seen_B = (case.prompt_pool, case.pool), (set(), set()), []
    for b, page_X in enumerate(case.page_BX):
        counts = case.prompt_tokens_B[b], case.tokens_B[b]
        unseen = sum(counts) + case.recent_tokens_B[b] - window
        pages = iter(page_X.tolist())
        seen_B.append(0)
        for pages_seen, count, before in zip(seen, counts, (0, counts[0]), strict=True):
            ends = ((next(pages), min(count, start + C)) for start in range(0, count, C))
            ids = [page for page, end in ends if before + end > unseen]
            pages_seen.update(ids)
            seen_B[-1] += len(ids)

    def hidden(array, pages):
        of_others = ~np.isin(np.arange(len(array)), list(pages))
        return np.where(of_others[:, None, None, None], array.dtype.type(np.nan), array)

    prompt_pool, pool = (
        tuple(hidden(array, pages) for array in arrays)
        for arrays, pages in zip(pools, seen, strict=True)
    )
    matches_the_definition(dataclasses.replace(case, prompt_pool=prompt_pool, pool=pool))
    counts = case.prompt_tokens_B, case.tokens_B, case.recent_tokens_B
    page_BX, *left, _ = window_pages(case.page_BX, *counts, window=window, page_tokens=C)
    assert sum(-(-np.asarray(tokens_B) // C) for tokens_B in left).tolist() == seen_B
    assert max(seen_B) <= page_BX.shape[1]


def a_slot_depends_on_itself_alone(case):
    """Bitwise: not on its place in the batch, its pages, other slots or the table's width."""
    same_bits, expected = np.testing.assert_array_equal, case()
    B = len(case.page_BX)
    rng = np.random.default_rng(1)

    slot_B = rng.permutation(B)
    same_bits(case.of_slots(slot_B)(), expected[slot_B])

    def shuffled(pool):
        page_P = rng.permutation(len(pool[0]))
        return tuple(x[page_P] for x in pool), np.argsort(page_P).astype(np.int32)

    (prompt_pool, place_U), (pool, place_P) = shuffled(case.prompt_pool), shuffled(case.pool)
    C = case.pool[1].shape[2]
    is_prompt_BX = np.arange(case.page_BX.shape[1]) < -(-case.prompt_tokens_B // C)[:, None]
    page_BX = np.where(
        is_prompt_BX,
        place_U[np.minimum(case.page_BX, len(place_U) - 1)],
        place_P[np.minimum(case.page_BX, len(place_P) - 1)],
    )
    moved = dataclasses.replace(case, prompt_pool=prompt_pool, pool=pool, page_BX=page_BX)
    same_bits(moved(), expected)

    alone = np.arange(B) == 5
    others_are_idle = dataclasses.replace(
        case, tokens_B=case.tokens_B * alone, prompt_tokens_B=case.prompt_tokens_B * alone
    )
    same_bits(others_are_idle()[5], expected[5])

    others_are_nan = dataclasses.replace(
        case, q_BNH=np.where(alone[:, None, None], case.q_BNH, case.q_BNH.dtype.type(np.nan))
    )
    same_bits(others_are_nan()[5], expected[5])

    wide = np.concatenate([case.page_BX, np.zeros((B, 9), np.int32)], axis=1)
    same_bits(dataclasses.replace(case, page_BX=wide)(), expected)
