"""Gemma 3: its kinds of layers, its directories, and a step of an instruct model's."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from quick import jit, random_params
from safetensors.numpy import load_file, save_file

from configs import tiny
from dapo_jax import train
from dapo_jax.convert import convert
from dapo_jax.sampler import cache
from dapo_jax.setup import components
from models import gemma3
from models.hf import load_hf, save_hf
from models.hf_config import config_of, load_config, sees_images
from models.kernels.packed import packed_attention
from models.precision import Weights
from models.rope import LinearScaling
from models.transformer import hidden_layer_by_layer, split, unstack, windowed

TYPES = ("sliding_attention", "full_attention", "sliding_attention")
SMALL = gemma3.Gemma3Config(
    *(288, 24, 40, 3, 4, 2, 8, True, 1e6),
    rope_scaling=LinearScaling(8.0),
    windows=(6, None, 6),
    query_scalar=12,
)


def test_layers_with_a_window_have_their_own_angles():
    """SGLang turned them by the other layers' base: answers past 2,048 tokens made no sense."""
    small, large = (gemma3.PRESETS[size].kinds for size in ("1b", "4b"))
    assert small[:6] == ((512, 1e4, None),) * 5 + ((None, 1e6, None),)
    assert large[:6] == ((1_024, 1e4, None),) * 5 + ((None, 1e6, LinearScaling(8.0)),)
    assert [sum(kind.window is None for kind in kinds) for kinds in (small, large)] == [4, 5]


def test_a_new_models_norms_scale_by_one():
    norms = [p for p in SMALL.parameters.values() if "norm" in p.name]
    assert len(norms) == 7
    assert not any(p.init(None, p.shape(SMALL.axis_sizes)).any() for p in norms)


@pytest.mark.parametrize("window", [1, 4, 9])
def test_a_token_sees_itself_and_the_tokens_before_it_in_its_window(window):
    """TensorRT-LLM's left border was off by one."""
    seen_1TS = windowed(jnp.tril(jnp.ones((1, 9, 9), bool)), window)
    assert seen_1TS[0].sum(axis=1).tolist() == [min(t + 1, window) for t in range(9)]


@pytest.mark.parametrize("remat", ["none", "keep_attention"])
def test_a_scan_over_the_layers_keeps_their_order(remat):
    """MaxText's scanned layers lost which of them had windows, and sampled another policy's text.

    The learner's scan equals the sampler's layers one by one; in another order it does not.
    """
    graph, params = random_params(SMALL)
    tokens_BT = np.random.default_rng(0).integers(0, 288, (2, 20))
    one_BT, position_BT = np.ones((2, 20), np.int32), np.tile(np.arange(20), (2, 1))

    def attend(*qkv, window=None):
        return packed_attention(*qkv, one_BT, one_BT, position_BT, window)

    def scanned(config):
        model = nnx.merge(graph, params)
        model.config = config
        return jit(lambda: model.hidden(tokens_BT, position_BT, attend, remat=remat))()[0]

    def seeing(window):
        return lambda *qkv: (attend(*qkv, window=window), None)

    attends = [seeing(kind.window) for kind in SMALL.kinds]
    given = (unstack(params), SMALL, tokens_BT, position_BT, attends)
    one_by_one, *_ = jit(lambda: hidden_layer_by_layer(*given, axis=None))()
    np.testing.assert_allclose(scanned(SMALL), one_by_one, atol=2e-5)
    other = dataclasses.replace(SMALL, windows=(None, 6, 6))
    assert np.abs(scanned(other) - one_by_one).max() > 0.1


def test_embeddings_are_multiplied_by_the_rounded_root_of_the_width():
    """34 in bfloat16 for 1B's width, as transformers has it, and not 33.94."""
    wide = dataclasses.replace(SMALL, width=1_152, num_layers=1, windows=(), rms_norm_eps=1e12)
    graph, params = random_params(wide, spread=0.01)
    params["final_norm_D"] = np.zeros(1_152, np.float32)
    for name in ("o_NHD", "down_FD"):
        params["layers"][name] = np.zeros_like(params["layers"][name])
    tokens_BT = np.arange(4)[None]
    for dtype, root in (("float32", 1_152**0.5), ("bfloat16", 34)):
        weights = Weights(dtype=dtype)
        x_BTD, _ = nnx.merge(graph, params).hidden(
            tokens_BT, tokens_BT, lambda q, k, v, window: q, weights=weights
        )
        expected_BTD = params["embed_VD"][tokens_BT].astype(dtype).astype(np.float32) * root / 1e6
        np.testing.assert_allclose(x_BTD, expected_BTD.astype(dtype), rtol=1e-6)


