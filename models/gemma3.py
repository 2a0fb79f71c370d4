"""Gemma 3, text (arXiv 2503.19786): the published sizes; five layers with a window for one without.

Norms scale by 1 + w, and stand behind attention and feed-forward too, and over each head's queries
and keys. The gate is a GELU. Embeddings are multiplied by the root of the width.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.families import register
from models.parameters import FULL, SLIDING, LayerKind, ModelConfig, norm, zeros
from models.precision import unfused
from models.qwen3 import Qwen3Layer
from models.rope import LinearScaling
from models.transformer import PRODUCT, Layer, rms_norm

TEXT = re.compile(r"^(language_model\.model|model\.language_model)\.")
IMAGES = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")


_norm = functools.partial(norm, init=zeros)


class Gemma3Layer(Qwen3Layer):
    """Qwen3's layer with other norms, two of them more, and another gate."""

    parameters = (
        _norm("attn_norm_D", "input_layernorm"),
        *(p for p in Layer.parameters if " " in p.layout),
        _norm("q_norm_H", "self_attn.q_norm"),
        _norm("k_norm_H", "self_attn.k_norm"),
        _norm("attn_out_norm_D", "post_attention_layernorm"),
        _norm("mlp_norm_D", "pre_feedforward_layernorm"),
        _norm("mlp_out_norm_D", "post_feedforward_layernorm"),
    )
    activation = staticmethod(functools.partial(jax.nn.gelu, approximate=True))

    @staticmethod
    def norm(x, scale, *, eps):
        """Divides by the root mean square of the last axis, and multiplies by 1 + scale."""
        return rms_norm(x, 1 + scale.astype(jnp.float32), eps=eps)

    def of_heads(self, q_BTNH, k_BTKH, v_BTKH):
        """Norms each head's query and key; attention's H ** -0.5 becomes query_scalar ** -0.5."""
        c = self.config
        q_BTNH, k_BTKH, v_BTKH = super().of_heads(q_BTNH, k_BTKH, v_BTKH)
        if c.query_scalar != c.head_dim:
            q_BTNH = q_BTNH * (c.head_dim / c.query_scalar) ** 0.5
        return q_BTNH, k_BTKH, v_BTKH

    def added(self, out_BTD, part):
        """Norms what attention or feed-forward adds, which the backward pass may keep."""
        scale_D, eps = getattr(self, f"{part}_out_norm_D")[...], self.config.rms_norm_eps
        return unfused(self.norm(checkpoint_name(out_BTD, PRODUCT), scale_D, eps=eps))


@dataclasses.dataclass(frozen=True)
class Gemma3Config(ModelConfig):
    """Sizes of one Gemma 3 text model.

    query_scalar: scores are divided by its root. local_rope_theta: of the layers with a window,
    whose angles are not scaled.
    """

    query_scalar: int = 256
    local_rope_theta: float = 1e4

    layer = Gemma3Layer
    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    computes: ClassVar[Mapping[str, Any]] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": False,
    }
    defaults = ModelConfig.defaults | {
        "vocab_size": 262_208,
        "hidden_size": 2_304,
        "intermediate_size": 9_216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4_096,
        "max_position_embeddings": 131_072,  # from 4B on config.json does not say it
    }
    keys: ClassVar[Mapping[str, str]] = {
        "query_scalar": "query_pre_attn_scalar",
        "local_rope_theta": "rope_local_base_freq",
    }
    final_norm = dataclasses.replace(ModelConfig.final_norm, init=zeros)

    @property
    def embed_scale(self) -> float:
        """Gives the root of the width."""
        return self.width**0.5

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Gives each layer's kind: those with a window turn by their own angles."""
        local = functools.partial(LayerKind, rope_theta=self.local_rope_theta, rope_scaling=None)
        return tuple(kind if kind.window is None else local(kind.window) for kind in super().kinds)

    @classmethod
    def layer_types(cls, raw):
        """Reads them, or makes every sixth layer a full one."""
        every = raw.get("sliding_window_pattern") or 6
        if not isinstance(every, int) or every < 1:
            rule = "must be a positive integer"
            raise ValueError(f"sliding_window_pattern is {every!r:.200}, but {rule}")
        pattern = [
            FULL if (i + 1) % every == 0 else SLIDING for i in range(raw["num_hidden_layers"])
        ]
        return raw.get("layer_types") or pattern

    @classmethod
    def plain(cls, raw):
        """Takes the two kinds' rope_parameters apart, as transformers 5 writes them."""
        of_kinds = raw.get("rope_parameters") or {}
        if not isinstance(of_kinds, dict) or not {FULL, SLIDING} & of_kinds.keys():
            return raw
        local = of_kinds.get(SLIDING) or {}
        plain = isinstance(local, dict) and local.get("rope_type", "default") == "default"
        if not plain or local.keys() - {"rope_type", "rope_theta"}:
            raise ValueError(
                f"rope_parameters is {of_kinds!r:.200}, but those of {SLIDING} must be unscaled"
            )
        theta = local.get("rope_theta")
        given = {} if theta is None else {"rope_local_base_freq": theta}
        return raw | {"rope_parameters": of_kinds.get(FULL)} | given

    @classmethod
    def own_tensor(cls, name):
        """Takes off the text model's prefix where the files hold a model of images too."""
        if IMAGES.match(name):
            return None
        return TEXT.sub("model.", name).removeprefix("language_model.")


def _sizes(sizes, layers: int, heads, window: int, **more) -> Gemma3Config:
    windows = tuple(None if (i + 1) % 6 == 0 else window for i in range(layers))
    return Gemma3Config(*sizes, layers, *heads, True, windows=windows, **more)


_large = functools.partial(_sizes, window=1_024, rope_scaling=LinearScaling(8.0))
# The published sizes (https://huggingface.co/google, config.json of each model; the pre-trained
# models and those trained further have the same).
PRESETS = {
    "270m": _sizes((262_144, 640, 2_048), 18, (4, 1, 256), 512),
    "1b": _sizes((262_144, 1_152, 6_912), 26, (4, 1, 256), 512),
    "4b": _large((262_208, 2_560, 10_240), 34, (8, 4, 256)),
    "12b": _large((262_208, 3_840, 15_360), 48, (16, 8, 256)),
    "27b": _large((262_208, 5_376, 21_504), 62, (32, 16, 128), query_scalar=168),
}
register(Gemma3Config, PRESETS)
