"""Refusals before anything starts: each with what was given, and words of its one line.

Refusals that need a run, its files or data are beside those.
"""

import re

import pytest
from small_config import task_of

from configs import base, tiny
from dapo_jax import evaluate
from dapo_jax.checkpoints.begun import Parent
from dapo_jax.cli import config_flags
from dapo_jax.logs import writers
from dapo_jax.setup import checks, components, policy, start
from dapo_jax.sweep import plan
from sharding.mesh import make_mesh


def config_with(settings):
    config = tiny.get_config()
    checks.check(config)
    if any("mixture" in key for key in settings):
        config.data.mixture.more = base.dataset(path="x.jsonl")
    config.update_from_flattened_dict(settings)
    return config


def setting(settings):
    checks.check(config_with(settings))


def program(settings):
    config = config_with(settings)
    checks.check(config)
    components.programs(config, 384)


def key(value):
    if message := base.key_of(value[0]).refusal(value[1]):
        raise ValueError(message)


def flag(text):
    config_flags.read_config(["--config=tests/small_config.py", *text.split()])


def task(settings):
    task_of(**settings).load()


def beginning(settings):
    start.check(config_with(settings))


def writer(name):
    beginning({"log.writers": (name,)})


def training(settings):
    """Refuses what training lacks; what reads a run needs neither its loss nor its metrics."""
    config = tiny.get_config()
    config.update_from_flattened_dict(settings)
    start.check(config, training=False)
    start.check(config)


def stepped(step):
    policy.load_policy(tiny.get_config(), None, step=step)


def sweep(changes):
    how = {"config": "configs/tiny.py", "settings": {}, "grid": (), "named": (), "seeds": "2"}
    plan.make(**how | {"start": ""} | changes)


