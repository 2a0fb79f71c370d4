"""What a TPU chip has, by generation, and which links a slice of them closes to rings.

https://docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, read in November 2026; rates of
single links and closed rings: https://jax-ml.github.io/scaling-book/tpus.
"""

import dataclasses
from collections.abc import Sequence

GIB = 2**30
CUBE = 4  # chips along an axis, in steps of which v4, v5p and tpu7x are put together


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device of JAX's; bytes and FLOP (bfloat16) a second.

    hbm_bytes: what a program may use, a little less than there is. clock: of the cycles that the
    compiler estimates. link_rate: of one link to a neighbour, one direction. dcn_rate: between
    slices. closes_at: an axis of a slice is a ring where it has so many chips or a multiple.
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
    """The chips of a topology such as "v5p:8x8x4". ValueError for an unknown generation."""
    name = topology.partition(":")[0]
    name = {"7x": "tpu7x", "v7x": "tpu7x"}.get(name, name)
    if name not in CHIPS:
        raise ValueError(f"--topology={topology}: there are {', '.join(CHIPS)}, as in v5p:8x8x4")
    return CHIPS[name]


def ring_rates(
    chip: Chip, shape: Sequence[int], coordinates: Sequence[Sequence[int]]
) -> list[float]:
    """The rates at which a group of devices passes data around, one for each axis that it spans.

    shape: of the slice, in chips. coordinates: of the group's devices. Where the group fills an
    axis that is a ring, both directions are used; elsewhere it is a line, and the way back takes
    the other direction. Devices of one chip only: between its two cores.
    """
    cubes = [n % CUBE == 0 for n in shape]
    rates = []
    for axis, length in enumerate(shape):
        spanned = len({where[axis] for where in coordinates})
        if spanned > 1:
            is_ring = length % chip.closes_at == 0 and (chip.closes_at > CUBE or all(cubes))
            closes = spanned == length and is_ring
            rates.append(chip.link_rate * (2 if closes else 1))
    return rates or [2 * chip.link_rate]
