"""Metrics: one table for all uses; rows survive kills and resumes, text prints as it is."""

import functools
import math
import re
import types

import numpy as np
import pytest
from processes import ran

from dapo_jax.logs import metrics
from dapo_jax.logs.display import Display, evaluation_line
from dapo_jax.logs.files import append_line, append_log, begin_rows, json_line, read_rows
from dapo_jax.logs.metrics import METRICS, Metric, Step, score_metric, step_row
from dapo_jax.printable import printable, printable_lines
from dapo_jax.report import compare, plots
from dapo_jax.report.runs import load_run
from dapo_jax.report.summary import summary_lines
from dapo_jax.types import Group, Prompt, Response, Rollouts, RolloutStats, Status, Verdict

ROW = {"step": 12, "reward/mean": -0.25, "accuracy/mean": 0.375, "response_tokens/mean": 45.25}
ROW |= {"response_tokens/truncated_fraction": 0.03125, "entropy": 0.512}
ROW |= {"tokens_per_second/step": 1234.0, "seconds/total": 10.0}

KEYS = ["prompt", "response", "ground_truth", "prediction", "correct", "status", "reward", "tokens"]
MARKUP = "[bold red]3[/] + 4\n= 7 [/x]\x1b[35m\u202e Answer: 7"
SAMPLE = ("What is [3] + 4?", MARKUP, "7", "7", True, "correct", 1.0, 23, False)
CUT = ("What is [3] + 4?", "x" * 5000, "18", None, False, "no answer", -1.5, 256, True)
SAMPLES = [dict(zip((*KEYS, "truncated"), values, strict=True)) for values in (SAMPLE, CUT)]


def test_numbers_read_back_as_written_and_the_file_is_strict_json(tmp_path):
    values = [0.1, 1 / 3, 1e-300, 5e-324, -0.0, 2**53 - 1, float(np.float32(0.1))]
    (file := tmp_path / "metrics.jsonl").touch()
    for step, x in enumerate(values):
        append_line(file, {"step": np.int64(step), "x": x, "y": np.float32(x), "z": math.nan})
    expected = [(n, x, float(np.float32(x)), None) for n, x in enumerate(values)]
    assert repr([(*row.values(),) for row in read_rows(file)]) == repr(expected)  # -0.0 too


@pytest.mark.parametrize("broken", [b'{"step": 1, "x\n', b'{"x": 1}\n', b"\xff\n"])
def test_a_broken_line_elsewhere_is_named(tmp_path, broken):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + broken + b'{"step": 2}\n')
    for read in (lambda: read_rows(path), lambda: begin_rows(tmp_path, first_step=1)):
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
            read()


def test_no_text_controls_a_terminal_and_what_is_no_share_is_no_percent():
    assert printable("a\x1b[31m\n\tb\u202e\ud800 [x] 你") == r"a\x1b[31m⏎\tb\u202e\ud800 [x] 你"
    assert printable_lines("a\x1b[31m\n\tb\u202e\r") == "a\\x1b[31m\n\tb\\u202e\\r"
    # Seven lines of loops are no 713 %, and not the better the more there are.
    scores = {"eval/a/mean@8": 0.5, "eval/a/maj@8": 0.625, "eval/b/task/loop_lines": 7.13}
    said = evaluation_line(10, scores).partition("  ")
    assert said[0] == "evaluation after 10 steps"
    assert said[2] == "a: mean@8 50.0%, maj@8 62.5%; b: task/loop_lines 7.13"
    assert not score_metric("eval/b/task/loop_lines").higher_is_better


SECONDS = {"rollout": 4.0, "update": 2.0, "reshard": 0.5, "total": 8.0}
KEYS_OF_UPDATE = ("loss", "entropy", "mean_prob", "kl", "grad_norm", "ratio_gap", "routes/differ")
CLIPPED = ("clip_fraction/high", "clip_fraction/low", "clip_fraction/dual")


RIGHT, WRONG = Verdict(True, None, ""), Verdict(False, None, "")
LATE = WRONG._replace(status="timeout")


def _group(cursor, lengths, verdicts, *, status=Status.STOPPED):
    responses = [
        Response(np.zeros(n, np.int32), np.zeros(n, np.float32), status, "", verdict)
        for n, verdict in zip(lengths, verdicts, strict=True)
    ]
    return Group(cursor, Prompt(np.zeros(3, np.int32), None), tuple(responses))


def _update(value, *, taken=True, **others):
    values = dict.fromkeys((*KEYS_OF_UPDATE, *CLIPPED), np.float32(value))
    return values | {"taken": taken, **others}


