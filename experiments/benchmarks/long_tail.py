"""Rollouts of real response lengths, beside equal lengths and beside a static batch.

    python -m experiments.benchmarks.long_tail --lengths=response_lengths.csv

512 requests whose lengths are sampled from the CSV (column length_tokens): a quarter of each, cut
at 1,024 as a length limit cuts. The engine's equal lengths have the same mean. The static batch
has as many rows as the engine has slots.
"""

import time

import jax
import numpy as np
from absl import app, flags

from dapo_jax.process import hosts
from experiments.benchmarks import common, static_sampler
from sharding import rules
from sharding.mesh import split_cpu

FLAGS = flags.FLAGS
flags.DEFINE_string("lengths", None, "CSV of real response lengths.", required=True)
flags.DEFINE_string("size", "1.25", "Millions of parameters.")
flags.DEFINE_integer("slots", 64, "Slots of the engine, rows of a static batch.")
flags.DEFINE_integer("devices", 2, "Devices that the CPU is counted as.")
flags.DEFINE_integer("rounds", 3, "Turns of every party; the best counts.")
REQUESTS, GROUP, PROMPT, RESPONSE = 512, 8, 64, 1_024
PAGE = 64


def main(_):
    split_cpu(FLAGS.devices)
    real_N = common.real_lengths(FLAGS.lengths, REQUESTS, RESPONSE)
    equal_N = np.full(REQUESTS, round(real_N.mean()))
    built = common.programs(
        FLAGS.size,
        requests=FLAGS.slots,
        rollout__group_size=GROUP,
        rollout__max_prompt_tokens=PROMPT,
        rollout__max_response_tokens=RESPONSE,
        rollout__slot_tokens=2 * PAGE * -(-int(real_N.mean()) // PAGE),
        rollout__page_tokens=PAGE,
    )
    params = built.reshard(built.start_params(), None)
    prompts = common.random_prompts(built, REQUESTS // GROUP, PROMPT)

    def engine_rate(limit_N):
        _, session, seconds = common.sample(
            built, params, prompts, limit_N.reshape(-1, GROUP).tolist()
        )
        return int(limit_N.sum()) / seconds, session

    def static_rate(limit_N):
        start = time.perf_counter()
        tokens = static_sampler.sample(
            params,
            jax.random.key(1),
            prompts[np.arange(REQUESTS) // GROUP],
            limit_N,
            config=built.sizes,
            rows=FLAGS.slots,
            max_tokens=RESPONSE,
            place=lambda array: hosts.place(array, rules.rows(built.mesh)),
        )
        return tokens / (time.perf_counter() - start), None

    parties = {
        "engine, real lengths": (engine_rate, real_N),
        "engine, equal lengths": (engine_rate, equal_N),
        "static batch, real lengths": (static_rate, real_N),
    }
    for rate in (engine_rate, static_rate):
        rate(np.minimum(real_N, 32))
    best, session = dict.fromkeys(parties, 0.0), None
    for _ in range(FLAGS.rounds):
        for name, (rate, limit_N) in parties.items():
            found, ran = rate(limit_N)
            best[name] = max(best[name], found)
            session = ran if limit_N is real_N and ran else session
            print(f"{name}: {found:.0f}", flush=True)
    ours, *others = best.values()
    stats = session.stats
    occupancy = stats.busy_waiting_slot_steps / stats.waiting_slot_steps
    print(
        f"\n{common.machine()}, commit {common.commit()}; {REQUESTS} requests, lengths "
        f"{real_N.min()} to {real_N.max()}, mean {real_N.mean():.0f}, median "
        f"{np.median(real_N):.0f}; {built.engine.cache.slots} slots a device"
    )
    over = ["", *(f"{ours / other:.2f}" for other in others)]
    rows = [[name, f"{best[name]:,.0f}", it] for name, it in zip(best, over, strict=True)]
    print(common.table(["", "useful tokens/s", "engine's real lengths over it"], rows))
    print(
        f"occupancy until the queue was empty {occupancy:.1%}; cache used at most "
        f"{stats.cache_use:.0%}; seconds "
        + ", ".join(f"{name} {spent:.2f}" for name, spent in stats.seconds.items())
    )


if __name__ == "__main__":
    app.run(main)
