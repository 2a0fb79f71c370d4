"""Alarms: their conditions, and those that stop a run; each comes once, after a resume as well."""

import json
import types

import numpy as np
import pytest

from configs import tiny
from dapo_jax.logs.alarms import REPEAT_STEPS, Alarms, cap_advice
from dapo_jax.types import Group, Prompt, Response, Rollouts, RolloutStats, Status, Verdict

# A step of the main job.
HEALTHY = {
    **{"accuracy/mean": 0.27, "no_answer_fraction": 0.06, "responses_not_finite": 0},
    **{"response_tokens/truncated_fraction": 0.1, "entropy": 0.136, "ratio_gap": 2e-7},
    **{"groups/sampled": 48, "groups/informative": 32, "updates": 2, "updates_skipped": 0},
    **{"updates_empty": 0, "updates_zero_gradient": 0},
}
TAKEN, LEFT_OUT = {"taken": True}, {"taken": False, "bad": 1}


def run_of(rows, updates=None, without=(), **settings):
    """(rows with the alarms' keys, lines, reasons to stop); each row is read from JSON again."""
    config, before, written, lines, reasons = tiny.get_config(), {}, [], [], []
    config.update_from_flattened_dict(settings)
    state = types.SimpleNamespace(params={"embed_VD": 0})
    alarms = Alarms(config, state, vocab_size=384, say=lines.append)
    for step, changes in enumerate(rows):
        row = {k: v for k, v in HEALTHY.items() if k not in without} | changes | {"step": step}
        done = types.SimpleNamespace(updates=updates[step] if updates else (), reward_PG=np.ones(1))
        reasons.append(alarms.look(row, done, before))
        written.append(row)
        before = json.loads(json.dumps(row))
    return written, lines, reasons


@pytest.mark.parametrize(
    ("name", "row", "key"),
    [
        ("skipped_updates", {"updates": 1, "updates_skipped": 1}, "learner.max_skipped_updates"),
        ("not_finite_samples", {"responses_not_finite": 1}, "learner.learning_rate = 5e-05"),
        ("empty_updates", {"updates_empty": 1}, "algo.overlong_filtering"),
        ("zero_gradients", {"updates_zero_gradient": 2}, "algo.dynamic_sampling"),
        ("no_answers", {"accuracy/mean": 0, "no_answer_fraction": 0.995}, ""),
        ("nothing_to_learn", {"groups/informative": 0, "accuracy/mean": 0}, "model.path"),
        ("entropy_collapse", {"entropy": 0.9e-3}, "alarms.min_entropy"),
        ("entropy_explosion", {"entropy": 3.0}, "learner.learning_rate"),
        ("ratio_gap", {"ratio_gap": 0.14}, "alarms.max_ratio_gap"),
    ],
)
def test_every_alarm_has_a_row_that_sets_it_off_alone(name, row, key):
    """And the key to change is in its line. 0.14 is the gap of another training set on one host."""
    rows, lines, _ = run_of([HEALTHY, HEALTHY, row, row, HEALTHY])
    first = 3 if name == "no_answers" else 2  # that one waits for a second step
    always = {"updates_skipped_in_a_row", "entropy_first", "alarms", "step"}
    assert all(set(r) - set(HEALTHY) == always for r in rows[:2])
    assert [r["alarms"] for r in rows] == [0, 0, int(first == 2), 1, 0]
    assert [r.get(f"alarm/{name}", 0) for r in rows] == [0, 0, 1, 2, 0]
    assert sum(len(r) for r in rows) == 5 * len(rows[0]) + 2  # no other alarm's key
    (said, *end) = lines
    assert said.startswith(f"alarm at step {first}") and key in said and "nan" not in said
    assert end == [f"step 4: no more {name.replace('_', ' ')} after 2"] * (first == 2)


def test_entropy_is_compared_with_the_runs_first_step():
    """The main job goes from 0.136 to 0.014 nats, and a longer one of naive GRPO to 0.0045."""
    rows, *_ = run_of([{}, *({"entropy": entropy} for entropy in (0.0045, 0.00135, 1.3, 1.4))])
    assert [row["alarms"] for row in rows] == [0, 0, 1, 0, 1]
    assert {row["entropy_first"] for row in rows} == {0.136}


def test_the_ratios_bound_is_the_dtypes_and_none_where_sampling_is_cut():
    """bfloat16 has a gap of 1e-3 in the main job and up to 1e-2 elsewhere."""
    for settings, gap, on in (
        ({"model.compute_dtype": "bfloat16"}, 1e-2, 0),
        ({"model.compute_dtype": "bfloat16"}, 0.14, 1),
        ({}, 2e-3, 1),
        ({"rollout.top_p": 0.7}, 0.3, 0),
        ({"rollout.top_p": 0.7, "alarms.max_ratio_gap": 0.2}, 0.3, 1),
        ({"alarms.max_ratio_gap": 0.2}, 0.14, 0),
    ):
        rows, *_ = run_of([{"ratio_gap": gap}], **settings)
        assert rows[0]["alarms"] == on, (settings, gap)


