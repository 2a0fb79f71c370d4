"""The help of a command, its refusals of wrong arguments, and configs from any folder."""

import re

import commands
from processes import ROOT, ran

from configs import base, tiny
from configs.compare import found
from dapo_jax.cli import config_flags

CONFIG, WORKDIR = "--config=configs/tiny.py", "--workdir=runs/a"


def test_help_lists_every_key_with_its_value():
    flags = "--help --config.algo.eps_high=0.4 --config.eval.sets.more.path=x.jsonl"
    printed = ran("-m", "dapo_jax.train", f"{CONFIG}:clip_higher", *flags.split()).stdout
    shown = dict(re.findall(r"^[ *] ([a-z][\w.]+) = (.*?)(?:   .*)?$", printed, re.M))
    config = tiny.get_config("clip_higher")
    config.eval.sets.more = base.dataset(path="x.jsonl")
    assert shown.keys() == {name for name, _ in base.leaves(config)}
    assert shown["rollout.group_size"] == "8"
    assert re.search(r"^\* algo.eps_high = 0.4 +Eq. 10, clip-higher \(0.28\)$", printed, re.M)
    assert re.search(r"^  algo.eps_low = 0.2 +Eq. 10$", printed, re.M)
    for flag in ("--config", "--workdir", "--[no]dry_run"):
        assert f"  {flag}: " in printed


def test_a_wrong_command_line_ends_with_one_line():
    wrong = {
        WORKDIR: "--config is missing: --config=configs/tiny.py",
        CONFIG: "--workdir is missing: --workdir=runs/mine",
        f"{CONFIG} {WORKDIR} config.num_steps=3": "'config.num_steps=3' is no flag: flags begin",
        f"{CONFIG} --workdir=gs://b/r": "a folder of this machine; --config.checkpoint.directory",
    }
    said = commands.read("dapo_jax.train", *wrong)
    for line, message in zip(said, wrong.values(), strict=True):
        assert line.startswith("error: ") and message in line and "\n" not in line


def test_a_config_is_found_from_any_folder_the_current_one_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_flags.read_config(["--config=configs/tiny.py:dapo"])
    assert config.model.path == str(ROOT / "experiments" / "tiny_base" / "checkpoint")
    for path in ("", "gs://bucket/configs", "/configs/tiny.py", "absent/x.py"):
        assert found(path) == path
    (tmp_path / "configs").mkdir()
    lines = ["from configs import tiny", "config = tiny.get_config()", "config.num_steps = 7"]
    lines.append("get_config = lambda: config")
    (tmp_path / "configs" / "tiny.py").write_text("\n".join(lines))
    (tmp_path / "experiments" / "tiny_base" / "checkpoint").mkdir(parents=True)
    config = config_flags.read_config(["--config=configs/tiny.py"])
    assert (config.num_steps, config.model.path) == (7, "experiments/tiny_base/checkpoint")


def test_a_package_that_hides_ours_is_named(tmp_path):
    (mine := tmp_path / "models" / "__init__.py").parent.mkdir()
    mine.touch()
    how = {"status": 1, "cwd": tmp_path, "PYTHONPATH": str(ROOT)}
    (line,) = ran("-m", "dapo_jax.train", CONFIG, WORKDIR, **how).stderr.splitlines()
    assert line.startswith(f"error: {mine} hides {ROOT / 'models'}")
