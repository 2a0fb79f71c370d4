"""Evaluations of a model as it is: flags, what is fitted, how a question is asked."""

import json

import numpy as np
import pytest
from ml_collections import ConfigDict
from processes import ran

from configs import base, tiny
from dapo_jax import evaluate, sample
from dapo_jax.evaluation import settings_of
from dapo_jax.logs import record
from dapo_jax.setup import checks, components, policy
from dapo_jax.tasks.readers import templated
from dapo_jax.types import Example, Prompt
from tests import quick

PROGRAM = """
import json, runpy, sys
from absl import flags
from dapo_jax.cli import command
def run(main):
    command.parse_flags(sys.argv)
    print(flags.FLAGS.config.to_json_best_effort().replace("\\n", ""))
command.run, common = run, set(flags.FLAGS)
commands, workdir = json.loads(sys.argv[1]), sys.argv[2]
for given in commands:
    sys.argv = ["evaluate", *given, f"--workdir={workdir}"]
    try:
        runpy.run_module("dapo_jax.evaluate", run_name="__main__")
    except (ValueError, SystemExit) as error:
        print(json.dumps(str(error)))
    for flag in set(flags.FLAGS) - common:
        delattr(flags.FLAGS, flag)
"""


def test_the_commands_own_flags_are_keys_of_its_config(tmp_path):
    """It defines them where it is run: here several times in one process."""
    given = (
        *("--model=DIR --k=4 --temperature=0.5 --max_tokens=7",),
        *("--config=configs/tiny.py --set=a:csv:b.csv --set=g:gsm8k:c --config.seed=3",),
        # A key of a set that --set names.
        *("--model=DIR --set=g:arithmetic: --config.eval.sets.g.max_prompts=3",),
        *("--model=DIR --set=a:csv:b.csv --set=a:json:c.json",),
        # The run's own config.
        "--set=a:csv:b.csv --config.eval.top_k=20",
    )
    of_run = base.get_config()
    of_run.mesh.slices, of_run.eval.top_p, of_run.tokenizer.chat_args = 4, 0.3, {"effort": "low"}
    (tmp_path / "config.json").write_text(of_run.to_json_best_effort())
    commands = json.dumps([it.split() for it in given])
    printed = ran("-c", PROGRAM, commands, str(tmp_path)).stdout
    *configs, second, own = map(json.loads, printed.splitlines())
    model, run, named, own = map(ConfigDict, (*configs, own))
    assert (model.model.path, model.model.family) == ("DIR", "")  # any_model's
    assert (model.eval.samples_per_prompt, model.eval.temperature) == (4, 0.5)
    assert (model.rollout.max_response_tokens, model.eval.top_p) == (7, 0.95)
    assert {*run.eval.sets} == {"arithmetic", "a", "g"}
    assert (run.eval.sets.a.kind, run.eval.sets.a.path, run.seed) == ("csv", "b.csv", 3)
    assert (named.eval.sets.g.task, named.eval.sets.g.max_prompts) == ("arithmetic", 3)
    assert "each set has a name of its own" in second
    assert (own.mesh.slices, own.eval.top_p, own.eval.top_k) == (4, 0.3, 20)
    assert "a" in own.eval.sets
    assert own.tokenizer.chat_args.effort == "low"


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("aime:math:a.jsonl", {"kind": "math", "path": "a.jsonl"}),
        ("g:gsm8k:gs://bucket/b.jsonl", {"kind": "gsm8k", "path": "gs://bucket/b.jsonl"}),
        ("mine:my.tasks:Mine:c.csv", {"task": "my.tasks:Mine", "path": "c.csv"}),
        ("sums:arithmetic:", {"task": "arithmetic", "path": ""}),
    ],
)
def test_a_set_is_named_with_task_and_path(text, settings):
    assert evaluate.named_set(text) == (text.partition(":")[0], settings)


def test_the_example_reads_a_published_file(tmp_path):
    """MATH-500 and AI-MO's AIME have their fields under these names."""
    path = tmp_path / "aime24.jsonl"
    path.write_text(json.dumps({"problem": "1 + 1?", "answer": "002"}) + "\n")
    config = tiny.get_config()
    name, settings = evaluate.named_set(f"aime24:math:{path}")
    config.eval.sets = {name: base.dataset(**settings)}
    data = components.load_data(config, components.tokenizer(config), training=False)
    (prompt,) = data.eval_sets["aime24"].prompts
    assert prompt.example.answer == "2"


def test_another_model_or_tokenizer_has_files_of_its_own():
    """One --workdir for two models: the second must not overwrite the first's results."""
    config, labels = tiny.get_config(), set()
    for changes in ({}, {"model.path": "another"}, {"tokenizer.chat": "template"}):
        config.update_from_flattened_dict(changes)
        (settings,) = settings_of(config, of_model=True).values()
        labels.add(record.settings_label(settings))
    assert len(labels) == 3


def test_temperature_0_is_greedy_and_needs_one_response():
    config = tiny.get_config()
    config.eval.sets.arithmetic.update(temperature=0.0, k=1)
    checks.check(config)
    (stream,) = components.eval_streams(config, components.tokenizer(config))
    sampling = stream.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 1)
    config.eval.sets.arithmetic.k = 2
    with pytest.raises(ValueError, match=r"its 2 responses to a problem would all be the same"):
        checks.check(config)


@pytest.mark.parametrize(
    ("settings", "template"),
    [
        ({"kind": "arithmetic"}, "dapo"),
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
def test_two_prompts_of_one_text_differ_by_their_cursor(monkeypatch):
    monkeypatch.setattr("jax.jit", quick.jit)
    config = tiny.get_config()
    config.rollout.max_response_tokens, config.rollout.block_tokens = 48, 4
    it = policy.open_policy(config, None, lambda *_: None)
    sampling = components.sampling(config, it.tokenizer)
    messages = templated("7+5*2-3", "dapo")
    ids = np.array(it.tokenizer.encode_chat(messages), np.int32)

    def tokens(sampling, cursor):
        prompt = Prompt(ids, Example(tuple(messages), "", "typed", cursor))
        responses = sample.answers(it, sampling, prompt, n=2, seed=0)
        return [response.tokens_T.tolist() for response in responses]

    assert tokens(sampling, 0) != tokens(sampling, 1)
    one, two = tokens(components.sampling(config, it.tokenizer, temperature=0), 0)
    assert one == two
