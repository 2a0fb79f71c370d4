"""Writes LoRA's factors as PEFT does, which vLLM and others read too."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from models import hf_stream
from models.hf_config import write_json
from models.lora import Lora, factors
from models.parameters import ModelConfig

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def save_peft(
    adapters: Mapping[str, Any], config: ModelConfig, lora: Lora, folder, *, base: tuple, dtype: str
) -> None:
    """Writes an adapter's directory.

    adapters: {"layers": the stacked factors}. base: (directory or name, revision) of the model that
    they adapt. dtype: that of the file.
    """
    modules = {p.name: p.tensor for p in config.layer.parameters}
    tensors = dict(_tensors(adapters["layers"], modules, lora))
    shapes = {name: array.shape for name, array in tensors.items()}
    arrays = (array.astype(jnp.dtype(dtype)) for array in tensors.values())
    hf_stream.write(folder / WEIGHTS_FILE, shapes, jnp.dtype(dtype), arrays)
    names = [modules[factors(target)[0]].split(".")[-2] for target in lora.targets]
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **dict(zip(("base_model_name_or_path", "revision"), base, strict=True)),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(names),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(folder / CONFIG_FILE, content)


def _tensors(layers, modules: Mapping[str, str], lora: Lora) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (PEFT's name, [out, in]) of every layer's A [R, inputs] and B [outputs, R]."""
    for target in lora.targets:
        w, a, b = factors(target)
        A, B = np.asarray(layers[a]), np.asarray(layers[b])
        for layer in range(len(A)):
            module = "base_model.model." + modules[w].format(layer).removesuffix(".weight")
            yield f"{module}.lora_A.weight", A[layer].reshape(-1, lora.rank).T
            yield f"{module}.lora_B.weight", B[layer].reshape(lora.rank, -1).T
