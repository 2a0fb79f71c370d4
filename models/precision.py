"""Meets float32 parameters with activations of the compute dtype, and says how float32 multiplies.

Each function computes with the parameter rounded to the activations' dtype, as the sampler does,
and gives its gradient in the parameter's dtype. That gradient is a sum over all tokens: in bfloat16
a row of the embedding that many tokens look up stops growing after a few hundred of them, and so
does a bias. In float32 it is a float32 sum, over the devices that tokens lie on too, since these
add up what the operation itself gives. Where the dtypes agree, each is the plain operation.
"""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def products_in(dtype) -> contextlib.AbstractContextManager:
    """Keeps a float32 program, traced inside it, from rounding factors: to TF32, or bfloat16."""
    whole = jnp.dtype(dtype) == jnp.float32
    return jax.default_matmul_precision("highest") if whole else contextlib.nullcontext()


class Weights(NamedTuple):
    """Says where weights are that are multiplied by; without more, whole where they are used.

    gather(w, letters) brings a rounded matrix together whose axis "D" is split, and scatter(d_w,
    letters) adds up the gradients of all who used it and leaves each its part: a transpose of the
    other. Both are collectives inside shard_map.
    """

    gather: Callable[[Any, str], Any] = lambda w, letters: w
    scatter: Callable[[Any, str], Any] = lambda d_w, letters: d_w


WHOLE = Weights()


def lookup(embed_VD, tokens_BT, first_id, dtype, weights: Weights = WHOLE):
    """Looks up tokens' embeddings, x_BTD in a dtype; 0 for a token that is not among the rows.

    first_id: the token of the first row.
    """
    local_BT = tokens_BT - first_id
    here_BT = (local_BT >= 0) & (local_BT < embed_VD.shape[0])
    return _lookup(weights, jnp.dtype(dtype), embed_VD, local_BT, here_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _lookup(weights, dtype, embed_VD, local_BT, here_BT):
    rounded_VD = weights.gather(embed_VD.astype(dtype), "VD")
    return jnp.where(here_BT[..., None], rounded_VD[local_BT], 0)


def _lookup_forward(weights, dtype, embed_VD, local_BT, here_BT):
    x_BTD = _lookup(weights, dtype, embed_VD, local_BT, here_BT)
    return x_BTD, (embed_VD[:, :0], local_BT, here_BT)


def _lookup_backward(weights, dtype, residuals, d_BTD):
    empty_V0, local_BT, here_BT = residuals
    d_BTD = jnp.where(here_BT[..., None], d_BTD, 0).astype(empty_V0.dtype)
    d_VD = jnp.zeros((empty_V0.shape[0], d_BTD.shape[-1]), d_BTD.dtype).at[local_BT].add(d_BTD)
    return weights.scatter(d_VD, "VD"), None, None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def spread(parameter, x):
    """Repeats a bias or a scale, whose axes are x's last, for every token of x.

    Repeated, then rounded: backwards the tokens' gradients are widened, then summed.
    """
    return jnp.broadcast_to(parameter, x.shape).astype(x.dtype)


def product(project, spec, x, w, weights: Weights = WHOLE):
    """Multiplies by a weight matrix: project(spec, x, w), an einsum."""
    if x.dtype == w.dtype:
        return project(spec, x, weights.gather(w, _letters(spec)[1]))
    return _rounded_product(project, spec, weights, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _rounded_product(project, spec, weights, x, w):
    return project(spec, x, weights.gather(w.astype(x.dtype), _letters(spec)[1]))


def _forward(project, spec, weights, x, w):
    return _rounded_product(project, spec, weights, x, w), (x, w)


def _backward(project, spec, weights, residuals, d_out):
    x, w = residuals
    x_axes, w_axes, out_axes = _letters(spec)
    rounded = weights.gather(w.astype(x.dtype), w_axes)
    d_x = jnp.einsum(f"{out_axes},{w_axes}->{x_axes}", d_out, rounded)
    d_w = jnp.einsum(f"{x_axes},{out_axes}->{w_axes}", x, d_out, preferred_element_type=w.dtype)
    return d_x, weights.scatter(d_w, w_axes)


_rounded_product.defvjp(_forward, _backward)


def _letters(spec):
    return re.split(",|->", spec)
