"""The sampler's log-probabilities are the learner's, bit for bit (models/kernels/tiles.py)."""

import itertools

import numpy as np
import pytest
from engines import PROMPTS, RUN_KEY, SAMPLING, programs
from golden import directory

from dapo_jax import learner
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.types import Prompt

ONE, DATA, MODEL = ({"data": d, "model": m} for d, m in ((1, 1), (2, 1), (1, 2)))
FAMILIES = {
    "qwen2/tied": "qwen2",
    "qwen3/untied": "qwen3",
    "llama/llama3": "llama",
    "gemma3/1b": "gemma3_text",  # with windows that are shorter than the text
    "qwen3_moe/normed": "qwen3_moe",
}


def both(built):
    """Samples a batch and takes its first update.

    Returns the log-probabilities of its tokens, the sampler's and the learner's, and the update's
    ratio_gap.
    """
    state, start = built.start_state(), built.load_start_weights()
    session = Session(built.engine, built.reshard(state.params, start), Stream(RUN_KEY, SAMPLING))
    for cursor in (7, 12):
        session.submit(cursor, Prompt(PROMPTS[cursor][:17]), group_size=4)
    groups = []
    while session.unfinished:
        groups += session.step()
    advantage_PG = np.tile(np.float32([1, -1, 1, -1]), (len(groups), 1))
    batch = learner.minibatch(groups, advantage_PG, built.learning, built.mesh)
    learned_MBT = built.recompute_old_logp(state.params, start, batch)
    is_sampled_MBT = np.asarray(batch.is_response_BT)
    pair = batch.behavior_logp_BT, learned_MBT
    sampled, learned = (np.asarray(a)[is_sampled_MBT] for a in pair)
    assert len(sampled) == sum(len(r.tokens_T) for group in groups for r in group.responses)
    _, metrics = built.update(state, start, batch, 1e-3)
    return sampled, learned, float(metrics["ratio_gap"])


def in_ci(model: str, dtype: str, mesh: dict) -> bool:
    """Chooses those that a short run of the tests has: each family, dtype and mesh."""
    return (model, dtype, mesh) in [
        ("qwen2/tied", "float32", ONE),
        ("qwen2/tied", "bfloat16", DATA),
        ("qwen3/untied", "float32", MODEL),
        ("llama/llama3", "float32", DATA),
        ("gemma3/1b", "bfloat16", MODEL),
        ("qwen3_moe/normed", "float32", ONE),
    ]


RECIPES = list(itertools.product(FAMILIES, ("float32", "bfloat16"), (ONE, DATA, MODEL)))


@pytest.mark.parametrize(
    ("model", "dtype", "mesh"),
    [pytest.param(*it, marks=() if in_ci(*it) else pytest.mark.slow) for it in RECIPES],
)
def test_the_learner_computes_what_the_sampler_recorded(model, dtype, mesh, tmp_path):
    folder = directory(model, tmp_path)
    built = programs(FAMILIES[model], folder, mesh=mesh, model={"compute_dtype": dtype})
    sampled, learned, gap = both(built)
    np.testing.assert_array_equal(learned, sampled)
    assert gap == 0


@pytest.mark.parametrize(
    ("dtype", "rollout", "more"),
    [
        ("float32", {"page_tokens": 4, "block_tokens": 2}, {}),
        ("bfloat16", {"page_tokens": 16, "block_tokens": 16}, {"lora_rank": 4}),
    ],
    ids=["small pages", "LoRA, a page a block"],
)
def test_it_does_so_with_other_pages_and_adapters(dtype, rollout, more, tmp_path):
    folder, model = directory("qwen2/tied", tmp_path), {"compute_dtype": dtype}
    built = programs("qwen2", folder, mesh=ONE, model=model, rollout=rollout, **more)
    sampled, learned, gap = both(built)
    np.testing.assert_array_equal(learned, sampled)
    assert gap == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["gpu_interpret", "tpu_interpret"])
def test_interpreted_kernels_do_so_too(kernels, dtype, tmp_path):
    model = {"compute_dtype": dtype, "kernels": kernels}
    built = programs("qwen2", directory("qwen2/tied", tmp_path), mesh=ONE, model=model)
    sampled, learned, gap = both(built)
    np.testing.assert_array_equal(learned, sampled)
    assert gap == 0
