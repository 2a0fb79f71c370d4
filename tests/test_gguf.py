"""GGUF files: the weights and tokenizer of each kind, and an error for everything that is wrong."""

import errno
import json
import math
import re
import struct
import sys
from unittest import mock

import gguf as library
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dapo_jax.convert import convert, load_orbax
from dapo_jax.tasks.gguf_tokenizer import tokenizer_files
from dapo_jax.tasks.tokenizer import load_tokenizer
from models import gguf, hf, load_hf
from models.hf_config import load_config
from models.rope import Llama3Scaling
from models.transformer import split
from tests.test_parity import directory

Type = library.GGMLQuantizationType
# The texts that stand for the bytes in a vocabulary: printable bytes for themselves.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_TEXT = {byte: chr(byte) for byte in PRINTABLE}
BYTE_TEXT |= {byte: chr(256 + n) for n, byte in enumerate(OTHERS)}
SIZES = {
    "block_count": 2,
    "embedding_length": 16,
    "feed_forward_length": 24,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 8,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "context_length": 2048,
    "rope.freq_base": 5e5,
}


def vocabulary(pre="smollm", *, merges=(), control=("<|end|>", "<|turn|>"), size=None):
    """Metadata of a tokenizer: all bytes, what the merges make, control tokens, a word, unused."""
    texts = [*BYTE_TEXT.values(), *(merge.replace(" ", "") for merge in merges)]
    kinds = [1] * len(texts) + [3] * len(control) + [4, 5]
    texts += [*control, "<word>", "[PAD]"]
    values = {
        "tokens": texts[-size:] if size else texts,
        "token_type": kinds[-size:] if size else kinds,
        "merges": list(merges),
        "model": "gpt2",
        "pre": pre,
        "bos_token_id": len(texts) - 4 - (len(texts) - size if size else 0),
        "eos_token_id": len(texts) - 3 - (len(texts) - size if size else 0),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def interleaved(array, head_dim):
    """Puts rows i and i + head_dim / 2 of each head side by side, as llama.cpp has them."""
    half = head_dim // 2
    starts = range(0, len(array), head_dim)
    return array[
        [start + i + part * half for start in starts for i in range(half) for part in (0, 1)]
    ]


def write(
    file, architecture, sizes, tensors, *, metadata=None, endianess=library.GGUFEndian.LITTLE
):
    """Writes a file; tensors: float32 arrays or (bytes of rows, type) by the file's names."""
    writer = library.GGUFWriter(file, architecture, endianess=endianess)
    given = {f"{architecture}.{key}": value for key, value in sizes.items()}
    for key, value in (given | (metadata or vocabulary(size=96))).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kinds = {int: "uint32", float: "float32", str: "string", bool: "bool"}
            getattr(writer, f"add_{kinds[type(value)]}")(key, value)
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def renamed(weights, architecture, config):
    """Names Hugging Face's weights by the package's own table, and interleaves Llama's heads."""
    key = next(key for key, name in library.MODEL_ARCH_NAMES.items() if name == architecture)
    names = library.get_tensor_name_map(key, config["num_hidden_layers"])
    tensors = {}
    for name, array in weights.items():
        if architecture == "llama" and re.search(r"[qk]_proj", name):
            array = interleaved(array, config["head_dim"])
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = array
    return tensors


def sizes_of(config):
    """Names the sizes of a config.json as a file does."""
    keys = {key: theirs for key, theirs in gguf.SIZES.items() if key in config}
    sizes = {theirs: config[key] for key, theirs in keys.items()}
    rope = config["rope_parameters"]
    sizes |= {"attention.key_length": config["head_dim"], "rope.freq_base": rope["rope_theta"]}
    if rope["rope_type"] != "default":
        sizes |= {
            "rope.scaling.type": rope["rope_type"],
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    return sizes


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


MODELS = ("qwen2/tied", "qwen2/untied", "qwen2_yarn/tied", "qwen3/tied", "qwen3/untied")


@pytest.mark.parametrize("model", [*MODELS, "llama/untied"])
def test_a_model_of_transformers_is_read_bitwise(model, tmp_path):
    folder = directory(model, tmp_path / "theirs")
    raw = json.loads((folder / "config.json").read_text())
    tensors = renamed(load_file(folder / "model.safetensors"), raw["model_type"], raw)
    file = write(tmp_path / "model.gguf", raw["model_type"], sizes_of(raw), tensors)
    summary = convert(f"gguf:{file}", f"hf:{tmp_path / 'ours'}", dtype="float32")
    assert "parameters in float32; also tokenizer.json, tokenizer_config.json" in summary
    assert load_config(tmp_path / "ours") == load_config(folder)
    same(split(load_hf(tmp_path / "ours"))[1], split(load_hf(folder))[1])
    content = json.loads((tmp_path / "ours/config.json").read_text())
    assert content["max_position_embeddings"] == raw["max_position_embeddings"]
    assert (content["bos_token_id"], content["eos_token_id"]) == (92, 93)
    ours = load_tokenizer(tmp_path / "ours", stop_tokens=None, chat="none")
    assert (ours.vocab_size, ours.stop_ids) == (95, (93,))


def blocks(kind, rows, columns):
    """(Bytes of rows, type) of random finite values; K-quants' scales are set by hand."""
    rng = np.random.default_rng(int(kind))
    values = rng.normal(size=(rows, columns)).astype(np.float32)
    if kind not in (Type.Q2_K, Type.Q4_K, Type.Q6_K):
        return library.quants.quantize(values, kind), kind
    count, (block, size) = rows * columns, library.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (count // block, size), dtype=np.uint8)
    scales = {Type.Q2_K: (80, 82), Type.Q4_K: (0, 2), Type.Q6_K: (208,)}[kind]
    for n, place in enumerate(scales):
        data[:, place : place + 2] = np.frombuffer(np.float16(0.01 * (n + 1)).tobytes(), np.uint8)
    return data.reshape(rows, -1), kind


@pytest.fixture
def llama(monkeypatch):
    """(Sizes, tensors, metadata) of a Llama of 256 columns, a matrix of each type."""
    sizes = SIZES | {"block_count": 1, "embedding_length": 256, "feed_forward_length": 256}
    metadata = vocabulary(size=96)
    kinds = {
        "token_embd": (Type.Q8_0, 96),
        "blk.0.attn_q": (Type.Q4_K, 32),
        "blk.0.attn_k": (Type.Q5_1, 16),
        "blk.0.attn_v": (Type.Q6_K, 16),
        "blk.0.ffn_gate": (Type.Q4_1, 256),
        "blk.0.ffn_up": (Type.BF16, 256),
        "blk.0.ffn_down": (Type.Q2_K, 256),
    }
    tensors = {f"{name}.weight": blocks(kind, rows, 256) for name, (kind, rows) in kinds.items()}
    tensors["blk.0.attn_output.weight"] = blocks(Type.Q5_0, 256, 32)
    rng = np.random.default_rng(0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        tensors[f"{name}.weight"] = rng.normal(size=256).astype(np.float32)
    monkeypatch.setattr(hf, "PIECE_VALUES", 5_000)  # several pieces of each matrix
    return sizes, tensors, metadata


def test_quantised_tensors_have_the_values_of_their_blocks(llama, tmp_path):
    sizes, tensors, metadata = llama
    file = write(tmp_path / "model.gguf", "llama", sizes, tensors, metadata=metadata)
    convert(f"gguf:{file}", f"hf:{tmp_path / 'ours'}", dtype="float32")
    ours = load_file(tmp_path / "ours/model.safetensors")
    assert len(ours) == len(tensors)
    for name, tensor in tensors.items():
        module = gguf.MODULES[name.removeprefix("blk.0.").removesuffix(".weight")]
        value = ours[
            f"model.layers.0.{module}.weight" if name.startswith("blk") else f"{module}.weight"
        ]
        expected = library.quants.dequantize(*tensor) if isinstance(tensor, tuple) else tensor
        if name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
            value = interleaved(value, 8)
        assert len(np.unique(value)) > 10
        np.testing.assert_array_equal(value, expected)


def test_float16_tensors_are_read(llama, tmp_path):
    sizes, tensors, metadata = llama
    tensors["blk.0.ffn_up.weight"] = np.full((256, 256), 0.1, np.float16)
    model = gguf.read(write(tmp_path / "a.gguf", "llama", sizes, tensors, metadata=metadata))
    params = gguf.load_params(model, gguf.read_config(model)[0], dtype="float32")
    assert (params["layers"]["up_DF"] == np.float32(np.float16(0.1))).all()


def test_rows_in_the_middle_of_a_tensor_are_read(llama, tmp_path):
    sizes, tensors, metadata = llama
    model = gguf.read(write(tmp_path / "a.gguf", "llama", sizes, tensors, metadata=metadata))
    name = "blk.0.ffn_gate.weight"
    pieces = list(model.tensors[name].pieces(8, 30, 8))
    assert [len(piece) for piece in pieces] == [8, 8, 6]
    expected = library.quants.dequantize(*tensors[name])[8:30]
    np.testing.assert_array_equal(np.concatenate(pieces), expected)


def factors_of(half, theta, factor):
    """Llama 3.1's factors by its formula: of wavelengths, low 1, high 4, 8,192 positions."""
    factors = []
    for i in range(half):
        wavelength = 2 * math.pi * theta ** (i / half)
        smooth = (8_192 / wavelength - 1) / 3
        medium = 1 / ((1 - smooth) / factor + smooth)
        low, high = wavelength > 8_192, wavelength < 8_192 / 4
        factors.append(factor if low else 1 if high else medium)
    return np.array(factors, np.float32)


def small(**changes):
    """Random tensors of a tied Llama of SIZES, float32; changes: others, None takes one away."""
    shapes = {"token_embd": (96, 16), "output_norm": (16,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_q": (32, 16),
                "attn_k": (16, 16),
                "attn_v": (16, 16),
                "attn_output": (16, 32),
                "ffn_gate": (24, 16),
                "ffn_up": (24, 16),
                "ffn_down": (16, 24),
                "attn_norm": (16,),
                "ffn_norm": (16,),
            }.items()
        }
    rng = np.random.default_rng(0)
    tensors = {f"{n}.weight": rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    tensors |= changes
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_1s_scaling_is_found_by_its_factors(factor, tmp_path):
    sizes = SIZES | {"attention.key_length": 64}
    tensors = small() | {"rope_freqs.weight": factors_of(32, 5e5, factor)}
    assert len(np.unique(tensors["rope_freqs.weight"])) > 3
    model = gguf.read(write(tmp_path / "a.gguf", "llama", sizes, tensors))
    assert gguf.read_config(model)[0].rope_scaling == Llama3Scaling(factor, 1.0, 4.0, 8_192)


def test_factors_of_one_scale_nothing_in_an_orbax_directory(tmp_path):
    tensors = small() | {"rope_freqs.weight": np.ones(4, np.float32)}
    file = write(tmp_path / "a.gguf", "llama", SIZES, tensors)
    convert(f"gguf:{file}", f"orbax:{tmp_path / 'ours'}", dtype="bfloat16")
    params, config, kept = load_orbax(tmp_path / "ours", dtype="float32")
    assert config.rope_scaling is None
    assert kept == {"bos_token_id": 92, "eos_token_id": 93, "max_position_embeddings": 2048}
    expected = tensors["output_norm.weight"].astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(params["final_norm_D"], expected)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, "rope_scaling", None),
        ({"rope.scaling.factor": 1.0}, "rope_scaling", None),
        ({"rope.dimension_count": 8, "attention.value_length": 8}, "head_dim", 8),
        ({"attention.head_count": 2, "attention.key_length": None}, "head_dim", 8),
        ({"attention.head_count_kv": None}, "num_kv_heads", 4),
        ({"rope.freq_base": None}, "rope_theta", 1e4),
        ({"expert_count": 0, "vocab_size": 7}, "rms_norm_eps", 1e-5),
    ],
)
def test_sizes_that_a_file_leaves_out_or_says_twice(changes, field, value, tmp_path):
    sizes = {key: v for key, v in (SIZES | changes).items() if v is not None}
    model = gguf.read(write(tmp_path / "a.gguf", "llama", sizes, small()))
    assert getattr(gguf.read_config(model)[0], field) == value


NAN = small()["output_norm.weight"] * np.float32("nan")


@pytest.mark.parametrize(
    ("sizes", "tensors", "message"),
    [
        ({}, {"blk.0.attn_rot.weight": NAN}, r"a\.gguf: the tensor blk\.0\.attn_rot\.weight is"),
        ({}, {"model.norm.weight": NAN}, r"a\.gguf: the tensor model\.norm\.weight is not comp"),
        ({}, {"blk.2.ffn_norm.weight": NAN}, r"unexpected: model\.layers\.2\.post_attention_l"),
        (
            {},
            {"blk.1.ffn_up.weight": None},
            r"fit the metadata: missing: model\.layers\.1\.mlp\.up",
        ),
        ({}, {"blk.0.attn_q.bias": NAN}, r"unexpected: model\.layers\.0\.self_attn\.q_proj\.bias"),
        (
            {},
            {"output_norm.weight": NAN[1:]},
            r"norm\.weight is \(15,\) in a\.gguf, but must be \(16",
        ),
        ({}, {"output_norm.weight": NAN}, r"a\.gguf in float32: a value of model\.norm.* is nan"),
        ({}, {"output.weight": np.zeros(16, np.int32)}, r"output\.weight has the type 26, .* Q8_0"),
        ({}, {"output.weight": np.zeros(16, np.int8)}, r"output\.weight has the type 24"),
        ({}, {"rope_freqs.weight": NAN}, r"rope_freqs\.weight is \(16,\), but must be \(4,\)"),
        ({}, {"rope_freqs.weight": NAN[:4]}, r"Llama 3\.1's .*factor must be a positive number"),
        ({}, {"rope_freqs.weight": np.float32([1, 2, 3, 4])}, r"Llama 3\.1's .*\(low 1, high 4"),
        ({"block_count": None}, {}, r"a\.gguf has no llama\.block_count in its metadata"),
        (
            {"block_count": "2"},
            {},
            r"a\.gguf, .*: num_hidden_layers is '2', but must be a positive",
        ),
        ({"attention.head_count_kv": 3}, {}, r"num_attention_heads is 4, but must be a multiple"),
        ({"attention.layer_norm_rms_epsilon": math.nan}, {}, r"rms_norm_eps is nan, but must be"),
        ({"expert_count": 8}, {}, r"a\.gguf: llama\.expert_count is 8, which is not computed"),
        (
            {"rope.dimension_count": 4},
            {},
            r"rope\.dimension_count is 4, but only .* 8, is computed",
        ),
        ({"attention.value_length": 4}, {}, r"attention\.value_length is 4, but only the head's"),
        ({"rope.scaling.factor": 2.0}, {}, r"rope_scaling is .*'linear'.*, but only rope_type"),
        ({"rope.scaling.type": "longrope"}, {}, r"rope_scaling is .*'longrope'.*, but only rope_t"),
        ({"rope.scaling.yarn_attn_factor": 2.0}, {}, r"yarn_attn_factor is 2\.0, which is not com"),
    ],
)
def test_what_does_not_fit_is_refused(sizes, tensors, message, tmp_path):
    given = {key: value for key, value in (SIZES | sizes).items() if value is not None}
    file = write(tmp_path / "a.gguf", "llama", given, small(**tensors))
    with pytest.raises(ValueError, match=message) as refusal:
        convert(f"gguf:{file}", f"hf:{tmp_path / 'out'}", dtype="float32")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_factors_beside_a_scaling_are_refused(tmp_path):
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 64,
    }
    tensors = small() | {"rope_freqs.weight": factors_of(4, 5e5, 8.0)}
    model = gguf.read(write(tmp_path / "a.gguf", "llama", SIZES | yarn, tensors))
    with pytest.raises(ValueError, match=r"rope_freqs\.weight are not the factors"):
        gguf.read_config(model)


def of(architecture="llama", **how):
    return lambda file: write(file, architecture, SIZES, small(), **how)


def header(*entries, tensors=b"", count=None, magic=b"GGUF", version=3):
    """A file of raw entries: (key, type, bytes of the value)."""
    keys = b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in entries)
    count = len(entries) if count is None else count
    start = magic + struct.pack("<IQQ", version, 1 if tensors else 0, count)
    return lambda file: file.write_bytes(start + keys + tensors)


