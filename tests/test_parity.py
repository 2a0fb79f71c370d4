"""The built-in families against transformers: logits, directories, sizes; and a sampled step.

    python -m tests.test_parity

prints the table of models/README.md.
"""

import json
import pathlib
import tempfile

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from configs import base
from dapo_jax.convert import convert
from dapo_jax.setup import components
from models import families, load_hf
from models.hf_config import load_config
from models.qwen2 import Qwen2Config
from models.transformer import Transformer, abstract_params, split
from tests import sampled_step
from tests.quick import jit

FOLDER = pathlib.Path(__file__).parent / "golden_data"
# The files of make_transformers_golden.py, and the models in each.
GOLDEN = {
    "qwen2": ("tied", "untied"),
    "qwen2_yarn": ("tied",),
    "qwen3": ("tied", "untied", "yarn"),
    "qwen3_moe": ("normed", "plain"),
    "llama": ("untied", "llama3"),
    "gemma3": ("1b", "27b"),
}
MODELS = [f"{file}/{name}" for file, names in GOLDEN.items() for name in names]
CASES = ("right_padded", "left_padded", "packed")


def golden(model: str) -> dict[str, np.ndarray]:
    """The arrays of "file/model"."""
    file, _, name = model.partition("/")
    with np.load(FOLDER / f"{file}_transformers.npz") as arrays:
        start = f"{name}/"
        return {k.removeprefix(start): a for k, a in arrays.items() if k.startswith(start)}


def directory(model: str, folder: pathlib.Path) -> pathlib.Path:
    """The model's directory, in transformers' own names and config."""
    arrays, start = golden(model), "weights/"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(str(arrays["config"]))
    weights = {k.removeprefix(start): a for k, a in arrays.items() if k.startswith(start)}
    save_file(weights, folder / "model.safetensors")
    return folder


@jit(static_argnums=0)
def forward(graph, params, tokens_BT, segment_BT):
    """logits_BTV of a model's parts."""
    return nnx.merge(graph, params)(tokens_BT, segment_BT=segment_BT)


def difference(model: str, folder: pathlib.Path, case: str) -> float:
    """The largest difference of a logit from transformers', over all tokens of the case."""
    arrays = golden(model)
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


@pytest.mark.parametrize("model", ["qwen2/tied", "qwen3/yarn", "llama/llama3", "gemma3/27b"])
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
    ("qwen2", "0.5b"): 494_032_768,
    ("qwen2", "1.5b"): 1_543_714_304,
    ("qwen2", "3b"): 3_085_938_688,
    ("qwen2", "7b"): 7_615_616_512,
    ("qwen2", "14b"): 14_770_033_664,
    ("qwen2", "32b"): 32_763_876_352,
    ("qwen2", "72b"): 72_706_203_648,
    ("qwen3", "0.6b"): 596_049_920,
    ("qwen3", "1.7b"): 1_720_574_976,
    ("qwen3", "4b"): 4_022_468_096,
    ("qwen3", "8b"): 8_190_735_360,
    ("qwen3", "14b"): 14_768_307_200,
    ("qwen3", "32b"): 32_762_123_264,
    ("qwen3_moe", "30b_a3b"): 30_532_122_624,
    ("qwen3_moe", "235b_a22b"): 235_093_634_560,
    ("llama", "3-8b"): 8_030_261_248,
    ("llama", "3-70b"): 70_553_706_496,
    ("llama", "3.1-8b"): 8_030_261_248,
    ("llama", "3.1-70b"): 70_553_706_496,
    ("llama", "3.2-1b"): 1_235_814_400,
    ("llama", "3.2-3b"): 3_212_749_824,
    ("llama", "3.3-70b"): 70_553_706_496,
    ("gemma3_text", "270m"): 268_098_176,
    ("gemma3_text", "1b"): 999_885_952,
    ("gemma3_text", "4b"): 3_880_263_168,
    ("gemma3_text", "12b"): 11_766_034_176,
    ("gemma3_text", "27b"): 27_009_346_304,
}


def test_presets_have_the_published_number_of_parameters():
    counts = {
        (name, size): sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config)[1]))
        for name in families.BUILT_IN
        for size, config in families.load(name).presets.items()
        if (name, size) != ("qwen2", "tiny")
    }
    assert counts == PUBLISHED


