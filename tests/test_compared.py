"""Evaluations: intervals over problems, and comparisons problem by problem."""

import gzip
import json

import numpy as np
import pytest
from processes import ran
from scipy.special import stdtrit

from dapo_jax.evaluate import share_interval
from dapo_jax.report import evaluations
from dapo_jax.report.statistics import paired_interval, paired_share_interval


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


@pytest.mark.parametrize(
    ("P", "k", "a", "b"),
    [
        (30, 32, 0.05, 3),
        (30, 32, 0.3, 0.7),
        (500, 4, 0.8, 0.5),
    ],
)
def test_the_interval_of_shares_covers_hard_and_easy_sets(P, k, a, b):
    """With one or two of 30 problems ever solved, it held the truth 84 % of the time.

    It took the spread over problems from those few as it was. Each problem is solved with a
    probability from Beta(a, b). Where hundreds of problems are solved now and then, the interval
    must not be wider than Student's by more than 2 %.
    """
    rng, hit, width, students = np.random.default_rng(0), 0, 0.0, 0.0
    for _ in range(1_000):
        share_P = rng.binomial(k, rng.beta(a, b, P)) / k
        low, high = share_interval(share_P, samples=P * k)
        hit += low <= a / (a + b) <= high
        assert 0 <= low <= share_P.mean() <= high <= 1
        width += high - low
        students += 2 * stdtrit(P - 1, 0.975) * share_P.std(ddof=1) / np.sqrt(P)
    assert hit >= 940
    assert P < 500 or width < 1.02 * students


@pytest.mark.parametrize(
    ("P", "k", "a", "b", "gain"),
    [(30, 32, 0.05, 3, 2), (30, 32, 0.1, 2, 1.5), (30, 32, 0.3, 0.7, 2), (500, 4, 0.8, 0.5, 1.2)],
)
def test_the_interval_of_a_comparison_covers_hard_and_easy_sets(P, k, a, b, gain):
    """With few of 30 problems ever moving, Student's held the true difference 83 % of the time.

    p of a problem becomes 1 - (1 - p)^gain. On large sets the interval is Student's to 1 %.
    """
    rng, hit, width, students = np.random.default_rng(0), 0, 0.0, 0.0
    true = 1 - np.mean((1 - rng.beta(a, b, 10**6)) ** gain) - a / (a + b)
    for _ in range(1_000):
        p_P = rng.beta(a, b, P)
        one_P, other_P = (rng.binomial(k, q_P) / k for q_P in (p_P, 1 - (1 - p_P) ** gain))
        interval = paired_share_interval(other_P, one_P)
        hit += interval.low <= true <= interval.high
        width += interval.half_width
        students += paired_interval(other_P, one_P).half_width
    assert hit >= 940
    assert P < 500 or width < 1.01 * students


@pytest.mark.parametrize(("P", "p", "gain"), [(30, 0.02, 0.05), (30, 0.95, 0.03), (10, 0.1, 0.1)])
def test_the_interval_of_two_greedy_evaluations_is_no_point_where_they_agree(P, p, gain):
    """Two that agree on all of 30 problems were said to differ by 0.0 points [+0.0, +0.0].

    With one response a problem it held the true difference 25 to 90 % of the time.
    """
    rng, hit = np.random.default_rng(0), 0
    for _ in range(1_000):
        one_P, other_P = rng.random(P) < p, rng.random(P) < p + gain
        interval = paired_share_interval(other_P, one_P)
        hit += interval.low <= gain <= interval.high
    assert hit >= 940
    same = paired_share_interval([0.0] * 30, [0.0] * 30)
    assert same.difference == 0 and same.p == 1
    assert same.high == -same.low == pytest.approx(stdtrit(29, 0.975) * 2**0.5 / 30)


def write(folder, name, correct_PK, *, rows=None, **settings):
    """An evaluation of a set "sums" as `evaluate` writes it."""
    (folder / "eval").mkdir(parents=True)
    path = folder / "eval" / f"0.sums.{name}.json"
    scores = {"mean@2": float(np.mean(correct_PK)), "problems": len(correct_PK)}
    document = {"step": 0, "sets": {"sums": scores}, "label": name, "settings": {"sums": settings}}
    path.write_text(json.dumps(document))
    with gzip.open(path.with_name(f"0.sums.{name}.jsonl.gz"), "wt") as file:
        for row, correct_K in zip(rows or range(len(correct_PK)), correct_PK, strict=True):
            for k, correct in enumerate(correct_K):
                line = {"row": row, "ground_truth": str(row), "prompt": f"<b>{row} + 0?</b>"}
                line |= {"sample": k, "correct": bool(correct), "response": "<script>alert(1)"}
                line |= {"prediction": None, "status": "ok", "tokens": 3, "truncated": False}
                file.write(json.dumps(line) + "\n")
    return path


