"""Sweeps: rows that are kept, plans, points run and stopped, and what seeds say of a difference."""

import json
import math
import os
import pathlib
import signal
import sys
import threading

import numpy as np
import pandas as pd
import pytest
from ml_collections import ConfigDict
from processes import ran, wait_for
from scipy import stats

from dapo_jax.logs.files import locked, read_zipped_rows
from dapo_jax.report.compare import markdown
from dapo_jax.report.runs import Run, read_rows_file, write_rows
from dapo_jax.report.statistics import Interval, paired_interval, pooled_interval
from dapo_jax.sweep import plan as plans
from dapo_jax.sweep.__main__ import sweep
from dapo_jax.sweep.runner import Runner, environment, share


def test_rows_come_back_rounded_without_the_machines_paths(tmp_path):
    row = {"sampled_tokens_total": 1_234_567, "accuracy/mean": 0.1234567890123, "kl": None}
    row |= {"engine/occupancy": 0.9, "seconds_in_rollout/host": 0.1, "eval/held_out/mean@8": 0.5}
    kept = {"sampled_tokens_total": [1_234_567] * 2, "accuracy/mean": [0.123457] * 2}
    kept |= {"engine/occupancy": [0.9] * 2, "step": [0, 1], "entropy": [0.5, None]}
    start = {"time": "2025-01-02", "commit": "f" * 40}
    run = Run(
        rows=[row | {"step": step, "entropy": [0.5, None][step]} for step in range(2)],
        scores={"eval/held_out/mean@8": {3: 1 / 3, 0: 0.25}},
        config={"seed": 0, "model.path": "/home/me/base", "data": "gs://b/c", "stop": ["</s>"]},
        starts=[start | {"host": "somewhere", "pid": 12}],
        arm="a",
    )
    path = tmp_path / "rows.jsonl.gz"
    write_rows(path, {"x": run})
    assert list(read_zipped_rows(path)) == [
        {
            "arm": "a",
            "seed": 0,
            "config": {"seed": 0, "model.path": "base", "data": "gs://b/c", "stop": ["</s>"]},
            "starts": [start],
            "evaluations": {"held_out": {"mean@8": {"0": 0.25, "3": 0.333333}}},
            "metrics": kept,
        }
    ]
    runs = read_rows_file(path)
    assert list(runs) == ["a/seed_0"]
    before = path.read_bytes()
    write_rows(path, runs)
    assert path.read_bytes() == before, "what was read is written as it was"


def test_intervals_and_p_values_are_scipys():
    rng = np.random.default_rng(0)
    for n in (2, 5, 9, 30):
        a_S = rng.normal(1.0, 2.0, n)
        c_S = a_S + rng.normal(0.1, 0.3, n)
        ours, theirs = paired_interval(pd.Series(a_S - c_S)), stats.ttest_rel(a_S, c_S)
        bounds = theirs.confidence_interval(0.95)
        assert (ours.low, ours.high) == pytest.approx((bounds.low, bounds.high), rel=1e-9)
        assert ours.p == pytest.approx(theirs.pvalue, rel=1e-9)
    assert paired_interval(pd.Series([0.0, 0.0])) == Interval(0, 0, 0, 1)
    assert paired_interval(pd.Series([1.0, math.nan, 1.0])) == Interval(1, 1, 1, 0)
    alone = paired_interval(pd.Series([2.0]))
    assert alone.difference == 2.0 and math.isnan(alone.low) and math.isnan(alone.p)
    assert math.isnan(paired_interval(pd.Series([], dtype=float)).difference)


