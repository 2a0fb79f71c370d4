"""Parameters in both layouts, and pages in programs of all sizes; test_parity.py has logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.kernels.cpu import DECODE_OPTIONS
from models.kernels.xla import attention, page_attention
from models.parameters import logical_axes, param_axes
from models.qwen2 import Qwen2Config
from models.transformer import (
    Transformer,
    abstract_params,
    split,
    transposed,
    unstack,
)
from tests.quick import jit

SMALL = Qwen2Config(64, 32, 48, 2, 4, 2, 8, True)


def test_a_query_with_nothing_to_attend_to_stays_finite():
    q_BTNH, k_BSKH = np.ones((1, 1, 2, 4), np.float32), np.ones((1, 3, 1, 4), np.float32)
    v_BSKH = np.arange(12, dtype=np.float32).reshape(1, 3, 1, 4)
    out = jit(attention)(q_BTNH, k_BSKH, v_BSKH, np.zeros((1, 1, 3), bool))
    np.testing.assert_allclose(out[0, 0, 0], v_BSKH[0, :, 0].mean(axis=0), rtol=1e-6)


def test_a_page_has_the_same_bits_among_few_and_among_many():
    """Programs for few and for many pages take turns: a page's numbers do not tell which ran."""
    rng = np.random.default_rng(0)
    P, K, G, H, page_tokens = 67, 2, 4, 32, 8
    case = (
        rng.normal(size=(P, 1, K * G, H)).astype(np.float32),
        rng.normal(size=(P, K, H, page_tokens)).astype(np.float32),
        rng.normal(size=(P, K, page_tokens, H)).astype(np.float32),
        rng.integers(0, page_tokens + 1, P),
    )
    run = jax.jit(page_attention, compiler_options=DECODE_OPTIONS)  # as the engine does
    many = run(*case)
    for count in (1, 17, 34):
        for name, of_few, of_many in zip(
            ("out", "max", "sum"), run(*(a[:count] for a in case)), many, strict=True
        ):
            np.testing.assert_array_equal(of_few, of_many[:count], err_msg=f"{name} of {count}")


# The decoder's parameters.


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_unstacked_parameters_are_one_dict_a_layer_and_a_head(tie_embeddings):
    config = dataclasses.replace(SMALL, tie_embeddings=tie_embeddings)
    _, abstract = abstract_params(config)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(a.dtype), abstract)
    unstacked = unstack(params)
    assert len(unstacked["layers"]) == config.num_layers
    for i, layer in enumerate(unstacked["layers"]):
        np.testing.assert_array_equal(layer["gate_FD"], params["layers"]["gate_DF"][i].T)
        assert transposed(layer).keys() == params["layers"].keys()
        for name, param in transposed(layer).items():
            np.testing.assert_array_equal(param, params["layers"][name][i])
    expected_VD = params["embed_VD"] if tie_embeddings else params["head_DV"].T
    np.testing.assert_array_equal(unstacked["head_VD"], expected_VD)


def test_the_samplers_parameters_have_the_axes_that_their_names_say():
    """A matrix is sharded along the same axes whichever way round it is stored."""
    config = dataclasses.replace(SMALL, tie_embeddings=False)
    _, abstract = abstract_params(config)
    samplers = jax.eval_shape(unstack, abstract)
    names = config.parameters.keys() | samplers["layers"][0].keys() | samplers.keys() - {"layers"}
    axes = {name: logical_axes(name) for name in names}
    norms = {"attn_norm_D", "mlp_norm_D", "final_norm_D"}
    assert {name for name in names if axes[name] == ("norm",)} == norms
    sizes = ("vocab", "width", "heads", "kv_heads", "head_dim", "mlp")
    letters = dict(zip("VDNKHF", sizes, strict=True))
    for name in names - norms:
        assert axes[name] == tuple(letters[letter] for letter in name.rpartition("_")[2])
    assert len(names - norms) == 19
    assert param_axes(samplers)["layers"][1]["q_NHD"] == ("heads", "head_dim", "width")


def test_a_new_model_has_the_abstract_params_and_small_random_matrices():
    params = jit(lambda key: split(Transformer(SMALL, key=key))[1])(jax.random.key(1))
    _, abstract = abstract_params(SMALL)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(
        lambda a: (a.shape, a.dtype), abstract
    )
    assert np.std(params["layers"]["up_DF"]) == pytest.approx(0.02, rel=0.1)
    assert (params["layers"]["up_DF"][0] != params["layers"]["up_DF"][1]).all()
    assert (params["final_norm_D"] == 1).all()
    assert (params["layers"]["k_bias_KH"] == 0).all()


def test_bfloat16_parameters_give_bfloat16_activations_and_float32_logits():
    graph, abstract = abstract_params(SMALL)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: rng.normal(0, 0.3, a.shape).astype(a.dtype), abstract)
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    tokens_BT = rng.integers(0, SMALL.vocab_size, (2, 6))
    hidden = jax.eval_shape(
        lambda params: nnx.merge(graph, params).hidden(
            tokens_BT, np.ones_like(tokens_BT), lambda q, k, v: q
        ),
        low,
    )
    assert hidden.dtype == jnp.bfloat16
    run = jit(lambda params: nnx.merge(graph, params)(tokens_BT))
    full_BTV, logits_BTV = run(params), run(low)
    assert logits_BTV.dtype == jnp.float32
    assert 0 < np.abs(logits_BTV - full_BTV).max() < 0.05 * np.abs(full_BTV).max()
