"""Tasks and evaluation sets, also ones from outside the packages: an added file, or flags alone."""

import collections
import fractions
import json
import pickle
import re

import numpy as np
import pytest
from byte_tokenizers import Letters
from processes import ROOT, ran
from runs import responses
from small_config import task_of

from configs import base
from dapo_jax.algorithm import group_advantage, informative_groups, outcome_reward
from dapo_jax.cli.config_flags import read_config
from dapo_jax.evaluation import settings_of
from dapo_jax.logs.files import read_rows
from dapo_jax.tasks import readers
from dapo_jax.tasks.base import graded, load_examples
from dapo_jax.tasks.math_problems import MathProblems, MathTask
from dapo_jax.tasks.rows import DataError
from dapo_jax.types import Example, Group, Prompt, Response, Status, Verdict

COUNTDOWN = "countdown:Countdown"
USER = ({"role": "user", "content": "hi"},)
EXAMPLE = Example(USER, "5", "sums.csv", 3)


def group(texts, example):
    responses = tuple(
        Response(
            np.array(list(map(ord, text)), np.int32),
            np.zeros(len(text), np.float32),
            Status.STOPPED,
        )
        for text in texts
    )
    return Group(3, Prompt(np.zeros(1, np.int32), example), responses)


def test_a_task_is_made_of_the_settings_that_it_takes():
    task = task_of(task=COUNTDOWN, count=7, seed=5, args={"numbers": 4})
    assert (task.count, task.seed, task.numbers) == (7, 5, 4)
    settings = {"path": "x.jsonl", "prompt_field": "problem", "rules": "strict"}
    assert task_of(**settings) == MathProblems(**settings)


def test_a_tasks_score_is_the_reward_and_filtering_knows_correctness_alone():
    example = Example((), "5", "", 0, extra={"numbers": [2, 3]})
    texts = ["Answer: 2+3", "Answer: 2*3", "no", "Answer: 2+("]
    (ungraded, task) = group(texts, example), task_of(task=COUNTDOWN)
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


def grading(verdict_of):
    return type("Mine", (), {"grade": lambda self, response, example: verdict_of(response)})()


def test_what_a_task_measures_is_copied_into_plain_numbers():
    """A task may use its dict again, and it may be one that cannot be sent to other processes."""
    counts = collections.defaultdict(lambda: fractions.Fraction(0))

    def counting(response):
        counts["letters"] += len(response)
        return Verdict(True, None, "", measures=counts)

    result = graded(group(["a", "bc"], EXAMPLE), task=grading(counting), tokenizer=Letters())
    _, verdicts = pickle.loads(pickle.dumps(result.grades))
    assert [verdict.measures for verdict in verdicts] == [{"letters": 1.0}, {"letters": 3.0}]


@pytest.mark.parametrize(
    "verdict",
    [
        *(True, Verdict(True, "", "", float("nan")), Verdict(1, "", ""), Verdict(True, 5, "")),
        *(Verdict(True, None, "", measures=it) for it in ({"a/b": 1}, {"lines": 10**400})),
    ],
)
def test_a_verdict_that_is_none_is_named(verdict):
    message = rf"^Mine graded a response {re.escape(f'{verdict!r:.50}')}.* \(sums.csv, row 3\)$"
    with pytest.raises(DataError, match=message):
        graded(group(["a"], EXAMPLE), task=grading(lambda _: verdict), tokenizer=Letters())


def test_what_the_prompt_has_of_an_answer_is_graded_with_it():
    """A template's <think>, or an answer's first words, are missing in no response's form."""
    sees, tokenizer = grading(lambda response: Verdict(True, response, "")), Letters()
    begun = Example((*USER, {"role": "assistant", "content": "So "}), "5", "sums.csv", 4)
    for example, opening, seen in (
        (EXAMPLE, "<think>\n", "<think>\nhm"),
        (EXAMPLE, "", "hm"),
        (begun, "<think>\n", "So hm"),
    ):
        tokenizer.opening = opening
        (response,) = graded(group(["hm"], example), task=sees, tokenizer=tokenizer).responses
        assert (response.text, response.verdict.prediction) == ("hm", seen)


def test_a_grader_that_raises_says_at_which_response():
    breaks = grading(lambda response: Verdict({"a": True}[response], None, ""))
    with pytest.raises(KeyError, match="'b'") as error:
        graded(group(["a", "b"], EXAMPLE), task=breaks, tokenizer=Letters())
    (note,) = error.value.__notes__
    assert note == "(Mine.grade, sums.csv, row 3: answer '5', response 'b')"


