"""Several processes give the run of one; checkpoints go from any number of devices to any other.

Every run here is one of tests/small_run.py. Sums over two devices have the same bits however the
devices are spread over processes; sums over four are added in another order, which shows in the
last digits of float32.
"""

import gzip
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

from dapo_jax.run.files import read_rows
from sharding import hosts

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS = 3
# What hangs on the number of devices: who is drawn beside whom, and what is drawn in vain.
SCHEDULE = ("engine/", "sampled_tokens_total", "groups/cancelled")
TIMINGS = ("seconds/", "seconds_in_rollout/", "tokens_per_second/")
MINUTES = 8


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Programs of the runs with one process, some of which are the same."""
    return tmp_path_factory.mktemp("compiled")


def run(workdir, cache, *, processes=1, devices, steps=STEPS):
    """Start the processes, wait for all, and return the run's directory; output in its logs/."""
    logs = workdir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "tests/small_run.py", str(workdir), str(devices), str(steps)]
    base = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    several = {"DAPO_COORDINATOR": f"localhost:{free_port()}", "DAPO_PROCESSES": str(processes)}
    alone = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    started = []
    for i in range(processes):
        more = alone if processes == 1 else several | {"DAPO_PROCESS": str(i)}
        with (logs / f"{processes}_{i}.txt").open("w") as log:
            started.append(
                subprocess.Popen(command, cwd=ROOT, env=base | more, stdout=log, stderr=log)
            )
    try:
        codes = [process.wait(timeout=60 * MINUTES) for process in started]
    finally:
        for process in started:
            process.kill()
    tails = [(logs / f"{processes}_{i}.txt").read_text()[-2_000:] for i in range(processes)]
    assert codes == [0] * processes, "\n".join(tails)
    return workdir


def continued(source, workdir, cache, *, finished_steps, **how):
    """A copy of a run, taken back to a checkpoint of it, goes on in another way."""
    shutil.copytree(source, workdir)
    for folder in (workdir / "checkpoints").iterdir():
        if int(folder.name) > finished_steps:
            shutil.rmtree(folder)
    return run(workdir, cache, **how)


def rows(workdir):
    return [
        {key: value for key, value in row.items() if not key.startswith(TIMINGS)}
        for row in read_rows(workdir / "metrics.jsonl")
    ]


def responses(workdir, step):
    """Everything sampled in a step, with verdicts and rewards."""
    with gzip.open(workdir / "rollouts" / f"{step}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def assert_same_run(workdir, expected, *, bitwise=False, except_for=()):
    ours, theirs = rows(workdir), rows(expected)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == [*range(STEPS)]
    for step in range(STEPS):
        assert responses(workdir, step) == responses(expected, step)
        for key, value in theirs[step].items():
            if key.startswith(except_for):
                continue
            if bitwise or isinstance(value, int):
                assert ours[step][key] == value, (step, key)
            elif key == "ratio_gap":  # rounding itself
                assert ours[step][key] < 1e-6
            else:
                assert ours[step][key] == pytest.approx(value, rel=2e-5, abs=1e-7), (step, key)
    for file in (expected / "eval").iterdir():
        assert (workdir / "eval" / file.name).read_text() == file.read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two_devices(runs, cache):
    return run(runs / "two_devices", cache, devices=2)


@pytest.fixture(scope="module")
def two_processes(runs, cache):
    return run(runs / "two_processes", cache, processes=2, devices=2)


@pytest.fixture(scope="module")
def one_device(runs, cache):
    """The first step only."""
    return run(runs / "one_device", cache, devices=1, steps=1)


@pytest.fixture(scope="module")
def four_devices(runs, cache, one_device):
    return continued(one_device, runs / "four_devices", cache, finished_steps=1, devices=4)


def test_two_processes_are_one_run_bitwise(two_processes, two_devices):
    """The same prompts, samples, verdicts, decisions, updates and evaluations, written once."""
    assert_same_run(two_processes, two_devices, bitwise=True)
    there = {path.name for path in two_devices.iterdir()}
    assert {path.name for path in two_processes.iterdir()} == there
    assert (two_processes / "logs" / "2_1.txt").read_text().count("step ") == 0


def test_four_processes_go_on_with_the_checkpoint_of_one_device(
    runs, cache, one_device, four_devices
):
    """As one process with four devices does."""
    how = {"finished_steps": 1, "processes": 4, "devices": 4}
    four_processes = continued(one_device, runs / "four_processes", cache, **how)
    assert_same_run(four_processes, four_devices)


def test_one_process_goes_on_with_the_checkpoint_of_two(runs, cache, two_processes):
    """On one device: the same prompts come next; sums have another order."""
    alone = continued(two_processes, runs / "alone", cache, finished_steps=2, devices=1)
    assert_same_run(alone, two_processes, except_for=SCHEDULE)


def test_two_devices_go_on_with_the_checkpoint_of_four(runs, cache, four_devices):
    fewer = continued(four_devices, runs / "fewer", cache, finished_steps=2, devices=2)
    assert_same_run(fewer, four_devices, except_for=SCHEDULE)


FAILS = """
import sys, time
from sharding import hosts
hosts.start(several=True, cpu_devices=2)
values = hosts.gather({"process": int(sys.argv[1])})
assert values == [{"process": 0}, {"process": 1}]
try:
    hosts.on_main(lambda: int("one"))
except ValueError as error:
    print("all have it:", error, flush=True)
if sys.argv[1] == "1":
    hosts.fail("error: no prompts here", code=1)
time.sleep(60)
"""


def test_values_are_gathered_errors_shared_and_a_failed_process_ends_the_others():
    port = free_port()
    base = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    base |= {"DAPO_COORDINATOR": f"localhost:{port}", "DAPO_PROCESSES": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", FAILS, str(i)],
            env=base | {"DAPO_PROCESS": str(i), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [1, 1]
    assert all("all have it: invalid literal for int()" in output for output in outputs)
    assert "process 1 failed: error: no prompts here" in outputs[0]


def test_an_incomplete_cluster_is_named():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(hosts.COORDINATOR, "localhost:1")
        with pytest.raises(ValueError, match="DAPO_COORDINATOR is set, but not DAPO_PROCESS, DAPO"):
            hosts.start(several=True, cpu_devices=0)
