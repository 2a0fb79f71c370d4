"""The decoder that all models share, in flax.nnx: one layer for the learner and the sampler.

A model family (qwen2.py) is a ModelConfig with a Layer: which parameters a layer has, and what
becomes of its queries, keys and values.

Axis letters: B rows, T tokens, S keys, D width, N query heads, K key/value heads, H head size,
F feed-forward, V vocabulary, L layers, R rank of a low-rank factor, A experts of a token.
Activations are float32 between products, which round what they read to the compute dtype
(models.precision); norms, rotary angles, softmax and logits are float32.
"""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.kernels.tiles import padded
from models.kernels.xla import ATTENTION, attention
from models.parameters import (
    EMBED,
    HEAD,
    LayerKind,
    ModelConfig,
    Parameter,
    axis_letters,
    matrix,
    norm,
    normal,
)
from models.precision import WHOLE, Weights, einsum, lookup, low_rank_product, product, rounded

# What a layer keeps for the backward pass beside its input; the rest is computed again (Chen et al.
# 2016, arXiv 1604.06174). The products are those with weight matrices of which something comes
# after; they are named, since a policy does not see inside a product with a gradient of its own.
LAYER_INPUT, PRODUCT = "layer_input", "product"
_policies = jax.checkpoint_policies
REMAT = {
    "none": lambda body: body,  # everything is kept, nothing computed again
    "keep_products": functools.partial(
        jax.checkpoint, policy=_policies.save_only_these_names(PRODUCT, ATTENTION)
    ),
    "keep_attention": functools.partial(
        jax.checkpoint, policy=_policies.save_only_these_names(ATTENTION)
    ),
    "full": jax.checkpoint,
    "offload": functools.partial(
        jax.checkpoint,
        policy=_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ),
}

NORM_TERMS = 64  # a norm adds up a multiple of so many


def rms_norm(x, scale, *, eps):
    """Divides by the root mean square of the last axis (arXiv 1910.07467) and scales; float32."""
    # A CPU adds up fewer terms in an order that depends on what is fused with them.
    terms = padded(x, NORM_TERMS, axis=-1)
    mean_square = jnp.sum(terms * terms, axis=-1, keepdims=True) / x.shape[-1]
    return scale * (x * jax.lax.rsqrt(mean_square + eps))


def rotation(position_BT, kind: LayerKind, *, head_dim: int):
    """Computes (cos, sin) of the rotary embedding's angles, [B, T, 1, 2, H / 2], float32.

    Made once for all layers of a kind, and heads; the barrier keeps XLA from making them again.
    """
    half, scaling = head_dim // 2, kind.rope_scaling
    frequency_H = kind.rope_theta ** (-np.arange(half) / half)
    if scaling is not None:
        frequency_H = scaling.frequencies(frequency_H, theta=kind.rope_theta)
    angle_BTH = position_BT[..., None].astype(jnp.float32) * frequency_H.astype(np.float32)
    cos, sin = jnp.cos(angle_BTH), jnp.sin(angle_BTH)
    if scaling is not None:
        cos, sin = scaling.amplitude * cos, scaling.amplitude * sin
    cos, sin = jnp.stack([cos, cos], axis=2), jnp.stack([-sin, sin], axis=2)
    return jax.lax.optimization_barrier((cos[:, :, None], sin[:, :, None]))


