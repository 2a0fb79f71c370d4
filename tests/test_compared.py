"""Evaluations: intervals over problems, and comparisons problem by problem."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import stdtrit

from dapo_jax.evaluation import share_interval
from dapo_jax.logs.files import write_json, write_zipped_rows
from dapo_jax.report import evaluations
from dapo_jax.report.__main__ import main
from dapo_jax.report.statistics import Interval, paired_interval, paired_share_interval


@pytest.mark.parametrize("share", [[0, 1, 1, 1, 0, 1, 1], [0.25, 0.5, 1, 0.75, 0.5]])
def test_the_interval_of_shares_is_wilsons(share):
    """Its bounds q solve (p - q)^2 = t^2 q (1 - q) / n', n' = p (1 - p) / (v / P)."""
    low, high = share_interval(share, samples=1_000)
    P, p = len(share), np.mean(share)
    m = {7: 2, 5: 4}[P]  # two problems are not solved at all; one is solved always
    v = (m * np.var(share, ddof=1) + p * (1 - p)) / (m + 1)
    n, t = p * (1 - p) / (v / P), stdtrit(P - 1, 0.975)
    assert 0 < low < p < high < 1
    for q in (low, high):
        assert (p - q) ** 2 == pytest.approx(t**2 * q * (1 - q) / n)


def test_the_interval_of_equal_shares_is_no_point():
    """All problems right: Student's interval would say that the next ones are too, surely."""
    assert share_interval([1.0] * 30, samples=30)[0] == pytest.approx(0.878, abs=1e-3)
    assert share_interval([0.0] * 30, samples=30)[1] == pytest.approx(0.122, abs=1e-3)
    low, high = share_interval([0.5] * 30, samples=60)  # as wide as 60 coins', t in place of z
    assert high - low == pytest.approx(0.256, abs=1e-3)
    assert share_interval([0.5], samples=2) == (0.0, 1.0)
    same = paired_share_interval(pd.Series([0.0] * 30))
    assert same.difference == 0 and same.p == 1
    assert same.high == -same.low == pytest.approx(stdtrit(29, 0.975) * 2**0.5 / 30)


@pytest.mark.parametrize(
    ("P", "k", "a", "b", "gain"),
    [
        *((30, 32, 0.05, 3, 2), (30, 32, 0.3, 0.7, 2), (500, 4, 0.8, 0.5, 1.2)),
        *((30, 1, 20, 980, 3.6), (10, 1, 100, 900, 2.1)),  # as greedy decoding has one response
    ],
)
def test_intervals_cover_hard_and_easy_sets(P, k, a, b, gain):
    """Each problem is solved with a probability p from Beta(a, b), which becomes 1 - (1 - p)^gain.

    On large sets the intervals may be wider than Student's by no more than 2 and 1 %.
    """
    rng, hits, wider = np.random.default_rng(0), np.zeros(2), np.zeros((2, 2))
    true = 1 - np.mean((1 - rng.beta(a, b, 10**6)) ** gain) - a / (a + b)
    for _ in range(1_000):
        p_P = rng.beta(a, b, P)
        one_P, other_P = (rng.binomial(k, q_P) / k for q_P in (p_P, 1 - (1 - p_P) ** gain))
        of_mean = Interval(one_P.mean(), *share_interval(one_P, samples=P * k))
        d_P = pd.Series(other_P - one_P)
        of_difference = paired_share_interval(d_P)
        students = paired_interval(pd.Series(one_P)), paired_interval(d_P)
        assert 0 <= of_mean.low <= one_P.mean() <= of_mean.high <= 1
        ours = of_mean, of_difference
        hits += [it.low <= to <= it.high for it, to in zip(ours, (a / (a + b), true), strict=True)]
        wider += [[it.high - it.low for it in both] for both in (ours, students)]
    assert hits.min() >= 940
    assert P < 500 or (wider[0] < np.array([1.02, 1.01]) * wider[1]).all()


