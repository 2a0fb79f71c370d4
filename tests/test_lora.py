"""LoRA against its definition: the sum by hand, the chain rule, rounding, export."""

import dataclasses
import functools
import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from quick import jit
from updates import SETTINGS, SMALL, batch_of, long_tailed, random_weights

from configs import tiny
from dapo_jax import convert, learner
from dapo_jax.checkpoints import fingerprint
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.setup import components, policy
from dapo_jax.tasks.datasets import Mixture
from models import hf
from models.kernels.packed import packed_attention
from models.lora import MATRICES, Lora, factored, factors, init_adapters, merged
from models.precision import Weights
from models.transformer import Execution, abstract_params, hidden_layer_by_layer, unstack
from sharding.mesh import make_mesh

LORA = Lora(rank=3, alpha=6.0, targets=tuple(MATRICES))
add = jit(merged, static_argnames="scale")


@functools.cache
def fresh_adapters(lora=LORA, config=SMALL):
    init = jit(functools.partial(init_adapters, config, lora, key=jax.random.key(0)))
    return jax.device_get(init())


def random_adapters(lora=LORA, *, seed=0, config=SMALL):
    """Both factors away from zero."""
    rng = np.random.default_rng(seed)
    fresh = fresh_adapters(lora, config)
    return jax.tree.map(lambda a: rng.normal(0, 0.2, a.shape).astype(np.float32), fresh)


def by_hand(w, a, b, scale):
    """W + scale * A B of stacked layers, as plain matrices in float64."""
    L, rank = len(a), a.shape[-1]
    A, B = a.reshape(L, -1, rank).astype(np.float64), b.reshape(L, rank, -1).astype(np.float64)
    return w + scale * (A @ B).reshape(w.shape)


@pytest.fixture(scope="module")
def params():
    return random_weights()


def test_fresh_adapters_change_nothing(params):
    fresh = fresh_adapters()
    new = jax.device_get(add(params["layers"], fresh["layers"], scale=LORA.scale))
    assert new.keys() == params["layers"].keys()
    for name, array in new.items():
        np.testing.assert_array_equal(array, params["layers"][name])
    spreads = {name: np.std(a) for name, a in fresh["layers"].items() if name.endswith("R")}
    assert spreads["q_DR"] == pytest.approx(SMALL.width**-0.5, rel=0.2)
    assert spreads["down_FR"] == pytest.approx(SMALL.mlp_width**-0.5, rel=0.2)


def test_the_targets_are_adapted_as_defined_and_nothing_else(params):
    lora = Lora(rank=3, alpha=6.0, targets=("q", "o", "down"))
    adapters = random_adapters(lora)["layers"]
    new = jax.device_get(add(params["layers"], adapters, scale=2.0))
    of_w = {factors(target)[0]: factors(target)[1:] for target in lora.targets}
    for name, w in params["layers"].items():
        if name in of_w:
            a, b = (adapters[factor] for factor in of_w[name])
            np.testing.assert_allclose(new[name], by_hand(w, a, b, 2.0), atol=1e-5)
        else:
            np.testing.assert_array_equal(new[name], w)


