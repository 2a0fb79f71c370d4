"""Sweeps: rows that are kept, plans, points run and stopped, and what seeds say of a difference."""

import dataclasses
import gzip
import json
import math
import random

import numpy as np
import pytest
from scipy import stats

from dapo_jax.report import statistics
from dapo_jax.report.rows import read_rows_file, write_rows
from dapo_jax.report.runs import Run, load_sweep
from dapo_jax.run.files import MetricsWriter
from dapo_jax.run.metrics import METRICS


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
        "entropy": 0.5,
    }
    assert "entropy" not in run.rows[1]
    assert run.evaluations == {("held_out", "mean@8"): {0: 0.25, 3: 0.333333}}
    assert run.config == {"seed": 0, "model.path": "base", "data": ["q", "</s>", "gs://b/c"]}
    (start,) = run.starts
    assert start["command"] == (
        "python -m dapo_jax.train --config=configs/tiny.py:dapo --workdir=runs/x "
        "--start=run:base@60"
    )
    assert start["commit"] == "f" * 40 and not start.keys() & {"host", "pid", "folder"}
    before = path.read_bytes()
    write_rows(path, runs)
    assert path.read_bytes() == before, "what was read is written as it was"


def test_a_hundred_steps_take_less_than_15_kb(tmp_path):
    """With as many digits that nothing foretells as a real run's rows have."""
    rng, counts = random.Random(0), ("groups", "updates", "step", "prompts", "verdicts", "alarms")
    rows = [
        {
            metric.key: rng.randrange(64) if metric.key.startswith(counts) else rng.random()
            for metric in METRICS
        }
        for _ in range(100)
    ]
    write_rows(tmp_path / "rows.jsonl.gz", {"a": _run(rows=rows)})
    assert (tmp_path / "rows.jsonl.gz").stat().st_size < 15_000


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


def test_a_sweeps_folder_is_read_arm_by_arm(tmp_path):
    plan = {"arms": {"b": {"algo.eps_high": 0.3}, "a": {}}, "seeds": [0, 3]}
    (tmp_path / "sweep.json").write_text(json.dumps(plan))
    for point in ("a/seed_0", "b/seed_3", "b/seed_0", "gone/seed_0"):
        with MetricsWriter(tmp_path / point, resume_step=None) as writer:
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


def test_intervals_computed_by_hand():
    """d = 2, 1, 2, 2: mean 1.75, sd 0.5; t(3) = 3.182446, so -+ 3.182446 * 0.5 / 2."""
    paired = statistics.paired_interval(A_S, B_S)
    assert paired.difference == 1.75
    assert paired.half_width == pytest.approx(3.182446 * 0.25, rel=1e-6)
    assert (paired.low, paired.high) == pytest.approx((0.954388, 2.545612), abs=1e-6)
    assert paired.excludes_zero
    # var(a) = 14/3, var(b) = 59/12: u = 7/6, v = 59/48; f = 5.9959, t = 2.4473.
    welch = statistics.welch_interval(A_S, B_S)
    assert welch.difference == 1.75
    assert welch.half_width == pytest.approx(2.4473 * math.sqrt(7 / 6 + 59 / 48), rel=1e-4)
    assert not welch.excludes_zero


def test_intervals_are_scipys():
    rng = np.random.default_rng(0)
    for n, m in ((2, 2), (5, 5), (5, 9), (30, 3)):
        a_S, b_S = rng.normal(1.0, 2.0, n), rng.normal(0.0, 0.5, m)
        theirs = stats.ttest_ind(a_S, b_S, equal_var=False).confidence_interval(0.95)
        ours = statistics.welch_interval(a_S, b_S)
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-9)
        b_S = a_S + rng.normal(0.1, 0.3, n)
        theirs = stats.ttest_rel(a_S, b_S).confidence_interval(0.95)
        ours = statistics.paired_interval(a_S, b_S)
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-9)


def test_seeds_needed_for_an_interval_half_as_wide():
    """Paired, sd 0.5: t(7) 0.5 / sqrt(8) = 0.418, t(8) 0.5 / 3 = 0.384; asked for 0.398."""
    half = statistics.paired_interval(A_S, B_S).half_width / 2
    assert half == pytest.approx(0.3978, abs=1e-4)
    assert statistics.seeds_for_paired(A_S, B_S, half) == 9
    # Unpaired, variances 4.667 and 4.917: f = 1.9986 (n - 1), so about 1.96^2 * 9.583 / 0.3978^2.
    n = statistics.seeds_for_unpaired(A_S, B_S, half)
    widths = [stats.t.ppf(0.975, 1.99864 * (k - 1)) * math.sqrt(9.58333 / k) for k in (n - 1, n)]
    assert widths[0] > half >= widths[1]
    assert n == pytest.approx(1.96**2 * 9.583 / half**2, rel=0.02)


def test_what_few_or_equal_seeds_cannot_tell_is_left_open():
    one = statistics.paired_interval([3.0], [1.0])
    assert one.difference == 2.0 and math.isnan(one.low) and not one.excludes_zero
    assert math.isnan(statistics.welch_interval([1.0, 2.0], [1.0]).high)
    assert math.isnan(statistics.spread([1.0]))
    assert math.isnan(statistics.paired_interval([], []).difference)
    same = statistics.paired_interval([1.0, 2.0], [1.0, 2.0])
    assert (same.difference, same.low, same.high) == (0.0, 0.0, 0.0)
    assert statistics.seeds_for_paired([1.0, 2.0], [1.0, 2.0], same.half_width) is None
    assert statistics.seeds_for_paired([1.0], [2.0], 0.5) is None
    assert statistics.seeds_for_unpaired([1.0, 1.0], [2.0, 2.0], 0.5) == 2
    assert statistics.seeds_for_unpaired([1.0, 9.0], [2.0, 3.0], 1e-9) == statistics.MOST_SEEDS


def test_the_last_rows_are_ten_or_a_third():
    assert statistics.last_mean(np.arange(100.0)) == 94.5
    assert statistics.last_mean(np.arange(12.0)) == np.mean([8, 9, 10, 11])
    assert statistics.last_mean([1.0, 2.0]) == 2.0
    assert statistics.last_mean([1.0, 2, 3, 4, 5, np.nan]) == 5.0
    assert math.isnan(statistics.last_mean([1.0, np.nan]))
