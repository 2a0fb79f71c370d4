"""The sampler's log-probabilities are the learner's, bit for bit (models/kernels/tiles.py)."""

import numpy as np
import pytest
from engines import PROMPTS, RUN_KEY, SAMPLING, programs
from golden import directory

from dapo_jax import learner
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.types import Prompt


def both(built, *, cursors=(7, 12), group_size=4):
    """Samples and recomputes: (the sampler's, the learner's log-probabilities, the update's)."""
    state, start = built.start_state(), built.load_start_weights()
    session = Session(built.engine, built.reshard(state.params, start), Stream(RUN_KEY, SAMPLING))
    for cursor in cursors:
        session.submit(cursor, Prompt(PROMPTS[cursor][:17]), group_size=group_size)
    groups = []
    while session.unfinished:
        groups += session.step()
    advantage_PG = np.tile(np.float32([1, -1]), (len(groups), group_size // 2))
    batch = learner.minibatch(groups, advantage_PG, built.learning, built.mesh)
    learned_MBT = built.recompute_old_logp(state.params, start, batch)
    is_sampled_MBT = np.asarray(batch.is_response_BT)
    sampled, learned = (
        np.asarray(a)[is_sampled_MBT] for a in (batch.behavior_logp_BT, learned_MBT)
    )
    assert len(sampled) == sum(len(r.tokens_T) for group in groups for r in group.responses)
    _, metrics = built.update(state, start, batch, 1e-3)
    return sampled, learned, float(metrics["ratio_gap"])


MODELS = ["qwen2/tied", "qwen3/untied", "llama/llama3", "gemma3/1b", "qwen3_moe/normed"]
ALONE, DATA, MODEL = ({"data": d, "model": m} for d, m in ((1, 1), (2, 1), (1, 2)))


@pytest.mark.parametrize("mesh", [ALONE, DATA, MODEL], ids=["one", "data", "model"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_the_learner_computes_what_the_sampler_recorded(model, dtype, mesh, tmp_path):
    folder = directory(model, tmp_path)
    family = model.partition("/")[0].replace("gemma3", "gemma3_text")
    built = programs(family, folder, mesh=mesh, model={"compute_dtype": dtype})
    sampled, learned, gap = both(built)
    print((sampled != learned).mean(), abs(sampled - learned).max(), gap)
    np.testing.assert_array_equal(learned, sampled)
    assert gap == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["gpu_interpret", "tpu_interpret"])
def test_interpreted_kernels_do_so_too(kernels, dtype, tmp_path):
    model = {"compute_dtype": dtype, "kernels": kernels}
    built = programs("qwen2", directory("qwen2/tied", tmp_path), mesh=ALONE, model=model)
    sampled, learned, gap = both(built)
    np.testing.assert_array_equal(learned, sampled)
    assert gap == 0
