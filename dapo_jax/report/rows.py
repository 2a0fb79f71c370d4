"""The rows of several runs in one small file, rows.jsonl.gz, from which a study makes its tables.

A line is a run: {"arm", "seed", "config": {dotted key: value}, "starts": [time, commit,
changed, versions and devices of each start], "evaluations": {set: {score: {finished steps:
value}}}, "metrics": {key: [value a row, null where missing]}}. 100 steps take about 10 kB.
"""

import collections
import pathlib
from collections.abc import Mapping

from configs.base import RENAMED
from dapo_jax.logs.files import read_zipped_rows, write_zipped_rows
from dapo_jax.report.runs import Run, sweep_label

# The times of one machine are left out, but not the quantities of its schedule; evaluations have a
# place of their own.
LEFT_OUT = ("engine/", "seconds_in_rollout/", "eval/", "digest/")
KEPT = ("engine/decode_steps", "engine/drawn_tokens", "engine/occupancy")
OF_A_START = ("time", "commit", "changed", "versions", "devices")  # not of the machine
DIGITS = 6  # significant ones of a float


def write_rows(path: pathlib.Path, runs: Mapping[str, Run]) -> None:
    """Writes the runs, a line each, without the machine's paths; equal ones as equal bytes."""
    write_zipped_rows(path, (_line_of(run.arm or label, run) for label, run in runs.items()))


def read_rows_file(path: pathlib.Path) -> dict[str, Run]:
    """Reads the output of `write_rows`: label -> run, with the arm and seed of each."""
    return {sweep_label(run.arm, run.seed): run for run in map(_run_of, read_zipped_rows(path))}


def _line_of(arm: str, run: Run) -> dict:
    evaluations = collections.defaultdict(dict)
    for (name, score), values in run.evaluations.items():
        evaluations[name][score] = {str(step): _rounded(value) for step, value in values.items()}
    keys = dict.fromkeys(key for row in run.rows for key in row)
    kept = [key for key in keys if key in KEPT or not key.startswith(LEFT_OUT)]
    columns = {key: [_rounded(row.get(key)) for row in run.rows] for key in kept}
    return {
        "arm": arm,
        "seed": run.seed,
        "config": {key: _portable(value) for key, value in run.config.items()},
        "starts": [{key: it[key] for key in OF_A_START if key in it} for it in run.starts],
        "evaluations": evaluations,
        "metrics": {k: values for k, values in columns.items() if values.count(None) < len(values)},
    }


def _portable(value):
    """A value with the last part of each absolute path only."""
    if isinstance(value, list):
        return [_portable(item) for item in value]
    is_path = isinstance(value, str) and value.startswith("/")
    return pathlib.PurePosixPath(value).name if is_path else value


def _rounded(value: float | None) -> float | None:
    """A number to six significant digits; integers and None stay."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _run_of(line: Mapping) -> Run:
    rows = [
        {key: it for key, it in zip(line["metrics"], of_row, strict=True) if it is not None}
        for of_row in zip(*line["metrics"].values(), strict=True)
    ]
    evaluations = {
        (name, score): {int(step): value for step, value in values.items()}
        for name, scores in line["evaluations"].items()
        for score, values in scores.items()
    }
    config = {RENAMED.get(key, key): value for key, value in line["config"].items()}
    return Run(rows, evaluations, config, list(line["starts"]), line["arm"])
