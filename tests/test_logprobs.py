"""Chunked log-probabilities against the whole log_softmax: values, gradients, entropy, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.logprobs import CHUNK_TOKENS, chosen_logprobs, head_loss, sampling_logits
from sharding.mesh import make_mesh
from tests.quick import jit

B, D, V = 4, 8, 50
SETTINGS = {"temperature": 0.7, "vocab_size": 45}
# Tokens a row for which B rows fill a chunk.
CHUNK = CHUNK_TOKENS // B
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)
MESHES = ((1, 1, 1), (1, 2, 2), (2, 2, 1))  # (slices, data, model)


def mesh_of(slices, data, model):
    devices = jax.devices()[: slices * data * model]
    return make_mesh(data=data, model=model, slices=slices, devices=devices)


def inputs(T, *, scale=1.0):
    rng = np.random.default_rng(T)
    x_BTD = rng.normal(size=(B, T, D)).astype(np.float32)
    head_DV = rng.normal(0, scale, (D, V)).astype(np.float32)
    return x_BTD, head_DV, rng.integers(0, SETTINGS["vocab_size"], (B, T))


def whole(x_BTD, head_DV, target_BT):
    """The definition, at once: log softmax over the tokenizer's ids only, and its entropy."""
    logits_BTV = (x_BTD @ head_DV / SETTINGS["temperature"])[..., : SETTINGS["vocab_size"]]
    logp_BTV = jax.nn.log_softmax(logits_BTV)
    logp_BT = jnp.take_along_axis(logp_BTV, target_BT[..., None], axis=-1)[..., 0]
    return logp_BT, -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, axis=-1)


chunked = jit(functools.partial(chosen_logprobs, **SETTINGS, mesh=mesh_of(1, 1, 1)))


def token_loss(logp, tokens):
    """Tells the tokens apart, and is not linear in the log-probability."""
    return tokens["weight"] * (logp + 0.1 * logp**2)


def whole_loss(x_BTD, head_DV, target_BT, weight_BT):
    logp_BT, entropy_BT = whole(x_BTD, head_DV, target_BT)
    return jnp.sum(token_loss(logp_BT, {"weight": weight_BT})), (logp_BT, entropy_BT)


@functools.cache
def chunked_gradient(slices, data, model, *, scale=1.0):
    """((loss, (logp, entropy)), gradients) of `scale` times the loss."""

    def loss(x_BTD, head_DV, target_BT, weight_BT):
        tokens = {"weight": weight_BT}
        how = SETTINGS | {"mesh": mesh_of(slices, data, model)}
        loss, *chosen = head_loss(x_BTD, head_DV, target_BT, tokens, token_loss, **how)
        return scale * loss, tuple(chosen)

    return jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


whole_gradient = jit(jax.value_and_grad(whole_loss, argnums=(0, 1), has_aux=True))


def weights(T):
    return np.random.default_rng(0).normal(size=(B, T)).astype(np.float32)


@pytest.mark.parametrize("T", LENGTHS)
def test_values_equal_the_whole_softmax_around_chunk_boundaries(T):
    arrays = inputs(T)
    logp_BT, entropy_BT = chunked(*arrays)
    assert logp_BT.shape == entropy_BT.shape == (B, T)
    assert logp_BT.dtype == entropy_BT.dtype == jnp.float32
    expected_logp_BT, expected_entropy_BT = jit(whole)(*arrays)
    np.testing.assert_allclose(logp_BT, expected_logp_BT, atol=1e-5)
    np.testing.assert_allclose(entropy_BT, expected_entropy_BT, atol=1e-5)


@pytest.mark.parametrize("T", [1, 2 * CHUNK + 3])
@pytest.mark.parametrize(("slices", "data", "model"), MESHES)
def test_loss_and_gradients_equal_those_of_the_whole_softmax(T, slices, data, model):
    """On one device, and with rows and vocabulary over several."""
    (loss, chosen), gradient = chunked_gradient(slices, data, model)(*inputs(T), weights(T))
    (whole_loss, whole_chosen), expected = whole_gradient(*inputs(T), weights(T))
    assert np.abs(expected[1][:, : SETTINGS["vocab_size"]]).min() > 0
    np.testing.assert_allclose(loss, whole_loss, rtol=1e-5, atol=1e-5)
    for got, want in zip((*chosen, *gradient), (*whole_chosen, *expected), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-5)


def test_the_loss_may_be_a_part_of_a_larger_one():
    """Gradients are made with the value; what is applied to the value later scales them."""
    _, once = chunked_gradient(1, 1, 1)(*inputs(4), weights(4))
    _, thrice = chunked_gradient(1, 1, 1, scale=-3.0)(*inputs(4), weights(4))
    for got, want in zip(thrice, once, strict=True):
        np.testing.assert_allclose(got, -3 * want, rtol=1e-6)


