"""The built-in tasks beside math: what they ask, what they reward, and what they never do."""

import math
import re
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from processes import ROOT
from small_config import task_of

from dapo_jax.tasks.base import grade_many, load_examples
from dapo_jax.types import Example
from experiments.tasks.countdown import Countdown
from experiments.tasks.format_answer import FormatAnswer
from experiments.tasks.multiple_choice import MultipleChoice


def example(answer, **extra):
    return Example(({"role": "user", "content": "?"},), answer, "f", 0, extra or None)


FOUR = ["Lima", "Rome", "Oslo", "Bern"]
COUNTDOWN = Countdown(tried=-0.8), example("24", numbers=(1, 2, 8))
CHOICE = MultipleChoice(path=""), example("C", choices=FOUR)
GOOD = "<think>1+1</think>\n<answer>{}</answer>"
# A task and an example, a response, and its verdict's status, or its score, or both.
GRADED = [
    (COUNTDOWN, "**Answer:** $(1+2)\\times 8$", "correct", 1.0),
    (COUNTDOWN, "Answer: \\(8 \\cdot (1 + 2)\\) = 24", "correct", 1.0),
    (COUNTDOWN, "Answer: 1+2+8", "wrong", -0.8),
    (COUNTDOWN, "Answer: 8*3", "other_numbers", -1.0),
    (COUNTDOWN, "Answer: (1+2)*8 = 25", "unreadable_answer", -1.0),
    (COUNTDOWN, "Answer: 8**2-1", "unreadable_answer", -1.0),
    (COUNTDOWN, "Answer: 8/(2-1-1)", "unreadable_answer", -1.0),
    (COUNTDOWN, "Answer:", "empty_answer", -1.0),
    (COUNTDOWN, "It is (1+2)*8.", "no_answer", -1.0),
    ((Countdown(), example("24", numbers=(3, 3, 8, 8))), "Answer: 8/(3-8/3)", "correct", 1.0),
    (CHOICE, "**Answer: C) Oslo**", "correct", None),
    (CHOICE, "Answer: c.", "correct", None),
    (CHOICE, "Answer: Oslo", "correct", None),
    (CHOICE, "So it is $\\boxed{C}$.", "correct", None),
    (CHOICE, "Answer: A", "wrong", None),
    (CHOICE, "Answer: C) Rome", "unreadable_answer", None),
    (CHOICE, "Answer: A or C", "unreadable_answer", None),
    (CHOICE, "Answer: ", "empty_answer", None),
    (CHOICE, "Answer: C\n\nA is incorrect.", "correct", None),
    (CHOICE, "C", "no_answer", None),
    # Letters come before texts that look like them.
    ((CHOICE[0], example("A", choices=["B", "A", "."])), "Answer: A", "correct", None),
    ((CHOICE[0], example("B", choices=["B", "A", "."])), "Answer: A", "wrong", None),
    *(
        ((FormatAnswer(path="", form_reward=0.25, rules=rules), example("2")), response, "", score)
        for rules in ("dapo", "symbolic")
        for response, score in (
            (GOOD.format("2"), 1.0),
            ("So <answer>2</answer>", 0.75),
            ("<think> </think><answer>2</answer>", 0.75),
            ("<think>a</think>b<answer>2</answer>", 0.75),
            (GOOD.format("3"), -0.75),
            ("<answer>3</answer>", -1.0),
            (GOOD.format("2") + " No, 3.", -1.0),
            (GOOD.format(""), -1.0),
            (GOOD.format("2" + " " * 300 + "2"), -1.0),
            ("Answer: 2", -1.0),
        )
    ),
]


@pytest.mark.parametrize(("of", "response", "status", "score"), GRADED)
def test_a_task_grades_answer_and_form(of, response, status, score):
    task, graded = of
    verdict = task.grade(response, graded)
    assert verdict.score == score and status in ("", verdict.status)
    assert verdict.correct == (status == "correct" or (status == "" and score > 0))
    if task is CHOICE[0] and status == "correct":
        assert verdict.prediction == graded.answer
    if status == "":
        assert verdict.measures == {"in_form": float(score in (1.0, -0.75))}


