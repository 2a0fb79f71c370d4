"""Qwen2.5 (arXiv 2412.15115) in flax.nnx: one block function for the learner and the decoder.

Axis letters: B rows, T tokens, S keys, D width, N query heads, K key/value heads, H head size,
F feed-forward, V vocabulary, L layers. Activations have the parameters' dtype; norms, rotary
angles, softmax and logits are float32. Whoever wants bfloat16 compute casts the parameters.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.kernels.xla import ATTENTION, attention


@dataclasses.dataclass(frozen=True)
class Qwen2Config:
    """Sizes of one model. `vocab_size` counts embedding rows, padding rows included."""

    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_embeddings: bool
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6


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

# Logical axes of every parameter; `sharding.rules` maps them to mesh axes.
PARAM_AXES = {
    "embed_VD": ("vocab", "width"),
    "head_DV": ("width", "vocab"),
    "head_VD": ("vocab", "width"),
    "final_norm_D": ("norm",),
    "attn_norm_D": ("norm",),
    "q_DNH": ("width", "heads", "head_dim"),
    "q_bias_NH": ("heads", "head_dim"),
    "k_DKH": ("width", "kv_heads", "head_dim"),
    "k_bias_KH": ("kv_heads", "head_dim"),
    "v_DKH": ("width", "kv_heads", "head_dim"),
    "v_bias_KH": ("kv_heads", "head_dim"),
    "o_NHD": ("heads", "head_dim", "width"),
    "mlp_norm_D": ("norm",),
    "gate_DF": ("width", "mlp"),
    "up_DF": ("width", "mlp"),
    "down_FD": ("mlp", "width"),
    # As the sampler keeps them (`unstack`).
    "q_NHD": ("heads", "head_dim", "width"),
    "k_KHD": ("kv_heads", "head_dim", "width"),
    "v_KHD": ("kv_heads", "head_dim", "width"),
    "gate_FD": ("mlp", "width"),
    "up_FD": ("mlp", "width"),
    "down_DF": ("width", "mlp"),
}


# What a layer keeps for the backward pass beside its input; the rest is computed again (Chen et al.
# 2016, arXiv 1604.06174). The products are those with weight matrices.
LAYER_INPUT = "layer_input"
_policies = jax.checkpoint_policies
REMAT = {
    "none": lambda body: body,  # everything is kept, nothing computed again
    "keep_products": functools.partial(
        jax.checkpoint, policy=_policies.checkpoint_dots_with_no_batch_dims
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


def turned(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer's matrices stored with D, the axis that all have, at the other end: x_DF as x_FD.

    Names say so too; vectors and attention's output projection stay. Twice gives the layer back.
    """

    def turn(name, array):
        stem, _, axes = name.rpartition("_")
        if stem == "o" or axes == "D" or "D" not in axes:
            return name, array
        if axes[0] == "D":
            return f"{stem}_{axes[1:]}D", jnp.moveaxis(array, 0, -1)
        return f"{stem}_D{axes[:-1]}", jnp.moveaxis(array, -1, 0)

    return dict(turn(name, array) for name, array in layer.items())


def rms_norm(x_BTD, scale_D, *, eps):
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv 1910.07467), computed in float32."""
    x = x_BTD.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return scale_D * x.astype(x_BTD.dtype)


def rotation(position_BT, config: Qwen2Config):
    """(cos, sin) of every angle of the rotary embedding, [B, T, 1, 2, H / 2] each, float32.

    Made once for all layers and heads; the barrier keeps XLA from making them again in each.
    """
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BTH = position_BT[..., None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle_BTH), jnp.sin(angle_BTH)
    cos, sin = jnp.stack([cos, cos], axis=2), jnp.stack([-sin, sin], axis=2)
    return jax.lax.optimization_barrier((cos[:, :, None], sin[:, :, None]))


def rope(x_BTNH, cos_sin):
    """Rotary position embedding on halves (Su et al. 2021, arXiv 2104.09864, Eq. 34), float32."""
    B, T, N, H = x_BTNH.shape
    cos, sin = cos_sin
    x = x_BTNH.astype(jnp.float32).reshape(B, T, N, 2, H // 2)
    return (x * cos + x[..., ::-1, :] * sin).reshape(B, T, N, H).astype(x_BTNH.dtype)


def segment_positions(segment_BT):
    """Position of every token inside its segment: 0, 1, 2, ... from each segment's first token."""
    index_T = jnp.arange(segment_BT.shape[1])
    first_BT = jnp.diff(segment_BT, axis=1, prepend=-1) != 0
    return index_T - jax.lax.cummax(jnp.where(first_BT, index_T, 0), axis=1)


