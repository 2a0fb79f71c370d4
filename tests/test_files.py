"""A run's files under damage: what is said, what is kept, who may write, where it came from."""

import errno
import gzip
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from google.api_core.exceptions import Forbidden
from google.auth.exceptions import DefaultCredentialsError
from ml_collections.config_flags import DEFINE_config_file
from processes import ran, small_files

from configs import tiny
from dapo_jax import evaluate
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.cli import config_flags, failures
from dapo_jax.convert import convert
from dapo_jax.logs import files, provenance, record
from dapo_jax.logs.files import Rows, append_line, gzip_lines, read_rows, remove_leftovers
from dapo_jax.report.runs import load_run, totals
from dapo_jax.setup import components, policy
from dapo_jax.types import Example, Group, Prompt, Response, Verdict
from models.hf import load_params
from models.hf_config import load_config

ROOT = pathlib.Path(__file__).resolve().parent.parent
TENSORSTORE = (
    'RESOURCE_EXHAUSTED: Error writing "params/0.0" in OCDBT database at local file '
    '"/r/checkpoints/3.orbax-checkpoint-tmp/state.orbax-checkpoint-tmp/ocdbt.process_0/": '
    'Failed writing: "/r/checkpoints/3": No space left on device [OS error 28: ENOSPC] ['
    "source locations='third_party/tensorstore/kvstore/ocdbt/driver.cc:123' ...]"
)
REFUSED = (
    'PERMISSION_DENIED: Error opening "zarr" driver: Error writing "a/.zarray" in OCDBT database '
    "at gs://b/r/2/: it does not have storage.objects.create access [http_response_code='403'] ["
    'http_response_body=\'{"error": {"code": 403}}\']'
)
CLOSED = (
    "GET https://storage.googleapis.com/storage/v1/b/b?prettyPrint=false: no storage.buckets.get"
)


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
        (TimeoutError(errno.ETIMEDOUT, "reading took 30 s"), r"reading took 30 s; give the", 75),
        (ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)), "ECONNRESET", 75),
        (ValueError("Error writing gs://b/c: HTTP response code: 503"), r"does not answer", 75),
        (ValueError("ABORTED: All 32 retry attempts failed: CURL error"), r"does not answer", 75),
        (ValueError("ABORTED: gs://b/c [http_response_code='503']"), r"gs://b/c: .* answer", 75),
        (ValueError(REFUSED), r"gs://b/r/2/: .*IED, storage\.objects\.create\); give the right", 1),
        (OSError("Forbidden: b/b/o/r%2F2\nNo right."), r"gs://b/r/2: this user may .*right", 1),
        (FileNotFoundError("Bucket does not exist: b"), r"gs://b: there is no such bucket", 1),
        (DefaultCredentialsError("Your default credentials were not found."), r"may not do", 1),
        (Forbidden(CLOSED), r"gs://b: .*\(HTTP 403, storage\.buckets\.get\); give the right", 1),
        (answered(401), r"\(HTTP 401\)", 1),
        (answered(429), r"\(HTTP 429\)", 75),
        (answered(404), r"the bucket said no", 1),
        (MemoryError("out of memory"), r"out of memory", 1),
    ],
)
def test_a_failed_write_is_one_line_with_path_and_cause(error, line, status):
    """Six of six kinds ended in tracebacks, 279 lines for a full disk, and all with status 1."""
    text, code = failures.explain(error)
    assert re.search(line, text) and "\n" not in text and len(text) < 500
    assert code == status


def test_an_error_of_ours_keeps_its_words_and_a_bug_its_traceback():
    """A refusal does not print its cause; an error handled before a bug is not the bug's cause."""
    with pytest.raises(FileNotFoundError) as refused:
        _refuse()
    assert failures.explain(refused.value) == (
        "model.path = '/none': there is no such directory",
        1,
    )
    assert failures.is_explained(refused.value)
    try:
        try:
            open("/none")  # noqa: PTH123, SIM115
        except FileNotFoundError:
            {}["missing"]
    except KeyError as bug:
        assert not failures.is_explained(bug)