def _step(updates=None):
    """Four groups of two, one of them all right, one all wrong and cut off; one more cancelled.

    Two updates are taken, a third is skipped; two responses have what their task measures.
    """
    measured = RIGHT._replace(measures={"lines": 1, "road": 0})
    groups = [
        _group(5, (2, 4), [measured, WRONG._replace(measures={"lines": 2})]),
        _group(6, (6, 8), [RIGHT, RIGHT]),
        _group(7, (10, 10), [WRONG, LATE], status=Status.CUT),
        _group(8, (1, 7), [WRONG, RIGHT]),
    ]
    if updates is None:
        updates = [_update(0.5, own_ratio=1), _update(0.25, own_ratio=2)]
        updates.append(_update(math.nan, taken=False))
    counts = {"sampled_tokens": 56, "decode_steps": 7, "requests": 10, "prefilled_prompts": 5}
    counts |= {"slot_steps": 100, "busy_slot_steps": 56, "waiting_slot_steps": 40}
    counts |= {"busy_waiting_slot_steps": 30, "cache_use": 0.75}
    seconds = {"prefill": 1.0, "decode": 2.0, "host": 0.5, "verify": 0.25, "verify_wait": 0.125}
    stats = RolloutStats(**counts, seconds=seconds)
    informative = np.array([True, False, False, True])
    of_rollout = types.SimpleNamespace(generation_prompts=3, partial_rollout_steps=0)
    return Step(
        config=types.SimpleNamespace(rollout=of_rollout, log=types.SimpleNamespace(metrics=())),
        step=12,
        rollouts=Rollouts(groups, np.array([0, 3]), informative, cursor=9, issued=5, stats=stats),
        reward_PG=np.array([[1, -1], [1, 1], [-2, -2], [-1, 1]], np.float32),
        updates=updates,
        learning_rate=1e-3,
        sampled_tokens_total=1056,
        evaluation={"eval/a/mean@8": 0.5},
        seconds=SECONDS,
    )


# Of the step above. The first update has the gap; own_ratio, the task's measures and
# seconds/reshard are of no row of the table.
ROW_BY_HAND = """
step 12, prompts_seen 9, sampled_tokens_total 1056, reward/mean -0.25, accuracy/mean 0.5
response_tokens/mean 6, response_tokens/correct 5.75, response_tokens/wrong 6.25
response_tokens/max 10, response_tokens/truncated_fraction 0.25, no_answer_fraction 1
responses_not_finite 0, verdicts/gave_up 1, verdicts/timeout 1, groups/sampled 4
groups/informative 2, groups/all_correct 1, groups/all_wrong 1, groups/left_out 0
groups/discarded 2
groups/cancelled 1, generation_batches 2, engine/occupancy 0.56
engine/occupancy_while_waiting 0.75, engine/decode_steps 7, engine/requests 10
engine/prefilled_prompts 5, engine/cache_use 0.75, engine/drawn_tokens 56
engine/unused_tokens_fraction 0.75, updates 2, updates_skipped 1, updates_empty 0
updates_zero_gradient 0, loss 0.375, entropy 0.375, mean_prob 0.375, kl 0.375, grad_norm 0.375
clip_fraction/high 0.375, clip_fraction/low 0.375, clip_fraction/dual 0.375, ratio_gap 0.5
routes/differ 0.5, own_ratio 1.5, task/lines 1.5, task/road 0, seconds/reshard 0.5, lr 0.001
eval/a/mean@8 0.5, seconds/rollout 4, seconds/update 2, seconds/total 8
seconds_in_rollout/prefill 1, seconds_in_rollout/decode 2, seconds_in_rollout/host 0.5
seconds_in_rollout/verify 0.25, seconds_in_rollout/verify_wait 0.125
tokens_per_second/rollout 14, tokens_per_second/rollout_used 3.5, tokens_per_second/update 7
tokens_per_second/step 7
"""


def test_a_steps_row_by_hand():
    cells = (cell.split() for cell in ROW_BY_HAND.strip().replace("\n", ", ").split(", "))
    assert step_row(_step()) == {key: float(value) for key, value in cells}
    keys = [*(metric.key for metric in METRICS), *metrics.DIGESTS]
    assert len(set(keys)) == len(keys)
    row = step_row(_step([_update(math.nan, taken=False)]))
    assert (row["updates"], row["updates_skipped"]) == (0, 1)
    assert not {*KEYS_OF_UPDATE, *CLIPPED} & row.keys()  # no update was taken


def test_a_new_metric_is_one_row_of_the_table(tmp_path, capsys):
    """Added from outside, it is in the file and wherever a person looks."""
    of_row = ("response_tokens/p90", "tokens", "Nine of ten responses are no longer.")
    shown = {"form": "{:5.1f}", "panel": "long responses, tokens", "line": "p90"}
    shown["summary"] = "90th percentile"
    row = Metric(*of_row, lambda step: np.quantile(step.rollouts.length_PG, 0.9), **shown)
    METRICS.append(row)
    try:
        step = step_row(_step())
        (tmp_path / "metrics.jsonl").write_bytes(json_line(step))
        run = load_run(tmp_path)
        assert [*run["response_tokens/p90"]] == [10.0]
        assert "  p90  10.0  " in _plain(lambda display: display.step(step), capsys)
        summary = "\n".join(" ".join(line.split()) for line in summary_lines(run))
        assert "90th percentile 10.0 -> 10.0" in summary
        titles = [ax.get_title(loc="left") for ax in plots.curves({"run": run}).axes]
        assert "long responses, tokens" in titles
    finally:
        METRICS.remove(row)


