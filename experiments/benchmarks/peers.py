"""Sampling speed beside transformers, on the same work in one run.

    python -m experiments.benchmarks.peers --peers=DIR --torch_python=...

8 prompts of 64 tokens x 8 responses of 128 tokens, all of full length, float32, random weights.
DIR holds bench_torch.py, run by the Python of its own environment. The two take turns, `--rounds`
times, and the best round of each counts.
"""

import pathlib
import subprocess

import numpy as np
from absl import app, flags

from experiments.benchmarks import common
from sharding.mesh import split_cpu

FLAGS = flags.FLAGS
flags.DEFINE_string("peers", None, "Folder of the peer's script.", required=True)
flags.DEFINE_string(
    "torch_python", None, "Python of an environment with torch and transformers.", required=True
)
flags.DEFINE_list("sizes", ["1.25", "11.8"], "Millions of parameters; 135 is SmolLM2's size.")
flags.DEFINE_integer("rounds", 3, "Turns of both.")
flags.DEFINE_integer("devices", 2, "Devices that the CPU is counted as, for us.")
flags.DEFINE_integer("block_tokens", 16, "Decode steps of a block.")
PROMPTS, GROUP, PROMPT, RESPONSE = 8, 8, 64, 128
REPEATS = 3  # of a turn; the best counts


def engine_rollout(size: str):
    """A function that samples the work once and returns new tokens per second."""
    config = common.SIZES[size]
    slots = PROMPTS * GROUP
    own_pages = RESPONSE // 64
    engine, params = common.make_engine(
        config,
        slots=slots,
        prompt=PROMPT,
        response=RESPONSE,
        pages=slots // FLAGS.devices * own_pages + 1,
        prompt_pages=PROMPTS // FLAGS.devices + 1,
        readers=GROUP,
        page_tokens=64,
        block_tokens=FLAGS.block_tokens,
    )
    how = common.sampling(config, RESPONSE)
    engine.compile(how)
    rng = np.random.default_rng(0)

    def rollout() -> float:
        prompts = rng.integers(1, config.vocab_size, (PROMPTS, PROMPT))
        groups = [(prompt, [RESPONSE] * GROUP) for prompt in prompts]
        _, seconds = common.run_session(engine, params, groups, how)
        return PROMPTS * GROUP * RESPONSE / seconds

    return rollout


def torch_rollout(size: str) -> float:
    """New tokens per second of transformers' generate."""
    sizes = common.peer_arguments(
        size,
        prompts=PROMPTS,
        group=GROUP,
        prompt_len=PROMPT,
        new_tokens=RESPONSE,
        iters=REPEATS,
    )
    command = [FLAGS.torch_python, str(pathlib.Path(FLAGS.peers) / "bench_torch.py"), *sizes]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return common.last_json(run.stdout)["rollout_tokens_per_s"]


def main(_):
    split_cpu(FLAGS.devices)
    rows = []
    for size in FLAGS.sizes:
        rollout = engine_rollout(size)
        rollout()
        ours, theirs = [], []
        for _ in range(FLAGS.rounds):
            ours.append(max(rollout() for _ in range(REPEATS)))
            theirs.append(torch_rollout(size))
            print(size, ours, theirs, flush=True)
        us, them = max(ours), max(theirs)
        rows.append([f"{size} M", f"{us:,.0f}", f"{them:,.0f}", f"{us / them:.2f}"])
    print(f"\n{common.machine()}, commit {common.commit()}; new tokens per second, best of rounds")
    print(common.table(["parameters", "dapo_jax", "transformers", "over it"], rows))


if __name__ == "__main__":
    app.run(main)
