"""A step of what a config builds for a small model on a mesh: sampled, then trained on once."""

import jax
import numpy as np

from configs import base
from dapo_jax import learner
from dapo_jax.sampler.decode import Sampling
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.setup import components
from dapo_jax.types import Prompt

SAMPLING = Sampling(
    max_response_tokens=20,
    temperature=0.7,
    top_p=1.0,
    top_k=0,
    stop_ids=(3, 17, 40),
    pad_id=0,
    vocab_size=61,
)
PROMPTS = {7: np.array([5, 6, 7]), 100: np.arange(10, 27)}


def programs(family: str, folder, *, lora_rank: int = 0, **changes):
    """The programs of a config (changes: keys by section), heads split over two devices."""
    config = base.get_config()
    config.model.family, config.model.path = family, str(folder)
    config.model.compute_dtype = "float32"
    config.rollout.max_prompt_tokens = 17
    config.rollout.max_response_tokens = SAMPLING.max_response_tokens
    config.rollout.num_prompts, config.rollout.group_size = len(PROMPTS), 4
    config.rollout.temperature = SAMPLING.temperature
    config.rollout.cache_mib, config.rollout.slot_tokens = 1, 20
    config.rollout.page_tokens, config.rollout.block_tokens = 8, 4
    config.updates_per_step = 1
    config.learner.row_tokens, config.learner.micro_batch_rows = 48, 2
    config.learner.remat = "none"
    config.learner.lora_rank = lora_rank
    config.mesh.data, config.mesh.model = 1, 2
    config.update(changes)
    devices = jax.devices()[: config.mesh.data * config.mesh.model]
    return components.programs(config, SAMPLING.vocab_size, devices=devices)


def step(built):
    """(state before, sampled groups, state after, the update's metrics); before: on the host."""
    state, start = built.start_state(), built.load_start_weights()
    before = jax.tree.map(np.asarray, state.params)
    params = built.reshard(state.params, start)
    session = Session(built.engine, params, Stream(jax.random.key(11), SAMPLING))
    for cursor, prompt in PROMPTS.items():
        session.submit(cursor, Prompt(prompt), group_size=4)
    groups = []
    while session.unfinished:
        groups += session.step()
    advantage_PG = np.tile(np.float32([1, -1, 1, -1]), (len(groups), 1))
    batch = learner.minibatch(groups, advantage_PG, built.learning, built.mesh)
    state, metrics = built.update(state, start, batch, 1e-3)
    return before, groups, state, metrics


def check_log_probs(groups, logits_of):
    """Asserts that sampled log-probabilities are those of logits_TV = logits_of(tokens_T)."""
    assert sum(len(group.responses) for group in groups) == 4 * len(PROMPTS)
    for group in groups:
        for response in group.responses:
            tokens_T = np.concatenate([PROMPTS[group.cursor], response.tokens_T])
            logp_TV = logits_of(tokens_T)[:, : SAMPLING.vocab_size] / SAMPLING.temperature
            logp_TV -= np.logaddexp.reduce(logp_TV, axis=-1, keepdims=True)
            logp_T = logp_TV[np.arange(len(tokens_T) - 1), tokens_T[1:]]
            expected_T = logp_T[-len(response.tokens_T) :]
            np.testing.assert_allclose(response.behavior_logp_T, expected_T, atol=1e-4)