def _refuse():
    config = tiny.get_config()
    config.model.path = "/none"
    components.tokenizer(config)


def test_a_save_without_room_is_explained_with_the_last_saved_step(tmp_path):
    """Orbax raises a ValueError with tensorstore's text, pages of it."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    state = {"a": jnp.asarray(np.random.default_rng(0).random(50_000))}
    checkpoints.save(1, state, {"cursor": 0})
    with (
        pytest.raises(Exception) as failed,
        failures.telling_saved_steps(checkpoints.latest_step, checkpoints.directory),
        small_files(100_000),
    ):
        checkpoints.save(2, state, {"cursor": 1})
    line, status = failures.explain(failed.value)
    assert f"{tmp_path / 'checkpoints' / '2'}: File too large" in line
    assert f"1 finished steps are saved in {tmp_path / 'checkpoints'}; mend that" in line
    assert status == 1
    checkpoints.close()
    assert list((tmp_path / "checkpoints").glob("*-tmp*"))
    again = Checkpoints(tmp_path / "checkpoints", keep=2)
    again.save(2, state, {"cursor": 1})
    assert not list((tmp_path / "checkpoints").glob("*-tmp*"))


COMMAND = """
import errno, os, threading
from dapo_jax.cli import command
def main(_):
    def fail():
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/quota/file")
    thread = threading.Thread(target=fail, name="writer")
    thread.start()
    thread.join()
    with open("/dev/full", "wb") as file:
        file.write(b"x" * 100_000)
command.run(main)
"""


def test_arrays_that_fail_side_by_side_print_no_traceback():
    """On a full disk two arrays failed at once: one error was said, the other was a traceback."""
    program = """
import asyncio, gc, logging
from absl import logging as absl_logging
from dapo_jax.cli import failures
absl_logging.use_absl_handler()
failures.quiet_threads()

async def fails():
    raise ValueError("no space left on device")

async def both():
    tasks = [asyncio.create_task(fails()) for _ in range(2)]
    await asyncio.gather(tasks[0], return_exceptions=True)
    await asyncio.sleep(0)

