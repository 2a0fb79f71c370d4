"""A run's files under damage: what is said, what is kept, who may write, where it came from."""

import errno
import os
import re
import subprocess
import types

import jax
import pytest
from google.api_core.exceptions import Forbidden
from google.auth.exceptions import DefaultCredentialsError
from processes import ROOT, ran
from small_config import small

from configs import tiny
from configs.compare import as_json
from dapo_jax.checkpoints.same_run import EVALUATE, SAMPLE, require
from dapo_jax.convert import convert
from dapo_jax.evaluation import settings_of
from dapo_jax.logs import provenance, record
from dapo_jax.process import failures
from dapo_jax.report.runs import load_run
from dapo_jax.setup import components, policy

TENSORSTORE = (
    'RESOURCE_EXHAUSTED: Error writing "params/0.0" in OCDBT database at local file '
    '"/r/checkpoints/3.orbax-checkpoint-tmp/state.orbax-checkpoint-tmp/ocdbt.process_0/": '
    'Failed writing: "/r/checkpoints/3": No space left on device [OS error 28: ENOSPC] ['
    "source locations='third_party/tensorstore/kvstore/ocdbt/driver.cc:123' ...]"
)
CLOSED = "GET https://storage.googleapis.com/storage/v1/b/b?a=false: no storage.buckets.get"


def answered(status: int) -> Exception:
    """A bucket's answer, as requests has it."""
    error = RuntimeError("the bucket said no")
    error.response = types.SimpleNamespace(status_code=status)
    return error


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/r/a"), r"/r/a: No space.*\(ENOSPC", 1),
        (ValueError(TENSORSTORE), r"/r/checkpoints/3: No space left.*\(ENOSPC", 1),
        (OSError(errno.EIO, os.strerror(errno.EIO), "/r/a"), r"/r/a: Input/output error", 75),
        (
            ValueError("Error writing gs://b/c: HTTP response code: 503"),
            r"gs://b/c: .* not answer",
            75,
        ),
        (ValueError("ABORTED: All 32 retry attempts failed: CURL error"), r"does not answer", 75),
        (DefaultCredentialsError("Your default credentials were not found."), r"may not do", 1),
        (Forbidden(CLOSED), r"\(HTTP 403: .* no storage\.buckets\.get\); give the right", 1),
        (answered(429), r"\(HTTP 429: the bucket", 75),
        (answered(404), r"the bucket said no", 1),
    ],
)
def test_a_failed_write_is_one_line_with_path_and_cause(error, line, status):
    """Status 75 (the same command can go on) is of what may pass by itself, and of nothing else."""
    text, code = failures.explain(error)
    assert re.search(line, text) and "\n" not in text and len(text) < 500
    assert code == status


def test_an_error_of_ours_keeps_its_words_and_a_bug_its_traceback():
    """A refusal does not print its cause; an error handled before a bug is not the bug's cause."""
    with pytest.raises(FileNotFoundError) as refused:
        components.tokenizer(small(**{"model.path": "/none"}))
    line = "model.path = '/none': there is no such directory"
    assert failures.explain(refused.value) == (line, 1)
    assert failures.is_explained(refused.value)
    try:
        try:
            open("/none")  # noqa: PTH123, SIM115
        except FileNotFoundError:
            {}["missing"]
    except KeyError as bug:
        assert not failures.is_explained(bug)


@pytest.mark.parametrize(("place", "is_ours"), [("mine.py", False), ("dapo_jax/a.py", True)])
def test_an_error_in_a_users_own_module_keeps_its_traceback(place, is_ours):
    """In the clone's folder it was a line like ours, without the file, the row or the response."""
    with pytest.raises(ValueError) as raised:
        exec(compile("int('three')", failures.ROOT / place, "exec"))
    assert failures.is_explained(raised.value) == is_ours


def test_a_command_on_a_full_disk_ends_with_one_line_its_threads_too():
    program = """
import threading
from dapo_jax.cli import command
def main(_):
    def fill():
        with open("/dev/full", "wb") as file:
            file.write(b"x" * 100_000)
    thread = threading.Thread(target=fill, name="writer")
    thread.start()
    thread.join()
    fill()
command.run(main)
"""
    line = "the storage: No space left on device (ENOSPC); mend that and give the same command "
    said = [f"writer: {line}again", f"error: {line}again", "(--debug shows where)"]
    assert ran("-c", program, status=1).stderr.splitlines() == said


