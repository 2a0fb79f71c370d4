"""TPU chips and GPUs: memory, rates, and what the compiler has to know of them.

https://docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x} and NVIDIA's data sheets, read in
November 2026.
"""

import dataclasses
import os
import re

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device of JAX's, with published rates a second in bytes and FLOP (bfloat16).

    hbm_bytes: the memory that a program may use; in CHIPS a GPU's has all that CUDA tells of.
    description: further arguments of the compiler's description of a slice. gpu: what JAX calls it,
    compute capability, the shared memory that a block may ask for in bytes, and multiprocessors.
    link_rate: to the others of a node, one way; 0: exchanges are left out.
    """

    name: str
    hbm_bytes: float
    hbm_rate: float
    flop_rate: float
    devices_per_chip: int = 1
    description: tuple[tuple[str, str], ...] = ()
    gpu: tuple[str, int, int, int, int] | tuple[()] = ()
    link_rate: float = 0.0


HOPPER, AMPERE, ADA = (9, 0, 232_448, 132), (8, 0, 166_912, 108), (8, 9, 101_376, 128)
MEGACORE = (("chip_config_name", "megacore"),)  # v4's two cores are one device
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 31.75 * GIB, 1_200e9, 275e12, description=MEGACORE),
        Chip("v5e", 15.75 * GIB, 819e9, 197e12),
        Chip("v5p", 95.0 * GIB, 2_765e9, 459e12),
        Chip("v6e", 31.25 * GIB, 1_638e9, 918e12),
        Chip("tpu7x", 94.75 * GIB, 3_690e9, 1_153e12, devices_per_chip=2),
        Chip("h100", 79.1 * GIB, 3_350e9, 989e12, gpu=("NVIDIA H100", *HOPPER), link_rate=450e9),
        Chip("h200", 139.8 * GIB, 4_800e9, 989e12, gpu=("NVIDIA H200", *HOPPER), link_rate=450e9),
        Chip("h800", 79.1 * GIB, 3_350e9, 989e12, gpu=("NVIDIA H800", *HOPPER), link_rate=200e9),
        Chip("a100", 79.1 * GIB, 2_039e9, 312e12, gpu=("NVIDIA A100", *AMPERE), link_rate=300e9),
        Chip("a100-40", 39.4 * GIB, 1_555e9, 312e12, gpu=("NVIDIA A100", *AMPERE), link_rate=300e9),
        Chip("rtx4090", 23.5 * GIB, 1_008e9, 165e12, gpu=("RTX 4090", *ADA), link_rate=32e9),
    )
}


def chip_of(topology: str) -> Chip:
    """Returns the chip of a topology such as "v5p:8x8x4", with what JAX takes of its memory.

    Raises ValueError for an unknown one.
    """
    name, _, count = topology.partition(":")
    if name not in CHIPS:
        raise ValueError(f"--topology={topology}: there are {', '.join(CHIPS)}, as in v5p:8x8x4")
    if CHIPS[name].gpu and not re.fullmatch("[1-9][0-9]*", count):
        raise ValueError(f"--topology={topology}: give the number of GPUs, as in {name}:8")
    share = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75 if CHIPS[name].gpu else 1
    return dataclasses.replace(CHIPS[name], hbm_bytes=float(share) * CHIPS[name].hbm_bytes)
