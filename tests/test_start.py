"""The start of a command, forks first; and which groups the filter keeps."""

import contextlib
import datetime
import json
import pathlib
import shutil
import types

import numpy as np
import pytest
from runs import contents, digests, responses, rows_without_timings
from shared_programs import programs_compiled_once, small_config  # noqa: F401

from configs.compare import as_json, config_differences
from dapo_jax import algorithm, train
from dapo_jax.checkpoints.begun import Parent, chosen_before
from dapo_jax.checkpoints.store import DamagedError
from dapo_jax.logs.files import LOCK, read_starts
from dapo_jax.process import hosts
from dapo_jax.report.runs import load_run
from dapo_jax.setup import components, dry_run, policy
from dapo_jax.setup import start as starts
from dapo_jax.setup.start import open_run
from dapo_jax.types import Group, Response, Rollouts, Status, Verdict


def recipe(**settings):
    """Makes the config of the parent, which saves each step, with other settings."""
    keys = {"checkpoint.every_steps": 1, "checkpoint.keep": 9, "eval.every_steps": 3}
    return small_config(**keys | settings)


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("forks").resolve() / "parent"
    train.train(recipe(), workdir)
    return workdir


@pytest.fixture(scope="module")
def fork(parent) -> pathlib.Path:
    """A fork of its parent's own config, stopped after a step and resumed without --start."""
    workdir, before = parent.with_name("fork"), contents(parent)
    train.train(recipe(num_steps=2), workdir, Parent.parse(f"run:{parent}@1"))
    train.train(recipe(), workdir)
    assert contents(parent) == before
    return workdir


def training_rows(workdir: pathlib.Path) -> list[dict]:
    """Reads the rows without what was timed or evaluated."""
    rows = rows_without_timings(workdir)
    return [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows]


def test_a_fork_of_the_same_config_continues_as_its_parent_did_bitwise(parent, fork):
    """Weights, moments, cursor, counters and noise go on; so do they where the fork is resumed."""
    assert training_rows(fork) == training_rows(parent)[1:]
    assert digests(fork, 3) == digests(parent, 3)
    assert all(responses(parent, step) == responses(fork, step) for step in (1, 2))
    assert {start["origin"] for start in read_starts(fork / "starts.jsonl")} == {f"run:{parent}@1"}
    assert not list(fork.glob("metrics.cut*"))
    # It is evaluated before its first step: all forks of a checkpoint have that point in common.
    assert [*load_run(fork)["eval/arithmetic/mean@4"].index] == [1, 2, 3]
    last, theirs = (json.loads((d / "eval" / "3.json").read_text()) for d in (fork, parent))
    assert last == theirs
    with pytest.raises(ValueError, match=r"@3, but .* holds a run that began with run:.*@1"):
        start(recipe(), fork, Parent.parse(f"run:{parent}@3"))


def start(config, workdir: pathlib.Path, origin: Parent | None):
    """Starts a run up to its first step, and returns what it would go on with."""
    with contextlib.ExitStack() as stack:
        run, _, progress = open_run(config, workdir, origin, stack)
        return run, progress


@pytest.mark.parametrize(
    ("settings", "step", "message"),
    [
        ({"seed": 1}, 2, r"checkpoint 2 in .* cannot be forked: seed is 1, but was 0\. A fork"),
        ({"learner.lora_rank": 4}, 2, r"cannot be forked: learner.lora_rank is 4, but was 0"),
        ({"num_steps": 2}, 2, r"num_steps = 2, but --start=run:.*@2 begins after 2 steps"),
        ({}, 4, r"has no checkpoint 4, only \[1, 2, 3\]"),
    ],
)
def test_what_cannot_be_forked_is_refused_by_its_key(parent, tmp_path, settings, step, message):
    before, origin = contents(parent), Parent.parse(f"run:{parent}@{step}")
    for begin in (start, dry_run.dry_run):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            begin(recipe(**settings), tmp_path / "new", origin)
    assert contents(parent) == before
    # The start of the refused one would have been what the next begins with.
    assert not (tmp_path / "new" / "config.json").exists()


