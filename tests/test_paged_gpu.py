"""Decode attention over pages: the GPU's kernels interpreted on CPU, lowered, and compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from test_engine import (
    PROMPTS,
    ROOMY,
    SAMPLING,
    SMALL,
    build,
    random_params,
    same_bits,
    sample_prompts,
)

from models.kernels import KERNELS, paged_gpu, triton
from models.kernels.paged_gpu import paged_attention
from models.kernels.xla import write_pages
from tests import gpus
from tests.paged import (
    a_slot_depends_on_itself_alone,
    make_case,
    matches_the_definition,
    sees_a_window,
)
from tests.quick import jit

RUN = jit(paged_attention, static_argnames=("window", "interpret"))
TINY = {"head_dim": 16, "page_tokens": 16}
SHAPES = {
    "groups of 5": {"heads": 10, "kv_heads": 2, **TINY},
    "more heads than rows": {"heads": 20, "kv_heads": 1, **TINY},
    "half precision": {"heads": 7, "kv_heads": 1, "dtype": jnp.bfloat16, **TINY},
    "0.5B": {"heads": 14, "kv_heads": 2, "head_dim": 64, "page_tokens": 32, "dtype": jnp.bfloat16},
}


@pytest.fixture(autouse=True)
def small_splits(monkeypatch):
    """Splits of two pages and tiles of at most 32 tokens, so that small cases have several."""
    monkeypatch.setattr(paged_gpu, "pages_per_split", lambda page_tokens: 2)
    monkeypatch.setattr(paged_gpu, "TILE_TOKENS", 32)


@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_definition(shape):
    matches_the_definition(make_case(RUN, **SHAPES[shape]))


@pytest.mark.parametrize("shape", ["groups of 5", "half precision"])
def test_a_window_is_seen_and_no_page_before_it_read(shape):
    """Windows have one token, end in a page, have a whole page, or two and one more token."""
    for window in (1, 7, 16, 33):
        sees_a_window(make_case(RUN, **SHAPES[shape]), window)


@pytest.mark.parametrize("shape", ["groups of 5", "half precision"])
def test_a_slot_depends_on_itself_alone(shape):
    a_slot_depends_on_itself_alone(make_case(RUN, **SHAPES[shape]))


def test_refuses_sizes_that_are_no_powers_of_two():
    """The interpreter takes other sizes of pages."""
    for C in (8, 48):
        other = make_case(RUN, heads=2, kv_heads=2, head_dim=16, page_tokens=C)
        with pytest.raises(ValueError, match=f"pages of {C} tokens.* powers of two"):
            other(interpret=False)


@pytest.mark.parametrize("S", [4, 32])
def test_a_block_is_written_to_its_page_and_nowhere_else(S):
    rng = np.random.default_rng(0)
    B, P, K, H, C = 4, 9, 2, 64, 32

    def tokens(count, length):
        shapes = ((count, K, H, length), (count, K, length, H))
        return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]

    pool, new = tokens(P, C), tokens(B, S)
    page_B, offset_B = np.array([3, 0, 8, 0]), rng.integers(0, C // S, B) * S
    expected_k, expected_v = (np.array(a) for a in pool)
    for b, (page, offset) in enumerate(zip(page_B, offset_B, strict=True)):
        if page == 0:  # nobody's
            continue
        expected_k[page, :, :, offset : offset + S] = new[0][b]
        expected_v[page, :, offset : offset + S] = new[1][b]
    found = write_pages(*pool, *new, page_B, offset_B)
    for ours, expected in zip(found, (expected_k, expected_v), strict=True):
        np.testing.assert_array_equal(ours, expected)


# The engine as a whole.


def test_an_engine_samples_what_plain_xla_does(monkeypatch):
    """And bit for bit the same alone as beside others."""
    monkeypatch.setattr(paged_gpu, "pages_per_split", lambda page_tokens: 1)
    params = random_params(SMALL)[1]
    engines = {
        name: build(SMALL, ROOMY, params, kernels=KERNELS[name])
        for name in ("xla", "gpu_interpret")
    }
    (expected, _), (found, _) = (sample_prompts(*e, SAMPLING) for e in engines.values())
    assert found.keys() == expected.keys()
    for request, response in found.items():
        wanted, close = expected[request], {"rtol": 1e-5, "atol": 1e-5}
        np.testing.assert_array_equal(response.tokens_T, wanted.tokens_T)
        np.testing.assert_allclose(response.behavior_logp_T, wanted.behavior_logp_T, **close)
    some = {cursor: PROMPTS[cursor] for cursor in (7, 12)}
    alone, _ = sample_prompts(*engines["gpu_interpret"], SAMPLING, prompts=some)
    same_bits(alone, {request: found[request] for request in alone})


# For a GPU. None is needed to lower programs, and none to compile them.

# Heads, key heads, head size, page and dtype: Qwen2.5 0.5B, 1.5B, 7B, Gemma 3 1B, Qwen2.5 32B.
HEADS = (
    (14, 2, 64, 128, jnp.bfloat16),
    (12, 2, 128, 128, jnp.bfloat16),
    (28, 4, 128, 64, jnp.bfloat16),
    (4, 1, 256, 128, jnp.bfloat16),
    (4, 1, 256, 128, jnp.float32),
    (40, 8, 128, 128, jnp.float32),
)


def steps(heads, *, sharding=None):
    """(jitted decode-like steps of two layers, arguments); the pools are written and returned."""
    (N, K, H, C, dtype), B, X, P, D, S = heads, 64, 180, 16_384, 256, 16

    def run(x_BD, pools, w_DNH, page_BX, prompt_tokens_B, tokens_B):
        def step(i, x_BD):
            for pool in pools:
                q_BNH = jnp.einsum("BD,DNH->BNH", x_BD, w_DNH)
                k_BKHS = jnp.ones((B, K, H, S), dtype)
                recent, tokens = (k_BKHS, k_BKHS.swapaxes(2, 3)), (prompt_tokens_B, tokens_B)
                arrays = (recent, tokens_B % S + i, pool, pool, page_BX, *tokens)
                window = 512 if H == 256 else None
                out_BNH = paged_attention(q_BNH, *arrays, window=window, interpret=False)
                x_BD += jnp.einsum("BNH,DNH->BD", out_BNH, w_DNH)
            return x_BD

        x_BD = jax.lax.fori_loop(0, 8, step, x_BD)
        new = jnp.broadcast_to(x_BD[:, None, :H, None], (B, K, H, S)).astype(dtype)
        where = page_BX[:, 0], page_BX[:, 1] % (C // S) * S
        return x_BD, [write_pages(*pool, new, new.swapaxes(2, 3), *where) for pool in pools]

    def abstract(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    pool = abstract(P, K, H, C), abstract(P, K, C, H)
    of_slots = abstract(B, dtype=jnp.int32)
    pages = abstract(B, X, dtype=jnp.int32)
    arguments = (abstract(B, D), [pool] * 2, abstract(D, N, H), pages, of_slots, of_slots)
    return jax.jit(run, donate_argnums=1), arguments


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_what_only_a_gpu_would_round_or_overflow(monkeypatch, capsys):
    """Read from the programs for Triton: float32 is not rounded, and offsets have 64 bits.

    The interpreter shows neither: with `triton.dot` at the default precision, which is TF32 on a
    GPU, all other tests of this file passed. A layer has two kernels.
    """
    monkeypatch.undo()  # splits of their real size
    printing = functools.partial(triton.pl.pallas_call, debug=True)
    monkeypatch.setattr(triton.pl, "pallas_call", printing)
    run, arguments = steps(HEADS[-1])
    (k_PKHC, _), _ = arguments[1]
    assert k_PKHC.dtype == jnp.float32 and k_PKHC.size * k_PKHC.dtype.itemsize > 2**32
    with gpus.an_h100():
        text = run.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.split("\n") if "xla.gpu.triton" in line]
    programs = capsys.readouterr().out.split("The Triton module for pallas_call ")[1:]
    assert len(programs) == len(calls) == 2 * 2
    assert sum("tt.dot" in program for program in programs) == 2 * 2
    assert not any("tf32" in program for program in programs)
    assert sum("xi64>" in program for program in programs) == 2  # not `combine`


@pytest.mark.slow
@gpus.NEEDS_COMPILER
def test_compiles_for_gpus():
    """No pool is copied: the program's own memory is far below one pool's; tiles fit on the chip.

    The compiler refuses tiles that take more shared memory than the GPU has.
    """
    lines = gpus.compiled(__file__)
    assert len(lines) == len(gpus.GPUS) * len(HEADS)
    for line in lines:
        pool_bytes, temporary_bytes = (int(field) for field in line.split()[-2:])
        assert temporary_bytes < pool_bytes / 4, line


if __name__ == "__main__":
    for name, mesh in gpus.meshes():
        for heads in HEADS:
            run, arguments = steps(heads, sharding=NamedSharding(mesh, PartitionSpec()))
            memory = run.lower(*arguments).compile().memory_analysis()
            (k_PKHC, _), _ = arguments[1]
            pool_bytes = k_PKHC.size * k_PKHC.dtype.itemsize
            print(name, heads, pool_bytes, memory.temp_size_in_bytes)
