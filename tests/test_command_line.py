"""The help of a command, its refusals of wrong arguments, and recipes from any folder."""

import functools
import pathlib
import re

import pytest
from absl import flags
from processes import ran

from configs import base, tiny
from dapo_jax.cli import config_flags
from dapo_jax.setup import checks

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMANDS = ("train", "preflight")
KNOWN = {
    "workdir": flags.Flag(flags.ArgumentParser(), flags.ArgumentSerializer(), "workdir", None, ""),
    "set": flags.Flag(flags.ArgumentParser(), flags.ArgumentSerializer(), "set", None, ""),
    "distributed": flags.BooleanFlag("distributed", False, ""),
}


given = functools.partial(ran, status=None)


# --help


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
        ("seed", 2**32, "but must be at least 0, and at most 4294967295"),
        ("eval.sets.mine.k", -1, "but must be at least 0, and finite in float32"),
        ("eval.sets.mine.k", None, ""),
        ("data.train.rules", "", ""),
        ("data.train.rules", "math", "but must be one of dapo, strict, strict_box, math_verify"),
    ],
)
def test_bounds_and_choices_are_those_of_a_keys_line(name, value, message):
    assert base.key_of(name).refusal(value) == message


def test_a_key_is_one_line(monkeypatch):
    """Default, meaning and bound of a new key reach recipe, flag, help and checks."""
    monkeypatch.setitem(base.KEYS, "algo.my_cap", base.Key(2.0, "cap of mine", at_least=1))
    given = ["--config=configs/tiny.py", "--config.algo.my_cap=0.5"]
    config = config_flags.read_recipe(given)
    assert config.algo.my_cap == 0.5
    with pytest.raises(ValueError, match=r"algo\.my_cap = 0\.5, but must be at least 1"):
        checks.check(config)
    values = flags.FlagValues()
    config_flags.define_config(flag_values=values)
    text = config_flags.help_text(given, values, "About.")
    assert re.search(r"^\* algo.my_cap = 0.5 +cap of mine \(2.0\)$", text, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_key_with_its_value(command):
    done = given(
        *("-m", f"dapo_jax.{command}", "--config=configs/tiny.py:clip_higher", "--help"),
        *("--config.algo.eps_high=0.4", "--config.eval.sets.more.path=x.jsonl"),
    )
    assert done.returncode == 0, done.stderr
    shown = dict(re.findall(r"^[ *] ([a-z][\w.]+) = (.*?)(?:   .*)?$", done.stdout, re.M))
    config = tiny.get_config("clip_higher")
    config.eval.sets.more = base.dataset(path="x.jsonl")
    names = list(config_flags.keys(config))
    leaves = {n for n in names if not any(other.startswith(f"{n}.") for other in names)}
    assert shown.keys() == leaves - {"data.mixture"}
    assert shown["rollout.group_size"] == "8"
    assert re.search(r"^\* algo.eps_high = 0.4 +Eq. 10, clip-higher \(0.28\)$", done.stdout, re.M)
    assert re.search(r"^  algo.eps_low = 0.2 +Eq. 10$", done.stdout, re.M)
    assert "--config=FILE[:PRESET]" in done.stdout
    assert ("--workdir" in done.stdout) == (command != "preflight")


def test_help_without_a_recipe_has_the_defaults():
    text = given("-m", "dapo_jax.train", "--help").stdout
    assert re.search(r"^  algo.eps_high = 0.28 ", text, re.M)
    assert not re.search(r"^\* [a-z]", text, re.M)


def test_a_word_that_is_no_key_at_all_is_refused_with_where_they_are():
    line = config_flags.leftover(["trainer.total=3"], KNOWN, tiny.get_config())
    assert line == ("'trainer.total=3' is no flag and would be ignored; --help lists all")


@pytest.mark.parametrize(
    ("flags_", "message"),
    [
        (["--workdir=runs/a"], "--config is missing: --config=configs/tiny.py"),
        (["--config=configs/tiny.py"], "--workdir is missing: --workdir=runs/mine"),
        (["--config=configs/tyni.py"], "--config: there is no recipe 'configs/tyni.py'"),
    ],
)
def test_what_is_missing_is_named_in_one_line(flags_, message):
    done = given("-m", "dapo_jax.train", *flags_)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, f"error: {message}")


# Recipe files


@pytest.mark.parametrize(
    ("lines", "refusals"),
    [
        ("c.rollout.max_respnse_tokens = 5", ["no key 'rollout.max_respnse_tokens' (Did you mean"]),
        ("c.algoo.x = 1", [", line 4: the config has no key 'algoo'; Did you mean \"algo\""]),
        (
            "c.update({'algo': {'eps_hgh': 1.0}})",
            ["no key 'algo.eps_hgh' (Did you mean algo.eps_h"],
        ),
        (
            "c.mine = {'a': 1}; c.seed = 'x'",
            ["no key 'mine.a'", "seed = 'x', but must be of type int"],
        ),
        (
            "c.rollout = 5; c.num_steps = 1.5",
            ["rollout = 5, but is a section", "num_steps = 1.5, but"],
        ),
        (
            "c.eval.sets.arithmetic.cout = 3",
            ["no key 'eval.sets.arithmetic.cout' (Did you mean eval"],
        ),
        ("c.data.mixture.m = {'wieght': 2}", ["no key 'data.mixture.m.wieght' (Did you mean data"]),
        ("c.log.writers = 'wandb'", ["log.writers = 'wandb', but must be of type tuple"]),
        ("c.data.train = base.dataset(tsak='')", [", line 4: a data set has no tsak"]),
        ("return None", ["get_config returns nothing"]),
    ],
)
def test_all_wrong_keys_and_types_of_a_file_are_named(tmp_path, lines, refusals):
    """A misspelt key in a file was a traceback about None, a wrong type one without the key."""
    file = tmp_path / "mine.py"
    begin = "from configs import base, tiny\ndef get_config():\n    c = tiny.get_config()\n    "
    file.write_text(f"{begin}{lines}\n    return c\n")
    with pytest.raises(ValueError, match=re.escape(str(file))) as refused:
        config_flags.read_recipe([f"--config={file}"])
    assert "\n" not in str(refused.value)
    for text in refusals:
        assert text in str(refused.value)


# Folders


def test_a_recipe_is_found_from_any_folder_the_current_one_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_flags.read_recipe(["--config=configs/tiny.py:dapo"])
    assert config.model.path == str(ROOT / "experiments" / "tiny_base" / "checkpoint")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.py").write_text(
        "from configs import tiny\n\n\ndef get_config():\n    config = tiny.get_config()\n"
        "    config.num_steps = 7\n    return config\n"
    )
    (tmp_path / "experiments" / "tiny_base" / "checkpoint").mkdir(parents=True)
    config = config_flags.read_recipe(["--config=configs/tiny.py"])
    assert (config.num_steps, config.model.path) == (7, "experiments/tiny_base/checkpoint")


@pytest.mark.parametrize("path", ["", "gs://bucket/configs", "/configs/tiny.py", "absent/x.py"])
def test_other_paths_stay_as_they_are(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config_flags.found(path) == path
