"""Sampling speed beside Tunix and transformers, on the same work in one run.

    python -m experiments.benchmarks.peers --peers=DIR --tunix_python=... --torch_python=...

8 prompts of 64 tokens x 8 responses of 128 tokens, all of full length, float32, random weights.
DIR holds bench_tunix.py and bench_torch.py, each run by the Python of its own environment. The
parties take turns, `--rounds` times, and the best round of each counts.
"""

import pathlib
import subprocess
import tempfile

import numpy as np
from absl import app, flags

from experiments.benchmarks import common
from sharding.mesh import split_cpu

FLAGS = flags.FLAGS
flags.DEFINE_string("peers", None, "Folder of the peers' scripts.", required=True)
flags.DEFINE_string("tunix_python", None, "Python of an environment with google-tunix.")
flags.DEFINE_string("torch_python", None, "Python of an environment with torch and transformers.")
flags.DEFINE_list("sizes", ["1.25", "11.8"], "Millions of parameters; 135 is SmolLM2's size.")
flags.DEFINE_integer("rounds", 3, "Turns of every party.")
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


def peer_arguments(size: str) -> list[str]:
    """The model's and the work's sizes as the peers' flags."""
    return common.peer_arguments(
        size,
        prompts=PROMPTS,
        group=GROUP,
        prompt_len=PROMPT,
        new_tokens=RESPONSE,
        iters=REPEATS,
    )


def torch_rollout(size: str) -> float:
    """New tokens per second of transformers' generate."""
    script = pathlib.Path(FLAGS.peers) / "bench_torch.py"
    command = [FLAGS.torch_python, str(script), *peer_arguments(size)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return common.last_json(run.stdout)["rollout_tokens_per_s"]


def tunix_rollout(size: str) -> float:
    """New tokens per second of Tunix's sampler."""
    script = pathlib.Path(FLAGS.peers) / "bench_tunix.py"
    with tempfile.NamedTemporaryFile() as file:
        command = [FLAGS.tunix_python, str(script), *peer_arguments(size)]
        command += ["--parts", "rollout", "--json", file.name]
        subprocess.run(command, capture_output=True, text=True, check=True)
        return common.last_json(pathlib.Path(file.name).read_text())["rollout"]["tok_s_best"]


def main(_):
    split_cpu(FLAGS.devices)
    rows = []
    for size in FLAGS.sizes:
        rollout = engine_rollout(size)
        rollout()
        ours, peers = [], {"transformers": [], "Tunix": []}
        for _ in range(FLAGS.rounds):
            ours.append(max(rollout() for _ in range(REPEATS)))
            if FLAGS.torch_python:
                peers["transformers"].append(torch_rollout(size))
            if FLAGS.tunix_python:
                peers["Tunix"].append(tunix_rollout(size))
            print(size, ours, peers, flush=True)
        best = {name: max(rates) for name, rates in peers.items() if rates}
        speedup = max(ours) / max(best.values()) if best else float("nan")
        rows.append(
            [
                f"{size} M",
                f"{max(ours):,.0f}",
                *(f"{best[name]:,.0f}" if name in best else "-" for name in peers),
                f"{speedup:.2f}",
            ]
        )
    print(f"\n{common.machine()}, commit {common.commit()}; new tokens per second, best of rounds")
    print(common.table(["parameters", "dapo_jax", *peers, "over the better peer"], rows))


if __name__ == "__main__":
    app.run(main)
