"""A model family of one's own, from outside the packages: gains of queries, norms of values.

    PYTHONPATH=tests/ext_models python -m dapo_jax.train --config=FILE --workdir=DIR \
        --config.model.family=gains --config.model.preset=small
"""

from models.families import register
from models.parameters import ModelConfig, Parameter, norm, ones
from models.transformer import Layer, rms_norm


class GainsLayer(Layer):
    """The shared layer; every query is multiplied by a gain, every head's value is normed."""

    parameters = (
        *Layer.parameters,
        Parameter("q_gain_NH", "model.layers.{}.self_attn.q_gain", "NH", ones),
        norm("v_norm_H", "self_attn.v_norm"),
    )

    def of_heads(self, q_BTNH, k_BTKH, v_BTKH):
        """Multiplies queries, and divides each head's value by its root mean square."""
        v_BTKH = rms_norm(v_BTKH, self.v_norm_H[...], eps=self.config.rms_norm_eps)
        return q_BTNH * self.q_gain_NH[...], k_BTKH, v_BTKH


class GainsConfig(ModelConfig):
    """Holds the sizes of one such model."""

    layer = GainsLayer
    model_type = "gains"
    architecture = "GainsForCausalLM"
    computes = ModelConfig.computes | {"attention_bias": False}


PRESETS = {"small": GainsConfig(384, 128, 512, 4, 4, 2, 32, True)}
register(GainsConfig, PRESETS)
