"""Evaluations of a model as it is: flags, what is fitted, how a question is asked."""

import commands
import pytest
from ml_collections import ConfigDict

from configs import base, tiny
from dapo_jax import sample
from dapo_jax.setup import checks, components


def test_the_commands_own_flags_are_keys_of_its_config(tmp_path):
    """Also a key of a set that --set names; the last one has the run's own config."""
    given = (
        "--model=DIR --k=4 --temperature=0.5 --max_tokens=7",
        "--config=configs/tiny.py --set=a:csv:gs://b/b.csv --set=g:my.tasks:Mine:c --config.seed=3",
        "--model=DIR --set=g:arithmetic: --config.eval.sets.g.max_prompts=3",
        "--model=DIR --set=a:csv:b.csv --set=a:json:c.json",
        "--set=a:csv:b.csv --config.eval.top_k=20",
    )
    of_run = base.get_config()
    of_run.mesh.slices, of_run.eval.top_p, of_run.tokenizer.chat_args = 4, 0.3, {"effort": "low"}
    (tmp_path / "config.json").write_text(of_run.to_json_best_effort())
    workdir = f" --workdir={tmp_path}"
    *configs, second, own = commands.read("dapo_jax.evaluate", *(it + workdir for it in given))
    model, run, named, own = map(ConfigDict, (*configs, own))
    assert (model.model.path, model.model.family) == ("DIR", "")  # any_model's
    assert (model.eval.samples_per_prompt, model.eval.temperature) == (4, 0.5)
    assert (model.rollout.max_response_tokens, model.eval.top_p) == (7, 0.95)
    assert {*run.eval.sets} == {"arithmetic", "a", "g"}
    assert (run.eval.sets.a.kind, run.eval.sets.a.path, run.seed) == ("csv", "gs://b/b.csv", 3)
    assert (run.eval.sets.g.task, run.eval.sets.g.path) == ("my.tasks:Mine", "c")
    assert (named.eval.sets.g.task, named.eval.sets.g.max_prompts) == ("arithmetic", 3)
    assert "each set has a name of its own" in second
    assert (own.mesh.slices, own.eval.top_p, own.eval.top_k) == (4, 0.3, 20)
    assert "a" in own.eval.sets
    assert own.tokenizer.chat_args.effort == "low"


def test_temperature_0_is_greedy():
    config = tiny.get_config()
    config.eval.sets.arithmetic.update(temperature=0.0, k=1)
    checks.check(config)
    (stream,) = components.eval_streams(config, components.tokenizer(config), {})
    sampling = stream.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 1)


@pytest.mark.parametrize(
    ("settings", "template"),
    [
        ({"kind": "arithmetic"}, "dapo"),
        ({"path": "a.csv", "task": "math"}, "dapo"),
        ({"path": "a.csv", "environment": "shop:Shop"}, "none"),
        ({"path": "a.csv", "rules": "strict_box"}, "boxed"),
        ({"path": "a.csv", "template": "Q: {problem}"}, "Q: {problem}"),
        ({"task": "chains:Chains"}, "none"),
    ],
)
def test_a_question_is_asked_as_training_asks(settings, template):
    config = base.get_config()
    config.data.train = base.dataset(**settings)
    assert sample.trained_with(config) == template
