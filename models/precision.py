"""Meets float32 parameters with activations of the compute dtype.

Each function computes with the parameter rounded to the activations' dtype, as the sampler does,
and gives its gradient in the parameter's dtype. That gradient is a sum over all tokens: in bfloat16
a row of the embedding that many tokens look up stops growing after a few hundred of them, and so
does a bias. In float32 it is a float32 sum, over the devices that tokens lie on too, since these
add up what the operation itself gives. Where the dtypes agree, each is the plain operation.
"""

import functools
import re

import jax
import jax.numpy as jnp


def lookup(embed_VD, tokens_BT, dtype):
    """Looks up tokens' embeddings, x_BTD in a dtype."""
    return embed_VD[tokens_BT].astype(dtype)


def spread(parameter, x):
    """Repeats a bias or a scale, whose axes are x's last, for every token of x.

    Repeated, then rounded: backwards the tokens' gradients are widened, then summed.
    """
    return jnp.broadcast_to(parameter, x.shape).astype(x.dtype)


def product(project, spec, x, w):
    """Multiplies by a weight matrix: project(spec, x, w), an einsum."""
    if x.dtype == w.dtype:
        return project(spec, x, w)
    return _rounded_product(project, spec, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounded_product(project, spec, x, w):
    return project(spec, x, w.astype(x.dtype))


def _forward(project, spec, x, w):
    return _rounded_product(project, spec, x, w), (x, w)


def _backward(project, spec, residuals, d_out):
    x, w = residuals
    x_axes, w_axes, out_axes = re.split(",|->", spec)
    d_x = jnp.einsum(f"{out_axes},{w_axes}->{x_axes}", d_out, w.astype(x.dtype))
    d_w = jnp.einsum(f"{x_axes},{out_axes}->{w_axes}", x, d_out, preferred_element_type=w.dtype)
    return d_x, d_w


_rounded_product.defvjp(_forward, _backward)
