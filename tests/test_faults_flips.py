"""One random bit of the newest checkpoint is flipped: in a random file, or at a random byte of all.

What a resumed run then restores is bitwise a state that was saved: the newest one where the bit
does not matter, and else the one before, with the damaged one kept as it was.
"""

import pathlib
import shutil

import jax
import numpy as np
import pytest
from conftest import cases
from runs import contents
from test_checkpoint import abstract, state_at

from dapo_jax.checkpoints.store import Checkpoints

pytestmark = [
    pytest.mark.faults,
    # Orbax abandons its other reads when one fails, and Python tells of them as they are collected.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def progress_at(step: int) -> dict:
    """Makes a progress that depends on the step."""
    return {"cursor": 48 * step, "row": {"step": step - 1, "reward/mean": step / 7}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """Two checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    run = Checkpoints(folder, keep=2)
    for step in (1, 2):
        run.save(step, state_at(step), progress_at(step))
    run.close()
    return folder


@pytest.mark.parametrize("seed", cases(20, 500))
def test_a_flipped_bit_is_seen_or_does_not_matter(seed, saved, tmp_path):
    files = {name: content for name, content in contents(saved / "2").items() if content}
    sizes, rng = np.array([*map(len, files.values())]), np.random.default_rng(seed)
    name = str(rng.choice([*files], p=sizes / sizes.sum() if seed % 2 else None))
    flipped = bytearray(files[name])
    flipped[rng.integers(len(flipped))] ^= 1 << int(rng.integers(8))
    folder = tmp_path / "saved"
    shutil.copytree(saved, folder)
    (folder / "2" / name).write_bytes(flipped)
    damaged, reports = contents(folder / "2"), []
    step, state, progress = Checkpoints(folder, keep=2).restore_latest(
        abstract(state_at(0)), report=reports.append
    )
    same = jax.tree.map(
        lambda a, b: a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes(),
        state,
        state_at(step),
    )
    assert all(jax.tree.leaves(same)) and progress == progress_at(step)
    if step == 1:
        assert contents(folder / "damaged.2.0") == damaged
        assert "checkpoint 2" in "".join(reports)
