"""Products with weight matrices that XLA's compiler for CPUs makes fast.

Each product is jnp.einsum(spec, x, w) with one axis, or adjacent ones, summed over. The barriers
keep XLA from transposing a product back.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp

# Of all programs: products by themselves, not fused with others, that add up one term after the
# other, in blocks of 512. Else their order depends on the shapes: there are one, two or four sums.
OPTIONS = {
    "xla_cpu_enable_platform_dependent_math": False,
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
}
FEW = 64  # rows on the left of a product: below them it has other blocks


def weights_first(spec, x, w, **options):
    """Multiplies for decoding: the transpose of the product of the transposes.

    The weights are on the left then, which is faster. A row has the same bits in every batch.
    """
    x_axes, w_axes, out_axes = re.split(",|->", spec)
    of_w = "".join(axis for axis in w_axes if axis not in x_axes)
    of_x = "".join(axis for axis in x_axes if axis not in w_axes)
    size = dict(zip(x_axes + w_axes, x.shape + w.shape, strict=True))
    if min(math.prod(size[axis] for axis in axes) for axes in (of_x, of_w)) < FEW:
        return jnp.einsum(spec, x, w, **options)
    out = jnp.einsum(f"{w_axes},{x_axes}->{of_w}{of_x}", w, x, **options)
    return jnp.einsum(f"{of_w}{of_x}->{out_axes}", jax.lax.optimization_barrier(out))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def small_side_transposed(spec, x, w, preferred_element_type=None):
    """Multiplies for learning: the gradient of w transposes the narrower of the two activations.

    XLA transposes the first of them, whatever it is, and what made it is computed in that order.
    """
    return jnp.einsum(spec, x, w, preferred_element_type=preferred_element_type)


def _forward(spec, x, w, preferred_element_type):
    return jnp.einsum(spec, x, w, preferred_element_type=preferred_element_type), (x, w)


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