def test_another_run_is_refused_by_its_key_and_changes_nothing(parent, tmp_path):
    def kept():
        return {name: it for name, it in contents(parent).items() if not name.endswith(LOCK)}

    before, saved = kept(), {"checkpoint.directory": str(parent / "checkpoints")}
    for workdir, settings, message in (
        (parent, {"algo.eps_high": 0.24}, "of another run: algo.eps_high is 0.24, but was 0.28"),
        (parent, {"num_steps": 2}, "num_steps = 2, but the run in .* has finished 3 steps"),
        (parent, {"checkpoint.directory": str(tmp_path)}, "3 finished steps, but .* no checkpoint"),
        # Another --workdir has no config.json to compare with.
        (tmp_path, saved | {"seed": 7}, "of another run.* seed is 7, but was 0"),
        (tmp_path, saved | {"data.train.seed": 2}, "of another run.* data.train has 200 prompts"),
    ):
        with pytest.raises(ValueError, match=message):
            start(recipe(**settings), workdir, None)
        assert kept() == before


def test_processes_with_different_settings_are_refused_by_key(monkeypatch):
    other = {"recipe": as_json(recipe(**{"rollout.cache_mib": 64}))}
    monkeypatch.setattr(starts.hosts, "gather", lambda mine: [mine, other])
    message = "process 1 differs from process 0: rollout.cache_mib is 64, but 3 on process 0"
    with pytest.raises(ValueError, match=message):
        policy.open_policy(recipe(), None, evaluates=True)


def test_a_fork_without_a_checkpoint_of_its_own_begins_with_the_parent_again(parent, tmp_path):
    """Killed in its first steps, it is begun again, with --start or without."""
    origin = Parent.parse(f"run:{parent}@2")
    config = recipe(**{"checkpoint.every_steps": 50})
    start(config, tmp_path, origin)
    rows = (parent / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(rows[2])
    for given in (None, origin):
        run, progress = start(config, tmp_path, given)
        assert (run.step, run.begin_step) == (2, 2)
        assert progress.row["step"] == 1
        assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert (tmp_path / "metrics.cut-1.jsonl").read_bytes() == rows[2]


def test_a_damaged_parent_is_named_and_left_as_it_is(parent, tmp_path):
    """A run sets its own aside and takes the one before; a fork of that would be another."""
    theirs = shutil.copytree(parent, tmp_path / "theirs")
    (theirs / "checkpoints" / "2" / "progress" / "metadata").write_bytes(b"")
    before = contents(theirs)
    message = rf"checkpoint 2 in {theirs}/checkpoints cannot be read .*\[1, 3\]"
    with pytest.raises(DamagedError, match=message):
        start(recipe(), tmp_path / "new", Parent.parse(f"run:{theirs}@2"))
    assert contents(theirs) == before


@pytest.mark.slow
def test_checkpoints_elsewhere_know_what_their_run_began_with(parent, fork, tmp_path):
    """On a pod the workdir goes with the machine, and the parent's too."""
    gone, origin = parent.with_name("gone"), Parent.parse(f"run:{parent}@1")
    config = recipe(**{"checkpoint.directory": str(fork / "checkpoints"), "eval.every_steps": 0})
    parent.rename(gone)
    try:
        for name, given in (("a", origin), ("b", None)):
            run, _ = start(config, tmp_path / name, given)
            assert (run.step, run.begin_step) == (3, 1)
            assert [row["step"] for row in rows_without_timings(tmp_path / name)] == [2]
    finally:
        gone.rename(parent)
    with pytest.raises(ValueError, match=r"--start is 'run:.*@2', but it began from run:.*@1"):
        start(config, tmp_path / "c", Parent.parse(f"run:{parent}@2"))
    # A config that names its directory gives it to a fork as well.
    config.checkpoint.directory = str(parent / "checkpoints")
    with pytest.raises(ValueError, match="but it began without one"):
        start(config, tmp_path / "d", origin)


def test_a_run_keeps_the_day_of_its_first_start(tmp_path):
    """What a chat template writes of the day belongs to the run, and to its forks."""
    assert chosen_before(tmp_path) == {"tokenizer.date": f"{datetime.date.today()}"}
    fork = (tmp_path / "fork", Parent(tmp_path, 2))
    for kept in ({"tokenizer.date": "2024-02-29"}, {}):
        tokenizer = {key.partition(".")[2]: day for key, day in kept.items()}
        (tmp_path / "config.json").write_text(json.dumps({"seed": 3, "tokenizer": tokenizer}))
        assert chosen_before(tmp_path) == {"seed": 3} | kept
        assert chosen_before(*fork) == kept  # the rest is its own config's


def test_a_fork_needs_a_run(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for folder in (tmp_path / "absent", tmp_path, file, recipe().model.path):
        with pytest.raises(FileNotFoundError, match=r"config.json is missing, or no run's config"):
            start(recipe(), tmp_path / "new", Parent.parse(f"run:{folder}@2"))
    # A refused fork leaves its folder to any run.
    run, progress = start(recipe(), tmp_path / "new", None)
    assert (run.step, run.begin_step, progress.cursor) == (0, 0, 0)


def test_a_folder_has_any_name():
    assert Parent.parse("run:lr@1e-5:b@20") == Parent(pathlib.Path("lr@1e-5:b").resolve(), 20)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a/b", f"{pathlib.Path.cwd() / 'a' / 'b'}", True),
        ("a/b", "b", False),
        ("someone/tiny", "hf://someone/tiny@1a2b", True),  # the digests decide on its content
        ("hf://datasets/someone/sums/a.jsonl", "hf://datasets/someone/sums@v1/a.jsonl", True),
        ("hf://datasets/someone/sums/a.jsonl", "hf://datasets/someone/sums/b.jsonl", False),
        ("runs@1/tiny", "runs@2/tiny", False),
    ],
)
def test_a_path_may_be_written_in_another_way(one, other, same):
    old, new = {"model": {"path": one}}, {"model": {"path": other}}
    found = [] if same else [f"model.path is {other!r}, but was {one!r}"]
    assert config_differences(old, new) == found


