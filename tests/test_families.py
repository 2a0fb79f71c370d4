"""A model family from outside the packages, in one file, from its weights to an update."""

import math

import numpy as np
import pytest
from engines import check_step, programs
from flax import nnx
from quick import jit, random_params
from safetensors.numpy import load_file

from configs import base
from dapo_jax.setup import components
from models import families
from models.hf import load_hf, save_hf
from models.transformer import split

D, F, N, K, H, L, V = 32, 48, 4, 2, 16, 2, 64  # heads * head_dim is not the width
EPS, THETA = 1e-6, 1e4


@pytest.fixture
def folder(tmp_path):
    sizes = (V, D, F, L, N, K, H, False)
    config = families.load("gains").config(*sizes, rope_theta=THETA, rms_norm_eps=EPS)
    save_hf(random_params(config, spread=0.4)[1], config, tmp_path / "gains")
    return tmp_path / "gains"


def reference(folder, tokens_T):
    """logits_TV of one sequence, in NumPy and float64, from tensors named as transformers does."""
    tensors = load_file(folder / "model.safetensors")
    w = {name.removesuffix(".weight"): t.astype(np.float64) for name, t in tensors.items()}
    T = len(tokens_T)

    def rms(x, scale):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * scale

    angle_TH = np.arange(T)[:, None] * THETA ** (-np.arange(0, H, 2) / H)
    cos, sin = (np.tile(f(angle_TH), 2)[:, None] for f in (np.cos, np.sin))

    def rotate(x):
        return x * cos + np.concatenate([-x[..., H // 2 :], x[..., : H // 2]], axis=-1) * sin

    x_TD = w["model.embed_tokens"][tokens_T]
    for i in range(L):
        layer = {
            n.removeprefix(p): v for n, v in w.items() if n.startswith(p := f"model.layers.{i}.")
        }
        h = rms(x_TD, layer["input_layernorm"])
        q, k, v = ((h @ layer[f"self_attn.{a}_proj"].T).reshape(T, -1, H) for a in "qkv")
        q, k = rotate(q * layer["self_attn.q_gain"].reshape(N, H)), rotate(k)
        v = rms(v, layer["self_attn.v_norm"])
        k, v = (np.repeat(a, N // K, axis=1) for a in (k, v))
        score_NTS = np.einsum("TNH,SNH->NTS", q, k) / math.sqrt(H)
        score_NTS = np.where(np.tril(np.ones((T, T), bool)), score_NTS, -np.inf)
        prob_NTS = np.exp(score_NTS - score_NTS.max(axis=-1, keepdims=True))
        prob_NTS /= prob_NTS.sum(axis=-1, keepdims=True)
        out = np.einsum("NTS,SNH->TNH", prob_NTS, v).reshape(T, N * H)
        x_TD = x_TD + out @ layer["self_attn.o_proj"].T
        h = rms(x_TD, layer["post_attention_layernorm"])
        gate = h @ layer["mlp.gate_proj"].T
        up = h @ layer["mlp.up_proj"].T
        x_TD = x_TD + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj"].T
    return rms(x_TD, w["model.norm"]) @ w["lm_head"].T


def test_logits_equal_the_reference(folder):
    tokens_BT = np.random.default_rng(1).integers(0, V, (2, 9))
    graph, params = split(load_hf(folder))
    logits_BTV = jit(lambda params: nnx.merge(graph, params)(tokens_BT))(params)
    expected_BTV = np.stack([reference(folder, tokens_T) for tokens_T in tokens_BT])
    assert np.std(expected_BTV) > 0.5
    np.testing.assert_allclose(logits_BTV, expected_BTV, atol=1e-4)


@pytest.mark.slow
def test_sampler_and_learner_agree_on_a_mesh(folder):
    """A config's model samples as the reference does; its update sees the same log-probs."""
    _, state = check_step(programs("gains", folder), lambda ids_T: reference(folder, ids_T))
    layers = state.params["layers"]
    assert layers["q_gain_NH"].addressable_shards[1].data.shape == (L, N // 2, H)
    assert layers["v_norm_H"].is_fully_replicated


def test_a_directory_of_another_family_is_refused(folder, monkeypatch):
    config = base.get_config()
    config.model.path = str(folder)
    config.rollout.max_response_tokens = 20
    message = r"model.family = 'qwen2' computes .* has 'gains'.*set model.family"
    with pytest.raises(ValueError, match=message):
        components.model_sizes(config)
    monkeypatch.delitem(families._FAMILIES, "gains")
    known = " or ".join(map(repr, families.known()))  # in the order of their imports
    with pytest.raises(ValueError, match=f"'gains', but must be {known}; model.family names"):
        components.model_sizes(config)
    config.model.family, config.model.preset = "json", "tiny"
    with pytest.raises(ValueError, match=r"'json': built in are qwen2, .* registers 0 families"):
        components.model_sizes(config)
