"""The report: runs from files, their figures, and the page, which needs no other file."""

import dataclasses
import gzip
import html.parser
import json
import math
import pathlib
import re
import struct
import subprocess
import sys

import numpy as np
import pytest

from dapo_jax.report import page, plots
from dapo_jax.report.__main__ import load, write_report
from dapo_jax.report.rows import write_rows
from dapo_jax.report.runs import (
    Run,
    by_arm,
    column,
    complete,
    labelled,
    load_run,
    merged,
    summary_lines,
    thinned,
    tokens_before,
)
from dapo_jax.run.files import Rows, write_rollouts

HOSTILE = '</script><script>alert(1)</script>"><img src=x onerror=alert(2)>\u2028<!--'


def _run(*, seed=0, arm="", steps=4, gain=0.1, **config):
    """A run whose accuracy rises by `gain` a step from a start that is the seed's."""
    accuracy = [0.1 + 0.01 * seed + gain * step for step in range(steps)]
    rows = [
        {
            "step": step,
            "accuracy/mean": value,
            "entropy": 0.5 - 0.01 * step,
            "grad_norm": None if step == 2 else 0.1,
            "updates_skipped": int(step == 2),
            "sampled_tokens_total": 20_000 * (step + 1),
            "seconds/rollout": 6.0,
            "seconds/total": 10.0,
        }
        for step, value in enumerate(accuracy)
    ]
    scores = {0: accuracy[0], steps: accuracy[-1] + gain}
    return Run(
        rows=rows,
        evaluations={("held_out", "mean@8"): scores},
        config={"seed": seed, "algo.eps_high": 0.28} | config,
        starts=[{"commit": "c0ffee", "time": "2026-01-01", "command": "train", "versions": {}}],
        arm=arm,
    )


def _written(workdir, *, seed=0, **settings):
    """The directory of a run."""
    run, rows = _run(seed=seed, **settings), Rows(workdir, resume_step=None)
    for row in run.rows:
        rows.write(row)
    (workdir / "eval").mkdir()
    for step, score in run.evaluations["held_out", "mean@8"].items():
        result = {"step": step, "sets": {"held_out": {"mean@8": score, "problems": 64}}}
        (workdir / "eval" / f"{step}.json").write_text(json.dumps(result))
    config = {"seed": seed, "algo": {"eps_high": run.config["algo.eps_high"], "eps_low": 0.2}}
    (workdir / "config.json").write_text(json.dumps(config | {"sets": {}}))
    return workdir


def _response(text="1+1=2", *, texts=(), correct=True, truncated=False, **other):
    texts = list(texts)
    tokens = {"token_texts": texts, "token_logp": [-0.1] * len(texts)} if texts else {}
    return {
        "prompt": "What is 1+1?",
        "response": "".join(texts) or text,
        "ground_truth": "2",
        "prediction": "2" if correct else None,
        "correct": correct,
        "status": "correct" if correct else "no_answer",
        "reward": 1.0 if correct else -1.0,
        "tokens": len(texts) or 5,
        "truncated": truncated,
        "trained": True,
        **tokens,
        **other,
    }


def _with_rollouts(run, workdir, rows, *, steps=(0,)):
    for step in steps:
        write_rollouts(workdir / "rollouts" / f"{step}.jsonl.gz", rows)
    return dataclasses.replace(run, workdir=workdir)


class _Page(html.parser.HTMLParser):
    """The words and the tags of a page; its elements must nest."""

    def __init__(self, text):
        super().__init__()
        self.text, self.tags, self.open = "", [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


# Runs from files.


def test_load_run_reads_evaluations_in_order_of_steps(tmp_path):
    run = load_run(_written(tmp_path / "run", steps=40, gain=0.01))
    assert len(run.rows) == run.finished_steps == 40
    assert run.evaluations == {("held_out", "mean@8"): pytest.approx({0: 0.1, 40: 0.5})}
    assert list(run.evaluations["held_out", "mean@8"]) == [0, 40]
    assert run.config == {"algo.eps_high": 0.28, "algo.eps_low": 0.2, "seed": 0, "sets": {}}


@pytest.mark.parametrize(
    ("files", "error", "match"),
    [
        ({}, FileNotFoundError, r"metrics\.jsonl does not exist: --workdir="),
        ({"metrics.jsonl": ""}, ValueError, "no rows yet"),
        ({"eval/0.json": '{"step": 0, '}, ValueError, r"0\.json is not JSON"),
        ({"eval/0.json": '{"sets": {}}'}, ValueError, r"0\.json is no evaluation"),
    ],
)
def test_a_folder_without_a_run_is_a_clear_error(tmp_path, files, error, match):
    default = {"metrics.jsonl": '{"step": 0}\n'} if files else {}
    for name, text in (default | files).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=match):
        load_run(tmp_path)


