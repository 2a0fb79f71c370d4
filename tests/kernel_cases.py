"""Cases of attention inside packed rows and over pages, and what it gives by its definition."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from quick import jit

from models.kernels.xla import PageTable, attention, page_order
from models.transformer import segment_positions


def rows(*tokens):
    """Segments [B, T] of rows that hold segments of so many tokens; the last is padding."""
    return np.stack([np.repeat([*range(1, len(row)), 0], row) for row in tokens]).astype(np.int32)


def positions(segment_BT, branch_BT):
    """Each token's place in its sequence: a response's begin where its prompt's end."""
    position_BT = np.zeros_like(segment_BT)
    for position_T, segment_T, branch_T in zip(position_BT, segment_BT, branch_BT, strict=True):
        for segment in set(segment_T.tolist()) - {0}:
            its_T = segment_T == segment
            prompt = np.sum(its_T & (branch_T == 0))
            for branch in set(branch_T[its_T].tolist()):
                of_branch_T = its_T & (branch_T == branch)
                start = prompt if branch else 0
                position_T[of_branch_T] = start + np.arange(of_branch_T.sum())
    return position_BT


def branches(segment_BT):
    """In every segment a quarter of the tokens is the prompt of three branches."""
    length_BT = np.sum(segment_BT[:, :, None] == segment_BT[:, None], axis=2)
    place_BT = segment_positions(segment_BT)
    branch_BT = np.where(segment_BT > 0, 4 * place_BT // length_BT, 0).astype(np.int32)
    return branch_BT + np.where(branch_BT > 0, 4 * segment_BT, 0)


def numbered(*rows, shape=(3, 46)):
    """(segment_BT, branch_BT) of rows of pieces (prompt entries, [entries of each response])."""
    segment_BT, branch_BT = np.zeros((2, *shape), np.int32)
    for b, row in enumerate(rows):
        end = branch = 0
        for segment, (prompt, responses) in enumerate(row, start=1):
            start, end = end, end + prompt
            for response in responses:
                branch += 1
                branch_BT[b, end : end + response] = branch
                end += response
            segment_BT[b, start:end] = segment
    return segment_BT, branch_BT


ODD = rows([100, 33, 50, 17], [1, 199, 0])  # no whole number of blocks
MANY = rows([256, 128, 256, 0], [640, 0], [130, 300, 210], [3, 120, 5, 400, 112], [640])
SHORT = {
    "one sequence": numbered([(5, [14])]),
    "plain segments": numbered([(9, []), (1, []), (12, [])], [(3, []), (7, [])]),
    "shared prompts": numbered(
        [(6, [5, 1, 9]), (0, [2, 2])], [(17, [1, 1, 3])], [(1, [8]), (3, [4, 13])]
    ),
    "many branches": numbered([(3, [2] * 20)], [(13, [1])]),
}


def seen(segment_BT, branch_BT, position_BT, window=None):
    """Which tokens each token looks at, [B, T, T]: of its segment, of its branch or the prompt."""
    seen_BTT = np.tril(segment_BT[:, :, None] == segment_BT[:, None])
    seen_BTT &= (branch_BT[:, None] == 0) | (branch_BT[:, :, None] == branch_BT[:, None])
    seen_BTT &= segment_BT[:, None] > 0
    if window is not None:
        seen_BTT &= position_BT[:, :, None] - position_BT[:, None] < window
    return seen_BTT


def by_definition(q_BTNH, k_BTKH, v_BTKH, *numbers):
    """One softmax over all that a token looks at."""
    return attention(q_BTNH, k_BTKH, v_BTKH, seen(*numbers))


def arrays(segment_BT, *, heads=(4, 2, 2), head_dim=16):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(*segment_BT.shape, n, head_dim)).astype(np.float32) for n in heads]


def value_and_gradient(attend, arrays, segment_BT, branch_BT=None, window=None, counts_BT=None):
    """(loss, gradients, outputs), the loss over the tokens that count: those that are no padding.

    No two of them have the same part in it.
    """
    branch_BT = np.zeros_like(segment_BT) if branch_BT is None else branch_BT
    numbers = segment_BT, branch_BT, positions(segment_BT, branch_BT), window
    counts_BT = segment_BT > 0 if counts_BT is None else counts_BT

    def loss(*arrays):
        out_BTNH = attend(*arrays, *numbers)
        wave_BTNH = jnp.cos(jnp.arange(out_BTNH.size).reshape(out_BTNH.shape))
        terms_BTNH = jnp.sin(out_BTNH.astype(jnp.float32)) * wave_BTNH
        return jnp.sum(jnp.where(counts_BT[..., None, None], terms_BTNH, 0)), out_BTNH

    run = jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (value, out_BTNH), gradients = jax.device_get(run(*arrays))
    return value, gradients, out_BTNH


# Tokens of responses and of prompts in pages of C: neither, either, one token, part of a page,
# whole pages, and more blocks than are read ahead.
LENGTHS_IN_PAGES = (1.3, 6.2, 0.0, 7.0, 0.1, 11.6, 0.0, 1.0, 0.0, 3.4, 1.5)
PROMPTS_IN_PAGES = (0.5, 1.2, 1.2, 2.0, 0.0, 0.7, 0.0, 3.1, 0.1, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Pages:
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

    def __call__(self, **changes):
        it = dataclasses.replace(self, **changes)
        given = [value for name, value in vars(it).items() if name not in ("attend", "window")]
        how = {} if it.window is None else {"window": it.window}
        return np.asarray(it.attend(*given, **how))


def make_pages(attend, *, heads, kv_heads, head_dim, page_tokens, dtype=jnp.float32) -> Pages:
    """A case; the prompts of the second and the third slot are one, in the same pages.

    attend: the kernel, jitted, with `window` static.
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
    return Pages(
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


def live_tokens(case: Pages, b):
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


def matches_the_definition(case: Pages):
    """Every slot: one softmax over its live and its recent tokens, and nothing else."""
    out_BNH = case()
    assert out_BNH.dtype == case.q_BNH.dtype
    N, H = case.q_BNH.shape[1:]
    # In bfloat16 the weights are rounded once more than in the reference, and the result is.
    rounding = 1e-5 if case.q_BNH.dtype == jnp.float32 else 1e-2
    for b, out_NH in enumerate(out_BNH.astype(np.float32)):
        k_SKH, v_SKH = live_tokens(case, b)
        of_head_N = np.arange(N) // (N // k_SKH.shape[1])
        x_NS = np.einsum("NH,SNH->NS", case.q_BNH[b].astype(np.float32), k_SKH[:, of_head_N])
        weight_NS = np.exp(x_NS / np.sqrt(H))
        expected_NH = np.einsum("NS,SNH->NH", weight_NS, v_SKH[:, of_head_N])
        expected_NH /= weight_NS.sum(axis=1)[:, None]
        np.testing.assert_allclose(out_NH, expected_NH, rtol=rounding, atol=rounding)