def test_two_evaluations_are_compared_problem_by_problem(tmp_path):
    one = write(tmp_path / "a", "t1", [[0, 0], [1, 0], [1, 1], [0, 0]])
    other = write(tmp_path / "b", "t0", [[1, 1], [1, 0], [1, 0], [1, 1]], rows=[0, 1, 2, 9])
    (a,), (b,) = evaluations.read(one), evaluations.read(other)
    compared = evaluations.compare(a, b)
    deltas = [(b.mean - a.mean, a.name) for a, b in compared.pairs]
    changes = zip((1.0, 0.0, -0.5), range(3), strict=True)
    assert deltas == [(change, f"row {row}: <b>{row} + 0?</b>") for change, row in changes]
    assert compared.alone == 2  # row 3 of a, row 9 of b
    assert compared.interval.difference == pytest.approx(0.5 / 3)
    v = (2 * np.var([1, 0, -0.5], ddof=1) + 2 / 3 - (0.5 / 3) ** 2) / 3
    half = stdtrit(2, 0.975) * np.sqrt(v / 3)
    assert compared.interval.high == pytest.approx(0.5 / 3 + half)
    text = "\n".join(compared.lines())
    assert "b - a +16.7 points" in text
    assert "b is better on 1, equal on 1, worse on 1" in text
    assert "2 problems are in one of them alone" in text


