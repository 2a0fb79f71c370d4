"""The built-in families against transformers: logits, directories, sizes.

    PYTHONPATH=tests python -m tests.test_parity

prints the table of models/README.md.
"""

import json
import pathlib
import tempfile

import jax
import numpy as np
import pytest
from flax import nnx
from golden import CASES, MODELS, arrays_of, directory
from quick import jit
from safetensors.numpy import load_file

from configs import base
from dapo_jax.convert import convert
from dapo_jax.setup import components
from models import families
from models.hf import load_hf
from models.hf_config import config_of, load_config
from models.parameters import FULL, SLIDING
from models.qwen2 import Qwen2Config
from models.transformer import Transformer, abstract_params, rms_norm, split


@jit(static_argnums=0)
def forward(graph, params, tokens_BT, segment_BT):
    """logits_BTV of a model's parts."""
    return nnx.merge(graph, params)(tokens_BT, segment_BT=segment_BT)


def difference(model: str, folder: pathlib.Path, case: str) -> float:
    """The largest difference of a logit from transformers', over all tokens of the case."""
    arrays = arrays_of(model)
    tokens_BT, segment_BT, expected_BTV = (
        arrays[f"{case}/{key}"] for key in ("tokens_BT", "segment_BT", "logits_BTV")
    )
    logits_BTV = forward(*split(load_hf(folder)), tokens_BT, segment_BT)
    real = segment_BT > 0
    assert np.std(expected_BTV[real]) > 0.5
    return float(np.abs(logits_BTV - expected_BTV)[real].max())


@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_transformers(model, tmp_path):
    folder = directory(model, tmp_path)
    assert max(difference(model, folder, case) for case in CASES) <= 1e-4


@pytest.mark.parametrize("model", ["qwen2/tied", "qwen3/yarn", "gemma3/27b"])
def test_a_directory_leaves_as_it_came(model, tmp_path):
    """Tensors keep their names and bits; config.json means the same, scaled angles included."""
    start, end = tmp_path / "start", tmp_path / "end"
    config = load_config(directory(model, start))
    convert(f"hf:{start}", f"hf:{end}", dtype="float32")
    assert load_config(end) == config
    before, after = (load_file(folder / "model.safetensors") for folder in (start, end))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (end, start))
    rope = theirs.pop("rope_parameters")
    if "full_attention" in rope:
        assert ours["rope_local_base_freq"] == rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    assert ours["rope_theta"] == rope.pop("rope_theta")
    scaling = ours.get("rope_scaling", {"rope_type": "default"})
    assert {key: scaling[key] for key in rope} == rope
    same = ours.keys() & theirs.keys() - {"architectures"}
    assert len(same) >= 15
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}


# Parameters in all, as the published files hold them (Qwen2.5: the checkpoints; Qwen3: keras-hub's
# presets at commit 1df65da; its mixtures: the hub's counts; Llama: the model cards).
PUBLISHED = {
    "qwen2": {
        **{"0.5b": 494_032_768, "1.5b": 1_543_714_304, "3b": 3_085_938_688, "7b": 7_615_616_512},
        **{"14b": 14_770_033_664, "32b": 32_763_876_352, "72b": 72_706_203_648},
    },
    "qwen3": {
        **{"0.6b": 596_049_920, "1.7b": 1_720_574_976, "4b": 4_022_468_096, "8b": 8_190_735_360},
        **{"14b": 14_768_307_200, "32b": 32_762_123_264},
    },
    "qwen3_moe": {"30b_a3b": 30_532_122_624, "235b_a22b": 235_093_634_560},
    "llama": {
        **{"3-8b": 8_030_261_248, "3-70b": 70_553_706_496, "3.1-8b": 8_030_261_248},
        **{"3.1-70b": 70_553_706_496, "3.2-1b": 1_235_814_400, "3.2-3b": 3_212_749_824},
        "3.3-70b": 70_553_706_496,
    },
    "gemma3_text": {
        **{"270m": 268_098_176, "1b": 999_885_952, "4b": 3_880_263_168, "12b": 11_766_034_176},
        "27b": 27_009_346_304,
    },
}


