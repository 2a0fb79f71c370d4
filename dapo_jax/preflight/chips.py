"""What a TPU chip has, by generation, as Google's pages on each of them publish it.

https://docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, read in November 2026.
"""

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device of JAX's; bytes and FLOP (bfloat16) a second.

    hbm_bytes: what a program may use, a little less than there is. ici: over the two links of one
    axis of the torus, one direction each. dcn: between slices.
    """

    name: str
    hbm_bytes: float
    hbm_rate: float
    flop_rate: float
    ici_rate: float
    dcn_rate: float
    devices_per_chip: int = 1
    # Further arguments of the compiler's description of a slice.
    description: tuple[tuple[str, str], ...] = ()


CHIPS = {
    chip.name: chip
    for chip in (
        # v4's two cores are one device; its share of the network is not published, v5e's is taken.
        Chip(
            "v4",
            31.75 * GIB,
            1_228e9,
            275e12,
            100e9,
            25e9 / 8,
            description=(("chip_config_name", "megacore"),),
        ),
        Chip("v5e", 15.75 * GIB, 819e9, 197e12, 100e9, 25e9 / 8),
        Chip("v5p", 95.0 * GIB, 2_765e9, 459e12, 200e9, 50e9 / 8),
        Chip("v6e", 31.25 * GIB, 1_638e9, 918e12, 200e9, 100e9 / 8),
        Chip("tpu7x", 94.75 * GIB, 3_690e9, 1_153e12, 200e9, 50e9 / 8, devices_per_chip=2),
    )
}


def chip_of(topology: str) -> Chip:
    """The chips of a topology such as "v5p:8x8x4". ValueError for an unknown generation."""
    name = topology.partition(":")[0]
    name = {"7x": "tpu7x", "v7x": "tpu7x"}.get(name, name)
    if name not in CHIPS:
        raise ValueError(f"--topology={topology}: there are {', '.join(CHIPS)}, as in v5p:8x8x4")
    return CHIPS[name]