def test_column_and_tokens_before():
    rows = [{"step": 0, "sampled_tokens_total": 10}, {"step": 1}, {"step": 2, "x": None}]
    np.testing.assert_array_equal(column(rows, "x"), [math.nan] * 3)
    assert tokens_before(rows) == {0: 0.0, 1: 10.0}
    assert tokens_before([]) == {0: 0.0}


def test_summary_lines_compare_first_and_last():
    """Evaluations compare files, metrics the means of the first and last 4 of 40 rows."""
    run = _run(steps=40, gain=0.01)
    # The wall time was without the start.
    run.rows[0] |= {"seconds/load": 20.0, "seconds/compile": 30.0, "updates": 0}
    run.rows[1] |= {"updates": 2, "updates_zero_gradient": 2}
    lines = summary_lines(run)
    text = "\n".join(" ".join(line.split()) for line in lines)
    for line in (
        "held_out mean@8 10.0% -> 50.0% best 50.0% at step 40",
        *("train accuracy 11.5% -> 47.5% best 49.0% at step 39", "entropy 0.485 -> 0.125"),
        *("rollout steps 40", "wall time 0:07:30", "sampled tokens 800,000"),
        "steps without an update 2",
        *("sampled tokens per second 2,000", "updates skipped 1", "commit c0ffee"),
    ):
        assert line in text
    none = Run(rows=[{"step": 0}], evaluations={}, config={})
    assert summary_lines(none) == ["rollout steps         1"]


def test_thinned_keeps_the_ends():
    assert thinned(range(100), limit=100) == [*range(100)]
    kept = thinned(range(100), limit=12)
    assert (len(kept), kept[0], kept[-1]) == (12, 0, 99)
    assert max(np.diff(kept)) <= 10


def test_runs_of_one_name_are_told_apart(tmp_path):
    first, second, other = (tmp_path / name for name in ("a/run", "b/run", "other"))
    assert labelled([first, other, first]) == {"run": first, "other": other}
    assert list(labelled([first, other, second])) == [str(first), "other", str(second)]


def test_runs_of_two_sources_are_told_apart():
    one, other = {"a/seed_0": _run(arm="a")}, {"a/seed_1": _run(arm="a", seed=1)}
    found = merged({"first": one, "second": other, "third": {"b": _run()}})
    assert {label: run.arm for label, run in found.items()} == {
        "first: a/seed_0": "first: a",
        "second: a/seed_1": "second: a",
        "b": "",
    }


def test_a_run_called_like_an_arm_is_no_seed_of_it():
    """A folder `a` beside a sweep with an arm `a` was drawn as another seed of the arm."""
    found = merged({"sweep": {"a/seed_0": _run(arm="a")}, "a": {"a": _run(seed=5)}})
    assert [len(of_seed) for of_seed in by_arm(found).values()] == [1, 1]


def test_files_of_rows_in_folders_of_one_name_are_both_read(tmp_path):
    """runs/x/rows.jsonl.gz took the place of old/x/rows.jsonl.gz."""
    paths = [tmp_path / part / "x" / "rows.jsonl.gz" for part in ("old", "runs")]
    for seed, path in enumerate(paths):
        path.parent.mkdir(parents=True)
        write_rows(path, {"a": _run(seed=seed)})
    assert [run.seed for run in load([], rows=paths).values()] == [0, 1]


# Figures.


def _line(figure, title, *, label=0):
    """(x, y) of a thick line of the panel with this title."""
    (panel,) = [ax for ax in figure.axes if ax.get_title(loc="left") == title]
    return [line for line in panel.lines if line.get_linewidth() > 1][label].get_data()


def test_rolling_mean_is_centred_and_leaves_out_missing_values():
    values = np.array([1.0, 3.0, math.nan, 5.0, 7.0])
    np.testing.assert_allclose(
        plots.rolling_mean(values, window=3), [2.0, 2.0, math.nan, 6.0, 6.0], equal_nan=True
    )
    np.testing.assert_array_equal(plots.rolling_mean(values, window=1), values)
    np.testing.assert_allclose(plots.rolling_mean(np.array([2.0]), window=5), [2.0])


