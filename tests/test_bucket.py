"""Runs, models and data in a bucket (gs://), against an emulator of its API with injected faults.

What the emulator has not: permissions (the proxy answers in its place), gRPC (by which gcsfs asks
what kind of bucket it is; it warns, and takes it for a flat one, so hierarchical ones are untried)
and batches of deletions (gcsfs sends them one by one). The libraries' own retries wait for a second
or more, for which these tests take their time.
"""
# ruff: noqa: F401, F811  the fixture `bucket` is an argument too

import contextlib
import json
import re
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bucket import Fault, bucket, folders
from processes import ROOT, ran, started
from states import assert_bitwise_equal, assert_restored, progress_at, restored, saved, state_at

from dapo_jax.process import failures
from dapo_jax.tasks.math_problems import MathProblems
from dapo_jax.tasks.tokenizer import load_tokenizer
from models.hf import load_hf, save_hf
from models.hf_config import load_config
from models.transformer import split

# Orbax abandons its other writes when one is denied.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

MODEL = ROOT / "experiments" / "tiny_base" / "checkpoint"
# The same step after step, whatever happens in between; says where it goes on.
PROGRAM = """
import sys, jax, jax.numpy as jnp
from dapo_jax.checkpoints.store import Checkpoints
checkpoints, steps = Checkpoints(sys.argv[1], keep=2), int(sys.argv[2])
state = {"a": jnp.arange(2**16, dtype=jnp.uint32), "b": jnp.arange(4, dtype=jnp.uint32)}
abstract = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
)
first, state, _ = checkpoints.restore_latest(abstract, report=print) or (0, state, {})
print("begins after", first, flush=True)
for step in range(first, steps):
    state = {name: leaf * 1664525 + step for name, leaf in state.items()}
    checkpoints.save(step + 1, state, {"cursor": step})
print("ends with", int(state["a"][12345]), int(state["b"][3]))
"""


@pytest.fixture
def place(bucket, request):
    """The name of a folder in the bucket, this test's own."""
    return request.node.name.replace("[", "-").replace("]", "")


def complete_steps(bucket, place):
    ends = (re.fullmatch(rf"{place}/(\d+)/commit_success.txt", it) for it in bucket.names(place))
    return sorted(int(end[1]) for end in ends if end)


def test_what_fails_now_and_then_is_asked_again_and_nothing_is_lost(bucket, place):
    """The libraries' own retries do it: gcsfs's, TensorStore's and google-cloud-storage's."""
    url = f"{bucket.url}/{place}"
    checkpoints = saved(url, 1, 2, keep=2)
    faults = (
        Fault("POST /upload.*manifest/metadata", nth=1, status=503),
        Fault("POST /upload.*ocdbt", nth=1, status=429),
        Fault("POST /upload.*/state/d/", nth=1, lost="request"),
        Fault("DELETE .*/1/", nth=3, lost="request"),
    )
    with bucket.failing(*faults):
        assert checkpoints.save(3, state_at(3), progress_at(3))
    assert all(fault.matched >= fault.nth for fault in faults)
    assert complete_steps(bucket, place) == [2, 3]
    faults = (
        Fault("GET .*manifest/metadata", nth=1, status=429),
        Fault("GET .*/state/.*alt=media", nth=1, status=503),
        Fault("GET .*/d/.*alt=media", nth=2, lost="answer"),
        Fault("GET .*commit_success", nth=1, lost="request"),
    )
    with bucket.failing(*faults):
        assert_restored(restored(url), 3)
    assert all(fault.matched >= fault.nth for fault in faults)


@contextlib.contextmanager
def explained(*words):
    """Expects an error that is one line with these words, and no reason to try again."""
    with pytest.raises(Exception) as raised:
        yield
    line, code = failures.explain(raised.value)
    assert failures.is_explained(raised.value) and code == 1 and "\n" not in line
    assert all(text in line for text in (*words, "this user may not do that (", "give the right"))


def test_a_denied_reading_damages_nothing(bucket, place):
    url = f"{bucket.url}/{place}"
    saved(url, 1, 2)
    before = bucket.names(f"{place}/")
    denied = Fault(f"{place}/2/manifest/metadata.*alt=media", status=401)
    with bucket.failing(denied), explained():
        restored(url)
    assert bucket.names(f"{place}/") == before
    assert_restored(restored(url), 2)


def test_a_missing_right_or_bucket_is_named(bucket, place):
    for name in ("_CHECKPOINT_METADATA", "ocdbt"):
        fault = Fault(f"POST /upload.*{name}", status=403)
        with bucket.failing(fault), explained("storage.objects.create access"):
            saved(f"{bucket.url}/{place}/{name}", 1, 2, 3)
        assert fault.matched
    with explained("no-bucket"):
        saved("gs://no-bucket/run", 1)
    assert b"no-bucket" not in bucket.call("GET", "/storage/v1/b?project=p")


def test_a_run_killed_while_it_saves_ends_bitwise_as_one_that_is_not(bucket, place):
    """The kill is at a request in the middle of a save, after one or two of some 150 requests."""
    url, steps, group = f"{bucket.url}/{place}", 6, []
    kill = Fault("", nth=300, act=lambda: group[0].kill())
    command = ["-c", PROGRAM, url, str(steps)]
    with bucket.failing(kill), started(command) as processes:
        group += processes
        said = group[0].communicate(timeout=240)[0]
    assert group[0].returncode == -signal.SIGKILL, said
    newest = max(complete_steps(bucket, place))
    said = ran(*command).stdout
    assert said.startswith(f"begins after {newest}\n"), said  # all that it read was whole
    state = [12345, 3]
    for step in range(steps):
        state = [(number * 1664525 + step) % 2**32 for number in state]
    assert said.splitlines()[-1] == "ends with {} {}".format(*state)
    # What the killed one left has gone.
    assert folders(bucket, place) == {str(steps - 1), str(steps)}


def test_a_model_and_a_tokenizer_are_read_from_a_bucket(bucket, place):
    for file in MODEL.iterdir():
        bucket.write(f"{place}/{file.name}", file.read_bytes())
    model = f"{bucket.url}/{place}"
    config, params = load_config(MODEL), split(load_hf(MODEL))[1]
    assert_bitwise_equal(split(load_hf(model))[1], params)
    theirs, ours = (load_tokenizer(path, stop_tokens=None, chat="none") for path in (model, MODEL))
    assert theirs.encode("What is 7 * 8?") == ours.encode("What is 7 * 8?")
    save_hf(params, config, f"{model}/saved", max_shard_bytes=300_000)
    assert len([name for name in bucket.names(f"{place}/saved/") if "safetensors" in name]) > 3
    assert_bitwise_equal(split(load_hf(f"{model}/saved"))[1], params)


def test_data_is_read_from_a_bucket(bucket, place, tmp_path):
    rows = [{"question": f"{i} + 1?", "solution": str(i + 1)} for i in range(3_000)]
    fields = {"prompt_field": "question", "answer_field": "solution"}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for file in tmp_path.iterdir():
        bucket.write(f"{place}/{file.name}", file.read_bytes())
        paths = f"{bucket.url}/{place}/{file.name}", str(file)
        theirs, ours = (MathProblems(path=path, **fields).load()[0] for path in paths)
        assert theirs == ours and len(ours) == 3_000
    with pytest.raises(FileNotFoundError, match=r"No data file at 'gs://.*/no.jsonl'"):
        MathProblems(path=f"{bucket.url}/{place}/no.jsonl", **fields).load()