AT_ONCE = {"algo.overlong_cache_tokens": 81, "updates_per_step": 5, "seed": -1}
OF_CONFIG = {"on_bad_row": "skip", "path": "a"}
LONG = {"rollout.max_response_tokens": 40_000, "learner.row_tokens": 0}
UNREAD = ["algo.policy_loss=none,clip", "algo.eps_high=0.2,0.3"]
BY_LEARNER = {"algo.tis_cap": 2.0, "algo.old_logprobs": "learner"}
COUNTDOWN, NEW = "countdown:Countdown", "--config.eval.sets.new.path=a.csv --config.eval.sets."
FINITE, CACHE = "but must be at least 0, and finite in float32", "rollout.cache_mib"
A_SET, TWICE = "NAME:TASK:PATH, for instance", ["algo.eps_high=0.2", "algo.eps_high=0.3"]
OF_A_RUN = "^--start is '.*', but must be run:DIR@STEP, a run's checkpoint$"
REFUSED = [
    (setting, {"algo.tis_cap": 2.0}, r"tis_cap = 2\.0 .*old_logprobs = 'sampler'; set that to"),
    (setting, BY_LEARNER | {"algo.ratio": "sequence"}, "tis_cap = 2.0 is for single .*'sequence'"),
    (setting, {"algo.eps_low": 1.0}, r"algo\.eps_low = 1\.0, but .*'cispo'"),
    (setting, {"algo.loss_aggregation": "token-mean"}, "token-mean.*token_mean, sequence_mean"),
    (setting, {"learner.row_tokens": 174}, "learner.row_tokens = 174.*175"),
    (setting, {"rollout.max_generation_batches": 1, "rollout.generation_prompts": 24}, "24 prom"),
    (program, {"learner.lora_rank": 8, "learner.lora_targets": ("q", "qq")}, r"\('q', 'qq'\), but"),
    (program, {"learner.lora_rank": 8, "learner.lora_targets": ()}, r"targets = \(\), but LoRA of"),
    (setting, {"data.train.weight": 0.0}, "weight = 0, and no set of data.mixture has a"),
    (setting, {"eval.sets.arithmetic.weight": 1.0}, "arithmetic.weight is set, but is for train"),
    (setting, {"data.mixture.more.k": 3}, "more.k is set, but is for evaluation sets"),
    (setting, {"eval.sets.arithmetic.rules": "dappo"}, "'dappo', but must be one of dapo, strict"),
    (setting, {"eval.sets.arithmetic.temperature": 0.0}, "its 8 responses .* all be the same"),
    (setting, AT_ONCE, r"\(1\).*seed = -1.*updates_per_step = 5.*\(3\).* 81 exc"),
    (program, {"rollout.page_tokens": 20}, "20 is not a multiple of .*block_tokens = 8"),
    (program, {"mesh.model": 4}, "mesh.model = 4 does not divide the model's 2 key/value heads"),
    (program, {CACHE: 1}, "= 1 does not hold .* 96 tokens and .* 80 on a device; 2 does"),
    (key, ("algo.eps_high", -0.1), FINITE),
    (key, ("algo.eps_high", 1e39), FINITE),
    (key, ("learner.learning_rate", float("nan")), "but must be"),
    (key, ("learner.learning_rate", 1e6), "but must be"),
    (key, ("learner.adam_eps", 1e-40), "but must be greater than 0, and finite in float32"),
    (key, ("rollout.top_p", 1.5), "but must be greater than 0, and at most 1"),
    (key, ("seed", 2**32), "but must be at least 0, and at most 4294967295"),
    (training, {"algo.advantage_scale": "nowhere:rloo"}, "scale = 'nowhere:rloo', which cannot be"),
    (training, {"log.metrics": ("nowhere:spread",)}, "has 'nowhere:spread', which cannot be"),
    (flag, "--config.eps_high=0.3", r"Did you mean --config\.algo\.eps_high\?"),
    (sweep, {"grid": ["eps_hihg=0.2"]}, "no key 'eps_hihg'.*mean --config.algo.eps_high"),
    (flag, "--config.eval.sets.arithmetic.top_q=1", "mean --config.eval.sets.arithmetic.top_p"),
    (flag, "--config.algo.gate=clip", "its name is --config.algo.policy_loss now"),
    (flag, f"{NEW}new.promt_field=x", "promt_field.*Did you mean .*prompt_field"),
    (flag, f"{NEW}math-500.k=1", "sets.math-500: .* a name of letters, digits and _"),
    (flag, f"{NEW}arithmatic.count=3", r"has no such set \(Did you mean arithmetic\?"),
    (flag, "--config.data.trian.args.n=4", r"no key 'data.trian.args.n'.*data\.train\.args\?"),
    (flag, "--config.data.mixture.more.weight=2", "more: the config has no such set; a new"),
    (task, {"task": "arithmetik"}, "data.train.task = 'arithmetik': there is no such task. Built"),
    (task, {"task": "nowhere.x:Y"}, "which cannot be imported .in the working directory or on PY"),
    (task, {"task": "countdown:Count"}, "cannot be imported .*no attribute 'Count'"),
    (task, {"task": "countdown:ANSWER"}, "'countdown:ANSWER', which has no method load, grade"),
    (task, {"task": "reasoning_gym"}, r"missing a required.*: 'name' \(data.train.args\)"),
    (task, {"task": COUNTDOWN, "args": {"number": 4}}, r"'number' .*; it takes \(count: int, "),
    (task, {"kind": "arithmetic", "path": "sums.csv"}, "= 'sums.csv', but .* takes no path"),
    (task, {"task": COUNTDOWN, "answer_field": "sum"}, r"takes no answer_field .*answer_field=\)"),
    (task, {"task": COUNTDOWN, "args": OF_CONFIG}, "args has on_bad_row, path, which the"),
    (task, {"kind": "xlsx", "path": "x.csv"}, "= 'xlsx': must be one of dapo_parquet, .*arithmet"),
    (beginning, LONG | {"model.preset": "0.5b"}, r"32768 positions.*model\.preset"),
    (writer, "wandb", "'wandb', but that package is not installed: pip install .wandb>=0.19,<1"),
    (writer, "mlflow", r"has 'mlflow'; give one of tensorboard, wandb, trackio, or \"module:Class"),
    (writer, "no_such_module:Class", "cannot be imported .*: No module named 'no_such_module'"),
    (writer, f"{__name__}:pytest", "has no method step, evaluation, close"),
    (sweep, {"grid": ["algo.eps_high=-1"]}, "arm 'eps_high=-1': .* = -1.0, but must be"),
    (sweep, {"grid": ["preset=dapo,naive_gpro"]}, "arm 'naive_gpro': .*did you mean 'naive_grpo'"),
    (sweep, {"grid": UNREAD}, "none.eps_high=0.2' and .*=0.3' are equal: .*= clip or cispo"),
    (sweep, {"grid": TWICE}, "have algo.eps_high twice"),
    (sweep, {"grid": ["seed=1,2"]}, "give --seeds=5"),
    (sweep, {"named": ["a: num_steps=2", "a: num_steps=3"]}, "'a' cannot name .* or two arms"),
    (sweep, {"named": ["a/b: num_steps=3"]}, "'a/b' cannot name an arm's folder"),
    (sweep, {"named": ["a: num_steps"]}, 'write "NAME: KEY=V KEY=V"'),
    (sweep, {"seeds": "x"}, "--seeds=x: give how many"),
    (stepped, "bets", "--step=bets: must be a number of finished steps, or best"),
    *((evaluate.named_set, text, A_SET) for text in ("a:math", ":math:path", "a:no:b.csv")),
    (evaluate.named_set, "a:nosuch:gs://bucket/b.jsonl", A_SET),
    *((Parent.parse, text, OF_A_RUN) for text in ("hf:model@2", "run:a", "run:@2", "run:a@-1")),
]


