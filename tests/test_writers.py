"""Writers of one's own: what they are given, and that none of them ends a run."""

import importlib.machinery
import sys
import types

import pytest

from configs import tiny
from dapo_jax import train
from dapo_jax.logs import writers


class Kept:
    """A writer that keeps what it was given."""

    made: list = []  # noqa: RUF012 - what tests look at
    fails = ""  # the method that raises

    def __init__(self, config, workdir, resume_step):
        self.given = []
        self.made.append(self)
        self._take("begin", config["num_steps"], workdir.name, resume_step)

    def step(self, row):
        self._take("step", dict(row))

    def evaluation(self, finished_steps, scores):
        self._take("evaluation", finished_steps, dict(scores))

    def samples(self, step, rows):
        self._take("samples", step, rows)

    def close(self):
        self._take("close")

    def _take(self, name, *given):
        self.given.append((name, *given))
        if name == self.fails:
            raise OSError(f"no network at {name}")


class Broken(Kept):
    """Fails as a class attribute says."""


KEPT, BROKEN = f"{__name__}:Kept", f"{__name__}:Broken"


@pytest.mark.parametrize("fails", ["", "begin", "step", "evaluation", "close"])
def test_one_that_fails_is_said_once_and_the_others_get_all(tmp_path, monkeypatch, fails):
    monkeypatch.setattr(Kept, "made", [])
    monkeypatch.setattr(Broken, "fails", fails)
    said = []
    of_run = writers.Writers([BROKEN, KEPT], {"num_steps": 2}, tmp_path, 4, said.append)
    of_run("evaluation", 0, {"eval/a/mean@8": 0.5})
    for step in range(2):
        of_run("step", {"step": step, "entropy": 0.25})
    of_run("samples", 1, [{"response": "4|2"}])
    of_run("close")
    broken, kept = (one.given for one in Kept.made)
    assert kept == [
        ("begin", 2, tmp_path.name, 4),
        ("evaluation", 0, {"eval/a/mean@8": 0.5}),
        ("step", {"step": 0, "entropy": 0.25}),
        ("step", {"step": 1, "entropy": 0.25}),
        ("samples", 1, [{"response": "4|2"}]),
        ("close",),
    ]
    if not fails:
        assert broken == kept and said == []
        return
    assert broken[-1][0] == fails  # it is given nothing more
    (line,) = said
    assert line.startswith(f"note: the writer '{BROKEN}' of log.writers failed and is left out")
    assert f"OSError: no network at {fails}" in line


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandb", r"'wandb', but that package is not installed: pip install .wandb>=0.19,<1"),
        (
            "mlflow",
            r"has 'mlflow'; give one of tensorboard, wandb, trackio, or \"module:Class\"",
        ),
        (f"{__name__}:Absent", "which cannot be imported .*Absent"),
        ("no_such_module:Class", "which cannot be imported .*: No module named 'no_such_module'"),
        (f"{__name__}:pytest", "has no method step, evaluation, close"),
    ],
)
def test_a_name_that_is_no_writers_is_refused_at_the_start(name, message, tmp_path, monkeypatch):
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: None)
    config = tiny.get_config()
    config.log.writers = (name,)
    with pytest.raises(ValueError, match=message):
        train.train(config, tmp_path / "new")
    assert not (tmp_path / "new").exists()


class FakeWandB(types.ModuleType):
    """Weights & Biases as far as it is used."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.rows, self.settings = [], []

    def init(self, **settings):
        self.settings.append(settings)
        return self

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, values):
        self.rows.append(values)

    def Table(self, columns, data):
        return columns, data

    def finish(self):
        self.settings.append("finished")


def test_wandb_gets_all_of_a_run_and_a_resumed_one_goes_on_in_it(tmp_path, monkeypatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for resume_step, step in ((None, 0), (0, 1)):
        of_run = writers.Writers(["wandb"], {"num_steps": 2}, tmp_path, resume_step, pytest.fail)
        of_run("evaluation", step + 1, {"eval/a/mean@8": 0.9})
        of_run("step", {"step": step, "entropy": 2.0})
        of_run("samples", step, [{"response": "4", "reward": 1.0}])
        of_run("close")
    ids = [settings["id"] for settings in fake.settings if settings != "finished"]
    assert ids == [(tmp_path / "wandb_id.txt").read_text()] * 2
    assert fake.settings.count("finished") == 2
    table = (["response", "reward"], [["4", 1.0]])
    assert fake.rows[3:] == [
        {"step": 2, "eval/a/mean@8": 0.9},
        {"step": 1, "entropy": 2.0},
        {"step": 1, "samples": table},
    ]


def test_tensorboard_has_scores_at_their_step(tmp_path, monkeypatch):
    """Those in a row are of the policy before the step."""
    board, added = writers.TensorBoard({}, tmp_path, None), []
    monkeypatch.setattr(board._writer, "add_scalar", lambda *given: added.append(given))
    board.evaluation(3, {"eval/a/mean@8": 0.5})
    board.step({"step": 3, "entropy": 0.25, "kl": None, "eval/a/mean@8": 0.5})
    assert added == [("eval/a/mean@8", 0.5, 3), ("entropy", 0.25, 3)]


def test_trackio_gets_a_step_beside_its_values(tmp_path, monkeypatch):
    """A value "step" is one that it keeps for itself."""
    given = []
    run = types.SimpleNamespace(log=lambda values, step: given.append((step, values)))
    run.finish = lambda: given.append("finished")
    fake = types.ModuleType("trackio")
    fake.__spec__ = importlib.machinery.ModuleSpec("trackio", None)
    fake.Table = lambda columns, data: (columns, data)
    fake.init = lambda *names, **settings: given.append((*names, settings["resume"])) or run
    monkeypatch.setitem(sys.modules, "trackio", fake)
    of_run = writers.Writers(["trackio"], {"num_steps": 2}, tmp_path, None, pytest.fail)
    of_run("evaluation", 0, {"eval/a/mean@8": 0.9})
    of_run("step", {"step": 0, "entropy": 2.0})
    of_run("samples", 0, [{"response": "4"}])
    of_run("close")
    name = f"{tmp_path.name}-{(tmp_path / 'wandb_id.txt').read_text()}"
    values = [{"eval/a/mean@8": 0.9}, {"entropy": 2.0}, {"samples": (["response"], [["4"]])}]
    assert given == [("dapo_jax", name, "allow"), *((0, it) for it in values), "finished"]
