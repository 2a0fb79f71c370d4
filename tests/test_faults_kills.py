"""kill -9 at random moments, then the same command again: the end is bitwise that of no kill.

Every checkpoint is due, so that many a kill comes in the middle of a save; a quarter of the kills
of real runs come before the first step.
"""

import itertools
import json
import pathlib
import random
import time

import pytest
import runs
from conftest import FULL, cases
from disturbed import killed, rows_of, training
from processes import ran, started

from dapo_jax.logs.files import read_rows

pytestmark = pytest.mark.faults
STEPS = 12
KILLS = 10 if FULL else 2  # of a test of real runs
TURN = (f"num_steps={STEPS}",)
EPISODES = (  # many a kill comes in the middle of a call
    *TURN,
    "data.train.environment=tests.ext_tasks.slow:Slow",
    *("rollout.max_response_tokens=96", "learner.row_tokens=512"),
)


def contents(workdir: pathlib.Path, flags: tuple[str, ...]) -> list:
    """Gives the command until it is done; all that no clock decides, of the state the digests.

    Of episodes a clock decides when slots fall idle, and so how many prompts are issued.
    """
    clocked = runs.SCHEDULE if flags == EPISODES else ()

    def fixed(row) -> dict:
        return {k: v for k, v in runs.untimed(row).items() if not k.startswith(clocked)}

    rows = list(map(fixed, rows_of(workdir, *flags)))
    newest = workdir / "checkpoints" / str(STEPS)
    progress = fixed(json.loads((newest / "progress" / "metadata").read_text()))
    progress["row"] = fixed(progress["row"])
    sampled = [runs.responses(workdir, row["step"]) for row in rows]
    return [rows, sampled, progress, runs.digests(workdir, STEPS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, request):
    """A run that nobody kills: (its flags, contents, seconds of its start, seconds of a step)."""
    workdir, began = tmp_path_factory.mktemp("whole"), time.monotonic()
    found, seconds = contents(workdir, request.param), time.monotonic() - began
    stepping = sum(row["seconds/total"] for row in read_rows(workdir / "metrics.jsonl"))
    return request.param, found, seconds - stepping, stepping / STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    "whole, seed",
    [
        *(pytest.param(TURN, seed, id=f"turn-{seed}") for seed in cases(1, 10)),
        *(pytest.param(EPISODES, seed, id=f"episode-{seed}") for seed in cases(0, 2)),
    ],
    indirect=["whole"],
)
def test_a_killed_run_that_is_given_again_is_bitwise_that_of_no_kill(
    seed, whole, tmp_path, record_property
):
    """Rows (timings aside), all responses, the final state and the progress."""
    record_property("faults", KILLS)
    flags, expected, start_seconds, step_seconds = whole
    moments, left = random.Random(seed), KILLS
    for number in itertools.count():  # a run may be done before all kills have come
        workdir = tmp_path / str(number)
        while left:
            how = {"seconds": moments.uniform(0, start_seconds)}
            if moments.random() > 0.25:
                seconds = moments.uniform(0, 2 * step_seconds)
                how = {"seconds": seconds, "saving": workdir / "checkpoints"}
            with training(workdir, *flags) as process:
                if not killed(process, **how):
                    break
            left -= 1
        assert contents(workdir, flags) == expected
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
    saved, seconds = tmp_path / "saved", random.Random(seed).uniform(0, 0.3)
    with started(["-c", SNAPSHOTS, str(saved)]) as (process,):
        assert killed(process, seconds=seconds, saving=saved)
    a = 12345
    for step in range(30):
        a = (a * 1664525 + step) % 2**32
    said = ran("-c", SNAPSHOTS, saved).stdout.splitlines()
    assert said[-1] == f"{a} {sum(range(30))}"