def write(folder, correct_PK, *, places=None, prompt="{row} + 0?", **settings):
    """An evaluation of a set "sums" as `evaluate` writes it; places: source, row and answer."""
    path = folder / "eval" / "0.sums.t1.json"
    path.parent.mkdir(parents=True)
    scores = {"mean@2": float(np.mean(correct_PK)), "problems": len(correct_PK)}
    document = {"step": 0, "sets": {"sums": scores}, "label": "t1"}
    write_json(path, document | {"settings": {"sums": settings}})
    places = places or [("", row, row) for row in range(len(correct_PK))]
    responses = [
        {"cursor": cursor, "source": source, "row": row, "ground_truth": str(answer)}
        | {"prompt": prompt.format(row=row), "sample": k, "correct": bool(correct)}
        for cursor, (source, row, answer) in enumerate(places)
        for k, correct in enumerate(correct_PK[cursor])
    ]
    write_zipped_rows(path.with_suffix(".jsonl.gz"), responses)
    return path


def test_two_evaluations_are_compared_problem_by_problem(tmp_path):
    """Settings that differ are named; no control character of a problem reaches the terminal."""
    settings = {"path": "sums.jsonl", "top_p": 1.0}
    one = write(tmp_path / "a", [[0, 0], [1, 0], [1, 1], [0, 0]], model="A", **settings)
    places = [("copy.jsonl", row, row) for row in (0, 1, 2, 9)]
    more = {"places": places, "prompt": "{row}+0?\x1b[2J\x07", "model": "B", "temperature": 0.6}
    other = write(tmp_path / "b", [[1, 1], [1, 0], [1, 0], [1, 1]], **more, **settings)
    v = (2 * np.var([1, 0, -0.5], ddof=1) + 2 / 3 - (0.5 / 3) ** 2) / 3
    low, high = (100 * (0.5 / 3 + sign * stdtrit(2, 0.975) * np.sqrt(v / 3)) for sign in (-1, 1))
    assert evaluations.compared([one, other]) == [
        *("a: a/0.sums.t1", "b: b/0.sums.t1"),
        *("   model: a A, b B", "   temperature: a None, b 0.6"),
        "mean over 3 problems: a 50.0%, b 66.7%, b - a +16.7 points "
        f"[{low:+.1f}, {high:+.1f}] (95 %, paired by problem)",
        "b is better on 1, equal on 1, worse on 1; 2 problems are in one of them alone, and left "
        "out",
        "    0.0% -> 100.0%  +100.0  row 0: 0 + 0?",
        "  100.0% ->  50.0%   -50.0  row 2: 2 + 0?",
    ]
    shown = "".join(evaluations.compared([other, one]))
    assert r"0+0?\x1b[2J\x07" in shown and "\x1b" not in shown


def test_problems_of_several_files_stay_apart(tmp_path):
    places = [(file, row, "B") for file in ("physics.csv", "law.csv", "") for row in range(40)]
    files = [
        write(tmp_path / f"{law}", [[1, 0]] * 40 + [[1, law]] * 40 + [[0, 0]] * 40, places=places)
        for law in (0, 1)
    ]
    lines = evaluations.compared(files)
    assert lines[2].startswith("mean over 120 problems: a 33.3%, b 50.0%")
    assert lines[3].startswith("b is better on 40, equal on 80, worse on 0; 0 problems")
    assert "law.csv row 0:" in lines[4]


def test_results_of_one_set_are_compared(tmp_path, monkeypatch, capsys):
    paths = [write(tmp_path / name, [[1, 0], [0, 0]]) for name in "abc"]
    monkeypatch.setattr("sys.argv", ["report", "--evaluation", *map(str, paths)])
    main()
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if line.startswith("b: ")] == ["b: b/0.sums.t1", "b: c/0.sums.t1"]
    with pytest.raises(ValueError, match="nothing is compared: of sums there is one result each"):
        evaluations.compared(paths[:1])
    paths[0].with_suffix(".jsonl.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"0.sums.t1.jsonl.gz"):
        evaluations.compared(paths)
    paths[0].write_text("{}")
    with pytest.raises(ValueError, match="is no evaluation"):
        evaluations.compared(paths)
