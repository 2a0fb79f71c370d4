"""Whose run a checkpoint is: what differs is refused by its key, or said.

That a start refuses another run, and changes nothing, is in test_start.py.
"""

import copy
import datetime
import json
import sys
import types

import numpy as np
import pytest
from small_config import small

from configs import base
from dapo_jax.checkpoints import fingerprint
from dapo_jax.checkpoints.same_run import FORK, RESUME, require
from dapo_jax.tasks.datasets import Mixture
from dapo_jax.types import Example, Prompt


def prompts(count: int, **answers: str) -> list[Prompt]:
    """Makes prompts; answers: of the rows that have another one, r17="8"."""

    def example(row):
        question = {"role": "user", "content": f"{row}?"}
        return Example((question,), answers.get(f"r{row}", "7"), "f", row)

    return [Prompt(np.zeros(1, np.int32), example(row)) for row in range(count)]


def fingerprint_of(train=None, held_out=None, mixture=(), weights=(1.0,), **settings) -> dict:
    """mixture: the prompts of further training sets. weights: of all of them, data.train's last."""

    def dataset(some):
        return types.SimpleNamespace(prompts=some)

    config = small(**settings)
    with config.unlocked():
        for i, weight in enumerate(weights[:-1]):
            config.data.mixture[f"set{i}"] = base.dataset(weight=weight)
    names = [*(f"data.mixture.set{i}" for i in range(len(mixture))), "data.train"]
    sets = map(dataset, [*mixture, train or prompts(20)])
    of_all = Mixture(*(dict(zip(names, it, strict=True)) for it in (sets, weights)))
    chosen = dataset(held_out or prompts(5))
    data = types.SimpleNamespace(train=of_all, eval_sets={"arithmetic": chosen})
    return json.loads(json.dumps(fingerprint.of_run(config, data)))


def said_of(new: dict, old: dict | None = None) -> list[str]:
    reports = []
    require(RESUME, old or fingerprint_of(), new, "checkpoint 5 in DIR", reports.append)
    return reports


def test_the_same_run_and_what_may_change_are_silent_and_an_evaluation_set_is_said():
    assert said_of(fingerprint_of()) == []
    changed = {"num_steps": 9, "checkpoint.every_steps": 1, "mesh.cpu_devices": 1}
    assert said_of(fingerprint_of(**changed)) == []
    (report,) = said_of(fingerprint_of(held_out=prompts(5, r2="8")))
    assert report.startswith("eval.sets.arithmetic: its prompts differ:")


TWO = {"mixture": [prompts(30)], "weights": (1.0, 2.0)}


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({}, r"there are 1 training sets \(data.train, data.mixture\), not 2"),
        (TWO | {"mixture": [prompts(30, r3="8")]}, r"data.mixture.set0: its prompts differ"),
        (TWO | {"mixture": [prompts(20)], "train": prompts(30)}, r"set0 has 20 prompts, not 30"),
        (TWO | {"weights": (2.0, 2.0)}, r"set0: its share of the prompts is 0\.5, not 0\.333333"),
    ],
    ids=["one alone", "answers", "the sets change places", "weights"],
)
def test_a_fork_or_resumed_run_has_the_same_mixture(new, message):
    """The place in the prompt stream means something in the same stream alone.

    How a fork names its sets does not count.
    """

    def renamed(run):
        return run | {"data": {f"{it}.new": digests for it, digests in run["data"].items()}}

    old, other = fingerprint_of(**TWO), fingerprint_of(**new)
    assert said_of(fingerprint_of(**TWO), old) == []
    with pytest.raises(ValueError, match="is of another run"):
        said_of(other, old)
    of_fork = message.replace("set0", "set0.new")
    for run, difference in ((other, message), (renamed(other), of_fork)):
        with pytest.raises(ValueError, match=f"cannot be forked: .*{difference}"):
            require(FORK, old, run, "checkpoint 5 in DIR")
    doubled = fingerprint_of(**TWO | {"weights": (2.0, 4.0)})
    require(FORK, old, renamed(doubled), "checkpoint 5")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("tokenizer.path", "generation_config.json"),
        ("model.path", "model.safetensors"),
        ("model.path", "config.json"),
    ],
)
def test_the_files_of_tokenizer_and_model_belong_to_a_run(tmp_path, key, name):
    (tmp_path / "config.json").write_text("{}")
    found = []
    for content in "78":
        (tmp_path / name).write_text(content)
        found.append(fingerprint_of(**{key: str(tmp_path)}))
    with pytest.raises(ValueError, match=f"{key}: {name} differs"):
        said_of(*found)


