"""Measures a recipe's programs on the devices that are there, and shows an estimate beside them.

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

import numpy as np
from absl import flags

from dapo_jax.preflight.compile import decode_name, without_weights
from dapo_jax.run import build, checks, command, fit
from dapo_jax.run.recipe import define_config
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.types import Group, Prompt
from experiments.benchmarks import common
from experiments.preflight.estimate.render import between
from sharding import hosts

REPEATS = 3  # after one more; the best counts
BLOCKS = 4  # of decoding, of which the first is not counted


def measure(built: build.Programs, say: Callable[[str], None]) -> dict[tuple[str, str], float]:
    """Runs the programs: (program, "fixed" for a whole one or "turn" of its loop) -> best seconds.

    A turn is a decode step, or a micro-batch of the update with its part of the optimizer's step.
    """
    config, engine, vocab_size = built.config, built.engine, built.sizes.vocab_size
    ids = types.SimpleNamespace(stop_ids=(vocab_size - 1,), pad_id=0, vocab_size=vocab_size)
    stream = Stream(build.key(config, build.ROLLOUT_STREAM), build.sampling(config, ids))
    say("compiling")
    update = built.compile_update()
    engine.compile(stream.sampling)
    state, start_weights = built.start_state(), built.load_start_weights()
    params = built.reshard(state.params, start_weights)
    best = functools.partial(common.best_seconds, repeats=REPEATS)
    found = {("reshard", "fixed"): best(lambda: built.reshard(state.params, start_weights))}

    prompt_pages, _ = engine.new_pages()
    for bucket in engine.cache.prompt_buckets:
        say(f"prefill of {bucket} pages a prompt")
        rows = engine.shards * engine.cache.prefill_rows(bucket)
        tokens_RT = np.ones((rows, bucket * engine.cache.page_tokens), np.int32)
        page_RI = np.zeros((rows, bucket), np.int32)  # cache.NULL_PAGE

        def prefill(tokens_RT=tokens_RT, page_RI=page_RI):
            nonlocal prompt_pages
            prompt_pages = engine.prefill(params, prompt_pages, tokens_RT, page_RI)
            return prompt_pages

        found[f"prefill[{bucket}]", "fixed"] = best(prefill)
    del prompt_pages

    for rows in sorted({rows for rows, _ in engine.sizes}):
        say(f"decoding of {rows} rows")
        session = Session(engine, params, stream)
        groups = sampled(session, built, engine.shards * min(rows, engine.cache.slots))
        of_steps = [
            (block.end_seconds - block.start_seconds) / block.decode_steps
            for block in session.blocks[1:]
        ]
        found[decode_name(rows, engine.sizes[-1][0]), "turn"] = min(of_steps)

    say("updates")
    count = config.rollout.num_prompts // config.updates_per_step
    advantage_PG = np.random.default_rng(0).normal(size=(count, config.rollout.group_size))
    some = [groups[i % len(groups)] for i in range(count)]
    batch = built.minibatch(some, advantage_PG.astype(np.float32))

    def one_update():
        nonlocal state
        state, metrics = update(state, start_weights, batch, np.float32(1e-6))
        return metrics

    found["update", "turn"] = best(one_update) / int(hosts.fetch(batch.num_micro))
    return found


def sampled(session: Session, built: build.Programs, slots: int) -> list[Group]:
    """Samples BLOCKS blocks for so many slots, in groups of the recipe's size."""
    r, rng = built.config.rollout, np.random.default_rng(0)
    tokens = min(BLOCKS * r.block_tokens, r.max_response_tokens)
    prompt_tokens = max(1, r.max_prompt_tokens // 2)
    for cursor in range(-(-slots // r.group_size)):
        prompt = Prompt(rng.integers(1, built.sizes.vocab_size, prompt_tokens).astype(np.int32))
        limits = [tokens] * r.group_size
        session.submit(cursor, prompt, group_size=r.group_size, max_tokens=limits)
    groups = []
    while session.unfinished:
        groups += session.step()
    return groups


def table(found: Mapping[tuple[str, str], float], estimated: Mapping | None) -> str:
    """Makes the table of milliseconds, with the estimate and the ratio where there is one."""
    rows = []
    for (program, part), seconds in found.items():
        ends = ((estimated or {}).get("programs", {}).get(program) or {}).get("seconds", {})
        ends = ends.get(part)
        rows.append(
            [
                f"{'a turn of ' if part == 'turn' else ''}{program}",
                f"{1e3 * seconds:.2f}",
                between([1e3 * end for end in ends], ".2f") if ends else "-",
                between([seconds / end for end in ends], ".2f") if ends else "-",
            ]
        )
    return common.table(["program", "measured, ms", "estimated, ms", "ratio"], rows)


def main(_):
    start, given = time.perf_counter(), flags.FLAGS
    config = without_weights(given.config)
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
