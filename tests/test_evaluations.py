"""Evaluations of a model as it is: flags, what is fitted, intervals, comparisons, the page."""

import gzip
import json
import os

import jax
import numpy as np
import pytest
from scipy.special import stdtrit

from configs import any_model, base, tiny
from dapo_jax import evaluate, sample
from dapo_jax.report import evaluations
from dapo_jax.report.statistics import paired_interval, paired_share_interval, share_interval
from dapo_jax.run import arguments, build, checks, command, policy, record
from dapo_jax.tasks.readers import templated
from dapo_jax.types import Response
from tests import quick

MODEL = "experiments/tiny_base/checkpoint"
SHORT = {"model": "model.path", "set": "eval.sets", "k": "eval.samples_per_prompt"}


def expand(*given):
    return arguments.expanded(given, SHORT, recipe="any.py")


def test_short_flags_are_the_keys_own():
    assert expand("--config=mine.py", "--k=8", "--debug", "-k", "4") == [
        "--config=mine.py",
        "--config.eval.samples_per_prompt=8",
        "--debug",
        "--config.eval.samples_per_prompt=4",
    ]
    assert expand("--model=DIR") == ["--model=DIR", "--config=any.py", "--config.model.path=DIR"]
    assert expand("--model=DIR", "--config=mine.py") == [
        "--model=DIR",
        "--config.model.path=DIR",
        "--config=mine.py",
    ]


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("aime:math:a.jsonl", {"kind": "math", "path": "a.jsonl"}),
        ("g:gsm8k:gs://bucket/b.jsonl", {"kind": "gsm8k", "path": "gs://bucket/b.jsonl"}),
        ("mine:my.tasks:Mine:c.csv", {"task": "my.tasks:Mine", "path": "c.csv"}),
        ("sums:arithmetic:", {"task": "arithmetic"}),
    ],
)
def test_a_set_is_named_with_task_and_path(text, flags):
    name = text.partition(":")[0]
    expected = [f"--config.eval.sets.{name}.{key}={value}" for key, value in flags.items()]
    assert expand("--config=mine.py", f"--set={text}") == ["--config=mine.py", *expected]


def test_the_example_reads_a_published_file(tmp_path):
    """MATH-500 and AI-MO's AIME have their fields under these names."""
    path = tmp_path / "aime24.jsonl"
    path.write_text(json.dumps({"problem": "1 + 1?", "answer": "002"}) + "\n")
    given = expand("--config=configs/any_model.py", f"--set=aime24:math:{path}")
    config = command.read_recipe([*given, f"--config.model.path={MODEL}"])
    policy.fit_model(config)
    data = build.load_data(config, build.tokenizer(config), training=False)
    (prompt,) = data.eval_sets["aime24"].dataset.prompts
    assert prompt.example.answer == "2"


@pytest.mark.parametrize(
    "text",
    ["", "name", "name:math", ":math:path", "a:nosuch:b.jsonl", "a:nosuch:gs://bucket/b.jsonl"],
)
def test_a_set_that_cannot_be_read_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="must be NAME:TASK:PATH, for instance"):
        expand("--config=mine.py", f"--set={text}")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--model=DIR", "--set=a:csv:b.csv", "--set=a:json:c.json"], "a second set 'a'"),
        (["--set=a:csv:b.csv"], "--set needs --model=DIR, or the recipe of a run"),
        (["--model="], "--model has no value"),
    ],
)
def test_short_flags_that_do_not_fit_are_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        expand(*given)


@pytest.mark.parametrize("share", [[0, 1, 1, 1, 0, 1, 1], [0.25, 0.5, 1, 0.75, 0.5]])
def test_the_interval_of_shares_is_wilsons(share):
    """Its bounds q solve (p - q)^2 = t^2 q (1 - q) / n', n' = p (1 - p) / (v / P)."""
    interval = share_interval(share, samples=1_000)
    P, p = len(share), np.mean(share)
    m = {7: 2, 5: 4}[P]  # two problems are not solved at all; one is solved always
    v = (m * np.var(share, ddof=1) + p * (1 - p)) / (m + 1)
    n, t = p * (1 - p) / (v / P), stdtrit(P - 1, 0.975)
    assert 0 < interval.low < p < interval.high < 1
    for q in (interval.low, interval.high):
        assert (p - q) ** 2 == pytest.approx(t**2 * q * (1 - q) / n)


