"""Gemma 3: its kinds of layers and its directories."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quick import jit, random_params
from safetensors.numpy import load_file, save_file

from dapo_jax.convert import convert
from dapo_jax.setup import components
from models import gemma3
from models.hf import load_hf, save_hf
from models.hf_config import config_of, load_config, sees_images
from models.precision import Weights
from models.rope import LinearScaling
from models.transformer import Execution, split, windowed

SMALL = gemma3.Gemma3Config(
    *(288, 24, 40, 3, 4, 2, 8, True, 1e6),
    rope_scaling=LinearScaling(8.0),
    windows=(6, None, 6),
    query_scalar=12,
)


def test_a_token_sees_itself_and_the_tokens_before_it_in_its_window():
    seen_1TS = windowed(jnp.tril(jnp.ones((1, 9, 9), bool)), 4)
    assert seen_1TS[0].sum(axis=1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4]


def test_embeddings_are_multiplied_by_the_rounded_root_of_the_width():
    """34 in bfloat16 for 1B's width, as transformers has it, and not 33.94."""
    wide = dataclasses.replace(SMALL, width=1_152, num_layers=1, windows=(), rms_norm_eps=1e12)
    graph, params = random_params(wide, spread=0.01)
    params["final_norm_D"] = np.zeros(1_152, np.float32)
    for name in ("o_NHD", "down_FD"):
        params["layers"][name] = np.zeros_like(params["layers"][name])
    tokens_BT = np.arange(4)[None]
    execution, model = Execution(weights=Weights(dtype="bfloat16")), nnx.merge(graph, params)
    attend = lambda q, k, v, window: q  # noqa: E731
    x_BTD, _ = jit(lambda: model.hidden(tokens_BT, tokens_BT, attend, execution))()
    expected_BTD = params["embed_VD"][tokens_BT].astype(jnp.bfloat16).astype(np.float32) * 34 / 1e6
    np.testing.assert_allclose(x_BTD, expected_BTD.astype(jnp.bfloat16), rtol=1e-6)


def test_the_largest_published_config_is_its_preset():
    """The others are in test_published_models.py."""
    raw = {
        **{"model_type": "gemma3_text", "sliding_window": 1_024, "query_pre_attn_scalar": 168},
        **{"hidden_size": 5_376, "intermediate_size": 21_504, "num_hidden_layers": 62},
        **{"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 16},
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    assert config_of(raw) == gemma3.PRESETS["27b"]
    assert config_of(raw | {"sliding_window_pattern": 3}).windows[2:9:3] == (None,) * 3


LEFT_OUT = ("architectures", "max_position_embeddings")


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
        "text_config": {k: v for k, v in text.items() if v is not None and k not in LEFT_OUT},
    }
    (path / "config.json").write_text(json.dumps(outer))
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
    # The published directories leave it to transformers' default; the export said 32,768.
    assert written["max_position_embeddings"] == 131_072 == components.positions_of(folder, SMALL)