asyncio.run(both())
gc.collect()
"""
    assert ran("-c", program).stderr == ""


def test_a_command_ends_with_one_line_also_where_threads_fail():
    assert ran("-c", COMMAND, status=1).stderr.splitlines() == [
        "writer: /quota/file: Disk quota exceeded (EDQUOT); mend that and give the same command "
        "again",
        "error: the storage: No space left on device (ENOSPC); mend that and give the same command "
        "again",
        "(--debug shows where)",
    ]


KNOWN_FLAGS = {"workdir": None, "config": None, "debug": None}


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("num_steps=3", "--config.num_steps=3"),
        ("-algo.eps_high=0.3", "--config.algo.eps_high=0.3"),
        ("config.eps_high=0.3", "--config.algo.eps_high=0.3"),
        ("wrkdir=runs/a", "--workdir=runs/a"),
    ],
)
def test_an_argument_without_dashes_is_refused(argument, meant):
    """A sweep with `config.num_steps=3` ran the config as it was, in silence."""
    message = config_flags.leftover([argument], KNOWN_FLAGS, tiny.get_config())
    assert message.endswith(f"did you mean {meant}?")


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--config.eps_high=0.3", "--config.algo.eps_high"),
        ("--config.learning_rat=1", "--config.learner.learning_rate"),
        ("--noconfig.dynamic_samplng", "--config.algo.dynamic_sampling"),
        ("--config.eval.sets.arithmetic.top_q=1", "--config.eval.sets.arithmetic.top_p"),
    ],
)
def test_the_nearest_key_is_of_any_section(flag, meant, monkeypatch):
    """Only keys of the section that was named were compared, so most hints were missing."""
    values = flags.FlagValues()
    DEFINE_config_file("config", flag_values=values)
    values["config"].parser = config_flags.RecipeParser("config")
    command = ["command", "--config=configs/tiny.py", flag]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.chdir(ROOT)
    with pytest.raises(flags.Error, match=rf"Did you mean {re.escape(meant)}\?"):
        values(command)


def test_a_bucket_is_no_workdir():
    """Everything went to a folder `gs:` beside the code, which a preempted machine loses."""
    done = ran("-m", "dapo_jax.evaluate", "--workdir=gs://b/r", status=1)
    assert re.search(r"workdir=gs://b/r.*checkpoint\.directory may be", done.stderr)


def test_rows_out_of_order_are_cut_without_a_loss(tmp_path):
    """Two runs had mixed their rows: the copy had as many rows as were cut, but not those."""
    mixed = [{"step": step, "x": x} for x, step in enumerate([0, 1, 2, 0, 1, 2, 3])]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    Rows(tmp_path, resume_step=1)
    files = (tmp_path / name for name in ("metrics.jsonl", "metrics.cut-1.jsonl"))
    kept, cut = ([row["x"] for row in read_rows(file)] for file in files)
    assert (kept, cut) == ([0, 1, 3, 4], [2, 5, 6])


def test_only_temporary_files_of_dead_processes_are_removed(tmp_path):
    """A person's own file of that ending went, too, when it was an hour old."""
    dead = tmp_path / f"config.json.{os.uname().nodename}.{2**22 + 1}.tmp"
    elsewhere = tmp_path / "config.json.another-host.7.tmp"
    live = tmp_path / f"config.json.{os.uname().nodename}.{os.getppid()}.tmp"
    own = tmp_path / "notes.tmp"
    for file in (dead, elsewhere, live, own):
        file.touch()
        os.utime(file, (0, 0))
    assert set(remove_leftovers(tmp_path)) == {dead, elsewhere}
    assert live.exists() and own.exists()


def test_rows_do_not_begin_anew_where_somebody_moved_them(tmp_path):
    """A row went to a file that no name led to any more, or to a new one: nobody was told."""
    writer = Rows(tmp_path / "run", resume_step=None)
    writer.write({"step": 0})
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"run/metrics\.jsonl"):
        writer.write({"step": 1})
    assert not (tmp_path / "run").exists()


def test_every_start_is_recorded(tmp_path):
    """Nothing in the directory said which code had made it, or how often it was started."""
    config = tiny.get_config()
    with (tmp_path / provenance.NAME).open("w") as file:
        file.write('{"time": "20')  # killed in the middle of the line before
    for step in range(2):
        provenance.add_start(tmp_path, config, {"first_step": step, "origin": None})
    config.seed = 1
    provenance.add_start(tmp_path, config, {"first_step": 2, "origin": None})
    writer = Rows(tmp_path, resume_step=None)
    writer.write({"step": 0})
    run = load_run(tmp_path)
    digests = [start["config_sha256"] for start in run.starts]
    assert len(digests) == 3 and digests[0] == digests[1] != digests[2]
    start = run.starts[0]
    assert start["versions"]["jax"] == jax.__version__ and start["versions"]["python"][0] == "3"
    assert start["devices"] == {"kind": "cpu", "count": 4, "processes": 1}
    assert (start["pid"], start["command"].split()[0]) == (os.getpid(), sys.orig_argv[0])
    assert totals(run)["starts"] == "3"


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


def _evaluated(tmp_path, **changes):
    config = tiny.get_config()
    config.eval.update(changes)
    scores = {"arithmetic": {"mean@8": 0.5}}
    settings = evaluate.settings_of(config)
    return record.write_own_results(tmp_path, 60, scores, settings)