def test_a_line_is_the_mean_over_the_seeds_in_their_range():
    first = Run([{"step": s, "entropy": v} for s, v in enumerate((1, 2, 3))], {}, {})
    second = Run([{"step": 0, "entropy": 3.0}, {"step": 1}], {}, {})
    line = plots.line([first, second], plots.metric_curve("entropy", "entropy"))
    np.testing.assert_allclose(line.x, [0, 1, 2])
    np.testing.assert_allclose(line.y, [2, 2, 3])
    np.testing.assert_allclose((line.low, line.high), [(1, 2, 3), (3, 2, 3)])
    assert line.count.tolist() == [2, 1, 1]
    assert plots.line([second], plots.metric_curve("kl", "kl")) is None


def test_seeds_are_smoothed_before_their_mean():
    runs = [_run(seed=seed, steps=60, gain=0.0) for seed in (0, 4)]
    for run in runs:
        run.rows[30]["entropy"] = 5.0
    line = plots.line(runs, plots.metric_curve("entropy", "entropy"))
    assert plots.smoothing_window(60) == 5
    smooth = plots.rolling_mean(np.array([r["entropy"] for r in runs[0].rows]), window=5)
    np.testing.assert_allclose(line.y, smooth)
    assert line.raw is None
    assert plots.line(runs[:1], plots.metric_curve("entropy", "entropy")).raw[30] == 5.0


def test_figures_show_the_data():
    """Every value is where it belongs: over steps, over tokens, smoothed where it is noisy."""
    runs = {f"_run ${n}$": _run(steps=40, gain=n) for n in (0.01, 0.02)}
    figure, over_tokens = plots.curves(runs), plots.accuracy_vs_tokens(runs)
    for number, run in enumerate(runs.values()):
        accuracy = plots.rolling_mean(column(run.rows, "accuracy/mean"), window=3)
        x, y = _line(figure, "accuracy: training", label=number)
        np.testing.assert_allclose((x, y), (range(40), accuracy))
        x, y = _line(over_tokens, "training samples", label=number)
        np.testing.assert_allclose((x, y), (20_000 * np.arange(40), accuracy))
        x, y = _line(over_tokens, "held_out mean@8", label=number)
        np.testing.assert_allclose(x, [0, 800_000])
        np.testing.assert_allclose(y, list(run.evaluations["held_out", "mean@8"].values()))
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == [" _run \\$0.01\\$", " _run \\$0.02\\$"]


def test_figures_of_rows_with_missing_keys(tmp_path):
    sparse = Run(
        rows=[
            {"step": 0, "entropy": None},
            {"step": 1, "ratio_gap": 0.0, "reward/mean": 1.0, "entropy": math.inf},
        ],
        evaluations={("a", "mean@8"): {0: 0.5, 99: 0.75}},
        config={},
    )
    runs = {"one": sparse, "two": sparse}
    for figure in (plots.curves(runs), plots.accuracy_vs_tokens(runs)):
        plots.save(figure, tmp_path / "figure.png")
        data = (tmp_path / "figure.png").read_bytes()
        assert data.startswith(b"\x89PNG\r\n")
        assert struct.unpack(">II", data[16:24])[0] == 1600


def test_a_recipes_unused_parts_have_no_panel():
    """curves.png of every run without carry-over had a panel "staleness" that said "no data"."""
    lengths = {"response_tokens/correct": None, "response_tokens/wrong": 7.0}
    plain = Run(rows=[{"step": 0, "entropy": None} | lengths], evaluations={}, config={})
    carries = Run(rows=[{"step": 0, "staleness/tokens_fraction": 0.0}], evaluations={}, config={})
    by_title = {panel.title: panel for panel in plots.panels({"a": plain}, split=False)}
    wrong = "length of right and wrong, tokens: wrong"
    assert list(by_title) == ["accuracy", wrong]  # only the title tells which of the two
    assert [curve.name for curve in by_title[wrong].curves] == ["wrong"]
    for split in (False, True):
        both = plots.panels({"a": plain, "b": carries}, split=split)
        assert {"staleness", "accuracy", wrong} == {panel.title for panel in both}
    none_yet = plots.panels({"a": Run(rows=[], evaluations={}, config={})}, split=False)
    assert {"staleness", "clipped tokens"} <= {panel.title for panel in none_yet}


