"""The savings of drafts: decode steps and seconds of a recipe's rollout, with and without them.

    python -m experiments.benchmarks.drafts --config=configs/tiny.py --groups=40

Samples the same groups with the recipe's first weights once for each number of drafts, in turns,
and fails where a token or a log-probability differs. Decode steps count those of the busiest shard.
"""

import importlib.util
import time

import jax
import numpy as np
from absl import app, flags

from dapo_jax.run import build, fit
from dapo_jax.sampler.cache import DRAFT_TOKENS
from dapo_jax.sampler.session import Session, Stream
from experiments.benchmarks import common
from sharding.mesh import split_cpu

FLAGS = flags.FLAGS
flags.DEFINE_string("config", "configs/tiny.py", "The recipe.")
flags.DEFINE_integer("groups", 40, "Groups that are sampled.")
flags.DEFINE_integer("rounds", 3, "Rounds, of which the best counts.")


def recipe(path: str, draft_tokens: int):
    """The recipe in a file, with so many drafts."""
    spec = importlib.util.spec_from_file_location("recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    config.rollout.draft_tokens = draft_tokens
    return config


def sample(programs, weights, how, prompts):
    """Samples a group of each prompt: ({(cursor, sample): response}, session, seconds)."""
    start = time.perf_counter()
    session = Session(programs.engine, weights, Stream(jax.random.key(3), how))
    for cursor, prompt in enumerate(prompts):
        session.submit(cursor, prompt, group_size=programs.config.rollout.group_size)
    responses = {}
    while session.unfinished:
        for group in session.step():
            responses |= {(group.cursor, i): r for i, r in enumerate(group.responses)}
    return responses, session, time.perf_counter() - start


def main(_):
    first = recipe(FLAGS.config, 0)
    split_cpu(first.mesh.cpu_devices)
    tokenizer = build.tokenizer(first)
    data = build.load_data(first, tokenizer, training=True)
    prompts, how = data.train.prompts[: FLAGS.groups], build.sampling(first, tokenizer)
    cases = {}
    for count in DRAFT_TOKENS:
        config = recipe(FLAGS.config, count)
        fit.fit_training(config)
        programs = build.programs(config, tokenizer.vocab_size)
        weights = programs.reshard(programs.start_params(), programs.load_start_weights())
        programs.engine.compile(how)
        cases[count] = (programs, weights)
    best, expected = {}, None
    for _ in range(FLAGS.rounds):
        for count, (programs, weights) in cases.items():
            responses, session, seconds = sample(programs, weights, how, prompts)
            expected = expected or responses
            for request, response in responses.items():
                for name in ("tokens_T", "behavior_logp_T"):
                    ours, theirs = (getattr(r, name) for r in (response, expected[request]))
                    np.testing.assert_array_equal(ours, theirs)
            best[count] = min(best.get(count, (np.inf,)), (seconds, session), key=lambda b: b[0])
    tokens = sum(len(response.tokens_T) for response in expected.values())
    rows = []
    for count, (seconds, session) in best.items():
        tail = [block for block in session.blocks if not block.waiting]
        rows.append(
            [
                count,
                sum(block.decode_steps for block in session.blocks),
                sum(block.decode_steps for block in tail),
                f"{sum(b.end_seconds - b.start_seconds for b in tail):.2f}",
                f"{seconds:.2f}",
                f"{tokens / seconds:,.0f}",
            ]
        )
    print(f"{FLAGS.config} at {common.commit()} on {common.machine()}: {tokens:,} tokens")
    heads = ["drafts", "decode steps", "after the queue", "their seconds", "seconds", "tokens/s"]
    print(common.table(heads, rows))


if __name__ == "__main__":
    app.run(main)
