"""Compiles a config for a topology, and adds up the bytes of a device in each phase."""

import dataclasses
import functools
import math

import jax
from ml_collections import ConfigDict

from dapo_jax.preflight.chips import GIB, Chip, chip_of
from dapo_jax.preflight.compile import (
    any_tokenizer,
    compiled_programs,
    say,
    topology_devices,
    without_weights,
)
from dapo_jax.setup import auto_sizes, components, memory, start
from dapo_jax.setup.memory import device_bytes

WANTED_HEADROOM = 0.10
UPDATES = ("update", "old_logp")  # the learner's programs
ADVICE = (
    "lower learner.micro_batch_rows, learner.row_tokens, learner.row_lengths or "
    "rollout.cache_mib, set learner.remat to offload, raise mesh.model, or take a larger topology"
)


@dataclasses.dataclass(frozen=True)
class Findings:
    """A config's compiled programs on one topology, and the memory that they need.

    phases: as of `memory_phases`. calls: a program's name -> our kernels, collectives, bytes that
    these exchange.
    """

    chip: Chip
    built: components.Programs
    phases: dict[str, dict[str, int]]
    calls: dict[str, tuple[int, int, int]]

    @property
    def chips(self) -> int:
        return self.built.mesh.size // self.chip.devices_per_chip

    @property
    def totals(self) -> dict[str, int]:
        """The bytes of each phase."""
        return {name: sum(parts.values()) for name, parts in self.phases.items()}

    @property
    def headroom(self) -> float:
        """The share of the memory that is free in the fullest phase."""
        return 1 - max(self.totals.values()) / self.chip.hbm_bytes

    def lines(self) -> list[str]:
        """Returns the mesh, the slots, each phase's memory and calls, advice and the verdict."""
        mesh = ", ".join(f"{axis} {size}" for axis, size in self.built.mesh.shape.items())
        cache = self.built.engine.cache
        out = [
            f"{self.chips} chips of {self.chip.name}, mesh {mesh}",
            f"a data shard has {cache.slots} slots and {cache.pages} pages (JAX {jax.__version__})",
            "memory of a device while a program runs, GiB:",
            *memory.lines(self.phases, GIB),
            "called on a device, of a loop of micro-batches or decode steps one turn:",
        ]
        for name, (kernels, collectives, size) in self.calls.items():
            exchanged = f"{collectives:,} collectives exchange {size / GIB:.3f} GiB"
            out.append(f"{name:22}{kernels} kernels of ours; {exchanged}")
        fullest = max(self.totals, key=self.totals.get)
        size = self.chip.hbm_bytes / GIB
        out.append(f"of {size:.2f} GiB: {self.headroom:.1%} free in {fullest}")
        if self.headroom < WANTED_HEADROOM:
            over = (WANTED_HEADROOM - self.headroom) * self.chip.hbm_bytes
            advice = f"lower rollout.cache_mib by {math.ceil(over / 2**20)} or raise mesh.model"
            advice = ADVICE if fullest in UPDATES else advice
            out.append(f"less than {WANTED_HEADROOM:.0%} is free: {advice}")
        return [*out, "it fits" if self.headroom >= 0 else "it does not fit"]


def examine(config: ConfigDict, topology: str, *, slices: int | None) -> Findings:
    """Compiles a config's largest programs for a topology, and adds up the memory.

    slices: None: the config's. Raises ValueError for settings that cannot work, MemoryError for a
    program that does not fit.
    """
    config, chip = without_weights(config), chip_of(topology)
    config.mesh.slices = slices = slices or config.mesh.slices
    run = planned(config, topology_devices(topology, slices=slices), chip.hbm_bytes)
    for line in run.chosen:
        say(line)
    programs = compiled_programs(run.programs)
    calls = {name: program[1:] for name, program in programs.items()}
    return Findings(chip, run.programs, memory_phases(run.programs, programs), calls)


def planned(config: ConfigDict, devices, device_bytes: int) -> start.Planned:
    """Plans what training would on these devices, without tokenizer and data."""

    def read(config):
        tokenizer = any_tokenizer(components.model_sizes(config).vocab_size)
        return tokenizer, components.load_data(config, tokenizer, training=False, evaluates=False)

    start.accept_and_fetch(config, "data.", "eval.", training=False)
    fit = functools.partial(auto_sizes.fit_training, devices=devices, device_bytes=device_bytes)
    return start.plan(config, read, fit, training=True, devices=devices)


def memory_phases(built: components.Programs, programs: dict) -> dict[str, dict[str, int]]:
    """Returns name of a program -> what a device holds while it runs -> bytes.

    programs: as `compiled_programs` returns them. The update's batch is the rest of the compiler's
    arguments; its gradients are among the temporaries.
    """
    held, phases = memory.phases(built), {}
    for name, (program, *_) in programs.items():
        parts = held.get("update" if name in UPDATES else name, held["rollout"])
        if name in UPDATES:
            given = built.state if name == "update" else built.state.params
            batch = program.argument_size_in_bytes - device_bytes((given, built.start_weights))
            parts = parts | {"gradients": 0, "batch": batch}
        phases[name] = parts | {"temporaries": program.temp_size_in_bytes}
    return phases
