"""Writers of one's own: what they are given, and that none of them ends a run."""

import functools
import sys
import types
from typing import ClassVar

import pytest

from dapo_jax.logs import writers


class Kept:
    """A writer that keeps what it was given."""

    made: ClassVar[list] = []
    fails = ""  # the method that raises

    def __init__(self, config, workdir, resume_step):
        self.given = []
        self.made.append(self)
        self._take("begin", config["num_steps"], workdir.name, resume_step)

    def _take(self, name, *given):
        self.given.append((name, *given))
        if name == self.fails:
            raise OSError(f"no network at {name}")

    step = functools.partialmethod(_take, "step")
    evaluation = functools.partialmethod(_take, "evaluation")
    samples = functools.partialmethod(_take, "samples")
    close = functools.partialmethod(_take, "close")


class Broken(Kept):
    """One that may fail."""


KEPT, BROKEN = f"{__name__}:Kept", f"{__name__}:Broken"
SCORES, ROW = {"eval/a/mean@8": 0.5}, {"step": 1, "entropy": 0.25}
SAMPLES = [{"response": "4|2"}]
GIVEN = [("evaluation", 2, SCORES), ("step", ROW), ("samples", 1, SAMPLES), ("close",)]


def given(names, workdir, resume_step, said) -> None:
    of_run = writers.Writers(names, said, {"num_steps": 2}, workdir, resume_step)
    for call in GIVEN:
        of_run(*call)


@pytest.mark.parametrize("fails", ["begin", "step", "close"])
def test_one_that_fails_is_said_once_and_the_others_get_all(tmp_path, monkeypatch, fails):
    monkeypatch.setattr(Kept, "made", [])
    monkeypatch.setattr(Broken, "fails", fails)
    said = []
    given([BROKEN, KEPT], tmp_path, 4, said.append)
    broken, kept = (one.given for one in Kept.made)
    assert kept == [("begin", 2, tmp_path.name, 4), *GIVEN]
    assert broken[-1][0] == fails  # it is given nothing more
    (line,) = said
    assert line.startswith(f"note: the writer '{BROKEN}' of log.writers failed and is left out")
    assert f"OSError: no network at {fails}" in line


def fake(monkeypatch, name: str, calls: list, **functions) -> None:
    """Puts a package in place of one that is not here; calls: what it is told, and when it ends."""
    package = types.ModuleType(name)
    package.Table = lambda columns, data: (columns, data)
    package.finish = lambda: calls.append("finished")
    vars(package).update(functions)
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: True)
    package.init = lambda *names, **settings: calls.append((*names, settings)) or package


TABLE = (["response"], [["4|2"]])


def test_wandb_gets_all_of_a_run_and_a_resumed_one_goes_on_in_it(tmp_path, monkeypatch):
    calls, steps = [], []
    how = {"log": calls.append, "define_metric": lambda *_, step_metric: steps.append(step_metric)}
    fake(monkeypatch, "wandb", calls, **how)
    for resume_step in (None, 0):
        given(["wandb"], tmp_path, resume_step, pytest.fail)
    (first,), *rows, last = calls[:5]
    assert rows == [{"step": 2} | SCORES, ROW, {"step": 1, "samples": TABLE}] and last == "finished"
    assert [call[0]["id"] for call in (calls[0], calls[5])] == [first["id"]] * 2
    assert first["id"] == (tmp_path / "wandb_id.txt").read_text() and {*steps} == {"step"}


def test_tensorboard_has_scores_at_their_step(tmp_path, monkeypatch):
    """Those in a row are of the policy before the step."""
    board, added = writers.TensorBoard({}, tmp_path, None), []
    monkeypatch.setattr(board._writer, "add_scalar", lambda *given: added.append(given))
    board.evaluation(3, SCORES)
    board.step({"step": 3, "entropy": 0.25} | SCORES)
    assert added == [("eval/a/mean@8", 0.5, 3), ("entropy", 0.25, 3)]


def test_trackio_gets_a_step_beside_its_values(tmp_path, monkeypatch):
    """A value "step" is one that it keeps for itself."""
    calls = []
    fake(monkeypatch, "trackio", calls, log=lambda values, step: calls.append((step, values)))
    given(["trackio"], tmp_path, None, pytest.fail)
    (project, name, settings), *rows = calls
    assert (project, settings["resume"]) == ("dapo_jax", "allow")
    assert name == f"{tmp_path.name}-{(tmp_path / 'wandb_id.txt').read_text()}"
    values = [(2, SCORES), (1, {"entropy": 0.25}), (1, {"samples": TABLE})]
    assert rows == [*values, "finished"]