def test_the_pooled_interval_has_the_residual_of_all_arms():
    """With two arms it is the paired one; a third, that scatters, widens it."""
    value_SA = pd.DataFrame({"a": [3.0, 5.0, 4.0, 8.0], "b": [1.0, 4.0, 2.0, 6.0]})
    two, paired = (
        pooled_interval(value_SA, "a", "b"),
        paired_interval(value_SA["a"] - value_SA["b"]),
    )
    assert (two.low, two.high, two.p) == pytest.approx((paired.low, paired.high, paired.p))
    # Of two seeds an arm's residuals are half of its slope less the mean slope, up and down.
    value_SA = pd.DataFrame({"a": [3.0, 5.0], "b": [1.0, 4.0], "c": [2.0, 0.0]})
    slope_A = np.array([2.0, 3.0, -2.0]) - 1.0  # each arm's rise less the mean's
    sd = math.sqrt((slope_A**2 / 2).sum() / 2)
    three = pooled_interval(value_SA, "a", "c")
    assert three.difference == 3.0
    assert three.high - 3.0 == pytest.approx(stats.t.ppf(0.975, 2) * sd)
    assert math.isnan(pooled_interval(value_SA.head(1), "a", "b").low)


def _plan(*, grid=(), named=(), seeds="2", common=(), config="configs/tiny.py", start=""):
    arms = {"grid": grid, "named": named, "seeds": seeds}
    return plans.make(config=config, settings=dict(common), start=start, **arms)


def test_a_grid_spans_arms_and_seeds_come_in_turn():
    plan = _plan(grid=["algo.eps_high=0.2,0.28", "preset=dapo,token_level"], seeds="0,3,7")
    names = ["eps_high=0.2+dapo", "eps_high=0.2+token_level"]
    names += [name.replace("0.2", "0.28") for name in names]
    assert list(plan.arms) == names
    assert plan.arms[names[1]] == {"algo.eps_high": "0.2", "preset": "token_level"}
    config = plan.configs["eps_high=0.28+token_level"]
    assert (config.algo.eps_high, config.algo.dynamic_sampling) == (0.28, False)
    points = plan.points(pathlib.Path("D"), single_device=True)
    assert [(p.seed, p.arm) for p in points[:5]] == [*((0, name) for name in names), (3, names[0])]
    assert points[-1].seed == 7 and len(points) == 12
    assert points[1].arguments == (
        "--config=configs/tiny.py:token_level",
        "--config.mesh.cpu_devices=1",
        "--config.algo.eps_high=0.2",
        "--config.seed=0",
        "--workdir=D/eps_high=0.2+token_level/seed_0",
    )


def test_arms_are_named_and_span_the_grid():
    plan = _plan(
        named=["no_filter: algo.dynamic_sampling=False algo.eps_high=0.3", "as_is:"],
        grid=["rollout.max_response_tokens=60,80"],
        common={"num_steps": 7, "mesh.cpu_devices": 2, "data.train.args": ConfigDict({"a": 1.0})},
        start="run:base/{seed}@60",
    )
    assert next(iter(plan.arms)) == "no_filter+max_response_tokens=60" and len(plan.arms) == 4
    point = plan.points(pathlib.Path("D"), single_device=True)[4]
    assert (point.arm, point.seed, point.num_steps) == (next(iter(plan.arms)), 1, 7)
    assert "--start=run:base/1@60" in point.arguments
    (own,) = [argument for argument in point.arguments if "cpu_devices" in argument]
    assert own.endswith("=2"), "the flags' own counts"
    as_is = plan.configs["as_is+max_response_tokens=80"]
    assert as_is.algo.dynamic_sampling and as_is.data.train.args.to_dict() == {"a": 1.0}
    names = [list(_plan(config=f"configs/tiny.py{preset}").arms) for preset in ("", ":dapo")]
    assert names == [["tiny"], ["dapo"]]
    # A value with commas is quoted for --arm; one with a path names a folder nevertheless.
    plan = _plan(named=["""qk: "learner.lora_targets=('q','k')" """], grid=["data.train.path=a/b"])
    assert list(plan.arms) == ["qk+path=a_b"]
    assert plan.configs["qk+path=a_b"].learner.lora_targets == ("q", "k")


@pytest.mark.parametrize("seeds", ["0", "a", "1,b", "-1", ""])
def test_a_sweep_without_a_seed_is_refused(seeds):
    """--seeds=0 ended well and had trained nothing."""
    with pytest.raises(ValueError, match=f"--seeds={seeds}: give how many, as 5, or a list"):
        _plan(seeds=seeds)


