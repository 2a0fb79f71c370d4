"""The built-in tasks beside math: what they ask, what they reward, and what they never do."""

import importlib.util
import math
import re
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from processes import ROOT
from small_config import task_of

from dapo_jax.tasks.base import grade_many, load_examples
from dapo_jax.tasks.readers import DataError
from dapo_jax.types import Example
from experiments.tasks.countdown import Countdown
from experiments.tasks.format_answer import FormatAnswer
from experiments.tasks.multiple_choice import MultipleChoice

HAS_REASONING_GYM = importlib.util.find_spec("reasoning_gym") is not None


def example(answer, **extra):
    return Example(({"role": "user", "content": "?"},), answer, "f", 0, extra or None)


# Countdown


@pytest.mark.parametrize(
    ("answer", "status", "score"),
    [
        ("Answer: (1+2)*8", "correct", 1.0),
        ("**Answer:** $(1+2)\\times 8$", "correct", 1.0),
        ("Answer: \\(8 \\cdot (1 + 2)\\) = 24", "correct", 1.0),
        ("Answer: 1+2+8", "wrong", -0.8),
        ("Answer: 8*3", "other_numbers", -1.0),
        ("Answer: 1+2+8=24", "wrong", -0.8),
        ("Answer: (1+2)*8 = 25", "unreadable_answer", -1.0),
        ("Answer: 8**2-1", "unreadable_answer", -1.0),
        ("Answer: -1+2+8", "unreadable_answer", -1.0),
        ("Answer: 8/(2-1-1)", "unreadable_answer", -1.0),
        ("Answer:", "empty_answer", -1.0),
        ("It is (1+2)*8.", "no_answer", -1.0),
    ],
)
def test_countdown_rewards_right_ones_and_a_little_what_tries(answer, status, score):
    verdict = Countdown(tried=-0.8).grade(answer, example("24", numbers=(1, 2, 8)))
    assert (verdict.status, verdict.score) == (status, score)
    assert verdict.correct == (status == "correct")
    exact = example("24", numbers=(3, 3, 8, 8))
    assert Countdown().grade("Answer: 8/(3-8/3)", exact).correct


# Multiple choice

FOUR = ["Lima", "Rome", "Oslo", "Bern"]
SCHEMAS = {
    "MMLU": ({"question": "q", "choices": FOUR, "answer": 2}, {}, {}),
    "ARC": (
        {"question": "q", "choices": {"text": FOUR, "label": ["1", "2", "3", "4"]}, "key": "3"},
        {"answer_field": "key"},
        {},
    ),
    "MedQA": (
        {"question": "q", "options": dict(zip("ABCD", FOUR, strict=True)), "answer_idx": "C"},
        {"answer_field": "answer_idx"},
        {"choices": "options"},
    ),
    "GPQA": (
        {"Question": "q", "Right": "Oslo", "Wrong 1": "Lima", "Wrong 2": "Rome"},
        {"prompt_field": "Question", "answer_field": "Right"},
        {"choices": "Wrong 1,Wrong 2,Right"},
    ),
}


@pytest.mark.parametrize(("row", "fields", "args"), SCHEMAS.values(), ids=SCHEMAS)
def test_published_choices(tmp_path, row, fields, args):
    path = tmp_path / "d.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    task = task_of(task="multiple_choice", path=str(path), **fields, args=args)
    ((loaded,), _) = load_examples(task, "")
    assert loaded.answer == "C" and "\nC) Oslo" in loaded.text and "Answer: X" in loaded.text
    assert task.grade("Answer: C", loaded).correct


@pytest.mark.parametrize(
    ("response", "prediction", "status"),
    [
        ("Answer: C", "C", "correct"),
        ("**Answer: C) Oslo**", "C", "correct"),
        ("Answer: c.", "C", "correct"),
        ("Answer: Oslo", "C", "correct"),
        ("So it is $\\boxed{C}$.", "C", "correct"),
        ("Answer: A", "A", "wrong"),
        ("Answer: C) Rome", None, "unreadable_answer"),
        ("Answer: A or C", None, "unreadable_answer"),
        ("Answer: E", None, "unreadable_answer"),
        ("Answer: ", None, "empty_answer"),
        ("Answer: C\n\nA is incorrect.", "C", "correct"),
        ("C", None, "no_answer"),
    ],
)
def test_a_choice_is_one_letter_or_its_text(response, prediction, status):
    verdict = MultipleChoice(path="").grade(response, example("C", choices=FOUR))
    assert (verdict.correct, verdict.status) == (status == "correct", status)
    assert prediction is None or verdict.prediction == prediction
    # Letters come before texts that look like them.
    for letter in "AB":
        of = example(letter, choices=["B", "A", "."])
        assert MultipleChoice(path="").grade("Answer: A", of).correct == (letter == "A")


# Form and answer

GOOD = "<think>1+1</think>\n<answer>{}</answer>"


