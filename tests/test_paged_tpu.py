"""Decode attention over pages: the kernel interpreted on CPU, and compiled by the TPU compiler."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.preflight.compile import LIBTPU, topology_devices
from models.kernels import paged_tpu, xla
from models.kernels.paged_tpu import paged_attention
from models.kernels.pages_tpu import copy_pages, write_pages
from models.kernels.xla import PageTable, page_order
from sharding.mesh import make_mesh
from tests.quick import jit

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Tokens of responses and of prompts in pages of C: neither, either, one token, part of a page,
# whole pages, and more blocks than are read ahead.
LENGTHS_IN_PAGES = (1.3, 6.2, 0.0, 7.0, 0.1, 11.6, 0.0, 1.0, 0.0, 3.4, 1.5)
PROMPTS_IN_PAGES = (0.5, 1.2, 1.2, 2.0, 0.0, 0.7, 0.0, 3.1, 0.1, 0.0, 1.0)

RUN = jit(paged_attention, static_argnames="interpret")


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of the kernel. Whatever no slot may look at is NaN."""

    q_BTNH: Any
    recent: tuple[Any, Any]
    recent_tokens_B: Any
    prompt_pool: tuple[Any, Any]
    pool: tuple[Any, Any]
    page_BX: Any
    prompt_tokens_B: Any
    tokens_B: Any

    def __call__(self, *, interpret=True):
        return np.asarray(RUN(*vars(self).values(), interpret=interpret))

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


@pytest.fixture(autouse=True)
def two_pages_a_block(monkeypatch):
    """Blocks of two pages and grid steps of eight slots, so that small cases have several."""
    monkeypatch.setattr(paged_tpu, "pages_per_block", lambda v_PKCH: 2)
    monkeypatch.setattr(paged_tpu, "SLOTS", 8)


def make_case(*, heads, kv_heads, head_dim, page_tokens, queries=1, dtype=jnp.float32, seed=0):
    """A case; the prompts of the second and the third slot are one, in the same pages."""
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


