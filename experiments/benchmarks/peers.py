"""Sampling, the update and a whole RL step beside transformers with torch, on the same work.

    python -m experiments.benchmarks.peers --torch_python=runs/torch/bin/python

8 prompts of 64 tokens x 8 responses, float32, random weights: all responses of 128 tokens, and real
lengths, cut at --longest, to which the peer pads. Tokens are those of the responses. A step is
sampling, the peer's log-probabilities of what it sampled (ours come with the samples), and one
update of all 64 responses.

The peer is torch_cpu.py, which says how its environment is made. The two take turns, --rounds
times, each with the best of --repeats, and the best round of each counts.
"""

import functools
import itertools
import json
import pathlib
import subprocess
from collections.abc import Callable

import jax
import numpy as np
from absl import app, flags

from dapo_jax.learner import minibatch
from dapo_jax.process import hosts
from dapo_jax.report.compare import table
from experiments.benchmarks import common
from sharding.mesh import split_cpu

FLAGS = flags.FLAGS
flags.DEFINE_string("torch_python", "", "Of the peer's environment; '': only we run.")
flags.DEFINE_string("lengths", "", "CSV of real response lengths; '': drawn as those were.")
flags.DEFINE_list("sizes", ["1.25", "11.8"], "Millions of parameters; 135 is SmolLM2's size.")
flags.DEFINE_list("work", ["equal", "real"], "Which lengths.")
flags.DEFINE_integer("devices", 2, "Devices that the CPU is counted as, for us.")
flags.DEFINE_integer("row_tokens", 1_088, "Of a packed row.")
flags.DEFINE_integer("rows", 4, "Packed rows of a micro-batch.")
flags.DEFINE_integer("longest", 1_024, "Tokens at which real lengths are cut.")
flags.DEFINE_integer("rounds", 1, "Turns of both.")
flags.DEFINE_integer("repeats", 3, "Of everything in a turn.")
PROMPTS, GROUP, PROMPT, EQUAL = 8, 8, 64, 128
PARTS = ("sampling", "update", "step")


def ours(size: str, length_PG: np.ndarray) -> Callable[[], dict[str, float]]:
    """Makes a turn of ours, which returns the best seconds of each part."""
    longest = int(length_PG.max())
    built = common.programs(
        size,
        requests=PROMPTS * GROUP,
        updates_per_step=1,
        rollout__num_prompts=PROMPTS,
        rollout__group_size=GROUP,
        rollout__max_prompt_tokens=PROMPT,
        rollout__max_response_tokens=longest,
        rollout__slot_tokens=longest,
        rollout__page_tokens=64,
        learner__row_tokens=FLAGS.row_tokens,
        learner__micro_batch_rows=FLAGS.rows,
        learner__remat="none",
    )
    update, state = built.compile_learner()["update"], built.start_state()
    prompts = common.random_prompts(built, PROMPTS, PROMPT)
    advantage_PG = np.random.default_rng(0).normal(size=(PROMPTS, GROUP)).astype(np.float32)

    def rollout():
        params = built.reshard(state.params, None)
        return common.sample(built, params, prompts, length_PG.tolist())[0]

    def take_update(groups):
        nonlocal state
        batch = minibatch(groups, advantage_PG, built.settings, built.mesh)
        state, metrics = update(state, None, batch, np.float32(1e-6))
        return hosts.fetch(metrics), jax.block_until_ready(state)

    sampled = rollout()
    assert float(take_update(sampled)[0]["ratio_gap"]) < 1e-3
    runs = rollout, lambda: take_update(sampled), lambda: take_update(rollout())
    best = functools.partial(common.best_seconds, repeats=FLAGS.repeats)
    return lambda: dict(zip(PARTS, map(best, runs), strict=True))


def theirs(size: str, new_tokens: int) -> dict[str, float]:
    """Takes a turn of the peer's, every response padded to so many tokens."""
    c = common.SIZES[size]
    work = {"prompts": PROMPTS, "group": GROUP, "prompt": PROMPT, "new_tokens": new_tokens}
    work |= {"hidden_size": c.width, "intermediate_size": c.mlp_width, "repeats": FLAGS.repeats}
    work |= {"num_hidden_layers": c.num_layers, "vocab_size": c.vocab_size}
    work |= {"num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads}
    command = [FLAGS.torch_python, str(pathlib.Path(__file__).with_name("torch_cpu.py"))]
    command += [f"--{key}={value}" for key, value in work.items()]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def main(_):
    split_cpu(FLAGS.devices)
    real = common.real_lengths(FLAGS.lengths, PROMPTS * GROUP, FLAGS.longest)
    works = {"equal": np.full((PROMPTS, GROUP), EQUAL), "real": real.reshape(PROMPTS, GROUP)}
    rows = []
    for size, work in itertools.product(FLAGS.sizes, FLAGS.work):
        length_PG, padded = works[work], EQUAL if work == "equal" else FLAGS.longest
        parties = {"dapo_jax": ours(size, length_PG)}
        if FLAGS.torch_python:
            parties["transformers"] = functools.partial(theirs, size, padded)
        turns = {party: [] for party in parties}
        for party in list(parties) * FLAGS.rounds:
            turns[party].append(parties[party]())
        print(size, work, turns, flush=True)
        for part in PARTS:
            best = [min(turn[part] for turn in taken) for taken in turns.values()]
            rates = [f"{length_PG.sum() / seconds:,.0f}" for seconds in best]
            rows.append([f"{size} M, {work}", part, *rates, f"{best[-1] / best[0]:.2f}"])
    print(f"\n{common.origin()}; response tokens per second, best of rounds")
    print("\n".join(table(["", "", *parties, "over it"], rows)))


if __name__ == "__main__":
    app.run(main)
