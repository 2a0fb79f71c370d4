"""The benchmark of one GPU: what fails is a row that says why, and the others are measured."""

import jax
import pytest
from absl.testing import flagsaver

from experiments.benchmarks import gpu_decode, gpu_update


def test_what_does_not_fit_is_a_row_and_the_rest_is_measured(tmp_path, monkeypatch, capsys):
    """Hours of one GPU end with the table.

    Only a decode step that ran out of memory was a row. An update that did, transformers without
    room for one slot or weights without room for ours ended the command before its table, and of
    transformers' message one saw the exit status alone.
    """
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho not one slot fits >&2\nexit 1\n")
    python.chmod(0o755)
    seconds, exhausted = gpu_decode.step_seconds, "RESOURCE_EXHAUSTED: Out of memory"

    def step_seconds(preset, context, slots, kernels):
        if kernels == "xla":
            raise jax.errors.JaxRuntimeError(exhausted)
        return seconds(preset, context, slots, kernels) if slots < 1 else 0.5

    def measure(preset, row_tokens, *, repeats):
        if row_tokens > 256:
            raise jax.errors.JaxRuntimeError(f"{exhausted}\nallocating")
        return 2.0, 3e12

    monkeypatch.setattr(gpu_decode, "step_seconds", step_seconds)
    monkeypatch.setattr(gpu_decode, "slots_that_fit", lambda preset, context: 256 - context)
    monkeypatch.setattr(gpu_decode, "rates", lambda: (1e9, 3e12))
    monkeypatch.setattr(gpu_update, "measure", measure)
    settings = {
        "presets": ["tiny"],
        "slots": "256",
        "repeats": "1",
        "product": "512",
        "contexts": ["64", "256"],
        "kernels": ["gpu_interpret", "xla"],
        "torch_python": str(python),
        "update_presets": ["tiny"],
        "row_tokens": ["512", "256"],
    }
    with flagsaver.as_parsed(**settings):
        gpu_decode.main(None)
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| tiny")
    ]
    assert table[0][:6] == ["tiny", "64", "gpu_interpret", "192", "384", "500.00"]
    assert [row[2:5] for row in table[1:6]] == [
        ["xla", "192", exhausted],
        ["transformers", "", "not one slot fits"],
        ["gpu_interpret", "0", "the weights leave no room for a slot"],
        ["xla", "0", exhausted],
        ["transformers", "", "not one slot fits"],
    ]
    assert table[6:] == [
        ["tiny", "512", f"{exhausted} allocating", "", ""],
        ["tiny", "256", "2.000", "1.50", "50%"],
    ]


def test_a_floor_reads_weights_once_and_the_live_keys_and_values():
    """By hand, for 0.5B: 494 million weights, and 12 KiB of keys and values a token."""
    weights = gpu_decode.read_bytes("0.5b", 0, 0)
    assert weights == 2 * 494_032_768
    assert gpu_decode.read_bytes("0.5b", 256, 1_024) == weights + 256 * 1_024 * 12 * 1_024


def test_other_errors_are_not_hidden():
    def wrong():
        raise ValueError("a mistake of ours")

    with pytest.raises(ValueError, match="a mistake"):
        gpu_decode.result_or_reason(wrong)
