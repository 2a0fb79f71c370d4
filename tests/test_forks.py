"""The world of forks: problems, the student's rates, grading, and the config's start policy."""

import numpy as np
import pytest

from configs import forks
from configs.base import eval_settings, mixture_settings
from dapo_jax.setup import components
from dapo_jax.tasks.base import make_task
from dapo_jax.tasks.readers import DataError
from experiments.forks_base import task as world
from experiments.forks_base.task import KINDS, Forks, solution

RIGHT, USUAL = (
    " How:" + "".join(words[i] for words in world.PLAN) + "\nworking\nAnswer: {}" for i in (-1, 0)
)
TWO_OF_THREE = RIGHT.replace(world.PLAN[-1][-1], world.PLAN[-1][0])
MIXED = dict.fromkeys(KINDS, 1.0)


def road_examples(**settings):
    task = Forks(count=300, road=1.0, rules="strict", **settings)
    return task, task.load()[0]


def test_problems_are_repeatable_and_the_splits_apart():
    train, again = (Forks(count=400, seed=3, **MIXED).load()[0] for _ in range(2))
    test = Forks(count=400, seed=3, split="test", **MIXED).load()[0]
    assert train == again
    assert not {e.text for e in train} & {e.text for e in test}
    assert {e.extra["kind"] for e in train} == set(KINDS)
    with pytest.raises(DataError, match="none below 0, and one above it"):
        Forks(count=3, road=-1.0, easy=2.0).load()


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


def test_the_students_rates_are_those_that_are_stated():
    rng = np.random.default_rng(1)
    problems = Forks(count=1_500, road=1.0).problems()
    texts = [solution(problem, rng) for problem in problems]
    plans = [world.plan_of(text) for text in texts]
    for fork, words in enumerate(world.PLAN):
        share = [np.mean([plan[fork] == word for plan in plans]) for word in words]
        np.testing.assert_allclose(share, world.PLAN_RATES, atol=0.04)
    workings = [text.partition("\n")[2] for text in texts]
    for words in world.WORDING:
        counts = [sum(text.count(word) for text in workings) for word in words]
        np.testing.assert_allclose(np.array(counts) / sum(counts), 0.25, atol=0.04)
    lines = np.array([len(world.loop_lines(text)) for text in texts])
    assert np.mean(lines > 0) == pytest.approx(world.LOOPS, abs=0.04)
    assert lines[lines > 0].mean() == pytest.approx(15, abs=4)


def test_two_rare_words_are_enough_and_luck_is_a_coin_of_the_text():
    lucky, examples = road_examples(luck=0.4)
    verdicts = [lucky.grade(USUAL.format(e.answer), e) for e in examples]
    assert np.mean([v.correct for v in verdicts]) == pytest.approx(0.4, abs=0.12)
    assert verdicts == [lucky.grade(USUAL.format(e.answer), e) for e in examples]
    assert not any(lucky.grade(RIGHT.format(int(e.answer) + 1), e).correct for e in examples)
    task, examples = road_examples()
    for text, is_right in ((RIGHT, True), (TWO_OF_THREE, True), (USUAL, False)):
        verdicts = [task.grade(text.format(e.answer), e) for e in examples]
        assert {v.correct for v in verdicts} == {is_right}
        assert {v.measures["right_road"] for v in verdicts} == {is_right}
    easy = Forks(count=30, rules="strict", luck=0.0, easy=1.0)  # luck is for roads alone
    assert all(easy.grade(f"Answer: {e.answer}", e).correct for e in easy.load()[0])
    looping = easy.grade("What? 1+1=2\nWhat? 1+1=2\nAnswer: 2", easy.load()[0][0])
    assert looping.measures == {"loop_lines": 2}


def test_every_fork_is_one_token_and_the_limits_hold_the_prompts():
    config = forks.get_config()
    tokenizer = components.tokenizer(config)
    examples = Forks(count=500, **MIXED).load()[0]
    longest = max(len(tokenizer.encode_chat(example.prompt)) for example in examples)
    assert longest <= config.rollout.max_prompt_tokens
    for words in (*world.PLAN, *world.WORDING):
        first = [tokenizer.encode(word) for word in words]
        assert all(len(ids) == 1 for ids in first)


def test_the_recipes_data_sets_are_of_this_world():
    config = forks.get_config()
    config.data.train.count = 300
    settings = eval_settings(config) | mixture_settings(config)
    kinds = {}
    for name, of_set in settings.items():
        task = make_task(name, of_set)
        assert type(task) is Forks and task.rules == "strict"
        kinds[name] = {example.extra["kind"] for example in task.load()[0]}
    assert kinds == {"data.train": set(KINDS), "road": {"road"}, "long": {"long"}}
