"""The GPU's attention of packed rows, interpreted on CPU, against plain XLA's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from models.kernels.flash_gpu import flash_attention
from models.kernels.packed import packed_attention
from tests import gpus
from tests.packed_rows import MANY, ODD, arrays, value_and_gradient


def flash(*args):
    return flash_attention(*args, interpret=True)


@pytest.mark.parametrize(("segment_BT", "head_dim"), [(ODD, 128), (ODD, 80), (MANY, 64)])
def test_agrees_with_plain_attention_forward_and_backward(segment_BT, head_dim):
    """Segments end on borders of blocks and elsewhere; padding fills whole rows, too."""
    given = arrays(segment_BT, head_dim=head_dim), segment_BT, segment_BT > 0
    value, gradients, out_BTNH = value_and_gradient(flash, *given)
    expected, expected_gradients, expected_BTNH = value_and_gradient(packed_attention, *given)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    used = segment_BT > 0
    np.testing.assert_allclose(out_BTNH[used], expected_BTNH[used], atol=5e-5)
    assert np.isfinite(out_BTNH).all()
    for got, want in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(got, want, atol=5e-5)


# Heads, key heads, head size and dtype: Qwen2.5 0.5B, 1.5B and 7B, and a float32 one.
HEADS = (
    (14, 2, 64, jnp.bfloat16),
    (12, 2, 128, jnp.bfloat16),
    (28, 4, 128, jnp.bfloat16),
    (9, 3, 64, jnp.float32),
)


def gradient(heads, *, sharding=None):
    """(jitted gradient of two rows of 8,192 tokens, arguments)."""
    N, K, H, dtype = heads

    def loss(q_BTNH, k_BTKH, v_BTKH, segment_BT):
        return jnp.sum(flash_attention(q_BTNH, k_BTKH, v_BTKH, segment_BT, None) ** 2)

    def abstract(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct((2, 8_192, *shape), dtype, sharding=sharding)

    arguments = abstract(N, H), abstract(K, H), abstract(K, H), abstract(dtype=jnp.int32)
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))), arguments


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
