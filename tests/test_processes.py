"""Several processes give the run of one; checkpoints go from any number of devices to any other.

Every run here is one of tests/small_run.py. Sums over two devices have the same bits however the
devices are spread over processes; sums over four are added in another order, which shows in the
last digits of float32.
"""

import contextlib
import json
import re
import shutil
import signal
import socket
import sys
import time

import jax
import pytest
from bucket import bucket, flip, folders
from processes import ran, started, wait_for
from runs import SCHEDULE, digests, responses, rows_without_timings

from configs import base, gpu_node
from dapo_jax.convert import convert
from dapo_jax.logs.metrics import DIGESTS, TOKENS, VERDICTS
from dapo_jax.process import hosts

__all__ = ["bucket"]  # a fixture
STEPS = 3
SECONDS = 480  # a run that takes so long hangs
# The restart loop of a worker, as it runs on a pod; each has logs of its own.
LOOP = ("bash", "-c", 'LOGS=$WORKDIR/$DAPO_PROCESS exec experiments/launch/run_worker.sh "$@"', "")


def run(workdir, *, processes=1, start="", program=(sys.executable,), meanwhile=None, **settings):
    """Runs all processes to their end; returns the run's directory, with their output in logs/.

    program: is given the arguments. meanwhile: is called once all have been started.
    """
    logs = workdir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    names = [logs / f"{processes}_{i}.txt" for i in range(processes)]
    arguments = ["tests/small_run.py", str(workdir), start, json.dumps(settings)]
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(name.open("w")) for name in names]
        how = {"processes": processes, "outputs": outputs, "program": program}
        group = stack.enter_context(started(arguments, **how))
        if meanwhile:
            meanwhile()
        codes = [process.wait(timeout=SECONDS) for process in group]
    assert codes == [0] * processes, "\n".join(name.read_text()[-2_000:] for name in names)
    return workdir


def assert_same_run(workdir, expected, *, bitwise=False, except_for=()):
    ours, theirs = rows_without_timings(workdir), rows_without_timings(expected)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == [*range(STEPS)]
    for step in range(STEPS):
        assert responses(workdir, step) == responses(expected, step)
        for key, value in theirs[step].items():
            if key.startswith(except_for):
                continue
            if bitwise or isinstance(value, int) or key in (TOKENS, VERDICTS, "ratio_gap"):
                assert ours[step][key] == value, (step, key)
            elif key in DIGESTS:  # of bits
                continue
            else:
                assert ours[step][key] == pytest.approx(value, rel=2e-5, abs=1e-7), (step, key)
    for file in (expected / "eval").glob("*"):
        assert (workdir / "eval" / file.name).read_bytes() == file.read_bytes()


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory):
    """The run of one process."""
    return run(tmp_path_factory.mktemp("runs") / "two_devices")


@pytest.mark.slow
def test_four_processes_go_on_with_the_checkpoint_of_one(tmp_path, two_devices):
    """On twice the devices: the same prompts come next; sums have another order."""
    four = shutil.copytree(two_devices, tmp_path / "run")
    for step in (2, 3):
        shutil.rmtree(four / "checkpoints" / str(step))
    run(four, processes=4)
    assert_same_run(four, two_devices, except_for=SCHEDULE)


@pytest.mark.parametrize("model", [1, 2])
def test_a_box_of_eight_devices_resumes_bitwise(tmp_path, model):
    """A mesh of data 8, or of data 4 and model 2; the start chooses sizes, as in gpu_node.py."""
    node = dict(base.leaves(gpu_node.get_config()))
    chosen = ("rollout.slot_tokens", "rollout.cache_mib", "learner.row_tokens")
    box = {key: node[key] for key in (*chosen, "learner.micro_batch_rows")}
    assert not any(box.values())
    box |= {"mesh.cpu_devices": 8, "mesh.model": model, "eval.every_steps": 0, "num_steps": 2}
    box |= {"algo.dynamic_sampling": False}
    whole = run(tmp_path / "whole", **box)
    assert f"data {8 // model}, model {model}" in (whole / "logs" / "1_0.txt").read_text()
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    shutil.rmtree(resumed / "checkpoints" / "2")
    (resumed / "metrics.jsonl").unlink()  # it would say that the run is finished
    run(resumed, **box)
    assert "resuming after 1 steps" in (resumed / "logs" / "1_0.txt").read_text()
    assert rows_without_timings(resumed) == rows_without_timings(whole)
    assert digests(resumed, 2) == digests(whole, 2)


