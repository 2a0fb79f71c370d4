"""The page of a report: all arms are in it, hostile text stays text, and it needs nothing else."""

import dataclasses
import gzip
import json
import math
import re

import numpy as np
import pytest

from dapo_jax.report import curves, events, page, paper, samples
from dapo_jax.report.__main__ import load, write_report
from dapo_jax.report.rows import write_rows
from dapo_jax.report.runs import Run, load_run, merged
from dapo_jax.run.files import write_rollouts

HOSTILE = '</script><script>alert(1)</script>"><img src=x onerror=alert(2)>\u2028<!--'


def _run(*, seed=0, arm="", steps=4, gain=0.1, **config):
    """A run whose accuracy rises by `gain` a step from a start that is the seed's."""
    accuracy = [0.1 + 0.01 * seed + gain * step for step in range(steps)]
    rows = [
        {
            "step": step,
            "accuracy/mean": value,
            "entropy": 0.5 - 0.01 * step,
            "grad_norm": 0.1,
            "sampled_tokens_total": 1000 * (step + 1),
            "seconds/total": 36.0,
            "updates": 16,
        }
        for step, value in enumerate(accuracy)
    ]
    scores = {0: accuracy[0], steps: accuracy[-1] + gain}
    starts = [{"commit": "c0ffee", "time": "2026-01-01", "command": "train", "versions": {}}]
    return Run(
        rows=rows,
        evaluations={("held_out", "mean@8"): scores},
        config={"seed": seed, "algo.eps_high": 0.28} | config,
        starts=starts,
        arm=arm,
    )


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


def _data(text, name):
    """The JSON that the page hands to a script."""
    (found,) = re.findall(f'<script type="application/json" id="{name}">(.*?)</script>', text)
    return json.loads(found)


def test_hostile_text_stays_text(tmp_path):
    response = _response(texts=[HOSTILE, "\udc00 \ufffd", ""], prompt=HOSTILE, prediction=HOSTILE)
    run = _with_rollouts(_run(arm=HOSTILE, note=HOSTILE), tmp_path, [response])
    run.starts[0]["command"] = HOSTILE
    other = _run(arm="b", note=1)
    unfinished = [{"arm": HOSTILE, "seed": 0, "status": 1, "error": ["", HOSTILE]}]
    text = page.render({HOSTILE: run, "b/seed_0": other}, unfinished=unfinished)
    plain = page.render({"a/seed_0": _run(arm="a"), "b/seed_0": other})
    assert "<img" not in text
    assert "<!--" not in text
    # One more than without samples: theirs.
    assert text.count("<script") == text.count("</script") == plain.count("<script") + 1
    (sample,) = _data(text, "samples-data")
    assert "".join(sample["texts"]) == response["response"]
    assert (sample["prompt"], sample["prediction"]) == (HOSTILE, HOSTILE)
    assert _data(text, "drawing")["arms"][0]["name"] == HOSTILE