def causal_mask(segment_BT):
    """mask_BTS: token t may look at tokens s <= t of its own segment (0 marks padding)."""
    index_T = jnp.arange(segment_BT.shape[1])
    same_BTS = segment_BT[:, :, None] == segment_BT[:, None, :]
    return same_BTS & (index_T[:, None] >= index_T[None, :])


class Block(nnx.Module):
    """One decoder layer: pre-norm attention with biased q, k, v, then pre-norm SwiGLU."""

    def __init__(self, config: Qwen2Config, *, key):
        c = config
        D, N, K, H, F = c.width, c.num_heads, c.num_kv_heads, c.head_dim, c.mlp_width
        keys = iter(jax.random.split(key, 7))
        self.attn_norm_D = nnx.Param(jnp.ones(D))
        self.q_DNH = nnx.Param(_normal(next(keys), (D, N, H)))
        self.q_bias_NH = nnx.Param(jnp.zeros((N, H)))
        self.k_DKH = nnx.Param(_normal(next(keys), (D, K, H)))
        self.k_bias_KH = nnx.Param(jnp.zeros((K, H)))
        self.v_DKH = nnx.Param(_normal(next(keys), (D, K, H)))
        self.v_bias_KH = nnx.Param(jnp.zeros((K, H)))
        self.o_NHD = nnx.Param(_normal(next(keys), (N, H, D)))
        self.mlp_norm_D = nnx.Param(jnp.ones(D))
        self.gate_DF = nnx.Param(_normal(next(keys), (D, F)))
        self.up_DF = nnx.Param(_normal(next(keys), (D, F)))
        self.down_FD = nnx.Param(_normal(next(keys), (F, D)))
        self.config = config

    def __call__(
        self,
        x_BTD,
        cos_sin,
        attend,
        *,
        gather=lambda x_BTD: x_BTD,
        reduce=lambda x_BTD: x_BTD,
        project=jnp.einsum,
    ):
        """`attend(q_BTNH, k_BTKH, v_BTKH) -> (out_BTNH, kept)` decides what the queries see.

        cos_sin: the `rotation` of every token. The learner attends inside the rows, the decoder
        to its cache; `kept` (the keys and values, or the new cache) is handed back beside the
        new x_BTD. Where heads and feed-forward are split over chips, `reduce` adds up what each
        contributes, and `gather` brings together the tokens that they all need, if these are split
        in between. `project` multiplies by a weight matrix that `turned` turns.
        """
        eps = self.config.rms_norm_eps
        h = gather(rms_norm(x_BTD, self.attn_norm_D[...], eps=eps))
        q = project("BTD,DNH->BTNH", h, self.q_DNH[...]) + self.q_bias_NH[...]
        k = project("BTD,DKH->BTKH", h, self.k_DKH[...]) + self.k_bias_KH[...]
        v = project("BTD,DKH->BTKH", h, self.v_DKH[...]) + self.v_bias_KH[...]
        q, k = rope(q, cos_sin), rope(k, cos_sin)
        out, kept = attend(q, k, v)
        # Heads as one axis: XLA sums over two in an order for which it copies the matrix first.
        out, o = out.reshape(*x_BTD.shape[:2], -1), self.o_NHD[...].reshape(-1, x_BTD.shape[2])
        x_BTD = x_BTD + reduce(jnp.einsum("BTZ,ZD->BTD", out, o))
        h = gather(rms_norm(x_BTD, self.mlp_norm_D[...], eps=eps))
        gate = jax.nn.silu(project("BTD,DF->BTF", h, self.gate_DF[...]))
        up = project("BTD,DF->BTF", h, self.up_DF[...])
        return x_BTD + reduce(project("BTF,FD->BTD", gate * up, self.down_FD[...])), kept


