"""Reports: what is read of runs, drawn, put on a page, and compared."""

import dataclasses
import gzip
import html
import io
import math
import re

import numpy as np
import pandas as pd
import pytest

from dapo_jax.logs.files import json_line, write_json, write_zipped_rows
from dapo_jax.report import compare, page, plots
from dapo_jax.report.__main__ import load, main, write_report
from dapo_jax.report.runs import Run, arms_of, load_run, tokens_before, write_rows
from dapo_jax.report.summary import summary_lines

HOSTILE = '</script><script>alert(1)</script>"><img src=x onerror=alert(2)>\u2028<!--'
SCORE = "eval/held_out/mean@8"
NAME = "held_out mean@8, %"  # of its quantity
PICTURES = ("curves", "accuracy_vs_tokens")


def _rows(seed, steps, gain):
    """Accuracy rises by `gain` a step from a start that is the seed's."""
    return [
        {"step": step, "accuracy/mean": 0.1 + 0.01 * seed + gain * step}
        | {"entropy": 0.5 - 0.01 * step, "sampled_tokens_total": 20_000 * (step + 1)}
        | {"grad_norm": None if step == 2 else 0.1, "updates_skipped": int(step == 2)}
        | {"seconds/rollout": 6.0, "seconds/total": 10.0}
        for step in range(steps)
    ]


def _run(*, seed=0, arm="", steps=4, gain=0.1, **config):
    rows = _rows(seed, steps, gain)
    start = {"commit": "c0ffee", "time": "2026-01-01", "command": "train", "versions": {}}
    scores = {SCORE: {0: rows[0]["accuracy/mean"], steps: rows[-1]["accuracy/mean"] + gain}}
    return Run(rows, scores, {"seed": seed, "algo.eps_high": 0.28} | config, [start], arm)


def _written(workdir, *, seed=0, steps=4, gain=0.1):
    (workdir / "eval").mkdir(parents=True)
    rows = [row | {"digest/state": "c0ffee"} for row in _rows(seed, steps, gain)]
    (workdir / "metrics.jsonl").write_bytes(b"".join(map(json_line, rows)))
    for step, score in _run(seed=seed, steps=steps, gain=gain)[SCORE].items():
        result = {"step": step, "sets": {"held_out": {"mean@8": score, "problems": 64}}}
        write_json(workdir / "eval" / f"{step}.json", result)
    write_json(workdir / "config.json", {"seed": seed, "algo": {"eps_high": 0.28, "eps_low": 0.2}})
    return workdir


def _response(text="1+1=2", *, correct=True, truncated=False, **other):
    found = {"prompt": "What is 1+1?", "response": text, "ground_truth": "2", "correct": correct}
    found |= {"prediction": "2" if correct else None, "reward": 1.0 if correct else -1.0}
    return found | {"tokens": 5, "truncated": truncated} | other


def _with_rollouts(run, workdir, rows, *, steps=(0,)):
    for step in steps:
        write_zipped_rows(workdir / "rollouts" / f"{step}.jsonl.gz", rows)
    return dataclasses.replace(run, workdir=workdir)


def test_load_run_reads_evaluations_in_order_of_steps(tmp_path):
    folder = _written(tmp_path / "run", steps=40, gain=0.01)
    beyond = (folder / "eval" / "40.json").read_text().replace("40", "48")
    (folder / "eval" / "48.json").write_text(beyond)  # of before the run was cut back
    run = load_run(folder)
    assert len(run.rows) == run.finished_steps == 40
    assert [*run[SCORE].items()] == [(0, pytest.approx(0.1)), (40, pytest.approx(0.5))]
    assert run.config == {"seed": 0, "algo.eps_high": 0.28, "algo.eps_low": 0.2}
    (folder / "eval" / "0.json").write_text('{"step": 0, ')
    with pytest.raises(ValueError, match=r"0\.json is not JSON"):
        load_run(folder)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="no rows yet"):
        load_run(tmp_path)


def test_summary_lines_compare_first_and_last():
    """Evaluations compare files, metrics the means of the first and last 4 of 40 rows."""
    rows = [row | {"my_metric": row["step"]} for row in _rows(0, 40, 0.01)]
    rows[0] |= {"seconds/load": 20.0, "seconds/compile": 30.0}
    run = dataclasses.replace(_run(steps=40, gain=0.01), rows=rows)
    text = "\n".join(" ".join(line.split()) for line in summary_lines(run))
    for line in (
        "held_out mean@8 10.0% -> 50.0% best 50.0% at step 40",
        "train accuracy 11.5% -> 47.5% best 49.0% at step 39",
        "my metric 1.5 -> 37.5",
        *("rollout steps 40", "wall time 0:07:30", "sampled tokens 800,000"),
        *("sampled tokens per second 2,000", "updates skipped 1", "commit c0ffee"),
    ):
        assert line in text
    assert summary_lines(Run([{"step": 0}], {}, {})) == ["rollout steps         1"]


