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

from models.kernels import paged_tpu
from models.kernels.paged_tpu import paged_attention
from models.kernels.xla import MASKED
from sharding.mesh import make_mesh
from tests.quick import jit

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Tokens in pages of C: idle slots, one token, part of a page, whole pages, and more blocks than are
# read ahead.
LENGTHS_IN_PAGES = (1.3, 6.2, 0.0, 7.0, 0.1, 11.6, 0.0, 1.0, 0.0, 3.4, 1.5)

RUN = jit(paged_attention, static_argnames="interpret")


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of the kernel. Whatever no slot may look at is NaN."""

    q_BNH: Any
    k_PKHC: Any
    v_PKCH: Any
    page_BJ: Any
    tokens_B: Any

    def __call__(self, *, interpret=True):
        return [np.asarray(x) for x in RUN(*vars(self).values(), interpret=interpret)]


@pytest.fixture(autouse=True)
def two_pages_a_block(monkeypatch):
    """Blocks of two pages and grid steps of eight slots, so that small cases have several."""
    monkeypatch.setattr(paged_tpu, "pages_per_block", lambda v_PKCH: 2)
    monkeypatch.setattr(paged_tpu, "SLOTS", 8)


def make_case(*, heads, kv_heads, head_dim, page_tokens, dtype=jnp.float32, seed=0):
    N, K, H, C = heads, kv_heads, head_dim, page_tokens
    rng = np.random.default_rng(seed)
    tokens_B = np.round(np.array(LENGTHS_IN_PAGES) * C).astype(np.int32)
    B = len(tokens_B)
    pages_B = -(-tokens_B // C)
    J = pages_B.max() + 1
    P = pages_B.sum() + 5
    free = iter(rng.permutation(P))
    k_PKCH, v_PKCH = np.full((2, P, K, C, H), np.nan, np.float32)
    page_BJ = rng.integers(0, P, (B, J), np.int32)  # unused entries: any page, also of others
    for b in range(B):
        for j in range(pages_B[b]):
            page = page_BJ[b, j] = next(free)
            live = min(C, tokens_B[b] - j * C)
            k_PKCH[page, :, :live], v_PKCH[page, :, :live] = rng.normal(size=(2, K, live, H))
    q_BNH = 3 * rng.normal(size=(B, N, H))
    arrays = (a.astype(dtype) for a in (q_BNH, k_PKCH.swapaxes(2, 3), v_PKCH))
    return Case(*arrays, page_BJ, tokens_B)


def live_tokens(case, b):
    """(k_SKH, v_SKH) of slot b's tokens in order, float32."""
    C = case.v_PKCH.shape[2]
    tokens = case.tokens_B[b]
    live = [(case.page_BJ[b, start // C], min(C, tokens - start)) for start in range(0, tokens, C)]
    pool = (case.k_PKHC.swapaxes(2, 3), case.v_PKCH)
    return (
        np.concatenate([x[page, :, :n].swapaxes(0, 1) for page, n in live]).astype(np.float32)
        for x in pool
    )


def reference(case, b):
    """(out_NH, max_N, sum_N) of a slot that has tokens, from the definition."""
    k_SKH, v_SKH = live_tokens(case, b)
    N, H = case.q_BNH.shape[1:]
    of_head_N = np.arange(N) // (N // k_SKH.shape[1])
    x_NS = np.einsum("NH,SNH->NS", case.q_BNH[b].astype(np.float32), k_SKH[:, of_head_N])
    x_NS = x_NS / np.sqrt(H)
    weight_NS = np.exp(x_NS - x_NS.max(axis=1, keepdims=True))
    out_NH = np.einsum("NS,SNH->NH", weight_NS, v_SKH[:, of_head_N])
    return out_NH, x_NS.max(axis=1), weight_NS.sum(axis=1)


SHAPES = {
    "grouped": {"heads": 6, "kv_heads": 2, "head_dim": 16, "page_tokens": 16},
    "one key head": {
        "heads": 5,
        "kv_heads": 1,
        "head_dim": 128,
        "page_tokens": 64,
        "dtype": jnp.bfloat16,
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
    """Every slot: the definition over its live tokens and nothing else; 0, MASKED, 0 if none."""
    case = make_case(**SHAPES[shape])
    out_BNH, max_BN, sum_BN = case()
    assert out_BNH.dtype == max_BN.dtype == sum_BN.dtype == np.float32
    # In bfloat16 the weights are rounded once more than in the reference.
    rounding = 1e-5 if case.q_BNH.dtype == jnp.float32 else 1e-2
    for b in range(len(out_BNH)):
        if case.tokens_B[b] == 0:
            assert not out_BNH[b].any() and not sum_BN[b].any()
            assert (max_BN[b] == np.float32(MASKED)).all()
            continue
        out_NH, max_N, sum_N = reference(case, b)
        np.testing.assert_allclose(
            out_BNH[b] / sum_BN[b][:, None], out_NH / sum_N[:, None], atol=rounding
        )
        np.testing.assert_allclose(max_BN[b], max_N, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(sum_BN[b], sum_N, rtol=1e-4)


def same_bits(results, others):
    for x, y in zip(results, others, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("shape", ["grouped", "tokens last"])
def test_a_slot_depends_on_itself_alone(shape):
    """Bitwise: not on its place in the batch, its pages, other slots or the table's width."""
    case = make_case(**SHAPES[shape])
    expected = case()
    B, P = len(case.page_BJ), len(case.v_PKCH)
    rng = np.random.default_rng(1)

    slot_B, page_P = rng.permutation(B), rng.permutation(P)
    place_P = np.argsort(page_P).astype(np.int32)
    moved = Case(
        case.q_BNH[slot_B],
        case.k_PKHC[page_P],
        case.v_PKCH[page_P],
        place_P[case.page_BJ][slot_B],
        case.tokens_B[slot_B],
    )
    same_bits(moved(), [x[slot_B] for x in expected])

    alone = np.arange(B) == 5
    others_are_idle = dataclasses.replace(case, tokens_B=case.tokens_B * alone)
    same_bits([x[5] for x in others_are_idle()], [x[5] for x in expected])

    others_are_nan = dataclasses.replace(
        case, q_BNH=np.where(alone[:, None, None], case.q_BNH, case.q_BNH.dtype.type(np.nan))
    )
    same_bits([x[5] for x in others_are_nan()], [x[5] for x in expected])

    wide = np.concatenate([case.page_BJ, np.zeros((B, 9), np.int32)], axis=1)
    same_bits(dataclasses.replace(case, page_BJ=wide)(), expected)


def test_reads_are_waited_for_and_in_bounds(capfd):
    """The simulated TPU (reads done when waited for, memory NaN before) has the same bits.

    It raises on reads past an array and reports races between reads and arithmetic.
    """
    case = make_case(**SHAPES["grouped"])
    simulated = case(interpret=pltpu.InterpretParams(detect_races=True))
    same_bits(simulated, case())
    assert "RACE" not in capfd.readouterr().out


def test_sharded_over_slots_and_heads():
    """Under shard_map each shard has its slots and heads and gives the same bits."""
    case = make_case(**SHAPES["grouped"])
    mesh = make_mesh(data=2, model=2, devices=jax.devices()[:4])
    slots, heads = PartitionSpec("data"), PartitionSpec("data", "model")
    pool = PartitionSpec(None, "model")
    run = jax.shard_map(
        functools.partial(paged_attention, interpret=True),
        mesh=mesh,
        in_specs=(heads, pool, pool, slots, slots),
        out_specs=(heads, heads, heads),
        check_vma=False,  # the interpreter does not know it; the compiler's test below has it on
    )
    ten = slice(10)  # divides by the shards
    results = jit(run)(
        case.q_BNH[ten],
        case.k_PKHC,
        case.v_PKCH,
        case.page_BJ[ten],
        case.tokens_B[ten],
    )
    same_bits(results, [x[ten] for x in case()])


def test_refuses_what_it_cannot_read_well():
    """One dtype and shape, and pages that a TPU reads without laying the pool out anew."""
    case = make_case(**SHAPES["grouped"])
    with pytest.raises(ValueError, match="one dtype"):
        dataclasses.replace(case, v_PKCH=case.v_PKCH.astype(jnp.bfloat16))()
    with pytest.raises(ValueError, match="head size"):
        dataclasses.replace(case, q_BNH=case.q_BNH[..., :8])()
    with pytest.raises(ValueError, match="pages of 16 tokens"):
        case(interpret=False)


TPUS = {
    "v5e": ("v5e:2x2", "v5litepod-4"),
    "v5p": ("v5p:2x2x1", "v5p-8"),
    "v6e": ("v6e:2x2", "v6e-4"),
}
# Of one chip: Qwen2.5 0.5B; 7B split 4 ways; 32B split 8 and 4 ways.
LOCAL_HEADS = ((14, 2, 64), (7, 1, 128), (5, 1, 128), (10, 2, 128))


@pytest.mark.parametrize("tpu", TPUS)
def test_compiles_for_tpu(tpu):
    """The TPU's compiler takes the kernel inside shard_map, a loop and several layers.

    And none of the pools is copied: the program's own memory is far below one pool's.
    """
    pytest.importorskip("libtpu")
    environment = os.environ | {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": TPUS[tpu][1],
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
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
    """Compile 8 decode-like steps of two layers on 4 chips; prints pool and temporary bytes."""
    from jax.experimental import topologies

    (N, K, H), C, B, J, P, D = heads, 128, 64, 180, 16_384, 256
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[tpu][0])
    mesh = make_mesh(data=2, model=2, devices=topology.devices)
    slots, pool = PartitionSpec("data"), PartitionSpec("data", "model")
    specs = (slots, [(pool, pool)] * 2, PartitionSpec(None, "model"), slots, slots)

    def steps(x_BD, pools, w_DNH, page_BJ, tokens_B):
        def step(_, x_BD):
            for k_PKHC, v_PKCH in pools:
                q_BNH = jnp.einsum("BD,DNH->BNH", x_BD, w_DNH)
                out_BNH, _, sum_BN = paged_attention(
                    q_BNH, k_PKHC, v_PKCH, page_BJ, tokens_B, interpret=False
                )
                out_BNH = (out_BNH / sum_BN[..., None]).astype(x_BD.dtype)
                x_BD += jax.lax.psum(jnp.einsum("BNH,DNH->BD", out_BNH, w_DNH), "model")
            return x_BD

        return jax.lax.fori_loop(0, 8, step, x_BD)

    def abstract(spec, shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    k_PKHC, v_PKCH = (abstract(pool, (2 * P, 2 * K, *page)) for page in ((H, C), (C, H)))
    arguments = (
        abstract(slots, (2 * B, D)),
        [(k_PKHC, v_PKCH)] * 2,
        abstract(specs[2], (D, 2 * N, H)),
        abstract(slots, (2 * B, J), jnp.int32),
        abstract(slots, (2 * B,), jnp.int32),
    )
    run = jax.shard_map(steps, mesh=mesh, in_specs=specs, out_specs=slots)
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(*arguments).compile()
    assert compiled.as_text().count("tpu_custom_call") >= 2
    print(tpu, heads, P * K * C * H * 2, compiled.memory_analysis().temp_size_in_bytes)


if __name__ == "__main__":
    for heads in LOCAL_HEADS:
        compile_for(sys.argv[1], heads=heads)