def test_presets_have_the_published_number_of_parameters():
    counts = {
        name: {
            size: sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config)[1]))
            for size, config in families.load(name).presets.items()
            if size != "tiny"
        }
        for name in families.BUILT_IN
    }
    assert counts == PUBLISHED


def test_a_new_model_has_small_random_matrices():
    config = Qwen2Config(64, 32, 48, 2, 4, 2, 8, True)
    params = jit(lambda key: split(Transformer(config, key=key))[1])(jax.random.key(1))
    assert np.std(params["layers"]["up_DF"]) == pytest.approx(0.02, rel=0.1)
    assert (params["layers"]["up_DF"][0] != params["layers"]["up_DF"][1]).all()
    assert (params["final_norm_D"] == 1).all()
    assert (params["layers"]["k_bias_KH"] == 0).all()


def test_a_norm_of_small_numbers_has_its_epsilon():
    """Which no logits of a model show: it is a hundred thousandth of what it is added to."""
    normed = rms_norm(np.float32([3e-3, 4e-3]), 1.0, eps=1e-4)
    np.testing.assert_allclose(normed, [0.283, 0.377], 2e-3)


@pytest.mark.parametrize(
    ("model", "changes", "named"),
    [
        ("qwen3/tied", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3_moe/plain", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
        ("qwen3_moe/plain", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("qwen3_moe/plain", {"num_experts": 5}, "num_local_experts is 6, but num_experts is 5"),
        ("qwen3_moe/plain", {"num_experts_per_tok": 7}, "num_experts is 6, but must be at least"),
        ("qwen3_moe/plain", {"num_local_experts": 257}, "num_experts is 257, but .* at most 256"),
        ("llama/untied", {"mlp_bias": True}, "mlp_bias is True"),
        ("gemma3/1b", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("gemma3/1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3/1b", {"layer_types": [FULL]}, "but must be a list of num_hidden_layers = 7"),
        ("gemma3/1b", {"layer_types": ["chunked"] * 7}, f"only '{FULL}' and '{SLIDING}' are"),
        ("gemma3/1b", {"sliding_window": 0}, "sliding_window is 0"),
        ("gemma3/1b", {"rope_parameters": {SLIDING: {"rope_type": "yarn"}}}, "must be unscaled"),
        ("gemma3/1b", {"rope_parameters": {SLIDING: {"factor": 8.0}}}, "must be unscaled"),
        ("gemma3/1b", {"rope_parameters": [1e4]}, "rope_parameters is .*must be null or an object"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(model, changes, named):
    with pytest.raises(ValueError, match=named):
        config_of(json.loads(str(arrays_of(model)["config"])) | changes)


def test_yarn_lengthens_the_texts_that_a_run_may_have(tmp_path):
    """The model card of Qwen2.5 adds rope_scaling and leaves max_position_embeddings as it was."""
    config = base.get_config()
    file = directory("qwen2_yarn/tied", tmp_path) / "config.json"
    raw = json.loads(file.read_text()) | {"max_position_embeddings": 256}
    file.write_text(json.dumps(raw))
    config.model.path = str(tmp_path)
    config.rollout.update({"max_prompt_tokens": 24, "max_response_tokens": 1_000})
    assert components.model_sizes(config).rope_scaling.factor == 4
    config.rollout.max_response_tokens = 1_001
    with pytest.raises(ValueError, match=r"= 1025 exceeds the 1024 positions.*'yarn'"):
        components.model_sizes(config)


if __name__ == "__main__":
    print("| model | right-padded | left-padded | packed |\n|---|---:|---:|---:|")
    for model in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            path = directory(model, pathlib.Path(folder))
            found = (f"{difference(model, path, case):.1e}" for case in CASES)
            print(f"| {model} | {' | '.join(found)} |")