def test_gradients_are_the_weights_gradients_through_the_chain_rule(params):
    """dA = scale * dW B^T and dB = scale * A^T dW, with dW that of training all weights."""
    micro = learner.micro_batch(batch_of(long_tailed()), 0)
    mesh = make_mesh(data=1, model=1, devices=jax.devices()[:1])

    def gradient_of(lora, params, start):
        settings = dataclasses.replace(SETTINGS, lora=lora)
        how = {"graph": abstract_params(SMALL)[0], "mesh": mesh, "settings": settings}
        run = jit(jax.grad(functools.partial(learner.micro_batch_loss, **how), has_aux=True))
        return run(params, start, micro)[0]

    adapters = random_adapters()
    layers = jax.device_get(add(params["layers"], adapters["layers"], scale=LORA.scale))
    gradient, weights = gradient_of(LORA, adapters, params), params | {"layers": layers}
    d_layers = gradient_of(None, weights, weights)["layers"]
    L = SMALL.num_layers
    for target in MATRICES:
        w, a, b = factors(target)
        A = adapters["layers"][a].reshape(L, -1, LORA.rank)
        B = adapters["layers"][b].reshape(L, LORA.rank, -1)
        dW = np.asarray(d_layers[w]).reshape(L, A.shape[1], B.shape[2])
        for name, expected in ((a, dW @ B.swapaxes(1, 2)), (b, A.swapaxes(1, 2) @ dW)):
            expected = LORA.scale * expected.reshape(adapters["layers"][name].shape)
            got = np.asarray(gradient["layers"][name])
            np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())


def hidden_states(params, adapters, *, dtype, by_sampler):
    """Runs the model in a dtype as the learner does, or the sampler; float32 x_BTD."""
    settings = dataclasses.replace(SETTINGS, lora=LORA, compute_dtype=dtype)
    tokens_BT = np.random.default_rng(0).integers(0, 60, (2, 16))
    position_BT = np.broadcast_to(np.arange(16), (2, 16))
    one_BT = np.ones((2, 16), np.int32)

    def attend(*qkv, window=None):
        return packed_attention(*qkv, one_BT, one_BT, None, window)

    def run(params, adapters):
        start = optax.tree.cast(params, dtype)
        if by_sampler:
            weights = unstack(learner.sampled_weights(adapters, start, settings))
            attends = [lambda *qkv: (attend(*qkv), None)] * SMALL.num_layers
            part = hidden_layer_by_layer(weights, SMALL, tokens_BT, position_BT, attends, axis=None)
            return part[0].astype(jnp.float32)
        adapt = functools.partial(merged if dtype == "float32" else factored, scale=LORA.scale)
        model = nnx.merge(abstract_params(SMALL)[0], start)
        execution, layers = Execution(weights=Weights(dtype=dtype), adapt=adapt), adapters["layers"]
        x_BTD, _ = model.hidden(tokens_BT, position_BT, attend, execution, adapters=layers)
        return x_BTD.astype(jnp.float32)

    return np.asarray(jit(run)(params, adapters))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_learner_and_sampler_compute_with_the_same_bits(params, dtype):
    """Factors beside their matrix are rounded alike, layer by layer and all at once."""
    adapters = random_adapters()
    states = (hidden_states(params, adapters, dtype=dtype, by_sampler=by) for by in (False, True))
    np.testing.assert_array_equal(*states)