@pytest.mark.parametrize("arm", ["", "both"])
def test_an_evaluation_set_that_only_one_run_has(arm):
    """A report of two experiments with different sets ended with "a cannot be empty"."""
    with_set, without = (_run(arm=arm, seed=seed) for seed in (0, 1))
    runs = {"a": with_set, "b": dataclasses.replace(without, evaluations={})}
    plots.curves(runs)
    _, y = _line(plots.accuracy_vs_tokens(runs), "held_out mean@8")
    np.testing.assert_allclose(y, list(with_set.evaluations["held_out", "mean@8"].values()))


def test_the_mean_of_the_remaining_seeds_is_dashed():
    """In the PNGs a mean over one seed of two went on as the line of both."""
    runs = {f"a/{seed}": _run(arm="a", seed=seed, steps=20 - 10 * seed) for seed in (0, 1)}
    figure = plots.curves(runs)
    (panel,) = [ax for ax in figure.axes if ax.get_title(loc="left") == "policy entropy, nats"]
    dashed, thick = panel.lines
    assert dashed.get_linestyle() == "--"
    assert np.isfinite(dashed.get_ydata()).sum() == 20
    assert np.isfinite(thick.get_ydata()).tolist() == [True] * 10 + [False] * 10


# The page.


def test_hostile_text_stays_text(tmp_path):
    response = _response(texts=[HOSTILE, "\udc00 \ufffd", ""], prompt=HOSTILE, prediction=HOSTILE)
    plain = _response(HOSTILE, status=HOSTILE)
    run = _with_rollouts(_run(arm=HOSTILE, note=HOSTILE), tmp_path, [response, plain])
    run.evaluations[HOSTILE, "mean@8"] = {4: 0.5}
    run.starts[0]["commit"] = HOSTILE
    unfinished = [{"arm": HOSTILE, "seed": 0, "status": 1, "error": ["", HOSTILE]}]
    text = page.render({HOSTILE: run, "b/seed_0": _run(arm="b", note=1)}, unfinished=unfinished)
    found = _Page(text)
    assert not {"script", "base", "iframe"} & {tag for tag, _ in found.tags}
    assert all(dict(attrs)["src"].startswith("data:") for t, attrs in found.tags if t == "img")
    assert "<!--" not in text
    assert found.text.count(HOSTILE) >= 8
    page.write(tmp_path / "page.html", text)


def test_a_page_of_35_runs_is_small_whole_and_alone(tmp_path):
    response = _response(texts=["1", "+", "1", "=", "2", "\n", "Answer: 2", ""] * 30)
    runs = {}
    for arm in [f"eps_high={i}" for i in range(7)]:
        for seed in range(5):
            run, workdir = _run(arm=arm, seed=seed, steps=100), tmp_path / f"{arm}_{seed}"
            workdir.mkdir()
            rows, steps = [response] * 24, range(0, 100, 20)
            runs[f"{arm}/seed_{seed}"] = _with_rollouts(run, workdir, rows, steps=steps)
    text = page.render(runs)
    assert len(text.encode()) < 3_000_000
    found = _Page(text)
    assert all(f"eps_high={i} (5 seeds)" in found.text for i in range(7))
    assert all(f"eps_high={i}/seed_0, step 80" in found.text for i in range(7))
    # Nothing is fetched, and no link leads out of the page.
    ids = {attrs["id"] for _, attrs in found.tags if "id" in attrs}
    assert {a["href"] for tag, a in found.tags if tag == "a"} == {f"#{name}" for name in ids}
    assert {tag for tag, attrs in found.tags if "src" in attrs} == {"img"}
    assert not re.findall(r"https?://", text)


def test_the_page_has_the_numbers_of_its_runs(tmp_path):
    first, second = (
        _written(tmp_path / name, steps=40, gain=gain, **{"algo.eps_high": eps_high})
        for name, gain, eps_high in (("<b>dapo<_b>", 0.01, 0.28), ("b", 0.02, 0.2))
    )
    assert write_report([first]) == first / "report.html"
    alone = (first / "report.html").read_bytes(), (first / "curves.png").read_bytes()
    assert write_report([first, second, first]) == first / "compared" / "report.html"
    # A comparison replaced the first run's own page and pictures.
    assert alone == ((first / "report.html").read_bytes(), (first / "curves.png").read_bytes())
    assert {path.name for path in first.glob("*.png")} == {"curves.png", "accuracy_vs_tokens.png"}
    text = (first / "compared" / "report.html").read_text()
    found = _Page(text)
    assert "<b>dapo" not in text
    for words in ("50.0%", "90.0%", "800,000", "algo.eps_high", "0.28", "0.485"):
        assert words in found.text
    assert "algo.eps_low" not in found.text
    assert found.text.count("30 of 40 rows") == 2


