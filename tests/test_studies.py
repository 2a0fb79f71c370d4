"""Studies (experiments/study.py): their sweeps can start; their results follow from their rows."""

import dataclasses
import math

import pytest

from dapo_jax.report.compare import by_arm, last
from dapo_jax.report.rows import read_rows_file, write_rows
from dapo_jax.report.runs import Run
from dapo_jax.report.statistics import Interval
from experiments import study
from experiments.eps_high.study import steps_until_half
from experiments.overlong import texts
from experiments.study import Claim, Study, Trend, verdict
from experiments.table1.study import BUDGET_TOKENS, accuracy_at_budget
from experiments.token_level.study import loop_share

ENTROPY = last("entropy", "entropy", form="{:.3f}")
NAMES = sorted(file.parent.name for file in study.HERE.glob("*/study.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_studys_sweep_passes_all_checks(name):
    made = study.load(name)
    plan = made.plan()
    assert list(plan.arms) == list(made.arms)
    assert len(plan.seeds) >= 3
    assert len({quantity.name for quantity in made.quantities}) == len(made.quantities)
    assert len(study.panels(made.drawn)) == len(made.drawn)
    for trend in made.trends:
        assert set(trend.arms) <= set(made.arms)
        assert trend.quantity in made.quantities
    for claim in (*made.claims, *made.post_hoc):
        assert {claim.arm, claim.than} <= set(made.arms)
        assert claim.quantity in made.quantities
        assert claim.sign in (-1, 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_result_is_what_the_committed_rows_give(name):
    made, folder = study.load(name), study.HERE / name
    runs = read_rows_file(folder / study.ROWS)
    assert (folder / study.RESULT).read_text() == study.result(made, runs)
    assert made.finished(runs)[1] == []


def test_an_unknown_study_is_named_with_what_there_is():
    with pytest.raises(ValueError, match=r"no study 'tabel1'; there are .*table1"):
        study.load("tabel1")


def test_a_verdict_needs_both_tests():
    """An arm was "confirmed" to be behind by a paired interval that was narrow by chance.

    The scatter of all arms and the number of predictions did not count.
    """
    claim = Claim(ENTROPY, "a", -1, "b")
    assert verdict(claim, Interval(-1.0, -2.0, -0.5), 0.01) == "confirmed"
    assert verdict(claim, Interval(1.0, 0.5, 2.0), 0.01) == "refuted"
    assert verdict(claim, Interval(-1.0, -2.0, -0.5), 0.06) == "not significant"
    assert verdict(claim, Interval(-1.0, -3.0, 1.0), 0.01) == "not significant"
    assert verdict(claim, Interval(-1.0, math.nan, math.nan), math.nan) == "not significant"


EPS_HIGH = {"a": 0.2, "b": 0.3, "c": 0.4}


def _study(arms: str, claims=(), seeds=range(3)) -> Study:
    return Study(
        title="By hand",
        config="configs/tiny.py",
        settings={"num_steps": "3"},
        arms={arm: f"algo.eps_high={EPS_HIGH[arm]}" for arm in arms},
        quantities=(ENTROPY,),
        drawn={},
        claims=claims,
        seeds=tuple(seeds),
    )


def _run(arm: str, seed: int, **columns) -> Run:
    rows = [
        {"step": step, **{key.replace("__", "/"): values[step] for key, values in columns.items()}}
        for step in range(len(next(iter(columns.values()))))
    ]
    start = {"commit": "0123456789ab", "changed": False, "versions": {"jax": "0.10.2"}}
    config = {"seed": seed, "num_steps": 3, "algo.eps_high": EPS_HIGH[arm]}
    return Run(rows=rows, evaluations={}, config=config, starts=[start], arm=arm)


def test_a_result_by_hand():
    """Differences of 1, 2 and 3: 2 -+ 4.303 / sqrt(3), on seeds that differ by ten."""
    runs = {
        f"{arm}/seed_{seed}": _run(arm, seed, entropy=[10.0 * seed + more * (1 + seed)] * 3)
        for arm, more in (("a", 0), ("b", 1))
        for seed in range(3)
    }
    made = _study("ab", (Claim(ENTROPY, "b", +1, "a"), Claim(ENTROPY, "a", +1, "b")))
    text = study.result(made, runs)
    assert "| b   | 3     | 12.000 ± 11.000 |" in text
    up, down = (line for line in text.splitlines() if line.startswith("| entropy:"))
    assert "b above a" in up
    cells = [cell.strip() for cell in up.split("|")][1:-1]
    assert cells[1:4] == ["3", "+2.000", "[-0.484, +4.484]"]
    assert cells[4:] == [cells[3], "0.148", "not significant"]  # t = 2 sqrt(3), twice
    sure = dataclasses.replace(made, claims=(Claim(ENTROPY, "a", +1, "b"),))
    for run in runs.values():
        if run.arm == "b":
            for row in run.rows:
                row["entropy"] += 10.0
    assert "| refuted " in study.result(sure, runs)
    assert "-2.000" in down


def test_what_a_run_was_given_stands_beside_its_scores():
    """Half of an arm's updates had a gradient of zero, and no table said so.

    Its distance from an arm whose updates all had one was read as an effect.
    """
    runs = {
        f"{arm}/seed_0": _run(
            arm, 0, entropy=[1.0] * 3, updates=[4] * 3, updates_zero_gradient=[zero] * 3
        )
        for arm, zero in (("a", 0), ("b", 2))
    }
    heads, _, *lines = study.result(_study("ab", seeds=[0]), runs).splitlines()[4:8]
    assert [cell.strip() for cell in heads.split("|")[3:-1]] == ["entropy", "non-zero updates"]
    assert [line.split("|")[4].strip() for line in lines] == ["12", "6"]


def test_a_trend_over_arms_in_order():
    """Page's test: with 5 seeds of 3 arms in order L = 70, p = (1 / 6)^5; twice that two-sided."""
    runs = {
        f"{arm}/seed_{seed}": _run(arm, seed, entropy=[10.0 * seed + level] * 3)
        for arm, level in (("a", 0), ("b", 1), ("c", 2))
        for seed in range(5)
    }
    arms = by_arm(runs)
    for names in ("abc", "cba"):
        assert Trend(ENTROPY, names).p(arms, 5) == pytest.approx(2 / 6**5)
    assert Trend(ENTROPY, "bac").p(arms, 5) > 0.05
    del arms["b"][3]
    assert math.isnan(Trend(ENTROPY, "abc").p(arms, 5))


def test_loops_are_a_share_of_the_tokens():
    run = _run("a", 0, task__loop_lines=[9.0, 1.0], response_tokens__mean=[12.0, 48.0])
    assert loop_share(run) == pytest.approx(25.0)  # 12 tokens a line; the last third of two rows


@pytest.mark.parametrize("tokens_a_step", [9_000, 20_000, 31_000])
def test_the_accuracy_at_a_budget_does_not_depend_on_the_tokens_of_a_step(tokens_a_step):
    """Ten steps before the budget were 10 points less for an arm that samples three times more."""
    spent = [tokens_a_step * (step + 1) for step in range(60)]
    run = _run("a", 0, sampled_tokens_total=spent, accuracy__mean=[n / 1e6 for n in spent])
    assert accuracy_at_budget(run) == pytest.approx(BUDGET_TOKENS / 1e4, abs=1.0)
    assert accuracy_at_budget(run, budget=300_000) == pytest.approx(30.0, abs=1.0)
    short = _run("a", 0, sampled_tokens_total=spent[:5], accuracy__mean=spent[:5])
    assert math.isnan(accuracy_at_budget(short))


def test_what_is_not_the_studys_is_left_out_and_said():
    """Rows of another config, of fewer steps and of no seed at all gave the same verdicts."""
    runs = {
        f"{arm}/seed_{seed}": _run(arm, seed, entropy=[seed + EPS_HIGH[arm]] * 3)
        for arm in "ab"
        for seed in range(4)
    }
    made = _study("ab", (Claim(ENTROPY, "b", +1, "a"),))
    assert "Missing" not in study.result(made, runs)
    assert "| confirmed |" in study.result(made, runs)
    assert "| significant |" in study.result(
        dataclasses.replace(made, claims=(), post_hoc=made.claims), runs
    )
    runs["b/seed_1"] = _run("b", 1, entropy=[9.0])
    runs["b/seed_2"].config["algo.eps_high"] = 0.2
    text = study.result(dataclasses.replace(made, seeds=range(5)), runs)
    assert "b/seed_1 has 1 of 3 steps; b/seed_2 is of another config (algo.eps_high)" in text
    assert "a/seed_4 has not been run; b/seed_1" in text
    assert "| incomplete |" in text
    assert "| confirmed |" not in text
    assert "| b   | 2     | 1.800 ± 2.121 |" in text
    # As in the rows of a run before that key, and of one that had the cores to itself.
    runs["a/seed_0"].config.update({"learner.row_lengths": 1, "mesh.cpu_devices": 2})
    runs["a/seed_1"].config["learner.row_lengths"] = 2
    assert "a/seed_1 is of another config (learner.row_lengths)" in study.result(made, runs)
    runs["a/seed_3"].config["learner.learning_rate"] = 1.0
    made = dataclasses.replace(made, seeds=range(4))
    assert "a/seed_3 is of another config (learner.learning_rate)" in study.result(made, runs)
    del runs["a/seed_0"].rows[1], runs["a/seed_1"].rows[:]
    text = study.result(made, runs)
    assert "a/seed_0 has 2 of 3 steps; a/seed_1 has 0 of 3 steps" in text


def test_a_key_below_one_that_the_study_sets_is_the_studys():
    """data.train.args.road in every run passed as the config's own."""
    made = dataclasses.replace(
        _study("a"), settings={"num_steps": "3", "data.train.args": "{'easy': 1.0}"}
    )
    runs = {f"a/seed_{seed}": _run("a", seed, entropy=[1.0] * 3) for seed in range(3)}
    for run in runs.values():
        run.config["data.train.args.easy"] = 1.0
    assert not made.finished(runs)[1]
    for run in runs.values():
        run.config["data.train.args.road"] = 1.0
    assert len(made.finished(runs)[1]) == 3


def test_a_study_draws_metrics_only():
    entropy, score = study.panels({"entropy": "H", "eval/road/mean@8": "road"})
    assert (entropy.title, score.unit) == ("H", "share")
    assert study.panels({"ratio_gap": "gap"})[0].log
    with pytest.raises(ValueError, match="'entorpy', which is no metric"):
        study.panels({"entorpy": "H"})


def test_seeds_without_a_value_are_counted():
    """A mean over the one seed that reached a mark stood beside that of all five."""
    runs = {f"a/seed_{s}": _run("a", s, entropy=[[1.0, math.nan][s]] * 3) for s in range(2)}
    assert "| a   | 2     | 1.000 (of 1) |" in study.result(_study("a", seeds=range(2)), runs)


def test_rows_are_added_to_those_of_other_seeds_unless_a_run_failed(tmp_path):
    """A study of many hours is made a seed at a time; a sweep's rows replaced all others."""
    made, rows = _study("ab", seeds=range(2)), tmp_path / study.ROWS
    parts = [study.part_of(made, [seed]) for seed in "01"]
    sweeps = [tmp_path / "first", tmp_path / "second"]
    for seed, folder in enumerate(sweeps):
        folder.mkdir()
        runs = {f"{a}/seed_{seed}": _run(a, seed, entropy=[seed + 1.0] * 3) for a in "ab"}
        write_rows(folder / study.ROWS, runs)
    study.keep_rows(made, parts[0], sweeps[0], tmp_path, status=1)
    assert list(read_rows_file(rows)) == ["a/seed_0", "b/seed_0"]
    study.keep_rows(made, parts[1], sweeps[1], tmp_path, status=1)
    assert list(read_rows_file(rows)) == ["a/seed_0", "b/seed_0"]
    study.keep_rows(made, parts[1], sweeps[1], tmp_path, status=0)
    assert list(read_rows_file(rows)) == ["a/seed_0", "a/seed_1", "b/seed_0", "b/seed_1"]
    write_rows(
        sweeps[0] / study.ROWS,
        {f"b/seed_{seed}": _run("b", seed, entropy=[9.0] * 3) for seed in range(2)},
    )
    study.keep_rows(made, parts[0], sweeps[0], tmp_path, status=0)
    assert [run.rows[0]["entropy"] for run in read_rows_file(rows).values()] == [1, 2, 9, 2]
    with pytest.raises(ValueError, match="--seeds has 7; the study's are 0, 1"):
        study.part_of(made, ["7"])


@pytest.mark.parametrize(
    ("shares", "steps"),
    [([0.1, 0.3, 0.7, 0.2], 1.5), ([0.5, 0.9], 0.0), ([0.1, 0.2, 0.4], 3.0), ([0.1, 0.5], 1.0)],
)
def test_steps_until_half_lie_between_two_steps(shares, steps):
    assert steps_until_half(_run("a", 0, task__right_road=shares)) == pytest.approx(steps)


@pytest.mark.parametrize(
    ("lines", "works_all"),
    [
        (["She has on 79-6=73 coins", "Tom has me 73+5=78 people"], True),
        (["She has on 79-6=73 coins", "Let me check: 73+5=78", "Answer: 78"], False),
        (["She has on 79-6=73 coins", "Tom has me 73-6=67 coins"], False),
        (["She has on 79-6=73 coins", "Tom has me 73+5=78 coins", "He is on 78+9=87 coins"], False),
    ],
)
def test_a_solution_works_all_operations_of_its_question(lines, works_all):
    """Counting lines, one that left an operation out and worked another twice had all steps."""
    response = {"prompt": "Solve.\n\nWhat is 79-6+5?\n\nRemember", "response": "\n".join(lines)}
    assert texts.works_all(response) == works_all
