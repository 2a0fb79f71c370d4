"""Hugging Face directories: bitwise round trips, and an error for everything that is wrong."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from safetensors.numpy import load_file, save_file
from states import assert_bitwise_equal
from transformers import AutoConfig

from dapo_jax.convert import convert
from models import families, hf
from models.hf import load_hf, load_params, save_hf
from models.hf_config import SIZE_KEYS, config_json, config_of, load_config
from models.parameters import param_axes
from models.qwen2 import Qwen2Config
from models.rope import Llama3Scaling, YarnScaling
from models.transformer import split
from sharding import rules
from sharding.mesh import make_mesh

# Every size differs, and head_dim is not width / heads, so that no wrong reshape goes unseen.
TIED = Qwen2Config(64, 24, 40, 3, 4, 2, 8, True, rope_theta=1e4, rms_norm_eps=1e-5)
UNTIED = dataclasses.replace(TIED, tie_embeddings=False)
SHARD_BYTES, WEIGHTS = 10_000, "model.safetensors"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
OF_YARN = {"rope_scaling": YarnScaling(4.0, 32_768)}
SHORT = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8_192}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def random_params(config):
    """Parameters without a zero or a one, so that a tensor left out or swapped shows."""
    return quick.random_params(config, spread=1)[1]


@pytest.fixture
def folder(tmp_path):
    """An exported untied model in one file, for a test to damage."""
    save_hf(random_params(UNTIED), UNTIED, tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder, **changes):
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in raw.items() if v != "ABSENT"}))


def edit_weights(folder, edit):
    file = folder / WEIGHTS
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def test_parameters_load_in_pieces_onto_a_mesh_and_leave_it(tmp_path, monkeypatch):
    config, read, pieces = UNTIED, [], hf._pieces

    def counted(tensor, *rows):
        for first, piece in pieces(tensor, *rows):
            read.append(piece.nbytes)
            yield first, piece

    monkeypatch.setattr(hf, "_pieces", counted)
    monkeypatch.setattr(hf, "PIECE_VALUES", 100)  # a few rows of a tensor, down to one
    params, mesh = random_params(config), make_mesh(data=2, model=2)
    shardings = rules.param_shardings(mesh, param_axes(params), params, rules.LEARNER)
    save_hf(params, config, tmp_path / "a", max_shard_bytes=SHARD_BYTES)
    loaded = load_params(tmp_path / "a", config, dtype="float32", shardings=shardings)
    assert_bitwise_equal(loaded, params)
    assert jax.tree.map(lambda leaf: leaf.sharding, loaded) == shardings
    # Four devices want other columns of the same rows, or the same rows: they are read once.
    assert sum(read) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    save_hf(loaded, config, tmp_path / "b", max_shard_bytes=SHARD_BYTES)
    for file in (tmp_path / "a").iterdir():
        assert (tmp_path / "b" / file.name).read_bytes() == file.read_bytes()
    low = load_params(tmp_path / "b", config, dtype="bfloat16", shardings=shardings)
    assert_bitwise_equal(low, jax.tree.map(lambda a: a.astype(jnp.bfloat16), params))


@pytest.mark.parametrize("family", families.BUILT_IN)
def test_what_config_json_lacks_is_what_transformers_makes_of_nothing(family):
    """Llama 2's has no rope_theta, Llama's first no key/value heads, Gemma 3's hardly any size.

    Without their number a mixture of Qwen3's was read with 32 key/value heads in place of 4.
    """
    given = {"model_type": family, "num_attention_heads": 64}
    published, key = AutoConfig.for_model(**given).to_dict(), "num_key_value_heads"
    if family != "gemma3_text":
        given |= {name: published[name] for name in SIZE_KEYS.values() if name != key}
    null = dict.fromkeys(("rope_theta", "rms_norm_eps", "tie_word_embeddings", "head_dim"))
    assert config_of(given) == config_of(given | null) == config_of(published)
    if family in ("qwen2", "qwen3", "llama"):  # transformers refuses the others'
        published = AutoConfig.for_model(**given, **{key: None}).to_dict()
        assert config_of(given | {key: None}) == config_of(published)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000, "factor": 1.0}}, {}),
        ({"partial_rotary_factor": 1.0, "num_experts": None, "attention_bias": True}, {}),
        ({"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 1}, {}),
        ({"architectures": None, "auto_map": {"AutoTokenizer": "x.Y"}, "unsloth_version": "1"}, {}),
        ({"head_dim": "ABSENT", "hidden_size": 32}, {"width": 32}),
        ({"rope_theta": "ABSENT", "rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ({"rope_scaling": YARN}, OF_YARN),
        ({"rope_parameters": YARN | {"rope_theta": 1e4}}, OF_YARN),
        ({"rope_parameters": YARN, "rope_scaling": YARN}, OF_YARN),
        ({"rope_scaling": LLAMA3}, {"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 8_192)}),
    ],
)
def test_configs_of_older_and_newer_transformers_are_read(folder, changes, expected):
    edit_config(folder, **changes)
    assert load_config(folder) == dataclasses.replace(UNTIED, **expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types is "),
        ({"quantization_config": {"bits": 4}}, "quantization_config is "),
        ({"auto_map": {"AutoModelForCausalLM": "x.Model"}}, "auto_map is "),
        ({"architectures": ["Qwen2ForTokenClassification"]}, "architectures is "),
        ({"hidden_size": 30, "head_dim": "ABSENT"}, "hidden_size is 30, but must be a multiple"),
        ({"num_attention_heads": 5}, "num_attention_heads is 5"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'original_max_position_embeddings'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "(no scaling), 'llama3', 'yarn'"),
        ({"rope_scaling": YARN | {"mscale": 0.7}}, "'mscale' is no key of it"),
        # DeepSeek-R1-0528-Qwen3-8B's, which was told Python's words and no advice.
        ({"rope_scaling": YARN | {"attn_factor": 0.88}}, "take it out, as transformers does, or "),
        ({"rope_scaling": YARN | {"factor": float("nan")}}, "factor must be a positive number"),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}}, "must say the same as"),
        ({"rope_scaling": YARN, SHORT: 4_096}, f"{SHORT} is 4096, but 32768 beside the rope_type"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling is {'factor': 4.0}"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is [10000.0, 500000.0]"),
    ],
)
def test_a_config_that_the_model_does_not_compute_is_refused_in_one_line(folder, changes, named):
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=rf"^{folder}/config.json: .*{re.escape(named)}") as error:
        load_config(folder)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_missing_unexpected_misshaped_and_wrong_tensors_are_all_named(folder):
    def damage(tensors):
        del tensors["model.norm.weight"]
        del tensors["model.layers.2.self_attn.k_proj.bias"]
        tensors["model.layers.3.mlp.up_proj.weight"] = np.ones((2, 2), np.float32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].astype(np.int8)

    edit_weights(folder, damage)
    with pytest.raises(ValueError, match="5 tensors do not fit") as error:
        load_hf(folder)
    for said in (
        "missing: model.layers.2.self_attn.k_proj.bias (16,)",
        "unexpected: model.layers.3.mlp.up_proj.weight (2, 2)",
        "mis-shaped: lm_head.weight is (63, 24)",
        "wrong dtype: model.embed_tokens.weight is I8",
    ):
        assert said in str(error.value)


def test_buffers_of_older_checkpoints_are_ignored_and_other_tensors_not(tmp_path):
    """Llama 2's files have the rotary angles, GPT-2's layout has masks."""
    params = random_params(UNTIED)
    save_hf(params, UNTIED, tmp_path, max_shard_bytes=SHARD_BYTES)
    file, layer = min(tmp_path.glob("*.safetensors")), "model.layers.0.self_attn"
    names = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "masked_bias", "bias")
    buffers = {f"{layer}.{name}": np.ones((1, 1, 9, 9), bool) for name in names}
    save_file(load_file(file) | buffers, file)
    assert_bitwise_equal(load_params(tmp_path, UNTIED, dtype="float32"), params)
    weights = {f"{layer}.{name}": np.ones(4) for name in ("o_proj.bias", "rotary_emb.weight")}
    save_file(load_file(file) | weights, file)
    with pytest.raises(ValueError, match=r"2 tensors do not fit .* unexpected"):
        load_params(tmp_path, UNTIED, dtype="float32")


def test_tied_head_may_be_stored_if_it_equals_the_embedding(tmp_path):
    params = random_params(TIED)
    save_hf(params, TIED, tmp_path)
    embed = params["embed_VD"]
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": embed}))
    assert_bitwise_equal(split(load_hf(tmp_path))[1], params)

    other = embed.copy()
    other[7, 3] += 1
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": other}))
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("config.json", lambda it: it.unlink(), "has no config.json"),
        ("config.json", lambda it: it.write_text("[1]"), "config.json holds a JSON list"),
        ("config.json", lambda it: it.write_bytes(b"\xff"), "config.json is not JSON"),
        (WEIGHTS, lambda it: it.rename(it.with_name("x.bin")), r"it holds config.json, x.bin"),
        (WEIGHTS, lambda it: it.write_bytes(b""), r"\(0 bytes\) is no whole"),
        (WEIGHTS, lambda it: it.write_bytes(it.read_bytes()[:-1]), r"\(\d+ bytes\) is no whole"),
    ],
)
def test_files_that_are_missing_or_broken_are_named(folder, file, damage, message):
    damage(folder / file)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        load_hf(folder)


def test_the_index_says_which_file_has_a_tensor(tmp_path):
    params = random_params(UNTIED)
    save_hf(params, UNTIED, tmp_path, max_shard_bytes=SHARD_BYTES)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    last = sorted(set(index["weight_map"].values()))[-1]
    tensors, name = load_file(tmp_path / last), "model.embed_tokens.weight"
    save_file(tensors | {name: np.zeros((64, 24), np.float32)}, tmp_path / last)
    assert_bitwise_equal(load_params(tmp_path, UNTIED, dtype="float32"), params)
    save_file(tensors, tmp_path / last)
    file.write_text(json.dumps({"weight_map": index["weight_map"] | {name: last}}))
    with pytest.raises(ValueError, match=f"missing: {name}"):
        load_hf(tmp_path)
    (tmp_path / last).unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {last}"):
        load_hf(tmp_path)


def test_convert_keeps_tokenizer_and_config_and_rounds_the_weights(tmp_path):
    params, extra = random_params(UNTIED), {"bos_token_id": 1, "eos_token_id": [2, 3]}
    start, end = tmp_path / "start", tmp_path / "end"
    save_hf(params, UNTIED, start, extra_config=extra)
    (start / "tokenizer.json").write_text("{}")
    (start / "generation_config.json").write_text('{"top_p": 0.7}')
    (template := start / "additional_chat_templates" / "tool_use.jinja").parent.mkdir()
    template.write_text("{{ 1 }}")
    (start / "README.md").write_text("not copied")
    assert "parameters in float32" in convert(f"hf:{start}", f"hf:{end}", dtype="float32")
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    names.add(str(template.relative_to(start)))
    assert {str(it.relative_to(end)) for it in end.rglob("*") if it.is_file()} == names
    for name in names:
        assert (end / name).read_bytes() == (start / name).read_bytes()
    convert(f"hf:{start}", f"hf:{tmp_path / 'half'}", dtype="bfloat16")
    half = load_params(tmp_path / "half", UNTIED, dtype="bfloat16")
    assert_bitwise_equal(half, jax.tree.map(lambda a: a.astype(jnp.bfloat16), params))
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    given = config_json(UNTIED, np.dtype("float32"), {"hidden_size": 1, "bos_token_id": 1})
    assert (given["hidden_size"], given["bos_token_id"]) == (UNTIED.width, 1)


def test_bad_places_and_numbers_are_refused_and_nothing_is_written(folder, tmp_path):
    """A number beyond float16's range is infinity there."""
    target = f"hf:{tmp_path / 'out'}"
    edit_weights(folder, lambda t: t.update({"model.norm.weight": np.full(24, 1e6, np.float32)}))
    message = r"in float16: final_norm_D has values that are not finite"
    with pytest.raises(ValueError, match=message):
        convert(f"hf:{folder}", target, dtype="float16")
    for source in ("hf:", "torch:x", str(folder)):
        with pytest.raises(ValueError, match=r"--from is .* must be hf:DIR"):
            convert(source, target, dtype="float32")
    with pytest.raises(FileExistsError, match=r"already holds a model .*config.json, model.safete"):
        save_hf(random_params(UNTIED), UNTIED, folder)
    with pytest.raises(FileExistsError, match="exists and is not an empty directory"):
        convert(f"hf:{folder}", f"hf:{folder}", dtype="float32")
    with pytest.raises(FileNotFoundError, match="nowhere is not a directory"):
        convert(f"hf:{tmp_path / 'nowhere'}", target, dtype="float32")
    assert not (tmp_path / "out").exists()
