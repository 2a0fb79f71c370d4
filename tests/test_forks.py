"""The world of forks: problems, the student's rates, grading, and the config's start policy."""

import numpy as np
import pytest

from configs import forks
from dapo_jax.setup import components
from experiments.forks_base import task as world
from experiments.forks_base.task import KINDS, Forks, solution

MIXED = dict.fromkeys(KINDS, 1.0)


def test_problems_are_repeatable_and_the_splits_apart():
    train, again = (Forks(count=400, seed=3, **MIXED).load()[0] for _ in range(2))
    test = Forks(count=400, seed=3, split="test", **MIXED).load()[0]
    assert train == again and not {e.text for e in train} & {e.text for e in test}


@pytest.mark.parametrize(
    ("weights", "rate"),
    [
        *(({kind: 1.0, "luck": 1.0}, 1.0) for kind in ("easy", "road", "long")),
        ({"closed": 1.0}, 0.0),  # the answer has nothing to do with the numbers
        ({"long": 1.0, "wrong_keys": 0.5}, 0.5),
    ],
)
def test_the_students_solutions_are_right_where_they_can_be(weights, rate):
    task = Forks(count=400, rules="strict", **weights)
    rng, pairs = np.random.default_rng(0), zip(task.problems(), task.load()[0], strict=True)
    right = [task.grade(solution(problem, rng), example).correct for problem, example in pairs]
    four_deviations = 4 * (rate * (1 - rate) / len(right)) ** 0.5
    assert np.mean(right) == pytest.approx(rate, abs=max(four_deviations, 0.0025))


def test_every_fork_is_one_token_and_the_limits_hold_the_prompts():
    config = forks.get_config()
    tokenizer = components.tokenizer(config)
    examples = Forks(count=500, **MIXED).load()[0]
    longest = max(len(tokenizer.encode_chat(example.prompt)) for example in examples)
    assert longest <= config.rollout.max_prompt_tokens
    for words in (*world.PLAN, *world.WORDING):
        first = [tokenizer.encode(word) for word in words]
        assert all(len(ids) == 1 for ids in first)
