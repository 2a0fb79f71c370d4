"""Chunked log-probabilities against the whole log_softmax: values, gradients, entropy, memory."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import equations, jit

from dapo_jax.logprobs import CHUNK_TOKENS, Softmax, chosen_logprobs, head_loss, head_loss_of_rows
from sharding.mesh import make_mesh

B, D, V = 4, 8, 50
SETTINGS = {"temperature": 0.7, "vocab_size": 45}
# Tokens a row for which B rows fill a chunk.
CHUNK = CHUNK_TOKENS // B
ONE = (1, 1, 1)  # slices, data, model


def inputs(T, *, scale=1.0):
    """(x_BTD, head_DV, target_BT, weight_BT); the last columns of the head are padding."""
    rng = np.random.default_rng(T)
    x_BTD = rng.normal(size=(B, T, D)).astype(np.float32)
    head_DV = rng.normal(0, scale, (D, V)).astype(np.float32)
    target_BT = rng.integers(0, SETTINGS["vocab_size"], (B, T))
    return x_BTD, head_DV, target_BT, rng.normal(size=(B, T)).astype(np.float32)


def token_loss(logp, entropy, tokens):
    """Tells the tokens apart, is linear in neither number, and has an indicator."""
    weight = tokens["weight"]
    loss = weight * (logp + 0.1 * logp**2) - 0.3 * weight**2 * (entropy + 0.1 * entropy**2)
    return loss, {"half": 0.5 * logp}


def whole(x_BTD, head_DV, target_BT, weight_BT):
    """The definition, at once: log softmax over the tokenizer's ids only, and its entropy."""
    logits_BTV = (x_BTD @ head_DV / SETTINGS["temperature"])[..., : SETTINGS["vocab_size"]]
    logp_BTV = jax.nn.log_softmax(logits_BTV)
    logp_BT = jnp.take_along_axis(logp_BTV, target_BT[..., None], axis=-1)[..., 0]
    entropy_BT = -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, axis=-1)
    loss_BT, indicators = token_loss(logp_BT, entropy_BT, {"weight": weight_BT})
    loss = jnp.sum(loss_BT)
    return -3 * loss, (loss, logp_BT, entropy_BT, indicators["half"])


whole_gradient = jit(jax.value_and_grad(whole, argnums=(0, 1), has_aux=True))


@functools.cache
def chunked(mesh, head_loss=head_loss):
    """Programs of the inputs on a mesh: (log-probabilities and entropies alone, the gradient).

    The loss is a part of a larger one, to whose gradient the rest adds nothing.
    """
    slices, data, model = mesh
    devices = jax.devices()[: slices * data * model]
    mesh = make_mesh(slices=slices, data=data, model=model, devices=devices)
    softmax = Softmax(**SETTINGS, mesh=mesh)

    def loss(x_BTD, head_DV, target_BT, weight_BT):
        tokens = {"weight": weight_BT}
        given = x_BTD, head_DV, target_BT, tokens, token_loss, softmax
        loss, *chosen = head_loss(*given, takes_entropy=True)
        chosen[-1] = chosen[-1]["half"]
        return -3 * loss + jnp.sum(jnp.stack(chosen)), (loss, *chosen)

    alone = jit(functools.partial(chosen_logprobs, softmax=softmax))
    return alone, jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize(
    ("mesh", "T", "head_loss"),
    [
        *((ONE, T, head_loss) for T in (1, CHUNK, 2 * CHUNK + 3)),
        *((mesh, 2 * CHUNK + 3, head_loss) for mesh in ((1, 2, 2), (2, 2, 1))),
        ((1, 2, 2), 2 * CHUNK + 3, head_loss_of_rows),
    ],
)
def test_values_loss_and_gradients_equal_those_of_the_whole_softmax(mesh, T, head_loss):
    """On one device around chunk boundaries, and with rows and vocabulary over several."""
    given = inputs(T)
    alone, program = chunked(mesh, head_loss)
    (_, (loss, *chosen)), gradient = program(*given)
    (_, (expected_loss, *expected)), expected_gradient = whole_gradient(*given)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5, atol=1e-5)
    for values in (chosen, (*alone(*given[:3]), expected[-1])):
        for got, want in zip(values, expected, strict=True):
            assert got.shape == (B, T)
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(expected_gradient[1][:, : SETTINGS["vocab_size"]]).min() > 0
    for got, want in zip(gradient, expected_gradient, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-5)


def test_gradients_of_bfloat16_inputs_are_rounded_once():
    """Each is the float32 sum over all chunks, rounded to bfloat16 at the end."""
    x_BTD, head_DV, *rest = inputs(3 * CHUNK)
    halves = x_BTD.astype(jnp.bfloat16), head_DV.astype(jnp.bfloat16)
    _, gradient = chunked(ONE)[1](*halves, *rest)
    _, expected = whole_gradient(*(np.asarray(half, np.float32) for half in halves), *rest)
    for got, want in zip(gradient, expected, strict=True):
        assert got.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want)
        assert error < 2**-8


@pytest.mark.parametrize("scale", [0.0, 1e6])
def test_extreme_logits_give_no_nan(scale):
    given = inputs(6, scale=scale)
    (_, (_, *chosen)), gradient = chunked(ONE)[1](*given)
    assert all(np.isfinite(array).all() for array in (*chosen, *gradient))
    assert np.min(chosen[1]) >= -1e-6


def largest_logits(jaxpr):
    """Elements of the largest array with a vocabulary axis that a jaxpr makes."""
    shapes = [out.aval.shape for eqn in equations(jaxpr) for out in eqn.outvars]
    return max(math.prod(it) for it in shapes if it[-1:] == (V,) and it != (D, V))


def test_only_a_chunks_logits_exist_in_the_backward_pass_too():
    """It holds one chunk's logits of a sequence of four; the plain function holds all four."""
    for program, tokens in ((chunked(ONE)[1], CHUNK_TOKENS), (whole_gradient, 4 * CHUNK_TOKENS)):
        jaxpr = jax.make_jaxpr(program.__wrapped__)(*inputs(4 * CHUNK))
        assert largest_logits(jaxpr.jaxpr) == tokens * V
