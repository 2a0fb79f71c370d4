"""Pools of key/value pages on a TPU: their layout, and Pallas kernels that write and copy pages.

Axis letters: B slots, K key/value heads, H head size, C tokens of a page, P pages of a pool, S
tokens that a slot writes, M pages that are copied.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.kernels.xla import like

LANES = 128


def token_axes(page_tokens: int, head_size: int) -> tuple[int, int]:
    """The axis (0, 1) along which a stored page of one head has its tokens: keys', values'.

    XLA stores a page the other way round where that alone fills the lanes.
    """
    C, H = page_tokens, head_size
    return (0 if C % LANES and H % LANES == 0 else 1, 1 if H % LANES and C % LANES == 0 else 0)


def as_stored(k_PKHC, v_PKCH, axes: tuple[int, int]):
    """Transposes pools from one layout to the other and back; of the whole pools nothing moves.

    axes: `token_axes`. New tokens for the pools are transposed in the same way.
    """
    k_token_axis, v_token_axis = axes
    return (
        k_PKHC if k_token_axis == 1 else k_PKHC.swapaxes(2, 3),
        v_PKCH if v_token_axis == 0 else v_PKCH.swapaxes(2, 3),
    )


def write_pages(k_PKHC, v_PKCH, k_BKHS, v_BKSH, page_B, offset_B, *, interpret: bool):
    """Writes the S tokens of each slot's block into its page, from its offset on.

    S divides C and the offsets. Pages that several slots name get the tokens of any of them.
    Returns the pools, which take the place of those given. A loop of slice updates in XLA takes 2
    microseconds a slot and pool; here the next slot's page is read while one is written.
    """
    axes = token_axes(*v_PKCH.shape[2:])
    pools, new = as_stored(k_PKHC, v_PKCH, axes), as_stored(k_BKHS, v_BKSH, axes)

    def of_slot(a):
        return pl.BlockSpec((1, *a.shape[1:]), lambda b, *_: (b, 0, 0, 0))

    def of_page(a):
        return pl.BlockSpec((1, *a.shape[1:]), lambda b, page_ref, _: (page_ref[b], 0, 0, 0))

    written = pl.pallas_call(
        functools.partial(_write_kernel, token_axes=axes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(len(page_B),),
            in_specs=[*map(of_slot, new), *map(of_page, pools)],
            out_specs=[*map(of_page, pools)],
        ),
        out_shape=[*map(like, pools)],
        input_output_aliases={4: 0, 5: 1},
        interpret=interpret,
        name="write_pages",
    )(page_B, offset_B, *new, *pools)
    return as_stored(*written, axes)


def _write_kernel(
    _, offset_ref, k_new_ref, v_new_ref, k_in_ref, v_in_ref, k_out_ref, v_out_ref, *, token_axes
):
    """Copies a page, with the new tokens in place of those from the offset on."""
    offset = offset_ref[pl.program_id(0)]
    for new_ref, in_ref, out_ref, token_axis in (
        (k_new_ref, k_in_ref, k_out_ref, token_axes[0]),
        (v_new_ref, v_in_ref, v_out_ref, token_axes[1]),
    ):
        new, old = new_ref[...], in_ref[...]
        axis, tokens = 2 + token_axis, new.shape[2 + token_axis]
        everywhere = jnp.concatenate([new] * (old.shape[axis] // tokens), axis=axis)
        token = lax.broadcasted_iota(jnp.int32, old.shape, axis)
        is_new = (token >= offset) & (token < offset + tokens)
        out_ref[...] = jnp.where(is_new, everywhere, old)


def copy_pages(pool, source_pool, page_M, source_page_M, *, interpret: bool):
    """Copies M pages of one pool of keys and values into another one's place; returns the latter.

    No page may be both read and written. Pages that are written more than once get any of what is
    written. A loop of slice updates in XLA takes 3 microseconds a page and array.
    """
    axes = token_axes(*pool[1].shape[2:])
    pools, sources = as_stored(*pool, axes), as_stored(*source_pool, axes)

    def of_page(a, number):
        return pl.BlockSpec((1, *a.shape[1:]), lambda m, *pages: (pages[number][m], 0, 0, 0))

    copied = pl.pallas_call(
        _copy_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(len(page_M),),
            in_specs=[
                *[of_page(a, 1) for a in sources],
                *[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
            ],
            out_specs=[of_page(a, 0) for a in pools],
        ),
        out_shape=[*map(like, pools)],
        input_output_aliases={4: 0, 5: 1},
        interpret=interpret,
        name="copy_pages",
    )(page_M, source_page_M, *sources, *pools)
    return as_stored(*copied, axes)


def _copy_kernel(_page, _source_page, k_in_ref, v_in_ref, _k, _v, k_out_ref, v_out_ref):
    k_out_ref[...], v_out_ref[...] = k_in_ref[...], v_in_ref[...]