@pytest.mark.slow
def test_two_restart_loops_go_on_after_a_worker_is_killed_inside_a_call_of_an_environment(
    tmp_path, monkeypatch
):
    """Bitwise as if nothing had been. Other signals, in all phases, are in test_faults_stops.py."""
    kill, loops = tmp_path / "kill", tmp_path / "loops"
    more = {"KILL": kill, "WORKDIR": loops, "TRAIN": sys.executable, "BACKOFF_SECONDS": 1}
    for name, value in more.items():
        monkeypatch.setenv(name, str(value))
    settings = {
        **{"rollout.max_response_tokens": 96, "learner.row_tokens": 512, "eval.every_steps": 0},
        "data.train.environment": "tests.ext_tasks.slow:Deadly",
        "rollout.partial_rollout_steps": 1,  # what no clock decides is all
    }
    whole = run(tmp_path / "whole", **settings)

    def kill_one():
        wait_for((loops / "checkpoints" / "1").is_dir, seconds=SECONDS)
        kill.touch()

    run(loops, processes=2, program=LOOP, meanwhile=kill_one, **settings)
    assert not kill.exists()
    assert_same_run(loops, whole, bitwise=True)
    assert digests(loops, STEPS) == digests(whole, STEPS)
    assert [len([*(loops / str(i)).glob("attempt-*")]) for i in range(2)] == [2, 2]
    assert f"with code {128 + signal.SIGKILL} " in (loops / "logs" / "2_1.txt").read_text()


@pytest.mark.slow
def test_two_processes_are_one_run_bitwise_and_save_in_a_bucket_and_fork(
    bucket, tmp_path, two_devices
):
    """The same prompts, samples, verdicts, decisions, updates and evaluations, written once.

    Each saves its own part; one finds it damaged, and both go on with the checkpoint before.
    """
    there, url = tmp_path / "there", f"{bucket.url}/there"
    in_bucket = {"processes": 2, "checkpoint.directory": url}
    run(there, num_steps=2, **in_bucket)
    flip(bucket, "there/2/state/ocdbt.process_1/d/")
    run(there, **in_bucket)
    assert "leave it as damaged.2" in (there / "logs" / "2_1.txt").read_text()
    assert folders(bucket, "there") == {"1", "2", "3", "damaged.2.0"}
    assert_same_run(there, two_devices, bitwise=True)
    names = [{path.name for path in workdir.iterdir()} for workdir in (there, two_devices)]
    assert names[0] == names[1] - {"checkpoints"} | {"metrics.cut-1.jsonl"}
    assert not re.search("(?m)^step ", (there / "logs" / "2_1.txt").read_text())

    fork = run(tmp_path / "fork", processes=2, start=f"run:{there}@2")
    assert rows_without_timings(fork) == rows_without_timings(two_devices)[2:]
    ran("-m", "dapo_jax.convert", f"--from=run:{there}", f"--to=hf:{url}-hf")
    convert(f"run:{two_devices}", f"hf:{tmp_path / 'model'}", dtype="float32")
    exported = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    assert exported == {name: bucket.read(f"there-hf/{name}") for name in exported}
    ask = ("--prompt=7*8=", "--max_tokens=8", "--temperature=0", "--template=dapo")
    assert "ready after" in ran("-m", "dapo_jax.sample", f"--model={url}-hf", *ask).stderr


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("UNKNOWN: Gloo all-reduce failed: [pair.cc:547] Connection closed by peer [::1]", True),
        ("UNAVAILABLE: failed to connect to all addresses", True),
        ("INTERNAL: Shutdown barrier has failed", True),
        ('RESOURCE_EXHAUSTED: Used 97G of 95G hbm\n op_name="f/optimization_barrier"', False),
        ("INTERNAL: Mosaic failed to compile: tpu.barrier\nget_barrier_semaphore", False),
        ("checkpoint.keep = 0, but must be at least 1", False),
    ],
)
def test_what_jax_raises_where_another_process_is_gone(text, lost):
    """Gloo's is a ValueError: with several processes it was taken for an error in the settings.

    And an update that did not fit on a pod was taken for a lost process, to be tried for ever: what
    the compiler prints of it has optimization_barriers.
    """
    error = jax.errors.JaxRuntimeError(text)
    assert hosts.is_lost(error) is lost
    assert hosts.is_lost(ValueError(text)) is ("Gloo" in text)  # a bucket says UNAVAILABLE too
    chained = KeyError("row")
    chained.__cause__ = error
    assert hosts.is_lost(chained) is lost