def test_ends_compare_arms_on_the_seeds_they_share():
    runs = {
        f"{arm}/{seed}": _run(arm=arm, seed=seed, gain=gain + 0.001 * (seed % 2))
        for arm, gain, seeds in (("a", 0.1, range(4)), ("b", 0.2, range(1, 5)), ("c", 0.1, (0,)))
        for seed in seeds
    }
    first, second, third = page.ends(runs)["held_out mean@8, %"]
    assert first == ("51.7 ± 1.4", "", False)
    # The shared seeds 1, 2, 3 differ by 4 times 0.1 each.
    assert second[1:] == ("+40.0 [+40.0, +40.0]", True)
    assert third == ("50.0", "", False)


def test_a_run_that_ended_early_is_not_the_end_of_its_arm():
    """A seed that died at step 3 of 30 counted with the numbers of that step.

    They were in the arm's mean, spread and paired interval, and nothing on the page said so.
    """
    runs = {
        f"{arm}/seed_{seed}": _run(arm=arm, seed=seed, steps=steps, num_steps=30)
        for arm, of_seed in (("a", (30, 30, 30)), ("b", (30, 3, 30)))
        for seed, steps in enumerate(of_seed)
    }
    kept, short = complete(runs)
    assert len(kept) == 5 and short == ["b/seed_1 has 3 of 30 steps"]
    mean, difference, _ = page.ends(kept)["held_out mean@8, %"][1]
    assert difference == "+0.0 [+0.0, +0.0]"
    found = _Page(page.render(runs)).text
    assert "Left out, not finished: b/seed_1 has 3 of 30 steps." in found
    assert "b (2 seeds)" in found and mean in found
    # Folders of two recipes are arms of their own: each as long as its recipe asks for.
    alone = {"short": _run(steps=3, num_steps=3), "long": _run(steps=5, num_steps=5)}
    assert "Left out" not in page.render(alone)


def test_a_score_from_before_the_end_is_not_the_end():
    """A run that died in its last evaluation stood in the table with an earlier one."""
    run = _run()
    del run.evaluations["held_out", "mean@8"][4]
    assert "held_out mean@8, %" not in page.ends({"a": run})


def test_differences_are_listed_by_arm():
    runs = {}
    for seed in (0, 1):
        both, start = {"seed": seed, "same": 1}, {"commit": "c0ffee", "time": seed}
        other = [start | {"versions": {"jax": 1}}]
        runs[f"a/{seed}"] = Run([], {}, both | {"x": 0.2, "only": [1]}, [start], arm="a")
        runs[f"b/{seed}"] = Run([], {}, both | {"x": 0.28}, other, arm="b")
    assert page.differences(runs) == {
        "x": ["0.2", "0.28"],
        "only": ["[1]", "-"],
        "versions.jax": ["-", "1"],
    }


def test_samples_take_turns_and_stay_within_their_limit(tmp_path):
    rows = [
        *[_response() for _ in range(50)],
        _response("no", correct=False),
        _response(texts=["3", "."], correct=False, truncated=True),
        _response(texts=["x"] * 5000),
    ]
    of_step = page.samples({"run": _with_rollouts(_run(), tmp_path, rows, steps=range(30))})["run"]
    assert (len(of_step), min(of_step), max(of_step)) == (page.SAMPLE_STEPS, 0, 29)
    assert [page.verdict(row) for row in of_step[0][:4]] == ["right", "wrong", "truncated", "right"]
    assert len(of_step[0]) == page.SAMPLES
    # A response with its tokens comes first; its middle is left out, and counted.
    tokens = page.tokens_of(of_step[0][0])
    assert len(tokens) == page.HEAD_TOKENS + page.TAIL_TOKENS + 1
    assert tokens[page.HEAD_TOKENS][0] == " [... 3,800 tokens ...] "
    assert tokens[0] == ("x", pytest.approx(0.905, abs=1e-3), 0)
    assert page.tokens_of(of_step[0][1]) == [("no", None, 0)]
    long = [_response(texts=["x"] * 1000)] * 60
    few = page.samples({"run": _with_rollouts(_run(), tmp_path, long, steps=range(30))})["run"]
    assert sum(row["tokens"] for rows in few.values() for row in rows) <= page.SAMPLE_TOKENS


