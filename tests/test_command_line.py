"""What a command says of its keys, and how it reads settings as other programs have them."""

import os
import pathlib
import re
import subprocess
import sys
import time

import pytest
from absl import flags

from configs import base, tiny
from dapo_jax.run import arguments, places, recipe_flags, recipe_help, words

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMANDS = ("train", "evaluate", "sweep", "preflight")
KNOWN = {
    "workdir": flags.Flag(flags.ArgumentParser(), flags.ArgumentSerializer(), "workdir", None, ""),
    "set": flags.Flag(flags.ArgumentParser(), flags.ArgumentSerializer(), "set", None, ""),
    "distributed": flags.BooleanFlag("distributed", False, ""),
}


def given(*command: str, cwd=ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Gives a command and returns what it printed."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


# --help


def test_every_key_of_the_base_recipe_has_a_comment():
    """`--help` shows them: add one to the key's line in configs/base.py, or to `dataset`'s."""
    names = [name for name in arguments.keys(base.get_config()) if ".args" not in name]
    leaves = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    sections = ("data.mixture", "eval.sets", "data.train.args")
    without = [n for n in leaves if n not in sections and not recipe_help.comment_of(n)]
    assert len(leaves) > 80
    assert without == []


def test_comments_are_those_behind_a_key_or_above_it():
    assert recipe_help.comment_of("algo.eps_high") == "Eq. 10, clip-higher"
    assert recipe_help.comment_of("algo.loss").startswith('"dapo" is Eq. 8, or what the four')
    assert recipe_help.comment_of("eval.samples_per_prompt") == "k of mean@k, pass@k, maj@k"
    assert recipe_help.comment_of("eval.sets.mine.count") == "of generated problems."
    assert recipe_help.comment_of("data.train.weight").startswith("of a training set beside others")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_key_with_its_value_before_anything_heavy_is_imported(command):
    start = time.monotonic()
    done = given(
        *("-X", "importtime", "-m", f"dapo_jax.{command}", "--config=configs/tiny.py:clip_higher"),
        *("--help", "algo.eps_high=0.4", "--config.eval.sets.more.path=x.jsonl"),
    )
    assert done.returncode == 0
    assert time.monotonic() - start < 10  # 0.3 s on an idle core
    assert not re.search(r"\| +(jax|flax|optax|orbax|matplotlib|rich)$", done.stderr, re.M)
    shown = dict(re.findall(r"^[ *] ([a-z][\w.]+) = (.*?)(?:   .*)?$", done.stdout, re.M))
    config = tiny.get_config("clip_higher")
    config.eval.sets.more = base.dataset(path="x.jsonl")
    names = list(arguments.keys(config))
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


# Settings as other programs have them


@pytest.mark.parametrize(
    "word",
    [
        "algo.eps_high=0.3",
        "config.algo.eps_high=0.3",
        "++algo.eps_high=0.3",
        "--algo.eps_high=0.3",
        "--config.algo.eps_high=0.3",
    ],
)
def test_what_can_mean_one_thing_only_is_that_flag(word):
    assert words.understood([word], KNOWN, tiny.get_config()) == ["--config.algo.eps_high=0.3"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("seed=3", "--config.seed=3"),
        ("eval.sets.mine.path=a b=c.jsonl", "--config.eval.sets.mine.path=a b=c.jsonl"),
        ("data.train.levels=(1,2)", "--config.data.train.levels=(1,2)"),
        ("--config.num_stepss=3", "--config.num_stepss=3"),  # left to the flags, which refuse it
        ("num_stepss=3", "num_stepss=3"),
        ("--workdir=a", "--workdir=a"),
        ("workdir=a", "workdir=a"),
    ],
)
def test_a_word_is_a_key_or_left_to_the_flags(word, meant):
    assert words.understood([word], KNOWN, tiny.get_config()) == [meant]


def test_the_value_of_a_flag_is_no_word():
    """A sweep's `--set algo.eps_high=0.2,0.28` names a key, and is no setting of every run."""
    line = ["--set", "algo.eps_high=0.2,0.28", "--workdir", "seed=1", "--config.seed", "7"]
    assert words.understood(line, KNOWN, tiny.get_config()) == line
    line = ["--distributed", "seed=1", "--config.algo.dynamic_sampling", "seed=2", "--", "seed=3"]
    assert words.understood(line, KNOWN, tiny.get_config()) == [
        *("--distributed", "--config.seed=1", "--config.algo.dynamic_sampling", "--config.seed=2"),
        *("--", "seed=3"),
    ]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("+algo.eps_high=0.3", "the recipe has this key already; write algo.eps_high=0.3"),
        ("+algo.eps_hihg=0.3", "cannot be added to; did you mean algo.eps_high=0.3?"),
        ("~algo.eps_high", "keys cannot be removed; set algo.eps_high=VALUE"),
        ("algo=dapo", "algo is a section of the recipe; set its keys, as algo.KEY=VALUE, or"),
        ("algo.eps_high", "has no value; write algo.eps_high=VALUE"),
        ("--multirun", "is no flag here; write python -m dapo_jax.sweep ... --set KEY=V1,V2"),
        ("-m", "is no flag here; write python -m dapo_jax.sweep ... --set KEY=V1,V2"),
        ("hydra.run.dir=runs/a", "is no flag here; write --workdir=DIR"),
        ("--config-name=tiny", "is no flag here; write --config=FILE"),
        ("preset=dapo", "is no flag here; write --config=FILE:PRESET"),
    ],
)
def test_any_other_word_of_hydras_is_refused_with_what_to_write(word, message):
    with pytest.raises(words.RefusedError) as refused:
        words.understood([word], KNOWN, tiny.get_config())
    assert str(refused.value).startswith(repr(word)) and message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_word_that_is_no_key_at_all_is_refused_with_where_they_are():
    line = arguments.leftover(["trainer.total=3"], KNOWN, tiny.get_config())
    assert line == (
        "'trainer.total=3' is no flag and would be ignored; it is no key of the recipe either; "
        "--help lists them all"
    )


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


def test_a_command_takes_the_words(tmp_path):
    """The sweep prints the commands of its runs: the word is in each of them."""
    line = ("-m", "dapo_jax.sweep", "--config=configs/tiny.py", f"--workdir={tmp_path}")
    more = ("--seeds=1", "--set", "algo.eps_low=0.1,0.2", "--launch={flags}", "num_steps=3")
    done = given(*line, *more)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--config.num_steps=3") == 2


# The first line, and folders


def test_the_first_line_is_there_before_the_imports():
    start = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "dapo_jax.train", "--config=configs/tiny.py"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr.readline() == "dapo_jax.train: reading configs/tiny.py ...\n"
        assert time.monotonic() - start < 3  # 0.05 s on an idle core
        process.kill()


def test_a_recipe_is_found_from_any_folder_the_current_one_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = recipe_flags.read_recipe(["--config=configs/tiny.py:dapo"])
    assert config.model.path == str(ROOT / "experiments" / "tiny_base" / "checkpoint")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.py").write_text(
        "from configs import tiny\n\n\ndef get_config():\n    config = tiny.get_config()\n"
        "    config.num_steps = 7\n    return config\n"
    )
    (tmp_path / "experiments" / "tiny_base" / "checkpoint").mkdir(parents=True)
    config = recipe_flags.read_recipe(["--config=configs/tiny.py"])
    assert (config.num_steps, config.model.path) == (7, "experiments/tiny_base/checkpoint")


@pytest.mark.parametrize("path", ["", "gs://bucket/configs", "/configs/tiny.py", "absent/x.py"])
def test_other_paths_stay_as_they_are(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert places.found(path) == path
