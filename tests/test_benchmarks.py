"""The benchmark of an accelerator: a row that fails says why, and the others are measured."""

import jax
import pytest
from absl.testing import flagsaver

from experiments.benchmarks import device


def test_a_row_that_fails_says_so_and_the_others_are_measured(monkeypatch, capsys):
    """An accelerator is lent for minutes; a mistake of ours still ends with status 1."""

    def exhausted():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating")

    def no_room():
        raise MemoryError("the weights leave no room for a slot")

    def mistake():
        raise ValueError("a mistake of ours")

    rows = {"a": exhausted, "b": no_room, "c": lambda: "0.5 s"}
    monkeypatch.setattr(device, "rows_of", lambda work: iter((rows | more).items()))
    more = {"not asked": mistake}
    with flagsaver.as_parsed(rows="^[abcd]$", small="tpu"):
        device.main(None)
        out = capsys.readouterr().out
        more = {"d": mistake}
        with pytest.raises(SystemExit):
            device.main(None)
    assert "a mistake of ours" in capsys.readouterr().out
    assert "| a | JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating | 0 |" in out
    assert "| b | MemoryError: the weights leave no room for a slot | 0 |" in out
    assert "| c | 0.5 s | 0 |" in out and "not asked" not in out


@pytest.mark.slow
def test_all_kinds_of_rows_work_in_small(capsys):
    """No row may fail on an accelerator that would have failed here."""

    def rows(platform: str, asked: str) -> dict[str, str]:
        with flagsaver.as_parsed(small=platform, rows=asked):
            device.main(None)
        lines = capsys.readouterr().out.splitlines()
        return dict(line.split(" | ")[:2] for line in lines if line.startswith("| "))

    (said,) = (text for name, text in rows("tpu", "agree, pages").items() if "agree" in name)
    assert "as by plain XLA and copied as by" in said
    found = rows("gpu", "rates|agree, rows|ours, .* 3 segm|agree, .*, bfloat|update|decode|^step")
    step = found["| agree, a step of tiny, bfloat16"]
    assert step.startswith("ratio gap 0,") and "a second step has the same bits" in step
    assert ", prefill " in found["| step, tiny"]
    assert "floor" in found["| decode, tiny, 64 tokens"]
