"""Milliseconds that the scheduler alone needs a block, at a pod's size and without devices.

    python -m experiments.benchmarks.scheduler

32 data shards of 598 slots, what 256 v5p chips hold for configs/qwen2_5_32b.py. 1,280 groups of 16
responses, whose lengths are log-normal as measured on models of Qwen2.5's family, are sampled to
their end. A block's time is that of `next_block`, `table` and `complete`.
"""

import time

import numpy as np
from absl import app

from dapo_jax.sampler.cache import Cache, decode_sizes
from dapo_jax.sampler.scheduler import Scheduler
from experiments.benchmarks import common
from experiments.preflight.estimate import response_lengths

SHARDS, GROUPS, GROUP, PROMPT, MEAN, RESPONSE = 32, 1_280, 16, 150, 2_925, 20_480
SLOTS, PAGES, PROMPT_PAGES, READERS = 598, 14_367, 917, 4


def main(_):
    cache = Cache(
        slots=SLOTS,
        pages=PAGES,
        prompt_pages=PROMPT_PAGES,
        readers=READERS,
        page_tokens=128,
        block_tokens=16,
        max_prompt_tokens=2_048,
        max_response_tokens=RESPONSE,
    )
    sizes = decode_sizes(cache, kernel=True)
    length_PG = response_lengths(MEAN, groups=GROUPS, group_size=GROUP, longest=RESPONSE, seed=0)
    scheduler = Scheduler(cache, SHARDS)
    for cursor, limits in enumerate(length_PG.tolist()):
        scheduler.submit(cursor, PROMPT, limits)
    seconds = []
    while scheduler.unfinished:
        start = time.perf_counter()
        plan = scheduler.next_block()
        planned = time.perf_counter()
        used_N = np.minimum(plan.left_N, cache.block_tokens)  # what the devices would report
        stopped_N = np.zeros(len(used_N), bool)
        resumed = time.perf_counter()
        scheduler.table(sizes, np.zeros(len(used_N), bool))
        scheduler.complete(used_N, stopped_N)
        seconds.append(time.perf_counter() - resumed + planned - start)
    median, high = 1e3 * np.percentile(seconds, [50, 95])
    print(
        f"{SHARDS} shards x {cache.slots} slots, {length_PG.size:,} requests of {MEAN:,} tokens on "
        f"average, {len(seconds):,} blocks: {median:.1f} ms a block, 95th percentile {high:.1f}; "
        f"{common.origin()}"
    )


if __name__ == "__main__":
    app.run(main)
