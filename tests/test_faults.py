"""A short run of each part of experiments/faults: nothing is lost, and what is wrong is said."""

import pytest

from dapo_jax.sampler import cache
from experiments.faults import parts

# Orbax abandons its other reads when one fails, and Python tells of them as they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("name", parts.NAMES)
def test_every_fault_is_survived_and_said(name, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "PARTS", ((1, 1),))  # one program for decoding
    part = parts.load(name)
    outcomes = list(part.inject(part.short, 0, tmp_path))
    assert len(outcomes) == part.short
    bad = [o for o in outcomes if not o.survived or o.lost or o.said is False]
    assert not bad, bad
