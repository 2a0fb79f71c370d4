"""Parameters of a model, each declared once, and the sizes of a model.

Names, shapes, shardings, random starts and Hugging Face's tensors all derive from a
`Parameter`; the letters are those of models.transformer.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from models.rope import RopeScaling

# Logical axes; `sharding.rules` maps them to mesh axes.
AXES = {
    "V": "vocab",
    "D": "width",
    "N": "heads",
    "K": "kv_heads",
    "H": "head_dim",
    "F": "mlp",
    "R": "rank",
    "X": "choices",
    "E": "experts",
    "Y": "expert_mlp",
}


def axis_letters(name: str) -> str:
    """Gives the letters that end a parameter's name, one for each axis."""
    return name.rpartition("_")[2]


def normal(key, shape):
    """Makes the random start of a matrix."""
    return 0.02 * jax.random.normal(key, shape)


def ones(_, shape):
    """Makes the start of a norm's scale."""
    return jnp.ones(shape)


def zeros(_, shape):
    """Makes the start of a bias."""
    return jnp.zeros(shape)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Declares an array of the model, or, stacked, of all its layers.

    name: its last part has an axis letter for each dimension. tensor: Hugging Face's name; "{}"
    stands for a layer's number, and there is one tensor a layer; a second one for an expert's.
    layout: the same letters in the file's order, one group for each axis of the file's tensor.
    init(key, shape): its start, float32 without the layers' axis; key is None where init is not
    `normal`.
    """

    name: str
    tensor: str
    layout: str
    init: Callable = normal

    @property
    def axes(self) -> str:
        """Gives the letters that end the name."""
        return axis_letters(self.name)

    @property
    def stacked(self) -> bool:
        """Tells whether every layer has one."""
        return "{}" in self.tensor

    @property
    def numbered(self) -> str:
        """Gives the letters that numbers in the tensor's name stand for, beside the layer's."""
        return self.axes[: max(0, self.tensor.count("{}") - 1)]

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """Gives our shape, without the layers' axis; sizes: ModelConfig.axis_sizes."""
        return tuple(sizes[axis] for axis in self.axes)

    def tensor_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """Gives the shape of the file's tensor."""
        return tuple(math.prod(sizes[a] for a in group) for group in self.layout.split())


def matrix(name: str, tensor: str, layout: str) -> Parameter:
    """Declares a matrix of every layer; tensor: its module in Hugging Face's layer."""
    return Parameter(name, f"model.layers.{{}}.{tensor}.weight", layout)


def bias(name: str, tensor: str) -> Parameter:
    """Declares a bias of every layer."""
    return Parameter(name, f"model.layers.{{}}.{tensor}.bias", axis_letters(name), zeros)


def norm(name: str, tensor: str, init: Callable = ones) -> Parameter:
    """Declares the scale of a norm of every layer."""
    return Parameter(name, f"model.layers.{{}}.{tensor}.weight", axis_letters(name), init)


EMBED = Parameter("embed_VD", "model.embed_tokens.weight", "V D")
FINAL_NORM = Parameter("final_norm_D", "model.norm.weight", "D", ones)
HEAD = Parameter("head_DV", "lm_head.weight", "V D")  # none where it is the embedding, transposed


FULL, SLIDING = "full_attention", "sliding_attention"  # what layers see, in transformers' words


class LayerKind(NamedTuple):
    """Says what a layer sees, and how it turns queries and keys.

    window: how many tokens, the query's included; None: all up to it.
    """

    window: int | None
    rope_theta: float
    rope_scaling: RopeScaling | None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Holds the sizes of one model. `vocab_size` counts embedding rows, padding rows included.

    A family is a subclass: its layer, what Hugging Face calls it, and which values of config.json
    it computes; it refuses other ones. `windows`: every layer's, as in LayerKind; (): no layer has
    one.
    """

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
    rope_scaling: RopeScaling | None = None
    windows: tuple[int | None, ...] = ()

    layer: ClassVar[type]  # of models.transformer.Layer
    model_type: ClassVar[str]
    architecture: ClassVar[str]
    computes: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "use_sliding_window": False}
    # Fields of its own -> keys of config.json; tensors of transformers 5 which hold the experts' of
    # several parameters, one expert after the other.
    keys: ClassVar[Mapping[str, str]] = {}
    stacks: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # What transformers computes with where config.json lacks a key.
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6, "rope_theta": 1e4}
    final_norm: ClassVar[Parameter] = FINAL_NORM
    embed_scale: ClassVar[float] = 1.0  # of the tokens' embeddings, rounded to the compute dtype

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Gives each layer's kind."""
        windows = self.windows or (None,) * self.num_layers
        return tuple(LayerKind(w, self.rope_theta, self.rope_scaling) for w in windows)

    @classmethod
    def layer_types(cls, raw: Mapping[str, Any]) -> list[str]:
        """Says of config.json's layers which are FULL and which SLIDING."""
        return [FULL] * raw["num_hidden_layers"]

    @classmethod
    def plain(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Writes config.json with a key for each value, where the family's has others."""
        return raw

    @classmethod
    def own_tensor(cls, name: str) -> str | None:
        """Gives our name of a file's tensor; None: it is of a part that is not computed."""
        return name

    @property
    def routes(self) -> tuple[int, ...]:
        """Gives (layers, experts of a token) of the experts that are recorded; () without any."""
        return ()

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Gives the size of every axis that a parameter may have in a layer, by letter."""
        return {
            "V": self.vocab_size,
            "D": self.width,
            "F": self.mlp_width,
            "N": self.num_heads,
            "K": self.num_kv_heads,
            "H": self.head_dim,
        }

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Lists all parameters by name, in the order of the files."""
        head = () if self.tie_embeddings else (HEAD,)
        return {p.name: p for p in (EMBED, *self.layer.parameters, self.final_norm, *head)}


def param_axes(params: dict[str, Any]) -> dict[str, Any]:
    """Names the logical axes of every array of a params dict, transposed or factors, by its name.

    Stacked ones begin with "layer". A norm's scale, the one kind of vector with a single axis, is
    the same on every chip. An optimizer's state has such dicts, and scalars beside them.
    """

    def axes(path, leaf):
        if not leaf.ndim:
            return ()
        letters = axis_letters(path[-1].key)
        names = ("norm",) if len(letters) == 1 else tuple(AXES[letter] for letter in letters)
        return ("layer",) * (leaf.ndim - len(names)) + names

    return jax.tree_util.tree_map_with_path(axes, params)