def _sweep(folder, arms, seeds, planned):
    for arm in arms:
        for seed in seeds:
            _written(folder / arm / f"seed_{seed}", seed=seed)
    write_json(folder / "sweep.json", {"arms": {arm: {} for arm in arms}, "seeds": planned})
    return folder


def test_runs_of_several_paths_are_told_apart(tmp_path):
    sweep = _sweep(tmp_path / "sweep", "a", [0], [0])
    one, other = (_written(tmp_path / name / "a") for name in ("x", "y"))
    (file := tmp_path / "z" / "a" / "rows.jsonl.gz").parent.mkdir(parents=True)
    write_rows(file, {"": _run(arm="a")})
    found = load([sweep, one, one, file, other])
    assert list(found) == ["sweep: a/seed_0", str(one), f"{file}: a/seed_0", str(other)]
    assert len(arms_of(found)) == 4
    assert list(load([one, sweep])) == ["a", "sweep: a/seed_0"]
    assert list(load([file])) == ["a/seed_0"]


def test_a_sweep_and_its_rows_make_the_same_tables(tmp_path):
    """Runs without a step, and those that the plan lacks, are left out."""
    sweep = _sweep(tmp_path / "sweep", "ba", [0, 1, 7], [0, 1, 2, 3])
    (sweep / "a" / "seed_2").mkdir()
    (sweep / "a" / "seed_2" / "metrics.jsonl").touch()
    runs = load([sweep])
    found = [(run.arm, run.seed) for run in runs.values()]
    assert found == [("b", 0), ("b", 1), ("a", 0), ("a", 1)]
    write_rows(tmp_path / "rows.jsonl.gz", runs)
    again = load([tmp_path / "rows.jsonl.gz"])
    assert compare.markdown(runs, title="") == compare.markdown(again, title="")


def _lines(figure, title):
    (panel,) = [ax for ax in figure.axes if ax.get_title(loc="left") == title]
    return panel.lines


def test_a_line_is_the_mean_of_the_seeds():
    """It is dashed, over the others, where some seeds have no value."""
    runs = {}
    for seed, values in enumerate([[1, 2, 3], [3.0, None, None]]):
        rows = {"step": [0, 1, 2], "entropy": values}
        runs[f"a/seed_{seed}"] = Run(rows, {}, {"seed": seed}, arm="a")
    dashed, thick = _lines(plots.curves(runs), "policy entropy, nats")
    assert dashed.get_linestyle() == "--"
    np.testing.assert_allclose(dashed.get_data(), ([0, 1, 2], [2, 2, 3]))
    np.testing.assert_allclose(thick.get_ydata(), [2, math.nan, math.nan])
    (band,) = thick.axes.collections
    vertices = sorted({tuple(xy) for xy in band.get_paths()[0].vertices.tolist()})
    assert vertices == [(0, 1), (0, 3), (1, 2), (2, 3)]


def test_figures_show_the_data():
    """Every value is where it belongs: over steps and over tokens; a picture has the same bytes."""
    arms = {f"_run ${n}$": n for n in (0.01, 0.02)}
    runs = {arm: _run(steps=40, gain=n, arm=arm) for arm, n in arms.items()}
    figure, over_tokens = plots.curves(runs), plots.accuracy_vs_tokens(runs)
    for number, run in enumerate(runs.values()):
        for of, title, xs, key in (
            (figure, "accuracy: training", range(40), "accuracy/mean"),
            (over_tokens, "training samples", 20_000 * np.arange(40), "accuracy/mean"),
            (over_tokens, "held_out mean@8", [0, 800_000], SCORE),
        ):
            np.testing.assert_allclose(_lines(of, title)[number].get_data(), (xs, run[key]))
    (legend,) = figure.legends
    texts = legend.get_texts()
    assert [text.get_text() for text in texts] == [" _run $0.01$", " _run $0.02$"]
    assert not any(text.get_parse_math() for text in texts)
    first, again = (plots.rendered(plots.accuracy_vs_tokens(runs), "svg") for _ in range(2))
    assert first == again and b"<dc:date>" not in first


