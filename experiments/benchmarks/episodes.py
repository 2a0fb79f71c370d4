"""Episodes of about four turns beside one response of as many tokens: sampling alone.

    python -m experiments.benchmarks.episodes

A turn ends at one of many stop tokens, after 48 tokens on average; its environment gives 16 tokens
and takes --call_seconds. Both parties decode the same programs' model to the same limit.
"""

import dataclasses
import queue
import threading
import time

import numpy as np
from absl import app, flags

from dapo_jax.episodes import Answer
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.types import Prompt
from experiments.benchmarks import common
from sharding.mesh import split_cpu

FLAGS = flags.FLAGS
flags.DEFINE_string("size", "1.25", "Millions of parameters.")
flags.DEFINE_integer("slots", 64, "Slots of the engine.")
flags.DEFINE_integer("groups", 32, "Groups of eight episodes.")
flags.DEFINE_list("call_seconds", ["0", "0.1", "0.5"], "That an environment takes for an answer.")
flags.DEFINE_integer("block_tokens", 16, "Decode steps of a block.")
flags.DEFINE_integer("slot_tokens", 256, "Tokens of cache for a slot, as rollout.slot_tokens.")
flags.DEFINE_integer("devices", 2, "Devices that the CPU is counted as.")
flags.DEFINE_integer("rounds", 3, "Turns of every party; the best counts.")
GROUP, PROMPT, RESPONSE, TURN, GIVEN = 8, 64, 256, 48, 16


class Fixed:
    """Environments that give the same tokens to each turn, after so many seconds."""

    def __init__(self, seconds: float):
        self._seconds, self._asked, self._found = seconds, 0, queue.SimpleQueue()

    def plays(self, prompt) -> bool:
        return True

    def forget(self, number) -> None:
        pass

    def ask(self, where, cursor, prompt, response, room) -> None:
        self._asked += 1
        more = range(1, 1 + GIVEN) if response.stopped and room > GIVEN else ()
        found = (where, Answer(more))
        threading.Timer(self._seconds, self._found.put, (found,)).start()

    def answers(self, *, wait: bool):
        found = []
        while self._asked and (not self._found.empty() or (wait and not found)):
            found.append(self._found.get())
            self._asked -= 1
        return sorted(found, key=lambda it: it[0])


def main(_):
    split_cpu(FLAGS.devices)
    built = common.programs(
        FLAGS.size,
        requests=FLAGS.slots,
        rollout__group_size=GROUP,
        rollout__max_prompt_tokens=PROMPT,
        rollout__max_response_tokens=max(RESPONSE, FLAGS.slot_tokens),  # a slot has no more
        rollout__slot_tokens=FLAGS.slot_tokens,
        rollout__page_tokens=64,
        rollout__block_tokens=FLAGS.block_tokens,
        data__train__environment="one:Fixed",
    )
    params = built.reshard(built.start_params(), None)
    prompts = common.random_prompts(built, FLAGS.groups, PROMPT)
    plain = common.stream(built)
    limited = dataclasses.replace(plain.sampling, max_response_tokens=RESPONSE)
    plain = Stream(plain.key, limited)
    stops = tuple(range(common.SIZES[FLAGS.size].vocab_size // TURN))
    turns = Stream(plain.key, dataclasses.replace(limited, stop_ids=stops))

    def sampled(stream, environments):
        """Samples all groups: (seconds a token, idle share, given, of a step, CPU seconds)."""
        start, cpu_start, groups = time.perf_counter(), time.process_time(), []
        session = Session(built.engine, params, stream, environments=environments)
        for cursor, prompt in enumerate(prompts):
            session.submit(cursor, Prompt(prompt), group_size=GROUP)
        while session.unfinished:
            groups += session.step()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        responses = [response for group in groups for response in group.responses]
        tokens = sum(len(response.tokens_T) for response in responses)
        given = sum(int(np.sum(~response.sampled_T)) for response in responses)
        blocks = [block for block in session.blocks if block.waiting]
        steps = sum(block.steps * block.slots for block in blocks)
        free = sum(block.steps * (block.slots - len(block.useful_N)) for block in blocks)
        step_seconds = seconds / sum(block.steps for block in session.blocks)
        return (
            seconds / tokens,
            free / max(steps, 1),
            given / tokens,
            step_seconds,
            cpu_seconds / tokens,
        )

    parties = {"one response": (plain, lambda: None)}
    for text in FLAGS.call_seconds:
        parties[f"episodes, calls of {text} s"] = turns, lambda text=text: Fixed(float(text))
    best = {}
    for _ in range(FLAGS.rounds):
        for name, (stream, environments) in parties.items():
            best[name] = min(best.get(name, (np.inf,)), sampled(stream, environments()))
    print(
        f"{common.machine()}, commit {common.commit()}; {built.engine.cache.slots} slots a device"
    )
    one = best["one response"][0]
    rows = []
    for name, (cost, idle, given, step, cpu) in best.items():
        speeds = f"{1 / cost:,.0f}", f"{1 / cpu:,.0f}", f"{cost / one:.2f}"
        rows.append([name, *speeds, f"{idle:.1%}", f"{given:.0%}", f"{1e3 * step:.1f}"])
    head = ["", "tokens/s", "tokens a CPU second", "time a token over one response's"]
    head += ["slots empty while prompts wait", "given", "ms a step"]
    print(common.table(head, rows))


if __name__ == "__main__":
    app.run(main)
