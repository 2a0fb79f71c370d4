"""A Pallas kernel for GPU that writes to pages of key/value pools in place.

Axis letters: those of `pages_tpu`.
"""

from jax.experimental import pallas as pl

from models.kernels import triton
from models.kernels.xla import like


def write_pages(k_PKHC, v_PKCH, k_BKHS, v_BKSH, page_B, offset_B, *, interpret: bool):
    """Writes the S tokens of each slot's block into its page, from its offset on.

    S divides C and the offsets, and is a power of two. Pages that several slots name get the
    tokens of any of them. Returns the pools, which take the place of those given.
    """
    _, K, S, _ = v_BKSH.shape

    def kernel(page_ref, offset_ref, k_new_ref, v_new_ref, _k, _v, k_ref, v_ref):
        h, b = pl.program_id(0), pl.program_id(1)
        page, where = page_ref[b], pl.ds(pl.multiple_of(offset_ref[b], S), S)
        k_ref[page, h, :, where] = k_new_ref[b, h]
        v_ref[page, h, where, :] = v_new_ref[b, h]

    return triton.call(
        kernel,
        *(page_B, offset_B, k_BKHS, v_BKSH, k_PKHC, v_PKCH),
        grid=(K, len(page_B)),
        out_shape=[like(k_PKHC), like(v_PKCH)],
        name="write_pages",
        interpret=interpret,
        aliases={4: 0, 5: 1},
    )
