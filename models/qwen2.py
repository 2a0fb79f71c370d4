"""Qwen2.5 (arXiv 2412.15115): the published sizes, and biases on queries, keys and values."""

from models.families import register
from models.parameters import ModelConfig, bias
from models.transformer import Layer


class Qwen2Layer(Layer):
    """The shared layer with biases on queries, keys and values."""

    parameters = (
        *Layer.parameters,
        bias("q_bias_NH", "self_attn.q_proj"),
        bias("k_bias_KH", "self_attn.k_proj"),
        bias("v_bias_KH", "self_attn.v_proj"),
    )

    def of_heads(self, q_BTNH, k_BTKH, v_BTKH):
        """Adds the biases."""
        return (
            q_BTNH + self.q_bias_NH[...],
            k_BTKH + self.k_bias_KH[...],
            v_BTKH + self.v_bias_KH[...],
        )


class Qwen2Config(ModelConfig):
    """Sizes of one Qwen2 model."""

    layer = Qwen2Layer
    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    defaults = ModelConfig.defaults | {"num_key_value_heads": 32}


# The published sizes (https://huggingface.co/Qwen, config.json of each base model).
PRESETS = {
    "tiny": Qwen2Config(384, 128, 512, 4, 4, 2, 32, True),
    "0.5b": Qwen2Config(151_936, 896, 4_864, 24, 14, 2, 64, True),
    "1.5b": Qwen2Config(151_936, 1_536, 8_960, 28, 12, 2, 128, True),
    "3b": Qwen2Config(151_936, 2_048, 11_008, 36, 16, 2, 128, True),
    "7b": Qwen2Config(152_064, 3_584, 18_944, 28, 28, 4, 128, False),
    "14b": Qwen2Config(152_064, 5_120, 13_824, 48, 40, 8, 128, False, rms_norm_eps=1e-5),
    "32b": Qwen2Config(152_064, 5_120, 27_648, 64, 40, 8, 128, False, rms_norm_eps=1e-5),
    "72b": Qwen2Config(152_064, 8_192, 29_568, 80, 64, 8, 128, False, rms_norm_eps=1e-5),
}
register(Qwen2Config, PRESETS)
