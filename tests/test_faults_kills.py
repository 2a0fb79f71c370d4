"""kill -9 at random moments, then the same command again: the end is bitwise that of no kill.

Every checkpoint is due, so that many a kill comes in the middle of a save; a quarter of the kills
of real runs come before the first step.
"""

import itertools
import json
import pathlib
import random
import signal
import time

import pytest
import runs
from conftest import FULL, cases
from processes import started, wait_for

from dapo_jax.logs.files import read_rows
from dapo_jax.logs.metrics import untimed

pytestmark = pytest.mark.faults
STEPS = 12
KILLS = 10 if FULL else 2  # of a test of real runs
TRAIN = (
    *("-m", "dapo_jax.train", "--config=tests/small_config.py"),
    *(f"--config.num_steps={STEPS}", "--config.checkpoint.every_steps=1"),
    *("--config.checkpoint.keep=2", "--config.eval.every_steps=0"),
)
EPISODES = (  # many a kill comes in the middle of a call
    *TRAIN,
    "--config.data.train.environment=tests.ext_tasks.slow:Slow",
    *("--config.rollout.max_response_tokens=96", "--config.learner.row_tokens=512"),
)


def names(folder: pathlib.Path) -> set[str]:
    """Lists what is in a folder, half-written checkpoints too."""
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def status(arguments, log: pathlib.Path, *, kill=lambda process: None) -> int:
    """Gives a command and returns its status. kill: returns when the process has to die."""
    with log.open("a") as output, started([*arguments], outputs=[output]) as (process,):
        if kill(process):
            process.kill()
        return process.wait()


def after_a_save_begins(checkpoints: pathlib.Path, seconds: float):
    """Makes a `kill` for so long after a process begins to save."""
    before = names(checkpoints)

    def kill(process) -> bool:
        wait_for(lambda: process.poll() is not None or not names(checkpoints) <= before)
        time.sleep(seconds)
        return True

    return kill


def contents(workdir: pathlib.Path, clocked: tuple[str, ...]) -> list:
    """Reads all of a run that no clock decides; of the state the digests.

    clocked: what the names of metrics begin with that depend on when slots fall idle.
    """

    def fixed(row) -> dict:
        return {k: v for k, v in untimed(row).items() if not k.startswith(clocked)}

    rows = list(map(fixed, read_rows(workdir / "metrics.jsonl")))
    newest = workdir / "checkpoints" / str(STEPS)
    progress = fixed(json.loads((newest / "progress" / "metadata").read_text()))
    progress["row"] = fixed(progress["row"])
    sampled = [runs.responses(workdir, row["step"]) for row in rows]
    return [rows, sampled, progress, runs.digests(workdir, STEPS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, request):
    """A run that nobody kills: (seconds of its start, of a step, command, clocked, contents)."""
    train, clocked = request.param
    workdir, began = tmp_path_factory.mktemp("whole"), time.monotonic()
    log = workdir.with_suffix(".log")
    assert status([*train, f"--workdir={workdir}"], log) == 0, log.read_text()[-2_000:]
    rows = read_rows(workdir / "metrics.jsonl")
    stepping = sum(row["seconds/total"] for row in rows)
    start_seconds = time.monotonic() - began - stepping
    return start_seconds, stepping / STEPS, *request.param, contents(workdir, clocked)


@pytest.mark.slow
@pytest.mark.parametrize(
    "whole, seed",
    [
        *(pytest.param((TRAIN, ()), seed, id=f"turn-{seed}") for seed in cases(1, 10)),
        *(pytest.param((EPISODES, runs.SCHEDULE), i, id=f"episode-{i}") for i in cases(1, 2)),
    ],
    indirect=["whole"],
)
def test_a_killed_run_that_is_given_again_is_bitwise_that_of_no_kill(
    seed, whole, tmp_path, record_property
):
    """Rows (timings aside), all responses, the final state and the progress."""
    record_property("faults", KILLS)
    start_seconds, step_seconds, train, clocked, expected = whole
    moments, left = random.Random(seed), KILLS
    for number in itertools.count():  # a run may be done before all kills have come
        workdir, log = tmp_path / str(number), tmp_path / f"{number}.log"
        command = [*train, f"--workdir={workdir}"]
        while left:
            if moments.random() < 0.25:
                seconds = moments.uniform(0, start_seconds)
                kill = lambda process, seconds=seconds: time.sleep(seconds) or True  # noqa: E731
            else:
                seconds = moments.uniform(0, 2 * step_seconds)
                kill = after_a_save_begins(workdir / "checkpoints", seconds)
            if status(command, log, kill=kill) != -signal.SIGKILL:
                break
            left -= 1
        assert status(command, log) == 0, log.read_text()[-2_000:]
        assert contents(workdir, clocked) == expected
        if not left:
            return


# Restores, goes on to the last step and prints what it has then.
SNAPSHOTS = """
import sys, time, jax, jax.numpy as jnp
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.checkpoints.digests import described
from dapo_jax.checkpoints.snapshots import Snapshots
from dapo_jax.checkpoints.progress import Progress
checkpoints = Checkpoints(sys.argv[1], keep=2)
state = {"a": jnp.arange(2**18, dtype=jnp.uint32)}
abstract = {"a": jax.ShapeDtypeStruct(state["a"].shape, jnp.uint32, sharding=state["a"].sharding)}
first, state, saved = checkpoints.restore_latest(abstract, report=print) or (0, state, {})
cursor = Progress.from_json(saved).cursor
with Snapshots(checkpoints, every_steps=1, say=print) as run:
    for step in range(first, 30):
        state = {"a": state["a"] * 1664525 + step}
        cursor += step
        run.take(step + 1, state, Progress(cursor=cursor), described(state))
        time.sleep(0.01)
print(int(state["a"][12345]), cursor)
"""


@pytest.mark.parametrize("seed", cases(1, 10))
def test_a_program_that_only_saves_goes_on_after_a_kill(seed, tmp_path):
    log, command = tmp_path / "log", ["-c", SNAPSHOTS, str(tmp_path / "saved")]
    kill = after_a_save_begins(tmp_path / "saved", random.Random(seed).uniform(0, 0.3))
    assert status(command, log, kill=kill) == -signal.SIGKILL
    assert status(command, log) == 0, log.read_text()[-2_000:]
    a = 12345
    for step in range(30):
        a = (a * 1664525 + step) % 2**32
    assert log.read_text().splitlines()[-1] == f"{a} {sum(range(30))}"
