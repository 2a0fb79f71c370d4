"""Writes golden_data/NAME_transformers.npz: small random models and their logits.

It runs transformers, in an environment of its own, away from the project's:

    python3 -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers numpy
    /tmp/golden/bin/python tests/make_transformers_golden.py qwen2 qwen2_yarn qwen3 qwen3_moe \
        llama gemma3

Keys are MODEL/config (config.json's text), MODEL/weights/NAME (float16, exact: the models' float32
weights are rounded to it first) and MODEL/CASE/{tokens_BT,segment_BT,logits_BTV}. Logits are
float32, each sequence run alone, and zero where segment_BT is 0 (padding, whose tokens are random).
"""

import pathlib
import sys

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

FOLDER = pathlib.Path(__file__).parent / "golden_data"
VOCAB = 96
# Texts of a few tokens are as long as these models know, so that all kinds of angles occur.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
YARN["original_max_position_embeddings"] = 256
# Of Gemma 3's two kinds of layers, and those from 4B on.
LOCAL = {"rope_type": "default", "rope_theta": 10.0}
FULL = {"rope_type": "default", "rope_theta": 100.0}
GEMMA3 = {"sliding_attention": LOCAL, "full_attention": FULL}
FULL_LONG = FULL | {"rope_type": "linear", "factor": 8.0}
GEMMA3_LONG = {"sliding_attention": LOCAL, "full_attention": FULL_LONG}


def small(kind, heads, head_dim, rope, *, tied, width=16, mlp=24, layers=2, eps=1e-6, **more):
    """Makes the config of a small model; rope: the base of its angles, or what scales them."""
    return kind(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        rms_norm_eps=eps,
        rope_parameters=rope if isinstance(rope, dict) else {"rope_theta": rope},
        attn_implementation="eager",
        **more,
    )


UNLIKE = YARN | {"beta_fast": 16.0, "attention_factor": 1.3}
LONG = {"max_position_embeddings": 1024}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
# Windows shorter than the texts; the heads' sizes are the divisors of scores, or are not (27B).
GEMMA3_1B = {"sliding_window": 5, "pad_token_id": None, "query_pre_attn_scalar": 8}
GEMMA3_27B = GEMMA3_1B | {"query_pre_attn_scalar": 21}
GEMMA3_27B["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS = {
    "gemma3": {
        "1b": small(Gemma3TextConfig, 4, 8, GEMMA3, tied=True, layers=7, **GEMMA3_1B),
        "27b": small(Gemma3TextConfig, 4, 16, GEMMA3_LONG, tied=True, layers=3, **GEMMA3_27B),
    },
    "qwen2": {
        "tied": small(Qwen2Config, 6, 8, 1e6, tied=True, width=32, mlp=48),
        "untied": small(Qwen2Config, 4, 16, 1e4, tied=False, width=32, mlp=40, layers=3, eps=1e-5),
    },
    "qwen2_yarn": {"tied": small(Qwen2Config, 4, 16, YARN, tied=True, **LONG)},
    "qwen3": {
        "tied": small(Qwen3Config, 6, 8, 1e6, tied=True),
        "untied": small(Qwen3Config, 4, 16, 1e4, tied=False, eps=1e-5),
        "yarn": small(Qwen3Config, 4, 16, UNLIKE, tied=False, **LONG),
    },
    "qwen3_moe": {
        "normed": small(Qwen3MoeConfig, 4, 8, 1e4, tied=False, norm_topk_prob=True, **EXPERTS),
        "plain": small(Qwen3MoeConfig, 6, 8, 1e6, tied=True, norm_topk_prob=False, **EXPERTS),
    },
    "llama": {
        "untied": small(LlamaConfig, 4, 4, 5e5, tied=False),
        "llama3": small(LlamaConfig, 4, 16, LLAMA3, tied=True, eps=1e-5),
    },
}
# Segments of every row: (number, tokens); number 0 is padding.
CASES = {
    "right_padded": [[(1, 12)], [(1, 5), (0, 7)], [(1, 9), (0, 3)]],
    "left_padded": [[(1, 12)], [(0, 7), (1, 5)], [(0, 3), (1, 9)]],
    "packed": [[(1, 7), (2, 1), (3, 8), (4, 4)], [(1, 10), (2, 6), (0, 4)]],
}


def random_model(config, generator):
    """Weights of a size that gives logits of order 1 and uneven attention; nothing stays 0 or 1."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            gain = 1.5 if "q_norm" in name or "k_norm" in name else 1.0
            zero = 1.0 if config.model_type == "gemma3_text" else 0.0  # scales by 1 + weight
            value = gain * (1 + 0.3 * noise) - zero
        elif name.endswith("bias"):
            value = 0.5 * noise
        elif name.endswith("embed_tokens.weight"):
            value = 0.3 * noise if config.tie_word_embeddings else noise
        else:
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            value = gain * parameter.shape[-1] ** -0.5 * noise
        parameter.data = value.half().float()
    return model


def logits_of(model, tokens_BT, segment_BT):
    """Logits of every sequence run by itself, put back where it lies in its row."""
    logits_BTV = np.zeros((*tokens_BT.shape, VOCAB), np.float32)
    for tokens_T, segment_T, logits_TV in zip(tokens_BT, segment_BT, logits_BTV, strict=True):
        for number in set(segment_T.tolist()) - {0}:
            its_T = segment_T == number
            logits_TV[its_T] = model(torch.tensor(tokens_T[its_T][None])).logits[0].numpy()
    return logits_BTV


def write(name_of_file: str):
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    arrays, file = {}, FOLDER / f"{name_of_file}_transformers.npz"
    for name, config in MODELS[name_of_file].items():
        model = random_model(config, generator)
        arrays[f"{name}/config"] = np.array(config.to_json_string(use_diff=False))
        for key, value in model.state_dict().items():
            if not (config.tie_word_embeddings and key == "lm_head.weight"):
                arrays[f"{name}/weights/{key}"] = value.numpy().astype(np.float16)
        for case, rows in CASES.items():
            segment_BT = np.array([np.concatenate([[n] * t for n, t in row]) for row in rows])
            tokens_BT = rng.integers(0, VOCAB, segment_BT.shape)
            with torch.no_grad():
                logits_BTV = logits_of(model, tokens_BT, segment_BT)
            arrays[f"{name}/{case}/tokens_BT"] = tokens_BT.astype(np.int32)
            arrays[f"{name}/{case}/segment_BT"] = segment_BT.astype(np.int32)
            arrays[f"{name}/{case}/logits_BTV"] = logits_BTV
    np.savez_compressed(file, **arrays)
    print(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        write(argument)
