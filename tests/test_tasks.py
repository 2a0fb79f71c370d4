"""Tasks and evaluation sets, also ones from outside the packages: an added file, or flags alone."""

import collections
import fractions
import gzip
import json
import pathlib
import pickle
import re
import sys

import numpy as np
import pytest
from absl import flags
from processes import ROOT, ran

from configs import base
from dapo_jax.algorithm import group_advantage, informative_groups, outcome_reward
from dapo_jax.cli import config_flags
from dapo_jax.evaluation import settings_of
from dapo_jax.tasks.base import graded, load_examples, make_task
from dapo_jax.tasks.math_problems import MathProblems, MathTask
from dapo_jax.tasks.readers import DataError
from dapo_jax.types import Example, Group, Prompt, Response, Verdict

OUTSIDE = pathlib.Path(__file__).parent / "ext_tasks"
COUNTDOWN = "countdown:Countdown"


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    """Tasks of one's own are found where PYTHONPATH points."""
    monkeypatch.syspath_prepend(str(OUTSIDE))


USER = ({"role": "user", "content": "hi"},)
EXAMPLE = Example(USER, "5", "sums.csv", 3)


class Letters:
    """A tokenizer of one id a character, whose template begins no answer."""

    opening = ""

    def decode(self, ids):
        return "".join(map(chr, ids))


def group(texts, example):
    responses = tuple(
        Response(np.array(list(map(ord, text)), np.int32), np.zeros(len(text), np.float32), True)
        for text in texts
    )
    return Group(3, Prompt(np.zeros(1, np.int32), example), responses)


def made(**settings):
    config = base.get_config()
    config.data.train = base.dataset(**settings)
    return make_task("data.train", base.mixture_settings(config)["data.train"])


def test_a_task_is_made_of_the_settings_that_it_takes():
    task = made(task=COUNTDOWN, count=7, seed=5, args={"numbers": 4})
    assert (task.count, task.seed, task.numbers) == (7, 5, 4)
    assert len(list(task.load())) == 7
    assert made(path="x.jsonl", prompt_field="problem", rules="strict") == MathProblems(
        path="x.jsonl", prompt_field="problem", rules="strict"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"task": "arithmetik"},
            "data.train.task = 'arithmetik': there is no such task. Built in ",
        ),
        (
            {"task": "nowhere.x:Y"},
            "which cannot be imported .in the working directory or on PYTHONPATH.: No",
        ),
        (
            {"task": "countdown:Count"},
            "'countdown:Count', which cannot be imported .*no attribute 'Count'",
        ),
        ({"task": "countdown:ANSWER"}, "'countdown:ANSWER', which has no method load, grade"),
        ({"task": "reasoning_gym"}, r"missing a required.* argument: 'name' \(data.train.args\)"),
        (
            {"task": COUNTDOWN, "args": {"number": 4}},
            r"argument 'number' \(data.train.args\); it takes \(count: int, ",
        ),
        (
            {"kind": "arithmetic", "path": "sums.csv"},
            "data.train.path = 'sums.csv', but data.train.task = 'arithmetic' takes no path",
        ),
        ({"task": COUNTDOWN, "answer_field": "sum"}, r"takes no answer_field .*answer_field=\)"),
        (
            {"task": COUNTDOWN, "args": {"on_bad_row": "skip", "path": "a"}},
            "train.args has on_bad_row, path, which the config has keys for",
        ),
    ],
)
def test_a_task_that_cannot_be_made_is_named_with_what_there_is(settings, message):
    with pytest.raises(ValueError, match=message):
        made(**settings)


def test_a_tasks_score_is_the_reward_and_filtering_knows_correctness_alone():
    example = Example((), "5", "", 0, extra={"numbers": [2, 3]})
    texts = ["Answer: 2+3", "Answer: 2*3", "no", "Answer: 2+("]
    (ungraded, task) = group(texts, example), made(task=COUNTDOWN)
    result = graded(ungraded, task=task, tokenizer=Letters())
    assert result.score_G.tolist() == [1.0, 0.1, -1.0, -1.0]
    assert result.correct_G.tolist() == [True, False, False, False]
    assert [response.text for response in result.responses] == texts
    assert result.length_G.tolist() == ungraded.length_G.tolist()
    plain = graded(ungraded, task=MathTask(), tokenizer=Letters())
    assert np.isnan(plain.score_G).all()

    wrong = graded(group(texts[1:], example), task=task, tokenizer=Letters())
    assert not informative_groups(wrong.correct_G[None])[0]
    advantage_G = group_advantage(outcome_reward(wrong.correct_G[None], wrong.score_G[None]))[0]
    assert advantage_G[0] > 0 > advantage_G[1] == advantage_G[2]