def test_an_evaluation_overwrites_neither_trainings_nor_anothers(tmp_path):
    """`evaluate` wrote eval/60.json, which was training's, whatever it was told to sample."""
    settings = evaluate.settings_of(tiny.get_config())
    record.write_results(tmp_path, 60, {"arithmetic": {"mean@8": 0.25}}, settings)
    (one,) = _evaluated(tmp_path, temperature=0.6, top_p=0.95)
    (other,) = _evaluated(tmp_path, temperature=0.6, top_p=0.95, max_prompts=16)
    assert _evaluated(tmp_path, temperature=0.6, top_p=0.95) == [one]  # the same one again
    assert one.name.startswith("60.arithmetic.t0.6_p0.95_k8_dapo_s0.")
    assert other.name.startswith("60.arithmetic.t0.6_p0.95_k8_n16_dapo_s0.")
    assert json.loads(one.read_text())["settings"]["arithmetic"]["top_p"] == 0.95
    writer = Rows(tmp_path, resume_step=None)
    writer.write({"step": 0})
    labels = {path.name.split(".", 2)[2].removesuffix(".json") for path in (one, other)}
    names = {"arithmetic", *(f"arithmetic {label}" for label in labels)}
    assert {name for name, _ in load_run(tmp_path).evaluations} == names


def test_responses_of_an_evaluation_are_saved(tmp_path):
    example = Example(({"role": "user", "content": "1+1?"},), "2", "set", 7)
    response = Response(np.array([1, 2]), np.zeros(2), True, "Answer: 2", Verdict(True, "2", "ok"))
    group = Group(0, Prompt(np.array([1]), example), (response,) * 3)
    record.write_responses(tmp_path, "60.set", [group])
    with gzip.open(tmp_path / "eval" / "60.set.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    assert [(row["sample"], row["response"]) for row in rows] == [
        (n, "Answer: 2") for n in range(3)
    ]


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"model.preset": "0.5b"}, "model.preset is '0.5b', but was ''"),
        ({"tokenizer.chat": "template"}, "tokenizer.chat is 'template', but was 'none'"),
        ({"model.path": str(ROOT / tiny.get_config().model.path)}, None),
        ({"mesh.data": 1, "rollout.cache_mib": 8, "eval.top_p": 0.5, "seed": 3}, None),
        ({"verifier.rules": "strict", "model.kernels": "cpu", "num_steps": 1}, None),
    ],
)
def test_evaluate_compares_the_policy_with_the_runs(tmp_path, monkeypatch, changes, refused):
    """It loaded a run's weights into whatever model the command line described."""
    monkeypatch.chdir(ROOT)
    config = tiny.get_config()
    policy.check_same(config, tmp_path)  # no run: nothing to compare
    (tmp_path / "config.json").write_text(config.to_json_best_effort())
    config.update_from_flattened_dict(changes)
    if refused is None:
        policy.check_same(config, tmp_path)
    else:
        with pytest.raises(ValueError, match=re.escape(refused)):
            policy.check_same(config, tmp_path)
    (tmp_path / "config.json").write_text("")
    with pytest.raises(ValueError, match=r"config\.json is empty"):
        policy.check_same(config, tmp_path)


def test_a_run_of_several_slices_converts_on_one_device(tmp_path):
    """The config's slices were made into a mesh on the machine that converts: it has one."""
    config = tiny.get_config()
    config.mesh.slices, config.mesh.cpu_devices = 2, 4
    programs = components.programs(config, vocab_size=384)
    assert programs.mesh.shape["slice"] == 2
    state = programs.start_state()
    expected = jax.tree.leaves(jax.device_get(state.params))
    checkpoints = components.checkpoints(config, tmp_path / "run", keep=2)
    checkpoints.save(1, state, {"cursor": 0, "sampled_tokens_total": 0, "row": None})
    checkpoints.close()
    (tmp_path / "run" / "config.json").write_text(config.to_json_best_effort())
    convert(f"run:{tmp_path / 'run'}", f"hf:{tmp_path / 'hf'}", dtype="float32")
    found = load_params(tmp_path / "hf", load_config(tmp_path / "hf"), dtype="float32")
    assert all(map(np.array_equal, jax.tree.leaves(found), expected))


