"""The report: numbers, figures and the page, from rows with everything and with next to nothing."""

import dataclasses
import html.parser
import json
import math
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest

from dapo_jax.report import curves, plots
from dapo_jax.report.__main__ import write_report
from dapo_jax.report.runs import (
    Run,
    changes,
    column,
    config_differences,
    labelled,
    load_run,
    summary_lines,
    thinned,
    tokens_before,
    totals,
)
from dapo_jax.run.files import Rows


def _full_row(step, *, accuracy):
    return {
        "step": step,
        "prompts_seen": 64 * (step + 1),
        "sampled_tokens_total": 20_000 * (step + 1),
        "reward/mean": 2 * accuracy - 1,
        "accuracy/mean": accuracy,
        "response_tokens/mean": 40.0 + step,
        "response_tokens/max": 128,
        "response_tokens/truncated_fraction": 0.1 / (step + 1),
        "entropy": 0.7 - 0.01 * step,
        "mean_prob": 0.75,
        "clip_fraction/high": 0.004,
        "clip_fraction/low": 0.002,
        "clip_fraction/dual": 0.0,
        "ratio_gap": 1e-6,
        "grad_norm": None if step == 2 else 0.3,
        "lr": 1e-4,
        "updates_skipped": int(step == 2),
        "groups/sampled": 33 + 9 + step,
        "groups/informative": 32,
        "groups/all_correct": step,
        "groups/all_wrong": 9,
        "groups/discarded": 1,
        "groups/cancelled": 5,
        "generation_batches": 2,
        "engine/occupancy": 0.9,
        "engine/unused_tokens_fraction": 0.25,
        "seconds/rollout": 6.0,
        "seconds_in_rollout/verify": 0.25,
        "seconds/update": 2.0,
        "seconds/total": 10.0,
        "tokens_per_second/rollout": 3333.0,
        "tokens_per_second/update": 10000.0,
        "tokens_per_second/step": 2000.0,
    }


def _make_run(workdir, *, steps=40, gain=0.4, eps_high=0.28):
    writer = Rows(workdir, resume_step=None)
    for step in range(steps):
        writer.write(_full_row(step, accuracy=0.3 + gain * step / steps))
    (workdir / "eval").mkdir()
    for step in range(0, steps + 1, 10):
        sets = {
            "held_out": {
                "mean@8": 0.25 + gain * step / steps,
                "pass@8": 0.8,
                "maj@8": 0.3125,
                "problems": 64,
            }
        }
        (workdir / "eval" / f"{step}.json").write_text(json.dumps({"step": step, "sets": sets}))
    config = {"algo": {"eps_high": eps_high, "eps_low": 0.2}, "seed": 0, "sets": {}}
    (workdir / "config.json").write_text(json.dumps(config))
    return workdir


def _png_size(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    return struct.unpack(">II", data[16:24])


class _Text(html.parser.HTMLParser):
    """The words of a page; its elements must nest."""

    def __init__(self, text):
        super().__init__()
        self.words, self.open = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data.split()


def test_load_run_reads_evaluations_in_order_of_steps(tmp_path):
    run = load_run(_make_run(tmp_path / "run"))
    assert len(run.rows) == 40
    curve = run.evaluations["held_out", "mean@8"]
    assert list(curve) == [0, 10, 20, 30, 40]
    assert curve[40] == pytest.approx(0.65)
    assert ("held_out", "problems") not in run.evaluations
    assert run.config == {"algo.eps_high": 0.28, "algo.eps_low": 0.2, "seed": 0, "sets": {}}


def test_a_folder_without_a_run_is_a_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl does not exist: --workdir="):
        load_run(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="no rows yet"):
        load_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "0.json").write_text('{"step": 0, ')
    with pytest.raises(ValueError, match=r"0\.json is not JSON"):
        load_run(tmp_path)
    (tmp_path / "eval" / "0.json").write_text('{"sets": {}}')
    with pytest.raises(ValueError, match=r"0\.json is no evaluation"):
        load_run(tmp_path)


def test_rolling_mean_is_centred_and_leaves_out_what_is_missing():
    values = np.array([1.0, 3.0, math.nan, 5.0, 7.0])
    np.testing.assert_allclose(
        curves.rolling_mean(values, window=3), [2.0, 2.0, math.nan, 6.0, 6.0], equal_nan=True
    )
    np.testing.assert_array_equal(curves.rolling_mean(values, window=1), values)
    np.testing.assert_allclose(curves.rolling_mean(np.array([2.0]), window=5), [2.0])