def test_what_a_task_measures_is_copied_into_plain_numbers():
    """A task may use its dict again, and it may be one that cannot be sent to other processes."""

    class Counting:
        def __init__(self):
            self.counts = collections.defaultdict(lambda: fractions.Fraction(0))

        def grade(self, response, example):
            self.counts["letters"] += len(response)
            return Verdict(True, None, "", measures=self.counts)

    result = graded(group(["a", "bc"], EXAMPLE), task=Counting(), tokenizer=Letters())
    _, verdicts = pickle.loads(pickle.dumps(result.grades))
    assert [verdict.measures for verdict in verdicts] == [{"letters": 1.0}, {"letters": 3.0}]


@pytest.mark.parametrize(
    "verdict",
    [
        True,
        Verdict(True, "", "", float("nan")),
        Verdict(1, "", ""),
        Verdict(True, 5, ""),
        Verdict(True, None, None),
        Verdict(True, None, "", measures={"a/b": 1}),
        Verdict(True, None, "", measures={"lines": 10**400}),
    ],
)
def test_a_verdict_that_is_none_is_named(verdict):
    class Careless:
        def grade(self, response, example):
            return verdict

    message = rf"^Careless graded a response {re.escape(f'{verdict!r:.50}')}.* \(sums.csv, row 3\)$"
    with pytest.raises(DataError, match=message):
        graded(group(["a"], EXAMPLE), task=Careless(), tokenizer=Letters())


def test_what_the_prompt_has_of_an_answer_is_graded_with_it():
    """A template's <think>, or an answer's first words, are missing in no response's form."""

    class Sees:
        def grade(self, response, example):
            return Verdict(True, response, "")

    def seen(example, opening):
        tokenizer = Letters()
        tokenizer.opening = opening
        (response,) = graded(group(["hm"], example), task=Sees(), tokenizer=tokenizer).responses
        return response.text, response.verdict.prediction

    begun = (*USER, {"role": "assistant", "content": "So "})
    assert seen(EXAMPLE, "<think>\n") == ("hm", "<think>\nhm")
    assert seen(EXAMPLE, "") == ("hm", "hm")
    assert seen(Example(begun, "5", "sums.csv", 4), "<think>\n") == ("hm", "So hm")


def test_a_grader_that_raises_says_at_which_response():
    class Breaks:
        def grade(self, response, example):
            return Verdict({"a": True}[response], None, "")

    with pytest.raises(KeyError, match="'b'") as error:
        graded(group(["a", "b"], EXAMPLE), task=Breaks(), tokenizer=Letters())
    (note,) = error.value.__notes__
    assert note == "(Breaks.grade, sums.csv, row 3: answer '5', response 'b')"


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (None, r"load\(\) gave None, but must give examples"),
        ("hi", r"load\(\) gave 'hi', but must"),
        (Example(USER, "1", "x", 0), r"load\(\) gave Example\(.*, but must"),
        (["hi"], "example 0 .* 'hi' is no Example with messages"),
        ([Example("hi", "1", "x", 0)], 'is no Example with messages {"role": text, "content'),
        ([Example((), "1", "x", 0)], "is no Example with messages"),
        ([Example(USER, "1", "x", 0), Example(USER, 1, "x", 0)], "example 1 .* is no Example"),
    ],
)
def test_what_a_task_must_not_load_is_named(loaded, message):
    class Careless:
        def load(self):
            return loaded

    with pytest.raises(DataError, match=f"Careless.*{message}"):
        load_examples(Careless(), "careless")


# Evaluation sets


SMALL = "--config=tests/small_config.py"
# One program for decoding; the rest is the command as it is.
COMMAND = """
import runpy, sys
from dapo_jax.sampler import cache
cache.PARTS = ((1, 1),)
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


def run(command, workdir, *arguments):
    """Runs a command on the small config."""
    arguments = [f"--workdir={workdir}", "--config.mesh.cpu_devices=1", *arguments]
    path = f"{ROOT}:{OUTSIDE}"
    return ran("-c", COMMAND, f"dapo_jax.{command}", SMALL, *arguments, PYTHONPATH=path).stdout


def unzipped(path):
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.slow
def test_a_task_and_an_evaluation_set_from_outside(tmp_path):
    """The rewards are the task's scores; a new set is evaluated beside those of the config."""
    run(
        "train",
        tmp_path,
        "--config.num_steps=1",
        "--config.algo.dynamic_sampling=False",
        "--config.eval.every_steps=0",
        f"--config.data.train.task={COUNTDOWN}",
        "--config.data.train.count=50",
    )
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    responses = unzipped(tmp_path / "rollouts" / "0.jsonl.gz")
    assert {r["source"] for r in responses} == {"countdown"}
    score = {"correct": 1.0, "wrong": 0.1, "no_answer": -1.0}
    in_time = [r for r in responses if r["tokens"] <= 24]  # the others are punished for length
    assert in_time and all(r["reward"] == score[r["status"]] for r in in_time)
    assert row["updates"] == 2 and row["grad_norm"] > 0 == row["accuracy/mean"]

    file = tmp_path / "wild.jsonl"
    rows = [{"problem": f"What is {n}+1?", "answer": n + 1} for n in range(10, 13)]
    file.write_text("\n".join(map(json.dumps, rows)))
    of_set = "--config.eval.sets.wild."
    printed = run(
        "evaluate",
        tmp_path,
        f"{of_set}path={file}",
        f"{of_set}prompt_field=problem",
        f"{of_set}template",
        "dapo",
        f"{of_set}rules=strict_box",  # in which the policy never answers
        f"{of_set}k=2",
        f"{of_set}max_prompts=2",
        "--config.eval.sets.arithmetic.count=3",
    )
    assert "wild.jsonl: 3 rows, 0 duplicates" in printed
    assert "wild: 100% of the responses have no answer that is found" in printed
    (wild,) = (tmp_path / "eval").glob("1.wild.t1_p1_k2_n2_strict_box_s0.*.json")
    results = [json.loads(path.read_text()) for path in (tmp_path / "eval").glob("*.json")]
    sets = {name: scores for result in results for name, scores in result["sets"].items()}
    graded_truths = [row["ground_truth"] for row in unzipped(wild.with_suffix(".jsonl.gz"))]
    assert graded_truths == ["11", "11", "12", "12"]
    assert sets["wild"]["problems"] == 2 and "mean@2" in sets["wild"]
    assert sets["arithmetic"]["problems"] == 3 and "mean@4" in sets["arithmetic"]


