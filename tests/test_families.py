"""A model family from outside the packages: Qwen3 in one file, from its weights to an update."""

import json
import math
import pathlib

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs import base
from dapo_jax.convert import convert, load_orbax
from dapo_jax.run import build
from dapo_jax.sampler import cache
from dapo_jax.sampler.decode import Sampling
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.types import Prompt
from models import families, load_hf, save_hf
from models.hf import load_params
from models.hf_config import load_config
from models.parameters import ModelConfig
from models.transformer import abstract_params, split

OUTSIDE = pathlib.Path(__file__).parent / "ext_models"
# As transformers writes it; heads * head_dim is not hidden_size.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_window_layers": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1e4,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 64,
}
D, F, N, K, H, L, V = 32, 48, 4, 2, 16, 2, 64
SAMPLING = Sampling(
    max_response_tokens=20,
    temperature=0.7,
    top_p=1.0,
    top_k=0,
    stop_ids=(3, 17, 40),
    pad_id=0,
    vocab_size=61,
)
PROMPTS = {7: np.array([5, 6, 7]), 100: np.arange(10, 27)}


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    """Families of one's own are found where PYTHONPATH points."""
    monkeypatch.syspath_prepend(str(OUTSIDE))


@pytest.fixture(scope="module")
def tensors():
    """Qwen3's tensors under transformers' names."""
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
            "self_attn.q_norm": scale(H),
            "self_attn.k_norm": scale(H),
            "post_attention_layernorm": scale(D),
            "mlp.gate_proj": normal(F, D),
            "mlp.up_proj": normal(F, D),
            "mlp.down_proj": normal(D, F),
        }
        named |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
    return named


@pytest.fixture
def folder(tensors, tmp_path):
    """A Hugging Face directory as transformers writes it."""
    path = tmp_path / "qwen3"
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def reference(tensors, tokens_T):
    """logits_TV of one sequence: transformers' Qwen3ForCausalLM in NumPy and float64."""
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
        q = rotate(rms(q, layer["self_attn.q_norm"]))
        k = rotate(rms(k, layer["self_attn.k_norm"]))
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


def test_the_file_is_short_and_nothing_else_knows_the_family():
    assert len((OUTSIDE / "qwen3.py").read_text().splitlines()) <= 60
    assert list(families.BUILT_IN) == ["qwen2"]


def test_logits_equal_the_reference(folder, tensors):
    families.load("qwen3")
    tokens_BT = np.random.default_rng(1).integers(0, V, (2, 9))
    logits_BTV = np.asarray(load_hf(folder)(tokens_BT))
    expected_BTV = np.stack([reference(tensors, tokens_T) for tokens_T in tokens_BT])
    assert np.std(expected_BTV) > 0.5
    np.testing.assert_allclose(logits_BTV, expected_BTV, atol=1e-4)


def test_weights_keep_their_names_and_bits_through_every_directory(
    folder, tensors, tmp_path, monkeypatch
):
    family = families.load("qwen3")
    config = load_config(folder)
    assert config == family.config(V, D, F, L, N, K, H, False, rope_theta=1e4)
    save_hf(split(load_hf(folder))[1], config, tmp_path / "saved")
    convert(f"hf:{folder}", f"orbax:{tmp_path / 'orbax'}", dtype="float32")
    convert(f"orbax:{tmp_path / 'orbax'}", f"hf:{tmp_path / 'converted'}", dtype="float32")
    for path in (tmp_path / "saved", tmp_path / "converted"):
        saved = load_file(path / "model.safetensors")
        assert saved.keys() == tensors.keys()
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(saved[name], tensor, err_msg=name)
        raw = json.loads((path / "config.json").read_text())
        same = CONFIG.keys() & raw.keys()
        assert len(same) == 15
        assert {key: raw[key] for key in same} == {key: CONFIG[key] for key in same}
        assert load_config(path) == config
    monkeypatch.delitem(families._FAMILIES, "qwen3")
    with pytest.raises(ValueError, match=r"model_type 'qwen3' is unknown; --family names its mod"):
        load_orbax(tmp_path / "orbax", dtype="float32")