def test_the_interval_of_equal_shares_is_no_point():
    """All problems right: Student's interval would say that the next ones are too, surely."""
    assert share_interval([1.0] * 30, samples=30).low == pytest.approx(0.878, abs=1e-3)
    assert share_interval([0.0] * 30, samples=30).high == pytest.approx(0.122, abs=1e-3)
    half = share_interval([0.5] * 30, samples=60)  # as wide as 60 coins', t in place of z
    assert half.high - half.low == pytest.approx(0.256, abs=1e-3)
    one = share_interval([0.5], samples=2)
    assert (one.low, one.high) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("P", "k", "a", "b"),
    [
        (30, 32, 0.05, 3),
        (30, 32, 0.1, 2),
        (30, 32, 0.15, 2),
        (30, 32, 0.3, 0.7),
        (500, 4, 0.8, 0.5),
    ],
)
def test_the_interval_of_shares_covers_hard_and_easy_sets(P, k, a, b):
    """Of 30 problems of which one or two are ever solved it held the truth 84 % of the time.

    It took the spread over problems from those few as it was. Each problem is solved with a
    probability from Beta(a, b). Where hundreds of problems are solved now and then, the interval
    must not be wider than Student's by more than 2 %.
    """
    rng, hit, width, students = np.random.default_rng(0), 0, 0.0, 0.0
    for _ in range(1_000):
        share_P = rng.binomial(k, rng.beta(a, b, P)) / k
        interval = share_interval(share_P, samples=P * k)
        hit += interval.low <= a / (a + b) <= interval.high
        assert 0 <= interval.low <= share_P.mean() <= interval.high <= 1
        width += interval.high - interval.low
        students += 2 * stdtrit(P - 1, 0.975) * share_P.std(ddof=1) / np.sqrt(P)
    assert hit >= 940
    assert P < 500 or width < 1.02 * students


@pytest.mark.parametrize(
    ("P", "k", "a", "b", "gain"),
    [(30, 32, 0.05, 3, 2), (30, 32, 0.1, 2, 1.5), (30, 32, 0.3, 0.7, 2), (500, 4, 0.8, 0.5, 1.2)],
)
def test_the_interval_of_a_comparison_covers_hard_and_easy_sets(P, k, a, b, gain):
    """Of 30 problems of which few ever move, Student's held the true difference 83 % of the time.

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
    assert [(delta, key[1]) for delta, key in compared.deltas] == [(1.0, 0), (0.0, 1), (-0.5, 2)]
    assert compared.counts == (1, 1, 1)
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
    assert all(len(problem.rows) == 2 for problem in a.problems.values())
    compared = evaluations.compare(a, b)
    assert (len(compared.deltas), compared.alone, compared.counts) == (120, 0, (40, 80, 0))
    assert "law.csv row 0: law.csv 40" in "\n".join(compared.lines())


def test_problems_that_a_task_numbers_alike_stay_apart(tmp_path):
    """A task of one's own may give every problem row 0; the cursor still tells them apart."""
    path = write(tmp_path / "a", "a", [[0, 0]] * 3)
    responses = path.with_suffix(".jsonl.gz")
    text = gzip.decompress(responses.read_bytes()).decode()
    for row in range(3):
        text = text.replace(
            f'"row": {row}, "ground_truth": "{row}"',
            f'"row": 0, "ground_truth": "1", "cursor": {row}',
        )
    responses.write_bytes(gzip.compress(text.encode()))
    (a,) = evaluations.read(path)
    assert [len(problem.rows) for problem in a.problems.values()] == [2, 2, 2]


def test_one_file_under_two_names_is_compared(tmp_path):
    of = {}
    for name in ("old.jsonl", "copy.jsonl"):
        path = write(tmp_path / name, name, [[1, 0]] * 3)
        of[name] = of_several_files(path, {name: 1})
    assert len(evaluations.compare(*of.values()).deltas) == 3


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
    common = {"path": "sums.jsonl", "split": "train", "top_p": 1.0, "rules": ""}
    one = write(tmp_path / "a", "t0", [[1, 1], [1, 0]], **common, model="A", temperature=0.0)
    other = write(tmp_path / "b", "t1", [[1, 0], [0, 0]], **common, model="B", temperature=0.6)
    (a,), (b,) = evaluations.read(one), evaluations.read(other)
    first, *_ = evaluations.compare(a, b).said()
    assert first.splitlines()[2:] == ["   model: a A, b B", "   temperature: a 0.0, b 0.6"]
    page = evaluations.write_page([one, other]).read_text()
    assert "path = sums.jsonl, top_p = 1.0, model = A, temperature = 0.0</p>" in page


