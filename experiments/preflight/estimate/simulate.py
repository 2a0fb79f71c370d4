"""Estimates the seconds of one RL step as a range, from the costs of programs and response lengths.

A program's core takes the cycles that the TPU's compiler estimates. The rest is added: exchanges
between devices, reads of keys and values, attention's kernel in the learner. Their rates are
assumed, as a range: `FAST` and `SLOW`. The assumptions were fixed by published measurements
(experiments/preflight/README.md), and stay when the programs change.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from configs.base import eval_settings
from dapo_jax.preflight.chips import CUBE, Chip
from dapo_jax.preflight.compile import decode_name, mean_prompt, update_name
from dapo_jax.preflight.examine import parameter_count
from dapo_jax.run import build
from dapo_jax.sampler.engine import COPIES, token_bytes
from dapo_jax.sampler.sampling import truncated_sizes
from experiments.preflight.estimate.attention import attention_seconds, micro_batches
from experiments.preflight.estimate.hlo_cost import Collective, Cost, ProgramCost
from experiments.preflight.estimate.rollouts import (
    Rollout,
    response_lengths,
    simulate_carrying,
    simulate_rollout,
)
from sharding import rules

PROBLEMS_A_SET = 30  # of an evaluation set, as AIME 2024 has
STEP_PARTS = ("prefill", "rollout", "reshard", "update", "evaluation", "save")  # fields of Step
COLLECTIVE_SECONDS = 10e-6  # from the start of an exchange to its first bytes


@dataclasses.dataclass(frozen=True)
class Assumed:
    """Assumed rates and shares, one end of the range.

    cycles, update_cycles: the core's, over the compiler's estimate, in sampling and in the update.
    hidden: the share of asynchronous exchanges that runs behind the core. rings: over all axes of
    the torus that a group spans at once, or over one after the other. links, pages, kernels: the
    shares of the published rates that links, reads of pages of keys and values, and the products of
    attention's kernel reach. slot_seconds: of a decoding kernel for each slot, beside the bytes of
    its pages; by the TPU compiler's schedule some 660 bundles for a slot of one block of pages, 470
    for each further one. informative: of the groups that are sampled (the paper's Figure 3b).
    block_seconds: of the host, for a block of decode steps. save_rate: of a device's state to its
    host, bytes a second.
    """

    cycles: float
    update_cycles: float
    hidden: float
    rings: Callable[[Sequence[float]], float]
    links: float
    pages: float
    kernels: float
    slot_seconds: float
    informative: float
    block_seconds: float
    save_rate: float


FAST = Assumed(
    cycles=1.0,
    update_cycles=1.0,
    hidden=1.0,
    rings=sum,
    links=0.9,
    pages=0.8,
    kernels=0.6,
    slot_seconds=0.2e-6,
    informative=0.5,
    block_seconds=0.005,
    save_rate=4e9,
)
SLOW = Assumed(
    cycles=1.5,
    update_cycles=1.1,
    hidden=0.0,
    rings=min,
    links=0.7,
    pages=0.4,
    kernels=0.3,
    slot_seconds=0.4e-6,
    informative=0.35,
    block_seconds=0.015,
    save_rate=0.5e9,
)
ENDS = (FAST, SLOW)


def ring_rates(
    chip: Chip, shape: Sequence[int], coordinates: Sequence[Sequence[int]]
) -> list[float]:
    """Returns the rates at which a group of devices passes data around, one an axis that it spans.

    shape: of the slice, in chips. coordinates: of the group's devices. Both directions are used
    where the group fills an axis that is a ring. Elsewhere it is a line, and the way back takes the
    other direction. Devices of one chip have the rate between its two cores.
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


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of chips, and the coordinates of the flattened mesh's devices in it.

    shape: in chips.
    """

    chip: Chip
    shape: tuple[int, ...]
    coordinates: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mesh: jax.sharding.Mesh, chip: Chip) -> "Slice":
        """Makes the slice of a mesh whose devices have coordinates."""
        coordinates = tuple(tuple(device.coords) for device in mesh.devices.flat)
        shape = tuple(1 + max(axis) - min(axis) for axis in zip(*coordinates, strict=True))
        return cls(chip, shape, coordinates)

    def rates(self, group: tuple[int, ...]) -> list[float]:
        """Returns `ring_rates` of a collective's group."""
        return ring_rates(self.chip, self.shape, [self.coordinates[n] for n in group])

    def exchange_seconds(self, collective: Collective, assumed: Assumed) -> float:
        """Returns the time of all executions of a collective."""
        size = collective.group_size
        others = (size - 1) / size
        if collective.groups:
            rates = self.rates(collective.groups[0])
            along = size ** (1 / len(rates))  # an axis; on the way to its place a part passes n / 4
            rounds = {
                "all-reduce": 2 * others,
                "all-to-all": max(others, along / 4),
                "collective-permute": float(others > 0),
            }
            share, rate = rounds.get(collective.kind, others), assumed.rings(rates)
        else:
            share, rate = 1.0, self.chip.dcn_rate
        moved = share * collective.bytes / (rate * assumed.links)
        return collective.times * (COLLECTIVE_SECONDS + moved)

    def seconds(self, cost: Cost, assumed: Assumed, *, kernels: float = 0.0) -> float:
        """Returns the time of a program whose kernels take so many seconds.

        Copies run behind the core, and share the memory with it.
        """
        waited, behind = (
            sum(self.exchange_seconds(c, assumed) for c in cost.collectives if c.waits == waits)
            for waits in (True, False)
        )
        core = cost.cycles * assumed.cycles / self.chip.clock + kernels
        core = max(core, cost.copied_bytes / self.chip.hbm_rate, assumed.hidden * behind)
        return core + waited + (1 - assumed.hidden) * behind


@dataclasses.dataclass(frozen=True)
class Step:
    """One simulated RL step at a mean response length; seconds.

    evaluation: its share of a step, as it comes every few steps. save: of the step's snapshot.
    """

    mean_response_tokens: int
    rollout: float
    prefill: float
    update: float
    reshard: float
    evaluation: float
    save: float
    sampled_tokens: int
    trained_tokens: int
    occupancy: float
    blocks: int
    micro_batches: int
    parameters: int
    flop_rate: float  # of all devices, published

    @property
    def total(self) -> float:
        return sum(getattr(self, part) for part in STEP_PARTS)

    @property
    def mfu_of_update(self) -> float:
        """6 FLOP a parameter and trained token, over the devices' FLOP in the time."""
        return 6 * self.parameters * self.trained_tokens / (self.update * self.flop_rate)


@dataclasses.dataclass(frozen=True)
class Simulator:
    """Simulates steps of one recipe on one slice, under one end of the assumptions.

    programs: name -> cost.
    """

    built: build.Programs
    programs: dict[str, ProgramCost]
    slice: Slice
    assumed: Assumed

    def step(self, mean: float) -> Step:
        """Simulates an RL step whose responses have a mean of so many tokens."""
        config, r = self.built.config, self.built.config.rollout
        share = self.assumed.informative if config.algo.dynamic_sampling else 1.0
        groups = math.ceil(r.num_prompts / share)
        length_PG = self.lengths(mean, groups=groups, group_size=r.group_size)
        rollout = self.carrying(length_PG) if r.carry_over_steps else self.rollout(length_PG)
        kept_PG, prompt = length_PG[: r.num_prompts], mean_prompt(config)
        updates = [
            micro_batches(
                update_PG,
                prompt_tokens=prompt,
                row_lengths=build.row_lengths(config),
                rows=config.learner.micro_batch_rows,
                share_prompts=self.built.learning.kernels.shares_prompts,
            )
            for update_PG in np.split(kept_PG, config.updates_per_step)
        ]
        return Step(
            mean_response_tokens=round(float(length_PG.mean())),
            rollout=rollout.seconds,
            prefill=self.prefill(rollout),
            update=sum(map(self.update, updates)),
            reshard=self.seconds("reshard"),
            evaluation=self.evaluation(mean, length_PG, rollout),
            save=self.save(),
            sampled_tokens=round(rollout.tokens),
            trained_tokens=int(kept_PG.sum()) + kept_PG.size * prompt,
            occupancy=rollout.occupancy,
            blocks=round(rollout.blocks),
            micro_batches=sum(map(len, updates)),
            parameters=parameter_count(self.built.sizes),
            flop_rate=self.built.mesh.size * self.slice.chip.flop_rate,
        )

    def lengths(self, mean: float, *, groups: int, group_size: int) -> np.ndarray:
        """Draws `response_lengths` up to the recipe's limit."""
        longest = self.built.config.rollout.max_response_tokens
        return response_lengths(mean, groups=groups, group_size=group_size, longest=longest, seed=0)

    def seconds(self, program: str) -> float:
        """Returns the time of a program without a dynamic loop."""
        return self.slice.seconds(self.programs[program].fixed, self.assumed)

    def rollout(self, length_PG, eval_PG: Sequence[Sequence[int]] = ()) -> Rollout:
        """Simulates the sampling of responses of these lengths with the recipe's cache.

        eval_PG: the lengths of an overlapped evaluation.
        """
        of_blocks = self.of_blocks()
        cache = self.built.engine.cache
        return simulate_rollout(length_PG.tolist(), cache, eval_PG=eval_PG, **of_blocks)

    def carrying(self, length_PG) -> Rollout:
        """Simulates the mean step with carry-over that needs as many groups complete."""
        config = self.built.config
        return simulate_carrying(
            length_PG.tolist(),
            self.built.engine.cache,
            groups=len(length_PG),
            every_steps=config.checkpoint.every_steps,
            carry_over_steps=config.rollout.carry_over_steps,
            refill_seconds=self.refill_seconds(),
            **self.of_blocks(),
        )

    def refill_seconds(self) -> float:
        """Returns the time of a call that computes partial responses again, of the longest one."""
        sizes, cache = self.built.sizes, self.built.engine.cache
        pages = cache.refill_buckets[-1]
        heads = sizes.num_heads / self.built.mesh.shape["model"] * sizes.num_layers
        pairs = (pages * cache.page_tokens) ** 2 / 2
        rate = self.slice.chip.flop_rate * self.assumed.kernels
        attention = 2 * 2 * pairs * sizes.head_dim * heads / rate
        program = self.programs[f"refill[{pages}]"].fixed
        return self.slice.seconds(program, self.assumed, kernels=attention)

    def of_blocks(self) -> dict:
        """Returns the times of blocks of decode steps, as `rollouts.Blocks` takes them."""
        built, assumed = self.built, self.assumed
        read = token_bytes(built.sizes, bytes_per_value=2, model_degree=built.mesh.shape["model"])
        pages_rate = self.slice.chip.hbm_rate * assumed.pages

        def step_seconds(live_D, occupied_D, *, turn, slot):
            return turn + live_D * read / pages_rate + occupied_D * slot

        all_rows = built.engine.sizes[-1][0]
        decodes = {
            rows: self.programs[decode_name(rows, all_rows)] for rows, _ in built.engine.sizes
        }

        @functools.cache
        def truncating_seconds(rows: int, slots: int) -> float:
            return self.truncating_seconds(decodes[rows], rows, slots)

        return {
            "shards": built.engine.shards,
            "prompt_tokens": mean_prompt(built.config),
            "step_seconds": {
                rows: functools.partial(
                    step_seconds,
                    turn=self.slice.seconds(self.training_turn(decode), assumed),
                    slot=self.slot_seconds(decode.turn),
                )
                for rows, decode in decodes.items()
            },
            "block_seconds": {
                rows: self.slice.seconds(decode.fixed, assumed)
                + assumed.block_seconds
                + rows * self.slot_seconds(decode.fixed)
                for rows, decode in decodes.items()
            },
            "copy_seconds": self.copy_seconds(),
            "eval_seconds": lambda rows, slots_D: np.array(
                [truncating_seconds(rows, slots) for slots in slots_D.tolist()]
            ),
        }

    def truncating_seconds(self, decode: ProgramCost, rows: int, slots: int) -> float:
        """Returns the time that a step takes longer if an evaluation has so many of its slots."""
        part = next(size for size in truncated_sizes(rows) if size >= slots) / rows
        if not part:
            return 0.0
        more = decode.turn - self.training_turn(decode)
        part_of = {"cycles": part * more.cycles, "copied_bytes": part * more.copied_bytes}
        return self.slice.seconds(dataclasses.replace(more, **part_of), self.assumed)

    def training_turn(self, decode: ProgramCost) -> Cost:
        """Returns the cost of a decode step without an evaluation."""
        r = self.built.config.rollout
        return decode.turn if r.top_p < 1 or r.top_k > 0 else decode.plain_turn

    def slot_seconds(self, cost: Cost) -> float:
        """Returns the time of a program's kernels for each slot, beside its bytes."""
        return sum(times for _, times in cost.kernels) * self.assumed.slot_seconds

    def copy_seconds(self) -> float:
        """Returns the time of a call that copies pages between shards; 0 for a single shard."""
        if "copy" not in self.programs:
            return 0.0
        kernels = COPIES * self.slot_seconds(self.programs["copy"].fixed)
        return self.seconds("copy") + kernels

    def prefill(self, rollout: Rollout) -> float:
        """Returns the time of a rollout's prefills, for prompts of mean length."""
        bucket = self.built.engine.cache.bucket(mean_prompt(self.built.config))
        return rollout.prefills * self.seconds(f"prefill[{bucket}]") if bucket else 0.0

    def update(self, segment_MBT) -> float:
        """Returns the time of an update of these micro-batches."""
        config, mesh = self.built.config, self.built.mesh
        program = self.programs[update_name(segment_MBT.shape[-1], config)]
        kernels_M = attention_seconds(
            segment_MBT,
            self.built.sizes,
            remat=config.learner.remat,
            row_degree=rules.row_degree(mesh),
            model_degree=mesh.shape["model"],
            flop_rate=self.slice.chip.flop_rate * self.assumed.kernels,
        )
        assumed = dataclasses.replace(self.assumed, cycles=self.assumed.update_cycles)
        turns = sum(
            self.slice.seconds(program.turn, assumed, kernels=k) for k in kernels_M.tolist()
        )
        return turns + self.slice.seconds(program.fixed, assumed)

    def evaluation(self, mean: float, length_PG, rollout: Rollout) -> float:
        """Returns the time that an overlapped evaluation adds, over the steps between two."""
        config = self.built.config
        if not config.eval.every_steps:
            return 0.0
        eval_PG: list[Sequence[int]] = []
        for settings in eval_settings(config).values():
            groups = settings["max_prompts"] or PROBLEMS_A_SET
            lengths = self.lengths(mean, groups=groups, group_size=settings["k"])
            eval_PG += lengths.tolist()
        if config.rollout.carry_over_steps:  # training goes on beside it
            share = sum(map(sum, eval_PG)) / rollout.tokens
            return share * rollout.seconds / config.eval.every_steps
        both = self.rollout(length_PG, eval_PG)
        longer = both.seconds + self.prefill(both) - rollout.seconds - self.prefill(rollout)
        return longer / config.eval.every_steps

    def save(self) -> float:
        """Returns the time in which snapshots leave the devices, for the host's memory, a step.

        With carry-over one is taken where a run can resume.
        """
        config = self.built.config
        state = 12 * parameter_count(self.built.sizes) / self.built.mesh.size
        steps = config.checkpoint.every_steps if config.rollout.carry_over_steps else 1
        return state / self.assumed.save_rate / steps
