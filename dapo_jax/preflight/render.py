"""Prints findings: the memory of a device in each phase, and the verdict."""

import jax

from dapo_jax.preflight.chips import GIB
from dapo_jax.preflight.examine import PARTS, WANTED_HEADROOM, Findings

ADVICE = (
    "Set learner.remat to offload, lower learner.micro_batch_rows, learner.row_tokens, "
    "learner.row_lengths or rollout.cache_mib, raise mesh.model, or take a larger topology; "
    "--suggest proposes settings"
)


def lines(found: Findings) -> list[str]:
    """Returns the mesh, the sampler's slots, each phase's memory, the verdict and the advice."""
    built = found.built
    mesh = ", ".join(f"{axis} {size}" for axis, size in built.mesh.shape.items())
    cache = built.engine.cache
    out = [
        f"{found.recipe} on {found.where}: {found.chips} chips, mesh {mesh}",
        f"a data shard has {cache.slots} slots and {cache.pages} pages",
        "",
        f"{'GiB a device':22}{''.join(f'{name:>{len(name) + 3}}' for name in PARTS)}   in all",
    ]
    for phase in found.phases:
        sizes = (f"{phase.parts.get(name, 0) / GIB:{len(name) + 3}.2f}" for name in PARTS)
        out.append(f"{phase.name:22}{''.join(sizes)}{phase.total / GIB:9.2f}")
    hbm_gib = found.chip.hbm_bytes / GIB
    out += [
        f"of {hbm_gib:.2f} GiB: {found.headroom:.1%} free in {found.fullest.name}",
        f"preflight took {found.seconds:.0f} s with JAX {jax.__version__}",
    ]
    if found.headroom < WANTED_HEADROOM:
        out.append(f"less than {WANTED_HEADROOM:.0%} is free: {found.advice}")
    return [*out, "it fits" if found.headroom >= 0 else "it does not fit"]
