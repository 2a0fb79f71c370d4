"""Rollouts of real response lengths, beside equal lengths and beside a static batch.

    python -m experiments.benchmarks.long_tail --lengths=response_lengths.csv

512 requests whose lengths are sampled from the CSV (column length_tokens): a quarter of each, cut
at 1,024 as a length limit cuts. The engine's equal lengths have the same mean. The static batch
has as many rows as the engine has slots.
"""

import pathlib
import time

import jax
import numpy as np
from absl import app, flags

from experiments.benchmarks import common, static_sampler
from sharding import hosts, rules
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
    config = common.SIZES[FLAGS.size]
    lengths = common.real_lengths(pathlib.Path(FLAGS.lengths), REQUESTS, RESPONSE)
    equal = np.full(REQUESTS, round(lengths.mean()))
    mean_pages = -(-int(lengths.mean()) // PAGE)
    slots = FLAGS.slots // FLAGS.devices
    engine, params = common.make_engine(
        config,
        slots=FLAGS.slots,
        prompt=PROMPT,
        response=RESPONSE,
        pages=slots * 2 * mean_pages + 1,
        prompt_pages=3 * slots // GROUP + 2,
        readers=GROUP,
        page_tokens=PAGE,
        block_tokens=16,
    )
    how = common.sampling(config, RESPONSE)
    engine.compile(how)
    rng = np.random.default_rng(1)
    prompts = rng.integers(1, config.vocab_size, (REQUESTS // GROUP, PROMPT))

    def engine_rate(limits):
        groups = zip(prompts, limits.reshape(-1, GROUP).tolist(), strict=True)
        session, seconds = common.run_session(engine, params, groups, how)
        return int(np.sum(limits)) / seconds, session

    def static_rate(limits):
        start = time.perf_counter()
        tokens = static_sampler.sample(
            params,
            jax.random.key(1),
            prompts[np.arange(REQUESTS) // GROUP],
            limits,
            config=config,
            rows=FLAGS.slots,
            max_tokens=RESPONSE,
            place=lambda array: hosts.place(array, rules.rows(engine.mesh)),
        )
        return tokens / (time.perf_counter() - start)

    engine_rate(np.minimum(lengths, 32))
    static_rate(np.minimum(lengths, 32))
    rates = {"long tail": [], "equal": [], "static": []}
    for _ in range(FLAGS.rounds):
        rate, session = engine_rate(lengths)
        rates["long tail"].append(rate)
        rates["equal"].append(engine_rate(equal)[0])
        rates["static"].append(static_rate(lengths))
        print({name: [round(rate) for rate in of] for name, of in rates.items()}, flush=True)
    best = {name: max(of) for name, of in rates.items()}
    waiting = [block for block in session.blocks if block.waiting]
    occupancy = sum(b.useful_B.sum() for b in waiting) / sum(
        b.steps * len(b.useful_B) for b in waiting
    )
    print(
        f"\n{common.machine()}, commit {common.commit()}; {REQUESTS} requests, lengths "
        f"{lengths.min()} to {lengths.max()}, mean {lengths.mean():.0f}, median "
        f"{np.median(lengths):.0f}; {FLAGS.slots} slots, programs {', '.join(engine.program_names)}"
    )
    rows = [
        ["engine, real lengths", f"{best['long tail']:,.0f}", ""],
        [
            "engine, equal lengths",
            f"{best['equal']:,.0f}",
            f"{best['long tail'] / best['equal']:.2f}",
        ],
        [
            "static batch, real lengths",
            f"{best['static']:,.0f}",
            f"{best['long tail'] / best['static']:.2f}",
        ],
    ]
    print(common.table(["", "useful tokens/s", "engine's real lengths over it"], rows))
    print(
        f"occupancy until the queue was empty {occupancy:.1%}; cache used at most "
        f"{max(b.cache_use for b in session.blocks):.0%}; seconds "
        + ", ".join(f"{name} {spent:.2f}" for name, spent in session.seconds.items())
    )


if __name__ == "__main__":
    app.run(main)
