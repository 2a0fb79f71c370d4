"""Writes golden_data/FILE_transformers.npz: random models of given configs, and their logits.

It runs transformers, in an environment of its own, away from the project's:

    python3 -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers numpy
    /tmp/golden/bin/python tests/make_transformers_golden.py FILE FOLDER...

Each FOLDER holds a config.json and is named as its model (golden.directory writes those that there
are). Keys are MODEL/config (its text), MODEL/weights/NAME (float16, exact: the models' float32
weights are rounded to it first) and MODEL/CASE/{tokens_BT,segment_BT,logits_BTV}. Logits are
float32, each sequence run alone, and zero where segment_BT is 0 (padding, whose tokens are random).
"""

import pathlib
import sys

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

GOLDEN = pathlib.Path(__file__).parent / "golden_data"
# Segments of every row: (number, tokens); number 0 is padding.
CASES = {
    "right_padded": [[(1, 12)], [(1, 5), (0, 7)], [(1, 9), (0, 3)]],
    "left_padded": [[(1, 12)], [(0, 7), (1, 5)], [(0, 3), (1, 9)]],
    "packed": [[(1, 7), (2, 1), (3, 8), (4, 4)], [(1, 10), (2, 6), (0, 4)]],
}


def random_model(config, generator):
    """Weights of a size that gives logits of order 1 and uneven attention; nothing stays 0 or 1."""
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
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
    logits_BTV = np.zeros((*tokens_BT.shape, model.config.vocab_size), np.float32)
    for tokens_T, segment_T, logits_TV in zip(tokens_BT, segment_BT, logits_BTV, strict=True):
        for number in set(segment_T.tolist()) - {0}:
            its_T = segment_T == number
            logits_TV[its_T] = model(torch.tensor(tokens_T[its_T][None])).logits[0].numpy()
    return logits_BTV


@torch.no_grad()
def main(file: str, *folders: str) -> None:
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    arrays = {}
    for folder in map(pathlib.Path, folders):
        config = AutoConfig.from_pretrained(folder)
        config.name_or_path = ""  # no folder of this machine
        model = random_model(config, generator)
        arrays[f"{folder.name}/config"] = np.array(config.to_json_string(use_diff=False))
        for key, value in model.state_dict().items():
            if not (config.tie_word_embeddings and key == "lm_head.weight"):
                arrays[f"{folder.name}/weights/{key}"] = value.numpy().astype(np.float16)
        for case, rows in CASES.items():
            segment_BT = np.array([np.concatenate([[n] * t for n, t in row]) for row in rows])
            tokens_BT = rng.integers(0, config.vocab_size, segment_BT.shape)
            start = f"{folder.name}/{case}"
            arrays[f"{start}/tokens_BT"] = tokens_BT.astype(np.int32)
            arrays[f"{start}/segment_BT"] = segment_BT.astype(np.int32)
            arrays[f"{start}/logits_BTV"] = logits_of(model, tokens_BT, segment_BT)
    np.savez_compressed(GOLDEN / f"{file}_transformers.npz", **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
