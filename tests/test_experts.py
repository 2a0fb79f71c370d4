"""Mixtures of experts: the definition, their bits, and routes from the sampler to the learner."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import (
    EXPERTS,
    FEW,
    OF_FEW,
    SCARCE,
    build,
    interrupted,
    programs,
    sample_prompts,
    step,
)
from flax import nnx
from golden import directory
from quick import jit, random_params
from safetensors.numpy import load_file

from dapo_jax import learner
from dapo_jax.convert import convert
from dapo_jax.process import hosts
from dapo_jax.sampler import plan
from models.hf import load_params
from models.hf_config import load_config
from models.kernels.xla import attention
from models.parameters import param_axes
from models.qwen3_moe import Qwen3MoeLayer
from models.transformer import ALONE, abstract_params, causal_mask
from sharding import rules
from sharding.mesh import make_mesh

GOLDEN = "qwen3_moe/normed"  # of 6 experts


def feed_forward(layer, h_BTD, routes=None):
    """(out_BTD, chosen_BTA) of a layer's experts, in float32."""

    def times(spec, x, w, name):
        return jnp.einsum(spec, x, w)

    return layer.feed_forward(h_BTD, times, routes, ALONE)


def out_of(layer, h_BTD, routes):
    return feed_forward(layer, h_BTD, routes)[0]


def expected(layer, h_BTD, chosen_BTA, norm_topk):
    """The same, of what every expert gives to every token."""
    of_experts = [
        (jax.nn.silu(h_BTD @ layer.gate_EDY[e]) * (h_BTD @ layer.up_EDY[e])) @ layer.down_EYD[e]
        for e in range(EXPERTS.num_experts)
    ]
    prob_BTX = jax.nn.softmax(h_BTD @ layer.router_DX[...], axis=-1)
    weight_BTA = jnp.take_along_axis(prob_BTX, chosen_BTA, axis=-1)
    weight_BTA /= weight_BTA.sum(axis=-1, keepdims=True) if norm_topk else 1
    out_BTAD = jnp.take_along_axis(jnp.stack(of_experts, axis=2), chosen_BTA[..., None], axis=2)
    return jnp.sum(weight_BTA[..., None] * out_BTAD, axis=2)


@pytest.mark.parametrize("norm_topk", [True, False])
def test_outputs_and_gradients_equal_the_definition(norm_topk):
    """With its own experts and with given ones; the router has a gradient in both."""
    config = dataclasses.replace(EXPERTS, norm_topk=norm_topk)
    layer = Qwen3MoeLayer(config, key=jax.random.key(0))
    for name in ("router_DX", "gate_EDY", "up_EDY", "down_EYD"):
        getattr(layer, name)[...] = 10 * getattr(layer, name)[...]
    h_BTD = jax.random.normal(jax.random.key(1), (2, 2, 32))
    _, chosen_BTA = jit(lambda: feed_forward(layer, h_BTD))()
    top_BTA = jax.lax.top_k(h_BTD @ layer.router_DX[...], 2)[1]
    np.testing.assert_array_equal(chosen_BTA, top_BTA)
    given_BTA = (chosen_BTA + 1) % 6
    graph, state = jax.tree.flatten(layer)[1], jax.tree.leaves(layer)

    def scalar(leaves, h_BTD, run):
        out_BTD = run(jax.tree.unflatten(graph, leaves), h_BTD)
        return jnp.sum(jnp.sin(out_BTD)), out_BTD

    both = jit(jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True), static_argnums=2)

    for routes in (None, given_BTA):
        used_BTA = np.asarray(chosen_BTA if routes is None else routes)
        ours = functools.partial(out_of, routes=routes)
        theirs = functools.partial(expected, chosen_BTA=used_BTA, norm_topk=norm_topk)
        ((_, out), found), ((_, expected_out), wanted) = (
            both(state, h_BTD, run) for run in (ours, theirs)
        )
        np.testing.assert_allclose(out, expected_out, atol=2e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, wanted)
        assert np.abs(jax.tree.unflatten(graph, found[0]).router_DX[...]).max() > 1e-3