class Qwen2(nnx.Module):
    """The whole model. Layer parameters are stacked on a leading L axis and scanned."""

    def __init__(self, config: Qwen2Config, *, key):
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        self.embed_VD = nnx.Param(_normal(embed_key, (config.vocab_size, config.width)))
        self.layers = nnx.vmap(lambda k: Block(config, key=k))(
            jax.random.split(layers_key, config.num_layers)
        )
        self.final_norm_D = nnx.Param(jnp.ones(config.width))
        if not config.tie_embeddings:
            self.head_DV = nnx.Param(_normal(head_key, (config.width, config.vocab_size)))
        self.config = config

    def embed(self, tokens_BT):
        """Token embeddings x_BTD."""
        return self.embed_VD[...][tokens_BT]

    def final_norm(self, x_BTD):
        """The norm between the last block and the head."""
        return rms_norm(x_BTD, self.final_norm_D[...], eps=self.config.rms_norm_eps)

    def head(self):
        """The output matrix head_DV: the embedding's transpose where they are tied."""
        return self.embed_VD[...].T if self.config.tie_embeddings else self.head_DV[...]

    def hidden(
        self,
        tokens_BT,
        position_BT,
        attend,
        *,
        remat="none",
        project=jnp.einsum,
        unroll=1,
        gather=lambda x_BTD: x_BTD,
        reduce=lambda x_BTD: x_BTD,
        adapters=(),
        adapt=lambda layer, adapters: layer,
    ):
        """Normed last hidden states x_BTD; attend(q_BTNH, k_BTKH, v_BTKH) -> out_BTNH.

        remat: a name of REMAT, what of a layer is kept for the backward pass. project: as the
        block's, and so are gather and reduce. unroll: how many layers the loop's body has. reduce
        lays out what is kept between layers, too. adapt(a layer's parameters, its
        adapters) -> the parameters to compute with, where `adapters` is a tree of arrays stacked as
        the layers are.
        """
        cos_sin = rotation(position_BT, self.config)
        block, state = nnx.split(self.layers)

        def body(x_BTD, params_and_adapters):
            x_BTD = checkpoint_name(reduce(x_BTD), LAYER_INPUT)
            layer = nnx.merge(block, adapt(*params_and_adapters))
            how = {"gather": gather, "reduce": reduce, "project": project}
            return layer(x_BTD, cos_sin, lambda *qkv: (attend(*qkv), None), **how)

        body = REMAT[remat](body)
        layers = (nnx.to_pure_dict(state), adapters)
        x_BTD, _ = jax.lax.scan(body, self.embed(tokens_BT), layers, unroll=unroll)
        return self.final_norm(x_BTD)

    def __call__(self, tokens_BT, *, segment_BT=None):
        """Float32 logits_BTV. `segment_BT`: sequence number of every token, 0 for padding."""
        segment_BT = jnp.ones_like(tokens_BT) if segment_BT is None else segment_BT
        mask_BTS = causal_mask(segment_BT)
        x_BTD = self.hidden(
            tokens_BT, segment_positions(segment_BT), lambda q, k, v: attention(q, k, v, mask_BTS)
        )
        return logits(x_BTD, self.head())


def logits(x_BTD, head_DV):
    """Logits in float32, whatever the parameters' dtype."""
    return jnp.einsum("...D,DV->...V", x_BTD, head_DV, preferred_element_type=jnp.float32)


def split(model: Qwen2) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The module border: (graph definition, plain nested dict of arrays); `nnx.merge` undoes it."""
    graph, state = nnx.split(model)
    return graph, nnx.to_pure_dict(state)


def abstract_params(config: Qwen2Config) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """As `split`, with float32 ShapeDtypeStructs for arrays: nothing is allocated."""
    return split(nnx.eval_shape(lambda: Qwen2(config, key=jax.random.key(0))))


def unstack(params: dict[str, Any]) -> dict[str, Any]:
    """The sampler's layout of a params dict: "layers" is a tuple with one `turned` dict a layer.

    A loop over the layers of stacked arrays would copy each layer out of them first. There is
    always a "head_VD", a copy of the embedding where they are tied.
    """
    num_layers = len(jax.tree.leaves(params["layers"])[0])
    layers = tuple(
        turned({name: p[i] for name, p in params["layers"].items()}) for i in range(num_layers)
    )
    top = {name: params[name] for name in ("embed_VD", "final_norm_D")}
    head_VD = params["head_DV"].T if "head_DV" in params else params["embed_VD"]
    return top | {"layers": layers, "head_VD": head_VD}


def abstract_block(config: Qwen2Config) -> nnx.GraphDef:
    """The graph of one layer, for `nnx.merge` with an item of an unstacked "layers"."""
    return nnx.split(nnx.eval_shape(lambda: Block(config, key=jax.random.key(0))))[0]


def param_axes(params: dict[str, Any]) -> dict[str, Any]:
    """Logical axis names of every array of a params dict; stacked ones begin with "layer"."""

    def axes(path, leaf):
        names = PARAM_AXES[path[-1].key]
        return ("layer",) * (leaf.ndim - len(names)) + names

    return jax.tree_util.tree_map_with_path(axes, params)


def _normal(key, shape):
    return 0.02 * jax.random.normal(key, shape)