@pytest.mark.parametrize(("refuses", "given", "words"), REFUSED)
def test_it_is_refused_in_one_line(refuses, given, words, monkeypatch):
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=words) as refused:
        refuses(given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("lines", "refusals"),
    [
        ("c.rollout.max_respnse_tokens = 5", ["no key 'rollout.max_respnse_tokens' (Did you mean"]),
        ("c.algoo.x = 1", ["'algoo' Did you mean \"algo\""]),
        ("c.mine = {'a': 1}; c.seed = 'x'", ["no key 'mine.a'", "seed = 'x', but must be of type"]),
        ("c.rollout = 5", ["the config has no key 'rollout'"]),
        ("c.data.mixture.m = {'wieght': 2}", ["no key 'data.mixture.m.wieght' (Did you mean data"]),
        ("c.log.writers = 'wandb'", ["log.writers = 'wandb', but must be of type tuple"]),
        ("c.data.train = base.dataset(tsak='')", ["a data set has no tsak"]),
        ("return None", ["get_config returns nothing"]),
        ("import no_such_module", ["mine.py, line 4: No module named 'no_such_module'"]),
        ("c.seed = = 1", ["mine.py, line 4: invalid syntax"]),
    ],
)
def test_all_wrong_keys_and_types_of_a_config_file_are_named(tmp_path, lines, refusals):
    file = tmp_path / "mine.py"
    begin = "from configs import base, tiny\ndef get_config():\n    c = tiny.get_config()\n    "
    file.write_text(f"{begin}{lines}\n    return c\n")
    with pytest.raises(ValueError, match=re.escape(str(file))) as refused:
        config_flags.read_config([f"--config={file}"])
    said = str(refused.value)
    assert "\n" not in said and all(text in said for text in refusals)


def test_too_little_data_and_wrong_batches_are_refused_before_anything_compiles():
    config = tiny.get_config()
    tokenizer = components.tokenizer(config)
    config.data.train.count = 20
    with pytest.raises(ValueError, match=r"20 usable prompts.*generation_prompts = 48"):
        components.load_data(config, tokenizer, training=True)
    config.data.mixture.more = base.dataset(kind="arithmetic", count=20, seed=3, weight=3.0)
    config.data.train.count = 60
    message = r"more has 20 usable prompts, fewer than its part, 75.0%, of one .* or data.mixture"
    with pytest.raises(ValueError, match=message):
        components.load_data(config, tokenizer, training=True)
    config.learner.micro_batch_rows = 18
    message = r"micro_batch_rows = 18 .* data 4 = 4 groups.*nearest.* 16"
    with pytest.raises(ValueError, match=message):
        checks.check_divides(config, make_mesh(data=4, model=1))
    checks.check_divides(config, make_mesh(data=2, model=2))
