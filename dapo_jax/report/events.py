"""What went wrong or began again in a run: alarms, updates left out, resumes, rows cut."""

import contextlib
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from dapo_jax.report.runs import Run
from dapo_jax.run.files import read_rows

COUNTED = {  # metrics that are 0 in a step in which nothing is wrong
    "updates_skipped": "updates left out, not finite",
    "updates_empty": "updates without any weight",
    "responses_not_finite": "responses with a log-probability that is not finite",
    "verdicts/gave_up": "responses that the grader gave up on",
}


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happened in a run: its kind, the steps, and what a person should know."""

    kind: str
    steps: str
    text: str


def of_run(run: Run) -> list[Event]:
    """Lists the events of a run, from its rows, its starts and the rows that were cut."""
    found = []
    names = dict.fromkeys(key for row in run.rows for key in row if key.startswith("alarm/"))
    for name in names:
        if steps := _steps(run.rows, name):
            text = f"{name.removeprefix('alarm/')} ({len(steps)} steps)"
            found.append(Event("alarm", spans(steps), text))
    if not names and (steps := _steps(run.rows, "alarms")):
        found.append(Event("alarm", spans(steps), f"alarms ({len(steps)} steps)"))
    for key, meaning in COUNTED.items():
        if steps := _steps(run.rows, key):
            count = sum(row.get(key) or 0 for row in run.rows)
            found.append(Event("fault", spans(steps), f"{count:.0f} {meaning}"))
    found += [Event("resume", "-", text) for text in _resumes(run.starts)]
    for path in sorted(run.workdir.glob("metrics.cut-*.jsonl")) if run.workdir else ():
        with contextlib.suppress(ValueError):  # a copy; nothing else depends on it
            steps = [row["step"] for row in read_rows(path)]
            found.append(Event("done again", spans(steps), f"the rows cut are in {path.name}"))
    return found


def _steps(rows: Iterable[Mapping], key: str) -> list[int]:
    return [row["step"] for row in rows if row.get(key)]


def _resumes(starts: Sequence[Mapping]) -> list[str]:
    """A line for each start after the first, with what differs from the one before."""
    lines = []
    for number, (before, start) in enumerate(itertools.pairwise(starts), start=2):
        names = ("host", "commit", "versions", "devices")
        changed = [name for name in names if before.get(name) != start.get(name)]
        other = f", another {' and '.join(changed)}" if changed else ""
        lines.append(f"start {number} of {len(starts)}, {start.get('time', '-')}{other}")
    return lines


def spans(steps: Sequence[int]) -> str:
    """Steps in words: [3, 4, 5, 9] is "3-5, 9"."""
    ends: list[list[int]] = []
    for step in steps:
        if ends and step == ends[-1][1] + 1:
            ends[-1][1] = step
        else:
            ends.append([step, step])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ends)


def unfinished(folder: pathlib.Path) -> list[dict]:
    """Lists the last attempt of each point of a sweep that did not end with status 0."""
    path, last = folder / "points.jsonl", {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a kill in a line
            point = json.loads(line)
            last[point["arm"], point["seed"]] = point
    return [point for point in last.values() if point.get("status") != 0]


def versions(runs: Mapping[str, Run]) -> list[dict]:
    """Lists the distinct code, versions and devices of all starts, each with the runs of it."""
    found: dict[str, dict] = {}
    for label, run in runs.items():
        for start in run.starts:
            devices = start.get("devices") or {}
            entry = {
                "commit": start.get("commit") or "-",
                "changed": start.get("changed"),
                "devices": "{} x {}, {} processes".format(
                    *(devices.get(key, "-") for key in ("count", "kind", "processes"))
                ),
                "versions": ", ".join(f"{k} {v}" for k, v in (start.get("versions") or {}).items()),
            }
            of_key = found.setdefault(json.dumps(entry), entry | {"runs": []})
            of_key["runs"] += [] if label in of_key["runs"] else [label]
    return list(found.values())