def test_a_broken_file_of_json_lines_gets_no_half_line(tmp_path):
    path = tmp_path / "starts.jsonl"
    path.touch()
    append_line(path, {"a": 1})
    with pytest.raises(OSError, match=r"starts\.jsonl") as failed, small_files(20):
        append_line(path, {"b": "x" * 50})
    assert failed.value.errno == errno.EFBIG
    assert path.read_bytes() == b'{"a": 1}\n'


def test_a_run_does_not_import_what_its_recipe_names(tmp_path, monkeypatch):
    """A stranger's run executed its own file where `convert` or `sample` opened it.

    config.json named it as the model's family, and the working directory is on Python's path.
    """
    (tmp_path / "payload.py").write_text("import pathlib; pathlib.Path('run').touch()")
    (tmp_path / "config.json").write_text(tiny.get_config().to_json_best_effort())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    policy.run_recipe(tmp_path, trust_code=False)

    config = tiny.get_config()
    config.model.family = "payload"
    (tmp_path / "config.json").write_text(config.to_json_best_effort())
    message = (
        r"config\.json: model\.family = 'payload' is .* no part of .*; .* --trust_code imports"
    )
    with pytest.raises(ValueError, match=message):
        convert("run:.", "hf:out", dtype="float32")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="registers 0 families"):
        convert("run:.", "hf:out", dtype="float32", trust_code=True)
    assert (tmp_path / "run").exists()


@pytest.mark.slow
def test_sample_takes_a_run_of_any_seed_and_asks_it_in_a_template(tmp_path):
    """`sample` set the config's seed to its own, which makes random weights.

    So runs of other seeds were refused, and the policy of step 0 was another. `--chat` of a run
    that had no template was refused too, as another policy.
    """
    config = tiny.get_config()
    config.tokenizer.path, config.model.path = str(ROOT / config.model.path), ""
    config.model.preset, config.seed = "tiny", 3
    theirs = json.loads(config.to_json_best_effort())
    checkpoints = components.checkpoints(config, tmp_path, keep=2)
    checkpoints.fingerprint = {"recipe": theirs, "files": {}}
    state = components.programs(config, vocab_size=384).start_state()
    checkpoints.save(1, state, {"cursor": 0, "sampled_tokens_total": 0, "row": None})
    checkpoints.close()
    (tmp_path / "config.json").write_text(json.dumps(theirs))

    def sampled(step: int, *arguments: str) -> str:
        command = ["-m", "dapo_jax.sample", f"--workdir={tmp_path}", f"--step={step}"]
        command += ["--prompt=7+5", "--max_tokens=4", *arguments]
        return ran(*command).stdout

    assert sampled(0, "--seed=7") == sampled(1, "--seed=7")
    with pytest.raises(ValueError, match=r"tokenizer\.chat is 'template', but was 'none'"):
        config.tokenizer.chat = "template"
        policy.check_recipe(config, theirs, "checkpoint 1")
    policy.check_recipe(config, theirs, "checkpoint 1", but=("tokenizer.chat",))


def test_a_line_that_is_too_long_is_not_read(tmp_path, monkeypatch):
    """A few bytes of a stranger's gzip file stood for more than the memory had."""
    path = tmp_path / "3.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' + b" " * 2_000))
    assert [len(line) for line in gzip_lines(path)] == [9, 2_000]
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1_000)
    lines = gzip_lines(path)
    assert next(lines) == b'{"a": 1}\n'
    with pytest.raises(ValueError, match=r"3\.jsonl\.gz has a line of more than 1,000 bytes"):
        next(lines)


def test_somebodys_own_file_beside_evaluations_does_not_end_a_run(tmp_path):
    """A foreign JSON file in eval/ ended `train` with status 1, all its steps being done."""
    writer = Rows(tmp_path, resume_step=None)
    writer.write({"step": 0})
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "notes.json").write_text("[]")
    (tmp_path / "eval" / "1.json").write_text('{"step": 1, "sets": {"a": {"mean@2": 0.5}}}')
    assert load_run(tmp_path).evaluations == {("a", "mean@2"): {1: 0.5}}