def text(value):
    return struct.pack("<Q", len(value)) + value


def tensor(*shape, kind=0, offset=0):
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(b"output.weight") + axes + struct.pack("<IQ", kind, offset)


BROKEN = {
    "architecture": (of("gemma3"), r"general\.architecture is 'gemma3', but must be one of llama"),
    "big-endian": (of(endianess=library.GGUFEndian.BIG), r"is big-endian; make it little-endian"),
    "split": (of(metadata={"split.count": 2}), r"is one of several; merge them with llama-gguf"),
    "no tokens": (of(metadata={"a.b": 1}), r"has no tokenizer\.ggml\.tokens in its metadata"),
    "magic": (header(magic=b"PK\x03\x04"), r"is not a GGUF file: it begins with b'PK"),
    "empty": (lambda file: file.write_bytes(b""), r"is cut off in its header, at byte 0; download"),
    "version": (header(version=1), r"is GGUF of version 1, but must be of 2 or 3"),
    "keys": (header(count=2**60), r"is cut off in its header, at byte 24"),
    "text": (header((b"a", 8, struct.pack("<Q", 2**63))), r"is cut off in its header"),
    "list": (header((b"a", 9, struct.pack("<IQ", 4, 2**62))), r"is cut off in its header"),
    "texts": (header((b"a", 9, struct.pack("<IQ", 8, 2**62))), r"is cut off in its header"),
    "lists": (header((b"a", 9, struct.pack("<IQ", 9, 1))), r"metadata of the unknown type 9"),
    "type": (header((b"a", 13, b"")), r"holds metadata of the unknown type 13"),
    "UTF-8": (header((b"\xff", 7, b"\0")), r"holds no UTF-8, b'\\xff'"),
    "twice": (header(*[(b"a\x1b", 7, b"\0")] * 2), r"has 'a\\x1b' twice"),
    "alignment": (header((b"general.alignment", 4, b"\0" * 4)), r"general\.alignment is 0; dow"),
    "axes": (header(tensors=tensor(1, 1, 1, 1, 1)), r"has a tensor of 5 axes"),
    "tensor's type": (header(tensors=tensor(1, kind=99)), r"output\.weight has the type 99"),
    "blocks": (
        header(tensors=tensor(2, 33, kind=8)),
        r"rows of 33 values, but blocks of 32 \(Q8_0",
    ),
    "offset": (
        header(tensors=tensor(1, offset=32) + bytes(128)),
        r"output\.weight begins at byte \d+, but the tensors before it end at \d+; download",
    ),
    "data": (header(tensors=tensor(2, 33)), r"is cut off: output\.weight ends at byte 360 of 77"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_in_one_line(case, tmp_path):
    make, message = BROKEN[case]
    make(tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=message) as refusal:
        convert(f"gguf:{tmp_path / 'a.gguf'}", f"hf:{tmp_path / 'out'}", dtype="float32")
    assert "a.gguf" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("linked", [False, True])
def test_a_failed_conversion_may_be_repeated(tmp_path, monkeypatch, linked):
    """A cut model stayed, and the same command was refused: its target was not empty."""
    write(tmp_path / "a.gguf", "llama", SIZES, small())
    out = tmp_path / "out"
    if linked:  # a rename to its name would fail
        (tmp_path / "place").mkdir()
        out.symlink_to(tmp_path / "place")
    command = (f"gguf:{tmp_path / 'a.gguf'}", f"hf:{out}")
    with monkeypatch.context() as patch:
        patch.setattr(hf, "save_hf", mock.Mock(side_effect=OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="full") as error:
            convert(*command, dtype="float32")
    assert error.value.filename == str(out)
    assert not (out / "config.json").exists()
    convert(*command, dtype="float32")
    load_hf(out)
    assert not (out / ".partial").exists()


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path):
    content = write(tmp_path / "whole.gguf", "llama", SIZES, small()).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(0, len(content) - 64, 997):
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match="cut off"):
            gguf.read(cut)


def test_a_header_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    file = write(tmp_path / "a.gguf", "llama", SIZES, small())
    monkeypatch.setattr(gguf, "MAX_HEADER_BYTES", 1_000)
    with pytest.raises(ValueError, match=r"has a header of more than 1,000 bytes"):
        gguf.read(file)


def test_other_places_and_the_missing_package_are_named(tmp_path, monkeypatch):
    file = write(tmp_path / "a.gguf", "llama", SIZES, small())
    (tmp_path / "link.gguf").symlink_to(write(tmp_path / "b.gguf", "llama", SIZES, small()))
    assert gguf.read(tmp_path / "link.gguf").file.name == "b.gguf"
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none\.gguf"):
        convert(f"gguf:{tmp_path / 'none.gguf'}", f"hf:{tmp_path / 'out'}", dtype="float32")
    with pytest.raises(ValueError, match="is a directory, but must be a regular file"):
        gguf.read(tmp_path)
    with pytest.raises(ValueError, match=r"--to is 'gguf:x', but must be hf:DIR or orbax:DIR"):
        convert(f"gguf:{file}", "gguf:x", dtype="float32")
    with pytest.raises(ValueError, match=r"--from is 'x', but .* or run:DIR or gguf:FILE"):
        convert("x", f"hf:{tmp_path / 'out'}", dtype="float32")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"gguf, which is not installed: pip install \"gguf>=0"):
        gguf.read(file)


