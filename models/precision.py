"""Rounds each array once, where a product with a weight matrix reads it.

Activations are float32 between products. A product rounds both factors to the compute dtype and
gives float32, as the units that multiply do inside. Parameters are float32 in the learner and
already rounded in the sampler; both compute with the same numbers. A parameter's gradient has its
own dtype: it is a sum over all tokens, and in bfloat16 a row of the embedding that many of them
look up stops growing after a few hundred. It is summed over devices in that dtype too, since these
add up what the operation itself gives.
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
    """Says what weights are rounded to and where they are; without more, theirs, and here, whole.

    gather(w, letters) brings a rounded matrix together whose axis "D" is split, and scatter(d_w,
    letters) adds up the gradients of all who used it and leaves each its part: a transpose of the
    other. Both are collectives inside shard_map.
    """

    gather: Callable[[Any, str], Any] = lambda w, letters: w
    scatter: Callable[[Any, str], Any] = lambda d_w, letters: d_w
    dtype: Any = None

    def dtype_of(self, w):
        """Returns the dtype to multiply w in."""
        return jnp.dtype(self.dtype or w.dtype)


WHOLE = Weights()


def lookup(embed_VD, tokens_BT, first_id, weights: Weights = WHOLE):
    """Looks up tokens' embeddings, float32 x_BTD; 0 for a token that is not among the rows.

    first_id: the token of the first row.
    """
    local_BT = tokens_BT - first_id
    here_BT = (local_BT >= 0) & (local_BT < embed_VD.shape[0])
    return _lookup(weights, embed_VD, local_BT, here_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(weights, embed_VD, local_BT, here_BT):
    rounded_VD = weights.gather(embed_VD.astype(weights.dtype_of(embed_VD)), "VD")
    return jnp.where(here_BT[..., None], rounded_VD[local_BT], 0).astype(jnp.float32)


def _lookup_forward(weights, embed_VD, local_BT, here_BT):
    return _lookup(weights, embed_VD, local_BT, here_BT), (embed_VD[:, :0], local_BT, here_BT)


def _lookup_backward(weights, residuals, d_BTD):
    empty_V0, local_BT, here_BT = residuals
    d_BTD = jnp.where(here_BT[..., None], d_BTD, 0).astype(empty_V0.dtype)
    d_VD = jnp.zeros((empty_V0.shape[0], d_BTD.shape[-1]), d_BTD.dtype).at[local_BT].add(d_BTD)
    return weights.scatter(d_VD, "VD"), None, None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def rounded(parameter, dtype):
    """Rounds a bias or a scale to a dtype, in its own; the gradient passes as it is."""
    kind = jnp.finfo(dtype)
    if kind.nmant >= jnp.finfo(parameter.dtype).nmant:
        return parameter
    # A cast and a cast back may be left out by XLA.
    nearest = jax.lax.reduce_precision(parameter, kind.nexp, kind.nmant)
    return parameter + jax.lax.stop_gradient(nearest - parameter)


def unfused(x):
    """Returns finite numbers as they are, float32, rounded before anything is added to them.

    A CPU's compiler fuses a product or quotient with a sum in one program and not in another, which
    leaves out a rounding. This maximum it keeps.
    """
    return jnp.maximum(x, jnp.finfo(jnp.float32).min)


def einsum(spec, x, w, **options):
    """Multiplies as jnp.einsum does, with adjacent axes that are summed over as one.

    jnp.einsum would sum over them in the order of their letters, for which w is copied first.
    """
    x_axes, w_axes, _ = _letters(spec)
    summed = "".join(axis for axis in w_axes if axis in x_axes)

    def merged(array, axes):
        at = axes.index(summed)
        return array.reshape(*array.shape[:at], -1, *array.shape[at + len(summed) :])

    operands = merged(x, x_axes), merged(w, w_axes)
    return jnp.einsum(spec.replace(summed, summed[0]), *operands, **options)


def product(project, spec, x, w, weights: Weights = WHOLE):
    """Multiplies by a weight matrix, float32: project(spec, x, w), an einsum, of both rounded."""
    x = x.astype(jnp.float32)
    if weights.dtype_of(w) == w.dtype == x.dtype:
        return project(spec, x, weights.gather(w, _letters(spec)[1]))
    return _rounded_product(project, spec, weights, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _rounded_product(project, spec, weights, x, w):
    return _forward(project, spec, weights, x, w)[0]


def _forward(project, spec, weights, x, w):
    dtype = weights.dtype_of(w)
    x, whole = x.astype(dtype), weights.gather(w.astype(dtype), _letters(spec)[1])
    return project(spec, x, whole, preferred_element_type=jnp.float32), (x, w)


def _backward(project, spec, weights, residuals, d_out):
    x, w = residuals
    x_axes, w_axes, out_axes = _letters(spec)
    whole, d_out = weights.gather(w.astype(x.dtype), w_axes), d_out.astype(x.dtype)
    times = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    d_x = times(f"{out_axes},{w_axes}->{x_axes}", d_out, whole)
    d_w = times(f"{x_axes},{out_axes}->{w_axes}", x, d_out).astype(w.dtype)
    return d_x, weights.scatter(d_w, w_axes)


_rounded_product.defvjp(_forward, _backward)


GROUPED_ROWS = 64  # of a grouped product, at least


def grouped_product(x_PI, w_EIO, rows_E, letters: str, weights: Weights = WHOLE):
    """Multiplies rows by the matrix of their group, float32: the first rows_E[0] by w_EIO[0], ...

    Rows behind the last group give 0. letters: the axes of w. All is rounded as in `product`.
    """
    return _grouped(letters, weights, x_PI, w_EIO, rows_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped(letters, weights, x, w, rows_E):
    return _grouped_forward(letters, weights, x, w, rows_E)[0]


def _grouped_forward(letters, weights, x, w, rows_E):
    dtype = weights.dtype_of(w)
    whole = weights.gather(w.astype(dtype), letters)
    return _ragged(x.astype(dtype), whole, rows_E), (x, w, rows_E)


def _grouped_backward(letters, weights, residuals, d_out):
    x, w, rows_E = residuals
    dtype = weights.dtype_of(w)
    whole, d_out = weights.gather(w.astype(dtype), letters), d_out.astype(dtype)
    d_x = _ragged(d_out, whole.swapaxes(1, 2), rows_E).astype(x.dtype)
    of_groups = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    d_w = jax.lax.ragged_dot_general(
        x.astype(dtype), d_out, rows_E, of_groups, preferred_element_type=jnp.float32
    )
    return d_x, weights.scatter(d_w.astype(w.dtype), letters), None


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _ragged(x, w, rows_E):
    # Fewer rows have another order of sums on a CPU.
    padded = jnp.pad(x, ((0, max(0, GROUPED_ROWS - len(x))), (0, 0)))
    out = jax.lax.ragged_dot(padded, w, rows_E, preferred_element_type=jnp.float32)[: len(x)]
    # What a kernel leaves behind the last group is not said to be 0.
    return jnp.where((jnp.arange(len(x)) < jnp.sum(rows_E))[:, None], out, 0.0)


def low_rank_product(spec, x, a, b, weights: Weights = WHOLE):
    """Multiplies by A, then by B, float32; spec: of a product with the matrix A B."""
    x_axes, w_axes, out_axes = _letters(spec)
    kept, out = (re.sub(f"[{of}]", "", axes) for of, axes in ((w_axes, x_axes), (x_axes, w_axes)))
    summed = re.sub(f"[{kept}]", "", x_axes)
    if a.shape[-1] == 1:  # a CPU adds up one column in an order that depends on the rows
        a, b = (jnp.append(w, jnp.zeros_like(w), i) for w, i in ((a, -1), (b, 0)))
    h = product(einsum, f"{x_axes},{summed}R->{kept}R", x, a, weights)
    return product(einsum, f"{kept}R,R{out}->{out_axes}", h, b, weights)


def _letters(spec):
    return re.split(",|->", spec)