@pytest.mark.parametrize(
    ("response", "score", "correct"),
    [
        (GOOD.format("2"), 1.0, True),
        (f" {GOOD.format(' $2$ ')}\n", 1.0, True),
        ("So <answer>2</answer>", 0.75, True),
        ("<think> </think><answer>2</answer>", 0.75, True),
        ("<think>a</think>b<answer>2</answer>", 0.75, True),
        (GOOD.format("3"), -0.75, False),
        ("<answer>3</answer>", -1.0, False),
        (GOOD.format("2") + " No, 3.", -1.0, False),
        (GOOD.format(""), -1.0, False),
        (GOOD.format("3\nAnswer: 2"), -1.0, False),
        (GOOD.format("2" + " " * 300 + "2"), -1.0, False),
        ("Answer: 2", -1.0, False),
    ],
)
@pytest.mark.parametrize("rules", ["dapo", "math_verify"])
def test_the_reward_grades_answer_and_form(rules, response, score, correct):
    task = FormatAnswer(path="", form_reward=0.25, rules=rules)
    verdict = task.grade(response, example("2"))
    assert (verdict.score, verdict.correct) == (score, correct)
    assert verdict.measures == {"in_form": float(score in (1.0, -0.75))}


# Reasoning-gym


@pytest.mark.skipif(HAS_REASONING_GYM, reason="reasoning-gym is there")
def test_without_the_package_the_error_says_so():
    with pytest.raises(DataError, match="No module named 'reasoning_gym'"):
        task_of(task="reasoning_gym", count=3, args={"name": "chain_sum"}).load()


# The guide


def test_the_guide_s_task_of_40_lines_works_as_it_is_written(tmp_path, monkeypatch):
    readme = (ROOT / "dapo_jax" / "tasks" / "README.md").read_text()
    part = readme[readme.index("## A task in 40 lines") : readme.index("## Episodes")]
    blocks = dict(re.findall(r"```(csv|python|sh)\n(.*?)```", part, re.DOTALL))
    assert len(blocks["python"].splitlines()) <= 45
    (tmp_path / "estimates.py").write_text(blocks["python"])
    (tmp_path / "estimates.csv").write_text(blocks["csv"] + "nonsense,0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (key,) = set(re.findall(r"--config\.eval\.sets\.(estimates)\.", blocks["sh"]))
    assert f"--config.eval.sets.{key}.task=estimates:Estimates" in blocks["sh"]

    source = {"task": "estimates:Estimates", "path": str(tmp_path / "estimates.csv")}
    task = task_of(on_bad_row="skip", **source, args={"near": 0.1})
    examples, report = load_examples(task, "")
    assert (report.kept, report.bad_rows) == (3, 1) and task.near == 0.1
    assert "value is 0.0, but must be above 0" in report.bad_row_notes[0]
    numbers = ("330", "350", "400", "9,999,999", "tall", "0")
    answers = [f"Answer: {number}" for number in numbers]
    verdicts = grade_many(task, answers, examples[0])
    assert [verdict.correct for verdict in verdicts] == [True, True, False, False, False, False]
    assert [verdict.score for verdict in verdicts[:2]] == [1.0, 1.0]
    assert verdicts[2].score == pytest.approx(0.5 - math.log(400 / 330))
    assert [verdict.score for verdict in verdicts[3:]] == [-1.0] * 3
    assert not any(verdict.correct for verdict in grade_many(task, HOSTILE, examples[0]))


# All of them

HOSTILE = (
    *("", " \n", "Answer:", "\\boxed{}", "<answer></answer>"),
    "Answer: " + "(" * 10_000,
    "Answer: 9" + "*9" * 90,
    "Answer: " + "=" * 200,
    "Answer: \ud800 \x00 \u202e",
    "Answer: __import__('os').abort()",
    "<answer>" * 30_000,
    "<think>" * 30_000 + "</think>" * 30_000,
    "<answer>9**9**9**9</answer>",
    "<answer>" + "(" * 3_000 + "</answer>",
    "<answer>\ud800\x00</answer>",
    "a" * 2_000_000,
)
TASKS = (
    (Countdown(), example("24", numbers=(1, 2, 8))),
    (MultipleChoice(path=""), example("C", choices=FOUR)),
    (FormatAnswer(path="", rules="strict"), example("2")),
)


@pytest.mark.parametrize(("task", "of"), TASKS, ids=[type(task).__name__ for task, _ in TASKS])
def test_no_response_raises_hangs_or_is_rewarded_for_nothing(task, of):
    began = time.process_time()
    verdicts = grade_many(task, HOSTILE, of)
    assert not any(verdict.correct for verdict in verdicts)
    assert [verdict.prediction for verdict in verdicts[:5]] == [None] * 5
    assert verdicts == grade_many(task, HOSTILE, of)
    assert time.process_time() - began < 5
