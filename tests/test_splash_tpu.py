"""The TPU's attention of packed rows, interpreted on CPU, against plain XLA's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.kernels import splash_tpu
from models.kernels.packed import packed_attention
from models.kernels.splash_tpu import splash_attention
from tests.quick import jit


@pytest.mark.parametrize("head_dim", [128, 64])
def test_agrees_with_plain_attention_forward_and_backward(head_dim, monkeypatch):
    """Rows of several segments and padding, of several blocks and no whole number of them."""
    monkeypatch.setattr(splash_tpu, "BLOCK_TOKENS", 128)
    rng = np.random.default_rng(0)
    segment_BT = np.stack([np.repeat([1, 2, 3, 0], [100, 33, 50, 17]), np.repeat([1, 2], [1, 199])])
    B, T = segment_BT.shape
    arrays = [rng.normal(size=(B, T, heads, head_dim)).astype(np.float32) for heads in (4, 2, 2)]
    numbers = segment_BT.astype(np.int32), np.zeros((B, T), np.int32)
    used_BT11 = (segment_BT > 0)[..., None, None]

    def value_and_gradient(function):
        def loss(*arrays):
            return jnp.sum(jnp.sin(function(*arrays, *numbers)) * used_BT11)

        return jax.device_get(jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arrays))

    value, gradient = value_and_gradient(lambda *args: splash_attention(*args, interpret=True))
    expected, expected_gradient = value_and_gradient(packed_attention)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for got, want in zip(gradient, expected_gradient, strict=True):
        np.testing.assert_allclose(got, want, atol=5e-5)