def test_a_folder_takes_more_of_the_same_sweep_and_no_other(tmp_path):
    steps = {"num_steps": 3}
    plans.record(_plan(grid=["algo.eps_high=0.2"], common=steps), tmp_path)
    more = {"num_steps": 4, "mesh.cpu_devices": 1}
    plans.record(_plan(grid=["algo.eps_high=0.28,0.2"], seeds="3", common=more), tmp_path)
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert list(found["arms"]) == ["eps_high=0.2", "eps_high=0.28"]
    assert found["seeds"] == [0, 1, 2]
    for changes, message in (
        ({"start": "run:x@1"}, "--start is 'run:x@1', but was"),
        ({"common": {"algo.eps_low": 0.1}}, "algo.eps_low is 0.1"),
        ({"common": {"eval.samples_per_prompt": 2}}, "is 2, but"),
        ({"named": ["eps_high=0.2: algo.eps_high=0.3"]}, "arm 'eps_high=0.2' is"),
    ):
        with pytest.raises(ValueError, match=message):
            plans.record(_plan(**changes), tmp_path)
    assert json.loads((tmp_path / "sweep.json").read_text()) == found


# In place of dapo_jax.train: it does what the sweep's folder says of a point, attempt by attempt.
PROGRAM = """
import json, os, pathlib, signal, sys, time
flags = dict(argument.lstrip("-").split("=", 1) for argument in sys.argv[1:])
workdir = pathlib.Path(flags["workdir"])
folder, label = workdir.parent.parent, f"{workdir.parent.name}/{workdir.name}"
starts = folder / "starts.txt"
attempt = starts.read_text().split().count(label) if starts.exists() else 0
with starts.open("a") as file:
    file.write(label + "\\n")
does = json.loads((folder / "does.json").read_text()).get(label, ["ok"])
does = does[min(attempt, len(does) - 1)]
steps = {"ok": int(flags["config.num_steps"]), "wait": 1}.get(does, 0)
eps, seed = float(flags["config.algo.eps_high"]), int(flags["config.seed"])
with (workdir / "metrics.jsonl").open("w") as file:
    for step in range(steps):
        row = {"step": step, "accuracy/mean": eps + seed / 10, "seconds/total": 60.0}
        file.write(json.dumps(row) + "\\n")
(workdir / "config.json").write_text(json.dumps({"seed": seed}))
(workdir / "cores.json").write_text(json.dumps(sorted(os.sched_getaffinity(0))))
if does == "wait":
    def save(*_):
        (workdir / "saved").touch()
        sys.exit(75)
    signal.signal(signal.SIGTERM, save)
    (workdir / "waits").touch()
    while True:
        time.sleep(0.01)
if does == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if does == "fail":
    print("working", "error: no [bold]model[/bold]\x1b", sep="\\n")
sys.exit({"fail": 1, "again": 75}.get(does, 0))
"""
A, B = "eps_high=0.2", "eps_high=0.3"
FAKE = [sys.executable, "-S", "-c", PROGRAM]


def _points(folder, does, *, steps=2, seeds="2"):
    (folder / "does.json").write_text(json.dumps(does))
    plan = _plan(grid=["algo.eps_high=0.2,0.3"], seeds=seeds, common={"num_steps": steps})
    return plan, plan.points(folder)


def _attempts(folder):
    return (folder / "starts.txt").read_text().split()


def test_failures_are_kept_apart_and_tried_again_at_the_end(tmp_path, capsys):
    does = {f"{B}/seed_0": ["again", "again", "ok"], f"{A}/seed_1": ["kill", "none"]}
    _, points = _points(tmp_path, does | {f"{A}/seed_0": ["fail", "ok"]})
    runner = Runner(points, jobs=1, program=FAKE)
    runner.run()
    said = capsys.readouterr().out.splitlines()
    labels = [point.label for point in points]
    assert _attempts(tmp_path) == [*labels, *labels[:3], *labels[1:3]]
    assert runner.done == 3 and runner.failed == [points[2]] and not runner.stopped
    assert said[1].startswith(f"[0/4] {A}/seed_0: ended with 1, 0 of 2 steps in 0:00:0")
    assert said[2:4] == ["  working", "  error: no [bold]model[/bold]\\x1b"]
    ends = [line for line in said if line.startswith("[")]
    for number, end in (
        (1, f"{B}/seed_0: stopped and saved, 0 of 2 steps"),
        (2, f"{A}/seed_1: ended with -9"),
        (3, f"[1/4] {B}/seed_1: done, 2 of 2 steps in 0:00:0"),
        (-1, f"{A}/seed_1: ended with 0, 0 of 2 steps"),  # it did nothing
    ):
        assert end in ends[number]

    # Given again, only what is not done is run; with more steps, all is.
    for steps, again in ((2, labels[2:3]), (3, labels)):
        before, (_, points) = len(_attempts(tmp_path)), _points(tmp_path, {}, steps=steps)
        Runner(points, jobs=2, program=FAKE).run()
        assert sorted(_attempts(tmp_path)[before:]) == sorted(again)


