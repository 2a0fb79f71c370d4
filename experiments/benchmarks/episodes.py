"""Episodes of four turns beside one response of as many tokens: sampling alone.

    python -m experiments.benchmarks.episodes

A turn ends at one of many stop tokens, after 48 tokens on average; its environment gives 16 tokens
and takes --call_seconds. Each response of the other party has the length of an episode.
"""

import collections
import dataclasses
import functools
import queue
import threading
import time

import numpy as np
from absl import app, flags

from dapo_jax.episodes import End
from dapo_jax.report.compare import table
from dapo_jax.types import Status
from experiments.benchmarks import common
from sharding.mesh import split_cpu

FLAGS = flags.FLAGS
flags.DEFINE_integer("slots", 64, "Slots of the engine.")
flags.DEFINE_integer("groups", 32, "Groups of eight episodes.")
flags.DEFINE_list("call_seconds", ["0", "0.1", "0.5"], "That an environment takes for an answer.")
flags.DEFINE_integer("block_tokens", 8, "Decode steps of a block.")
flags.DEFINE_integer("slot_tokens", 256, "Tokens of cache for a slot, as rollout.slot_tokens.")
flags.DEFINE_integer("devices", 2, "Devices that the CPU is counted as.")
flags.DEFINE_integer("rounds", 3, "Turns of every party; the best counts.")
SIZE = "1.25"  # millions of parameters
GROUP, PROMPT, RESPONSE, TURNS, TURN, GIVEN = 8, 64, 512, 4, 48, 16


class Fixed:
    """Environments that give the same tokens to each turn but the last, after so many seconds."""

    def __init__(self, seconds: float):
        self._seconds, self._asked, self._found = seconds, 0, queue.SimpleQueue()
        self._turns = collections.Counter()

    def is_episode(self, prompt) -> bool:
        return True

    def close(self, number=None) -> None:
        pass

    def ask(self, where, prompt, response, room) -> None:
        self._asked += 1
        self._turns[where] += 1
        waits = response.status is Status.WAITING
        goes_on = waits and room > GIVEN and self._turns[where] < TURNS
        end = End(Status.STOPPED if waits else Status.CUT, {})
        found = (where, range(1, 1 + GIVEN) if goes_on else end)
        if self._seconds:
            threading.Timer(self._seconds, self._found.put, (found,)).start()
        else:
            self._found.put(found)

    def answers(self, *, wait: bool):
        found = []
        while self._asked and (not self._found.empty() or (wait and not found)):
            found.append(self._found.get())
            self._asked -= 1
        return sorted(found, key=lambda it: it[0])


def main(_):
    split_cpu(FLAGS.devices)
    built = common.programs(
        SIZE,
        requests=FLAGS.slots,
        rollout__group_size=GROUP,
        rollout__max_prompt_tokens=PROMPT,
        rollout__max_response_tokens=RESPONSE,
        rollout__slot_tokens=FLAGS.slot_tokens,
        rollout__page_tokens=64,
        rollout__block_tokens=FLAGS.block_tokens,
        data__train__environment="one:Fixed",
    )
    params = built.reshard(built.start_params(), None)
    prompts = common.random_prompts(built, FLAGS.groups, PROMPT)
    plain = common.stream(built)
    stops = tuple(range(built.sizes.vocab_size // TURN))
    turns = plain._replace(sampling=dataclasses.replace(plain.sampling, stop_ids=stops))

    def sampled(limits_PG, **how):
        """Samples all groups: (seconds a token, idle share, given, of a step, CPU s), lengths."""
        cpu_start = time.process_time()
        groups, session, seconds = common.sample(built, params, prompts, limits_PG, **how)
        cpu_seconds = time.process_time() - cpu_start
        responses = [response for group in groups for response in group.responses]
        tokens = sum(len(response.tokens_T) for response in responses)
        given = sum(int(np.sum(~response.sampled_T)) for response in responses)
        stats = session.stats
        idle = 1 - stats.busy_waiting_slot_steps / max(stats.waiting_slot_steps, 1)
        found = seconds / tokens, idle, given / tokens, seconds / stats.decode_steps
        lengths_PG = [[len(response.tokens_T) for response in it.responses] for it in groups]
        return (*found, cpu_seconds / tokens), lengths_PG

    def episodes(call_seconds: str):
        limits_PG = [[RESPONSE] * GROUP] * FLAGS.groups
        return sampled(limits_PG, of=turns, environments=Fixed(float(call_seconds)))

    _, lengths_PG = episodes("0")
    parties = {"one response": functools.partial(sampled, lengths_PG)}
    for text in FLAGS.call_seconds:
        parties[f"episodes, calls of {text} s"] = functools.partial(episodes, text)
    best = {}
    for _ in range(FLAGS.rounds):
        for name, party in parties.items():
            best[name] = min(best.get(name, (np.inf,)), party()[0])
    print(f"{common.origin()}; {built.engine.cache.slots} slots a device")
    one = best["one response"][0]
    rows = []
    for name, (cost, idle, given, step, cpu) in best.items():
        speeds = f"{1 / cost:,.0f}", f"{1 / cpu:,.0f}", f"{cost / one:.2f}"
        rows.append([name, *speeds, f"{idle:.1%}", f"{given:.0%}", f"{1e3 * step:.1f}"])
    head = ["", "tokens/s", "tokens a CPU second", "time a token over one response's"]
    head += ["slot steps without a sampled token while prompts wait", "given", "ms a step"]
    print("\n".join(table(head, rows)))


if __name__ == "__main__":
    app.run(main)
