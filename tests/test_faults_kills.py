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

from dapo_jax.logs.files import read_rows

pytestmark = [pytest.mark.faults, pytest.mark.slow]
STEPS = 12
KILLS = 10 if FULL else 2  # of a test
TURN = (f"num_steps={STEPS}",)
EPISODES = (  # many a kill comes in the middle of a call, and an episode goes on in other steps
    *TURN,
    "data.train.environment=tests.ext_tasks.slow:Slow",
    *("rollout.max_response_tokens=96", "learner.row_tokens=512"),
    "rollout.partial_rollout_steps=2",
)


def contents(workdir: pathlib.Path, flags: tuple[str, ...]) -> list:
    """Gives the command until it is done; all that no clock decides, of the state the digests."""
    rows = rows_of(workdir, *flags)
    newest = workdir / "checkpoints" / str(STEPS)
    progress = json.loads((newest / "progress" / "metadata").read_text())
    progress["row"] = runs.untimed(progress["row"])
    sampled = [runs.responses(workdir, row["step"]) for row in rows]
    return [rows, sampled, progress, runs.digests(workdir, STEPS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, request):
    """A run that nobody kills: (its flags, contents, seconds of its start, seconds of a step)."""
    workdir, began = tmp_path_factory.mktemp("whole"), time.monotonic()
    found, seconds = contents(workdir, request.param), time.monotonic() - began
    stepping = sum(row["seconds/total"] for row in read_rows(workdir / "metrics.jsonl"))
    return request.param, found, seconds - stepping, stepping / STEPS


@pytest.mark.parametrize(
    "whole, seed",
    [
        *(pytest.param(TURN, seed, id=f"turn-{seed}") for seed in cases(1, 10)),
        *(pytest.param(EPISODES, seed, id=f"episode-{seed}") for seed in cases(0, 2)),
    ],
    indirect=["whole"],
)
def test_a_killed_run_that_is_given_again_is_bitwise_that_of_no_kill(seed, whole, tmp_path):
    """Rows (timings aside), all responses, the final state and the progress."""
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