def test_sampler_and_learner_agree_on_a_mesh(folder, tensors, monkeypatch):
    """What a recipe builds samples as the reference does; its update sees the same log-probs."""
    config = base.get_config()
    config.model.family, config.model.path = "qwen3", str(folder)
    config.model.compute_dtype = "float32"
    config.rollout.max_prompt_tokens = 17
    config.rollout.max_response_tokens = SAMPLING.max_response_tokens
    config.rollout.num_prompts, config.rollout.group_size = len(PROMPTS), 4
    config.rollout.temperature = SAMPLING.temperature
    config.rollout.cache_mib, config.rollout.slot_tokens = 1, 20
    config.rollout.page_tokens, config.rollout.block_tokens = 8, 4
    config.updates_per_step = 1
    config.learner.row_tokens, config.learner.micro_batch_rows = 48, 2
    config.learner.remat = "none"
    config.mesh.data, config.mesh.model = 1, 2
    monkeypatch.setattr(cache, "PARTS", ((1, 1),))  # one program for decoding
    programs = build.programs(config, SAMPLING.vocab_size, devices=jax.devices()[:2])
    state = programs.start_state()
    assert state.params["layers"]["q_DNH"].addressable_shards[1].data.shape == (L, D, N // 2, H)
    assert state.params["layers"]["q_norm_H"].is_fully_replicated

    params = programs.reshard(state.params, None)
    session = Session(programs.engine, params, Stream(jax.random.key(11), SAMPLING))
    for cursor, prompt in PROMPTS.items():
        session.submit(cursor, Prompt(prompt), group_size=4)
    groups = []
    while session.unfinished:
        groups += session.step()
    for group in groups:
        for response in group.responses:
            tokens_T = np.concatenate([PROMPTS[group.cursor], response.tokens_T])
            logits_TV = reference(tensors, tokens_T)[:, : SAMPLING.vocab_size]
            logp_TV = logits_TV / SAMPLING.temperature
            logp_TV -= np.logaddexp.reduce(logp_TV, axis=-1, keepdims=True)
            logp_T = logp_TV[np.arange(len(tokens_T) - 1), tokens_T[1:]]
            expected_T = logp_T[-len(response.tokens_T) :]
            np.testing.assert_allclose(response.behavior_logp_T, expected_T, atol=1e-4)

    advantage_PG = np.tile(np.float32([1, -1, 1, -1]), (len(groups), 1))
    before = np.asarray(state.params["layers"]["k_norm_H"])
    state, metrics = programs.update(state, None, programs.minibatch(groups, advantage_PG), 1e-3)
    assert metrics["ratio_gap"] <= 1e-5  # the mean of |ratio - 1|
    assert metrics["taken"]
    assert (np.asarray(state.params["layers"]["k_norm_H"]) != before).all()


def test_presets_are_the_familys(folder):
    config = base.get_config()
    config.model.family, config.model.preset = "qwen3", "0.6b"
    sizes = build.model_sizes(config)
    _, params = abstract_params(sizes)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 596_049_920
    config.model.preset = "0.5b"
    with pytest.raises(ValueError, match=r"model.preset = '0.5b' is unknown; qwen3 has 0.6b, 1.7b"):
        build.model_sizes(config)


def test_what_the_family_does_not_compute_is_refused(folder):
    families.load("qwen3")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"attention_bias": True}))
    with pytest.raises(ValueError, match=r"config.json: attention_bias is True, but only False"):
        load_params(folder, load_config(folder), dtype="float32")


def test_a_directory_of_another_family_is_refused(folder, monkeypatch):
    config = base.get_config()
    config.model.path = str(folder)
    config.rollout.max_response_tokens = 20
    families.load("qwen3")
    with pytest.raises(ValueError, match=r"model.family = 'qwen2' computes .* has 'qwen3'"):
        build.model_sizes(config)
    monkeypatch.delitem(families._FAMILIES, "qwen3")
    with pytest.raises(ValueError, match=r"model_type is 'qwen3', but must be 'qwen2'.*family"):
        build.model_sizes(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen4", r"model.family = 'qwen4': there is no module 'qwen4'.*built in are qwen2"),
        ("nowhere.qwen3", r"model.family = 'nowhere.qwen3': there is no module 'nowhere'.*qwen2"),
        ("my-models", r"model.family = 'my-models' is no module's name; built in are qwen2"),
        ("", r"model.family = '' is no module's name"),
        ("json", r"model.family = 'json': the module registers 0 families.*built in are qwen2"),
    ],
)
def test_a_name_of_no_family_is_refused(name, message):
    config = base.get_config()
    config.model.family, config.model.preset = name, "tiny"
    with pytest.raises(ValueError, match=message):
        build.model_sizes(config)


def test_two_modules_may_not_register_one_model_type():
    class Mine(ModelConfig):
        model_type = "qwen2"

    with pytest.raises(ValueError, match=r"registers model_type 'qwen2', which models.qwen2 has"):
        families.register(Mine, {})