def group(correct, lengths, scores=(None, None)) -> Group:
    verdicts = [Verdict(c, None, "", score) for c, score in zip(correct, scores, strict=True)]
    arrays = [(np.zeros(n), np.zeros(n), Status.STOPPED, "") for n in lengths]
    of = zip(arrays, verdicts, strict=True)
    return Group(0, None, tuple(Response(*array, verdict) for array, verdict in of))


# Groups of two, and whether each filter keeps them. Penalties begin after 6 tokens.
GROUPS = [
    (group((True, False), (3, 3)), True, True),
    (group((False, False), (3, 8)), False, True),  # the shorter one is reinforced, though wrong
    (group((False, False), (9, 9)), False, False),
    (group((True, True), (3, 10)), False, True),
    (group((True, False), (10, 6), (0.0, -1.0)), True, False),  # the penalty eats the difference
    (group((False, False), (3, 3), (0.25, 0.5)), False, True),
    (group((False, False), (3, 3), (0.25, float("nan"))), False, True),  # NaN: by Eq. 7
]


@pytest.mark.parametrize("rule", algorithm.FILTERS)
def test_the_filter_keeps_what_its_rule_says_of_what_is_trained_on(rule):
    expected = [kept[rule == "reward"] for _, *kept in GROUPS]
    groups = [example for example, *_ in GROUPS]
    lengths = {"rollout.max_response_tokens": 10, "algo.overlong_cache_tokens": 4}
    config = recipe(**lengths, **{"algo.filter_groups": rule})
    data = types.SimpleNamespace(train=types.SimpleNamespace(grade=None, stream=lambda seed: ()))
    plan = components.step_plan(config, data)
    marked_PG = np.stack([plan.success(example) for example in groups])
    assert algorithm.informative_groups(marked_PG).tolist() == expected
    rollouts = Rollouts(groups, np.arange(0), np.array(expected), 0, 0, None)
    value_PG = train.reward(config, rollouts) if rule == "reward" else rollouts.correct_PG
    assert (value_PG.max(axis=1) > value_PG.min(axis=1)).tolist() == expected


def test_a_start_says_for_how_long_it_compiles(tmp_path, monkeypatch, capsys):
    """A log had no line for the minutes in which the update of a large model compiled."""
    monkeypatch.setattr(hosts, "WAITING_SECONDS", 0.02)
    monkeypatch.setattr("dapo_jax.logs.display.QUIET_SECONDS", 0.0)
    with contextlib.ExitStack() as stack:
        open_run(small_config(**{"learner.row_tokens": 320}), tmp_path, None, stack)
    lines = capsys.readouterr().out.splitlines()
    assert "  ... compiling the update, 0 s" in lines
    assert "  ... compiling the sampler, 0 s" in lines