def test_problems_that_share_row_and_answer_alone_are_told(tmp_path):
    one, other = (write(tmp_path / name, name, [[1, 0], [0, 0]]) for name in "ab")
    (a,), (b,) = evaluations.read(one), evaluations.read(other)
    assert "another prompt" not in "\n".join(evaluations.compare(a, b).said())
    responses = other.with_name("0.sums.b.jsonl.gz")
    text = gzip.decompress(responses.read_bytes()).replace(b"1 + 0?", b"3 - 2?")
    responses.write_bytes(gzip.compress(text))
    (b,) = evaluations.read(other)
    assert "1 have another prompt in b" in "\n".join(evaluations.compare(a, b).said())


def test_the_problems_shown_moved_most(tmp_path):
    """All are worse: the ten that lost most are shown, not those that lost least beside them."""
    one = write(tmp_path / "a", "a", [[1] * 30] * 30)
    other = write(tmp_path / "b", "b", [[1] * (29 - row) + [0] * (row + 1) for row in range(30)])
    compared = evaluations.compare(*evaluations.read(one), *evaluations.read(other))
    shown = [line for line in compared.lines() if " row " in line]
    assert [int(line.split(" row ")[1].split(":")[0]) for line in shown] == [*range(20, 30)]


def test_the_page_shows_responses_as_text(tmp_path):
    paths = [write(tmp_path / name, name, [[1, 0], [0, 0]]) for name in "ab"]
    page = evaluations.write_page(paths).read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>" not in page
    assert "Compared, problem by problem" in page
    assert "Compared" not in evaluations.write_page(paths[:1]).read_text()


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


def fitted(prompt_tokens, requests, **changes):
    config = any_model.get_config()
    config.model.path = MODEL
    config.update_from_flattened_dict(changes)
    policy.fit_model(config)
    policy.fit_lengths(config, prompt_tokens)
    policy.fit_cache(config, requests)
    checks.check(config)
    return config


def slots(config):
    """Of all groups of devices."""
    engine = build.programs(config, 384).engine
    return engine.cache.slots * engine.shards


def test_a_model_without_a_recipe_gets_its_lengths_and_cache(monkeypatch):
    config = fitted(100, 200)
    assert (config.model.family, config.model.compute_dtype) == ("qwen2", "float32")
    r = config.rollout
    assert (r.max_prompt_tokens, r.max_response_tokens) == (100, 20_480)
    assert slots(config) >= 200
    assert fitted(30_000, 1).rollout.max_response_tokens == 32_768 - 30_000
    assert fitted(100, 1, **{"rollout.max_response_tokens": 64}).rollout.max_response_tokens == 64

    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    share = 8 * 2**20 * jax.local_device_count() / host_bytes  # 8 MiB: fewer slots than requests
    monkeypatch.setattr(policy, "HOST_SHARE", share)
    few = fitted(100, 200, **{"rollout.max_response_tokens": 64})
    assert 1 <= slots(few) < 200


def test_a_limit_without_room_for_a_prompt_is_refused():
    with pytest.raises(ValueError, match=r"--max_tokens=32768 leaves no position for a prompt"):
        fitted(1, 1, **{"rollout.max_response_tokens": 32_768})


def test_weights_that_leave_no_room_are_named(monkeypatch):
    monkeypatch.setattr(policy, "_device_bytes", lambda: 3 * 2**20)  # 2 MiB of weights in bfloat16
    with pytest.raises(ValueError, match=r"of 20,480 \(--max_tokens\) does not fit .*mesh\.model"):
        fitted(100, 1)
    monkeypatch.setattr(policy, "_device_bytes", lambda: 2**30)
    assert slots(fitted(100, 1)) >= 1


