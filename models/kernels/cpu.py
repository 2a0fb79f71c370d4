"""Products with weight matrices that XLA's compiler for CPUs makes fast.

Each product is jnp.einsum(spec, x, w) with one axis, or adjacent ones, summed over. The barriers
keep XLA from transposing a product back.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from models.precision import einsum

# Of all programs: products by themselves, not fused with others, that add up one term after the
# other, in blocks of BLOCK_TERMS. Else their order depends on the shapes: one, two or four sums.
# And all is rounded to bfloat16 where the program says so, whatever it is fused with.
OPTIONS = {
    "xla_allow_excess_precision": False,
    "xla_cpu_enable_platform_dependent_math": False,
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
}
BLOCK_TERMS = 512
# With so many rows weights on the left of a product are read faster. Where there are more terms
# than a block has, fewer than WIDE rows or columns have another order of sums there.
LEFT_ROWS, WIDE = range(8, 129), 64
TILE_VALUES = 32_768  # of a tile's keys; products with more of them have another order of sums


def of_matrices(spec, x, w, **options):
    """Multiplies for sampling: two rows or more have the same bits in every batch.

    Factors become matrices whose last axis is summed over, as `models.transformer.transposed`
    stores them. XLA brings others into a form of its own, which takes longer, and where few rows
    have another order of sums.
    """
    x_axes, w_axes, out_axes = re.split(",|->", spec)
    size = dict(zip(x_axes + w_axes, x.shape + w.shape, strict=True))
    of_x, of_w = ("".join(a for a in axes if a in out_axes) for axes in (x_axes, w_axes))
    summed = "".join(axis for axis in w_axes if axis in x_axes)
    terms, barrier = math.prod(size[axis] for axis in summed), jax.lax.optimization_barrier
    x_RZ = barrier(jnp.einsum(f"{x_axes}->{of_x}{summed}", x).reshape(-1, terms))
    w_FZ = barrier(jnp.einsum(f"{w_axes}->{of_w}{summed}", w).reshape(-1, terms))
    in_order = terms <= BLOCK_TERMS or min(len(x_RZ), len(w_FZ)) >= WIDE
    if len(x_RZ) in LEFT_ROWS and in_order:
        out_RF = barrier(jnp.einsum("FZ,RZ->FR", w_FZ, x_RZ, **options)).T
        # As the other form's: what sums over its columns has an order by how they lie.
        out_RF = with_layout_constraint(out_RF, Layout((0, 1)))
    else:
        out_RF = barrier(jnp.einsum("RZ,FZ->RF", x_RZ, w_FZ, **options))
    out = out_RF.reshape([size[axis] for axis in of_x + of_w])
    return jnp.einsum(f"{of_x}{of_w}->{out_axes}", out)


def page_tokens(tokens: int, head_dim: int) -> int:
    """Halves a page until its products add up in order."""
    while tokens % 2 == 0 and tokens * head_dim > TILE_VALUES:
        tokens //= 2
    return tokens


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def small_side_transposed(spec, x, w, preferred_element_type=None):
    """Multiplies for learning: the gradient of w transposes the narrower of the two activations.

    XLA transposes the first of them, whatever it is, and what made it is computed in that order.
    """
    return einsum(spec, x, w, preferred_element_type=preferred_element_type)


def _forward(spec, x, w, preferred_element_type):
    return small_side_transposed(spec, x, w, preferred_element_type), (x, w)


def _backward(spec, _, residuals, d_out):
    x, w = residuals
    x_axes, w_axes, out_axes = re.split(",|->", spec)
    rows = sum(axis in out_axes for axis in x_axes)
    d_x = jnp.einsum(f"{out_axes},{w_axes}->{x_axes}", d_out, w)
    x, d_out = (a.reshape(math.prod(a.shape[:rows]), -1) for a in (x, d_out))
    barrier = jax.lax.optimization_barrier
    d_w = barrier(x.T) @ d_out if x.shape[1] <= d_out.shape[1] else (barrier(d_out.T) @ x).T
    return d_x, d_w.reshape(w.shape)


small_side_transposed.defvjp(_forward, _backward)