@pytest.mark.parametrize(("p", "shade"), [(0.95, 0), (0.6, 1), (0.3, 2), (0.1, 3), (0.01, 4)])
def test_an_unlikely_token_is_darker(p, shade):
    row = _response(texts=["x"]) | {"token_logp": [math.log(p)]}
    assert page.tokens_of(row) == [("x", pytest.approx(p), shade)]


def test_a_broken_rollouts_file_costs_its_end_only(tmp_path):
    run = _with_rollouts(_run(), tmp_path, [_response(str(i) * 99) for i in range(2000)])
    path = tmp_path / "rollouts" / "0.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-2000])
    (tmp_path / "rollouts" / "1.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": '))
    (tmp_path / "rollouts" / "notes.jsonl.gz").touch()
    assert list(page.samples({"run": run})["run"]) == [0]


def test_events_name_faults_resumes_and_repeated_steps(tmp_path):
    run = _run(steps=8)
    for step, row in enumerate(run.rows):
        row |= {"alarms": int(step in (2, 3, 6)), "updates_skipped": 2 * (step == 5)}
        row["alarm/entropy_collapse"] = int(step in (2, 3, 6))
    run.starts.append(run.starts[0] | {"commit": "decade"})
    (tmp_path / "metrics.cut-1.jsonl").write_text('{"step": 4}\n{"step": 5}\n')
    alarm, fault, resume, repeated = page.events(dataclasses.replace(run, workdir=tmp_path))
    assert alarm == ("alarm", "2-3, 6", "entropy_collapse (3 steps)")
    assert fault[:2] == ("fault", "5")
    assert resume[0] == "resume" and "another commit" in resume[2]
    assert repeated[:2] == ("repeated", "4-5")
    assert "entropy_collapse" in page.render({"run": run})
    quiet = _run(steps=2)
    assert [*page.events(quiet)] == []
    assert "None: no alarm" in page.render({"run": quiet})


def test_points_of_a_sweep_that_failed_are_listed(tmp_path):
    ended = ((0, 1), (0, 0), (1, 0), (1, -9))
    points = [{"arm": "a", "seed": seed, "status": status} for seed, status in ended]
    lines = "".join(json.dumps(point) + "\n" for point in points)
    (tmp_path / "points.jsonl").write_text(lines + '{"arm": ')
    assert page.unfinished(tmp_path) == [points[3]]


def test_a_sweep_and_its_rows_make_the_same_page(tmp_path):
    sweep = tmp_path / "sweep"
    for arm, gain in (("a", 0.1), ("b", 0.05)):
        for seed in (0, 1):
            (sweep / arm).mkdir(parents=True, exist_ok=True)
            _written(sweep / arm / f"seed_{seed}", seed=seed, gain=gain)
    (sweep / "sweep.json").write_text(json.dumps({"arms": {"a": {}, "b": {}}, "seeds": [0, 1, 2]}))
    runs = load([sweep])
    found = [(run.arm, run.seed) for run in runs.values()]
    assert found == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert runs["a/seed_0"].workdir == sweep / "a" / "seed_0"
    write_rows(tmp_path / "rows.jsonl.gz", runs)
    path = write_report([], rows=[tmp_path / "rows.jsonl.gz"])
    assert path == tmp_path / "report.html"
    assert page.render(runs) == path.read_text()


def test_the_command_takes_folders_repeated_and_in_a_row(tmp_path):
    root = pathlib.Path(__file__).resolve().parent.parent
    runs = [_written(tmp_path / name, steps=3) for name in ("a", "b", "c")]

    def start(*flags):
        command = [sys.executable, "-m", "dapo_jax.report", *map(str, flags)]
        return subprocess.Popen(command, cwd=root, stdout=-1, stderr=-1, text=True)

    made = start("--workdir", runs[0], runs[1], f"--workdir={runs[2]}")
    failed = start(f"--workdir={tmp_path}")
    out, _ = made.communicate(timeout=120)
    assert (made.returncode, out.strip()) == (0, str(runs[0] / "compared" / "report.html"))
    found = (runs[0] / "compared" / "report.html").read_text()
    assert all(f">{run.name}<" in found for run in runs)
    _, error = failed.communicate(timeout=120)
    assert failed.returncode == 1
    assert "metrics.jsonl does not exist" in error
    assert "Traceback" not in error
