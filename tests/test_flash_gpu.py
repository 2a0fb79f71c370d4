"""The GPU's attention of packed rows, interpreted on CPU, against plain XLA's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from models.kernels import flash_gpu, triton
from models.kernels.flash_gpu import flash_attention
from models.kernels.packed import packed_attention
from models.transformer import segment_positions
from tests import gpus
from tests.packed_rows import (
    MANY,
    ODD,
    agrees_with_plain_attention,
    arrays,
    other_segments_are_not_read,
    positions,
    value_and_gradient,
)


def flash(*args):
    return flash_attention(*args, interpret=True)


def branches(segment_BT):
    """In every segment a quarter of the tokens is the prompt of three branches."""
    length_BT = np.sum(segment_BT[:, :, None] == segment_BT[:, None], axis=2)
    place_BT = segment_positions(segment_BT)
    branch_BT = np.where(segment_BT > 0, 4 * place_BT // length_BT, 0).astype(np.int32)
    return branch_BT + np.where(branch_BT > 0, 4 * segment_BT, 0)


@pytest.mark.parametrize(
    ("segment_BT", "head_dim", "window"),
    [(ODD, 128, None), (ODD, 16, None), (MANY, 64, None), (ODD, 16, 1), (MANY, 64, 70)],
)
def test_agrees_with_plain_attention_forward_and_backward(segment_BT, head_dim, window):
    """Segments end on borders of tiles and elsewhere; padding fills whole rows, too."""
    out_BTNH = agrees_with_plain_attention(
        flash, segment_BT, head_dim=head_dim, branch_BT=branches(segment_BT), window=window
    )
    assert not out_BTNH[segment_BT == 0].any()


@pytest.mark.parametrize("tile", [(32, 16), (16, 64)])
@pytest.mark.parametrize(("branched", "window"), [(False, None), (True, None), (True, 100)])
def test_visits_what_is_seen_once_and_without_a_mask_what_is_seen_whole(tile, branched, window):
    """Tells from all pairs of tokens; tiles between a prompt and a branch are not visited.

    With a window some are that nobody sees, where a tile holds tokens of two sequences.
    """
    segment_BT = np.pad(MANY, ((0, 0), (0, -MANY.shape[1] % 64)))
    branch_BT = branches(segment_BT) if branched else np.zeros_like(segment_BT)
    (B, T), (Q, S) = segment_BT.shape, tile
    seen_BTT = np.tril(segment_BT[:, :, None] == segment_BT[:, None])
    seen_BTT &= (branch_BT[:, None] == 0) | (branch_BT[:, :, None] == branch_BT[:, None])
    seen_BTT &= segment_BT[:, None] > 0
    position_BT, most = positions(segment_BT, branch_BT), 1.2
    if window is not None:
        seen_BTT &= position_BT[:, :, None] - position_BT[:, None] < window
        most = 2
    seen_BIQJS = seen_BTT.reshape(B, T // Q, Q, T // S, S)
    until_BT = flash_gpu._until(segment_BT, branch_BT)
    for axes, of_keys in (((0, 1, 3, 2, 4), False), ((0, 3, 1, 2, 4), True)):
        pairs_BIJQS = seen_BIQJS.transpose(axes)
        visits_BIJ, whole_BIJ = np.zeros((2, *pairs_BIJQS.shape[:3]), int)
        how = {"window": window, "of_keys": of_keys}
        bounds_BIX = np.array(flash_gpu._ranges(until_BT, position_BT, tile, **how))
        for b, i in np.ndindex(bounds_BIX.shape[:2]):
            for begin, whole, rest, end in bounds_BIX[b, i].reshape(-1, 4):
                visits_BIJ[b, i, begin:end] += 1
                whole_BIJ[b, i, whole:rest] += 1
        assert np.all(visits_BIJ[pairs_BIJQS.any(axis=(3, 4))] == 1)
        needed = pairs_BIJQS.any(axis=(3, 4)).sum()
        assert visits_BIJ.max() == 1 and visits_BIJ.sum() < most * needed
        if window is None:
            np.testing.assert_array_equal(whole_BIJ, pairs_BIJQS.all(axis=(3, 4)))
        assert whole_BIJ.any() and np.all(pairs_BIJQS.all(axis=(3, 4))[whole_BIJ > 0])


def test_tiles_without_its_segment_are_not_even_read():
    other_segments_are_not_read(flash)


@pytest.mark.parametrize("few", [0, flash_gpu.FEW])
def test_bfloat16_is_as_near_to_float32_as_plain_attention_is(few, monkeypatch):
    """Gradients of a key are summed over its query heads in float32, in a program or behind it."""
    monkeypatch.setattr(flash_gpu, "FEW", few)
    given = arrays(ODD, heads=(14, 2, 2), head_dim=64), ODD, ODD > 0
    rounded = [jnp.asarray(array, jnp.bfloat16) for array in given[0]], *given[1:]
    _, exact, _ = value_and_gradient(packed_attention, *given)
    errors = []
    for attend in (flash, packed_attention):
        _, gradients, _ = value_and_gradient(attend, *rounded)
        errors.append(
            [
                np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want)
                for got, want in zip(gradients, exact, strict=True)
            ]
        )
    assert np.all(np.array(errors[0]) < 1.2 * np.array(errors[1]))


# Heads, key heads, head size and dtype: Qwen2.5 0.5B, 1.5B and 7B, two in float32, Gemma 3 4B.
HEADS = (
    (14, 2, 64, jnp.bfloat16),
    (12, 2, 128, jnp.bfloat16),
    (28, 4, 128, jnp.bfloat16),
    (9, 3, 64, jnp.float32),
    (40, 8, 128, jnp.float32),
    (8, 4, 256, jnp.bfloat16),
    (8, 4, 256, jnp.float32),
)


def gradient(heads, *, sharding=None):
    """(jitted gradient of two rows of 8,192 tokens, arguments)."""
    N, K, H, dtype = heads

    def loss(q_BTNH, k_BTKH, v_BTKH, segment_BT):
        numbers = segment_BT, jnp.zeros_like(segment_BT)
        if H == 256:
            numbers += (segment_positions(segment_BT), 512)
        return jnp.sum(flash_attention(q_BTNH, k_BTKH, v_BTKH, *numbers) ** 2)

    def abstract(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct((2, 8_192, *shape), dtype, sharding=sharding)

    arguments = abstract(N, H), abstract(K, H), abstract(K, H), abstract(dtype=jnp.int32)
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))), arguments


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_float32_is_not_rounded_on_a_gpu(monkeypatch, capsys):
    """Read from the programs for Triton, since the interpreter does not show it: no TF32."""
    printing = functools.partial(triton.pl.pallas_call, debug=True)
    monkeypatch.setattr(triton.pl, "pallas_call", printing)
    run, arguments = gradient(HEADS[4])
    with gpus.an_h100():
        run.trace(*arguments).lower(lowering_platforms=("cuda",))
    programs = capsys.readouterr().out.split("The Triton module for pallas_call ")[1:]
    assert [program.count("tt.dot") for program in programs] == [4, 6, 8]
    assert not any("tf32" in program for program in programs)


@pytest.mark.slow
@gpus.NEEDS_COMPILER
def test_compiles_for_gpus():
    """Memory is linear in the row; tiles fit into shared memory and into registers."""
    no_spills = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"
    lines = gpus.compiled(__file__, XLA_FLAGS=no_spills)
    assert len(lines) == len(gpus.GPUS) * len(HEADS)
    for line in lines:
        queries_bytes, temporary_bytes = (int(field) for field in line.split()[-2:])
        assert temporary_bytes < 12 * queries_bytes, line


if __name__ == "__main__":
    for name, mesh in gpus.meshes():
        for heads in HEADS:
            run, arguments = gradient(heads, sharding=NamedSharding(mesh, PartitionSpec()))
            memory = run.lower(*arguments).compile().memory_analysis()
            queries_bytes = arguments[0].size * arguments[0].dtype.itemsize
            print(name, heads, queries_bytes, memory.temp_size_in_bytes)
