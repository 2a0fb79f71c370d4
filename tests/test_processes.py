"""Several processes give the run of one; checkpoints go from any number of devices to any other.

Every run here is one of tests/small_run.py. Sums over two devices have the same bits however the
devices are spread over processes; sums over four are added in another order, which shows in the
last digits of float32.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest
from bucket import bucket, flip, folders
from processes import ROOT, free_port, ran, started, wait_for
from runs import SCHEDULE, digests, responses, rows_without_timings

from dapo_jax.convert import convert
from dapo_jax.logs.metrics import DIGESTS, TOKENS, VERDICTS
from dapo_jax.process import hosts

__all__ = ["bucket"]  # a fixture
STEPS = 3
SECONDS = 480  # a run that takes so long hangs


def run(workdir, *, processes=1, devices, steps=STEPS, start="", checkpoints=""):
    """Starts the processes, waits for all, and returns the run's directory; output in its logs/.

    start: --start. checkpoints: checkpoint.directory.
    """
    logs = workdir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    names = [logs / f"{processes}_{i}.txt" for i in range(processes)]
    arguments = ["tests/small_run.py", str(workdir), str(devices), str(steps), start, checkpoints]
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(name.open("w")) for name in names]
        group = stack.enter_context(started(arguments, processes=processes, outputs=outputs))
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
            if bitwise or isinstance(value, int) or key in (TOKENS, VERDICTS):
                assert ours[step][key] == value, (step, key)
            elif key in DIGESTS:  # of bits
                continue
            elif key == "ratio_gap":  # rounding itself
                assert ours[step][key] < 1e-6
            else:
                assert ours[step][key] == pytest.approx(value, rel=2e-5, abs=1e-7), (step, key)
    for file in (expected / "eval").glob("*"):
        assert (workdir / "eval" / file.name).read_bytes() == file.read_bytes()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two_devices(runs):
    """The run of one process."""
    return run(runs / "two_devices", devices=2)


@pytest.mark.slow
def test_two_processes_are_one_run_bitwise_and_fork_it(runs, two_devices):
    """The same prompts, samples, verdicts, decisions, updates and evaluations, written once."""
    two_processes = run(runs / "two_processes", processes=2, devices=2)
    assert_same_run(two_processes, two_devices, bitwise=True)
    there = {path.name for path in two_devices.iterdir()}
    assert {path.name for path in two_processes.iterdir()} == there
    assert (two_processes / "logs" / "2_1.txt").read_text().count("step ") == 0
    fork = run(runs / "fork", processes=2, devices=2, start=f"run:{two_devices}@2")
    assert rows_without_timings(fork) == rows_without_timings(two_devices)[2:]


@pytest.mark.slow
def test_four_processes_go_on_with_the_checkpoint_of_one(runs, two_devices):
    """On twice the devices: the same prompts come next; sums have another order."""
    four = shutil.copytree(two_devices, runs / "four_processes")
    for step in (2, 3):
        shutil.rmtree(four / "checkpoints" / str(step))
    run(four, processes=4, devices=4)
    assert_same_run(four, two_devices, except_for=SCHEDULE)


def loops(workdir):
    """Starts the restart loop of each of two workers, as experiments/launch does; returns them."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        hosts.COORDINATOR: f"localhost:{free_port()}",
        hosts.PROCESSES: "2",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "BACKOFF_SECONDS": "1",
        "PYTHONPATH": str(ROOT),
        "TRAIN": f"{sys.executable} tests/small_run.py {workdir} 2 {STEPS}",
    }
    return [
        subprocess.Popen(
            [ROOT / "experiments" / "launch" / "run_worker.sh"],
            cwd=ROOT,
            env=env | {hosts.PROCESS: str(i), "WORKDIR": f"{workdir}_{i}"},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        for i in range(2)
    ]


def training_of(loop) -> int:
    """The process that a loop has started, by its ID."""
    children = pathlib.Path(f"/proc/{loop.pid}/task/{loop.pid}/children").read_text().split()
    return next(
        int(child)
        for child in children
        if b"small_run" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[1]
    )


@pytest.mark.slow
def test_two_restart_loops_go_on_after_one_worker_is_killed(runs, two_devices):
    """Bitwise as if nothing had been; the other worker notices in time, and its loop goes on.

    Other signals, in all phases of a step, are in test_faults_stops.py.
    """
    workdir = runs / "loops"
    group = loops(workdir)
    try:
        wait_for((workdir / "checkpoints" / "1").is_dir, seconds=SECONDS)
        lost, other = training_of(group[1]), training_of(group[0])
        os.kill(lost, signal.SIGKILL)
        gone = lambda: not pathlib.Path(f"/proc/{other}").exists()  # noqa: E731
        wait_for(gone, seconds=hosts.HEARTBEAT_SECONDS + 8)  # JAX counts in steps of seconds
        assert [loop.wait(timeout=SECONDS) for loop in group] == [0, 0]
    finally:
        for loop in group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(loop.pid, signal.SIGKILL)
    logs = [sorted(pathlib.Path(f"{workdir}_{i}.logs").glob("attempt-*")) for i in range(2)]
    assert [len(files) for files in logs] == [2, 2]
    assert_same_run(workdir, two_devices, bitwise=True)


@pytest.mark.slow
def test_a_process_killed_inside_a_call_of_an_environment_changes_nothing(tmp_path):
    """The other ends with the status that a launcher tries again; both go on bitwise."""
    kill = tmp_path / "kill"
    keys = {
        "num_steps": STEPS,
        **{"checkpoint.every_steps": 1, "eval.every_steps": 0, "mesh.cpu_devices": 2},
        **{"rollout.max_response_tokens": 96, "learner.row_tokens": 512},
        "data.train.environment": "tests.ext_tasks.slow:Deadly",
        "rollout.partial_rollout_steps": 1,  # what no clock decides is all
    }
    command = ["-m", "dapo_jax.train", "--config=tests/small_config.py"]
    command += [f"--config.{key}={value}" for key, value in keys.items()]
    more = {"JAX_PLATFORMS": "cpu", "KILL": str(kill)}

    def codes(name, processes, *, kills=False):
        arguments = [*command, f"--workdir={tmp_path / name}"]
        arguments += ["--distributed"] * (processes > 1)
        with contextlib.ExitStack() as stack:
            log = stack.enter_context((tmp_path / f"{name}.txt").open("a"))
            given = {"processes": processes, "outputs": [log] * processes, "more": more}
            group = stack.enter_context(started(arguments, **given))
            if kills:
                wait_for((tmp_path / name / "checkpoints" / "1").is_dir, seconds=SECONDS)
                kill.touch()
            return [process.wait(timeout=SECONDS) for process in group]

    assert codes("whole", 1) == [0]
    assert codes("killed", 2, kills=True) == [75, -signal.SIGKILL] and not kill.exists()
    assert codes("killed", 2) == [0, 0]
    assert_same_run(tmp_path / "killed", tmp_path / "whole", bitwise=True)
    assert digests(tmp_path / "killed", STEPS) == digests(tmp_path / "whole", STEPS)


@pytest.mark.slow
def test_two_processes_save_in_a_bucket_and_one_forks_exports_and_samples(
    bucket, tmp_path, two_devices
):
    """Each writes its own part; one finds it damaged, and both go on with the checkpoint before."""
    there, url = tmp_path / "there", f"{bucket.url}/there"
    run(there, processes=2, devices=2, steps=2, checkpoints=url)
    flip(bucket, "there/2/state/ocdbt.process_1/d/")
    run(there, processes=2, devices=2, checkpoints=url)
    assert "leave it as damaged.2" in (there / "logs" / "2_1.txt").read_text()
    assert folders(bucket, "there") == {"1", "2", "3", "damaged.2.0"}
    assert_same_run(there, two_devices, bitwise=True)

    fork = run(tmp_path / "fork", devices=2, start=f"run:{there}@2")
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
        ("DEADLINE_EXCEEDED: GetKeyValue() timed out with key: cpu:global_topology", True),
        ("INTERNAL: Shutdown barrier has failed", True),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes", False),
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
    ("text", "left"),
    [
        ("Failed to recognize coordinator address first-slice-0-0.first", [75]),
        ("Getting metadata['agent-worker-number'] failed for 6 tries", [75]),
        ("jax.distributed.initialize() must be called before any JAX calls", []),
    ],
)
def test_a_first_process_that_is_not_there_yet_is_no_error_in_the_settings(monkeypatch, text, left):
    """JAX raises a RuntimeError where the name of process 0 is unknown for 300 s, as on GKE before
    its pod has a node: with status 1 the whole JobSet failed."""

    def initialize(**_):
        raise RuntimeError(text)

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    statuses = []

    def leave(line, status):
        statuses.append(status)
        raise SystemExit

    monkeypatch.setattr(hosts, "leave", leave)
    with pytest.raises(SystemExit if left else RuntimeError):
        hosts.start(several=True, cpu_devices=0)
    assert statuses == left


def test_an_incomplete_cluster_is_named():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(hosts.COORDINATOR, "localhost:1")
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
