"""Qwen3's mixtures of experts (arXiv 2505.09388): every layer's feed-forward is k of X experts.

Axis letters beside the model's: X experts, E those of a device, A the experts of a token, Y the
feed-forward of one, P pairs of a token and an expert. No pair is dropped, whatever experts are
asked for. Where experts are split over devices, each computes the pairs of its own for all tokens
of its rows, and the sums are added up as those of a feed-forward that is split.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.families import register
from models.parameters import ModelConfig, matrix
from models.precision import grouped_product
from models.qwen3 import Qwen3Config, Qwen3Layer
from models.transformer import PRODUCT

MOST_EXPERTS = 256  # routes are uint8


class Qwen3MoeLayer(Qwen3Layer):
    """Qwen3's layer with a router and experts in place of one feed-forward."""

    parameters = (
        *(p for p in Qwen3Layer.parameters if "F" not in p.axes),
        matrix("router_DX", "mlp.gate", "X D"),
        matrix("gate_EDY", "mlp.experts.{}.gate_proj", "Y D"),
        matrix("up_EDY", "mlp.experts.{}.up_proj", "Y D"),
        matrix("down_EYD", "mlp.experts.{}.down_proj", "D Y"),
    )

    def feed_forward(self, h_BTD, times, routes, execution):
        """Sums the experts of each token by the router's weights: (out_BTD, chosen_BTA).

        chosen_BTA, uint8, are the likeliest experts, the likeliest first, whatever routes say.
        """
        c, (B, T, D) = self.config, h_BTD.shape
        logits_BTX = times("BTD,DX->BTX", h_BTD, self.router_DX[...], "router")
        _, chosen_BTA = jax.lax.top_k(jax.lax.stop_gradient(logits_BTX), c.experts_per_token)
        expert_BTA = chosen_BTA if routes is None else routes.astype(chosen_BTA.dtype)
        # A softmax of those alone is that of all, divided by their sum, which it never finds 0.
        take = functools.partial(jnp.take_along_axis, indices=expert_BTA, axis=-1)
        softmax = jax.nn.softmax
        weight_BTA = softmax(take(logits_BTX)) if c.norm_topk else take(softmax(logits_BTX))

        E = self.gate_EDY.shape[0]
        axis = execution.axis
        first = 0 if axis is None else jax.lax.axis_index(axis) * E
        order_P, place_P, rows_E = by_expert(expert_BTA.reshape(-1) - first, E)
        multiply = functools.partial(grouped_product, rows_E=rows_E, weights=execution.weights)
        x_PD = to_experts(h_BTD.reshape(B * T, D), order_P, place_P)
        gate, up = (
            checkpoint_name(multiply(x_PD, w[...], letters="EDY").astype(h_BTD.dtype), PRODUCT)
            for w in (self.gate_EDY, self.up_EDY)
        )
        hidden_PY = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        out_PD = multiply(hidden_PY, self.down_EYD[...], letters="EYD")
        out_BTAD = from_experts(out_PD, order_P, place_P).reshape(B, T, -1, D)
        out_BTD = jnp.sum(weight_BTA[..., None] * out_BTAD, axis=2)
        return out_BTD, chosen_BTA.astype(jnp.uint8)


def by_expert(expert_P, num_experts: int):
    """Sorts pairs by expert: (order_P, each pair's place_P in it, pairs of each expert rows_E).

    Pairs of numbers that are no expert's here come last.
    """
    here_P = (expert_P >= 0) & (expert_P < num_experts)
    order_P = jnp.argsort(jnp.where(here_P, expert_P, num_experts), stable=True)
    is_its_PE = expert_P[:, None] == jnp.arange(num_experts)
    return order_P, jnp.argsort(order_P), jnp.sum(is_its_PE, axis=0, dtype=jnp.int32)


# What goes to the experts and comes back is gathered both ways: a gather's own gradient would be a
# scatter, row by row on a TPU.
@jax.custom_vjp
def to_experts(x_TD, order_P, place_P):
    """Lays out every token's row once for each of its experts, sorted by expert."""
    return x_TD[order_P // (len(order_P) // len(x_TD))]


@jax.custom_vjp
def from_experts(out_PD, order_P, place_P):
    """Brings rows back from the order of the experts to that of the tokens."""
    return out_PD[place_P]


def _to_experts_forward(x_TD, order_P, place_P):
    return to_experts(x_TD, order_P, place_P), (x_TD[:, :0], place_P)


def _to_experts_backward(residuals, d_PD):
    empty_T0, place_P = residuals
    d_TAD = d_PD[place_P].reshape(len(empty_T0), -1, d_PD.shape[-1])
    return jnp.sum(d_TAD, axis=1, dtype=jnp.float32).astype(d_PD.dtype), None, None


to_experts.defvjp(_to_experts_forward, _to_experts_backward)
from_experts.defvjp(
    lambda out_PD, order_P, place_P: (out_PD[place_P], order_P),
    lambda order_P, d_PD: (d_PD[order_P], None, None),
)


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    """Sizes of one mixture; `mlp_width` is that of layers without experts, which are refused.

    norm_topk: whether the weights of a token's experts are divided by their sum.
    """

    num_experts: int = 128
    experts_per_token: int = 8
    expert_width: int = 768
    norm_topk: bool = False

    layer = Qwen3MoeLayer
    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    computes = Qwen3Config.computes | {"decoder_sparse_step": 1, "mlp_only_layers": []}
    keys: ClassVar[Mapping[str, str]] = {
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_width": "moe_intermediate_size",
        "norm_topk": "norm_topk_prob",
    }
    defaults = ModelConfig.defaults | {
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    }
    stacks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "model.layers.{}.mlp.experts.gate_up_proj": ("gate_EDY", "up_EDY"),
        "model.layers.{}.mlp.experts.down_proj": ("down_EYD",),
    }

    def __post_init__(self):
        if not self.experts_per_token <= self.num_experts <= MOST_EXPERTS:
            raise ValueError(
                f"num_experts is {self.num_experts}, but must be at least num_experts_per_tok = "
                f"{self.experts_per_token} and at most {MOST_EXPERTS}"
            )

    @classmethod
    def plain(cls, raw):
        """Calls num_local_experts, as transformers 5 writes it, num_experts."""
        raw = dict(raw)
        if (count := raw.pop("num_local_experts", None)) is None:
            return raw
        if raw.get("num_experts") not in (None, count):
            rule = f"but num_experts is {raw['num_experts']!r}"
            raise ValueError(f"num_local_experts is {count!r:.200}, {rule}")
        return raw | {"num_experts": count}

    @property
    def routes(self) -> tuple[int, ...]:
        """Gives (layers, experts of a token)."""
        return self.num_layers, self.experts_per_token

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Adds the experts' axes."""
        of_experts = {"X": self.num_experts, "E": self.num_experts, "Y": self.expert_width}
        return super().axis_sizes | of_experts


# The published sizes (https://huggingface.co/Qwen, config.json of each model).
PRESETS = {
    "30b_a3b": Qwen3MoeConfig(
        151_936, 2_048, 6_144, 48, 32, 4, 128, False, expert_width=768, norm_topk=True
    ),
    "235b_a22b": Qwen3MoeConfig(
        151_936, 4_096, 12_288, 94, 64, 4, 128, False, expert_width=1_536, norm_topk=True
    ),
}
register(Qwen3MoeConfig, PRESETS)
