"""Pallas's Triton back end: all that is particular to it in our kernels for GPUs.

Triton and not Mosaic GPU, its successor: that has only the products of Hopper and Blackwell, so for
Ampere and Ada there is Triton or plain XLA. JAX 0.11 calls Triton deprecated and warns where it is
lowered; 0.12 still has it. When it goes, on Hopper `flash_gpu` can be cuDNN's packed layout without
shared prompts. Only `paged_gpu` would have to be written again: keys on the 64 rows of a wgmma, 5
to 8 queries on its 8 columns. That back end replaces this module, and in the kernels the slices of
references to global memory.

A kernel gets references to whole arrays in global memory and loads what it needs; sizes of what is
loaded are powers of two.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from models.kernels import tiles

ROWS = 16  # the fewest that a product takes
SPLIT_TOKENS = 512  # of one head, 128 to 256 KiB of keys and values in bfloat16
load, store = plgpu.load, plgpu.store  # where a mask is True


def padded(size: int) -> int:
    """Rounds a side of a product up to what Triton takes."""
    return max(ROWS, pl.next_power_of_2(size))


def call(
    kernel: Callable,
    *arrays,
    grid: tuple[int, ...],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    name: str,
    interpret: bool,
    warps: int = 4,
    stages: int = 1,
):
    """Runs a kernel over a grid, of which programs that differ in the last place run last.

    warps: of 32 threads a program. stages: iterations of a loop that are under way at once.
    """
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )(*arrays)


def split_tokens(page_tokens: int) -> int:
    """Counts the tokens of a prompt or response whose keys are added up by `add_tile`."""
    return max(page_tokens, SPLIT_TOKENS)


def add_tile(sums: tiles.Sums, x_QS, v_SH, *, interpret: bool) -> tiles.Sums:
    """Adds a tile of keys to the sums of those before it; x_QS: q k, -inf for a key that is unseen.

    Weights have the power of all tiles so far, which is the same wherever a split is added up.
    """
    to_base_2 = tiles.scale(v_SH.shape[1])
    power_Q = jnp.maximum(sums.power, jnp.ceil(x_QS.max(axis=1) * to_base_2))
    weight_QS = exp2(x_QS, to_base_2, -power_Q[:, None], interpret=interpret)
    less_Q = tiles.power_of_two(sums.power - power_Q)
    out_QH = sums.out * less_Q[:, None] + dot(weight_QS.astype(v_SH.dtype), v_SH)
    return tiles.Sums(out_QH, sums.sum * less_Q + weight_QS.sum(axis=1), power_Q)


def exp2(x, scale: float, shift, *, interpret: bool):
    """Computes 2 ** (x * scale + shift) by two instructions, for float32; shift is broadcast.

    The compiler's own exp2 takes four for results below 2 ** -126, and a product and a sum apart.
    """
    if interpret:  # the sum first: a CPU rounds a product that it adds to something, or does not
        return jnp.exp2((x + shift / scale) * scale)
    (power,) = plgpu.elementwise_inline_asm(
        "{ .reg .f32 t; fma.rn.f32 t, $1, $2, $3; ex2.approx.ftz.f32 $0, t; }",
        args=[x, jnp.full(x.shape, scale, x.dtype), jnp.broadcast_to(shift, x.shape)],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return power


def dot(a, b):
    """Multiplies two matrices, with sums in float32; float32 factors are not rounded to TF32."""
    return lax.dot_general(
        a,
        b,
        (((1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