def test_a_new_model_has_the_abstract_params_and_small_random_matrices():
    config = Qwen2Config(64, 32, 48, 2, 4, 2, 8, True)
    params = jit(lambda key: split(Transformer(config, key=key))[1])(jax.random.key(1))
    _, abstract = abstract_params(config)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(
        lambda a: (a.shape, a.dtype), abstract
    )
    assert np.std(params["layers"]["up_DF"]) == pytest.approx(0.02, rel=0.1)
    assert (params["layers"]["up_DF"][0] != params["layers"]["up_DF"][1]).all()
    assert (params["final_norm_D"] == 1).all()
    assert (params["layers"]["k_bias_KH"] == 0).all()


@pytest.mark.parametrize(
    ("model", "changes", "named"),
    [
        ("qwen3/tied", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3/tied", {"model_type": "qwen3_next"}, "model_type is 'qwen3_next'"),
        ("qwen3_moe/plain", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
        ("qwen3_moe/plain", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("qwen3_moe/plain", {"num_experts": 5}, "num_local_experts is 6, but num_experts is 5"),
        ("qwen3_moe/plain", {"num_experts_per_tok": 7}, "num_experts is 6, but must be at least"),
        ("llama/untied", {"attention_bias": True}, "attention_bias is True"),
        ("llama/untied", {"mlp_bias": True}, "mlp_bias is True"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(model, changes, named, tmp_path):
    file = directory(model, tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=rf"config.json: {named}"):
        load_config(tmp_path)


def test_yarn_lengthens_the_texts_that_a_run_may_have(tmp_path):
    """The model card of Qwen2.5 adds rope_scaling and leaves max_position_embeddings as it was."""
    config = base.get_config()
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = 24, 1_000
    file = directory("qwen2_yarn/tied", tmp_path) / "config.json"
    raw = json.loads(file.read_text())
    config.model.path = str(tmp_path)
    file.write_text(json.dumps(raw | {"max_position_embeddings": 256}))
    assert components.model_sizes(config).rope_scaling.factor == 4
    config.rollout.max_response_tokens = 1_001
    with pytest.raises(ValueError, match=r"= 1025 exceeds the 1024 positions.*'yarn'"):
        components.model_sizes(config)
    config.rollout.max_response_tokens = 1_000
    plain = {"rope_parameters": {"rope_theta": 1e4}, "max_position_embeddings": 256}
    file.write_text(json.dumps(raw | plain))
    with pytest.raises(ValueError, match=r"= 1024 exceeds the 256 positions"):
        components.model_sizes(config)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "rank"), [("qwen3/yarn", 2), ("gemma3/1b", 0)])
def test_sampler_and_learner_agree(model, rank, tmp_path):
    """A config samples what the model gives, over two shards of heads, and learns from it."""
    folder = directory(model, tmp_path)
    family = load_config(folder).model_type
    built = sampled_step.programs(family, folder, lora_rank=rank)
    before, groups, state, metrics = sampled_step.step(built)
    graph, params = split(load_hf(folder))

    def logits_of(tokens_T):
        padded_BT = np.zeros((1, 40), np.int32)
        padded_BT[0, : len(tokens_T)] = tokens_T
        segment_BT = (np.arange(40) < len(tokens_T)).astype(np.int32)[None]
        return np.asarray(forward(graph, params, padded_BT, segment_BT))[0, : len(tokens_T)]

    sampled_step.check_log_probs(groups, logits_of)
    assert metrics["ratio_gap"] <= 1e-5  # the mean of |ratio - 1|
    assert metrics["taken"]
    changed = jax.tree.map(lambda a, b: (np.asarray(a) != b).any(), state.params, before)
    assert all(jax.tree.leaves(changed)), changed


if __name__ == "__main__":
    print("| model | right-padded | left-padded | packed |\n|---|---:|---:|---:|")
    for model in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            path = directory(model, pathlib.Path(folder))
            found = (f"{difference(model, path, case):.1e}" for case in CASES)
            print(f"| {model} | {' | '.join(found)} |")