Q, LABELED = {"question": "q"}, {"text": FOUR, "label": ["1", "2", "3", "4"]}
LETTERS = dict(zip("ABCD", FOUR, strict=True))
WRONG = {"Question": "q", "Right": "Oslo", "Wrong 1": "Lima", "Wrong 2": "Rome"}
OF_GPQA = {"prompt_field": "Question", "answer_field": "Right"}
SCHEMAS = {
    "MMLU": (Q | {"choices": FOUR, "answer": 2}, {}, {}),
    "ARC": (Q | {"choices": LABELED, "key": "3"}, {"answer_field": "key"}, {}),
    "MedQA": (
        Q | {"options": LETTERS, "key": "C"},
        {"answer_field": "key"},
        {"choices": "options"},
    ),
    "GPQA": (WRONG, OF_GPQA, {"choices": "Wrong 1,Wrong 2,Right"}),
}


@pytest.mark.parametrize(("row", "fields", "args"), SCHEMAS.values(), ids=SCHEMAS)
def test_published_choices(tmp_path, row, fields, args):
    path = tmp_path / "d.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    task = task_of(task="multiple_choice", path=str(path), **fields, args=args)
    ((loaded,), _) = load_examples(task, "")
    assert loaded.answer == "C" and "\nC) Oslo" in loaded.text and "Answer: X" in loaded.text
    assert task.grade("Answer: C", loaded).correct


def test_the_guides_task_works_as_it_is_written(tmp_path, monkeypatch):
    readme = (ROOT / "dapo_jax" / "tasks" / "README.md").read_text()
    part = readme[readme.index("## A task in 40 lines") : readme.index("## Episodes")]
    blocks = dict(re.findall(r"```(csv|python|sh)\n(.*?)```", part, re.DOTALL))
    (tmp_path / "estimates.py").write_text(blocks["python"])
    (tmp_path / "estimates.csv").write_text(blocks["csv"] + "nonsense,0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "--config.eval.sets.estimates.task=estimates:Estimates" in blocks["sh"]

    source = {"task": "estimates:Estimates", "path": str(tmp_path / "estimates.csv")}
    task = task_of(on_bad_row="skip", **source, args={"near": 0.1})
    examples, report = load_examples(task, "")
    assert (report.kept, report.bad_rows) == (3, 1) and task.near == 0.1
    numbers = ("330", "350", "400", "tall")
    verdicts = grade_many(task, [f"Answer: {number}" for number in numbers], examples[0])
    assert [verdict.correct for verdict in verdicts] == [True, True, False, False]
    scores = [1.0, 1.0, pytest.approx(0.5 - math.log(400 / 330)), -1.0]
    assert [verdict.score for verdict in verdicts] == scores


HOSTILE = (
    *("", " \n", "Answer:", "\\boxed{}", "<answer></answer>"),
    "Answer: " + "(" * 10_000,
    "Answer: \ud800 \x00 \u202e",
    "<answer>" * 30_000,
    "<think>" * 30_000 + "</think>" * 30_000,
    "<answer>" + "(" * 3_000 + "</answer>",
    "a" * 2_000_000,
)
TASKS = (COUNTDOWN, CHOICE, (FormatAnswer(path="", rules="strict"), example("2")))


@pytest.mark.parametrize(("task", "of"), TASKS, ids=[type(task).__name__ for task, _ in TASKS])
def test_no_response_raises_hangs_or_is_rewarded_for_nothing(task, of):
    began = time.process_time()
    verdicts = grade_many(task, HOSTILE, of)
    assert not any(verdict.correct for verdict in verdicts)
    assert [verdict.prediction for verdict in verdicts[:5]] == [None] * 5
    assert verdicts == grade_many(task, HOSTILE, of)
    assert time.process_time() - began < 5
