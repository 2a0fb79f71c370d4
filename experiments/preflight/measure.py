"""Measures decode steps and an update of a config on this host's devices, and their efficiency.

    python -m experiments.preflight.measure --config=configs/qwen2_5_0_5b.py [--topology=v5e:2x4]

Weights are random, of the config's preset, and so are prompts: nothing is downloaded. Prints a
table to paste into an issue and, with --topology, the --efficiency=DECODE,UPDATE that
experiments.preflight.estimate takes. Contexts are short, so keys and values cost little.
"""

import time
import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from absl import flags

from dapo_jax import learner
from dapo_jax.cli import command
from dapo_jax.cli.config_flags import define_config
from dapo_jax.preflight.chips import Chip, chip_of
from dapo_jax.preflight.compile import decode_name, update_name, without_weights
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.setup import auto_sizes, checks, components
from dapo_jax.types import Group, Prompt
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


def measure(
    built: components.Programs, chip: Chip | None, say: Callable[[str], None]
) -> dict[str, Measured]:
    """Runs the programs with random weights and prompts."""
    config, engine, sizes, mesh = built.config, built.engine, built.sizes, built.mesh
    device = chip and Device(chip, sizes, mesh.shape["model"], lora=config.learner.lora_rank > 0)
    vocab_size = sizes.vocab_size
    ids = types.SimpleNamespace(stop_ids=(vocab_size - 1,), pad_id=0, vocab_size=vocab_size)
    stream = Stream(
        components.key(config, components.ROLLOUT_STREAM), components.sampling(config, ids)
    )
    say("compiling")
    update = built.compile_update()
    engine.compile(stream.sampling)
    state, start_weights = built.start_state(), built.load_start_weights()
    params, found = built.reshard(state.params, start_weights), {}
    for rows in sorted({rows for rows, _ in engine.sizes}):
        say(f"decoding of {rows} rows")
        slots = min(rows, engine.cache.slots)
        groups, seconds = sampled(Session(engine, params, stream), built, engine.shards * slots)
        live_tokens = slots * np.concatenate(list(map(sequences, groups))).mean()
        least = chip and device.decode_seconds(rows, live_tokens)
        found[decode_name(rows, engine.sizes[-1][0])] = Measured(seconds, least)
    params = None  # an update has the memory to itself

    say("updates")
    count = config.rollout.num_prompts // config.updates_per_step
    advantage_PG = np.random.default_rng(0).normal(size=(count, config.rollout.group_size))
    some = [groups[i % len(groups)] for i in range(count)]
    batch = learner.minibatch(some, advantage_PG.astype(np.float32), built.learning, mesh)

    def one_update():
        nonlocal state
        state, metrics = update(state, start_weights, batch, np.float32(1e-6))
        return metrics

    num_micro, row_tokens = int(hosts.fetch(batch.num_micro)), batch.tokens_BT.shape[-1]
    entries = num_micro * config.learner.micro_batch_rows * row_tokens
    sequence_N = np.concatenate(list(map(sequences, some)))
    least = chip and device.update_seconds(entries, sequence_N, mesh.size) / num_micro
    seconds = common.best_seconds(one_update, repeats=REPEATS) / num_micro
    return found | {update_name(row_tokens, config): Measured(seconds, least)}


def sequences(group: Group) -> np.ndarray:
    """Returns the tokens that the learner computes of the prompt with each response."""
    return len(group.prompt.token_ids) - 1 + group.length_G


def sampled(session: Session, built: components.Programs, slots: int) -> tuple[list[Group], float]:
    """Samples for so many slots: (groups, the best seconds of a decode step while all are busy)."""
    r, rng = built.config.rollout, np.random.default_rng(0)
    tokens = min(BLOCKS * r.block_tokens, r.max_response_tokens)
    prompt_tokens = max(1, r.max_prompt_tokens // 2)
    for cursor in range(-(-slots // r.group_size)):
        prompt = Prompt(rng.integers(1, built.sizes.vocab_size, prompt_tokens).astype(np.int32))
        size = min(r.group_size, slots - cursor * r.group_size)
        session.submit(cursor, prompt, group_size=size, max_tokens=[tokens] * size)
    groups = []
    while session.unfinished:
        groups += session.step()
    busy = [np.count_nonzero(block.useful_B) for block in session.blocks]
    seconds = min(
        (block.end_seconds - block.start_seconds) / block.steps
        for block, count in zip(session.blocks, busy, strict=True)
        if count == max(busy)
    )
    return [group for group in groups if len(group.responses) == r.group_size], seconds


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
    for line in auto_sizes.fit_training(config):
        print(line)
    built = components.programs(config, components.model_sizes(config).vocab_size)
    checks.check_divides(config, built.mesh)
    found = measure(built, chip, lambda line: print(line, flush=True))
    where = f"{common.machine()}, mesh {dict(built.mesh.shape)}, commit {common.commit()}"
    recipe, seconds = given["config"].config_filename, time.perf_counter() - start
    print(f"\n{recipe} on {where}; {seconds:.0f} s\n{table(found)}")
    if chip:
        decode, update = list(found.values())[-2:]
        print(f"--efficiency={decode.efficiency:.2f},{update.efficiency:.2f}")


if __name__ == "__main__":
    define_config()
    flags.DEFINE_string("topology", None, "What these devices are: v5e:2x4.")
    command.run(main)