def test_log_probability_and_entropy_carry_no_gradient():
    def others(x_BTD, head_DV, target_BT):
        tokens = {"weight": weights(4)}
        how = SETTINGS | {"mesh": mesh_of(1, 1, 1)}
        _, logp_BT, entropy_BT = head_loss(x_BTD, head_DV, target_BT, tokens, token_loss, **how)
        return jnp.sum(logp_BT + entropy_BT)

    for gradient in jit(jax.grad(others, argnums=(0, 1)))(*inputs(4)):
        assert not np.any(gradient)


def test_gradients_of_bfloat16_inputs_are_rounded_once():
    """Each is the float32 sum over all chunks, rounded to bfloat16 at the end."""
    T = 3 * CHUNK
    x_BTD, head_DV, target_BT = inputs(T)
    halves = x_BTD.astype(jnp.bfloat16), head_DV.astype(jnp.bfloat16)
    _, gradient = chunked_gradient(1, 1, 1)(*halves, target_BT, weights(T))
    floats = (np.asarray(half, np.float32) for half in halves)
    _, expected = whole_gradient(*floats, target_BT, weights(T))
    for got, want in zip(gradient, expected, strict=True):
        assert got.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want)
        assert error < 2**-8


def test_entropy_of_equal_and_of_certain_tokens():
    x_BTD = jnp.ones((1, 2, D)) * jnp.array([0.0, 10.0])[None, :, None]
    head_DV = jnp.zeros((D, V)).at[:, 7].set(1.0)
    logp_BT, entropy_BT = chunked(x_BTD, head_DV, jnp.array([[7, 7]]))
    np.testing.assert_allclose(entropy_BT, [[np.log(45), 0.0]], atol=1e-5)
    np.testing.assert_allclose(logp_BT, [[-np.log(45), 0.0]], atol=1e-5)


def test_padding_rows_of_the_vocabulary_have_no_probability():
    """Even the largest logits, in the model's rows that the tokenizer lacks."""
    x_BTD, head_DV, _ = inputs(5)
    head_DV[:, SETTINGS["vocab_size"] :] = 1e3 * np.sign(x_BTD[0, 0])[:, None]
    prob_V = jax.nn.softmax(sampling_logits(x_BTD[0, 0] @ head_DV, **SETTINGS, first_id=0))
    assert not np.any(prob_V[SETTINGS["vocab_size"] :])
    assert np.sum(prob_V) == pytest.approx(1, abs=1e-6)
    target_BT = np.arange(SETTINGS["vocab_size"])[None]
    x_BTD = np.broadcast_to(x_BTD[:1, :1], (1, SETTINGS["vocab_size"], D))
    logp_BT, _ = chunked(x_BTD, head_DV, target_BT)
    assert np.sum(np.exp(logp_BT)) == pytest.approx(1, abs=1e-6)


def test_a_part_of_the_head_gives_its_columns_of_the_logits():
    """The padding is found by the vocabulary's ids, wherever the part begins."""
    x_BTD, head_DV, _ = inputs(5)
    whole_BTV = sampling_logits(x_BTD @ head_DV, **SETTINGS, first_id=0)
    for first in (0, 20, 40):
        part_DV = head_DV[:, first : first + 10]
        part_BTV = sampling_logits(x_BTD @ part_DV, **SETTINGS, first_id=first)
        np.testing.assert_allclose(part_BTV, whole_BTV[..., first : first + 10], rtol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e3, 1e6])
def test_extreme_logits_give_no_nan(scale):
    x_BTD, head_DV, target_BT = inputs(6, scale=scale)
    logp_BT, entropy_BT = chunked(x_BTD, head_DV, target_BT)
    assert np.all(np.isfinite(logp_BT))
    assert np.all(np.isfinite(entropy_BT))
    assert np.min(entropy_BT) >= -1e-6
    _, gradient = chunked_gradient(1, 1, 1)(x_BTD, head_DV, target_BT, weights(6))
    assert all(np.all(np.isfinite(d)) for d in gradient)


def largest_logits(jaxpr):
    """Elements of the largest array with a vocabulary axis that a (nested) jaxpr makes."""
    sizes = [
        int(np.prod(v.aval.shape))
        for equation in jaxpr.eqns
        for v in equation.outvars
        if v.aval.shape[-1:] == (V,) and v.aval.shape != (D, V)
    ]
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                sizes.append(largest_logits(inner))
    return max(sizes, default=0)


@pytest.mark.parametrize(
    ("function", "tokens"),
    [(chunked_gradient(1, 1, 1), CHUNK_TOKENS), (whole_gradient, 4 * CHUNK_TOKENS)],
)
def test_only_a_chunks_logits_exist_in_the_backward_pass_too(function, tokens):
    """It holds one chunk's logits of a sequence of four; the plain function holds all four."""
    T = 4 * CHUNK
    jaxpr = jax.make_jaxpr(function.__wrapped__)(*inputs(T), weights(T))
    assert largest_logits(jaxpr.jaxpr) == tokens * V