def test_the_router_is_float32_where_tokens_are_bfloat16():
    """Rounded as the tokens are, its probabilities tie, and others are chosen."""
    layer = Qwen3MoeLayer(EXPERTS, key=jax.random.key(0))
    h_BTD = jax.random.normal(jax.random.key(1), (1, 2_000, 32), jnp.bfloat16)
    _, chosen_BTA = jit(lambda: feed_forward(layer, h_BTD))()
    logits_BTX = h_BTD.astype(jnp.float32) @ layer.router_DX[...]
    np.testing.assert_array_equal(chosen_BTA, jax.lax.top_k(logits_BTX, 2)[1])


def test_files_of_both_layouts_hold_the_same_model(tmp_path):
    """Stacked as transformers 5 saves, and a matrix an expert as published: bit by bit."""
    stacked, published = tmp_path / "stacked", tmp_path / "published"
    config = load_config(directory(GOLDEN, stacked))
    convert(f"hf:{stacked}", f"hf:{published}", dtype="float32")
    assert load_config(published) == config
    before, after = (load_file(it / "model.safetensors") for it in (stacked, published))
    for layer, e in itertools.product(range(2), range(6)):
        start = f"model.layers.{layer}.mlp.experts"
        gate, up = np.split(before[f"{start}.gate_up_proj"][e], 2)
        down = before[f"{start}.down_proj"][e]
        for name, tensor in {"gate": gate, "up": up, "down": down}.items():
            np.testing.assert_array_equal(after[f"{start}.{e}.{name}_proj.weight"], tensor)
    mesh = make_mesh(data=2, model=2, devices=jax.devices()[:4])
    params = abstract_params(config)[1]
    shardings = rules.param_shardings(mesh, param_axes(params), params, rules.LEARNER)
    gate = shardings["layers"]["gate_EDY"].spec
    assert (gate[1], gate[2]) == ("model", "data")  # experts over one, their width over the other
    whole, split = (
        load_params(folder, config, dtype="float32", shardings=how)
        for folder, how in ((stacked, None), (published, shardings))
    )
    jax.tree.map(np.testing.assert_array_equal, whole, split)


def test_a_stack_of_more_experts_than_the_config_has_is_refused(tmp_path):
    folder = directory(GOLDEN, tmp_path)
    config = dataclasses.replace(load_config(folder), num_experts=5)
    with pytest.raises(ValueError, match=r"missing: .*mlp.experts.0.gate_proj"):
        load_params(folder, config, dtype="float32")


def chosen_by(model, prompt, response):
    """The experts that a model chooses for a prompt and its response, [T, L, A]."""
    tokens_T = np.append(prompt, response.tokens_T)[:-1]
    padded_BT = np.pad(tokens_T, (0, 40 - len(tokens_T)))[None]  # one program for all
    return np.asarray(chosen(*model, padded_BT))[:, 0].swapaxes(0, 1)[: len(tokens_T)]


@jit(static_argnums=0)
def chosen(graph, params, tokens_BT):
    mask_BTS = causal_mask(jnp.ones_like(tokens_BT))
    position_BT = jnp.arange(tokens_BT.shape[1])[None]
    model = nnx.merge(graph, params)

    def attend(*qkv, window):
        return attention(*qkv, mask_BTS)

    return model.hidden(tokens_BT, position_BT, attend)[1]


