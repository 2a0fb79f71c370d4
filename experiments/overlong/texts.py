"""What becomes of the solutions' texts: steps, checks, loops and cuts in the held-out responses.

    python -m experiments.overlong.texts --workdir=DIR
    python -m experiments.overlong.texts

The first reads the evaluations before and after each run of the study in DIR and writes
texts.jsonl; both print the table of it: means over the seeds, and the differences from the arm that
punishes.
"""

import gzip
import json
import operator
import pathlib
from collections.abc import Sequence

import numpy as np
from absl import app, flags

from dapo_jax.report.quantities import Quantity
from dapo_jax.report.summary import Comparison, interval_text, spread_text, table
from dapo_jax.run.files import atomic_file
from experiments.forks_base.task import loop_lines
from experiments.overlong.study import STUDY

FILE = pathlib.Path(__file__).parent / "texts.jsonl"
START, FIRST = "start", "punished"
LEVEL = 12  # operations of a held-out problem
MEASURES = tuple(
    Quantity(title, operator.itemgetter(key), form)
    for key, title, form in (
        ("right", "right, %", "{:.1f}"),
        ("cut", "cut, %", "{:.1f}"),
        ("all_steps", "of those not cut: all 12 steps, %", "{:.1f}"),
        ("checks", "checks", "{:.2f}"),
        ("loops", "lines in loops", "{:.2f}"),
    )
)


def measured(responses: Sequence[dict]) -> dict[str, float]:
    """Percent that are right and cut, percent of whole ones with all steps; lines a response."""
    whole = [response for response in responses if not response["truncated"]]
    found = {
        "right": 100 * np.mean([response["correct"] for response in responses]),
        "cut": 100 * (1 - len(whole) / len(responses)),
        "all_steps": 100 * np.mean([steps(r["response"]) >= LEVEL for r in whole]),
        "checks": np.mean([r["response"].count("Let me check") for r in responses]),
        "loops": np.mean([len(loop_lines(r["response"])) for r in responses]),
    }
    return {key: float(value) for key, value in found.items()}


def steps(response: str) -> int:
    """Counts the lines that work a step: those with a result, but for checks and loops."""
    return sum(
        "=" in line and not line.startswith(("Let me check", "What?"))
        for line in response.split("\n")
    )


def read(path: pathlib.Path) -> list[dict]:
    """The responses of one evaluation."""
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def rows_of(workdir: pathlib.Path) -> list[dict]:
    """Rows of the runs before their first step, as one arm, and after their last."""
    rows, last = [], int(STUDY.settings["num_steps"])
    for point in STUDY.plan().points(workdir):
        found = {point.arm: last} | ({START: 0} if point.arm == FIRST else {})
        for arm, step in found.items():
            responses = read(point.workdir / "eval" / f"{step}.long.jsonl.gz")
            rows.append({"arm": arm, "seed": point.seed, **measured(responses)})
    return rows


def result(rows: list[dict]) -> str:
    """The table as Markdown."""
    lines = []
    for arm in (START, *STUDY.arms):
        cells = [arm]
        for quantity in MEASURES:
            ours, theirs = (
                {row["seed"]: quantity.value(row) for row in rows if row["arm"] == a}
                for a in (arm, FIRST)
            )
            less = interval_text(quantity, Comparison.of(ours, theirs).paired)
            text = spread_text(quantity, ours)
            cells.append(text if arm in (START, FIRST) else f"{text} {less}")
        lines.append(cells)
    return "\n".join(table(["arm", *(quantity.name for quantity in MEASURES)], lines))


def main(_):
    if flags.FLAGS.workdir:
        rows = rows_of(pathlib.Path(flags.FLAGS.workdir))
        with atomic_file(FILE) as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    print(result([json.loads(line) for line in FILE.read_text().splitlines()]))


if __name__ == "__main__":
    flags.DEFINE_string("workdir", "", "The runs of the study; '': read texts.jsonl.")
    app.run(main)
