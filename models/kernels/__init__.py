"""The table of which kernels run on which platform: the only place that chooses them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax

from models.kernels import (
    cpu,
    flash_gpu,
    flash_tpu,
    packed,
    paged_gpu,
    paged_tpu,
    pages_tpu,
    triton,
    xla,
)
from models.kernels.pages_tpu import LANES
from models.precision import einsum


@dataclasses.dataclass(frozen=True, eq=False)
class Kernels:
    """Holds what differs between kinds of hardware in how a model is computed.

    attend_rows(q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT, position_BT=None, window=None) ->
    out_BTNH attends inside packed rows, as `packed.packed_attention` does; shares_prompts says
    whether several responses may stand there behind one prompt, and prompts and responses begin at
    multiples of part_multiple tokens. attend_pages is `paged_tpu`'s or `paged_gpu`'s, with its last
    argument given, or None where plain XLA attends to pages and writes them in a loop; write_pages
    and copy_pages are `pages_tpu`'s or `xla`'s. page_tokens(tokens, head size) rounds a page to
    what they take. learn_product and sample_product are einsums with a weight matrix. With
    unrolls_layers the learner unrolls its layers instead of scanning them, where it recomputes
    nothing. wide_options are the compiler's for the sampler's programs that run many tokens at
    once, update_options for the update. platform is the one that can run all this; None: any.
    """

    attend_rows: Callable
    sample_product: Callable
    learn_product: Callable = einsum
    shares_prompts: bool = True
    part_multiple: int = 1
    attend_pages: Callable | None = None
    write_pages: Callable | None = None
    copy_pages: Callable = xla.copy_pages
    page_tokens: Callable[[int, int], int] = lambda C, H: C
    unrolls_layers: bool = False
    wide_options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    update_options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    platform: str | None = None

    def of_pages(self, page_tokens: int) -> "Kernels":
        """Has attention in rows add up as that over pages does."""
        return dataclasses.replace(
            self,
            attend_rows=functools.partial(self.attend_rows, tile_tokens=page_tokens),
            part_multiple=page_tokens if self.part_multiple > 1 else 1,
        )


# Weights and activations are gathered behind products, as MaxText asks for on these chips. Without
# them the core waits for all exchanges (experiments/preflight).
ASYNCHRONOUS = dict.fromkeys(
    (
        "xla_enable_async_all_gather",
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "xla_tpu_overlap_compute_collective_tc",
    ),
    True,
)


# For every program on a platform, whatever its kernels. A GPU adds up in any order otherwise: two
# equal runs differed from their first update on. It takes 2 to 4 % of the time on an H200.
OPTIONS = {"gpu": {"xla_gpu_deterministic_ops": True}, "cpu": cpu.OPTIONS}


def _tiles(mib: int) -> dict[str, object]:
    """Asks for larger tiles of products: of so many MiB in place of 16, or of what a chip has.

    Products of many rows take fewer cycles, those of few rows more.
    """
    return {"xla_tpu_scoped_vmem_limit_kib": str(mib * 1024)}


def _tpu(*, interpret: bool) -> Kernels:
    return Kernels(
        attend_rows=functools.partial(flash_tpu.flash_attention, interpret=interpret),
        shares_prompts=False,
        part_multiple=LANES,
        attend_pages=functools.partial(paged_tpu.paged_attention, interpret=interpret),
        write_pages=functools.partial(pages_tpu.write_pages, interpret=interpret),
        copy_pages=functools.partial(pages_tpu.copy_pages, interpret=interpret),
        page_tokens=lambda C, H: C if interpret or H % LANES == 0 else C + -C % LANES,
        # A CPU's product where a CPU interprets the kernels: so its rows keep their bits.
        sample_product=cpu.of_matrices if interpret else einsum,
        wide_options={} if interpret else _tiles(32),
        update_options={} if interpret else ASYNCHRONOUS | _tiles(48),
        platform="cpu" if interpret else "tpu",
    )


def _gpu(*, interpret: bool) -> Kernels:
    return Kernels(
        attend_rows=functools.partial(flash_gpu.flash_attention, interpret=interpret),
        attend_pages=functools.partial(paged_gpu.paged_attention, interpret=interpret),
        write_pages=xla.write_pages,
        page_tokens=lambda C, H: C if interpret else triton.padded(C),
        sample_product=cpu.of_matrices if interpret else einsum,  # as in `_tpu`
        platform="cpu" if interpret else "gpu",
    )


XLA = Kernels(
    attend_rows=packed.packed_attention,
    sample_product=cpu.of_matrices,
    page_tokens=cpu.page_tokens,
)
KERNELS = {
    "cpu": dataclasses.replace(
        XLA,
        learn_product=cpu.small_side_transposed,
        unrolls_layers=True,  # a loop copies the weights of each layer
        platform="cpu",
    ),
    "gpu": _gpu(interpret=False),
    "gpu_interpret": _gpu(interpret=True),  # a GPU's programs, slowly
    "tpu": _tpu(interpret=False),
    "tpu_interpret": _tpu(interpret=True),  # the pod's programs, slowly
    "xla": XLA,
}


def kernels_for(name: str, platform: str) -> Kernels:
    """Gives the kernels that `model.kernels = name` chooses; "auto": the platform's own.

    A platform that the table does not have gets plain XLA. Raises ValueError for an unknown name,
    and for kernels that the platform cannot run.
    """
    if name == "auto":
        return KERNELS.get(platform, XLA)
    if name not in KERNELS:
        raise ValueError(
            f"model.kernels = {name!r} is unknown; choose one of {', '.join(('auto', *KERNELS))}"
        )
    kernels = KERNELS[name]
    if kernels.platform not in (None, platform):
        able = [other for other, row in KERNELS.items() if row.platform in (None, platform)]
        raise ValueError(
            f"model.kernels = {name!r} runs on {kernels.platform} only, but the devices are "
            f"{platform}; choose one of {', '.join(('auto', *able))}"
        )
    return kernels


def platform_of(mesh: jax.sharding.Mesh) -> str:
    """Names the platform of a mesh's devices: "cpu", "gpu", "tpu", or what else there may be."""
    return mesh.devices.flat[0].platform