def test_column_and_tokens_before():
    rows = [{"step": 0, "sampled_tokens_total": 10}, {"step": 1}, {"step": 2, "x": None}]
    np.testing.assert_array_equal(column(rows, "x"), [math.nan] * 3)
    assert tokens_before(rows) == {0: 0.0, 1: 10.0}
    assert tokens_before([]) == {0: 0.0}


def test_changes_compare_the_ends(tmp_path):
    found = changes(load_run(_make_run(tmp_path / "run")))
    evaluation = found["held_out mean@8"]
    assert (evaluation.first, evaluation.last) == (0.25, pytest.approx(0.65))
    assert (evaluation.best, evaluation.best_step) == (pytest.approx(0.65), 40)
    assert found["response tokens"].first == 41.5  # mean of the first 4 of 40 rows: 40 to 43
    assert found["response tokens"].last == 77.5
    assert found["response tokens"].best is None
    assert found["reward"].best_step == 39


def test_summary_lines_state_what_happened(tmp_path):
    lines = summary_lines(load_run(_make_run(tmp_path / "run")))
    text = "\n".join(" ".join(line.split()) for line in lines)
    for line in (
        "held_out mean@8 25.0% -> 65.0% best 65.0% at step 40",
        "response tokens 41.5 -> 77.5",
        "rollout steps 40",
        "wall time 0:06:40",
        "sampled tokens 800,000",
        "sampled tokens per second 2,000",
        "updates skipped 1",
    ):
        assert line in text
    assert summary_lines(Run(rows=[{"step": 0}], evaluations={}, config={})) == [
        "rollout steps         1"
    ]


def test_totals_leave_out_what_is_unknown():
    assert totals(Run(rows=[{"step": 0}], evaluations={}, config={})) == {"rollout steps": "1"}


def _line(figure, title, *, label=0):
    """(x, y) of a thick line of the panel with this title."""
    (panel,) = [ax for ax in figure.axes if ax.get_title(loc="left") == title]
    return [line for line in panel.lines if line.get_linewidth() > 1][label].get_data()


def test_figures_show_the_data(tmp_path):
    """Every value is where it belongs: over steps, over tokens, smoothed where it is noisy."""
    runs = {f"_run ${n}$": load_run(_make_run(tmp_path / str(n), gain=n)) for n in (0.4, 0.1)}
    figure, over_tokens = plots.curves(runs), plots.accuracy_vs_tokens(runs)
    for number, run in enumerate(runs.values()):
        accuracy = curves.rolling_mean(column(run.rows, "accuracy/mean"), window=3)
        x, y = _line(figure, "accuracy: training", label=number)
        np.testing.assert_allclose((x, y), (range(40), accuracy))
        x, y = _line(over_tokens, "training samples", label=number)
        np.testing.assert_allclose((x, y), (20_000 * np.arange(40), accuracy))
        x, y = _line(over_tokens, "held_out mean@8", label=number)
        np.testing.assert_allclose(x, [0, 200_000, 400_000, 600_000, 800_000])
        np.testing.assert_allclose(y, list(run.evaluations["held_out", "mean@8"].values()))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        " _run \\$0.4\\$",
        " _run \\$0.1\\$",
    ]


def test_figures_of_rows_with_missing_keys(tmp_path):
    sparse = Run(
        rows=[{"step": 0, "entropy": None}, {"step": 1, "ratio_gap": 0.0, "reward/mean": 1.0}],
        evaluations={("a", "mean@8"): {0: 0.5, 99: 0.75}},
        config={},
    )
    for runs in ({"one": sparse}, {"one": sparse, "two": sparse}):
        for figure in (plots.curves(runs), plots.accuracy_vs_tokens(runs)):
            plots.save(figure, tmp_path / "figure.png")
            assert _png_size(tmp_path / "figure.png")[0] == 1600


def test_what_a_recipe_does_not_use_has_no_panel():
    """curves.png of every run without carry-over had a panel "staleness" that said "no data"."""
    lengths = {"response_tokens/correct": None, "response_tokens/wrong": 7.0}
    plain = Run(rows=[{"step": 0, "entropy": None} | lengths], evaluations={}, config={})
    carries = Run(rows=[{"step": 0, "staleness/tokens_fraction": 0.0}], evaluations={}, config={})
    by_title = {panel.title: panel for panel in curves.panels({"a": plain}, split=False)}
    wrong = "length of right and wrong, tokens: wrong"
    assert list(by_title) == ["accuracy", wrong]  # nothing but the title says which of the two
    assert [curve.name for curve in by_title[wrong].curves] == ["wrong"]
    for split in (False, True):
        both = curves.panels({"a": plain, "b": carries}, split=split)
        assert {"staleness", "accuracy", wrong} == {panel.title for panel in both}
    none_yet = curves.panels({"a": Run(rows=[], evaluations={}, config={})}, split=False)
    assert {"staleness", "clipped tokens"} <= {panel.title for panel in none_yet}


