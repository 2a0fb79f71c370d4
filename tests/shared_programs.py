"""Runs in the process of the tests, which share their compiled programs; and their config."""

import dataclasses

import pytest
from small_config import small

from dapo_jax.sampler import cache
from dapo_jax.setup import components

STEPS = 3
MADE, LEARNERS = {}, {}  # programs, of one file of tests
# The cache has slots for a part of the step only.
KEYS = {
    "num_steps": STEPS,
    "rollout.max_response_tokens": 48,
    "rollout.page_tokens": 48,
    "algo.overlong_cache_tokens": 20,
    "learner.row_tokens": 192,
    "eval.sets.arithmetic.count": 8,
    "eval.every_steps": 2,
    "checkpoint.every_steps": 2,
    "checkpoint.keep": 3,
}


def small_config(preset: str = "", **keys):
    return small(preset, **KEYS | keys)


@pytest.fixture(scope="module", autouse=True)
def programs_compiled_once():
    """Runs of one config share their programs; decoding has one, for all slots."""
    make, compile_anew = components.programs, components.Programs.compile_learner

    def programs(config, vocab_size, devices=None):
        new = make(config, vocab_size, devices=devices)
        shapes = (new.sizes, new.settings, new.engine.cache)
        return dataclasses.replace(MADE.setdefault(shapes, new), config=config)

    def compile_learner(self):
        if self.update not in LEARNERS:
            LEARNERS[self.update] = compile_anew(self)
        return LEARNERS[self.update]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "PARTS", ((1, 1),))
        patch.setattr(components, "programs", programs)
        patch.setattr(components.Programs, "compile_learner", compile_learner)
        yield
    # Each maps memory some thousand times: with those of all files a process reached Linux's limit
    # of 65,530, and XLA aborted.
    MADE.clear()
    LEARNERS.clear()
