"""Products with weight matrices that XLA's compiler for CPUs makes fast.

Each product is jnp.einsum(spec, x, w) with one axis, or adjacent ones, summed over. The barriers
keep XLA from transposing a product back.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp

# Of all programs: no kernels of YNNPACK but for convolutions, which no model here has. The order in
# which its products add up depends on the number of rows; in all others it does not.
OPTIONS = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION",
}


def weights_first(spec, x, w, **options):
    """Multiplies for decoding: the transpose of the product of the transposes.

    The weights are on the left then, which is faster for few rows of x, and a row has the same
    bits in every batch of a multiple of the engine's XLA_ROWS.
    """
    x_axes, w_axes, out_axes = re.split(",|->", spec)
    of_w = "".join(axis for axis in w_axes if axis not in x_axes)
    of_x = "".join(axis for axis in x_axes if axis not in w_axes)
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
