"""The benchmark of one GPU: what fails is a row that says why, and the others are measured."""

import jax
import pytest
from absl.testing import flagsaver

from dapo_jax.preflight.chips import Chip
from experiments.benchmarks import common, gpu_decode


def test_what_does_not_fit_is_a_row_and_the_rest_is_measured(tmp_path, monkeypatch, capsys):
    """Hours of one GPU end with the table.

    Only a decode step that ran out of memory was a row. An update that did, transformers without
    room for one slot or weights without room for ours ended the command before its table.
    """
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho not one slot fits >&2\nexit 1\n")
    python.chmod(0o755)
    seconds, exhausted = gpu_decode.step_seconds, "RESOURCE_EXHAUSTED: Out of memory"

    def step_seconds(preset, context, slots, kernels):
        if kernels == "xla":
            raise jax.errors.JaxRuntimeError(exhausted)
        return seconds(preset, context, slots, kernels) if slots < 1 else 0.5

    def update_seconds(preset, row_tokens):
        if row_tokens > 256:
            raise jax.errors.JaxRuntimeError(f"{exhausted}\nallocating")
        return 2.0

    monkeypatch.setattr(gpu_decode, "step_seconds", step_seconds)
    monkeypatch.setattr(gpu_decode, "update_seconds", update_seconds)
    monkeypatch.setattr(gpu_decode, "slots_that_fit", lambda preset, context: 256 - context)
    monkeypatch.setattr(common, "measured_chip", lambda **_: Chip("toy", 0.0, 1e9, 3e12))
    settings = dict.fromkeys(("slots", "repeats", "copy_mib", "product"), "8") | {
        "presets": ["tiny"],
        "contexts": ["64", "256"],
        "kernels": ["gpu_interpret", "xla"],
        "torch_python": str(python),
        "update_presets": ["tiny"],
        "row_tokens": ["512", "256"],
    }
    with flagsaver.as_parsed(**settings):
        gpu_decode.main(None)
    lines = capsys.readouterr().out.splitlines()
    lines = [line.split("|")[1:-1] for line in lines if line.startswith("| tiny")]
    table = [[cell.strip() for cell in line] for line in lines]
    assert table[0][:6] == ["tiny", "64", "gpu_interpret", "192", "384", "500.00"]
    assert [row[2:5] for row in table[1:6]] == [
        ["xla", "192", exhausted],
        ["transformers", "", "not one slot fits"],
        ["gpu_interpret", "0", "the weights leave no room for a slot"],
        ["xla", "0", exhausted],
        ["transformers", "", "not one slot fits"],
    ]
    assert table[6] == ["tiny", "512", f"{exhausted} allocating", "", ""]
    assert table[7][:3] == ["tiny", "256", "2.000"]


def test_other_errors_are_not_hidden():
    def wrong():
        raise ValueError("a mistake of ours")

    with pytest.raises(ValueError, match="a mistake"):
        gpu_decode.result_or_reason(wrong)
