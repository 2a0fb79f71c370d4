r"""One order of sums for attention, so that the sampler and the learner get the same bits.

What a query gives is sum_s 2^x_s v_s / sum_s 2^x_s over the keys s that it sees, with
x_s = log2(e) q k_s / sqrt(H). In floating point the order of such a sum changes its last digits.
So there is one:

* Keys lie in tiles of C tokens, which begin where a prompt or a response begins. In the cache a
  tile is a page, in a packed row it is wherever its tokens are.
* A tile gives two sums, of 2^(x_s - power) v_s and 2^(x_s - power), added up one key after the
  other. Its power is its largest x, rounded up to a whole number.
* Tiles are added in their order. Sums of another power are scaled by a whole power of two, which is
  exact: it changes no digit, whichever of the two is scaled, fused with the addition or not.

A platform says what a tile is and in which order its keys are added up: the same for both sides.
The GPU's is a split of 512 tokens or a page (`flash_gpu`).

A key that a query does not see has weight 0, which changes no sum. So tiles may be computed with
other keys between theirs, and with other queries beside.

Axis letters: M queries that look at a tile, C its keys, H head size.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: a query with nothing to attend to gives a uniform softmax, never NaN
LEAST = -1e29  # the power of no key: above MASKED, so that what is not seen has weight 0
FEWEST_KEYS = 16  # of a product; with JAX 0.12 fewer have another order of sums
LEAST_POWER = -127  # of float32's numbers, and below


class Sums(NamedTuple):
    """The two sums of keys, in units of 2^power: float32 out_MH, sum_M; power_M."""

    out: jax.Array
    sum: jax.Array
    power: jax.Array


def scale(head_dim: int) -> float:
    """Gives what makes a product q k the power of two of a weight, x: log2(e) / sqrt(H)."""
    return math.log2(math.e) * head_dim**-0.5


def scaled(q):
    """Makes queries of which a product with a key is x: float32."""
    return q.astype(jnp.float32) * scale(q.shape[-1])


def tile(q_MH, k_HC, v_CH, seen_MC) -> Sums:
    """Computes what one tile gives `scaled` queries; all may have more axes before the last two.

    Weights are rounded to the values' dtype before their product. Products are float32 of float32,
    which XLA for CPUs adds up one term after the other (with `cpu.OPTIONS`).
    """
    multiple = FEWEST_KEYS if k_HC.shape[-1] < FEWEST_KEYS else 1
    k_HC, v_CH = padded(k_HC, multiple, axis=-1), padded(v_CH, multiple, axis=-2)
    seen_MC = padded(seen_MC, multiple, axis=-1)
    x_MC = _product(q_MH, k_HC.astype(jnp.float32))
    x_MC = jnp.where(seen_MC, x_MC, MASKED)
    power_M = jnp.ceil(_largest(x_MC))
    weight_MC = jnp.where(seen_MC, jnp.exp2(x_MC - power_M[..., None]), 0.0)
    # By a product, since XLA adds up more than 32 terms by halves. One column has an order of its
    # own.
    sum_M = _product(weight_MC, jnp.ones((weight_MC.shape[-1], 2)))[..., 0]
    rounded_MC = weight_MC.astype(v_CH.dtype).astype(jnp.float32)
    return Sums(_product(rounded_MC, v_CH.astype(jnp.float32)), sum_M, power_M)


def nothing(shape: tuple[int, ...], head_dim: int) -> Sums:
    """Makes the sums of no key."""
    return Sums(jnp.zeros((*shape, head_dim)), jnp.zeros(shape), jnp.full(shape, MASKED))


def add(one: Sums, other: Sums) -> Sums:
    """Adds the sums of different keys."""
    power = jnp.maximum(one.power, other.power)
    a, b = power_of_two(one.power - power), power_of_two(other.power - power)
    out = one.out * a[..., None] + other.out * b[..., None]
    return Sums(out, one.sum * a + other.sum * b, power)


def attended(sums: Sums):
    """Divides: what the queries give, float32; 0 for one that has seen nothing."""
    return sums.out / jnp.where(sums.sum > 0, sums.sum, 1.0)[..., None]


def power_of_two(n):
    """Returns 2^n for whole numbers n of at most 127, exactly; 0 below float32's normal numbers."""
    exponent = jnp.maximum(n, LEAST_POWER).astype(jnp.int32) + 127
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)


def padded(array, multiple: int, *, axis: int):
    """Pads an axis with zeros to a multiple."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % multiple)
    return jnp.pad(array, widths)


def _product(a, b):
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _largest(x_MC):
    # XLA for CPUs takes the maximum of more than 32 by windows, which takes longer.
    while x_MC.shape[-1] > 32:
        half = -(-x_MC.shape[-1] // 2)
        x_MC = jnp.maximum(x_MC[..., :half], x_MC[..., -half:])
    return jnp.max(jax.lax.optimization_barrier(x_MC), axis=-1)
