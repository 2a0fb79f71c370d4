"""Models in llama.cpp's file format: a GGUF file's tensors and sizes under Hugging Face's names.

The package gguf dequantises, a few rows at a time, so that a host holds no more than from
safetensors. The header is read here: the package takes a file at its word, and makes an array of
each text of a vocabulary.
"""

import dataclasses
import math
import os
import pathlib
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from etils import epath

from dapo_jax.untrusted import is_local, present, quoted, shown
from models import hf
from models.hf_config import config_of
from models.parameters import ModelConfig
from models.rope import Llama3Scaling

# general.architecture, which is config.json's model_type, too -> tensors whose rows the file has in
# another order: llama.cpp rotates neighbours, Hugging Face the halves of a head.
ARCHITECTURES = {"llama": ("attn_q", "attn_k"), "qwen2": (), "qwen3": ()}
MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)", re.ASCII)
ROPE_FACTORS = "rope_freqs.weight"
# Key of config.json -> the metadata's, behind the architecture and a dot.
SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
SCALING = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
OTHER_KEYS = ("rope.freq_base", "vocab_size", "rope.scaling.finetuned")
TOKEN_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))  # struct's
TEXT, ARRAY = 8, 9
MAX_HEADER_BYTES = 64 * 2**20  # of a vocabulary of 262,144 tokens it has 15 MB
MAX_AXES = 4
AGAIN = "download it, or make it, again"


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor that begins at byte `start` of a file, and is read as float32.

    name: the file's. kind: a gguf.GGMLQuantizationType. head_dim: that of queries and keys whose
    rows the file has in llama.cpp's order, 0 for others.
    """

    file: epath.Path
    name: str
    shape: tuple[int, ...]
    kind: Any
    start: int
    head_dim: int = 0
    dtype: ClassVar[str] = "F32"

    @property
    def row_bytes(self) -> int:
        """Gives how many bytes a row has; ValueError where a block of values is no part of one."""
        values, (block, size) = math.prod(self.shape[1:]), _library().GGML_QUANT_SIZES[self.kind]
        if values % block:
            raise ValueError(
                f"{self.file}: {shown(self.name)} has rows of {values} values, but blocks of "
                f"{block} ({self.kind.name}); {AGAIN}"
            )
        return values // block * size

    @property
    def end(self) -> int:
        """Gives the byte behind the last row; raises as `row_bytes` does."""
        return self.start + self.shape[0] * self.row_bytes

    def pieces(self, start: int, stop: int, step: int) -> Iterator[np.ndarray]:
        """Reads rows start to stop in Hugging Face's order, `step` (whole heads) at a time."""
        dequantize = _library().quants.dequantize
        with self.file.open("rb") as file:
            file.seek(self.start + start * self.row_bytes)
            for first in range(start, stop, step):
                rows = min(step, stop - first)
                data = file.read(rows * self.row_bytes)
                if len(data) < rows * self.row_bytes:
                    raise ValueError(f"{self.file} became shorter while it was read")
                piece = np.frombuffer(data, np.uint8).reshape(rows, -1)
                piece = dequantize(piece, self.kind).reshape(-1, *self.shape[1:])
                if self.head_dim:
                    pairs = piece.reshape(-1, self.head_dim // 2, 2, *self.shape[1:])
                    piece = pairs.swapaxes(1, 2).reshape(piece.shape)
                yield piece


@dataclasses.dataclass(frozen=True)
class GGUFModel:
    """A file, its metadata (numbers, texts and lists of them), its tensors by the file's names."""

    file: epath.Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """Gives general.architecture; raises ValueError for one that is not in ARCHITECTURES."""
        name = self.metadata.get("general.architecture")
        if name not in tuple(ARCHITECTURES):
            known = ", ".join(ARCHITECTURES)
            raise ValueError(
                f"{self.file}: general.architecture is {quoted(name)}, but must be one of {known}; "
                "convert another model of one of them"
            )
        return name


def read(path) -> GGUFModel:
    """Reads the header of a GGUF file, little-endian and of version 2 or 3.

    Raises FileNotFoundError where there is no file, and ValueError, with what to do, for one that
    is cut off or is no such file, for a type of tensor that the package gguf does not dequantise,
    and where that package is not installed.
    """
    file = epath.Path(pathlib.Path(path).resolve()) if is_local(path) else path
    if not present(file):
        raise FileNotFoundError(f"there is no file {file}; give a .gguf file")
    with file.open("rb") as opened:
        opened.seek(0, os.SEEK_END)
        size = opened.tell()
        opened.seek(0)
        header = _Header(file, size, opened.read(MAX_HEADER_BYTES))
    if (magic := bytes(header.take(4))) != MAGIC:
        raise ValueError(f"{file} is not a GGUF file: it begins with {magic!r}; give a .gguf file")
    version = header.number("I")
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise ValueError(f"{file} is big-endian; make it little-endian with gguf-convert-endian")
    if version not in VERSIONS:
        raise ValueError(f"{file} is GGUF of version {version}, but must be of 2 or 3; {AGAIN}")
    tensor_count, count = header.number("Q"), header.number("Q")
    metadata = {}
    for _ in range(count):
        header.add(metadata, header.text(), lambda: header.value(header.number("I")))
    if metadata.get("split.count", 0) not in (0, 1):
        raise ValueError(f"{file} is one of several; merge them with llama-gguf-split --merge")
    infos = {}
    for _ in range(tensor_count):
        header.add(infos, header.text(), header.tensor)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= MAX_HEADER_BYTES:
        raise ValueError(f"{file}: general.alignment is {quoted(alignment)}; {AGAIN}")
    start = begin = math.ceil(header.position / alignment) * alignment
    tensors = {}
    for name, info in infos.items():
        tensor = tensors[name] = _tensor(file, size, name, start, *info)
        if tensor.start != begin:
            raise ValueError(
                f"{file}: {shown(name)} begins at byte {tensor.start:,}, but the tensors before it "
                f"end at {begin:,}; {AGAIN}"
            )
        begin = math.ceil(tensor.end / alignment) * alignment
    return GGUFModel(file, metadata, tensors)


def read_config(model: GGUFModel) -> tuple[ModelConfig, dict[str, Any]]:
    """Makes (the config, what config.json would hold) of a file's metadata and tensors.

    Raises ValueError, with the file, for another architecture, keys that are missing, keys of the
    architecture that are not computed, and sizes and scalings that models.hf_config refuses.
    """
    file, name = model.file, model.architecture
    given = {
        key.removeprefix(f"{name}."): float(str(np.float32(value)))  # 1e-05, not 9.9999997e-06
        if isinstance(value, float)
        else value
        for key, value in model.metadata.items()
        if key.startswith(f"{name}.")
    }
    known = {*SIZES.values(), *SCALING.values(), *HEAD_SIZES, *OTHER_KEYS}
    for key in sorted(given.keys() - known):
        if given[key]:
            raise ValueError(
                f"{file}: {shown(f'{name}.{key}')} is {quoted(given[key])}, which is not computed; "
                "convert a model without it"
            )
    given.setdefault(SIZES["num_key_value_heads"], given.get(SIZES["num_attention_heads"]))
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    needed = {f"{name}.{key}": given.get(key) for key in SIZES.values()}
    for key, value in {"tokenizer.ggml.tokens": tokens, **needed}.items():
        if value is None:
            raise ValueError(f"{file} has no {key} in its metadata; {AGAIN}")
    raw = {
        "model_type": name,
        **{key: given[theirs] for key, theirs in SIZES.items()},
        "head_dim": given.get("attention.key_length"),
        "vocab_size": len(tokens) if isinstance(tokens, list) else None,
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "rope_theta": given.get("rope.freq_base", 1e4),
        "rope_scaling": {key: given[theirs] for key, theirs in SCALING.items() if theirs in given},
        **{key: model.metadata.get(theirs) for key, theirs in TOKEN_IDS.items()},
    }
    scaling = raw["rope_scaling"]
    scaling.setdefault("rope_type", "linear")  # llama.cpp's
    plain = scaling["rope_type"] == "linear" and scaling.get("factor", 0) in (0, 1)
    if plain or scaling["rope_type"] == "none":
        raw["rope_scaling"] = None
    try:
        config = config_of(raw)
    except ValueError as error:
        raise ValueError(f"{file}, its metadata named as in config.json: {error}") from error
    for key in HEAD_SIZES:
        if given.get(key, config.head_dim) != config.head_dim:
            raise ValueError(
                f"{file}: {name}.{key} is {quoted(given[key])}, but only the head's size, "
                f"{config.head_dim}, is computed; convert a model that has it"
            )
    if ROPE_FACTORS in model.tensors:
        config = dataclasses.replace(config, rope_scaling=_factors(model, config))
    return config, raw


def load_params(model: GGUFModel, config: ModelConfig, *, dtype, shardings=None) -> dict[str, Any]:
    """Loads the parameters of a file as models.hf.load_params does those of a directory.

    Raises ValueError, with the file, for tensors that are missing, unexpected or mis-shaped.
    """
    found = {}
    for name, tensor in model.tensors.items():
        if name == ROPE_FACTORS:
            continue
        match = TENSOR.fullmatch(name)
        if not match or match["module"] not in MODULES:
            raise ValueError(
                f"{model.file}: the tensor {shown(name)} is not computed; convert a model without "
                "it"
            )
        if match["module"] in ARCHITECTURES[model.architecture]:
            tensor = dataclasses.replace(tensor, head_dim=config.head_dim)
        layer = f"model.layers.{match['layer']}." if match["layer"] else ""
        found[f"{layer}{MODULES[match['module']]}.{match['kind']}"] = tensor
    how = {"dtype": dtype, "shardings": shardings, "sizes_in": "metadata"}
    return hf.load_tensors(model.file, found, config, **how)


class _Header:
    """A place in the beginning of a file."""

    def __init__(self, file: epath.Path, size: int, content: bytes):
        self._file, self._size, self._content = file, size, memoryview(content)
        self.position = 0

    def take(self, count: int) -> memoryview:
        """Reads bytes; ValueError where there are fewer."""
        end, most = self.position + count, len(self._content)
        if end > most:
            if most < self._size:
                raise ValueError(f"{self._file} has a header of more than {most:,} bytes; {AGAIN}")
            raise ValueError(f"{self._file} is cut off in its header, at byte {most:,}; {AGAIN}")
        taken = self._content[self.position : end]
        self.position = end
        return taken

    def number(self, code: str):
        """Reads a number of struct's type `code`."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        """Reads a text."""
        content = bytes(self.take(self.number("Q")))
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._file} holds no UTF-8, {quoted(content)}; {AGAIN}") from error

    def value(self, kind: int):
        """Reads a number, a text or a list of either."""
        if kind == TEXT:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == ARRAY:
            kind, count = self.number("I"), self.number("Q")
            if kind == TEXT:
                return [self.text() for _ in range(count)]
            if kind in SCALARS:
                data = self.take(count * struct.calcsize(SCALARS[kind]))
                return [value for (value,) in struct.iter_unpack(f"<{SCALARS[kind]}", data)]
        raise ValueError(f"{self._file} holds metadata of the unknown type {kind}; {AGAIN}")

    def tensor(self) -> tuple[tuple[int, ...], int, int]:
        """Reads (shape, type, offset) of a tensor."""
        axes = self.number("I")
        if not 0 < axes <= MAX_AXES:
            raise ValueError(f"{self._file} has a tensor of {axes} axes; {AGAIN}")
        shape = tuple(self.number("Q") for _ in range(axes))[::-1]  # the file's begins with columns
        return shape, self.number("I"), self.number("Q")

    def add(self, entries: dict[str, Any], name: str, value) -> None:
        """Adds value() by its name; ValueError for a name that is there."""
        if name in entries:
            raise ValueError(f"{self._file} has {shown(name)} twice; {AGAIN}")
        entries[name] = value()


def _library():
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ValueError(
            'A GGUF file is read with the package gguf, which is not installed: pip install "gguf'
            '>=0.16.3,<1"'
        ) from error
    return gguf


def _tensor(file, size, name, start, shape, kind_id, offset) -> GGUFTensor:
    """Makes a tensor of its entry; ValueError for what cannot be dequantised, or is not there."""
    library = _library()
    try:
        kind = library.GGMLQuantizationType(kind_id)
        block = np.zeros((1, library.GGML_QUANT_SIZES[kind][1]), np.uint8)
        library.quants.dequantize(block, kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ValueError(
            f"{file}: {shown(name)} has the type {kind_id}, which the package gguf does not "
            f"dequantise ({error}); convert a file of another type, Q8_0 for one"
        ) from error
    tensor = GGUFTensor(file, name, shape, kind, start + offset)
    if tensor.end > size:
        raise ValueError(
            f"{file} is cut off: {shown(name)} ends at byte {tensor.end:,} of {size:,}; {AGAIN}"
        )
    return tensor


def _factors(model: GGUFModel, config: ModelConfig) -> Llama3Scaling | None:
    """Finds the scaling by which a file's factors divide the frequencies of the rotary angles.

    The file does not name it. ValueError unless they are ones, or those of Llama 3.1 to 3.3, which
    differ in `factor` alone.
    """
    tensor, half = model.tensors[ROPE_FACTORS], config.head_dim // 2
    if tensor.shape != (half,):
        raise ValueError(f"{model.file}: {ROPE_FACTORS} is {tensor.shape}, but must be ({half},)")
    (factors_H,) = tensor.pieces(0, half, half)
    if (factors_H == 1).all():
        return config.rope_scaling
    refusal = f"{model.file}: {ROPE_FACTORS} are not the factors of Llama 3.1's rotary angles"
    try:
        scaling = Llama3Scaling(float(factors_H.max()), 1.0, 4.0, 8_192)
    except ValueError as error:
        raise ValueError(f"{refusal}: {error}") from error
    frequency_H = config.rope_theta ** (-np.arange(half) / half)
    scaled_H = scaling.frequencies(frequency_H, theta=config.rope_theta)
    if config.rope_scaling or not np.allclose(factors_H, frequency_H / scaled_H, rtol=1e-4):
        raise ValueError(f"{refusal} (low 1, high 4, 8,192 positions); convert a model with them")
    return scaling
