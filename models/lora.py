"""Low-rank adaptation (LoRA, Hu et al. 2021, arXiv 2106.09685): W + scale * A B, W left alone.

Axis letter beside the model's: R rank. An adapted matrix's factors are called by its name with R
between what is summed over and what comes out: q_DNH has q_DR and q_RNH. In float32 policies are
sampled and trained with the sum. In a dtype that rounds, a small change would be lost in the sum:
there x W + (x A) B takes its place, in the sampler and the learner alike.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from models.parameters import ModelConfig
from models.transformer import Layer, abstract_params

# Which matrices of a layer can be adapted: what is summed over, and what comes out.
MATRICES = {
    p.name.rpartition("_")[0]: tuple(reversed(p.layout.split()))
    for p in Layer.parameters
    if " " in p.layout
}


@dataclasses.dataclass(frozen=True)
class Lora:
    """Says which matrices of all layers are adapted; the update's scale is alpha / rank."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """Gives what A B is multiplied by (section 4.1)."""
        return self.alpha / self.rank


def factors(target: str) -> tuple[str, str, str]:
    """Names (W, A, B)."""
    summed, out = MATRICES[target]
    return f"{target}_{summed}{out}", f"{target}_{summed}R", f"{target}_R{out}"


def init_adapters(config: ModelConfig, lora: Lora, *, key) -> dict[str, Any]:
    """Makes float32 factors of all layers, stacked: A normal with variance 1 / inputs, B zero."""
    layers = abstract_params(config)[1]["layers"]
    adapters = {}
    for i, target in enumerate(lora.targets):
        w, a, b = factors(target)
        L, *shape = layers[w].shape
        axes = len(MATRICES[target][0])
        summed, out = shape[:axes], shape[axes:]
        std = math.prod(summed) ** -0.5
        adapters[a] = std * jax.random.normal(jax.random.fold_in(key, i), (L, *summed, lora.rank))
        adapters[b] = jnp.zeros((L, lora.rank, *out))
    return {"layers": adapters}


def factored(layer: dict[str, Any], adapters: dict[str, Any], *, scale: float) -> dict[str, Any]:
    """Adds A and scale * B to a layer's or stacked parameters, and leaves every W as it is."""
    factor = {name: scale if name.rpartition("_")[2][0] == "R" else 1.0 for name in adapters}
    return layer | {name: factor[name] * array for name, array in adapters.items()}


def merged(layer: dict[str, Any], adapters: dict[str, Any], *, scale: float) -> dict[str, Any]:
    """Replaces every W that has factors by W + scale * A B, in a layer's or stacked parameters.

    The sum is float32; who multiplies by it rounds it once, and its gradient is float32.
    """
    new = dict(layer)
    for target, (summed, out) in MATRICES.items():
        w, a, b = factors(target)
        if a in adapters:
            change = jnp.einsum(
                f"...{summed}R,...R{out}->...{summed}{out}", adapters[a], adapters[b]
            )
            new[w] = layer[w] + scale * change
    return new