SHAPES = {
    "grouped": {"heads": 6, "kv_heads": 2, "head_dim": 16, "page_tokens": 16},
    "one key head": {
        "heads": 5,
        "kv_heads": 1,
        "head_dim": 128,
        "page_tokens": 64,
        "dtype": jnp.bfloat16,
    },
    "several queries": {
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 16,
        "page_tokens": 16,
        "queries": 3,
    },
    # The head is small and the page is not: on TPU its tokens are stored last.
    "tokens last": {
        "heads": 14,
        "kv_heads": 2,
        "head_dim": 64,
        "page_tokens": 128,
        "dtype": jnp.bfloat16,
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_definition(shape):
    """Every slot: the definition over its live and its recent tokens, and nothing else."""
    case = make_case(**SHAPES[shape])
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


def test_recent_tokens_may_as_well_be_in_a_page():
    """And where none is recent, pages alone count."""
    case = make_case(**SHAPES["grouped"])
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


@pytest.mark.parametrize("shape", ["grouped", "tokens last", "several queries"])
def test_a_slot_depends_on_itself_alone(shape):
    """Bitwise: not on its place in the batch, its pages, other slots or the table's width."""
    case = make_case(**SHAPES[shape])
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


def test_reads_are_waited_for_and_in_bounds(capfd):
    """The simulated TPU (reads done when waited for, memory NaN before) has the same bits.

    It raises on reads past an array and reports races between reads and arithmetic.
    """
    case = make_case(**SHAPES["grouped"])
    simulated = case(interpret=pltpu.InterpretParams(detect_races=True))
    np.testing.assert_array_equal(simulated, case())
    assert "RACE" not in capfd.readouterr().out


def test_sharded_over_slots_and_heads():
    """Under shard_map each shard has its slots and heads and gives the same bits."""
    case = make_case(**SHAPES["grouped"]).of_slots(slice(10))  # divides by the shards
    mesh = make_mesh(data=2, model=2, devices=jax.devices()[:4])
    slots, heads = PartitionSpec("data"), PartitionSpec("data", "model")
    pool = PartitionSpec(None, "model")
    queries = PartitionSpec("data", None, "model")
    specs = (queries, (heads,) * 2, slots, (pool,) * 2, (pool,) * 2, slots, slots, slots)
    run = jax.shard_map(
        functools.partial(paged_attention, interpret=True),
        mesh=mesh,
        in_specs=specs,
        out_specs=queries,
        check_vma=False,  # the interpreter does not know it; the compiler's test below has it on
    )
    np.testing.assert_array_equal(jit(run)(*vars(case).values()), case())


def test_refuses_what_it_cannot_read_well():
    """One dtype and shape, and pages that a TPU reads without laying the pool out anew."""
    case = make_case(**SHAPES["grouped"])
    k_PKHC, v_PKCH = case.pool
    with pytest.raises(ValueError, match="one dtype"):
        dataclasses.replace(case, pool=(k_PKHC, v_PKCH.astype(jnp.bfloat16)))()
    with pytest.raises(ValueError, match="head size of 8"):
        dataclasses.replace(case, q_BTNH=case.q_BTNH[..., :8])()
    with pytest.raises(ValueError, match="do not go together"):
        dataclasses.replace(case, prompt_pool=tuple(x[:, :1] for x in case.prompt_pool))()
    with pytest.raises(ValueError, match="pages of 16 tokens"):
        case(interpret=False)


TPUS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")


# Of one chip: Qwen2.5 0.5B; 7B split 4 ways; 32B split 8 ways, with drafts, and 4 ways.
@pytest.mark.parametrize(("H", "C"), [(64, 128), (128, 128), (128, 16)])
def test_pages_are_copied_as_by_plain_xla(H, C):
    """Pages of a small pool go to places of a large one, in every layout; the rest stays."""
    rng = np.random.default_rng(0)

    def pool(pages):
        shapes = ((pages, 2, H, C), (pages, 2, C, H))
        return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]

    large, small = pool(9), pool(4)
    to, source = jnp.array([7, 0, 2, 0]), jnp.array([3, 1, 0, 2])
    found = copy_pages(large, small, to, source, interpret=True)
    wanted = xla.copy_pages(large, small, to, source)
    for ours, theirs, before, new in zip(found, wanted, large, small, strict=True):
        np.testing.assert_array_equal(ours[1:], theirs[1:])  # page 0 gets one of two
        np.testing.assert_array_equal(ours[jnp.array([7, 2])], new[jnp.array([3, 0])])
        np.testing.assert_array_equal(ours[1], before[1])


LOCAL_HEADS = ((14, 2, 64, 1), (7, 1, 128, 1), (5, 1, 128, 4), (10, 2, 128, 1))


@pytest.mark.skipif(not LIBTPU.exists(), reason="needs the TPU's compiler: `make preflight`")
@pytest.mark.parametrize("tpu", TPUS)
def test_compiles_for_tpu(tpu):
    """The TPU's compiler takes the kernel inside shard_map, a loop and several layers.

    And none of the pools is copied: the program's own memory is far below one pool's.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, __file__, tpu], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == len(LOCAL_HEADS)
    for line in lines:
        pool_bytes, temporary_bytes = (int(field) for field in line.split()[-2:])
        assert temporary_bytes < pool_bytes / 8, line


def compile_for(tpu, *, heads):
    """Compile 8 decode-like steps of two layers on 4 chips; prints pool and temporary bytes.

    The pools are then written to, by block and by page, and returned in place of those given.
    """
    (N, K, H, T), C, B, J, P, D, S, M = heads, 128, 64, 180, 16_384, 256, 16, 8
    mesh = make_mesh(data=2, model=2, devices=topology_devices(tpu, slices=1))
    slots, pool = PartitionSpec("data"), PartitionSpec("data", "model")
    specs = (slots, [(pool, pool)] * 2, PartitionSpec(None, "model"), *[slots] * 3)

    def steps(x_BD, pools, w_DNH, page_BX, prompt_tokens_B, tokens_B):
        axes = jax.typeof(jnp.einsum("BD,DNH->BNH", x_BD, w_DNH)).manual_axis_type

        def step(i, x_BD):
            for k_PKHC, v_PKCH in pools:
                q_BTNH = jnp.repeat(jnp.einsum("BD,DNH->BNH", x_BD, w_DNH)[:, None], T, axis=1)
                k_BKHR = jax.lax.pcast(
                    jnp.ones((B, K, H, S), q_BTNH.dtype), tuple(axes.varying), to="varying"
                )
                recent, pool = (k_BKHR, k_BKHR.swapaxes(2, 3)), (k_PKHC, v_PKCH)
                tokens = (prompt_tokens_B, tokens_B)
                out_BTNH = paged_attention(
                    q_BTNH, recent, tokens_B % S + i, pool, pool, page_BX, *tokens, interpret=False
                )
                out_BNH = out_BTNH[:, -1]
                x_BD += jax.lax.psum(jnp.einsum("BNH,DNH->BD", out_BNH, w_DNH), "model")
            return x_BD

        x_BD = jax.lax.fori_loop(0, 8, step, x_BD)
        new = jnp.broadcast_to(x_BD[:, None, :H, None], (B, K, H, S)).astype(jnp.bfloat16)
        where = page_BX[:, 0], page_BX[:, 1] % (C // S) * S
        write = functools.partial(write_pages, interpret=False)
        pools = [write(*pool, new, new.swapaxes(2, 3), *where) for pool in pools]
        few = [a[:M] for a in pools[0]]
        copy = functools.partial(copy_pages, interpret=False)
        return x_BD, [copy(pool, few, page_BX[:M, 2], jnp.arange(M)) for pool in pools]

    def abstract(spec, shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    k_PKHC, v_PKCH = (abstract(pool, (2 * P, 2 * K, *page)) for page in ((H, C), (C, H)))
    arguments = (
        abstract(slots, (2 * B, D)),
        [(k_PKHC, v_PKCH)] * 2,
        abstract(specs[2], (D, 2 * N, H)),
        abstract(slots, (2 * B, J), jnp.int32),
        *[abstract(slots, (2 * B,), jnp.int32)] * 2,
    )
    run = jax.shard_map(steps, mesh=mesh, in_specs=specs, out_specs=(slots, specs[1]))
    with jax.set_mesh(mesh):
        compiled = jax.jit(run, donate_argnums=1).lower(*arguments).compile()
    assert compiled.as_text().count("tpu_custom_call") >= 6
    print(tpu, heads, P * K * C * H * 2, compiled.memory_analysis().temp_size_in_bytes)


if __name__ == "__main__":
    for heads in LOCAL_HEADS:
        compile_for(sys.argv[1], heads=heads)