def of_several_files(path, share_of):
    """Rewrites an evaluation's responses as those of files whose rows all begin at 0."""
    responses = path.with_suffix(".jsonl.gz")
    lines = gzip.decompress(responses.read_bytes()).splitlines()
    with gzip.open(responses, "wt") as file:
        for line in map(json.loads, lines):
            cursor = line["row"]
            source = list(share_of)[cursor // 40]
            line |= {"cursor": cursor, "source": source, "row": cursor % 40, "ground_truth": "B"}
            line |= {"prompt": f"{source} {cursor}", "correct": line["sample"] < share_of[source]}
            file.write(json.dumps(line) + "\n")
    return evaluations.read(path)[0]


def test_problems_of_several_files_stay_apart(tmp_path):
    """Read back by row and answer, 120 problems of three files with answers A to D became 93.

    The comparison's mean, count and interval were of mixtures, in silence.
    """
    before = {"physics.csv": 1, "law.csv": 1, "": 0}  # a file without a source is read as well
    a, b = (
        of_several_files(write(tmp_path / name, name, [[0, 0]] * 120), before | more)
        for name, more in (("a", {}), ("b", {"law.csv": 2}))
    )
    assert [len(of.problems) for of in (a, b)] == [120, 120]
    compared = evaluations.compare(a, b)
    assert (len(compared.pairs), compared.alone) == (120, 0)
    text = "\n".join(compared.lines())
    assert "b is better on 40, equal on 80, worse on 0" in text
    assert "law.csv row 0: law.csv 40" in text


def test_problems_that_a_task_numbers_alike_stay_apart(tmp_path):
    """A task of one's own may give every problem row 0; the cursor still tells them apart."""
    path = write(tmp_path / "a", "a", [[0, 1], [1, 1], [0, 0]])
    responses = path.with_suffix(".jsonl.gz")
    text = gzip.decompress(responses.read_bytes()).decode()
    for row in range(3):
        text = text.replace(
            f'"row": {row}, "ground_truth": "{row}"',
            f'"row": 0, "ground_truth": "1", "cursor": {row}',
        )
    responses.write_bytes(gzip.compress(text.encode()))
    (a,) = evaluations.read(path)
    assert [problem.mean for problem in a.problems.values()] == [0.5, 1, 0]


def test_one_file_under_two_names_is_compared(tmp_path):
    of = {}
    for name in ("old.jsonl", "copy.jsonl"):
        path = write(tmp_path / name, name, [[1, 0]] * 3)
        of[name] = of_several_files(path, {name: 1})
    assert len(evaluations.compare(*of.values()).pairs) == 3


def test_control_characters_of_a_problem_do_not_reach_the_terminal(tmp_path):
    """The problems that moved most were printed as somebody's file has them."""
    both = []
    for name, right in (("a", 0), ("b", 1)):
        path = write(tmp_path / name, name, [[right, right]] * 2)
        responses = path.with_suffix(".jsonl.gz")
        rows = [json.loads(line) for line in gzip.decompress(responses.read_bytes()).splitlines()]
        lines = [json.dumps(row | {"prompt": "1+1?\x1b[2J\x07"}) + "\n" for row in rows]
        responses.write_bytes(gzip.compress("".join(lines).encode()))
        both += evaluations.read(path)
    shown = evaluations.compare(*both).lines()
    assert r"1+1?\x1b[2J\x07" in shown[-1]
    assert "\x1b" not in "".join(shown)


def test_a_comparison_says_which_settings_differ(tmp_path):
    common = {"path": "sums.jsonl", "top_p": 1.0, "rules": ""}
    here = {"model": "A", "temperature": 0.0, "split": "x", "max_prompt_tokens": 9}
    one = write(tmp_path / "a", "t0", [[1, 1], [1, 0]], **common | here)
    other = write(tmp_path / "b", "t1", [[1, 0], [0, 0]], **common, model="B", temperature=0.6)
    (a,), (b,) = evaluations.read(one), evaluations.read(other)
    lines = evaluations.compare(a, b).lines()
    assert lines[:4] == [
        *("a: a/0.sums.t0", "b: b/0.sums.t1"),
        *("   model: a A, b B", "   temperature: a 0.0, b 0.6"),
    ]
    assert lines[4].startswith("mean over 2 problems: a 75.0%, b 25.0%, b - a -50.0 points [")


def test_problems_that_share_row_and_answer_alone_are_told(tmp_path):
    one, other = (write(tmp_path / name, name, [[1, 0], [0, 0]]) for name in "ab")
    (a,), (b,) = evaluations.read(one), evaluations.read(other)
    assert "another prompt" not in "\n".join(evaluations.compare(a, b).lines())
    responses = other.with_name("0.sums.b.jsonl.gz")
    text = gzip.decompress(responses.read_bytes()).replace(b"1 + 0?", b"3 - 2?")
    responses.write_bytes(gzip.compress(text))
    (b,) = evaluations.read(other)
    assert "1 have another prompt in b" in "\n".join(evaluations.compare(a, b).lines())


def test_the_problems_shown_moved_most(tmp_path):
    """All are worse: the ten that lost most are shown, not those that lost least beside them."""
    one = write(tmp_path / "a", "a", [[1] * 30] * 30)
    other = write(tmp_path / "b", "b", [[1] * (29 - row) + [0] * (row + 1) for row in range(30)])
    compared = evaluations.compare(*evaluations.read(one), *evaluations.read(other))
    shown = [line for line in compared.lines() if " row " in line]
    assert [int(line.split(" row ")[1].split(":")[0]) for line in shown] == [*range(20, 30)]


def test_the_command_compares_results_of_one_set(tmp_path):
    paths = [write(tmp_path / name, name, [[1, 0], [0, 0]]) for name in "abc"]
    out = ran("-m", "dapo_jax.report", "--evaluation", *map(str, paths)).stdout.splitlines()
    assert [line for line in out if line.startswith("b: ")] == ["b: b/0.sums.b", "b: c/0.sums.c"]
    with pytest.raises(ValueError, match="nothing is compared: of sums there is one result each"):
        evaluations.compared(paths[:1])


def test_what_is_no_evaluation_is_refused(tmp_path):
    path = write(tmp_path / "a", "t1", [[1, 0]])
    other = write(tmp_path / "b", "t1", [[1, 0]], rows=[5])
    with pytest.raises(ValueError, match="have no problem in common"):
        evaluations.compare(*evaluations.read(path), *evaluations.read(other))
    responses = path.with_name("0.sums.t1.jsonl.gz")
    responses.write_bytes(responses.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"jsonl\.gz cannot be read"):
        evaluations.read(path)
    responses.unlink()
    with pytest.raises(FileNotFoundError, match=r"the responses of .* is missing"):
        evaluations.read(path)
    path.write_text("[]")
    for no_evaluation in (path, tmp_path):
        with pytest.raises(ValueError, match="is no evaluation"):
            evaluations.read(no_evaluation)
