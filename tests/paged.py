"""Cases of decode attention over pages, and what every kernel that attends has to give for them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from models.kernels.xla import PageTable, page_order
from sharding.mesh import make_mesh
from tests.quick import jit

# Tokens of responses and of prompts in pages of C: neither, either, one token, part of a page,
# whole pages, and more blocks than are read ahead.
LENGTHS_IN_PAGES = (1.3, 6.2, 0.0, 7.0, 0.1, 11.6, 0.0, 1.0, 0.0, 3.4, 1.5)
PROMPTS_IN_PAGES = (0.5, 1.2, 1.2, 2.0, 0.0, 0.7, 0.0, 3.1, 0.1, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel and its arguments. Whatever no slot may look at is NaN."""

    attend: Callable
    q_BTNH: Any
    recent: tuple[Any, Any]
    recent_tokens_B: Any
    prompt_pool: tuple[Any, Any]
    pool: tuple[Any, Any]
    page_BX: Any
    prompt_tokens_B: Any
    tokens_B: Any

    @property
    def arguments(self):
        return [value for name, value in vars(self).items() if name != "attend"]

    def __call__(self, *, interpret=True):
        return np.asarray(self.attend(*self.arguments, interpret=interpret))

    def of_slots(self, slot_B, **changes):
        """The case of some of the slots, in another order perhaps."""
        return dataclasses.replace(
            self,
            q_BTNH=self.q_BTNH[slot_B],
            recent=tuple(x[slot_B] for x in self.recent),
            recent_tokens_B=self.recent_tokens_B[slot_B],
            page_BX=self.page_BX[slot_B],
            prompt_tokens_B=self.prompt_tokens_B[slot_B],
            tokens_B=self.tokens_B[slot_B],
            **changes,
        )


def make_case(
    attend, *, heads, kv_heads, head_dim, page_tokens, queries=1, dtype=jnp.float32, seed=0
):
    """A case; the prompts of the second and the third slot are one, in the same pages.

    attend: the kernel, jitted, with `interpret` static.
    """
    N, K, H, C = heads, kv_heads, head_dim, page_tokens
    rng = np.random.default_rng(seed)
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
        (3 * rng.normal(size=(B, queries, N, H))).astype(dtype),
        recent,
        rng.integers(1, 7, B, np.int32),
        prompt_pool,
        response_pool,
        np.asarray(page_order(table, page_tokens=C)),
        prompt_tokens_B,
        tokens_B,
    )


def live_tokens(case, b, t):
    """(k_SKH, v_SKH) that query t of slot b sees, in order, the recent ones last, float32."""
    C = case.pool[1].shape[2]
    pages, lives = iter(case.page_BX[b].tolist()), []
    for pool, tokens in (
        (case.prompt_pool, case.prompt_tokens_B[b]),
        (case.pool, case.tokens_B[b]),
    ):
        lives += [(pool, next(pages), min(C, tokens - start)) for start in range(0, tokens, C)]
    lives.append((case.recent, b, case.recent_tokens_B[b] + t))
    for i in (0, 1):
        parts = [np.asarray(pool[i][page], np.float32) for pool, page, _ in lives]
        parts = [part.swapaxes(1, 2) if i == 0 else part for part in parts]
        kept = [p[:, :n].swapaxes(0, 1) for p, (*_, n) in zip(parts, lives, strict=True)]
        yield np.concatenate(kept)


def reference(case, b, t):
    """out_NH of a slot's query, from the definition."""
    k_SKH, v_SKH = live_tokens(case, b, t)
    N, H = case.q_BTNH.shape[2:]
    of_head_N = np.arange(N) // (N // k_SKH.shape[1])
    x_NS = np.einsum("NH,SNH->NS", case.q_BTNH[b, t].astype(np.float32), k_SKH[:, of_head_N])
    weight_NS = np.exp(x_NS / np.sqrt(H))
    out_NH = np.einsum("NS,SNH->NH", weight_NS, v_SKH[:, of_head_N])
    return out_NH / weight_NS.sum(axis=1)[:, None]


def matches_the_definition(case):
    """Every slot: the definition over its live and its recent tokens, and nothing else."""
    out_BTNH = case()
    assert out_BTNH.dtype == case.q_BTNH.dtype
    # In bfloat16 the weights are rounded once more than in the reference, and the result is.
    rounding = 1e-5 if case.q_BTNH.dtype == jnp.float32 else 1e-2
    for (b, t), out_NH in zip(
        np.ndindex(out_BTNH.shape[:2]), np.concatenate(out_BTNH), strict=True
    ):
        expected_NH = reference(case, b, t)
        np.testing.assert_allclose(
            out_NH.astype(np.float32), expected_NH, rtol=rounding, atol=rounding
        )


def recent_tokens_may_as_well_be_in_a_page(case):
    """And where none is recent, pages alone count."""
    case = dataclasses.replace(case, recent_tokens_B=np.zeros_like(case.recent_tokens_B))
    C = case.pool[1].shape[2]
    b, closed = 5, case.tokens_B[5] // C * C
    R = case.tokens_B[b] - closed
    page = case.page_BX[b, -(-case.prompt_tokens_B[b] // C) + closed // C]
    (k_PKHC, v_PKCH), (k_BKHR, v_BKRH) = case.pool, (x.copy() for x in case.recent)
    assert 0 < R <= v_BKRH.shape[2] + 2
    k_BKHR = np.pad(k_BKHR, ((0, 0), (0, 0), (0, 0), (0, 2)))
    v_BKRH = np.pad(v_BKRH, ((0, 0), (0, 0), (0, 2), (0, 0)))
    k_BKHR[b, ..., :R], v_BKRH[b, :, :R] = k_PKHC[page, ..., :R], v_PKCH[page, :, :R]
    tokens_B = np.where(np.arange(len(case.tokens_B)) == b, closed, case.tokens_B)
    given = dataclasses.replace(
        case,
        recent=(k_BKHR, v_BKRH),
        recent_tokens_B=case.recent_tokens_B + np.int32(R),
        tokens_B=tokens_B.astype(np.int32),
    )
    np.testing.assert_allclose(given()[b], case()[b], rtol=1e-5, atol=1e-5)


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
        case,
        q_BTNH=np.where(alone[:, None, None, None], case.q_BTNH, case.q_BTNH.dtype.type(np.nan)),
    )
    same_bits(others_are_nan()[5], expected[5])

    wide = np.concatenate([case.page_BX, np.zeros((B, 9), np.int32)], axis=1)
    same_bits(dataclasses.replace(case, page_BX=wide)(), expected)


def sharded(attend, arguments):
    """Runs a kernel under shard_map, slots and heads over two devices each, pages on both."""
    mesh = make_mesh(data=2, model=2, devices=jax.devices()[:4])
    slots, heads = PartitionSpec("data"), PartitionSpec("data", "model")
    pool = PartitionSpec(None, "model")
    queries = PartitionSpec("data", None, "model")
    specs = (queries, (heads,) * 2, slots, (pool,) * 2, (pool,) * 2, slots, slots, slots)
    run = jax.shard_map(
        functools.partial(attend, interpret=True),
        mesh=mesh,
        in_specs=specs,
        out_specs=queries,
        check_vma=False,  # the interpreter does not know it
    )
    return jit(run)(*arguments)
