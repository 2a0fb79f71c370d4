"""The help of a command, its refusals of wrong arguments, and configs from any folder."""

import functools
import os
import re
import subprocess
import sys

import pytest
from processes import ROOT, ran

from configs import base, tiny
from dapo_jax.cli import config_flags
from dapo_jax.setup import checks

CONFIG, WORKDIR = "--config=configs/tiny.py", "--workdir=runs/a"

given = functools.partial(ran, status=None)


def test_every_key_has_a_meaning_and_a_default_that_it_allows():
    """`--help` prints the meanings of configs/base.py; the checks take bounds and choices there."""
    for name, key in (base.KEYS | base.DATASET).items():
        assert key.meaning, name
        assert key.refusal(key.default) == "", name
        assert not key.choices or key.default in ("", *key.allowed()), name


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("algo.eps_high", -0.1, "but must be at least 0, and finite in float32"),
        ("algo.eps_high", float("nan"), "but must be at least 0, and finite in float32"),
        ("algo.eps_high", 1e39, "but must be at least 0, and finite in float32"),
        ("learner.adam_eps", 1e-40, "but must be greater than 0, and finite in float32"),
        ("rollout.top_p", 1.5, "but must be greater than 0, and at most 1"),
        ("rollout.top_k", -1, "but must be at least 0, and finite in float32; 0 is off"),
        ("seed", 2**32, "but must be at least 0, and at most 4294967295"),
        ("eval.sets.mine.k", None, ""),
        ("data.train.rules", "math", "but must be one of dapo, strict, strict_box, math_verify"),
    ],
)
def test_bounds_and_choices_are_those_of_a_keys_line(name, value, message):
    assert base.key_of(name).refusal(value) == message


def test_a_key_is_one_line(monkeypatch):
    """Default, meaning and bound of a new key reach config, flag, help and checks."""
    monkeypatch.setitem(base.KEYS, "algo.my_cap", base.Key(2.0, "cap of mine", at_least=1))
    given = ["--config=configs/tiny.py", "--config.algo.my_cap=0.5"]
    config = config_flags.read_config(given)
    assert config.algo.my_cap == 0.5
    with pytest.raises(ValueError, match=r"algo\.my_cap = 0\.5, but must be at least 1"):
        checks.check(config)
    text = config_flags.help_text(given)
    assert re.search(r"^\* algo.my_cap = 0.5 +cap of mine \(2.0\)$", text, re.M)


def test_help_lists_every_key_with_its_value():
    done = given(
        *("-m", "dapo_jax.train", "--config=configs/tiny.py:clip_higher", "--help"),
        *("--config.algo.eps_high=0.4", "--config.eval.sets.more.path=x.jsonl"),
    )
    assert done.returncode == 0, done.stderr
    shown = dict(re.findall(r"^[ *] ([a-z][\w.]+) = (.*?)(?:   .*)?$", done.stdout, re.M))
    config = tiny.get_config("clip_higher")
    config.eval.sets.more = base.dataset(path="x.jsonl")
    assert shown.keys() == {name for name, _ in base.leaves(config)}
    assert shown["rollout.group_size"] == "8"
    assert re.search(r"^\* algo.eps_high = 0.4 +Eq. 10, clip-higher \(0.28\)$", done.stdout, re.M)
    assert re.search(r"^  algo.eps_low = 0.2 +Eq. 10$", done.stdout, re.M)
    for flag in ("--config", "--workdir", "--[no]dry_run"):
        assert f"  {flag}: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([WORKDIR], "--config is missing: --config=configs/tiny.py"),
        ([CONFIG], "--workdir is missing: --workdir=runs/mine"),
        ([CONFIG, WORKDIR, "config.num_steps=3"], "'config.num_steps=3' is no flag: flags begin"),
        ([CONFIG, "--workdir=gs://b/r"], "a folder of this machine; --config.checkpoint.directory"),
    ],
)
def test_a_wrong_command_line_ends_with_one_line(arguments, message):
    """A sweep with `config.num_steps=3` ran the config as it was, in silence."""
    done = given("-m", "dapo_jax.train", *arguments)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("error: ") and message in line


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.eps_high=0.3", "Did you mean --config.algo.eps_high?"),
        ("--config.learning_rat=1", "Did you mean --config.learner.learning_rate?"),
        ("--config.eval.sets.arithmetic.top_q=1", "mean --config.eval.sets.arithmetic.top_p?"),
        ("--config.algo.gate=clip", "its name is --config.algo.policy_loss now"),
        ("--config.num_steps=3.5", "--config.num_steps=3.5: invalid literal for int()"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_the_nearest_key_of_any_section(flag, message):
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        config_flags.read_config(["--config=configs/tiny.py", flag])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("lines", "refusals"),
    [
        ("c.rollout.max_respnse_tokens = 5", ["no key 'rollout.max_respnse_tokens' (Did you mean"]),
        ("c.algoo.x = 1", ["'algoo' Did you mean \"algo\""]),
        (
            "c.mine = {'a': 1}; c.seed = 'x'",
            ["no key 'mine.a'", "seed = 'x', but must be of type int"],
        ),
        (
            "c.rollout = 5; c.num_steps = 1.5",
            ["rollout = 5, but is a section", "num_steps = 1.5, but"],
        ),
        ("c.data.mixture.m = {'wieght': 2}", ["no key 'data.mixture.m.wieght' (Did you mean data"]),
        ("c.log.writers = 'wandb'", ["log.writers = 'wandb', but must be of type tuple"]),
        ("c.data.train = base.dataset(tsak='')", ["a data set has no tsak"]),
        ("return None", ["get_config returns nothing"]),
        ("c.seed = 1 / 0", ["mine.py, line 4: division by zero"]),
        ("import no_such_module", ["mine.py, line 4: No module named 'no_such_module'"]),
        ("c.seed = = 1", ["mine.py, line 4: invalid syntax"]),
    ],
)
def test_all_wrong_keys_and_types_of_a_file_are_named(tmp_path, lines, refusals):
    """A misspelt key in a file was a traceback about None, a wrong type one without the key."""
    file = tmp_path / "mine.py"
    begin = "from configs import base, tiny\ndef get_config():\n    c = tiny.get_config()\n    "
    file.write_text(f"{begin}{lines}\n    return c\n")
    with pytest.raises(ValueError, match=re.escape(str(file))) as refused:
        config_flags.read_config([f"--config={file}"])
    assert "\n" not in str(refused.value)
    for text in refusals:
        assert text in str(refused.value)


def test_a_config_is_found_from_any_folder_the_current_one_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_flags.read_config(["--config=configs/tiny.py:dapo"])
    assert config.model.path == str(ROOT / "experiments" / "tiny_base" / "checkpoint")
    for path in ("", "gs://bucket/configs", "/configs/tiny.py", "absent/x.py"):
        assert config_flags.found(path) == path
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.py").write_text(
        "from configs import tiny\n\n\ndef get_config():\n    config = tiny.get_config()\n"
        "    config.num_steps = 7\n    return config\n"
    )
    (tmp_path / "experiments" / "tiny_base" / "checkpoint").mkdir(parents=True)
    config = config_flags.read_config(["--config=configs/tiny.py"])
    assert (config.num_steps, config.model.path) == (7, "experiments/tiny_base/checkpoint")


def test_a_package_that_hides_ours_is_named(tmp_path):
    """A folder `models` of one's own was a traceback of an import."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    how = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    command = [sys.executable, "-m", "dapo_jax.train", "--config=configs/tiny.py", "--workdir=x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith(f"error: {tmp_path / 'models' / '__init__.py'} hides {ROOT / 'models'}")
