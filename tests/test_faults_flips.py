"""One random bit of the newest checkpoint is flipped: in a random file, or at a random byte of all.

What a resumed run then restores is bitwise a state that was saved: the newest one where the bit
does not matter, and else the one before, with the damaged one kept as it was.
"""

import pathlib
import shutil

import numpy as np
import pytest
from conftest import cases
from runs import contents
from states import assert_restored, restored, saved

pytestmark = [
    pytest.mark.faults,
    # Orbax abandons its other reads when one fails, and Python tells of them as they are collected.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("saved")
    saved(folder, 1, 2).close()
    return folder


@pytest.mark.parametrize("seed", cases(10, 500))
def test_a_flipped_bit_is_seen_or_does_not_matter(seed, whole, tmp_path):
    files = {name: content for name, content in contents(whole / "2").items() if content}
    sizes, rng = np.array([*map(len, files.values())]), np.random.default_rng(seed)
    name = str(rng.choice([*files], p=sizes / sizes.sum() if seed % 2 else None))
    flipped = bytearray(files[name])
    flipped[rng.integers(len(flipped))] ^= 1 << int(rng.integers(8))
    folder = shutil.copytree(whole, tmp_path / "saved")
    (folder / "2" / name).write_bytes(flipped)
    damaged, reports = contents(folder / "2"), []
    found = restored(folder, reports.append)
    assert_restored(found, found[0])
    if found[0] == 1:
        assert contents(folder / "damaged.2.0") == damaged
        assert "checkpoint 2" in "".join(reports)