FAILS = """
import os, time
from dapo_jax.process import hosts
hosts.start(several=True, cpu_devices=2)
process = int(os.environ[hosts.PROCESS])
values = hosts.gather({"process": process})
assert values == [{"process": 0}, {"process": 1}]
try:
    hosts.on_main(lambda: int("one"))
except ValueError as error:
    print("all have it:", error, flush=True)
gather, hosts.gather = hosts.gather, None  # with a copy for each process, on each device
assert hosts.on_main(lambda: f"{process} {'x' * 3_000}") == f"0 {'x' * 3_000}"
assert hosts.on_main(lambda: None) is None
hosts.gather = gather
hosts.gather("said")  # the first to fail would end the other before it has printed
if process == 1:
    hosts.fail("error: no prompts here", code=1)
time.sleep(60)
"""


def test_values_are_gathered_errors_shared_and_a_failed_process_ends_the_others():
    with started(["-c", FAILS], processes=2) as group:
        outputs = [process.communicate(timeout=120)[0] for process in group]
    assert [process.returncode for process in group] == [1, 1]
    assert all("all have it: invalid literal for int()" in output for output in outputs)
    assert "process 1 failed: error: no prompts here" in outputs[0]


def test_an_error_before_jax_is_used_ends_all_at_once(monkeypatch):
    """Counting the processes starts JAX's devices, and so waited for all others: 20 s for one that
    began 20 s later, and for ever where the devices were what had failed."""
    said = []
    monkeypatch.setattr(hosts, "started", lambda: True)
    monkeypatch.setattr(hosts, "end", lambda line, status: said.append((line, status)))
    monkeypatch.setattr(jax, "process_count", lambda: pytest.fail("asks JAX for its devices"))
    hosts.fail("error: no devices")
    assert said == [("error: no devices", 1)]


@pytest.mark.parametrize(
    ("text", "ended", "words"),
    [
        ("Failed to recognize coordinator address first-slice-0-0.first", SystemExit, "75"),
        ("Getting metadata['agent-worker-number'] failed for 6 tries", SystemExit, "75"),
        ("jax.distributed.initialize() must be called first", RuntimeError, "must be called first"),
    ],
)
def test_a_first_process_that_is_not_there_yet_is_no_error_in_the_settings(
    monkeypatch, text, ended, words
):
    """JAX raises a RuntimeError where the name of process 0 is unknown for 300 s, as on GKE before
    its pod has a node: with status 1 the whole JobSet failed."""

    def initialize(**_):
        raise RuntimeError(text)

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(hosts, "leave", lambda line, status: sys.exit(status))
    with pytest.raises(ended, match=words):
        hosts.start(several=True, cpu_devices=0)


def test_an_incomplete_cluster_is_named(monkeypatch):
    monkeypatch.setenv(hosts.COORDINATOR, "localhost:1")
    with pytest.raises(ValueError, match="DAPO_COORDINATOR is set, but not DAPO_PROCESS, DAPO"):
        hosts.start(several=True, cpu_devices=0)


def test_a_port_in_use_is_named_and_a_wait_is_said(monkeypatch, capsys):
    """A taken port ended with 75, which a launcher tries again, and a wait said nothing."""
    monkeypatch.setattr(hosts, "WAITING_SECONDS", 0.05)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"localhost:{taken.getsockname()[1]}"
        cluster = {"coordinator_address": address, "num_processes": 2, "process_id": 0}
        with (
            pytest.raises(ValueError, match=f"DAPO_COORDINATOR={address}: that port is in use"),
            hosts._saying_what_is_waited_for(cluster),
        ):
            pass
        with hosts._saying_what_is_waited_for(cluster | {"process_id": 1}):
            time.sleep(0.2)
    assert f"waiting for 2 processes at {address}, 0 s" in capsys.readouterr().err
