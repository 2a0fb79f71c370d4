"""Sampling speed beside transformers, on the same work in one run.

    python -m experiments.benchmarks.peers --peers=DIR --torch_python=...

8 prompts of 64 tokens x 8 responses of 128 tokens, all of full length, float32, random weights.
DIR holds bench_torch.py, run by the Python of its own environment. The two take turns, `--rounds`
times, and the best round of each counts.
"""

import pathlib

from absl import app, flags

from experiments.benchmarks import common
from sharding.mesh import split_cpu

FLAGS = flags.FLAGS
common.define_peer_flags(required=True)
flags.DEFINE_integer("rounds", 3, "Turns of both.")
flags.DEFINE_integer("devices", 2, "Devices that the CPU is counted as, for us.")
flags.DEFINE_integer("block_tokens", 16, "Decode steps of a block.")
PROMPTS, GROUP, PROMPT, RESPONSE = 8, 8, 64, 128
REPEATS = 3  # of a turn; the best counts


def engine_rollout(size: str):
    """A function that samples the work once and returns new tokens per second."""
    built = common.programs(
        size,
        requests=PROMPTS * GROUP,
        rollout__group_size=GROUP,
        rollout__max_prompt_tokens=PROMPT,
        rollout__max_response_tokens=RESPONSE,
        rollout__slot_tokens=RESPONSE,
        rollout__page_tokens=64,
        rollout__block_tokens=FLAGS.block_tokens,
    )
    params = built.reshard(built.start_params(), None)
    prompts = common.random_prompts(built, PROMPTS, PROMPT)

    def rollout() -> float:
        *_, seconds = common.sample(built, params, prompts, [[RESPONSE] * GROUP] * PROMPTS)
        return PROMPTS * GROUP * RESPONSE / seconds

    return rollout


def torch_rollout(size: str) -> float:
    """New tokens per second of transformers' generate."""
    work = {"prompts": PROMPTS, "group": GROUP, "prompt_len": PROMPT, "new_tokens": RESPONSE}
    script = pathlib.Path(FLAGS.peers) / "bench_torch.py"
    found = common.run_peer(script, common.SIZES[size], **work, iters=REPEATS)
    return found["rollout_tokens_per_s"]


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