def test_a_metric_from_outside_is_in_the_file_the_curves_and_the_tables(tmp_path, monkeypatch):
    """One that a config file added was in no page, and other commands refused the run."""
    step = _step()
    step.config.log.metrics = ("rloo:reward_spread",)
    row = step_row(step)
    assert row["reward_spread"] == pytest.approx((2 + 0 + 0 + 2) / 4)
    assert row == step_row(_step()) | {"reward_spread": row["reward_spread"]}
    (tmp_path / "metrics.jsonl").write_bytes(json_line(row) + json_line(row | {"step": 13}))
    runs = {"run": load_run(tmp_path)}
    assert {"reward spread", "own ratio"} <= {panel.title for panel in plots.panels(runs)}
    assert any(line.startswith("reward spread ") for line in summary_lines(runs["run"]))
    ((_, heads, (cells,)),), _ = compare.tables(runs)
    found = dict(zip(heads, cells, strict=True))
    assert (found["reward spread"], found["own ratio"]) == ("1", "1.5")
    monkeypatch.setattr("rloo.loss", len, raising=False)
    monkeypatch.setattr("rloo.number", 1, raising=False)
    for names, refusal in (
        (["rloo"], 'no "module:name"'),
        (["rloo:loss"], "another metric is called loss"),
        (["rloo:reward_spread"] * 2, "another metric is called reward_spread"),
        (["rloo:number"], "no function or class"),
    ):
        with pytest.raises(ValueError, match=refusal):
            metrics.own_metrics(names)


def test_a_metric_that_raises_or_is_no_number_is_refused_by_name(monkeypatch):
    """A step ended in a traceback that did not say which metric, step or setting it was."""
    step = _step()
    step.config.log.metrics = ("rloo:mine",)
    for value, refusal in (
        (lambda _: "abc", "gives 'abc', no number"),
        (lambda _: np.ones(2), "gives array.*, no number"),
        (lambda _: 1 / 0, r"failed in \S*rloo.py .*by zero"),
    ):
        monkeypatch.setattr("rloo.mine", value, raising=False)
        with pytest.raises(ValueError, match=rf"log.metrics: mine of step 12 {refusal}"):
            step_row(step)


def _plain(run, capsys):
    run(Display(100, 12, [].append))
    return capsys.readouterr().out


def test_a_log_gets_one_aligned_line_a_step(capsys, monkeypatch):
    def run(display):
        display.phase("rollout: 3/32 informative groups")
        display.step(ROW)
        display.step({"step": 13, "reward/mean": 0.25, "entropy": None, "seconds/total": 10.0})
        monkeypatch.setattr("dapo_jax.logs.display.QUIET_SECONDS", 0.0)
        display.phase("rollout: 24/32 informative groups")

    first, second, phase = _plain(run, capsys).splitlines()
    assert first.startswith("step  12 ( 13/100)  reward -0.250  accuracy  37.5%  tokens    45.2")
    assert first.endswith("entropy 0.512  seconds    10.0  tokens/s   1234  eta 0:14:30")
    assert second.index("entropy") == first.index("entropy")
    assert second.split("entropy")[1].split()[0] == "-"
    assert phase == "  ... rollout: 24/32 informative groups"


def test_samples_print_model_text_literally(capsys):
    text = _plain(lambda display: display.samples(12, SAMPLES), capsys)
    assert text.splitlines()[:4] == [
        "samples of step 12",
        "correct, truth 7, prediction 7, reward +1.00, 23 tokens, stop",
        "  prompt    What is [3] + 4?",
        r"  response  [bold red]3[/] + 4⏎= 7 [/x]\x1b[35m\u202e Answer: 7",
    ]
    assert "wrong: no answer, truth 18, prediction (none), reward -1.50, 256 tokens, trunc" in text
    assert "xx ... xx" in text


def test_the_log_has_all_printed_lines_with_the_time_and_goes_on_after_a_restart(tmp_path, capsys):
    for start in range(2):
        display = Display(100, 12, functools.partial(append_log, tmp_path))
        display.line(f"start {start}\nof two 你\x1b[2J")
        display.phase("rollout: 3/32 informative groups")
        display.step(ROW)
        display.samples(12, SAMPLES[:1])
    lines = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\dZ  ", line) for line in lines)
    assert [line[22:] for line in lines] == capsys.readouterr().out.splitlines()
    assert lines[1][22:] == r"of two 你\x1b[2J" and len(lines) == 2 * 7


def test_a_command_prints_to_an_ascii_terminal():
    program = """
from dapo_jax.cli import command
from dapo_jax.logs.display import Display
command.run(lambda _: Display(2, 0, [].append).line("你好"))
"""
    assert ran("-c", program, PYTHONIOENCODING="ascii").stdout == "\\u4f60\\u597d\n"