def test_jobs_have_shares_of_the_cores_and_of_a_gpu():
    assert environment(3)["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.300"
    assert [share(range(8), slot, 3) for slot in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [share([4, 5], slot, 3) for slot in range(3)] == [[4], [5], [4]]


def test_a_sweep_is_stopped_goes_on_and_ends_in_tables(tmp_path, capsys):
    def ended(plan):
        with pytest.raises(SystemExit) as ended:
            sweep(plan, tmp_path, jobs=2, program=FAKE)
        return ended.value.code

    def kill_when_both_wait():
        wait_for(lambda: all((point.workdir / "waits").exists() for point in points[:2]))
        os.kill(os.getpid(), signal.SIGTERM)

    plan, points = _points(tmp_path, {f"{arm}/seed_0": ["wait", "ok"] for arm in (A, B)})
    labels, cores = [point.label for point in points], sorted(os.sched_getaffinity(0))
    threading.Thread(target=kill_when_both_wait).start()
    assert ended(plan) == 75
    assert all((point.workdir / "saved").exists() for point in points[:2])
    assert sorted(_attempts(tmp_path)) == labels[:2]
    bound = [json.loads((point.workdir / "cores.json").read_text()) for point in points[:2]]
    assert sorted(bound) == [share(cores, slot, 2) for slot in range(2)]
    with locked(tmp_path), pytest.raises(ValueError, match="belongs to a run that is going on"):
        sweep(plan, tmp_path, jobs=2, program=FAKE)
    capsys.readouterr()

    sweep(plan, tmp_path, jobs=2, program=FAKE)
    assert sorted(_attempts(tmp_path)[2:]) == sorted(labels)
    text = (tmp_path / "summary.md").read_text()
    assert text in capsys.readouterr().out
    runs = read_rows_file(tmp_path / "rows.jsonl.gz")
    found = [(run.arm, run.seed, len(run.rows)) for run in runs.values()]
    assert found == [(arm, seed, 2) for arm in plan.arms for seed in (0, 1)]
    assert text == markdown(runs, title="Sweep of configs/tiny.py")

    more, _ = _points(tmp_path, {f"{A}/seed_2": ["fail"]}, seeds="3")
    assert ended(more) == 1
    captured = capsys.readouterr()
    assert captured.err == f"failed: {tmp_path / A / 'seed_2' / 'output.txt'}\n"
    assert f"{B}/seed_2: done" in captured.out, "a failure stops nothing"


@pytest.mark.slow
def test_arms_of_a_real_sweep_share_prompts_and_samples(tmp_path):
    """Two whose clips hardly bind do, until their policies differ."""
    folder = tmp_path / "sweep"
    command = ["-m", "dapo_jax.sweep", "--config=tests/small_config.py", f"--workdir={folder}"]
    command += ["--set=algo.eps_high=0.2,0.28", "--seeds=1,", "--jobs=2"]
    command += ["--config.num_steps=1", "--config.eval.every_steps=0"]
    assert "eps_high=0.28 - eps_high=0.2 " in ran(*command).stdout
    runs = read_rows_file(folder / "rows.jsonl.gz")
    assert [len(run.rows) for run in runs.values()] == [1, 1]
    (a, b) = (run["response_tokens/mean"][0] for run in runs.values())
    assert a == b
