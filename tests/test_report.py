"""The report: runs from files, their figures, and the page, which needs no other file."""

import base64
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

from dapo_jax.logs.files import Rows, write_rollouts
from dapo_jax.report import compare, page, plots
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
    shortened,
    summary_lines,
    tokens_before,
)

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


def _response(text="1+1=2", *, correct=True, truncated=False, **other):
    return {
        "prompt": "What is 1+1?",
        "response": text,
        "ground_truth": "2",
        "prediction": "2" if correct else None,
        "correct": correct,
        "reward": 1.0 if correct else -1.0,
        "tokens": 5,
        "truncated": truncated,
        **other,
    }


def _with_rollouts(run, workdir, rows, *, steps=(0,)):
    (workdir / "rollouts").mkdir(parents=True)
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


def test_a_long_text_loses_its_middle():
    assert shortened("abcdef", limit=6) == "abcdef"
    assert shortened("abcdefg", limit=4) == "ab ... fg"


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
    """curves.png of runs without partial rollouts had a panel "staleness" that said "no data"."""
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
    response = _response(HOSTILE, prompt=HOSTILE, prediction=HOSTILE, ground_truth="\udc00 \ufffd")
    run = _with_rollouts(_run(arm=HOSTILE, note=HOSTILE), tmp_path, [response])
    run.evaluations[HOSTILE, "mean@8"] = {4: 0.5}
    run.starts[0]["commit"] = HOSTILE
    text = page.render({HOSTILE: run, "b/seed_0": _run(arm="b", note=1)}, pictures=[b"PNG"])
    found = _Page(text)
    assert not {"script", "base", "iframe"} & {tag for tag, _ in found.tags}
    assert [attrs["src"] for tag, attrs in found.tags if tag == "img"] == [
        "data:image/png;base64,UE5H"
    ]
    assert "<!--" not in text
    assert found.text.count(HOSTILE) >= 8
    page.write(tmp_path / "page.html", text)


def test_a_page_of_35_runs_is_small_whole_and_alone(tmp_path):
    runs = {}
    for arm in [f"eps_high={i}" for i in range(7)]:
        for seed in range(5):
            run, workdir = _run(arm=arm, seed=seed, steps=100), tmp_path / f"{arm}_{seed}"
            rows, steps = [_response("1+1=2\n" * 500)] * 24, range(0, 100, 20)
            runs[f"{arm}/seed_{seed}"] = _with_rollouts(run, workdir, rows, steps=steps)
    text = write_report(tmp_path, runs).read_text()
    assert len(text.encode()) < 3_000_000
    found = _Page(text)
    assert found.text.count("eps_high=6/seed_0") == 2 * page.SAMPLES + 1  # and its summary
    # Nothing is fetched, and no link leads out of the page.
    assert not {tag for tag, _ in found.tags} & {"a", "link", "script"}
    assert {tag for tag, attrs in found.tags if "src" in attrs} == {"img"}
    assert not re.findall(r"https?://", text)


def test_the_page_has_the_numbers_of_its_runs(tmp_path):
    first, second = (
        _written(tmp_path / name, steps=40, gain=gain, **{"algo.eps_high": eps_high})
        for name, gain, eps_high in (("<b>dapo<_b>", 0.01, 0.28), ("b", 0.02, 0.2))
    )
    text = write_report(tmp_path, load([first, second, first])).read_text()
    found = _Page(text)
    assert "<b>dapo" not in text
    for words in ("50.0%", "90.0%", "800,000", "algo.eps_high", "0.28", "0.485"):
        assert words in found.text
    assert "algo.eps_low" not in found.text
    shown = [tag["src"].split(",")[1] for name, tag in found.tags if name == "img"]
    files = [tmp_path / name for name in ("curves.png", "accuracy_vs_tokens.png")]
    assert shown == [base64.b64encode(file.read_bytes()).decode() for file in files]


def _difference(runs, quantity, arm):
    """The cells of a difference from the first arm: pairs, difference, interval."""
    _, (_, _, rows) = compare.tables(runs)
    return next(tuple(row[2:]) for row in rows if row[:2] == [quantity, arm])


