"""Studies (experiments/study.py): their sweeps can start; their results follow from their rows."""

import dataclasses
import math

import pytest

from dapo_jax.report.quantities import last
from dapo_jax.report.rows import read_rows_file
from dapo_jax.report.runs import Run
from dapo_jax.report.statistics import Interval
from dapo_jax.sweep import plan as plans
from experiments import study
from experiments.filter_noise.study import last_scores
from experiments.study import Claim, Study, verdict
from experiments.table1.study import AVERAGED_STEPS, BUDGET_TOKENS, accuracy_at_budget
from experiments.token_level.study import loop_share

NAMES = sorted(file.parent.name for file in study.HERE.glob("*/study.py"))
WITH_ROWS = [name for name in NAMES if (study.HERE / name / study.ROWS).exists()]


@pytest.mark.parametrize("name", NAMES)
def test_a_studys_sweep_passes_all_checks(name):
    made = study.load(name)
    words = made.command("runs/x", 2)
    values = {
        key: [w.partition("=")[2] for w in words if w.startswith(f"--{key}=")]
        for key in ("config", "arm", "seeds")
    }
    plan = plans.make(
        config=values["config"][0],
        flags=[word for word in words if word.startswith("--config.")],
        grid=[],
        named=values["arm"],
        seeds=values["seeds"][0],
    )
    assert list(plan.arms) == list(made.arms)
    assert len(plan.seeds) == (5 if made.claims else 1)
    names = [quantity.name for quantity in made.quantities]
    for claim in made.claims:
        assert {claim.arm, claim.than} <= set(made.arms)
        assert claim.quantity in names
        assert claim.sign in (-1, 1)


@pytest.mark.parametrize("name", WITH_ROWS)
def test_the_committed_result_is_what_the_committed_rows_give(name):
    made, folder = study.load(name), study.HERE / name
    runs = read_rows_file(folder / study.ROWS)
    assert (folder / study.RESULT).read_text() == study.result(made, runs)
    assert {run.arm for run in runs.values()} == set(made.arms)
    for run in runs.values():
        assert run.config["num_steps"] == len(run.rows)


def test_an_unknown_study_is_named_with_what_there_is():
    with pytest.raises(ValueError, match=r"no study 'tabel1'; there are .*table1"):
        study.load("tabel1")


def test_a_verdict_needs_an_interval_without_zero():
    claim = Claim("q", "a", -1, "b")
    assert verdict(claim, Interval(-1.0, -2.0, -0.5)) == "confirmed"
    assert verdict(claim, Interval(1.0, 0.5, 2.0)) == "refuted"
    assert verdict(claim, Interval(-1.0, -3.0, 1.0)) == "open"
    assert verdict(claim, Interval(-1.0, math.nan, math.nan)) == "open"


def _run(arm: str, seed: int, **columns) -> Run:
    rows = [
        {"step": step, **{key.replace("__", "/"): values[step] for key, values in columns.items()}}
        for step in range(len(next(iter(columns.values()))))
    ]
    start = {"commit": "0123456789ab", "changed": False, "versions": {"jax": "0.10.2"}}
    config = {"seed": seed, "num_steps": len(rows)}
    return Run(rows=rows, evaluations={}, config=config, starts=[start], arm=arm)


def test_a_result_by_hand():
    """Differences of 1, 2 and 3: 2 -+ 4.303 / sqrt(3), on seeds that differ by ten."""
    runs = {
        f"{arm}/seed_{seed}": _run(arm, seed, entropy=[10.0 * seed + more * (1 + seed)] * 3)
        for arm, more in (("a", 0), ("b", 1))
        for seed in range(3)
    }
    made = Study(
        title="By hand",
        config="configs/tiny.py",
        arms={"a": "", "b": ""},
        quantities=(last("entropy", "entropy", form="{:.3f}"),),
        drawn={},
        claims=(Claim("entropy", "b", +1, "a"), Claim("entropy", "a", +1, "b")),
    )
    text = study.result(made, runs)
    assert "| b   | 3     | 12.000 ± 11.000 |" in text
    up, down = (line for line in text.splitlines() if line.startswith("| entropy:"))
    assert "b above a" in up
    assert "+2.000     | [-0.484, +4.484]" in up
    assert [cell.strip() for cell in up.split("|")][5] == "open"
    sure = dataclasses.replace(made, claims=(Claim("entropy", "a", +1, "b"),))
    for run in runs.values():
        if run.arm == "b":
            for row in run.rows:
                row["entropy"] += 10.0
    assert "| refuted |" in study.result(sure, runs)
    assert "-2.000" in down


def test_loops_are_a_share_of_the_tokens():
    run = _run("a", 0, task__loop_lines=[9.0, 1.0], response_tokens__mean=[12.0, 48.0])
    assert loop_share(run) == pytest.approx(25.0)  # 12 tokens a line; the last third of two rows


def test_the_accuracy_at_a_budget_is_that_of_the_steps_before_it():
    spent = [BUDGET_TOKENS // 20 * (step + 1) for step in range(30)]
    right = [step / 100 for step in range(30)]
    run = _run("a", 0, sampled_tokens_total=spent, accuracy__mean=right)
    assert accuracy_at_budget(run) == pytest.approx(sum(range(19 - AVERAGED_STEPS, 19)) / 10)
    short = _run("a", 0, sampled_tokens_total=spent[:5], accuracy__mean=right[:5])
    assert math.isnan(accuracy_at_budget(short))


def test_the_last_scores_are_of_the_last_twenty_steps():
    run = dataclasses.replace(
        _run("a", 0, entropy=[0.0]),
        evaluations={("road", "mean@8"): {step: step / 100 for step in range(0, 61, 4)}},
    )
    assert last_scores(run).tolist() == pytest.approx([44, 48, 52, 56, 60])
