"""Compiles a config for a topology, and adds up the bytes of a device in each phase."""

import dataclasses
import functools
import math

import jax
from ml_collections import ConfigDict

from dapo_jax.preflight.chips import GIB, Chip, chip_of
from dapo_jax.preflight.compile import (
    Program,
    any_tokenizer,
    compiled_programs,
    say,
    topology_devices,
    without_weights,
)
from dapo_jax.setup import auto_sizes, components, start
from dapo_jax.setup.dry_run import device_bytes, memory
from models.parameters import ModelConfig
from models.transformer import abstract_params

WANTED_HEADROOM = 0.10
UPDATES = ("update", "old_logprobs")  # the learner's programs
ADVICE = (
    "lower learner.micro_batch_rows, learner.row_tokens, learner.row_lengths or "
    "rollout.cache_mib, set learner.remat to offload, raise mesh.model, or take a larger topology"
)
PARTS = ("state", "start weights", "sampler's weights", "keys and values", "batch", "temporaries")


@dataclasses.dataclass(frozen=True)
class Phase:
    """The memory of a device while a program runs; parts: one of PARTS -> bytes."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class Findings:
    """A config's compiled programs on one topology, and the memory that they need."""

    title: str
    chip: Chip
    built: components.Programs
    phases: list[Phase]

    @property
    def chips(self) -> int:
        return self.built.mesh.size // self.chip.devices_per_chip

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def headroom(self) -> float:
        """The share of the memory that is free in the fullest phase."""
        return 1 - self.fullest.total / self.chip.hbm_bytes

    def lines(self) -> list[str]:
        """Returns the mesh, the slots, each phase's memory, the advice and the verdict."""
        mesh = ", ".join(f"{axis} {size}" for axis, size in self.built.mesh.shape.items())
        cache = self.built.engine.cache
        out = [
            f"{self.title}: {self.chips} chips, mesh {mesh}",
            f"a data shard has {cache.slots} slots and {cache.pages} pages (JAX {jax.__version__})",
            "",
            f"{'GiB a device':22}{''.join(f'{name:>{len(name) + 3}}' for name in PARTS)}   in all",
        ]
        for phase in self.phases:
            sizes = (f"{phase.parts.get(name, 0) / GIB:{len(name) + 3}.2f}" for name in PARTS)
            out.append(f"{phase.name:22}{''.join(sizes)}{phase.total / GIB:9.2f}")
        free = f"{self.headroom:.1%} free in {self.fullest.name}"
        out.append(f"of {self.chip.hbm_bytes / GIB:.2f} GiB: {free}")
        if self.headroom < WANTED_HEADROOM:
            over = self.fullest.total - (1 - WANTED_HEADROOM) * self.chip.hbm_bytes
            samples = self.fullest.name not in UPDATES
            advice = f"lower rollout.cache_mib by {math.ceil(over / 2**20)} or raise mesh.model"
            out.append(f"less than {WANTED_HEADROOM:.0%} is free: {advice if samples else ADVICE}")
        return [*out, "it fits" if self.headroom >= 0 else "it does not fit"]


def examine(config: ConfigDict, topology: str, *, config_name: str, slices: int | None) -> Findings:
    """Compiles all programs of a config for a topology, and adds up the memory.

    slices: None: the config's. Raises ValueError for settings that cannot work, DoesNotFit for a
    program that does not.
    """
    config, chip = without_weights(config), chip_of(topology)
    config.mesh.slices = slices = slices or config.mesh.slices
    title = f"{config_name} on {topology}" + (f" x {slices}" if slices > 1 else "")
    run = planned(config, topology_devices(topology, slices=slices), chip.hbm_bytes)
    for line in run.chosen:
        say(line)
    phases = memory_phases(run.programs, compiled_programs(run.programs))
    return Findings(title, chip, run.programs, phases)


def planned(config: ConfigDict, devices, device_bytes: int) -> start.Planned:
    """Plans what training would on these devices, without tokenizer and data."""

    def read(config):
        tokenizer = any_tokenizer(components.model_sizes(config).vocab_size)
        return tokenizer, components.load_data(config, tokenizer, training=False, evaluates=False)

    start.accept(config, "data.", "eval.", training=False)
    fit = functools.partial(auto_sizes.fit_training, devices=devices, device_bytes=device_bytes)
    return start.plan(config, read, fit, training=True, devices=devices)


def memory_phases(built: components.Programs, programs: dict[str, Program]) -> list[Phase]:
    """Adds up the memory of a device while each program runs.

    The parts of sampling are those of `train --dry_run`. The update's batch is the rest of the
    compiler's arguments; its gradients are among the temporaries.
    """
    sampling, updating = memory(built).values()
    kept = {name: size for name, size in sampling.items() if name in updating}
    phases = []
    for name, program in programs.items():
        parts = sampling
        if name in UPDATES:
            given = built.state if name == "update" else built.state.params
            batch = program.arguments - device_bytes((given, built.start_weights))
            parts = kept | {"batch": batch}
        elif name == "reshard":
            parts = kept | {"sampler's weights": sampling["sampler's weights"]}
        phases.append(Phase(name, parts | {"temporaries": program.temporaries}))
    return phases


def parameter_count(sizes: ModelConfig) -> int:
    """Returns the number of the whole model's parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(sizes)[1]))
