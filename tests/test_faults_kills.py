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
from dapo_jax.logs.metrics import untimed

pytestmark = [pytest.mark.faults, pytest.mark.slow]
STEPS = 12
KILLS = 10 if FULL else 2  # of a test


def contents(workdir: pathlib.Path) -> list:
    """Gives the command until it is done; all that no clock decides, of the state the digests."""
    rows = rows_of(workdir, f"num_steps={STEPS}")
    newest = workdir / "checkpoints" / str(STEPS)
    progress = json.loads((newest / "progress" / "metadata").read_text())
    progress["row"] = untimed(progress["row"])
    sampled = [runs.responses(workdir, row["step"]) for row in rows]
    return [rows, sampled, progress, runs.digests(workdir, STEPS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody kills: (its contents, seconds of its start, seconds of a step)."""
    workdir, began = tmp_path_factory.mktemp("whole"), time.monotonic()
    found, seconds = contents(workdir), time.monotonic() - began
    stepping = sum(row["seconds/total"] for row in read_rows(workdir / "metrics.jsonl"))
    return found, seconds - stepping, stepping / STEPS


@pytest.mark.parametrize("seed", cases(1, 10))
def test_a_killed_run_that_is_given_again_is_bitwise_that_of_no_kill(seed, whole, tmp_path):
    """Rows (timings aside), all responses, the final state and the progress."""
    expected, start_seconds, step_seconds = whole
    moments, left = random.Random(seed), KILLS
    for number in itertools.count():  # a run may be done before all kills have come
        workdir = tmp_path / str(number)
        while left:
            how = {"seconds": moments.uniform(0, start_seconds)}
            if moments.random() > 0.25:
                seconds = moments.uniform(0, 2 * step_seconds)
                how = {"seconds": seconds, "saving": workdir / "checkpoints"}
            with training(workdir, f"num_steps={STEPS}") as process:
                if not killed(process, **how):
                    break
            left -= 1
        assert contents(workdir) == expected
        if not left:
            return
