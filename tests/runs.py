"""The traces of runs, for tests to compare: rows without timings, responses, digests, files."""

import gzip
import json
import pathlib

from dapo_jax.logs.files import read_rows

CLOCKED = ("seconds/", "seconds_in_rollout/", "tokens_per_second/")  # no two runs have these alike
# What depends on when slots fall idle, so on the devices too: what is issued, and cancelled then.
SCHEDULE = ("engine/", "sampled_tokens_total", "groups/cancelled")


def untimed(row) -> dict:
    """The part of a row that two runs of one config have alike."""
    return {key: value for key, value in row.items() if not key.startswith(CLOCKED)}


def rows_without_timings(workdir: pathlib.Path) -> list[dict]:
    return [untimed(row) for row in read_rows(workdir / "metrics.jsonl")]


def responses(workdir: pathlib.Path, step: int) -> bytes:
    """All that was sampled in a step, with verdicts and rewards, as JSON lines."""
    return gzip.decompress((workdir / "rollouts" / f"{step}.jsonl.gz").read_bytes())


def digests(workdir: pathlib.Path, step: int) -> dict:
    file = workdir / "checkpoints" / str(step) / "manifest" / "metadata"
    return json.loads(file.read_text())["arrays"]


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def saved_steps(folder: pathlib.Path) -> list[int]:
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())
