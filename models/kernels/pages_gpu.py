"""Pallas kernels for GPU that write and copy pages of key/value pools in place.

Axis letters: those of `pages_tpu`.
"""

import jax
from jax.experimental import pallas as pl

from models.kernels import triton


def write_pages(k_PKHC, v_PKCH, k_BKHS, v_BKSH, page_B, offset_B, *, interpret: bool):
    """Writes the S tokens of each slot's block into its page, from its offset on.

    S divides C and the offsets, and is a power of two. Pages that several slots name get the
    tokens of any of them. Returns the pools, which take the place of those given.
    """
    S = v_BKSH.shape[2]

    def kernel(page_ref, offset_ref, k_new_ref, v_new_ref, _k, _v, k_ref, v_ref):
        h, b = pl.program_id(0), pl.program_id(1)
        page, where = page_ref[b], pl.ds(pl.multiple_of(offset_ref[b], S), S)
        k_ref[page, h, :, where] = k_new_ref[b, h]
        v_ref[page, h, where, :] = v_new_ref[b, h]

    pools = (k_PKHC, v_PKCH)
    return _in_place(
        kernel,
        page_B,
        offset_B,
        k_BKHS,
        v_BKSH,
        pools=pools,
        name="write_pages",
        interpret=interpret,
    )


def copy_pages(pool, source_pool, page_M, source_page_M, *, interpret: bool):
    """Copies M pages of one pool of keys and values into another one's place; returns the latter.

    No page may be both read and written. Pages that are written more than once get any of what is
    written.
    """

    def kernel(page_ref, source_page_ref, k_source_ref, v_source_ref, _k, _v, k_ref, v_ref):
        h, m = pl.program_id(0), pl.program_id(1)
        page, source_page = page_ref[m], source_page_ref[m]
        k_ref[page, h] = k_source_ref[source_page, h]
        v_ref[page, h] = v_source_ref[source_page, h]

    numbers = (page_M, source_page_M)
    return _in_place(
        kernel, *numbers, *source_pool, pools=pool, name="copy_pages", interpret=interpret
    )


def _in_place(kernel, *arrays, pools, name: str, interpret: bool):
    """Runs a program for each head and number in the first array; returns the pools, written."""
    outputs = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, manual_axis_type=jax.typeof(a).manual_axis_type)
        for a in pools
    ]
    return triton.call(
        kernel,
        *arrays,
        *pools,
        grid=(pools[0].shape[1], len(arrays[0])),
        out_shape=outputs,
        name=name,
        interpret=interpret,
        aliases={len(arrays) + i: i for i in range(len(pools))},
    )
