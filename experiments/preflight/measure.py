"""Measures a decode step and an update of a config on this host's devices, and their efficiency.

    python -m experiments.preflight.measure --config=configs/qwen2_5_0_5b.py [--topology=v5e:2x4]

Weights are random, of the config's preset, and so are prompts: nothing is downloaded. Prints a
table to paste into an issue and, with --topology, the --decode and --update that
experiments.preflight.estimate takes. Contexts are short, so keys and values cost little.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from absl import flags

from dapo_jax import learner
from dapo_jax.cli import command
from dapo_jax.cli.config_flags import define_config
from dapo_jax.preflight.chips import Chip, chip_of
from dapo_jax.preflight.compile import without_weights
from dapo_jax.setup import auto_sizes, checks, components
from experiments.benchmarks import common
from experiments.preflight.estimate import Device
from sharding import hosts

REPEATS = 3  # after one more; the best counts
BLOCKS = 4  # of decoding


class Measured(NamedTuple):
    """The best seconds of a decode step or a micro-batch, and those at the chip's published rates.

    Either has its part of what runs once beside the loop.
    """

    seconds: float
    least: float | None

    @property
    def efficiency(self) -> float | None:
        return self.least and self.least / self.seconds


def measure(built: components.Programs, chip: Chip | None) -> dict[str, Measured]:
    """Runs the programs with random weights and prompts: as many groups as there are slots for."""
    config, r, sizes, mesh = built.config, built.config.rollout, built.sizes, built.mesh
    device = chip and Device(chip, sizes, mesh.shape["model"], lora=config.learner.lora_rank > 0)
    update, start_weights = built.compile_update(), built.load_start_weights()
    state = built.start_state()
    slots = built.engine.shards * built.engine.cache.slots
    count = max(slots // r.group_size, 1)
    prompts = common.random_prompts(built, count, max(1, r.max_prompt_tokens // 2))
    tokens = min(BLOCKS * r.block_tokens, r.max_response_tokens)
    params = built.reshard(state.params, start_weights)
    groups, session, _ = common.sample(built, params, prompts, [[tokens] * r.group_size] * count)
    busy = [np.count_nonzero(block.useful_B) for block in session.blocks]
    decode = min(
        (block.end_seconds - block.start_seconds) / block.steps
        for block, count in zip(session.blocks, busy, strict=True)
        if count == max(busy)
    )
    params = session = None  # an update has the memory to itself
    sequence = prompts.shape[1] - 1 + tokens  # what the learner computes of each
    rows = max(busy) // built.engine.shards
    least_decode = chip and device.decode_seconds(rows, rows * sequence)

    count = r.num_prompts // config.updates_per_step
    advantage_PG = np.random.default_rng(0).normal(size=(count, r.group_size)).astype(np.float32)
    some = [groups[i % len(groups)] for i in range(count)]
    batch = learner.minibatch(some, advantage_PG, built.learning, built.mesh)

    def one_update():
        nonlocal state
        state, metrics = update(state, start_weights, batch, np.float32(1e-6))
        return metrics

    num_micro, row_tokens = int(hosts.fetch(batch.num_micro)), batch.tokens_BT.shape[-1]
    seconds = common.best_seconds(one_update, repeats=REPEATS) / num_micro
    entries = num_micro * config.learner.micro_batch_rows * row_tokens
    sequence_N = np.full(count * r.group_size, sequence)
    least = chip and device.update_seconds(entries, sequence_N, mesh.size) / num_micro
    return {"decode": Measured(decode, least_decode), "update": Measured(seconds, least)}


def table(found: Mapping[str, Measured]) -> str:
    """Makes the table of milliseconds."""
    rows = [
        [
            name,
            f"{1e3 * it.seconds:.2f}",
            *([f"{1e3 * it.least:.2f}", f"{it.efficiency:.2f}"] if it.least else ["-", "-"]),
        ]
        for name, it in found.items()
    ]
    return common.table(["a turn of", "measured, ms", "at published rates, ms", "share"], rows)


def main(_):
    start, given = time.perf_counter(), flags.FLAGS
    config, chip = without_weights(given.config), given.topology and chip_of(given.topology)
    hosts.start(several=False, cpu_devices=config.mesh.cpu_devices)
    checks.check(config)
    auto_sizes.fit_training(config)
    print(f"learner: {config.learner.to_dict()}\nrollout: {config.rollout.to_dict()}")
    built = components.programs(config, components.model_sizes(config).vocab_size)
    checks.check_divides(config, built.mesh)
    found = measure(built, chip)
    where = f"{common.machine()}, mesh {dict(built.mesh.shape)}, commit {common.commit()}"
    config_name, seconds = given["config"].config_filename, time.perf_counter() - start
    print(f"\n{config_name} on {where}; {seconds:.0f} s\n{table(found)}")
    if chip:
        print(*(f"--{name}={it.efficiency:.2g}" for name, it in found.items()))


if __name__ == "__main__":
    define_config()
    flags.DEFINE_string("topology", None, "What these devices are: v5e:2x4.")
    command.run(main)