def test_every_start_is_recorded(tmp_path):
    for step in range(3):
        provenance.add_start(tmp_path, {"first_step": step, "origin": None})
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    starts = load_run(tmp_path).starts
    assert [start["first_step"] for start in starts] == [0, 1, 2]
    assert starts[0]["versions"]["jax"] == jax.__version__
    assert starts[0]["devices"] == {"kind": "cpu", "count": 4, "processes": 1}


def test_the_commit_and_whether_files_differ_from_it(tmp_path):
    def git(*command):
        who = ["-c", "user.name=a", "-c", "user.email=b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *command], check=True)

    assert provenance.code_version(tmp_path) == {"commit": None, "changed": None}
    (tmp_path / "code.py").write_text("a")
    git("init", "--quiet")
    git("add", "code.py")
    git("commit", "--quiet", "--message=first")
    found = provenance.code_version(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", found["commit"]) and found["changed"] is False
    (tmp_path / "code.py").write_text("b")
    assert provenance.code_version(tmp_path) == {"commit": found["commit"], "changed": True}


def test_an_evaluation_overwrites_neither_trainings_nor_anothers(tmp_path):
    def evaluated(**changes):
        config = tiny.get_config()
        config.update_from_flattened_dict({"eval.temperature": 0.6, "eval.top_p": 0.95} | changes)
        settings, scores = settings_of(config, of_model=True), {"arithmetic": {"mean@8": 0.5}}
        return record.write_own_results(tmp_path, 60, scores, settings)

    (tmp_path / "metrics.jsonl").write_text('{"step": 59}\n')
    trainings = {"step": 60, "sets": {"arithmetic": {"mean@8": 0.25}}}
    record.files.write_json(tmp_path / "eval" / "60.json", trainings)
    (one,), (other,) = evaluated(), evaluated(**{"eval.max_prompts": 16})
    assert evaluated() == [one]  # the same one again
    for changes in ({"model.path": "another"}, {"tokenizer.chat": "template"}):
        assert evaluated(**changes) != [one]
    assert one.name.startswith("60.arithmetic.t0.6_p0.95_k8_dapo_s0.")
    assert other.name.startswith("60.arithmetic.t0.6_p0.95_k8_n16_dapo_s0.")
    (tmp_path / "eval" / "notes.json").write_text("[]")  # somebody's own
    found = load_run(tmp_path).scores
    assert found.shape == (1, 5) and found["eval/arithmetic/mean@8"][60] == 0.25


def test_evaluate_compares_the_policy_with_the_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = tiny.get_config()
    theirs = {"recipe": as_json(config)}
    others = {"mesh.data": 1, "eval.top_p": 0.5, "seed": 3, "verifier.rules": "strict"}
    config.update_from_flattened_dict(others | {"model.path": str(ROOT / config.model.path)})
    require(EVALUATE, theirs, {"recipe": as_json(config)}, "the run")
    config.tokenizer.chat = "template"
    with pytest.raises(ValueError, match=r"tokenizer.chat is 'template', but was 'none'"):
        require(EVALUATE, theirs, {"recipe": as_json(config)}, "the run")
    require(SAMPLE, theirs, {"recipe": as_json(config)}, "the run")
    config.model.path, config.model.preset = "", "tiny"  # random weights are a seed's
    theirs = {"recipe": as_json(config)}
    config.seed = 4
    with pytest.raises(ValueError, match=r"policy: seed is 4, but was 3\. Give the run's own"):
        require(EVALUATE, theirs, {"recipe": as_json(config)}, "the run")


def test_a_run_does_not_import_what_its_config_names(tmp_path, monkeypatch):
    (tmp_path / "payload.py").write_text("import pathlib; pathlib.Path('run').touch()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def written(**settings):
        (tmp_path / "config.json").write_text(small(**settings).to_json_best_effort())

    written(**{"mesh.slices": 2})
    mesh = policy.run_config(tmp_path, trust_code=False).mesh
    assert (mesh.slices, mesh.data, mesh.model) == (1, -1, 1)  # of this machine
    written(**{"model.family": "payload"})
    message = r"config\.json: model\.family = 'payload' is a custom module; --trust_code imports it"
    for how, said in (({}, message), ({"trust_code": True}, "registers 0 families")):
        assert not (tmp_path / "run").exists()
        with pytest.raises(ValueError, match=said):
            convert("run:.", "hf:out", dtype="float32", **how)
    assert (tmp_path / "run").exists()
