"""Evaluations of a model as it is: flags, what is fitted, intervals, comparisons, the page."""

import json
import os

import jax
import numpy as np
import pytest

from configs import any_model, base, tiny
from dapo_jax import evaluate, sample
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