def test_hostile_text_stays_text(tmp_path):
    response = _response(HOSTILE, prompt=HOSTILE, prediction=HOSTILE, ground_truth="\udc00 \ufffd")
    run = _with_rollouts(_run(arm=HOSTILE, note=HOSTILE), tmp_path, [response])
    run.scores[f"eval/{HOSTILE}/mean@8"] = pd.Series({4: 0.5})
    run.starts[0]["commit"] = HOSTILE
    path = write_report(tmp_path, {HOSTILE: run, "b/seed_0": _run(arm="b", note=1)})
    text = path.read_text()
    assert not {"script", "base", "iframe", "a", "link"} & set(re.findall(r"<(\w+)", text))
    images = re.findall(r"<img src=\"(data:image/png;base64,|)", text)
    assert images == ["data:image/png;base64,"] * 2
    assert "<!--" not in text and "http" not in text
    assert all("<script" not in (tmp_path / f"{name}.svg").read_text() for name in PICTURES)
    assert html.unescape(re.sub("<[^>]*>", "", text)).count(HOSTILE) >= 8


def test_samples_are_of_the_first_and_the_last_step(tmp_path):
    cut = _response("cut", correct=False, truncated=True, sample=0)
    turns = [{"role": "assistant", "content": "<b>5"}, {"role": "environment", "content": "no"}]
    rows = [_response("no" * 999, correct=False, sample=0), cut]
    rows += [_response(sample=0, turns=turns), _response(sample=1), *[cut] * 50]
    one = _with_rollouts(_run(arm="a"), tmp_path, rows, steps=range(3, 30))
    found = page.samples({"a/0": _run(arm="a"), "a/1": one, "a/2": one})
    assert [row[:2] for row in found[:: page.SAMPLES]] == [["a/1", "3"], ["a/1", "29"]]
    assert len(found) == 2 * page.SAMPLES
    shown = f"{'no' * 375} ... {'no' * 375}"
    assert found[0][2:] == ["What is 1+1?", shown, "wrong: None, answer 2", "5", "-1"]
    assert found[1][4] == "truncated: None, answer 2"
    assert found[2][3] == "[assistant] <b>5\n[environment] no"
    # A file that is cut costs its end only, a broken one all of it.
    write_zipped_rows(path := tmp_path / "rollouts" / "3.jsonl.gz", [_response("1" * 99)] * 2000)
    path.write_bytes(path.read_bytes()[:-20])
    (tmp_path / "rollouts" / "29.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": '))
    assert [row[1] for row in page.samples({"run": one})] == ["3"] * page.SAMPLES


def test_arms_are_compared_on_the_seeds_they_share():
    """The table is there in numbers, too: a paper's was typed from the page."""
    runs = {
        f"{arm}/{seed}": _run(arm=arm, seed=seed, gain=gain + 0.001 * (seed % 2))
        for arm, gain, seeds in (("a", 0.1, range(4)), ("b", 0.2, range(1, 5)), ("c", 0.1, (0,)))
        for seed in seeds
    }
    ((_, heads, means), (_, _, differences)), _ = compare.tables(runs)
    assert [row[heads.index(NAME)] for row in means] == ["51.7 ± 1.4", "92.7 ± 1.2", "50.0"]
    # The shared seeds 1, 2, 3 differ by 4 times 0.1 each.
    assert [row[1:] for row in differences if row[0] == NAME] == [
        ["b - a", "3", "+40.0", "[+40.0, +40.0] *"],
        ["c - a", "1", "+0.0", "-"],
    ]
    table = pd.read_csv(io.StringIO(compare.csv_text(runs)), index_col="arm")
    assert table["seeds"].to_dict() == {"a": 4, "b": 4, "c": 1}
    assert table[NAME]["b"] == pytest.approx(92.7)
    assert table[f"{NAME} ±"]["b"] == pytest.approx(np.std([91.4, 92, 93.4, 94], ddof=1))
    assert math.isnan(table[f"{NAME} ±"]["c"])
    with pytest.raises(ValueError, match="no arm is called 'd'; there are a, b, c"):
        compare.tables(runs, baseline="d")
    # A run that died in its last evaluation has no earlier one in its place.
    runs = {"a": _run()}
    runs["a"].scores = runs["a"].scores.drop(index=4)
    assert NAME not in compare.csv_text(runs)


def test_nothing_rounds_to_minus_zero_and_a_single_point_has_no_panel():
    """Differences of -0.04 were -0.0; a run with one evaluation had a panel with one dot."""
    rows = [row | {"reward/mean": -1e-5, "grad_norm": None} for row in _rows(0, 4, 0.1)]
    for row in rows:
        row["accuracy/mean"] -= 1e-5
    rows[1]["grad_norm"] = rows[0]["ratio_gap"] = 0.1
    runs = {arm: _run(arm=arm) for arm in "ab"}
    runs["b"] = dataclasses.replace(runs["b"], rows=rows)
    text = compare.markdown(runs, title="") + "\n".join(summary_lines(runs["b"]))
    assert not re.search(r"-0(\.0*)?(?![.\d])", text)
    titles = {panel.title for panel in plots.panels({"b": runs["b"]})}
    assert "policy entropy, nats" in titles
    assert not titles & {"gradient norm before clipping", "sampler/learner gap, mean |ratio - 1|"}
    assert "gradient norm before clipping" in {panel.title for panel in plots.panels(runs)}
    runs["b"].rows = runs["b"].rows.head(1)
    assert "policy entropy, nats" in {panel.title for panel in plots.panels({"b": runs["b"]})}


def test_a_run_that_ended_early_is_not_the_end_of_its_arm():
    runs = {
        f"{arm}/seed_{seed}": _run(arm=arm, seed=seed, steps=steps, num_steps=30)
        for arm, of_seed in (("a", (30, 30, 30)), ("b", (30, 3, 30)))
        for seed, steps in enumerate(of_seed)
    }
    found = compare.markdown(runs, title="")
    assert "Left out of the comparison, not finished: b/seed_1 has 3 of 30 steps." in found
    # No interval of [+0.0, +0.0], as if that were measured.
    assert "equal on each seed" in found
    # Folders of two configs are arms of their own: each as long as its config asks for.
    lengths = {"short": 3, "long": 5}
    alone = {arm: _run(arm=arm, steps=n, num_steps=n) for arm, n in lengths.items()}
    assert "not finished" not in compare.markdown(alone, title="")
    assert compare.csv_text({"short": _run(num_steps=9)}).splitlines() == ["arm,seeds"]


def test_runs_of_other_prompts_are_named():
    """A sweep's data was edited between two arms: the table showed that as the arm's effect."""
    runs = {f"{arm}/seed_{seed}": _run(arm=arm, seed=seed) for arm in "abc" for seed in (0, 1)}
    for label, run in runs.items():
        run.starts[0]["prompts"] = ["new" if label == "b/seed_1" else "old", label[-1]]
    runs["c/seed_0"].starts = []  # of a file from before
    assert compare.of_other_prompts(runs) == ["b/seed_1 than a/seed_1"]
    assert "Trained on other prompts: b/seed_1 than a/seed_1." in compare.markdown(runs, title="")


def test_a_fork_is_compared_with_its_parent_from_where_it_begins():
    """Its tokens are counted from the parent's first step on, too."""
    steps = [{"step": s, "sampled_tokens_total": 1_000 * (s + 1)} for s in range(30)]
    rows = [
        row | {"engine/drawn_tokens": 1_000, "accuracy/mean": row["step"] / 40} for row in steps
    ]
    config = {"num_steps": 30, "seed": 0}
    runs = {arm: Run(rows[n:], {}, config, arm=arm) for arm, n in (("whole", 0), ("fork", 29))}
    assert tokens_before(runs["fork"]).to_dict() == {29: 29_000, 30: 30_000}
    assert [*tokens_before(runs["whole"])] == [*range(0, 31_000, 1_000)]
    ((_, heads, means), (_, _, differences)), _ = compare.tables(runs)
    assert means[0][1:] == means[1][1:]
    assert means[0][heads.index("sampled tokens, thousands")] == "1"
    assert {row[3] for row in differences} <= {"+0.0", "+0.000", "+0"}


def test_the_command_prints_what_it_draws_and_leaves_each_runs_pictures_alone(
    tmp_path, monkeypatch, capsys
):
    def report(*arguments):
        monkeypatch.setattr("sys.argv", ["report", *map(str, arguments)])
        main()
        return capsys.readouterr().out

    first, second = (_written(tmp_path / name, steps=3) for name in ("a", "b"))
    out = report("--workdir", first, f"--workdir={second}", "--baseline=b")
    path = first / "compared"
    assert out.splitlines()[-1] == f"page: {path / 'report.html'}"
    assert "| a - b " in out
    pictures = (f"{name}.{form}" for name in PICTURES for form in ("png", "svg", "pdf"))
    assert {file.name for file in path.iterdir()} == {"report.html", "table.csv", *pictures}
    assert (path / "curves.pdf").read_bytes().startswith(b"%PDF")
    assert "finished rollout steps</text>" in (path / "curves.svg").read_text()
    *summary, last = report(f"--workdir={first}").splitlines()
    assert summary == summary_lines(load_run(first))
    assert last == f"page: {first / 'report.html'}"
    for absent in (tmp_path, tmp_path / "nowhere"):
        message = rf"report: {absent}/metrics.jsonl: No such file or directory \(ENOENT\)"
        with pytest.raises(SystemExit, match=message):
            report(f"--workdir={absent}")
    with pytest.raises(SystemExit, match=r"nowhere.json: No such file .*\(ENOENT\)"):
        report("--evaluation", tmp_path / "nowhere.json", tmp_path / "nowhere.json")
