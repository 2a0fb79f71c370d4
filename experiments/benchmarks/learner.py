"""Sampling, the update, and a whole RL step, beside transformers with torch, on the same work.

    python -m experiments.benchmarks.learner --peers=DIR --torch_python=... \
        --lengths=response_lengths.csv

8 prompts of 64 tokens x 8 responses, float32, random weights: all responses of 128 tokens, and
lengths sampled from the CSV, a quarter of each, cut at --longest, to which the peer pads. Tokens
are those of the responses. A step is sampling, the peer's log-probabilities of what it sampled
(ours come with the samples), and one update of all 64 responses. Best of --repeats. DIR holds
bench_torch.py, run by the Python of its own environment; without it only we run.
"""

import functools
import json
import pathlib
import subprocess

import jax
import numpy as np
from absl import app, flags

from dapo_jax.learner import minibatch
from dapo_jax.process import hosts
from experiments.benchmarks import common
from sharding.mesh import split_cpu

FLAGS = flags.FLAGS
flags.DEFINE_string("peers", None, "Folder of the peer's script.")
flags.DEFINE_string("torch_python", None, "Python with torch and transformers.")
flags.DEFINE_list("sizes", ["1.25", "11.8"], "Millions of parameters; 135 is SmolLM2's size.")
flags.DEFINE_string("lengths", None, "CSV of real response lengths.", required=True)
flags.DEFINE_list("work", ["equal", "real"], "Which lengths.")
flags.DEFINE_integer("devices", 1, "Devices that the CPU is counted as, for us.")
flags.DEFINE_integer("row_tokens", 1_088, "Of a packed row.")
flags.DEFINE_integer("rows", 2, "Packed rows of a micro-batch.")
flags.DEFINE_integer("longest", 1_024, "Tokens at which real lengths are cut.")
flags.DEFINE_integer("repeats", 3, "Of everything; the best counts.")
PROMPTS, GROUP, PROMPT, EQUAL = 8, 8, 64, 128
PARTS = ("sampling", "update", "step")


def ours(size: str, length_PG: np.ndarray) -> dict[str, float]:
    """The best seconds of each of our parts."""
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
    update, state = built.compile_update(), built.start_state()
    prompts = common.random_prompts(built, PROMPTS, PROMPT)
    advantage_PG = np.random.default_rng(0).normal(size=(PROMPTS, GROUP)).astype(np.float32)

    def rollout(params):
        return common.sample(built, params, prompts, length_PG.tolist())[0]

    def whole_step():
        return take_update(rollout(built.reshard(state.params, None)))

    def take_update(groups):
        nonlocal state
        batch = minibatch(groups, advantage_PG, built.learning, built.mesh)
        state, metrics = update(state, None, batch, np.float32(1e-6))
        return hosts.fetch(metrics), jax.block_until_ready(state)

    params = built.reshard(built.start_params(), None)  # an update donates the state's
    sampled = rollout(params)
    assert float(take_update(sampled)[0]["ratio_gap"]) < 1e-3
    works = (lambda: rollout(params), lambda: take_update(sampled), whole_step)
    best = functools.partial(common.best_seconds, repeats=FLAGS.repeats)
    return dict(zip(PARTS, map(best, works), strict=True))


def theirs(size: str, new_tokens: int) -> dict[str, float]:
    """The best seconds of each part of transformers and torch, by the last line of the script."""
    c = common.SIZES[size]
    work = {"prompts": PROMPTS, "group": GROUP, "prompt-len": PROMPT, "new-tokens": new_tokens}
    work |= {"layers": c.num_layers, "width": c.width, "heads": c.num_heads, "kv": c.num_kv_heads}
    work |= {"mlp": c.mlp_width, "vocab": c.vocab_size, "iters": FLAGS.repeats}
    command = [FLAGS.torch_python, str(pathlib.Path(FLAGS.peers) / "bench_torch.py")]
    command += [word for name, value in work.items() for word in (f"--{name}", str(value))]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads([line for line in run.stdout.splitlines() if line.startswith("{")][-1])
    sampling = PROMPTS * GROUP * new_tokens / found["rollout_tokens_per_s"]
    return {"sampling": sampling, "update": found["update_best_s"], "step": found["step_best_s"]}


def main(_):
    split_cpu(FLAGS.devices)
    real = common.real_lengths(FLAGS.lengths, PROMPTS * GROUP, FLAGS.longest)
    works = {"equal": np.full((PROMPTS, GROUP), EQUAL), "real": real.reshape(PROMPTS, GROUP)}
    table = []
    for size in FLAGS.sizes:
        for work in FLAGS.work:
            length_PG = works[work]
            seconds, tokens = {"dapo_jax": ours(size, length_PG)}, int(length_PG.sum())
            if FLAGS.torch_python:
                padded = EQUAL if work == "equal" else FLAGS.longest
                seconds["transformers"] = theirs(size, padded)
            print(json.dumps({"size": size, "work": work, "tokens": tokens, **seconds}), flush=True)
            for name in PARTS:
                rates = {party: tokens / of[name] for party, of in seconds.items()}
                over = rates["dapo_jax"] / rates.get("transformers", float("nan"))
                shown = [f"{rate:,.0f}" for rate in rates.values()]
                table.append([f"{size} M, {work}", name, *shown, f"{over:.2f}"])
    print(f"\n{common.machine()}, commit {common.commit()}; response tokens per second")
    print(common.table(["", "", *seconds, "over it"], table))


if __name__ == "__main__":
    app.run(main)