def test_a_small_update_is_not_rounded_away_in_bfloat16(params, monkeypatch):
    """On W's grid in bfloat16 a change of a thousandth of W is none."""
    queries, of_heads = [], SMALL.layer.of_heads

    def seen(layer, q_BTNH, *others):
        jax.debug.callback(queries.append, q_BTNH, ordered=True)
        return of_heads(layer, q_BTNH, *others)

    monkeypatch.setattr(SMALL.layer, "of_heads", seen)
    adapters = random_adapters()["layers"]

    def first_queries(dtype, part):
        """The first layer's, whose inputs no adapter has touched; B is a part of what it was."""
        shrunk = {name: a if name.endswith("R") else part * a for name, a in adapters.items()}
        queries.clear()
        hidden_states(params, {"layers": shrunk}, dtype=dtype, by_sampler=True)
        jax.effects_barrier()
        return queries[0]

    (low, low_start), (exact, exact_start) = (
        [first_queries(dtype, part) for part in (1e-3, 0.0)] for dtype in ("bfloat16", "float32")
    )
    error = np.linalg.norm((low - low_start) - (exact - exact_start))
    assert error < 0.02 * np.linalg.norm(exact - exact_start)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run after a step: (its folder, config, programs, adapters, checkpoints)."""
    config, folder = tiny.get_config(), tmp_path_factory.mktemp("lora")
    config.learner.lora_rank, config.learner.lora_alpha = 3, 6.0
    config.model.path = str(shutil.copytree(config.model.path, folder / "base"))
    programs = components.programs(config, 384)
    adapters = random_adapters(programs.settings.lora, config=programs.sizes)
    state = learner.init_state(jax.tree.map(jnp.asarray, adapters), programs.settings)
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    train = Mixture({"data.train": types.SimpleNamespace(prompts=[])}, {"data.train": 1.0})
    prompts = types.SimpleNamespace(train=train, eval_sets={})
    checkpoints.fingerprint = fingerprint.of_run(config, prompts)
    checkpoints.save(1, state, {"cursor": 0})
    (folder / "config.json").write_text(config.to_json_best_effort())
    return folder, config, programs, adapters, checkpoints


def test_a_run_is_exported_with_its_factors_added_or_beside_as_peft_names_them(
    run, tmp_path, monkeypatch
):
    """PEFT multiplies by lora_A [R, in], then by lora_B [out, R], and by lora_alpha / r."""
    folder, config, programs, adapters, _ = run
    for kind in ("hf", "peft"):
        convert.convert(f"run:{folder}", f"{kind}:{tmp_path / kind}", dtype="float32")
    exported = hf.load_params(tmp_path / "hf", programs.sizes, dtype="float32")
    start = hf.load_params(config.model.path, programs.sizes, dtype="float32")
    np.testing.assert_array_equal(exported["embed_VD"], start["embed_VD"])
    content = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert content["base_model_name_or_path"] == config.model.path and not content["revision"]
    assert (content["r"], content["lora_alpha"], content["peft_type"]) == (3, 6.0, "LORA")
    assert content["target_modules"] == sorted(f"{target}_proj" for target in MATRICES)
    tensors = safetensors.numpy.load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert len(tensors) == 2 * len(MATRICES) * programs.sizes.num_layers
    layer = programs.sizes.num_layers - 1
    for target in MATRICES:
        w, a, b = factors(target)
        factor = (adapters["layers"][a], adapters["layers"][b])
        expected = by_hand(start["layers"][w], *factor, 2.0)
        np.testing.assert_allclose(exported["layers"][w], expected, atol=1e-5)
        block = "mlp" if target in ("gate", "up", "down") else "self_attn"
        name = f"base_model.model.model.layers.{layer}.{block}.{target}_proj"
        A, B = (tensors[f"{name}.lora_{factor}.weight"] for factor in "AB")
        merged = start["layers"][w][layer].reshape(len(A.T), -1).T + 2.0 * B @ A
        np.testing.assert_allclose(merged.T, expected[layer].reshape(len(A.T), -1), atol=1e-5)
    monkeypatch.setattr(convert, "sees_images", lambda path: path == config.model.path)
    with pytest.raises(ValueError, match=r"sees images, too, .* use --to=hf:DIR"):
        convert.convert(f"run:{folder}", f"peft:{tmp_path / 'y'}", dtype="float32")


def test_a_start_model_that_has_changed_is_refused(run, tmp_path):
    """Factors belong to one start model, which is the policy of step 0."""
    folder, config, programs, _, checkpoints = run
    for step in (None, 0):
        policy.restored(programs, checkpoints, step)
    file = folder / "base" / "model.safetensors"
    before = file.read_bytes()
    file.write_bytes(before[:-4] + b"\0\0\0\0")
    message = r"checkpoint 1 in .* is of another policy: model\.path: model.safet.* differs"
    other = components.programs(config, 384)
    for step in (None, 0):
        with pytest.raises(ValueError, match=message):
            policy.restored(other, checkpoints, step)
    with pytest.raises(ValueError, match=message):
        convert.convert(f"run:{folder}", f"hf:{tmp_path / 'hf'}", dtype="float32")
    file.write_bytes(before)