def test_a_page_of_35_runs_is_small_whole_and_alone(tmp_path):
    response = _response(texts=["1", "+", "1", "=", "2", "\n", "Answer: 2", ""] * 30)
    runs = {}
    for arm in [f"eps_high={i}" for i in range(7)]:
        for seed in range(5):
            run = _run(arm=arm, seed=seed, steps=100)
            workdir = tmp_path / f"{arm}_{seed}"
            workdir.mkdir()
            rows, steps = [response] * 24, range(0, 100, 20)
            runs[f"{arm}/seed_{seed}"] = _with_rollouts(run, workdir, rows, steps=steps)
    text = page.render(runs)
    assert len(text.encode()) < 2_000_000
    drawing = _data(text, "drawing")
    assert [arm["seeds"] for arm in drawing["arms"]] == [[0, 1, 2, 3, 4]] * 7
    for panel in drawing["panels"]:
        assert [line["arm"] for line in panel["lines"]] in ([], list(range(7))), panel["title"]
    assert {sample["run"] for sample in _data(text, "samples-data")} == {
        f"eps_high={i}/seed_0" for i in range(7)
    }
    # Nothing is fetched: the one address is the name of SVG's elements.
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?([^"\')\s>]+)', text)) <= {
        *re.findall(r'href="(#\w+)"', text),
        "#${clip}",
    }
    for anchor in re.findall(r'href="#(\w+)"', text):
        assert f'id="{anchor}"' in text


def test_a_line_is_the_mean_over_the_seeds_in_their_range():
    first = Run(rows=[{"step": s, "entropy": v} for s, v in enumerate((1, 2, 3))], evaluations={},
                config={})  # fmt: skip
    second = Run(rows=[{"step": 0, "entropy": 3.0}, {"step": 1}], evaluations={}, config={})
    line = curves.line([first, second], curves.metric_curve("entropy", "entropy"))
    np.testing.assert_allclose(line.x, [0, 1, 2])
    np.testing.assert_allclose(line.y, [2, 2, 3])
    np.testing.assert_allclose((line.low, line.high), [(1, 2, 3), (3, 2, 3)])
    assert line.count.tolist() == [2, 1, 1]
    assert curves.line([second], curves.metric_curve("kl", "kl")) is None


def test_seeds_are_smoothed_before_their_mean():
    runs = [_run(seed=seed, steps=60, gain=0.0) for seed in (0, 4)]
    for run in runs:
        run.rows[30]["entropy"] = 5.0
    line = curves.line(runs, curves.metric_curve("entropy", "entropy"))
    window = curves.smoothing_window(60)
    assert window == 5
    smooth = curves.rolling_mean(np.array([r["entropy"] for r in runs[0].rows]), window=window)
    np.testing.assert_allclose(line.y, smooth)
    assert line.raw is None
    assert curves.line(runs[:1], curves.metric_curve("entropy", "entropy")).raw[30] == 5.0


def test_axes_add_up_what_an_arm_has_spent():
    found = curves.axes([_run(steps=3), _run(steps=2)])
    assert found["tokens"] == {0: 0, 1: 1000, 2: 2000, 3: 3000}
    assert found["updates"] == {0: 0, 1: 16, 2: 32, 3: 48}
    assert found["hours"] == pytest.approx({0: 0, 1: 0.01, 2: 0.02, 3: 0.03})


def test_ends_compare_arms_on_the_seeds_they_share():
    runs = {
        arm: {f"{arm}/{seed}": _run(seed=seed, gain=gain + 0.001 * (seed % 2)) for seed in seeds}
        for arm, gain, seeds in (("a", 0.1, range(4)), ("b", 0.2, range(1, 5)), ("c", 0.1, (0,)))
    }
    found = page.ends(runs)["held_out mean@8"]
    assert (found[0]["mean"], found[0]["n"], found[0]["difference"]) == ("51.7%", 4, "")
    assert found[0]["spread"] == "1.4%"
    # The shared seeds 1, 2, 3 differ by 4 times 0.1 each.
    assert found[1]["difference"] == "+40.0% [+40.0%, +40.0%]"
    assert found[1]["excludes_zero"]
    assert (found[2]["spread"], found[2]["difference"]) == ("", "")


def test_samples_take_turns_and_stay_within_their_limit(tmp_path):
    rows = [
        *[_response() for _ in range(50)],
        _response("no", correct=False),
        _response(texts=["3", "."], correct=False, truncated=True),
        _response(texts=["x"] * 5000),
    ]
    run = _with_rollouts(_run(), tmp_path, rows, steps=range(30))
    chosen = samples.choose({"run": run})
    steps = sorted({sample["step"] for sample in chosen})
    assert (len(steps), steps[0], steps[-1]) == (samples.STEPS, 0, 29)
    at_0 = [sample for sample in chosen if sample["step"] == 0]
    assert len(at_0) == samples.RESPONSES
    assert [sample["verdict"] for sample in at_0[:4]] == ["right", "wrong", "truncated", "right"]
    # A response with its tokens comes first; its middle is left out, and counted.
    assert len(at_0[0]["texts"]) == len(at_0[0]["logp"]) == samples.HEAD + samples.TAIL
    assert at_0[0]["cut"] == [samples.HEAD, 5000 - samples.HEAD - samples.TAIL]
    assert (at_0[1]["text"], at_0[2]["texts"], at_0[2]["cut"]) == ("no", ["3", "."], None)
    few = samples.choose({"run": run}, limit_bytes=3_000)
    assert 0 < len(json.dumps(few)) < 3_500


def test_a_broken_rollouts_file_costs_its_end_only(tmp_path):
    run = _with_rollouts(_run(), tmp_path, [_response(str(i) * 99) for i in range(2000)])
    path = tmp_path / "rollouts" / "0.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-2000])
    (tmp_path / "rollouts" / "1.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": '))
    (tmp_path / "rollouts" / "notes.jsonl.gz").touch()
    assert {sample["step"] for sample in samples.choose({"run": run})} == {0}


def test_events_name_faults_resumes_and_rows_cut(tmp_path):
    run = _run(steps=8)
    for step, row in enumerate(run.rows):
        row |= {"alarms": int(step in (2, 3, 6)), "updates_skipped": 2 * (step == 5)}
        row["alarm/entropy_collapse"] = int(step in (2, 3, 6))
    run.starts.append(run.starts[0] | {"commit": "decade"})
    (tmp_path / "metrics.cut-1.jsonl").write_text('{"step": 4}\n{"step": 5}\n')
    found = events.of_run(dataclasses.replace(run, workdir=tmp_path))
    assert [(event.kind, event.steps) for event in found] == [
        ("alarm", "2-3, 6"),
        ("fault", "5"),
        ("resume", "-"),
        ("done again", "4-5"),
    ]
    assert "entropy_collapse" in found[0].text
    assert "another commit" in found[2].text
    assert events.of_run(_run()) == []
    text = page.render({"run": run})
    assert "entropy_collapse" in text
    assert "None: no alarm" in page.render({"run": _run()})


def test_points_of_a_sweep_that_failed_are_listed(tmp_path):
    ended = ((0, 1), (0, 0), (1, 0), (1, -9))
    points = [{"arm": "a", "seed": seed, "status": status} for seed, status in ended]
    lines = "".join(json.dumps(point) + "\n" for point in points)
    (tmp_path / "points.jsonl").write_text(lines + '{"arm": ')
    assert events.unfinished(tmp_path) == [points[3]]


def test_the_papers_curves_are_over_rollout_steps(tmp_path):
    path = tmp_path / "paper.json"
    content = {
        "fig1_aime24_percent": {"dapo_avg@32": [[-0.0, 1.0], [1600, 50.0]]},
        "fig7c_entropy": {"dapo": [[0, 0.7], [160, 0.4]]},
    }
    path.write_text(json.dumps(content))
    found = paper.read(path)
    assert found["eval"][0]["x"] == [0, 100]
    assert found["eval"][0]["y"] == [0.01, 0.5]
    panels = {
        p["title"]: p for p in _data(page.render({"r": _run()}, paper=found), "drawing")["panels"]
    }
    assert panels["policy entropy, nats"]["paper"] == found["entropy"]
    assert panels["accuracy"]["paper"] == found["eval"]
    assert panels["gradient norm before clipping"]["paper"] == []
    path.write_text('{"other": 1}')
    with pytest.raises(ValueError, match=r"paper\.json has none of the paper's curves .*--paper"):
        paper.read(path)


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
    assert [len(arm) for arm in curves.arms(found).values()] == [1, 1]


def test_files_of_rows_in_folders_of_one_name_are_both_read(tmp_path):
    """runs/x/rows.jsonl.gz took the place of old/x/rows.jsonl.gz."""
    paths = [tmp_path / part / "x" / "rows.jsonl.gz" for part in ("old", "runs")]
    for seed, path in enumerate(paths):
        path.parent.mkdir(parents=True)
        write_rows(path, {"a": _run(seed=seed)})
    assert [run.seed for run in load([], rows=paths).values()] == [0, 1]


def test_a_run_that_ended_early_is_not_the_end_of_its_arm():
    """A seed that died at step 3 of 30 counted with the numbers of that step.

    They were in the arm's mean, spread and paired interval, and nothing on the page said so.
    """
    whole, dead = {"steps": 30, "num_steps": 30}, {"steps": 3, "num_steps": 30}
    runs = {
        f"{arm}/seed_{seed}": _run(
            arm=arm, seed=seed, **(dead if arm + str(seed) == "b1" else whole)
        )
        for arm in "ab"
        for seed in range(3)
    }
    (whole, rest) = page.ends(curves.arms(runs))["held_out mean@8"]
    assert (whole["n"], rest["n"], rest["difference"]) == (3, 2, "+0.0% [+0.0%, +0.0%]")
    text = page.render(runs)
    assert "Left out, not finished: b/seed_1 has 3 of 30 steps." in text
    assert "b (2 seeds)" in text
    # Folders of two recipes are arms of their own: each as long as its recipe asks for.
    alone = {"short": _run(steps=3, num_steps=3), "long": _run(steps=5, num_steps=5)}
    assert "Left out" not in page.render(alone)


def test_a_score_from_before_the_end_is_not_the_end():
    """A run that died in its last evaluation stood in the table with an earlier one."""
    run = _run()
    del run.evaluations["held_out", "mean@8"][4]
    assert "held_out mean@8" not in page.ends({"a": {"a": run}})


def test_a_sweep_and_its_rows_make_the_same_numbers(tmp_path):
    sweep = tmp_path / "sweep"
    for arm, gain in (("a", 0.1), ("b", 0.05)):
        for seed in (0, 1):
            folder = sweep / arm / f"seed_{seed}"
            folder.mkdir(parents=True)
            run = _run(seed=seed, gain=gain)
            lines = (json.dumps(row) + "\n" for row in run.rows)
            (folder / "metrics.jsonl").write_text("".join(lines))
            (folder / "config.json").write_text(json.dumps({"seed": seed}))
    (sweep / "sweep.json").write_text(json.dumps({"arms": {"a": {}, "b": {}}, "seeds": [0, 1, 2]}))
    write_rows(tmp_path / "rows.jsonl.gz", load([sweep]))
    path = write_report([], rows=[tmp_path / "rows.jsonl.gz"])
    assert path == tmp_path / "report.html"
    pages = [page.render(load([sweep])), path.read_text()]
    drawings = [_data(text, "drawing") for text in pages]
    assert drawings[0] == drawings[1]
    assert [arm["name"] for arm in drawings[0]["arms"]] == ["a", "b"]
    (panel,) = [p for p in drawings[0]["panels"] if p["title"] == "accuracy"]
    assert panel["lines"][1]["y"] == pytest.approx([0.105, 0.155, 0.205, 0.255])
    assert panel["lines"][1]["high"] == pytest.approx([0.11, 0.16, 0.21, 0.26])
    assert load_run(sweep / "a" / "seed_0").workdir == sweep / "a" / "seed_0"


def test_numbers_that_are_not_finite_are_null():
    run = _run()
    run.rows[1]["entropy"] = math.inf
    text = page.render({"run": run})
    (panel,) = [p for p in _data(text, "drawing")["panels"] if p["title"].startswith("policy")]
    assert panel["lines"][0]["x"] == [0, 2, 3]