def test_an_alarm_is_said_when_it_begins_and_then_now_and_then():
    n = REPEAT_STEPS
    _, lines, _ = run_of([{"updates_empty": 1}] * (2 * n + 1) + [{}])
    assert [line.split(":")[0] for line in lines] == [
        "alarm at step 0",
        *(f"alarm at step {s} ({s + 1} steps in a row)" for s in (n, 2 * n)),
        f"step {2 * n + 1}",
    ]


def test_no_answers_from_the_start_is_the_template_and_later_the_policy():
    row = {"accuracy/mean": 0.0, "no_answer_fraction": 1.0, "groups/informative": 0}
    cut = row | {"response_tokens/truncated_fraction": 1.0}  # it was put down to the template too
    for rows, words in (
        ([row, row], "data.train.template = ''"),
        ([{}, {}, {}, row, row], "learning_rate = 5e-05 and begin with a checkpoint before step 3"),
        ([cut, cut], "100% of the responses are cut at rollout.max_response_tokens = 80"),
    ):
        _, (line,), _ = run_of(rows)
        assert words in line


def test_tools_that_are_no_longer_called_are_an_alarm():
    _, lines, _ = run_of([{"task/calls": calls} for calls in (2.0, 1.0, 0.1, 0.1)])
    assert len(lines) == 1 and "0.1 tool calls, and had 2 at first" in lines[0]
    assert not run_of([{"task/calls": 0.0}] * 3)[1]  # there are no tools
    assert not run_of([{"task/calls": 2.0}, {}])[1]  # no problem of the step had them: a KeyError


def test_a_run_stops_after_so_many_updates_left_out_in_a_row_over_steps_and_in_one():
    then = LEFT_OUT | {"bad": 2}  # the first names the cause
    steps = [[TAKEN, LEFT_OUT], [LEFT_OUT, then], [TAKEN, TAKEN], [*[LEFT_OUT] * 3, TAKEN]]
    rows, _, why = run_of([{}] * 4, updates=steps)
    assert [row["updates_skipped_in_a_row"] for row in rows] == [1, 3, 0, 0]
    assert [bool(reason) for reason in why] == [False, True, False, True]
    for text in ("step 1: 3 updates in a row", "the gradient of embed_VD was not finite", "5e-05"):
        assert text in why[1]
    assert not any(run_of([{}] * 4, steps, **{"learner.max_skipped_updates": 4})[2])


def test_a_run_stops_where_the_sampler_gives_no_finite_numbers():
    """Then nothing is informative: no update is there to be left out, or to have an entropy."""
    steps = [{"updates": 0, "responses_not_finite": n} for n in (9, 48 * 8)]
    rows, _, why = run_of(steps, without=("entropy", "ratio_gap"))
    assert "entropy_first" not in rows[0] and [row["alarms"] for row in rows] == [1, 1]
    assert not why[0] and "100% of the responses" in why[1]


TOKEN = np.zeros(1, np.int32)


def rollouts_of(responses):
    """Rollouts of one group, which is not kept."""
    group, none = Group(0, Prompt(TOKEN), tuple(responses)), np.zeros(0, int)
    return Rollouts([group], none, np.zeros(1, bool), 1, 1, RolloutStats())


@pytest.mark.parametrize(
    ("right", "answered", "words"),
    [(0, 0, "answer that is found"), (1, 1, "Raise rollout.max"), (200, 200, "solves these")],
)
def test_the_advice_at_the_generation_cap_is_for_what_was_sampled(right, answered, words):
    """One right answer of 200 says that answers are found."""
    responses = []
    for i in range(200):
        prediction = "1" if i < answered else None
        verdict = Verdict(i < right, prediction, "wrong" if prediction else "no_answer")
        responses.append(Response(TOKEN, TOKEN, status=Status.STOPPED, verdict=verdict))
    assert words in cap_advice(tiny.get_config(), rollouts_of(responses))


@pytest.mark.parametrize(
    ("status", "scores", "words"),
    [("wrong", (0.5, 1.0), "algo.filter_groups=reward"), ("left_out", (0.0, 1.0), "Environments")],
)
def test_the_advice_at_the_generation_cap_of_episodes(status, scores, words):
    """Graded rewards of one correctness were said to want harder problems."""
    verdicts = (Verdict(True, None, status, score) for score in scores)
    responses = [
        Response(TOKEN, TOKEN, status=Status.STOPPED, verdict=verdict) for verdict in verdicts
    ]
    assert words in cap_advice(tiny.get_config(), rollouts_of(responses))
