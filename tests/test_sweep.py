"""Sweeps: rows that are kept, plans, points run and stopped, and what seeds say of a difference."""

import dataclasses
import functools
import gzip
import json
import math
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from processes import ran
from scipy import stats

from dapo_jax.logs.files import Rows, locked
from dapo_jax.report import statistics
from dapo_jax.report.compare import markdown
from dapo_jax.report.rows import read_rows_file, write_rows
from dapo_jax.report.runs import Run, load_sweep
from dapo_jax.sweep import plan as plans
from dapo_jax.sweep import runner as runners
from dapo_jax.sweep.__main__ import launch_lines, sweep
from dapo_jax.sweep.runner import Runner, share

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _row(step, **values):
    return {
        "step": step,
        "sampled_tokens_total": 1000 * (step + 1),
        "accuracy/mean": 0.1234567890123,
        "entropy": None if step == 1 else 0.5,
        "engine/occupancy": 0.9,
        "seconds_in_rollout/host": 0.1,
        "eval/held_out/mean@8": 0.5,
        **values,
    }


def _run(arm="a", seed=0, **changes):
    start = {
        "time": "2025-01-02T03:04:05+00:00",
        "host": "somewhere",
        "pid": 12,
        "folder": "/home/me/dapo",
        "command": "/usr/bin/python -m dapo_jax.train --config=configs/tiny.py:dapo "
        "--workdir=/home/me/dapo/runs/x --start=run:/mnt/base@60",
        "commit": "f" * 40,
    }
    config = {
        "seed": seed,
        "model.path": "/home/me/dapo/base",
        "data": ["/x/q", "</s>", "gs://b/c"],
    }
    run = Run(
        rows=[_row(step) for step in range(3)],
        evaluations={("held_out", "mean@8"): {0: 0.25, 3: 1 / 3}},
        config=config,
        starts=[start],
        arm=arm,
    )
    return dataclasses.replace(run, **changes)