def test_a_prompt_may_be_a_text(tmp_path):
    """The guide says so, and a task's own example ended in a traceback."""
    (file := tmp_path / "a.csv").write_text("q\nhi\nhi\n")
    (read,), report = readers.read_rows(str(file), ["q"], lambda row: (row["q"], "5"))
    listed = type("Mine", (), {"load": lambda self: [Example("hi", "5", "a.csv", 0)]})()
    assert (read.prompt, report.duplicates) == (USER, 1)
    assert load_examples(listed, "mine")[0] == [read]


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (None, r"load\(\) gave None, but must give examples"),
        (Example(USER, "1", "x", 0), r"load\(\) gave Example\(.*, but must"),
        (["hi"], "example 0 .* 'hi' is no Example with messages"),
        ([Example((), "1", "x", 0)], 'is no Example with messages {"role": text, "content'),
        ([Example(USER, "1", "x", 0), Example(USER, 1, "x", 0)], "example 1 .* is no Example"),
    ],
)
def test_what_a_task_must_not_load_is_named(loaded, message):
    careless = type("Careless", (), {"load": lambda self: loaded})()
    with pytest.raises(DataError, match=f"Careless.*{message}"):
        load_examples(careless, "careless")


SMALL = "--config=tests/small_config.py"


@pytest.mark.slow
def test_a_task_and_an_evaluation_set_from_outside(tmp_path):
    """The rewards are the task's scores; a new set is evaluated beside those of the config."""

    def run(command, *flags):
        given = (f"--config.{flag}" for flag in ("mesh.cpu_devices=1", *flags))
        command = ("-m", f"dapo_jax.{command}", SMALL, f"--workdir={tmp_path}", *given)
        return ran(*command, PYTHONPATH=f"{ROOT}:{ROOT / 'tests' / 'ext_tasks'}").stdout

    flags = ("num_steps=1", "algo.dynamic_sampling=False", "eval.every_steps=0")
    run("train", *flags, f"data.train.task={COUNTDOWN}", "data.train.count=50")
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    sampled = [json.loads(line) for line in responses(tmp_path, 0).splitlines()]
    score = {"correct": 1.0, "wrong": 0.1, "no_answer": -1.0}
    in_time = [r for r in sampled if r["tokens"] <= 24]  # the others are punished for length
    assert in_time and all(r["reward"] == score[r["status"]] for r in in_time)
    assert row["updates"] == 2 and row["grad_norm"] > 0 == row["accuracy/mean"]

    file = tmp_path / "wild.jsonl"
    rows = [{"problem": f"What is {n}+1?", "answer": n + 1} for n in range(10, 13)]
    file.write_text("\n".join(map(json.dumps, rows)))
    of_set = (f"path={file}", "prompt_field=problem", "template=dapo", "k=2", "max_prompts=2")
    of_set += ("rules=strict_box",)  # in which the policy never answers
    flags = [f"eval.sets.wild.{it}" for it in of_set]
    printed = run("evaluate", *flags, "eval.sets.arithmetic.count=3")
    assert "wild: 100% of the responses have no answer that is found" in printed
    results = [json.loads(path.read_text()) for path in (tmp_path / "eval").glob("1.*.json")]
    sets = {name: scores for result in results for name, scores in result["sets"].items()}
    assert sets["wild"]["problems"] == 2 and "mean@2" in sets["wild"]
    assert sets["arithmetic"]["problems"] == 3 and "mean@4" in sets["arithmetic"]


def config_of(*flags):
    return read_config([SMALL, *(f"--config.{flag}" for flag in flags)])


def test_flags_change_known_sets_and_add_others_in_the_same_way():
    changes = ("path=a.csv", "k=3", "top_p=0.5", "levels=(5,)", "args={}", "max_prompts=0")
    names = ("arithmetic", "new", "math_500")
    flags = [f"eval.sets.{name}.{it}" for name in names for it in changes]
    config = config_of(*flags, "eval.sets.new.temperature=2")
    assert set(config.eval.sets) == set(names)
    for name, settings in base.eval_settings(config).items():
        assert (settings["path"], settings["k"], settings["top_p"]) == ("a.csv", 3, 0.5)
        assert (settings["levels"], settings["max_prompts"]) == ((5,), 0)
        assert settings["temperature"] == (2.0 if name == "new" else config.eval.temperature)
    assert config.is_locked
    assert read_config([SMALL, "-config.eval.top_k", "2"]).eval.top_k == 2


def test_an_argument_may_have_a_flag_of_its_own_and_be_nested():
    chain = {"name": "chain_sum", "config": {"max_terms": 3}}
    config = config_of(
        *("data.train.args.near=0.5", "eval.sets.new.path=a.csv", "eval.sets.new.args.k=4"),
        *("tokenizer.chat_args.enable_thinking=False", "tokenizer.chat_args.effort=low"),
        *("eval.sets.gym.task=reasoning_gym", f"eval.sets.gym.args={chain}"),
    )
    assert config.data.train.args.to_dict() == {"near": 0.5}
    assert config.eval.sets.new.args.to_dict() == {"k": 4}
    chosen = {"enable_thinking": False, "effort": "low"}
    assert dict(base.leaves(config))["tokenizer.chat_args"] == chosen
    args = base.eval_settings(config)["gym"]["args"]
    assert args == chain and type(args["config"]) is dict
    assert settings_of(config)["gym"]["args"] == chain