def parsed(monkeypatch, *arguments):
    """The config that a command gets from its flags."""
    values = flags.FlagValues()
    holder = config_flags.define_config(flag_values=values)
    monkeypatch.setattr(sys, "argv", ["command", SMALL, *arguments])
    values(sys.argv)
    return holder.value


def test_flags_change_known_sets_and_add_others_in_the_same_way(monkeypatch):
    changes = ("path=a.csv", "k=3", "top_p=0.5", "levels=(5,)", "args={}", "max_prompts=0")
    names = ("arithmetic", "new", "math_500")
    arguments = [f"--config.eval.sets.{name}.{it}" for name in names for it in changes]
    config = parsed(monkeypatch, *arguments, "-config.eval.sets.new.temperature", "2")
    assert set(config.eval.sets) == set(names)
    for name, settings in base.eval_settings(config).items():
        assert (settings["path"], settings["k"], settings["top_p"]) == ("a.csv", 3, 0.5)
        assert (settings["levels"], settings["max_prompts"]) == ((5,), 0)
        assert settings["temperature"] == (2.0 if name == "new" else config.eval.temperature)
    assert config.is_locked


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("eval.sets.arithmetic.promt_field=x", "promt_field.*Did you mean .*prompt_field"),
        ("eval.sets.new.promt_field=x", "promt_field.*Did you mean .*prompt_field"),
        ("eval.sets.new.k=many", "k.*many"),
        ("eval.sets.math-500.k=1", "eval.sets.math-500: .* a name of letters, digits and _"),
        ("eval.sets.500.k=1", "eval.sets.500: .* a name of letters, digits and _"),
        ("eval.sets.arithmatic.count=3", r"the config has no such set \(Did you mean arithmetic\?"),
        ("data.trian.args.numbers=4", r"no key 'data.trian.args.numbers'.*data\.train\.args\?"),
        ("data.mixture.a-b.path=x.csv", r"data.mixture.a-b: .* a name of letters"),
        ("data.mixture.more.weight=2", "data.mixture.more: the config has no such set; a new"),
    ],
)
def test_a_flag_of_a_set_that_cannot_be_is_refused(monkeypatch, flag, message):
    path = ["--config.eval.sets.new.path=a.csv"] if ".new." in flag else []
    with pytest.raises((flags.Error, AttributeError, KeyError)) as refused:
        parsed(monkeypatch, *path, f"--config.{flag}")
    assert re.search(message, config_flags.error_line(refused.value))


def test_an_argument_may_have_a_flag_of_its_own(monkeypatch):
    arguments = ["data.train.args.near=0.5", "eval.sets.new.path=a.csv", "eval.sets.new.args.k=4"]
    arguments += ["tokenizer.chat_args.enable_thinking=False", "tokenizer.chat_args.effort=low"]
    config = parsed(monkeypatch, *(f"--config.{it}" for it in arguments))
    assert config.data.train.args.to_dict() == {"near": 0.5}
    assert config.eval.sets.new.args.to_dict() == {"k": 4}
    chosen = {"enable_thinking": False, "effort": "low"}
    assert dict(base.leaves(config))["tokenizer.chat_args"] == chosen


def test_what_a_set_gives_its_own_task_may_be_nested(monkeypatch):
    args = {"name": "chain_sum", "config": {"max_terms": 3}}
    config = parsed(
        monkeypatch,
        "--config.eval.sets.new.task=reasoning_gym",
        f"--config.eval.sets.new.args={args}",
    )
    settings = base.eval_settings(config)["new"]
    assert settings["args"] == args and type(settings["args"]["config"]) is dict
    assert settings_of(config)["new"]["args"] == args