def rope(x_BTNH, cos_sin):
    """Rotates halves by their position (Su et al. 2021, arXiv 2104.09864, Eq. 34), float32."""
    B, T, N, H = x_BTNH.shape
    cos, sin = cos_sin
    x = x_BTNH.reshape(B, T, N, 2, H // 2)
    return (x * cos + x[..., ::-1, :] * sin).reshape(B, T, N, H)


def segment_positions(segment_BT):
    """Counts every token's position inside its segment: 0, 1, 2, ... from its first token."""
    index_T = jnp.arange(segment_BT.shape[1])
    first_BT = jnp.diff(segment_BT, axis=1, prepend=-1) != 0
    return index_T - jax.lax.cummax(jnp.where(first_BT, index_T, 0), axis=1)


def causal_mask(segment_BT):
    """Makes mask_BTS: token t may look at tokens s <= t of its own segment (0 marks padding)."""
    index_T = jnp.arange(segment_BT.shape[1])
    same_BTS = segment_BT[:, :, None] == segment_BT[:, None, :]
    return same_BTS & (index_T[:, None] >= index_T[None, :])


def windowed(mask_BTS, window: int | None):
    """Leaves of a causal mask a token itself and the window - 1 tokens before it; None: all."""
    if window is None:
        return mask_BTS
    index_T = jnp.arange(mask_BTS.shape[-1])
    return mask_BTS & (index_T[:, None] - index_T < window)


def logits(x_D, head_DV):
    """Computes logits in float32, whatever the parameters' dtype; x may have more axes before D."""
    return jnp.einsum("...D,DV->...V", x_D, head_DV, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Execution:
    """Says how a model is computed; without more, whole on one device.

    project: an einsum with a weight matrix that `transposed` transposes. weights: what matrices are
    rounded to and where they are. axis: the mesh axis over which heads, feed-forward, experts and
    vocabulary are split, or None; `reduce` then adds up what each device contributes, and `gather`
    brings together the tokens that they all need, if these are split in between. Of stacked layers:
    remat, a name of REMAT, says what is kept for the backward pass; unroll, whether they are
    unrolled and not scanned; adapt(a layer's parameters, its adapters), where there are adapters,
    gives the parameters to compute with, LoRA's factors among them.
    """

    project: Callable = einsum
    weights: Weights = WHOLE
    axis: str | None = None
    gather: Callable = lambda x_BTD: x_BTD
    reduce: Callable = lambda x_BTD: x_BTD
    remat: str = "none"
    unroll: bool = False
    adapt: Callable | None = None


ALONE = Execution()


class Layer(nnx.Module):
    """Computes one decoder layer: pre-norm attention, then pre-norm SwiGLU (arXiv 2002.05202)."""

    parameters: ClassVar[tuple[Parameter, ...]] = (
        norm("attn_norm_D", "input_layernorm"),
        matrix("q_DNH", "self_attn.q_proj", "NH D"),
        matrix("k_DKH", "self_attn.k_proj", "KH D"),
        matrix("v_DKH", "self_attn.v_proj", "KH D"),
        matrix("o_NHD", "self_attn.o_proj", "D NH"),
        norm("mlp_norm_D", "post_attention_layernorm"),
        matrix("gate_DF", "mlp.gate_proj", "F D"),
        matrix("up_DF", "mlp.up_proj", "F D"),
        matrix("down_FD", "mlp.down_proj", "D F"),
    )

    norm = staticmethod(rms_norm)  # the final one too
    activation = staticmethod(jax.nn.silu)

    def __init__(self, config: ModelConfig, *, key):
        random = [p.name for p in self.parameters if p.init is normal]
        keys = dict(zip(random, jax.random.split(key, len(random)), strict=True))
        for p in self.parameters:
            array = p.init(keys.get(p.name), p.shape(config.axis_sizes))
            setattr(self, p.name, nnx.Param(array))
        self.config = config

    def of_heads(self, q_BTNH, k_BTKH, v_BTKH):
        """Returns float32 queries, keys and values; a family may change them, as in biases."""
        return q_BTNH, k_BTKH, v_BTKH

    def added(self, out_BTD, part: str):
        """Returns what part "attn" or "mlp" adds; a family may change it, as by a norm."""
        return out_BTD

    def feed_forward(self, h_BTD, times, routes, execution: Execution):
        """Computes the gated products: (out_BTD, None); a family with experts says which it chose.

        times(spec, x, w, name) -> float32 multiplies by a matrix. routes: as of `__call__`.
        """
        gate, up = (
            checkpoint_name(times("BTD,DF->BTF", h_BTD, w[...], name).astype(h_BTD.dtype), PRODUCT)
            for w, name in ((self.gate_DF, "gate"), (self.up_DF, "up"))
        )
        gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
        return times("BTF,FD->BTD", self.activation(gate) * up, self.down_FD[...], "down"), None

    def __call__(
        self,
        x_BTD,
        cos_sin,
        attend,
        execution: Execution,
        *,
        factors=types.MappingProxyType({}),
        routes=None,
    ):
        """Computes the layer: (x_BTD, what `attend` kept, the experts that it chose or None).

        attend(q_BTNH, k_BTKH, v_BTKH) -> (out_BTNH, kept) decides what the queries see.
        cos_sin: the `rotation` of every token. The learner attends inside the rows, the sampler to
        its cache; `kept` (the keys and values, or the new cache) is handed back beside the
        new x_BTD. factors: {a matrix's name before "_": (A, B)}, of those to which A B is added.
        routes: the experts to send each token to; None: those that the layer chooses.
        """
        eps, weights = self.config.rms_norm_eps, execution.weights

        def times(spec, x, w, name):
            out = product(execution.project, spec, x, w, weights)
            if name not in factors:
                return out
            return out + low_rank_product(spec, x, *factors[name], weights)

        dtype = weights.dtype_of(self.o_NHD[...])
        h = execution.gather(self.norm(x_BTD, self.attn_norm_D[...], eps=eps).astype(dtype))
        q, k, v = self.of_heads(
            times("BTD,DNH->BTNH", h, self.q_DNH[...], "q"),
            times("BTD,DKH->BTKH", h, self.k_DKH[...], "k"),
            times("BTD,DKH->BTKH", h, self.v_DKH[...], "v"),
        )
        heads = rope(q, cos_sin), rope(k, cos_sin), v
        q, k, v = (checkpoint_name(x.astype(dtype), PRODUCT) for x in heads)
        out, kept = attend(q, k, v)
        out = execution.reduce(times("BTNH,NHD->BTD", out, self.o_NHD[...], "o"))
        x_BTD = x_BTD + self.added(out, "attn")
        x_BTD = checkpoint_name(x_BTD, PRODUCT)
        h = execution.gather(self.norm(x_BTD, self.mlp_norm_D[...], eps=eps).astype(dtype))
        out, chosen = self.feed_forward(h, times, routes, execution)
        return x_BTD + self.added(execution.reduce(out), "mlp"), kept, chosen


class Transformer(nnx.Module):
    """Holds the whole model. Layer parameters are stacked on a leading L axis and scanned."""

    def __init__(self, config: ModelConfig, *, key):
        embed_key, layers_key, head_key = jax.random.split(key, 3)

        def array(parameter, key):
            return nnx.Param(parameter.init(key, parameter.shape(config.axis_sizes)))

        self.embed_VD = array(EMBED, embed_key)
        self.layers = nnx.vmap(lambda k: config.layer(config, key=k))(
            jax.random.split(layers_key, config.num_layers)
        )
        self.final_norm_D = array(config.final_norm, None)
        if not config.tie_embeddings:
            self.head_DV = array(HEAD, head_key)
        self.config = config

    def head(self):
        """Returns the output matrix head_DV: the embedding's transpose where they are tied."""
        return self.embed_VD[...].T if self.config.tie_embeddings else self.head_DV[...]

    def hidden(
        self,
        tokens_BT,
        position_BT,
        attend,
        execution: Execution = ALONE,
        *,
        adapters=(),
        routes_LBTA=None,
    ):
        """Computes normed last hidden states: (x_BTD, chosen_LBTA).

        attend(q_BTNH, k_BTKH, v_BTKH, window=) -> out_BTNH; window: the layer's, None without one.
        Where layers differ in kind the scan carries each one's, and only that kind's attention is
        executed. The hidden states are rounded as `execution.weights` says. adapters: for
        `execution.adapt`, a tree of arrays stacked as the layers are. routes_LBTA: the experts of
        each token, uint8; None: the layers choose them. Of a model with experts chosen_LBTA are
        those that the layers choose, or would have; else None.
        """
        graph, state = nnx.split(self.layers)
        layers = nnx.to_pure_dict(state)
        for p in self.config.layer.parameters:
            if " " not in p.layout:  # biases and scales, which no product reads
                dtype = execution.weights.dtype_of(layers[p.name])
                layers[p.name] = rounded(layers[p.name], dtype)

        def through_layers(x_BTD, cos_sin_of):
            kinds, cos_sins = list(cos_sin_of), list(cos_sin_of.values())
            attends = [functools.partial(attend, window=kind.window) for kind in kinds]
            number_L, stacked = None, None
            if len(kinds) > 1:
                number_L = jnp.array([kinds.index(kind) for kind in self.config.kinds])
                stacked = jax.tree.map(lambda *of_kinds: jnp.stack(of_kinds), *cos_sins)

            def body(x_BTD, xs):
                own, own_adapters, routes, number = xs
                x_BTD = checkpoint_name(x_BTD, LAYER_INPUT)
                if adapters:
                    own = execution.adapt(own, own_adapters)
                own, factors = split_factors(own)
                layer = nnx.merge(graph, own)
                cos_sin, attend_one = cos_sins[0], attends[0]
                if number is not None:
                    cos_sin = jax.tree.map(lambda of_kinds: of_kinds[number], stacked)
                    attend_one = functools.partial(jax.lax.switch, number, attends)

                def attend_alone(*qkv):
                    return attend_one(*qkv), None

                x_BTD, _, chosen = layer(
                    x_BTD, cos_sin, attend_alone, execution, factors=factors, routes=routes
                )
                return x_BTD, chosen

            of_layers = (layers, adapters, routes_LBTA, number_L)
            body = REMAT[execution.remat](body)
            return jax.lax.scan(body, x_BTD, of_layers, unroll=execution.unroll)

        top = {"embed_VD": self.embed_VD[...], "final_norm_D": self.final_norm_D[...]}
        return _hidden(top, self.config, tokens_BT, position_BT, through_layers, execution)

    def __call__(self, tokens_BT, *, segment_BT=None):
        """Computes float32 logits_BTV. `segment_BT`: each token's sequence, 0 for padding."""
        segment_BT = jnp.ones_like(tokens_BT) if segment_BT is None else segment_BT
        mask_BTS = causal_mask(segment_BT)

        def attend(q, k, v, *, window):
            return attention(q, k, v, windowed(mask_BTS, window))

        x_BTD, _ = self.hidden(tokens_BT, segment_positions(segment_BT), attend)
        return logits(x_BTD, self.head())


def hidden_layer_by_layer(
    params, config: ModelConfig, tokens_BT, position_BT, attends, *, project=einsum, axis
):
    """Runs the sampler's parameters: (normed last hidden states, what layers kept, routes).

    The second is a list; routes_BTLA are the experts that were chosen, None where there are none.
    params: `unstack`'s. attends: the layers' `attend`, one each. project, axis: an `Execution`'s.
    """
    graph = nnx.split(nnx.eval_shape(lambda: config.layer(config, key=jax.random.key(0))))[0]
    reduce = functools.partial(_over, axis=axis, dtype=params["embed_VD"].dtype)
    execution = Execution(project=project, axis=axis, reduce=reduce)

    def through_layers(x_BTD, cos_sin_of):
        kept = []
        for array, kind, attend in zip(params["layers"], config.kinds, attends, strict=True):
            own, factors = split_factors(transposed(array))
            layer = nnx.merge(graph, own)
            x_BTD, *of_layer = layer(x_BTD, cos_sin_of[kind], attend, execution, factors=factors)
            kept.append(of_layer)
        return x_BTD, kept

    x_BTD, of_layers = _hidden(params, config, tokens_BT, position_BT, through_layers, execution)
    kept, routes = zip(*of_layers, strict=True)
    return x_BTD, list(kept), None if routes[0] is None else jnp.stack(routes, axis=2)


def _hidden(params, config, tokens_BT, position_BT, through_layers, execution: Execution):
    """Runs all but the head; through_layers(x_BTD, cos_sin_of) gives (x_BTD, what layers kept).

    cos_sin_of: {kind of layer: its `rotation`}.
    """
    embed_VD, scale_D = params["embed_VD"], params["final_norm_D"]
    weights, axis = execution.weights, execution.axis
    dtype = weights.dtype_of(embed_VD)
    # Where rows are split over a mesh axis, each chip looks up its share.
    first_id = 0 if axis is None else jax.lax.axis_index(axis) * embed_VD.shape[0]
    x_BTD = execution.reduce(lookup(embed_VD, tokens_BT, first_id, weights))
    if config.embed_scale != 1:
        x_BTD = x_BTD * jnp.asarray(config.embed_scale, dtype).astype(jnp.float32)
    rotate = functools.partial(rotation, position_BT, head_dim=config.head_dim)
    cos_sin_of = {kind: rotate(kind) for kind in dict.fromkeys(config.kinds)}
    x_BTD, kept = through_layers(x_BTD, cos_sin_of)
    x_BTD = config.layer.norm(x_BTD, rounded(scale_D, dtype), eps=config.rms_norm_eps)
    return x_BTD.astype(dtype), kept


def _over(x, *, axis: str | None, dtype):
    """Sums over a mesh axis, which takes it in a dtype; None: nothing is split."""
    return x if axis is None else jax.lax.psum(x.astype(dtype), axis).astype(x.dtype)


def split_factors(layer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """Splits a layer's arrays: (its parameters, {matrix: (A, B)} of models.lora)."""
    own = {name: array for name, array in layer.items() if "R" not in axis_letters(name)}
    names = sorted(layer.keys() - own.keys(), key=lambda name: axis_letters(name)[0] == "R")
    factors: dict[str, tuple] = {}
    for name in names:  # every A, then every B
        matrix = name.partition("_")[0]
        factors[matrix] = (*factors.get(matrix, ()), layer[name])
    return own, factors


def split(model: Transformer) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """Splits the module: (graph definition, plain nested dict of arrays); nnx.merge undoes it."""
    graph, state = nnx.split(model)
    return graph, nnx.to_pure_dict(state)


def abstract_params(config: ModelConfig) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """Splits a model of float32 ShapeDtypeStructs, as `split` does: nothing is allocated."""
    return split(nnx.eval_shape(lambda: Transformer(config, key=jax.random.key(0))))


def unstack(params: dict[str, Any]) -> dict[str, Any]:
    """Lays a params dict out for the sampler: "layers" is a tuple of `transposed` layers.

    A loop over the layers of stacked arrays would copy each layer out of them first. There is
    always a "head_VD", a copy of the embedding where they are tied.
    """
    num_layers = len(jax.tree.leaves(params["layers"])[0])
    layers = tuple(
        transposed({name: p[i] for name, p in params["layers"].items()}) for i in range(num_layers)
    )
    top = {name: params[name] for name in ("embed_VD", "final_norm_D")}
    head_VD = params["head_DV"].T if "head_DV" in params else params["embed_VD"]
    return top | {"layers": layers, "head_VD": head_VD}


def transposed(layer: dict[str, Any]) -> dict[str, Any]:
    """Stores a layer's matrices with D, the axis that all have, at the other end: x_DF as x_FD.

    Names say so too; vectors and experts stay. Twice gives the layer back.
    """

    def transpose(name, array):
        stem, _, axes = name.rpartition("_")
        if axes == "D" or "D" not in axes or "E" in axes:
            return name, array
        if axes[0] == "D":
            return f"{stem}_{axes[1:]}D", jnp.moveaxis(array, 0, -1)
        return f"{stem}_D{axes[:-1]}", jnp.moveaxis(array, -1, 0)

    return dict(transpose(name, array) for name, array in layer.items())
