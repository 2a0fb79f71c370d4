"""Studies (experiments/study.py): their sweeps can start; their results follow from their rows."""

import dataclasses

import pytest

from dapo_jax.report.compare import last
from dapo_jax.report.runs import Run, read_rows_file, write_rows
from experiments import study
from experiments.study import Claim, Study

ENTROPY = last("entropy", "entropy", form="{:.3f}")
NAMES = sorted(file.parent.name for file in study.HERE.glob("*/study.py"))


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_result_is_what_the_committed_rows_give(name):
    """The study's sweep passes all checks, too: its config, arms and settings are still there."""
    made, folder = study.load(name), study.HERE / name
    if hasattr(made, "read"):
        assert (folder / study.RESULT).read_text() == made.read(folder, None, made.seeds)[0]
        return
    runs = read_rows_file(folder / study.ROWS)
    assert (folder / study.RESULT).read_text() == study.result(made, runs)
    assert made.finished(runs)[1] == []
    assert set(made.drawn) <= study.TITLES.keys()


EPS_HIGH = {"a": 0.2, "b": 0.3, "c": 0.4}


def _study(arms: str, claims=(), seeds=range(3)) -> Study:
    how = {"title": "By hand", "config": "configs/tiny.py", "settings": {"num_steps": "3"}}
    how |= {"arms": {arm: f"algo.eps_high={EPS_HIGH[arm]}" for arm in arms}, "drawn": ()}
    return Study(**how, quantities=(ENTROPY,), claims=claims, seeds=tuple(seeds))


def _runs(arms: str, seeds, value) -> dict[str, Run]:
    """A run for each arm and seed; value(arm, seed): its entropy in all of three steps."""
    return {
        f"{arm}/seed_{seed}": Run(
            rows=[{"step": step, "entropy": value(arm, seed)} for step in range(3)],
            scores={},
            config={"seed": seed, "num_steps": 3, "algo.eps_high": EPS_HIGH[arm]},
            starts=[{"commit": "0123456789ab", "changed": False, "versions": {"jax": "0.10.2"}}],
            arm=arm,
        )
        for arm in arms
        for seed in seeds
    }


def test_a_result_by_hand():
    """Differences of 1, 2 and 3: 2 -+ 4.303 / sqrt(3), on seeds that differ by ten."""
    made = _study("ab", (Claim(ENTROPY, "b", +1, "a"), Claim(ENTROPY, "a", +1, "b")))
    text = study.result(made, _runs("ab", range(3), lambda a, s: 10.0 * s + (a == "b") * (1 + s)))
    assert "||a|b|" in text
    assert "|entropy|10.000 ± 10.000|12.000 ± 11.000|" in text
    # t = 2 sqrt(3), twice
    assert "|entropy|b above a|+2.000 [-0.484, +4.484]|0.148|not significant|" in text
    assert "||a above b|-2.000 [-4.484, +0.484]|0.148|not significant|" in text


def test_what_is_not_the_studys_is_left_out_and_said():
    runs = _runs("ab", range(4), lambda arm, seed: seed + EPS_HIGH[arm])
    made = _study("ab", (Claim(ENTROPY, "b", +1, "a"),))
    text = study.result(made, runs)
    assert "Missing" not in text and "|confirmed|" in text
    post_hoc = dataclasses.replace(made, claims=(), post_hoc=made.claims)
    assert "|significant|" in study.result(post_hoc, runs)
    runs["b/seed_1"].rows = runs["b/seed_1"].rows.head(1)
    runs["b/seed_2"].config["algo.eps_high"] = 0.2
    text = study.result(dataclasses.replace(made, seeds=range(5)), runs)
    assert "a/seed_4 has not been run; b/seed_1 has 1 of 3 steps; b/seed_2 is of another" in text
    assert "|incomplete|" in text and "||a (4 seeds)|b (2 seeds)|" in text
    assert "|1.800 ± 2.121|" in text
    # A key below one that the study sets is the study's; others may differ.
    settings = {"num_steps": "3", "data.train.args": "{'easy': 1.0}"}
    made = dataclasses.replace(made, settings=settings)
    for run in runs.values():
        run.config.update({"data.train.args.easy": 1.0, "learner.row_lengths": 2})
    assert "a/seed_0" in made.finished(runs)[0]
    runs["a/seed_0"].config["data.train.args.road"] = 1.0
    assert made.finished(runs)[1][0] == "a/seed_0 is of another config (data.train.args.road)"


def test_rows_are_added_to_those_of_other_seeds(tmp_path):
    made, rows, sweep = _study("ab", seeds=range(2)), tmp_path / study.ROWS, tmp_path / "made"
    for seed in (1, 0):
        write_rows(sweep, _runs("ab", [seed], lambda *of: 1.0))
        study.add_rows(made, sweep, tmp_path)
    assert list(read_rows_file(rows)) == ["a/seed_0", "a/seed_1", "b/seed_0", "b/seed_1"]
    again = _runs("b", range(2), lambda *of: 9.0)
    again["b/seed_1"].rows = again["b/seed_1"].rows.head(1)  # it is not finished
    write_rows(sweep, again)
    study.add_rows(made, sweep, tmp_path)
    assert [run["entropy"][0] for run in read_rows_file(rows).values()] == [1, 1, 9, 1]
