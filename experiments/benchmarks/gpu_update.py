"""An update of full rows on one device, and the FLOP of its products; `gpu_decode` runs it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from configs import base
from dapo_jax import learner
from dapo_jax.setup import components
from dapo_jax.types import Group, Prompt, Response
from experiments.benchmarks import common

PROMPT, ROWS, MICRO_BATCHES = 64, 1, 4


def measure(preset: str, row_tokens: int, *, repeats: int) -> tuple[float, float]:
    """(seconds of an update, FLOP of its products): bf16, layers recomputed, one response a row."""
    config = base.get_config()
    config.model.preset, config.model.compute_dtype = preset, "bfloat16"
    config.learner.row_tokens, config.learner.micro_batch_rows = row_tokens, ROWS
    config.learner.remat = "full"
    policy = components.programs(config, vocab_size=0, devices=jax.devices()[:1])
    state = policy.start_state()
    rng = np.random.default_rng(0)
    length_PG = np.full((MICRO_BATCHES * ROWS, 1), row_tokens - PROMPT + 1)
    groups = [
        Group(
            cursor,
            Prompt(rng.integers(1, policy.sizes.vocab_size, PROMPT).astype(np.int32)),
            (response(rng, policy.sizes.vocab_size, int(length)),),
            0,
        )
        for cursor, (length,) in enumerate(length_PG)
    ]
    advantage_PG = rng.normal(size=length_PG.shape).astype(np.float32)
    learning = dataclasses.replace(policy.learning, update_responses=MICRO_BATCHES * ROWS)
    batch = learner.minibatch(groups, advantage_PG, learning, policy.mesh)

    def update():
        nonlocal state
        state, metrics = policy.update(state, None, batch, jnp.float32(1e-6))
        return metrics

    seconds = common.best_seconds(update, repeats=repeats)
    return seconds, common.update_flops(policy.sizes, PROMPT, length_PG)


def response(rng, vocab_size: int, tokens: int) -> Response:
    """Random tokens, whose log-probabilities are those of a uniform choice."""
    tokens_T = rng.integers(1, vocab_size, tokens).astype(np.int32)
    return Response(tokens_T, np.full(tokens, -np.log(vocab_size), np.float32), False)