def test_a_runs_directory_is_no_models(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    config = any_model.get_config()
    config.model.path = str(tmp_path)
    with pytest.raises(ValueError, match=r"is a run's directory, which --workdir takes"):
        policy.fit_model(config)


def test_another_model_or_tokenizer_has_files_of_its_own():
    """One --workdir for two models: the second must not overwrite the first's results."""
    config, labels = tiny.get_config(), set()
    for changes in ({}, {"model.path": "another"}, {"tokenizer.chat": "template"}):
        config.update_from_flattened_dict(changes)
        (settings,) = evaluate.settings_of(config, policy.named(config)).values()
        assert settings["model"] == config.model.path
        labels.add(record.settings_label(settings))
    assert len(labels) == 3


def test_temperature_0_is_greedy_and_needs_one_response():
    config = tiny.get_config()
    config.eval.sets.arithmetic.update(temperature=0.0, k=1)
    checks.check(config)
    (sampling,) = build.eval_samplings(config, build.tokenizer(config)).values()
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 1)
    config.eval.sets.arithmetic.k = 2
    with pytest.raises(ValueError, match=r"its 2 responses to a problem would all be the same"):
        checks.check(config)


class Letters:
    """Decodes ids as bytes of UTF-8."""

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


def test_half_a_character_is_shown_when_the_other_half_is_there():
    ids, text, added = "a\u00e9!".encode(), "", []
    for tokens in range(1, len(ids) + 1):
        response = Response(np.array(list(ids[:tokens])), np.zeros(tokens), stopped=False)
        added.append(sample.shown(text, response, Letters()))
        text += added[-1]
    assert added == ["a", "", "\u00e9", "!"]


@pytest.mark.parametrize(
    ("most", "kept", "note"),
    [(10, ["one", "two"], ""), (5, ["two"], "begins anew"), (2, [], "3 tokens, of 2 at most")],
)
def test_a_conversation_that_is_too_long_begins_anew(most, kept, note):
    config = any_model.get_config()
    config.rollout.max_prompt_tokens = most

    class Lengths:
        def encode_chat(self, messages):
            return "".join(message["content"] for message in messages)

    one, two = ({"role": "user", "content": text} for text in ("one", "two"))
    messages, said = sample.fitting(policy.Policy(config, Lengths(), None, {}), [one], [two])
    assert [message["content"] for message in messages] == kept
    assert note in said
    assert bool(note) == bool(said)


def test_closed_input_has_no_lines(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert list(sample.typed()) == []


@pytest.mark.parametrize(
    ("settings", "template"),
    [
        ({"kind": "arithmetic"}, "dapo"),
        ({"path": "a.csv"}, "dapo"),
        ({"path": "a.csv", "task": "math"}, "dapo"),
        ({"path": "a.csv", "rules": "strict_box"}, "boxed"),
        ({"path": "a.csv", "template": "Q: {problem}"}, "Q: {problem}"),
        ({"task": "chains:Chains"}, "none"),
    ],
)
def test_a_question_is_asked_as_training_asks(settings, template):
    config = base.get_config()
    config.data.train = base.dataset(**settings)
    assert sample.trained_with(config) == template


@pytest.mark.slow
def test_an_answer_grows_token_by_token(monkeypatch):
    """Each look shows a beginning of the whole; two prompts of one text differ by their cursor."""
    monkeypatch.setattr("jax.jit", quick.jit)
    config = fitted(96, 2, **{"rollout.max_response_tokens": 48})
    config.rollout.block_tokens, config.rollout.page_tokens = 4, 32
    it = policy.of_model(config, build.tokenizer(config))
    sampling = build.sampling(config, it.tokenizer)
    messages = templated("7+5*2-3", "dapo")
    looks = list(sample.answers(it, sampling, messages, n=2, cursor=0))
    whole = [response.tokens_T.tolist() for response in looks[-1]]
    assert len(looks) > 2
    for responses in looks:
        for response, tokens in zip(responses, whole, strict=True):
            assert response.tokens_T.tolist() == tokens[: len(response.tokens_T)]
    *_, other = sample.answers(it, sampling, messages, n=2, cursor=1)
    assert [response.tokens_T.tolist() for response in other] != whole
    greedy = build.sampling(config, it.tokenizer, temperature=0)
    *_, (one, two) = sample.answers(it, greedy, messages, n=2, cursor=0)
    assert one.tokens_T.tolist() == two.tokens_T.tolist()
