"""Decode attention over pages: the kernel interpreted on CPU, and compiled by the TPU compiler."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec
from processes import ROOT, ran

from dapo_jax.preflight.compile import LIBTPU, topology_devices
from models.kernels import paged_tpu, xla
from models.kernels.paged_tpu import paged_attention
from models.kernels.pages_tpu import copy_pages, write_pages
from sharding.mesh import make_mesh
from tests.paged import (
    a_slot_depends_on_itself_alone,
    make_case,
    matches_the_definition,
    sees_a_window,
)
from tests.quick import jit

RUN = jit(paged_attention, static_argnames=("window", "interpret"))


@pytest.fixture(autouse=True)
def two_pages_a_block(monkeypatch):
    """Blocks of two pages and grid steps of eight slots, so that small cases have several."""
    monkeypatch.setattr(paged_tpu, "pages_per_block", lambda v_PKCH: 2)
    monkeypatch.setattr(paged_tpu, "SLOTS", 8)


HALF = {"dtype": jnp.bfloat16}
SHAPES = {
    "grouped": {"heads": 6, "kv_heads": 2, "head_dim": 16, "page_tokens": 16},
    "one key head": {"heads": 5, "kv_heads": 1, "head_dim": 128, "page_tokens": 64, **HALF},
    # The head is small and the page is not: on TPU its tokens are stored last.
    "tokens last": {"heads": 14, "kv_heads": 2, "head_dim": 64, "page_tokens": 128, **HALF},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_definition(shape):
    matches_the_definition(make_case(RUN, **SHAPES[shape]))


@pytest.mark.parametrize("shape", ["grouped", "tokens last"])
def test_a_window_is_seen_and_no_page_before_it_read(shape):
    """Windows have one token, end in a page, have a whole page, or two and one more token."""
    for window in (1, 7, 16, 33):
        sees_a_window(make_case(RUN, **SHAPES[shape]), window)


@pytest.mark.parametrize("shape", ["grouped", "tokens last"])
def test_a_slot_depends_on_itself_alone(shape):
    a_slot_depends_on_itself_alone(make_case(RUN, **SHAPES[shape]))


def test_reads_are_waited_for_and_in_bounds(capfd):
    """The simulated TPU (reads done when waited for, memory NaN before) has the same bits.

    It raises on reads past an array and reports races between reads and arithmetic.
    """
    case = make_case(RUN, **SHAPES["grouped"])
    simulated = case(interpret=pltpu.InterpretParams(detect_races=True))
    np.testing.assert_array_equal(simulated, case())
    assert "RACE" not in capfd.readouterr().out


TPUS = ("v5p:2x2x1", pytest.param("v5e:2x2", marks=pytest.mark.slow))


@pytest.mark.parametrize(("H", "C"), [(64, 128), (128, 16)])
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


# Of one chip: Qwen2.5 0.5B; 7B split 4 ways; 32B split 4 ways.
LOCAL_HEADS = ((14, 2, 64), (7, 1, 128), (10, 2, 128))


@pytest.mark.skipif(not LIBTPU.exists(), reason="needs the TPU's compiler: `make preflight`")
@pytest.mark.parametrize("tpu", TPUS)
def test_compiles_for_tpu(tpu):
    """The TPU's compiler takes the kernel inside shard_map, a loop and several layers.

    And none of the pools is copied: the program's own memory is far below one pool's.
    """
    done = ran(__file__, tpu, PYTHONPATH=str(ROOT))
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == len(LOCAL_HEADS)
    for line in lines:
        pool_bytes, temporary_bytes = (int(field) for field in line.split()[-2:])
        assert temporary_bytes < pool_bytes / 8, line


def compile_for(tpu, *, heads):
    """Compile 8 decode-like steps of two layers on 4 chips; prints pool and temporary bytes.

    The pools are then written to, by block and by page, and returned in place of those given.
    """
    (N, K, H), C, B, J, P, D, S, M = heads, 128, 64, 180, 16_384, 256, 16, 8
    mesh = make_mesh(data=2, model=2, devices=topology_devices(tpu, slices=1))
    slots, pool = PartitionSpec("data"), PartitionSpec("data", "model")
    specs = (slots, [(pool, pool)] * 2, PartitionSpec(None, "model"), *[slots] * 3)

    def steps(x_BD, pools, w_DNH, page_BX, prompt_tokens_B, tokens_B):
        axes = jax.typeof(jnp.einsum("BD,DNH->BNH", x_BD, w_DNH)).manual_axis_type

        def step(i, x_BD):
            for k_PKHC, v_PKCH in pools:
                q_BNH = jnp.einsum("BD,DNH->BNH", x_BD, w_DNH)
                k_BKHR = jax.lax.pcast(
                    jnp.ones((B, K, H, S), q_BNH.dtype), tuple(axes.varying), to="varying"
                )
                recent, pool = (k_BKHR, k_BKHR.swapaxes(2, 3)), (k_PKHC, v_PKCH)
                tokens = (prompt_tokens_B, tokens_B)
                out_BNH = paged_attention(
                    q_BNH, recent, tokens_B % S + i, pool, pool, page_BX, *tokens, interpret=False
                )
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
