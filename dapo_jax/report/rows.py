"""The rows of several runs in one small file, rows.jsonl.gz, from which a study makes its tables.

A line is a run: {"arm", "seed", "config": {dotted key: value}, "starts": [time, commit,
changed, versions and devices of each start], "evaluations": {set: {score: {finished steps:
value}}}, "metrics": {key: [value a row, null where missing]}}. 100 steps take about 10 kB.
"""

import gzip
import json
import math
import pathlib
import re
from collections.abc import Mapping

from configs.base import RENAMED
from dapo_jax.logs.files import gzip_lines, write_rollouts
from dapo_jax.logs.metrics import METRICS, TASK
from dapo_jax.report.runs import Run, sweep_label

# The times of one machine are left out, but not the quantities of its schedule.
LEFT_OUT, KEPT = ("engine/", "seconds_in_rollout/"), ("engine/decode_steps", "engine/occupancy")
OF_A_START = ("time", "commit", "changed", "versions", "devices")  # not of the machine
DIGITS = 6  # significant ones of a float
ABSOLUTE = re.compile(r"""(?:^|(?<=[=:,'"\[]))/(?!/)[^\s,=:'"\]]*""")  # no gs://, no </s>


def write_rows(path: str | pathlib.Path, runs: Mapping[str, Run]) -> None:
    """Writes the runs, a line each, in order; equal runs give equal bytes.

    A run without an arm gets its label for one. Paths of the machine are cut to their last part.
    """
    write_rollouts(path, (_line_of(run.arm or label, run) for label, run in runs.items()))


def read_rows_file(path: str | pathlib.Path) -> dict[str, Run]:
    """Reads the output of `write_rows`: label -> run, with the arm and seed of each.

    Raises ValueError, with file and line, for a line that is no run, and for two runs of one arm
    and seed; FileNotFoundError.
    """
    path, runs = pathlib.Path(path), {}
    try:
        for number, line in enumerate(gzip_lines(path), start=1):
            try:
                run = _run_of(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: no run's rows ({error!r})") from None
            label = sweep_label(run.arm, run.seed)
            if label in runs:
                raise ValueError(f"{path}, line {number}: {label!r} is there twice")
            runs[label] = run
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is no whole gzip file ({error}): put back a copy of it") from None
    return runs


def _line_of(arm: str, run: Run) -> dict:
    evaluations: dict[str, dict] = {}
    for (name, score), values in run.evaluations.items():
        rounded_values = {str(step): _rounded(value) for step, value in values.items()}
        evaluations.setdefault(name, {})[score] = rounded_values
    keys = [metric.key for metric in METRICS]
    kept = [key for key in keys if key in KEPT or not key.startswith(LEFT_OUT)]
    kept += sorted({key for row in run.rows for key in row if key.startswith(TASK)})
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
    """A value whose texts have the last part of each path of the machine only."""
    if isinstance(value, list):
        return [_portable(item) for item in value]
    if not isinstance(value, str):
        return value
    return ABSOLUTE.sub(lambda match: pathlib.PurePosixPath(match[0]).name or match[0], value)


def _rounded(value: float | None) -> float | None:
    """A number to six significant digits; integers and None stay, NaN and infinities are None."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _run_of(line: Mapping) -> Run:
    lengths = {len(values) for values in line["metrics"].values()}
    if len(lengths) != 1:
        raise ValueError(f"its metrics have {sorted(lengths)} rows")
    rows = [
        {key: values[row] for key, values in line["metrics"].items() if values[row] is not None}
        for row in range(lengths.pop())
    ]
    evaluations = {
        (name, score): {int(step): value for step, value in values.items()}
        for name, scores in line["evaluations"].items()
        for score, values in scores.items()
    }
    config = {RENAMED.get(key, key): value for key, value in line["config"].items()}
    return Run(rows, evaluations, config, list(line["starts"]), line["arm"])
