"""A model family from outside the packages, in one file, from its weights to an update."""

import json
import math
import pathlib

import numpy as np
import pytest
from engines import check_step, programs
from safetensors.numpy import save_file

from configs import base
from dapo_jax.setup import components
from models import families, load_hf
from models.parameters import ModelConfig

OUTSIDE = pathlib.Path(__file__).parent / "ext_models"
D, F, N, K, H, L, V = 32, 48, 4, 2, 16, 2, 64
# As transformers would write it; heads * head_dim is not hidden_size.
CONFIG = {
    **{"architectures": ["GainsForCausalLM"], "model_type": "gains", "attention_bias": False},
    **{"head_dim": H, "hidden_act": "silu", "hidden_size": D, "intermediate_size": F},
    **{"max_window_layers": L, "num_attention_heads": N, "num_hidden_layers": L},
    **{"num_key_value_heads": K, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e4},
    **{"sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False},
    "vocab_size": V,
}


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    """Families of one's own are found where PYTHONPATH points."""
    monkeypatch.syspath_prepend(str(OUTSIDE))


@pytest.fixture(scope="module")
def tensors():
    """The tensors of a model, under names like transformers'."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(0, 0.3, shape).astype(np.float32)

    def scale(size):
        return rng.normal(1, 0.3, size).astype(np.float32)

    named = {"model.embed_tokens.weight": normal(V, D), "lm_head.weight": normal(V, D)}
    named["model.norm.weight"] = scale(D)
    for i in range(L):
        layer = {
            "input_layernorm": scale(D),
            "self_attn.q_proj": normal(N * H, D),
            "self_attn.k_proj": normal(K * H, D),
            "self_attn.v_proj": normal(K * H, D),
            "self_attn.o_proj": normal(D, N * H),
            "self_attn.v_norm": scale(H),
            "post_attention_layernorm": scale(D),
            "mlp.gate_proj": normal(F, D),
            "mlp.up_proj": normal(F, D),
            "mlp.down_proj": normal(D, F),
        }
        named |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
        named[f"model.layers.{i}.self_attn.q_gain"] = scale(N * H)
    return named


@pytest.fixture
def folder(tensors, tmp_path):
    """A Hugging Face directory as transformers writes it."""
    path = tmp_path / "gains"
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def reference(tensors, tokens_T):
    """logits_TV of one sequence, in NumPy and float64."""
    w = {name.removesuffix(".weight"): t.astype(np.float64) for name, t in tensors.items()}
    T = len(tokens_T)

    def rms(x, scale):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + CONFIG["rms_norm_eps"]) * scale

    angle_TH = np.arange(T)[:, None] * CONFIG["rope_theta"] ** (-np.arange(0, H, 2) / H)
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


def test_logits_equal_the_reference(folder, tensors):
    families.load("gains")
    tokens_BT = np.random.default_rng(1).integers(0, V, (2, 9))
    logits_BTV = np.asarray(load_hf(folder)(tokens_BT))
    expected_BTV = np.stack([reference(tensors, tokens_T) for tokens_T in tokens_BT])
    assert np.std(expected_BTV) > 0.5
    np.testing.assert_allclose(logits_BTV, expected_BTV, atol=1e-4)


@pytest.mark.slow
def test_sampler_and_learner_agree_on_a_mesh(folder, tensors):
    """A config's model samples as the reference does; its update sees the same log-probs."""
    _, state = check_step(programs("gains", folder), lambda ids_T: reference(tensors, ids_T))
    layers = state.params["layers"]
    assert layers["q_gain_NH"].addressable_shards[1].data.shape == (L, N // 2, H)
    assert layers["v_norm_H"].is_fully_replicated


def test_a_directory_of_another_family_is_refused(folder, monkeypatch):
    config = base.get_config()
    config.model.path = str(folder)
    config.rollout.max_response_tokens = 20
    families.load("gains")
    with pytest.raises(
        ValueError, match=r"model.family = 'qwen2' computes .* has 'gains'.*set model.family"
    ):
        components.model_sizes(config)
    monkeypatch.delitem(families._FAMILIES, "gains")
    with pytest.raises(ValueError, match=r"model_type is 'gains', but must be 'qwen2' or .*family"):
        components.model_sizes(config)


@pytest.mark.parametrize("name", ["qwen4", "my-models", "json"])
def test_a_name_of_no_family_is_refused(name):
    config = base.get_config()
    config.model.family, config.model.preset = name, "tiny"
    message = f"model.family = '{name}': built in are qwen2, .* registers 0 families"
    with pytest.raises(ValueError, match=message):
        components.model_sizes(config)


def test_two_modules_may_not_register_one_model_type():
    class Mine(ModelConfig):
        model_type = "qwen2"

    with pytest.raises(ValueError, match=r"registers model_type 'qwen2', which models.qwen2 has"):
        families.register(Mine, {})