def test_arms_are_compared_on_the_seeds_they_share():
    runs = {
        f"{arm}/{seed}": _run(arm=arm, seed=seed, gain=gain + 0.001 * (seed % 2))
        for arm, gain, seeds in (("a", 0.1, range(4)), ("b", 0.2, range(1, 5)), ("c", 0.1, (0,)))
        for seed in seeds
    }
    (_, heads, means), _ = compare.tables(runs)
    place = heads.index("held_out mean@8, %")
    assert [row[place] for row in means] == ["51.7 ± 1.4", "92.7 ± 1.2", "50.0"]
    # The shared seeds 1, 2, 3 differ by 4 times 0.1 each.
    assert _difference(runs, heads[place], "b") == ("3", "+40.0", "[+40.0, +40.0] *")
    assert _difference(runs, heads[place], "c") == ("1", "+0.0", "-")


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
    # Two clips that no ratio reached had an interval of [+0.0, +0.0], as if that were measured.
    assert _difference(kept, "held_out mean@8, %", "b") == ("2", "+0.0", "equal on each seed")
    found = _Page(page.render(runs)).text
    assert "not finished: b/seed_1 has 3 of 30 steps." in found
    assert "equal on each seed" in found
    # Folders of two recipes are arms of their own: each as long as its config asks for.
    alone = {"short": _run(steps=3, num_steps=3), "long": _run(steps=5, num_steps=5)}
    assert "not finished" not in page.render(alone)
    none = page.render({"a": _run(steps=3, num_steps=30), "b": _run(steps=3, num_steps=30)})
    assert "a has 3 of 30 steps; b has 3 of 30 steps" in none


def test_a_score_from_before_the_end_is_not_the_end():
    """A run that died in its last evaluation stood in the table with an earlier one."""
    run = _run()
    del run.evaluations["held_out", "mean@8"][4]
    assert "held_out mean@8, %" not in {
        quantity.name for quantity in compare.quantities({"a": run})
    }


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


def test_samples_are_of_the_first_and_the_last_step(tmp_path):
    rows = [
        _response("no" * 999, correct=False, sample=0),
        _response(sample=1),
        *(_response("cut", correct=False, truncated=True, sample=0) for _ in range(50)),
    ]
    one = _with_rollouts(_run(arm="a"), tmp_path, rows, steps=range(3, 30))
    runs = {"a/0": _run(arm="a"), "a/1": one, "a/2": one}
    found = page.samples(runs)
    assert [row[:2] for row in found[:: page.SAMPLES]] == [["a/1", "3"], ["a/1", "29"]]
    assert len(found) == 2 * page.SAMPLES
    assert found[0][2:] == [
        *("What is 1+1?", f"{'no' * 375} ... {'no' * 375}", "wrong: None, answer 2", "5", "-1")
    ]
    assert found[1][4] == "truncated: None, answer 2"


def test_a_broken_rollouts_file_costs_its_end_only(tmp_path):
    run = _with_rollouts(_run(), tmp_path, [_response(str(i) * 99) for i in range(2000)])
    path = tmp_path / "rollouts" / "0.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-2000])
    (tmp_path / "rollouts" / "1.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": '))
    (tmp_path / "rollouts" / "notes.jsonl.gz").touch()
    assert [row[1] for row in page.samples({"run": run})] == ["0"] * page.SAMPLES


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
    assert page.render(runs) == page.render(load([], rows=[tmp_path / "rows.jsonl.gz"]))


def test_the_command_prints_what_it_draws_and_leaves_each_runs_page_alone(tmp_path):
    """A comparison replaced the first run's own page and pictures."""
    root = pathlib.Path(__file__).resolve().parent.parent
    runs = [_written(tmp_path / name, steps=3) for name in ("a", "b", "c")]

    def start(*flags):
        command = [sys.executable, "-m", "dapo_jax.report", *map(str, flags)]
        return subprocess.Popen(command, cwd=root, stdout=-1, stderr=-1, text=True)

    both = ("--workdir", runs[0], runs[1], f"--workdir={runs[2]}", "--baseline=b")
    compared, alone = start(*both), start(f"--workdir={runs[0]}")
    failed = start(f"--workdir={tmp_path}")
    out, _ = compared.communicate(timeout=120)
    path = runs[0] / "compared" / "report.html"
    assert (compared.returncode, out.splitlines()[-1]) == (0, f"page: {path}")
    assert "## Differences from b on the same seed" in out
    assert all(f">{run.name}<" in path.read_text() for run in runs)
    out, _ = alone.communicate(timeout=120)
    *summary, last = out.splitlines()
    assert summary == summary_lines(load_run(runs[0]))
    assert last == f"page: {runs[0] / 'report.html'}"
    names = {"report.html", "curves.png", "accuracy_vs_tokens.png"}
    assert {file.name for file in path.parent.iterdir()} == names
    assert names < {file.name for file in runs[0].iterdir()}
    _, error = failed.communicate(timeout=120)
    assert failed.returncode == 1
    assert "metrics.jsonl does not exist" in error
    assert "Traceback" not in error