FILES = {
    "mine/__init__.py": "",
    "mine/task.py": "from .units import ONE\n1\n",
    "mine/units.py": "ONE = 1\n",
    "helper.py": "ONE = 1\n",
    "loose/task.py": "ONE = 1\n",
}


@pytest.mark.parametrize(
    ("settings", "edited", "refusal"),
    [
        ({"data.train.task": "mine.task:Task"}, "mine/task.py", "data.train.task: mine.task"),
        ({"data.train.task": "mine.task:Task"}, "mine/units.py", ""),
        ({"model.family": "helper"}, "helper.py", "model.family: helper"),
        ({"algo.policy_loss": "helper:extra"}, "helper.py", "algo.policy_loss: helper"),
        ({"data.train.task": "loose.task:Task"}, "loose/task.py", "train.task: loose.task"),
        ({"data.train.environment": "helper:Shop"}, "helper.py", "train.environment: helper"),
        ({"algo.advantage_scale": "helper:extra"}, "helper.py", "algo.advantage_scale: helper"),
        ({"log.metrics": ("helper:extra",)}, "helper.py", "said: log.metrics: helper"),
        ({"log.writers": ("helper:Writer",)}, "helper.py", "said: log.writers: helper"),
        ({"eval.sets.arithmetic.task": "helper:Task"}, "helper.py", "said: eval.sets.arithmetic"),
    ],
)
def test_custom_code_belongs_to_a_run(tmp_path, monkeypatch, settings, edited, refusal):
    """Imports of a named file may change. A folder may have no __init__.py."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mine", "loose"):  # of another case
        monkeypatch.delitem(sys.modules, name, raising=False)
    old = fingerprint_of(**settings)
    assert said_of(fingerprint_of(**settings), old) == []
    (tmp_path / edited).write_text(FILES[edited].replace("1", "4"))
    new = fingerprint_of(**settings)
    if refusal.startswith("said: ") or not refusal:
        assert "".join(said_of(new, old)).startswith(refusal.removeprefix("said: "))
        return
    with pytest.raises(ValueError, match=rf"{refusal}\S* differs.*a fork, --start"):
        said_of(new, old)
    require(FORK, old, new, "checkpoint 5")


def test_extras_that_are_no_json_have_a_digest_that_is_the_same_each_time():
    """A task may keep anything for its grader; an object's text has its address."""

    def digest(extra):
        example = Example(({"role": "user", "content": "?"},), "7", "f", 0, extra)
        return fingerprint.of_prompts([Prompt(np.zeros(1, np.int32), example)])["digest"]

    assert digest(object()) == digest(object())
    assert digest(np.arange(3)) != digest(np.arange(4))
    a_set, another = ({"words": frozenset(words)} for words in ("ab", "cd"))
    assert digest(a_set) == digest({"words": frozenset("ba")}) != digest(another)
    board = {(0, 1): "x", 1: types.SimpleNamespace(left=3), "day": datetime.date(2026, 1, 2)}
    assert digest(board) == digest(dict(reversed(board.items())))
    for key, value in (((0, 1), "o"), (1, types.SimpleNamespace(left=4)), ("day", None)):
        assert digest(board) != digest(board | {key: value})


def test_a_run_of_an_older_version_goes_on():
    old = fingerprint_of()
    del old["recipe"]["alarms"]  # these may change
    old["recipe"]["rollout"]["gone"] = 0
    del old["recipe"]["learner"]["decay"]
    assert said_of(fingerprint_of(), old) == []
    with pytest.raises(ValueError, match=r"learner\.decay is 'linear', but was 'none'"):
        said_of(fingerprint_of(**{"learner.decay": "linear"}), old)


def test_the_same_texts_as_other_tokens_are_another_runs():
    a, b = (
        fingerprint.of_prompts([Prompt(np.array([1, last], np.int32), Example((), "", "", 0))])
        for last in (2, 3)
    )
    one, other = (fingerprint_of() | {"data": {"data.train": digests}} for digests in (a, b))
    assert said_of(one, one) == []
    with pytest.raises(ValueError, match=r"data\.train: its prompts are the same, but not "):
        said_of(other, one)
    del a["ids"]  # of an older version
    assert said_of(other, one) == []


def test_processes_with_different_data_are_refused(monkeypatch):
    gathered = []

    def gather(mine):
        gathered.extend([copy.deepcopy(mine)] if "recipe" in mine else [])
        return [gathered[0], mine] if "recipe" in mine else [mine]

    monkeypatch.setattr(fingerprint.hosts, "gather", gather)
    fingerprint_of()
    found = "process 1 differs from process 0: data.train: its prompts differ"
    with pytest.raises(ValueError, match=found):
        fingerprint_of(train=prompts(20, r3="8"))