# Of the published directories' config.json; what is not there is transformers' default.
PUBLISHED = {
    "4b": {"hidden_size": 2_560, "intermediate_size": 10_240, "num_hidden_layers": 34},
    "27b": {
        **{"hidden_size": 5_376, "intermediate_size": 21_504, "num_hidden_layers": 62},
        **{"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 16},
        "query_pre_attn_scalar": 168,
    },
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_published_config_is_its_preset(size):
    more = {"sliding_window": 1_024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    raw = {"model_type": "gemma3_text", **PUBLISHED[size], **more}
    assert config_of(raw) == gemma3.PRESETS[size]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"layer_types": ["full_attention"]}, "but must be a list of num_hidden_layers = 26"),
        ({"layer_types": 26}, "layer_types is 26, but must be a list"),
        ({"layer_types": ["chunked_attention"] * 26}, "only 'full_attention' and 'sliding_att"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window_pattern": "6"}, "sliding_window_pattern is '6'"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "must be unscaled"),
        ({"rope_parameters": {"sliding_attention": 1e4}}, "must be unscaled"),
        ({"rope_parameters": {"sliding_attention": "default"}}, "must be unscaled"),
        ({"rope_parameters": [1e4]}, "rope_parameters is .*must be null or an object"),
    ],
)
def test_what_is_not_computed_is_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        config_of({"model_type": "gemma3_text"} | changes)


# Gemma's control tokens where its tokenizer has them, and the 256 bytes at the other ids.
CONTROL = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>"}
CONTROL |= {105: "<start_of_turn>", 106: "<end_of_turn>"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


@pytest.fixture(params=["language_model.model.", "model.language_model."])
def folder(tmp_path, request):
    """An instruct model that sees images, too, with either name of its text part."""
    save_hf(random_params(SMALL, spread=0.1)[1], SMALL, tmp_path / "text")
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    path = tmp_path / "instruct"
    path.mkdir()
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    tensors = {name.replace("model.", request.param, 1): t for name, t in tensors.items()}
    tensors["vision_tower.vision_model.post_layernorm.bias"] = np.ones(3, np.float32)
    tensors["model.multi_modal_projector.mm_soft_emb_norm.weight"] = np.ones(3, np.float32)
    save_file(tensors, path / "model.safetensors")
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "vision_config": {"hidden_size": 3},
        "eos_token_id": [1, 106],
        "text_config": {k: v for k, v in text.items() if v is not None and k != "architectures"},
    }
    alphabet = iter(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    vocab = {CONTROL.get(i) or next(alphabet): i for i in range(256 + len(CONTROL))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([*CONTROL.values()])
    made.save(str(path / "tokenizer.json"))
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    for file, content in (
        ("config.json", outer),
        ("generation_config.json", {"eos_token_id": [1, 106]}),
        ("tokenizer_config.json", {"chat_template": TEMPLATE, **named}),
    ):
        (path / file).write_text(json.dumps(content))
    return path


def test_the_text_part_of_a_directory_is_read_and_written(folder, tmp_path):
    assert load_config(folder) == SMALL
    assert sees_images(folder) and not sees_images(tmp_path / "text")
    expected = split(load_hf(tmp_path / "text"))[1]
    convert(f"hf:{folder}", f"hf:{tmp_path / 'out'}", dtype="float32")
    for found in (folder, tmp_path / "out"):
        jax.tree.map(np.testing.assert_array_equal, split(load_hf(found))[1], expected)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["model_type"], written["eos_token_id"]) == ("gemma3_text", [1, 106])


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["language_model.model."], indirect=True)
def test_an_instruct_directory_is_sampled_and_trained(folder, tmp_path, monkeypatch):
    """Answers end at <end_of_turn> or <eos>; the update sees what the sampler did.

    No answer is right: rewards are of lengths.
    """
    monkeypatch.setattr(cache, "PARTS", ((1, 1),))  # one program for decoding
    monkeypatch.setattr(jax, "jit", jit)
    config = tiny.get_config()
    settings = {
        **{"model.path": str(folder), "model.preset": "", "model.family": "gemma3_text"},
        **{"tokenizer.chat": "template", "num_steps": 1, "updates_per_step": 1},
        **{"data.train.count": 100, "rollout.num_prompts": 2, "rollout.group_size": 4},
        **{"rollout.generation_prompts": 2, "rollout.page_tokens": 32},
        **{"rollout.max_prompt_tokens": 400, "rollout.max_response_tokens": 160},
        **{"algo.dynamic_sampling": False, "algo.overlong_cache_tokens": 160},
        **{"learner.row_tokens": 1_024, "learner.micro_batch_rows": 2, "eval.every_steps": 0},
        **{"mesh.data": 2, "mesh.model": 2},
    }
    config.update_from_flattened_dict(settings)
    assert components.tokenizer(config).stop_ids == (106, 1)
    train.train(config, tmp_path / "run")
    (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert 0 < row["response_tokens/truncated_fraction"] < 1
    assert row["ratio_gap"] < 1e-4
    assert row["grad_norm"] > 0