def test_routes_are_those_that_the_sampler_took(monkeypatch):
    """Prompts' too; samples are preempted, recomputed and moved, and go on over a step's end."""
    small = random_params(EXPERTS)
    monkeypatch.setattr(plan, "BALANCE_SLACK", -1.0)  # shards take samples of others
    engine, sampled = build(EXPERTS, SCARCE, small[1], shards=2)
    uninterrupted, _ = sample_prompts(engine, sampled, **OF_FEW)
    expected = {
        (cursor, i): chosen_by(small, FEW[cursor], response)
        for (cursor, i), response in uninterrupted.items()
    }
    assert len({route.tobytes() for route in expected.values()}) > 10
    for keeps in (False, True):
        responses, _ = interrupted(engine, sampled, blocks=3, keeps=keeps)
        for request, response in responses.items():
            np.testing.assert_array_equal(response.route_TLA, expected[request])
    for request, response in uninterrupted.items():
        np.testing.assert_array_equal(response.route_TLA, expected[request])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return directory(GOLDEN, tmp_path_factory.mktemp("golden"))


def updates(folder, *, rotates=False, mesh=(1, 1), **algo):
    """[params before, (params, metrics) of an update on a sampled step].

    rotates: whether there is another, whose every third entry goes to the experts one further, in
    the last layer alone.
    """
    mesh = {"data": mesh[0], "model": mesh[1]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", jit)
        built = programs("qwen3_moe", folder, mesh=mesh, algo=algo)
        before, groups, _, state, metrics = step(built)
        found = [(state, metrics)]
        if rotates:
            advantage_PG = np.tile(np.float32([1, -1, 1, -1]), (len(groups), 1))
            batch = learner.make_batch(groups, advantage_PG, built.settings)
            route_BTA = batch.route_BTLA[..., ::3, -1, :]
            route_BTA[:] = (route_BTA + 1) % 6
            batch = hosts.place(batch, learner.batch_shardings(batch, built.mesh))
            start = built.load_start_weights()
            if algo.get("old_logprobs") == "learner":
                old_logp = built.recompute_old_logp(built.start_params(), start, batch)
                batch = dataclasses.replace(batch, old_logp_BT=old_logp)
            found.append(built.update(built.start_state(), start, batch, 1e-3))
    on_host = [(jax.tree.map(np.asarray, s.params), jax.tree.map(float, m)) for s, m in found]
    return [before, *on_host]


def test_the_learner_takes_the_samplers_experts_and_counts_other_choices(folder):
    """In float32 it chooses the same; the passes of other policies go the same ways."""
    how = {"kl_coef": 0.1, "old_logprobs": "learner"}
    before, (replayed, metrics), (_, seen) = updates(folder, rotates=True, **how)
    assert metrics["routes/differ"] == 0
    assert metrics["ratio_gap"] == 0
    moved = jax.tree.map(lambda a, b: (a != b).any(), before, replayed)
    assert all(jax.tree.leaves(moved)), moved
    assert 0.1 < seen["routes/differ"] < 0.2  # a third of the tokens, half of the layers
    assert seen["ratio_gap"] > 1e-2
    assert seen["kl"] < 1e-9
    assert seen["loss"] == pytest.approx(metrics["loss"], abs=1e-6)

    how = {"kl_coef": 0.1, "replay_routes": False}
    _, (chosen, other), (ignored, unseen) = updates(folder, rotates=True, **how)
    assert other == metrics
    assert unseen == metrics | {"routes/differ": seen["routes/differ"]}
    for params in (chosen, ignored):
        jax.tree.map(np.testing.assert_array_equal, params, replayed)


@pytest.mark.slow
def test_an_update_of_experts_over_devices_equals_one_devices(folder):
    """Over "data", which gathers experts, and "model", which splits them."""
    (_, (one, metrics)), (_, (split, other)) = (
        updates(folder, mesh=mesh) for mesh in ((1, 1), (2, 2))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), split, one)
    assert other["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-5)


def test_lora_of_experts_is_refused(folder):
    message = r"lora_targets = .*'gate', .* model_type .qwen3_moe. adapts q, k, v, o: name some"
    with pytest.raises(ValueError, match=message):
        programs("qwen3_moe", folder, lora_rank=2)
