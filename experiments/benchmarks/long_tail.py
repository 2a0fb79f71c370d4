"""Rollouts of real response lengths, beside equal lengths and beside a static batch.

    python -m experiments.benchmarks.long_tail [--lengths=response_lengths.csv]

512 requests of real lengths, or of ones drawn alike, cut at 1,024 as a length limit cuts. Equal
lengths have the same mean. A static batch has a request for each of the engine's slots, and the
next one begins when the last of its requests has ended.
"""

import numpy as np
from absl import app, flags

from dapo_jax.report.compare import table
from experiments.benchmarks import common
from sharding.mesh import split_cpu

FLAGS = flags.FLAGS
flags.DEFINE_string("lengths", "", "CSV of real response lengths; '': drawn as those were.")
flags.DEFINE_integer("rounds", 3, "Turns of every party; the best counts.")
REQUESTS, SLOTS, GROUP, PROMPT, RESPONSE, PAGE = 512, 64, 8, 64, 1_024, 64


def main(_):
    split_cpu(2)
    real_N = common.real_lengths(FLAGS.lengths, REQUESTS, RESPONSE)
    mean = round(real_N.mean())
    built = common.programs(
        "1.25",
        requests=SLOTS,
        rollout__group_size=GROUP,
        rollout__max_prompt_tokens=PROMPT,
        rollout__max_response_tokens=RESPONSE,
        rollout__slot_tokens=2 * PAGE * -(-mean // PAGE),
        rollout__page_tokens=PAGE,
    )
    params = built.reshard(built.start_params(), None)
    prompts = common.random_prompts(built, REQUESTS // GROUP, PROMPT)

    def rate(limit_N, at_once: int) -> float:
        """Returns tokens per second where so many requests are submitted at once."""
        seconds, groups = 0.0, at_once // GROUP
        for first in range(0, len(prompts), groups):
            limits = limit_N.reshape(-1, GROUP)[first : first + groups].tolist()
            seconds += common.sample(built, params, prompts[first : first + groups], limits)[2]
        return limit_N.sum() / seconds

    parties = {
        "real lengths": (real_N, REQUESTS),
        "equal lengths": (np.full(REQUESTS, mean), REQUESTS),
        "static batches, real lengths": (real_N, SLOTS),
    }
    rate(np.minimum(real_N, 32), REQUESTS)
    best = dict.fromkeys(parties, 0.0)
    for name, party in [*parties.items()] * FLAGS.rounds:
        best[name] = max(best[name], rate(*party))
    print(
        f"\n{common.origin()}; {REQUESTS} requests, lengths {real_N.min()} to {real_N.max()}, mean "
        f"{mean}, median {np.median(real_N):.0f}; {built.engine.cache.slots} slots a device"
    )
    ours = best["real lengths"]
    rows = [[name, f"{of:,.0f}", f"{ours / of:.2f}"] for name, of in best.items()]
    print("\n".join(table(["", "useful tokens/s", "real lengths over it"], rows)))


if __name__ == "__main__":
    app.run(main)
