"""TPU chips by generation: memory, rates, links, and their names for the compiler.

https://docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, read in November 2026; rates of
single links and closed rings: https://jax-ml.github.io/scaling-book/tpus.
"""

import dataclasses

GIB = 2**30
CUBE = 4  # chips along each axis of the cubes that v4, v5p and tpu7x slices are made of


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device of JAX's, with published rates a second in bytes and FLOP (bfloat16).

    hbm_bytes: the memory that a program may use. clock: the cycles a second of the compiler's
    estimates. link_rate: of one link to a neighbour, one direction. dcn_rate: between slices.
    closes_at: an axis of a slice is a ring if its chips are a multiple of this.
    """

    name: str
    hbm_bytes: float
    hbm_rate: float
    flop_rate: float
    clock: float
    link_rate: float
    dcn_rate: float
    closes_at: int
    devices_per_chip: int = 1
    # Further arguments of the compiler's description of a slice.
    description: tuple[tuple[str, str], ...] = ()


CHIPS = {
    chip.name: chip
    for chip in (
        # v4's two cores are one device; its share of the network is not published, v5e's is taken.
        Chip(
            "v4",
            hbm_bytes=31.75 * GIB,
            hbm_rate=1_200e9,
            flop_rate=275e12,
            clock=1.05e9,
            link_rate=45e9,
            dcn_rate=25e9 / 8,
            closes_at=CUBE,
            description=(("chip_config_name", "megacore"),),
        ),
        Chip(
            "v5e",
            hbm_bytes=15.75 * GIB,
            hbm_rate=819e9,
            flop_rate=197e12,
            clock=1.5e9,
            link_rate=50e9,
            dcn_rate=25e9 / 8,
            closes_at=16,
        ),
        Chip(
            "v5p",
            hbm_bytes=95.0 * GIB,
            hbm_rate=2_765e9,
            flop_rate=459e12,
            clock=1.75e9,
            link_rate=100e9,
            dcn_rate=50e9 / 8,
            closes_at=CUBE,
        ),
        Chip(
            "v6e",
            hbm_bytes=31.25 * GIB,
            hbm_rate=1_638e9,
            flop_rate=918e12,
            clock=1.75e9,
            link_rate=100e9,
            dcn_rate=100e9 / 8,
            closes_at=16,
        ),
        # The two devices of a chip share its links.
        Chip(
            "tpu7x",
            hbm_bytes=94.75 * GIB,
            hbm_rate=3_690e9,
            flop_rate=1_153e12,
            clock=2.2e9,
            link_rate=50e9,
            dcn_rate=50e9 / 8,
            closes_at=CUBE,
            devices_per_chip=2,
        ),
    )
}


def chip_of(topology: str) -> Chip:
    """Returns the chip of a topology such as "v5p:8x8x4". ValueError for an unknown generation."""
    name = topology.partition(":")[0]
    name = {"7x": "tpu7x", "v7x": "tpu7x"}.get(name, name)
    if name not in CHIPS:
        raise ValueError(f"--topology={topology}: there are {', '.join(CHIPS)}, as in v5p:8x8x4")
    return CHIPS[name]