def tokenizer(folder, metadata, chat="none"):
    for name, content in tokenizer_files(metadata, "a.gguf").items():
        (folder / name).write_text(json.dumps(content))
    return load_tokenizer(folder, stop_tokens=None, chat=chat)


MERGES = ("1 2", "12 3", "123 4", "Ġ t", "( a", "i t", "' S", "Ã ©", "Ċ Ċ", "- -")


def pieces(tokenizer, string):
    return [tokenizer.decode([id]) for id in tokenizer.encode(string)]


@pytest.mark.parametrize(
    ("pre", "string", "expected"),
    [
        ("smollm", "1234 ½2", ["1", "2", "3", "4", " ", *"\ufffd\ufffd", "2"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("llama-bpe", "12341", ["123", "4", "1"]),
        ("smollm", "(a t--", ["(", "a", " t", "--"]),
        ("qwen2", "(a t--", ["(a", " t", "--"]),
        ("llama-bpe", "(a t--", ["(a", " t", "--"]),
        ("smollm", "it'S", ["it", "'", "S"]),
        ("qwen2", "it'S", ["it", "'S"]),
        ("smollm", "e\u0301", ["e", *"\ufffd\ufffd"]),
        ("qwen2", "e\u0301", ["é"]),
        ("llama-bpe", "e\u0301é", ["e", *"\ufffd\ufffd", "é"]),
        ("smollm", "-\n\nt", ["-", "\n", "\n", "t"]),
        ("qwen2", "-\n\nt", ["-", "\n\n", "t"]),
        ("qwen2", "it<word>it", ["it", "<word>", "it"]),
    ],
)
def test_a_text_is_split_as_the_file_says(pre, string, expected, tmp_path):
    assert pieces(tokenizer(tmp_path, vocabulary(pre, merges=MERGES)), string) == expected


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
def test_a_tokenizer_gives_texts_back_and_knows_its_control_tokens(pre, tmp_path):
    metadata = vocabulary(pre, merges=MERGES)
    texts = metadata["tokenizer.ggml.tokens"]
    ours = tokenizer(tmp_path, metadata)
    for string in ("Straße 123\t\r\n  ½ 你好 😀<word> <|end|> [PAD]", " ", "", "привет\u00a0x"):
        assert ours.decode(ours.encode(string)) == string
    assert ours.vocab_size == len(texts) - 1  # the unused one is left out
    assert ours.stop_ids == (texts.index("<|turn|>"),)
    assert ours.decode([texts.index("<|end|>"), texts.index("<word>")]) == "<word>"


def test_qwens_published_tokenizer_comes_back(shared):
    published = json.loads((shared / "data/qwen25_tokenizer/tokenizer.json").read_text())
    added = {token["content"]: token for token in published["added_tokens"]}
    ids = published["model"]["vocab"] | {text: token["id"] for text, token in added.items()}
    metadata = vocabulary("qwen2") | {"tokenizer.ggml.merges": published["model"]["merges"]}
    metadata["tokenizer.ggml.tokens"] = texts = [f"[PAD{id}]" for id in range(151_936)]
    metadata["tokenizer.ggml.token_type"] = kinds = [5] * len(texts)
    for text, id in ids.items():
        texts[id] = text
        kinds[id] = 1 if text not in added else 3 if added[text]["special"] else 4
    ours = tokenizer_files(metadata, "a.gguf")["tokenizer.json"]
    for key in ("normalizer", "pre_tokenizer", "added_tokens"):
        assert ours[key] == published[key]
    assert ours["model"]["vocab"] == ids
    assert ours["model"]["merges"] == published["model"]["merges"]


def test_a_whole_word_is_llamas_token_without_merges(tmp_path):
    for pre, count in (("llama-bpe", 1), ("qwen2", 3)):
        metadata = vocabulary(pre, merges=("a b", "ab c"))
        metadata["tokenizer.ggml.merges"] = []
        assert len(tokenizer(tmp_path, metadata).encode("abc")) == count


@pytest.mark.parametrize(
    ("pre", "given", "begins"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
        ("qwen2", True, True),
    ],
)
def test_a_text_begins_with_the_token_that_the_file_says(pre, given, begins, tmp_path):
    metadata = vocabulary(pre)
    if given is not None:
        metadata["tokenizer.ggml.add_bos_token"] = given
    ids = tokenizer(tmp_path, metadata).encode_chat([{"role": "user", "content": "a"}])
    bos = metadata["tokenizer.ggml.bos_token_id"]
    assert ids == ([bos] if begins else []) + [BYTE_TEXT_ID["a"]]


BYTE_TEXT_ID = {text: id for id, text in enumerate(BYTE_TEXT.values())}


def test_the_template_the_named_tokens_and_all_ends_are_kept(tmp_path):
    metadata = vocabulary() | {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}<|turn|>",
        "tokenizer.ggml.padding_token_id": 256,
        "tokenizer.ggml.unknown_token_id": 257,
        "tokenizer.ggml.eot_token_id": 256,
    }
    ours = tokenizer(tmp_path, metadata, chat="template")
    assert ours.encode_chat([{"role": "user", "content": "a"}]) == [256, BYTE_TEXT_ID["a"], 257]
    assert (sorted(ours.stop_ids), ours.pad_id) == ([256, 257], 256)
    named = {"bos_token": "<|end|>", "eos_token": "<|turn|>", "unk_token": "<|turn|>"}
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()).items() >= named.items()
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [
        256,
        257,
    ]
    assert "generation_config.json" not in tokenizer_files(
        {key: value for key, value in metadata.items() if "eo" not in key}, "a.gguf"
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "llama", r"model is 'llama', but .* convert the model's Hugging Face directory"),
        ("pre", "gpt-4o", r"pre is 'gpt-4o', but must be one of smollm, qwen2, llama-bpe"),
        ("pre", None, r"pre is None, but must be one of"),
        ("tokens", ["a", 3], r"tokens is \['a', 3\], but must have strs"),
        ("tokens", ["a"], r"token_type has 260 entries, tokenizer\.ggml\.tokens 1, but"),
        ("token_type", [True], r"token_type is \[True\], but must have ints"),
        ("tokens", ["a"] * 260, r"tokens has a twice, as 0 and 1"),
        ("merges", ["a b"], r"merges has 'a b', but tokenizer\.ggml\.tokens has not all"),
        ("eos_token_id", 260, r"eos_token_id is 260, but the tokenizer has no such id"),
        ("eos_token_id", 259, r"eos_token_id is 259, but"),
        ("bos_token_id", -1, r"bos_token_id is -1, but"),
        ("bos_token_id", "a", r"bos_token_id is 'a', but must have ints"),
        ("bos_token_id", [1], r"bos_token_id is \[1\], but must have ints"),
        ("token_type", 3, r"token_type is 3, but must have ints"),
        ("eot_token_id", 999, r"eot_token_id is 999, but"),
        ("add_eos_token", True, r"add_eos_token is True, but must be False"),
        ("add_bos_token", 1, r"add_bos_token is 1, but must have bools"),
    ],
)
def test_a_tokenizer_that_is_not_converted_is_refused(key, value, message):
    metadata = vocabulary() | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(ValueError, match=rf"a\.gguf: tokenizer\.ggml\.{message}"):
        tokenizer_files(metadata, "a.gguf")


def test_a_beginning_without_its_token_is_refused():
    metadata = vocabulary() | {"tokenizer.ggml.add_bos_token": True}
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(ValueError, match=r"add_bos_token wants a tokenizer\.ggml\.bos_token_id"):
        tokenizer_files(metadata, "a.gguf")


def test_an_unused_token_ends_no_text_though_another_has_its_characters():
    metadata = vocabulary() | {"tokenizer.ggml.eos_token_id": 259}
    metadata["tokenizer.ggml.tokens"][259] = "a"
    with pytest.raises(ValueError, match=r"eos_token_id is 259, but the tokenizer has no such id"):
        tokenizer_files(metadata, "a.gguf")
