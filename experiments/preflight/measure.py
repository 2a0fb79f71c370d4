"""Measures a recipe's programs on the devices of this host, and shows an estimate beside them.

    python -m experiments.preflight.measure --config=configs/qwen2_5_0_5b.py [--estimated=FILE.json]

Weights are random, of the recipe's preset, and so are prompts: nothing is downloaded. FILE.json is
what experiments.preflight.estimate --json=FILE.json writes for the same recipe and devices. Prints
a table to paste into an issue. Contexts are short, so keys and values cost little; the estimate is
without attention's kernels.
"""

import functools
import json
import pathlib
import time
import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from absl import flags

from dapo_jax.preflight.compile import decode_name, update_name, without_weights
from dapo_jax.run import build, checks, command, fit
from dapo_jax.run.recipe import define_config
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.types import Group, Prompt
from experiments.benchmarks import common
from experiments.preflight.estimate.render import between
from sharding import hosts

REPEATS = 3  # after one more; the best counts
BLOCKS = 4  # of decoding


class Measured(NamedTuple):
    """The best seconds of a program, or with `turns` of one of so many turns of its loop.

    A turn is a decode step or a micro-batch, with its part of what runs once beside the loop.
    """

    seconds: float
    turns: int | None = None


def measure(built: build.Programs, say: Callable[[str], None]) -> dict[str, Measured]:
    """Runs the programs with random weights and prompts."""
    config, engine, vocab_size = built.config, built.engine, built.sizes.vocab_size
    ids = types.SimpleNamespace(stop_ids=(vocab_size - 1,), pad_id=0, vocab_size=vocab_size)
    stream = Stream(build.key(config, build.ROLLOUT_STREAM), build.sampling(config, ids))
    say("compiling")
    update = built.compile_update()
    engine.compile(stream.sampling)
    state, start_weights = built.start_state(), built.load_start_weights()
    params = built.reshard(state.params, start_weights)
    best = functools.partial(common.best_seconds, repeats=REPEATS)
    reshard = functools.partial(built.reshard, state.params, start_weights)
    found = {"reshard": Measured(best(reshard))}

    prompt_pages = engine.new_pages()[0]
    for bucket in engine.cache.prompt_buckets:
        say(f"prefill of {bucket} pages a prompt")
        rows = engine.shards * engine.cache.prefill_rows(bucket)
        tokens_RT = np.ones((rows, bucket * engine.cache.page_tokens), np.int32)
        page_RI = np.zeros((rows, bucket), np.int32)  # cache.NULL_PAGE

        def prefill(tokens_RT=tokens_RT, page_RI=page_RI):
            nonlocal prompt_pages
            prompt_pages = engine.prefill(params, prompt_pages, tokens_RT, page_RI)
            return prompt_pages

        found[f"prefill[{bucket}]"] = Measured(best(prefill))
    del prompt_pages

    for rows in sorted({rows for rows, _ in engine.sizes}):
        say(f"decoding of {rows} rows")
        slots = engine.shards * min(rows, engine.cache.slots)
        groups, seconds = sampled(Session(engine, params, stream), built, slots)
        name = decode_name(rows, engine.sizes[-1][0])
        found[name] = Measured(seconds, config.rollout.block_tokens)
    params = reshard = None  # an update has the memory to itself

    say("updates")
    count = config.rollout.num_prompts // config.updates_per_step
    advantage_PG = np.random.default_rng(0).normal(size=(count, config.rollout.group_size))
    some = [groups[i % len(groups)] for i in range(count)]
    batch = built.minibatch(some, advantage_PG.astype(np.float32))

    def one_update():
        nonlocal state
        state, metrics = update(state, start_weights, batch, np.float32(1e-6))
        return metrics

    turns = int(hosts.fetch(batch.num_micro))
    name = update_name(batch.tokens_BT.shape[-1], config)
    return found | {name: Measured(best(one_update) / turns, turns)}


def sampled(session: Session, built: build.Programs, slots: int) -> tuple[list[Group], float]:
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


def table(found: Mapping[str, Measured], estimated: Mapping | None) -> str:
    """Makes the table of milliseconds, with the estimate and the ratio where there is one."""
    rows = []
    for program, (seconds, turns) in found.items():
        of_program = (estimated or {"programs": {}})["programs"].get(program)
        ends = of_program["seconds"]["fixed"] if of_program else ()
        if of_program and turns:
            of_turn = of_program["seconds"]["turn"]
            ends = [turn + once / turns for turn, once in zip(of_turn, ends, strict=True)]
        rows.append(
            [
                f"a turn of {program}" if turns else program,
                f"{1e3 * seconds:.2f}",
                between([1e3 * end for end in ends], ".2f") if ends else "-",
                between([seconds / end for end in ends], ".2f") if ends else "-",
            ]
        )
    return common.table(["program", "measured, ms", "estimated, ms", "ratio"], rows)


def main(_):
    start, given = time.perf_counter(), flags.FLAGS
    config = without_weights(given.config)
    hosts.start(several=False, cpu_devices=config.mesh.cpu_devices)
    checks.check(config)
    for line in fit.fit_training(config):
        print(line)
    built = build.programs(config, build.model_sizes(config).vocab_size)
    checks.check_divides(config, built.mesh)
    estimated = json.loads(pathlib.Path(given.estimated).read_text()) if given.estimated else None
    found = measure(built, lambda line: print(line, flush=True))
    where = f"{common.machine()}, mesh {dict(built.mesh.shape)}, commit {common.commit()}"
    recipe, seconds = given["config"].config_filename, time.perf_counter() - start
    print(f"\n{recipe} on {where}; {seconds:.0f} s\n{table(found, estimated)}")


if __name__ == "__main__":
    define_config()
    flags.DEFINE_string("estimated", None, "A file of experiments.preflight.estimate --json.")
    command.run(main)