def test_rows_come_back_rounded_without_the_machines_paths(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    write_rows(path, {"x": _run(), "y": _run(seed=1), "plain": _run(arm="")})
    runs = read_rows_file(path)
    assert list(runs) == ["a/seed_0", "a/seed_1", "plain/seed_0"]
    run = runs["a/seed_0"]
    assert (run.arm, run.seed, len(run.rows)) == ("a", 0, 3)
    assert run.rows[2] == {
        "step": 2,
        "sampled_tokens_total": 3000,
        "accuracy/mean": 0.123457,
        "engine/occupancy": 0.9,
        "entropy": 0.5,
    }
    assert "entropy" not in run.rows[1]
    assert run.evaluations == {("held_out", "mean@8"): {0: 0.25, 3: 0.333333}}
    assert run.config == {"seed": 0, "model.path": "base", "data": ["q", "</s>", "gs://b/c"]}
    (start,) = run.starts
    assert start == {"time": "2025-01-02T03:04:05+00:00", "commit": "f" * 40}
    before = path.read_bytes()
    write_rows(path, runs)
    assert path.read_bytes() == before, "what was read is written as it was"


def test_broken_rows_are_refused_by_file_and_line(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    write_rows(path, {"a": _run(), "b": _run()})
    with pytest.raises(ValueError, match=r"rows.jsonl.gz, line 2: 'a/seed_0' is there twice"):
        read_rows_file(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"rows.jsonl.gz is no whole gzip file"):
        read_rows_file(path)
    path.write_bytes(gzip.compress(b'{"arm": "a"}\n'))
    with pytest.raises(ValueError, match=r"rows.jsonl.gz, line 1: no run's rows.*metrics"):
        read_rows_file(path)


def test_rows_of_two_files_with_one_arms_name_stay_apart(tmp_path):
    """`summary --rows=A --rows=B` replaced A's runs by B's of the same arm and seed.

    What it printed for A's other arms was their difference from B's.
    """
    for name, of_arm in (("one", {"dapo": 0.8, "new": 0.9}), ("two", {"dapo": 0.2})):
        runs = {
            f"{arm}/seed_{seed}": dataclasses.replace(
                _run(rows=[{"step": 0, "accuracy/mean": accuracy}]), arm=arm, config={"seed": seed}
            )
            for arm, accuracy in of_arm.items()
            for seed in (0, 1)
        }
        write_rows(tmp_path / f"{name}.jsonl.gz", runs)
    files = [f"--rows={tmp_path / name}.jsonl.gz" for name in ("one", "two")]
    out = ran("-m", "dapo_jax.report", *files).stdout
    lines = [[cell.strip() for cell in line.split("|")] for line in out.splitlines()]
    (new,) = [line for line in lines if line[1:3] == ["train accuracy, %", "new"]]
    assert new[3:5] == ["2", "+10.0"]
    assert sum(line[1].endswith("jsonl.gz: dapo") for line in lines if len(line) > 2) == 2


def test_a_sweeps_folder_is_read_arm_by_arm(tmp_path):
    plan = {"arms": {"b": {"algo.eps_high": 0.3}, "a": {}}, "seeds": [0, 3]}
    (tmp_path / "sweep.json").write_text(json.dumps(plan))
    for point in ("a/seed_0", "b/seed_3", "b/seed_0", "gone/seed_0"):
        writer = Rows(tmp_path / point, resume_step=None)
        writer.write(_row(0))
        (tmp_path / point / "config.json").write_text(json.dumps({"seed": int(point[-1])}))
    (tmp_path / "a" / "seed_3").mkdir()
    (tmp_path / "a" / "seed_3" / "metrics.jsonl").touch()
    runs = load_sweep(tmp_path)
    assert {label: (run.arm, run.seed) for label, run in runs.items()} == {
        "b/seed_0": ("b", 0),
        "b/seed_3": ("b", 3),
        "a/seed_0": ("a", 0),
    }
    assert list(runs) == ["b/seed_0", "b/seed_3", "a/seed_0"]
    with pytest.raises(FileNotFoundError, match=r"sweep.json does not exist: .* holds no sweep"):
        load_sweep(tmp_path / "a")


A_S, B_S = np.array([3.0, 5.0, 4.0, 8.0]), np.array([1.0, 4.0, 2.0, 6.0])


def test_intervals_and_p_values_are_scipys():
    rng = np.random.default_rng(0)
    for n in (2, 5, 9, 30):
        a_S = rng.normal(1.0, 2.0, n)
        c_S = a_S + rng.normal(0.1, 0.3, n)
        ours, theirs = statistics.paired_interval(a_S, c_S), stats.ttest_rel(a_S, c_S)
        bounds = theirs.confidence_interval(0.95)
        assert (ours.low, ours.high) == pytest.approx((bounds.low, bounds.high), rel=1e-9)
        assert ours.p == pytest.approx(theirs.pvalue, rel=1e-9)
        assert ours.excludes_zero == (ours.p < 0.05)
    assert statistics.paired_interval([1.0, 2.0], [1.0, 2.0]).p == 1.0
    assert statistics.paired_interval([2.0, 3.0], [1.0, 2.0]).p == 0.0


def test_the_pooled_interval_has_the_residual_of_all_arms():
    """With two arms it is the paired one; a third, that scatters, widens it."""
    two = statistics.pooled_interval([A_S, B_S], 0, 1)
    paired = statistics.paired_interval(A_S, B_S)
    assert (two.low, two.high, two.p) == pytest.approx((paired.low, paired.high, paired.p))
    # Of two seeds an arm's residuals are half of its slope less the mean slope, up and down.
    value_AS = np.array([[3.0, 5.0], [1.0, 4.0], [2.0, 0.0]])
    slope_A = np.array([2.0, 3.0, -2.0]) - 1.0  # each arm's rise less the mean's
    sd = math.sqrt((slope_A**2 / 2).sum() / 2)
    three = statistics.pooled_interval(value_AS, 0, 2)
    assert three.difference == 3.0
    assert three.half_width == pytest.approx(stats.t.ppf(0.975, 2) * sd)
    assert math.isnan(statistics.pooled_interval([[1.0], [2.0]], 0, 1).low)
    assert statistics.pooled_interval([[0.1, 0.2], [1.1, 1.2]], 0, 1).half_width == 0


def test_holms_correction_by_hand():
    """Sorted 0.01, 0.03, 0.04 times 3, 2, 1, each no less than the one before."""
    held = statistics.holm([0.04, 0.01, math.nan, 0.03])
    np.testing.assert_allclose(held, [0.09, 0.04, math.nan, 0.09])
    assert statistics.holm([0.9, 0.8]).tolist() == [1.0, 1.0]
    assert statistics.holm([]).tolist() == []


def test_what_few_or_equal_seeds_cannot_tell_is_left_open():
    one = statistics.paired_interval([3.0], [1.0])
    assert one.difference == 2.0 and math.isnan(one.low) and not one.excludes_zero
    assert math.isnan(statistics.spread([1.0]))
    assert math.isnan(statistics.paired_interval([], []).difference)
    same = statistics.paired_interval([1.0, 2.0], [1.0, 2.0])
    assert (same.difference, same.low, same.high) == (0.0, 0.0, 0.0)
    shifted = statistics.paired_interval([20.0, 30.0], [20.0 + 0.1, 30.0 + 0.1])
    assert shifted.half_width == 0, "the differences are equal but for their rounding"


def test_the_last_rows_are_ten_or_a_third():
    assert statistics.last_mean(np.arange(100.0)) == 94.5
    assert statistics.last_mean(np.arange(12.0)) == np.mean([8, 9, 10, 11])
    assert statistics.last_mean([1.0, 2.0]) == 2.0
    assert statistics.last_mean([1.0, 2, 3, 4, 5, np.nan]) == 5.0
    assert math.isnan(statistics.last_mean([1.0, np.nan]))


def _plan(*, grid=(), named=(), seeds="2", common=(), config="configs/tiny.py", start=""):
    return plans.make(config=config, flags=common, grid=grid, named=named, seeds=seeds, start=start)


def test_values_are_split_outside_of_brackets_and_quotes():
    assert plans.split_values("0.2, 0.28") == ["0.2", "0.28"]
    assert plans.split_values("(1,2),(3,)") == ["(1,2)", "(3,)"]
    assert plans.split_values("""'a,b',"c",''""") == ["a,b", "c", ""]
    assert plans.split_values("('q','k'),{'a':[1,2]}") == ["('q','k')", "{'a':[1,2]}"]
    for wrong, said in (("(1,2", "no partner"), ("1,2]", "no partner"), ("1,,2", "empty")):
        with pytest.raises(ValueError, match=said):
            plans.split_values(wrong)


def test_a_grid_spans_arms_and_seeds_come_in_turn():
    plan = _plan(grid=["algo.eps_high=0.2,0.28", "preset=dapo,token_level"], seeds="0,3,7")
    names = ["eps_high=0.2+dapo", "eps_high=0.2+token_level"]
    names += [name.replace("0.2", "0.28") for name in names]
    assert list(plan.arms) == names
    assert plan.arms[names[1]] == {"algo.eps_high": "0.2", "preset": "token_level"}
    recipe = plan.recipes["eps_high=0.28+token_level"]
    assert (recipe.algo.eps_high, recipe.algo.dynamic_sampling) == (0.28, False)
    points = plan.points(pathlib.Path("D"), single_device=True)
    assert [(p.seed, p.arm) for p in points[:5]] == [*((0, name) for name in names), (3, names[0])]
    assert points[-1].seed == 7 and len(points) == 12
    assert points[1].arguments == [
        "--config=configs/tiny.py:token_level",
        "--config.algo.eps_high=0.2",
        "--config.seed=0",
        "--config.mesh.cpu_devices=1",
        "--workdir=D/eps_high=0.2+token_level/seed_0",
    ]


def test_arms_are_named_and_span_the_grid():
    plan = _plan(
        named=["no_filter: algo.dynamic_sampling=False algo.eps_high=0.3", "as_is:"],
        grid=["rollout.max_response_tokens=60,80"],
        common=["--config.num_steps=7", "--config.mesh.cpu_devices=2"],
        start="run:base/{seed}@60",
    )
    assert next(iter(plan.arms)) == "no_filter+max_response_tokens=60" and len(plan.arms) == 4
    point = plan.points(pathlib.Path("D"), single_device=True)[4]
    assert (point.arm, point.seed, point.num_steps) == (next(iter(plan.arms)), 1, 7)
    assert "--start=run:base/1@60" in point.arguments
    assert sum("cpu_devices" in flag for flag in point.flags) == 1, "the flags' own counts"
    assert plan.recipes["as_is+max_response_tokens=80"].algo.dynamic_sampling
    assert list(_plan().arms) == ["tiny"] and list(_plan(config="configs/tiny.py:dapo").arms) == [
        "dapo"
    ]
    grid = ["data.train.count=50,60", "eval.sets.arithmetic.count=9"]
    assert next(iter(_plan(grid=grid).arms)) == (
        "data.train.count=50+eval.sets.arithmetic.count=9"
    ), "count alone would say nothing"
    grid = ["learner.lora_targets=('q','k'),('v',)"]
    assert list(_plan(grid=grid).arms) == ["lora_targets=q_k", "lora_targets=v"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": ["algo.eps_hihg=0.2"]}, r"no key 'algo.eps_hihg'.*mean --config.algo.eps_high"),
        ({"grid": ["eps_high=0.2"]}, r"no key 'eps_high'.*mean --config.algo.eps_high"),
        ({"grid": ["algo.eps_high=0.2,x"]}, r"arm 'eps_high=x': .*could not convert.*'x'"),
        ({"grid": ["algo.eps_high=-1"]}, r"arm 'eps_high=-1': algo.eps_high = -1.0, but must be"),
        ({"grid": ["preset=dapo,naive_gpro"]}, "arm 'naive_gpro': .*did you mean 'naive_grpo'"),
        (
            {"grid": ["preset=dapo"], "config": "configs/tiny.py:dapo"},
            "arm 'dapo': .*'dapo:dapo' is unknown",
        ),
        ({"grid": ["algo.eps_high"]}, "write KEY=V1,V2"),
        ({"grid": ["algo.eps_high=0.2", "algo.eps_high=0.3"]}, "--set has a key twice"),
        ({"grid": ["algo.eps_high=0.2,0.20"]}, "'eps_high=0.2' and 'eps_high=0.20' are the same"),
        ({"grid": ["seed=1,2"]}, "give --seeds=5"),
        ({"common": ["--config.seed=1"]}, "give --seeds=5"),
        ({"named": ["a: num_steps=2", "a: num_steps=3"]}, "two arms are called 'a'"),
        ({"named": ["a: num_steps"]}, "'num_steps' is no KEY=V"),
        ({"named": ["num_steps=3"]}, 'write "NAME: KEY=V KEY=V"'),
        ({"named": ["a/b: num_steps=3"]}, "'a/b' cannot name an arm's folder"),
        ({"named": ["a: num_steps=3"], "grid": ["num_steps=4"]}, "arm 'a' and --set both have"),
        ({"seeds": "x"}, "give how many"),
        ({"seeds": "0"}, "one seed at least"),
        ({"seeds": "1,1"}, "each once"),
        ({"seeds": "4294967296,"}, "below 4294967296"),
        ({"config": "configs/tyni.py"}, "tyni.py"),
    ],
)
def test_a_wrong_plan_is_refused_before_anything_starts(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        _plan(**changes)
    assert "\n" not in str(error.value)


def test_a_folder_takes_more_of_the_same_sweep_and_no_other(tmp_path):
    first = _plan(grid=["algo.eps_high=0.2"], common=["--config.num_steps=3"])
    plans.write(first, tmp_path)
    more = _plan(
        grid=["algo.eps_high=0.28,0.2"],
        seeds="3",
        common=["--config.num_steps=4", "--config.mesh.cpu_devices=1"],
    )
    plans.check_same(more, tmp_path)
    plans.write(more, tmp_path)
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert list(found["arms"]) == ["eps_high=0.2", "eps_high=0.28"]
    assert found["seeds"] == [0, 1, 2]
    for changes, message in (
        ({"common": ["--config.num_steps=3"]}, "num_steps is 3, but was 4"),
        ({"common": ["--config.num_steps=4"], "config": "configs/tiny.py:dapo"}, None),
        ({"common": ["--config.num_steps=4"], "start": "run:x@1"}, "--start is 'run:x@1', but was"),
        ({"common": ["--config.num_steps=4", "--config.algo.eps_low=0.1"]}, "algo.eps_low is 0.1"),
        ({"common": ["--config.num_steps=4", "--config.eval.samples_per_prompt=2"]}, "is 2, but"),
        (
            {"common": ["--config.num_steps=4"], "named": ["eps_high=0.2: algo.eps_high=0.3"]},
            "arm 'eps_high=0.2' is",
        ),
    ):
        plan = _plan(**changes)
        if message is None:
            plans.check_same(plan, tmp_path)
            continue
        with pytest.raises(ValueError, match=message):
            plans.check_same(plan, tmp_path)


def test_launch_prints_what_a_point_needs():
    plan = _plan(grid=["preset=dapo"], common=["--config.data.train.path=my file"])
    points = plan.points(pathlib.Path("D"))
    template = "RUN={name} CONFIG={config} {workdir} {seed} {arm} {flags}"
    assert launch_lines(template, points)[1] == (
        "RUN=dapo-s1 CONFIG=configs/tiny.py:dapo D/dapo/seed_1 1 dapo "
        "'--config.data.train.path=my file' --config.seed=1"
    )
    assert shlex.split(launch_lines("{command}", points)[1])[2:4] == [
        "dapo_jax.train",
        "--config=configs/tiny.py:dapo",
    ]
    with pytest.raises(ValueError, match=r"--launch has \{sed\}; there are .*\{seed\}"):
        launch_lines("{sed}", points)


def test_launch_refuses_two_points_of_one_name():
    """Arms `x=-1` and `x=1` were both called x-1: a pod took the second run for the first."""
    plan = _plan(named=["x=-1: algo.eps_high=0.3", "x=1: algo.eps_high=0.4"])
    points = plan.points(pathlib.Path("D"))
    with pytest.raises(ValueError, match=r"'x=-1' and 'x=1' both have \{name\} 'x-1-s0'"):
        launch_lines("RUN={name} {command}", points)
    assert len(set(launch_lines("{command}", points))) == len(points)


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
    print("working", "error: no [bold]model[/bold]\x1b", "(--debug shows where)", sep="\\n")
sys.exit({"fail": 1, "again": 75}.get(does, 0))
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [sys.executable, "-S", str(path)]


def _points(folder, does, *, steps=2, arms="0.2,0.3", seeds="2"):
    folder.mkdir(exist_ok=True)
    (folder / "does.json").write_text(json.dumps(does))
    plan = _plan(
        grid=[f"algo.eps_high={arms}"], seeds=seeds, common=[f"--config.num_steps={steps}"]
    )
    return plan, plan.points(folder)


def _attempts(folder):
    return (folder / "starts.txt").read_text().split()


def test_failures_are_kept_apart_and_retried_at_the_end(tmp_path, program):
    a, b = "eps_high=0.2", "eps_high=0.3"
    does = {
        f"{a}/seed_0": ["fail", "ok"],
        f"{b}/seed_0": ["again", "again", "ok"],
        f"{a}/seed_1": ["kill", "none"],
    }
    folder, said = tmp_path / "sweep", []
    _, points = _points(folder, does)
    runner = Runner(
        points,
        jobs=1,
        retries=1,
        program=program,
        say=said.append,
        again_seconds=0,
    )
    runner.run()
    assert not runner.stopped
    assert _attempts(folder) == [
        f"{a}/seed_0",
        *[f"{b}/seed_0"] * 3,
        *(f"{a}/seed_1", f"{b}/seed_1", f"{a}/seed_0", f"{a}/seed_1"),
    ]
    why = ["ended with status 0 after 0 steps"]
    assert runner.done == 3 and runner.failed == {points[2]: why}
    first, *reason = said[0].split("\n")
    assert first.startswith(f"[0/4] {a}/seed_0: failed with status 1, 0 of 2 steps in 0:00:0")
    assert reason == ["  working", "  error: no [bold]model[/bold]\\x1b"]
    assert f"{b}/seed_0: stopped and saved, 0 of 2 steps" in said[1]
    assert f"{a}/seed_1: killed by signal 9" in said[4]
    assert said[5].startswith(f"[2/4] {b}/seed_1: done, 2 of 2 steps in 0:00:0")
    assert said[5].endswith(", accuracy 40.0%")
    log = (folder / a / "seed_0" / "output.txt").read_text()
    assert log.startswith("working")

    # Given again, only what is not done is run; with more steps, all is.
    (folder / "does.json").write_text("{}")
    Runner(points, jobs=1, retries=0, program=program).run()
    assert _attempts(folder)[8:] == [f"{a}/seed_1"]
    _, points = _points(folder, {}, steps=3)
    Runner(points, jobs=2, retries=0, program=program).run()
    assert sorted(_attempts(folder)[9:]) == sorted(point.label for point in points)
    (folder / b / "seed_1" / "metrics.jsonl").write_text("")
    Runner(points, jobs=1, retries=0, program=program).run()
    assert _attempts(folder)[13:] == [f"{b}/seed_1"], "its rows were gone"


def test_what_says_again_for_ever_fails(tmp_path, program):
    _, points = _points(tmp_path / "sweep", {"eps_high=0.2/seed_0": ["again"]}, arms="0.2")
    runner = Runner(points, jobs=1, retries=0, program=program, again_seconds=0)
    runner.run()
    assert _attempts(tmp_path / "sweep") == [points[0].label] * 6 + [points[1].label]
    assert [point.seed for point in runner.failed] == [0] and runner.done == 1


def test_jobs_have_their_own_cores(tmp_path, program):
    assert [share(range(8), slot, 3) for slot in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [share([4, 5], slot, 3) for slot in range(3)] == [[4], [5], [4]]
    cores = sorted(os.sched_getaffinity(0))
    does = {f"eps_high={arm}/seed_0": ["wait"] for arm in (0.2, 0.3)}
    folder = tmp_path / "sweep"
    _, points = _points(folder, does, seeds="1")
    runner = Runner(points, jobs=2, retries=0, program=program)

    both = [point.workdir / "waits" for point in points]
    stopper = threading.Thread(target=_call_when, args=(both, runner.stop))
    stopper.start()
    runner.run()
    stopper.join()
    assert runner.stopped and all((point.workdir / "saved").exists() for point in points)
    assert len(_attempts(folder)) == 2
    assert not runner.failed
    bound = [json.loads((point.workdir / "cores.json").read_text()) for point in points]
    assert bound == [share(cores, slot, 2) for slot in range(2)]


def _call_when(paths, call):
    """Calls a function when all files are there."""
    while not all(path.exists() for path in paths):
        time.sleep(0.01)
    time.sleep(0.5)  # which a terminal needs to show where they are
    call()


def test_a_sweep_is_stopped_goes_on_and_ends_in_tables(tmp_path, program, capsys, monkeypatch):
    folder = tmp_path / "sweep"
    plan, points = _points(folder, {"eps_high=0.3/seed_0": ["wait", "ok"]})
    settings = {"jobs": 1, "retries": 0, "baseline": "", "program": program}
    kill = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
    killer = threading.Thread(target=_call_when, args=([points[1].workdir / "waits"], kill))
    killer.start()
    # A terminal sees how far the runs are: until one had ended nothing was shown, for hours.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(runners, "PROGRESS_SECONDS", 0.05)
    with pytest.raises(SystemExit) as ended:
        sweep(plan, folder, **settings)
    killer.join()
    assert ended.value.code == 75
    assert (points[1].workdir / "saved").exists()
    assert _attempts(folder) == [points[0].label, points[1].label]
    with locked(folder), pytest.raises(ValueError, match="belongs to a run that is going on"):
        sweep(plan, folder, **settings)
    assert "1 of 4 runs done; eps_high=0.3/seed_0: 1 of 2 steps" in capsys.readouterr().out
    monkeypatch.delenv("FORCE_COLOR")

    sweep(plan, folder, **settings)
    assert _attempts(folder)[2:] == [point.label for point in points[1:]]
    out = capsys.readouterr().out
    assert "2 arms x 2 seeds" in out and "1 of 4 runs are done" in out
    assert "[4/4] eps_high=0.3/seed_1: done, 2 of 2 steps in 0:00:0" in out
    text = (folder / "summary.md").read_text()
    assert text in out
    runs = read_rows_file(folder / "rows.jsonl.gz")
    assert [(run.arm, run.seed, len(run.rows)) for run in runs.values()] == [
        (arm, seed, 2) for arm in plan.arms for seed in (0, 1)
    ]
    assert text == markdown(runs, title="Sweep of configs/tiny.py"), "the rows alone make it"

    (folder / "does.json").write_text(json.dumps({"eps_high=0.2/seed_2": ["fail"]}))
    more, _ = _points(folder, {"eps_high=0.2/seed_2": ["fail"]}, seeds="3")
    with pytest.raises(SystemExit) as ended:
        sweep(more, folder, **settings)
    assert ended.value.code == 1
    captured = capsys.readouterr()
    assert "seed_2/output.txt: error: no [bold]model" in captured.err
    assert "eps_high=0.3/seed_2: done" in captured.out, "a failure stops nothing"


def _table_run(arm, seed, accuracy, steps=3, score=None):
    rows = [{"step": step, "accuracy/mean": accuracy} for step in range(steps)]
    scores = {} if score is None else {("held_out", "mean@8"): {0: 0.9, steps: score}}
    config = {"seed": seed, "num_steps": 3}
    return Run(rows=rows, evaluations=scores, config=config, arm=arm)


def _summary_runs():
    """A_S and B_S as percent."""
    a_S = [_table_run("a", seed, value / 100, score=value / 10) for seed, value in enumerate(A_S)]
    b_S = [_table_run("b", seed, value / 100) for seed, value in enumerate(B_S)]
    return {f"{run.arm}/seed_{run.seed}": run for run in [*b_S, *a_S]}


def _cells(text, first):
    """The cells of the table's lines that begin with this cell."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return [cells[1:] for cells in lines if cells and cells[0] == first]


def test_the_summary_has_spreads_and_paired_intervals():
    text = markdown(_summary_runs(), title="A")
    assert _cells(text, "a") == [["3", "4", "50.0 ± 21.6", "5.0 ± 2.2"]]
    assert _cells(text, "b") == [["3", "4", "-", "3.2 ± 2.2"]]
    assert _cells(text, "train accuracy, %") == [["a", "4", "+1.8", "[+1.0, +2.5] *"]]
    assert _cells(text, "held_out mean@8, %") == [], "no seed has it in both"
    (cells,) = _cells(markdown(_summary_runs(), baseline="a", title="A"), "train accuracy, %")
    assert cells[:4] == ["b", "4", "-1.8", "[-2.5, -1.0] *"]
    with pytest.raises(ValueError, match="no arm is called 'c'; there are b, a"):
        markdown(_summary_runs(), baseline="c", title="A")


@pytest.mark.parametrize(
    ("key", "clipped", "why"),
    [
        ("algo.eps_high", 0.0, ": nothing was clipped high"),
        ("algo.eps_high", 0.1, ""),
        ("algo.eps_low", 0.0, ": nothing was clipped low"),
        ("rollout.top_k", 0.0, ""),
    ],
)
def test_arms_of_equal_bits_are_said_to_be_equal(key, clipped, why, tmp_path):
    """A sweep of two clips that no ratio reached printed +0.0 [+0.0, +0.0], as if measured."""
    runs = {}
    for arm, seed, accuracy in [("a", 0, 0.5), ("a", 3, 0.5), ("b", 0, 0.5), ("b", 3, 0.6)]:
        run = _table_run(arm, seed, accuracy)
        run.config[key] = arm
        part = {f"clip_fraction/{key[-4:].strip('_')}": clipped}
        rows = [row | part | {"seconds/total": ord(arm)} for row in run.rows]
        runs[f"{arm}/seed_{seed}"] = dataclasses.replace(run, rows=rows)
    write_rows(tmp_path / "rows.jsonl.gz", runs)
    for found in (runs, read_rows_file(tmp_path / "rows.jsonl.gz")):
        text = markdown(found, title="Sweep")
        (line,) = (line for line in text.splitlines() if " has the bits of " in line)
        assert (
            line == f"b has the bits of a in every row of seed 0: {key} changed nothing there{why}."
        )


def test_the_summary_leaves_out_what_is_not_finished():
    runs = _summary_runs() | {"b/seed_9": _table_run("b", 9, 0.99, steps=2)}
    text = markdown(runs, title="A")
    assert "Left out, not finished: b/seed_9 has 2 of 3 steps." in text
    assert _cells(text, "b") == _cells(markdown(_summary_runs(), title="A"), "b")
    short = {"b/seed_9": runs["b/seed_9"]}
    assert "No run has finished." in markdown(short, title="A")


@pytest.mark.slow
def test_a_real_sweep_is_stopped_and_goes_on(tmp_path):
    """Two arms whose clips hardly bind share prompts and samples; both end as uninterrupted."""
    folder = tmp_path / "sweep"
    command = [sys.executable, "-m", "dapo_jax.sweep", "--config=tests/small_config.py"]
    command += [f"--workdir={folder}", "--set=algo.eps_high=0.2,0.28", "--seeds=1,", "--jobs=2"]
    command += ["--config.num_steps=3"]
    first = subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True)
    rows = [folder / f"eps_high={arm}" / "seed_1" / "metrics.jsonl" for arm in (0.2, 0.28)]
    while not any(path.exists() and path.read_text() for path in rows):
        assert first.poll() is None, first.communicate()
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    said, error = first.communicate(timeout=300)
    assert first.returncode == 75 and "the same command goes on" in error
    assert "failed" not in said
    done = ran(*command[1:])
    runs = read_rows_file(folder / "rows.jsonl.gz")
    assert [len(run.rows) for run in runs.values()] == [3, 3]
    assert max(len(run.starts) for run in runs.values()) == 2
    (a, b) = (run.rows[0]["response_tokens/mean"] for run in runs.values())
    assert a == b, "the same seed samples the same responses until the policies differ"
    (cells,) = [c for c in _cells(done.stdout, "train accuracy, %") if c[0] == "eps_high=0.28"]
    assert cells[1] == "1" and cells[3] == "-", "one pair has no interval"
