"""Qwen3, dense (arXiv 2505.09388): the published sizes; norms of queries and keys, no biases."""

from models.families import register
from models.parameters import ModelConfig, norm
from models.transformer import Layer


class Qwen3Layer(Layer):
    """The shared layer with a norm of each head's query and key (section 2)."""

    parameters = (
        *Layer.parameters,
        norm("q_norm_H", "self_attn.q_norm"),
        norm("k_norm_H", "self_attn.k_norm"),
    )

    def of_heads(self, q_BTNH, k_BTKH, v_BTKH):
        """Divides each head's query and key by its root mean square, and scales them."""
        eps = self.config.rms_norm_eps
        q_BTNH = self.norm(q_BTNH, self.q_norm_H[...], eps=eps)
        return q_BTNH, self.norm(k_BTKH, self.k_norm_H[...], eps=eps), v_BTKH


class Qwen3Config(ModelConfig):
    """Sizes of one dense Qwen3 model."""

    layer = Qwen3Layer
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    computes = ModelConfig.computes | {"attention_bias": False}
    defaults = ModelConfig.defaults | {"head_dim": 128, "num_key_value_heads": 32}


# The published sizes (https://huggingface.co/Qwen, config.json of each model; the base models and
# those trained further have the same).
PRESETS = {
    "0.6b": Qwen3Config(151_936, 1_024, 3_072, 28, 16, 8, 128, True),
    "1.7b": Qwen3Config(151_936, 2_048, 6_144, 28, 16, 8, 128, True),
    "4b": Qwen3Config(151_936, 2_560, 9_728, 36, 32, 8, 128, True),
    "8b": Qwen3Config(151_936, 4_096, 12_288, 36, 32, 8, 128, False),
    "14b": Qwen3Config(151_936, 5_120, 17_408, 40, 40, 8, 128, False),
    "32b": Qwen3Config(151_936, 5_120, 25_600, 64, 64, 8, 128, False),
}
register(Qwen3Config, PRESETS)
