"""Changes in the solutions' texts: answers, operations and checks of whole held-out responses.

    python -m experiments.overlong.texts --workdir=DIR
    python -m experiments.overlong.texts

The first reads the evaluations before and after each run of the study in DIR and writes
texts.jsonl; both print tables of it: means over the seeds, and differences from the arm that
punishes.
"""

import pathlib
import re
from collections.abc import Sequence

import numpy as np
from absl import app, flags

from dapo_jax.logs.files import read_zipped_rows
from experiments.overlong.study import STUDY
from experiments.study import look_into

FILE = pathlib.Path(__file__).parent / "texts.jsonl"
START, FIRST = "start", "punished"
OPERATION = re.compile(r"[+-]\d+")
MEASURES = (
    ("right_whole", "right of those not cut, %", "{:.1f}"),
    ("all_worked", "with all operations of those not cut, %", "{:.1f}"),
    ("checks", "checks of those not cut", "{:.2f}"),
)


def measured(responses: Sequence[dict]) -> dict[str, float]:
    """Describes the responses that are not cut. Some are not."""
    whole = [response for response in responses if not response["truncated"]]
    return {
        "right_whole": 100 * float(np.mean([response["correct"] for response in whole])),
        "all_worked": 100 * float(np.mean([works_all(response) for response in whole])),
        "checks": float(np.mean([r["response"].count("Let me check") for r in whole])),
    }


def works_all(response: dict) -> bool:
    """True if each operation of the question is worked, and no other: its operands are distinct."""
    (question,) = re.findall(r"What is \d+(.*)\?", response["prompt"])
    lines = [line.partition("=") for line in response["response"].split("\n")]
    worked = {
        operation
        for before, equals, _ in lines
        if equals and not before.startswith(("Let me check", "What?"))
        for operation in OPERATION.findall(before)
    }
    return worked == set(OPERATION.findall(question))


def rows_of(workdir: pathlib.Path) -> list[dict]:
    """Rows of the runs before their first step, as one arm, and after their last."""
    rows, last = [], int(STUDY.settings["num_steps"])
    for point in STUDY.plan().points(workdir):
        found = {point.arm: last} | ({START: 0} if point.arm == FIRST else {})
        for arm, step in found.items():
            responses = list(read_zipped_rows(point.workdir / "eval" / f"{step}.long.jsonl.gz"))
            rows.append({"arm": arm, "seed": point.seed, **measured(responses)})
    return rows


def main(_):
    others = [(arm, FIRST) for arm in STUDY.arms if arm != FIRST]
    look_into(FILE, rows_of, MEASURES, others)


if __name__ == "__main__":
    flags.DEFINE_string("workdir", "", "The runs of the study; '': read texts.jsonl.")
    app.run(main)