def test_an_evaluation_set_that_only_one_run_has(tmp_path):
    """A report of two experiments with different sets ended with "a cannot be empty"."""
    with_set, without = (load_run(_make_run(tmp_path / name)) for name in ("a", "b"))
    without = dataclasses.replace(without, evaluations={})
    seeds = {"arm": "both"}
    for arms in ({}, seeds):  # an arm each, and seeds of one
        runs = {
            "a": dataclasses.replace(with_set, **arms),
            "b": dataclasses.replace(without, **arms),
        }
        plots.curves(runs)
        _, y = _line(plots.accuracy_vs_tokens(runs), "held_out mean@8")
        np.testing.assert_allclose(y, list(with_set.evaluations["held_out", "mean@8"].values()))


def test_the_mean_of_the_seeds_that_are_left_is_dashed(tmp_path):
    """In the PNGs a mean over one seed of two went on as the line of both."""
    whole, ended = (load_run(_make_run(tmp_path / str(n), steps=n)) for n in (20, 10))
    runs = {f"a/{n}": dataclasses.replace(run, arm="a") for n, run in enumerate((whole, ended))}
    figure = plots.curves(runs)
    (panel,) = [ax for ax in figure.axes if ax.get_title(loc="left") == "policy entropy, nats"]
    dashed, thick = panel.lines
    assert dashed.get_linestyle() == "--"
    assert np.isfinite(dashed.get_ydata()).sum() == 20
    assert np.isfinite(thick.get_ydata()).tolist() == [True] * 10 + [False] * 10


def test_config_differences():
    runs = {
        "a": Run(rows=[], evaluations={}, config={"x": 0.2, "same": 1, "only": [1]}),
        "b": Run(rows=[], evaluations={}, config={"x": 0.28, "same": 1}),
    }
    assert config_differences(runs) == {"x": ["0.2", "0.28"], "only": ["[1]", "-"]}


def test_thinned_keeps_the_ends():
    rows = [{"step": step} for step in range(100)]
    steps = [row["step"] for row in thinned(rows, limit=12)]
    assert (len(steps), steps[0], steps[-1]) == (12, 0, 99)
    assert max(np.diff(steps)) <= 10
    assert thinned(rows, limit=100) == rows


def test_the_page_stands_alone_and_holds_the_numbers(tmp_path):
    first = _make_run(tmp_path / "<b>dapo</b>".replace("/", "_"))
    second = _make_run(tmp_path / "naive", gain=0.1, eps_high=0.2)
    page = write_report([first, second, first])
    assert page == first / "report.html"
    for name in ("curves.png", "accuracy_vs_tokens.png"):
        assert _png_size(first / name)[0] == 1600
    assert (first / "curves.png").stat().st_size > 50_000
    text = page.read_text()
    content = _Text(text)
    assert "<b>" not in text
    for word in ("65.0%", "35.0%", "800,000", "algo.eps_high", "0.28", "2000", "77.5"):
        assert word in content.words
    assert "algo.eps_low" not in content.words
    assert text.count("30 of 40 rows") == 2


def test_runs_of_one_name_are_told_apart(tmp_path):
    first, second, other = (tmp_path / name for name in ("a/run", "b/run", "other"))
    assert labelled([first, other, first]) == {"run": first, "other": other}
    assert list(labelled([first, other, second])) == [str(first), "other", str(second)]


def test_the_command_takes_folders_repeated_and_separated_by_commas(tmp_path):
    root = pathlib.Path(__file__).resolve().parent.parent
    runs = [_make_run(tmp_path / name, steps=3) for name in ("a", "b", "c")]

    def start(*flags):
        command = [sys.executable, "-m", "dapo_jax.report", *flags]
        return subprocess.Popen(command, cwd=root, stdout=-1, stderr=-1, text=True)

    made = start(f"--workdir={runs[0]},{runs[1]}", f"--workdir={runs[2]}")
    failed = start(f"--workdir={tmp_path}")
    out, _ = made.communicate(timeout=120)
    assert (made.returncode, out.strip()) == (0, str(runs[0] / "report.html"))
    page = (runs[0] / "report.html").read_text()
    assert all(f">{run.name}<" in page for run in runs)
    _, error = failed.communicate(timeout=120)
    assert failed.returncode == 1
    assert "metrics.jsonl does not exist" in error
    assert "Traceback" not in error
