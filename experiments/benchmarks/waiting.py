"""Counts the slots that stand empty while environments are waited for, by the scheduler alone.

    python -m experiments.benchmarks.waiting

Episodes of about four turns, of 48 sampled tokens and 16 given ones on average, in virtual time: a
decode step takes --step_ms, a call --call_seconds. Prompts wait all the time, and both shares are
of the same number of blocks behind the first ones.
"""

import heapq

import numpy as np
from absl import app, flags

from dapo_jax.report.compare import table
from dapo_jax.sampler.cache import Cache
from dapo_jax.sampler.scheduler import Scheduler

FLAGS = flags.FLAGS
flags.DEFINE_integer("slots", 256, "Slots of the engine.")
flags.DEFINE_list("call_seconds", ["0", "0.5", "2"], "That an environment takes for an answer.")
flags.DEFINE_list("step_ms", ["5", "12", "25", "50"], "Milliseconds of a decode step.")
flags.DEFINE_integer("slot_tokens", 256, "Tokens of cache for a slot, as rollout.slot_tokens.")
GROUP, PROMPT, RESPONSE, TURN, GIVEN, PAGE, BLOCK = 8, 64, 512, 48, 16, 64, 8
TURNS, FIRST, BLOCKS = 4, 400, 1_600  # blocks before those that count, and all


def idle_share(call_seconds: float, step_seconds: float) -> float:
    """Simulates a session; returns the share of slot steps without a sample."""
    pages = FLAGS.slots * FLAGS.slot_tokens // PAGE + 1
    sizes = {"slots": FLAGS.slots, "pages": pages, "prompt_pages": 2 * pages, "readers": GROUP}
    tokens = {"max_prompt_tokens": PROMPT, "max_response_tokens": RESPONSE}
    cache = Cache(**sizes, **tokens, page_tokens=PAGE, block_tokens=BLOCK, turns=True)
    scheduler, rng = Scheduler(cache, 1), np.random.default_rng(0)
    ends, turn, answers = {}, {}, []  # by sample: where its turns end, the one under way
    now, submitted, idle = 0.0, 0, []
    while len(idle) < BLOCKS:
        while answers and answers[0][0] <= now:
            _, sample = heapq.heappop(answers)
            turn[sample] += 1
            last = turn[sample] == len(ends[sample])
            (scheduler.end if last else scheduler.resume)(*sample)
        while scheduler.idle_slots or submitted < FLAGS.slots:
            for i in range(GROUP):
                length_K = rng.integers(TURN // 2, TURN * 3 // 2, TURNS) + GIVEN
                ends[submitted, i], turn[submitted, i] = np.cumsum(length_K) - GIVEN, 0
            scheduler.submit(submitted, PROMPT, [RESPONSE] * GROUP, parks=True)
            submitted += 1
        plan = scheduler.next_block()
        samples = list(zip(plan.group_N.tolist(), plan.sample_N.tolist(), strict=True))
        left_N = np.array([ends[it][turn[it]] for it in samples], int) - plan.sampled_N
        ended_N = left_N <= BLOCK
        scheduler.complete(np.minimum(left_N, BLOCK), ended_N)
        now += BLOCK * step_seconds
        for n in np.flatnonzero(ended_N).tolist():
            heapq.heappush(answers, (now + call_seconds, samples[n]))
        idle.append(1 - len(samples) / FLAGS.slots)
    return float(np.mean(idle[FIRST:]))


def main(_):
    rows = [
        [f"{ms} ms", *(f"{idle_share(float(s), float(ms) / 1e3):.1%}" for s in FLAGS.call_seconds)]
        for ms in FLAGS.step_ms
    ]
    print(f"slots {FLAGS.slots}, cache for {FLAGS.slot_tokens} tokens a slot")
    heads = ["a decode step", *(f"calls of {s} s" for s in FLAGS.call_seconds)]
    print("\n".join(table(heads, rows)))


if __name__ == "__main__":
    app.run(main)
