"""The benchmark of one GPU: what fails is a row that says why, and the others are measured."""

import jax
import pytest
from absl.testing import flagsaver

from experiments.benchmarks import gpu


def test_a_row_that_does_not_fit_says_so_and_the_others_are_measured(monkeypatch, capsys):
    def exhausted():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating")

    def no_room():
        raise MemoryError("the weights leave no room for a slot")

    rows = {"a": exhausted, "b": no_room, "c": lambda: "0.5 s", "not asked": lambda: 1 / 0}
    monkeypatch.setattr(gpu, "rows_of", lambda work: iter(rows.items()))
    with flagsaver.as_parsed(rows="^[abc]", small="false"):
        gpu.main(None)
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "| a | RESOURCE_EXHAUSTED: Out of memory allocating | 0 |",
        "| b | the weights leave no room for a slot | 0 |",
        "| c | 0.5 s | 0 |",
    ]


def test_other_errors_are_not_hidden(monkeypatch):
    def wrong():
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(gpu, "rows_of", lambda work: iter({"a": wrong}.items()))
    with flagsaver.as_parsed(rows="", small="false"), pytest.raises(ValueError, match="a mistake"):
        gpu.main(None)


@pytest.mark.slow
def test_all_kinds_of_rows_work_in_small(capsys):
    """A card is lent for minutes: no row may fail there that would have failed here."""
    with flagsaver.as_parsed(small="true", rows="rates|agree|ours, .* 3 segm|update|decode|step"):
        gpu.main(None)
    _, agree, *others = capsys.readouterr().out.splitlines()[-6:]
    gap = float(agree.split("ratio gap ")[1].split(";")[0])
    assert gap < 1e-5 and "has the same bits" in agree
    assert all(
        words in row for words, row in zip((" ms", " s;", "floor", "gap"), others, strict=True)
    )
