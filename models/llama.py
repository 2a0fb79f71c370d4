"""Llama 3 (arXiv 2407.21783): the published sizes; the shared layer with nothing added."""

import functools

from models.families import register
from models.parameters import ModelConfig
from models.rope import Llama3Scaling
from models.transformer import Layer


class LlamaConfig(ModelConfig):
    """Sizes of one Llama model."""

    layer = Layer
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    computes = ModelConfig.computes | {"attention_bias": False, "mlp_bias": False}


# Of 3.1 and 3.3, and of the smaller models of 3.2.
_LONG, _LONGER = (Llama3Scaling(factor, 1.0, 4.0, 8_192) for factor in (8.0, 32.0))
_sizes = functools.partial(LlamaConfig, rope_theta=5e5, rms_norm_eps=1e-5)
_8B = (128_256, 4_096, 14_336, 32, 32, 8, 128, False)
_70B = (128_256, 8_192, 28_672, 80, 64, 8, 128, False)
# The published sizes (https://huggingface.co/meta-llama, config.json of each model).
PRESETS = {
    "3-8b": _sizes(*_8B),
    "3-70b": _sizes(*_70B),
    "3.1-8b": _sizes(*_8B, rope_scaling=_LONG),
    "3.1-70b": _sizes(*_70B, rope_scaling=_LONG),
    "3.2-1b": _sizes(128_256, 2_048, 8_192, 16, 32, 8, 64, True, rope_scaling=_LONGER),
    "3.2-3b": _sizes(128_256, 3_072, 8_192, 28, 24, 8, 128, True, rope_scaling=_LONGER),
    "3.3-70b": _sizes(*_70B, rope_scaling=_LONG),
}
register(LlamaConfig, PRESETS)
