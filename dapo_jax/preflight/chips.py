"""TPU chips by generation: memory, rates, and their names for the compiler.

https://docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, read in November 2026.
"""

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device of JAX's, with published rates a second in bytes and FLOP (bfloat16).

    hbm_bytes: the memory that a program may use. description: further arguments of the compiler's
    description of a slice.
    """

    name: str
    hbm_bytes: float
    hbm_rate: float
    flop_rate: float
    devices_per_chip: int = 1
    description: tuple[tuple[str, str], ...] = ()


MEGACORE = (("chip_config_name", "megacore"),)  # v4's two cores are one device
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 31.75 * GIB, 1_200e9, 275e12, description=MEGACORE),
        Chip("v5e", 15.75 * GIB, 819e9, 197e12),
        Chip("v5p", 95.0 * GIB, 2_765e9, 459e12),
        Chip("v6e", 31.25 * GIB, 1_638e9, 918e12),
        Chip("tpu7x", 94.75 * GIB, 3_690e9, 1_153e12, devices_per_chip=2),
    )
}


def chip_of(topology: str) -> Chip:
    """Returns the chip of a topology such as "v5p:8x8x4". ValueError for an unknown generation."""
    name = topology.partition(":")[0]
    if name not in CHIPS:
        raise ValueError(f"--topology={topology}: there are {', '.join(CHIPS)}, as in v5p:8x8x4")
    return CHIPS[name]
