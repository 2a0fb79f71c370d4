"""Packed rows for tests of the kernels that attend inside them, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from models.kernels.packed import packed_attention
from tests.quick import jit


def rows(*tokens):
    """Segments [B, T] of rows that hold segments of so many tokens; the last is padding."""
    return np.stack([np.repeat([*range(1, len(row)), 0], row) for row in tokens]).astype(np.int32)


def arrays(segment_BT, *, heads=(4, 2, 2), head_dim=16):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(*segment_BT.shape, n, head_dim)).astype(np.float32) for n in heads]


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


def value_and_gradient(attend, arrays, segment_BT, counts_BT, branch_BT=None, window=None):
    """(loss, gradients, outputs), the loss being over the tokens that count."""
    numbers = segment_BT, np.zeros_like(segment_BT) if branch_BT is None else branch_BT
    numbers += positions(*numbers), window

    def loss(*arrays):
        out_BTNH = attend(*arrays, *numbers)
        return jnp.sum(jnp.where(counts_BT[..., None, None], jnp.sin(out_BTNH), 0)), out_BTNH

    (value, out_BTNH), gradients = jax.device_get(
        jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)
    )
    return value, gradients, out_BTNH


def agrees_with_plain_attention(attend, segment_BT, *, head_dim, branch_BT=None, window=None):
    """Checks values and gradients of the tokens in use; returns the outputs of all."""
    used = segment_BT > 0
    given = arrays(segment_BT, head_dim=head_dim), segment_BT, used, branch_BT, window
    value, gradients, out_BTNH = value_and_gradient(attend, *given)
    expected, expected_gradients, expected_BTNH = value_and_gradient(packed_attention, *given)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(out_BTNH[used], expected_BTNH[used], atol=5e-5)
    for got, want in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(got, want, atol=5e-5)
    return out_BTNH


def other_segments_are_not_read(attend):
    """NaNs of one segment reach no block that does not visit it, masked or not."""
    segment_1T = rows([256, 128, 256, 0])
    its_1T = segment_1T == 2
    given = arrays(segment_1T)
    broken = [np.where(its_1T[..., None, None], array, np.nan) for array in given]
    _, gradients, out_1TNH = value_and_gradient(attend, broken, segment_1T, its_1T)
    _, expected_gradients, expected_1TNH = value_and_gradient(attend, given, segment_1T, its_1T)
    np.testing.assert_array_equal(out_1TNH[its_1T], expected_1TNH[its_1T])
    for got, want in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_array_equal(got[its_1T], want[its_1T])


ODD = rows([100, 33, 50, 17], [1, 199, 0])  # no whole number of blocks
MANY = rows([256, 128, 256, 0], [640, 0], [130, 300, 210], [3, 120, 5, 400, 112], [640])
