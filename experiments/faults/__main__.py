"""Injects every kind of fault and prints one table: injected, survived, said, lost.

    python -m experiments.faults [--only=flips,kills] [--short] [--seed=0] [--json=FILE]

`make faults` runs all of it. The status is 1 where anything was lost or not said.
"""

import collections
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence

from absl import app, flags, logging

from experiments.faults import parts

SHOWN_LOSSES = 5
ONLY = flags.DEFINE_list("only", list(parts.NAMES), "Parts to run.")
SHORT = flags.DEFINE_bool("short", False, "As few of each as `make test` injects.")
SEED = flags.DEFINE_integer("seed", 0, "Of what is chosen at random.")
JSON = flags.DEFINE_string("json", None, "A file for the table's numbers.")
HEADER = "| fault | injected | survived | said | lost | seconds |\n|---|---:|---:|---:|---:|---:|"


def row_of(title: str, outcomes: Sequence[parts.Outcome], seconds: float) -> dict:
    """Counts what became of one part's faults; the losses are kept by what they were."""
    to_say = [o for o in outcomes if o.said is not None]
    lost = collections.Counter(filter(None, map(loss_of, outcomes)))
    return {
        "fault": title,
        "injected": len(outcomes),
        "survived": sum(o.survived for o in outcomes),
        "said": sum(bool(o.said) for o in to_say),
        "to_say": len(to_say),
        "lost": sum(bool(o.lost) or not o.survived for o in outcomes),
        "seconds": round(seconds, 1),
        "losses": dict(lost),
    }


def loss_of(outcome: parts.Outcome) -> str | None:
    """Says what is bad about what became of a fault; None where nothing is."""
    if outcome.lost or not outcome.survived:
        return f"{outcome.fault}: {outcome.lost or 'not survived'}"
    return f"{outcome.fault}: not said" if outcome.said is False else None


def line_of(row: dict) -> str:
    """Shows a part's counts as a row of the table; "-" where there was nothing to say."""
    said = f"{row['said']:,} of {row['to_say']:,}" if row["to_say"] else "-"
    cells = (row["fault"], f"{row['injected']:,}", f"{row['survived']:,}", said)
    return f"| {' | '.join(cells)} | {row['lost']:,} | {row['seconds']:.0f} |"


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"{' '.join(argv[1:])!r} is no flag; flags begin with --")
    logging.set_verbosity(logging.WARNING)  # Orbax logs each save in dozens of lines
    parts.let_children_hear()
    rows = []
    for name in ONLY.value:
        part = parts.load(name)
        count = part.short if SHORT.value else part.full
        began, outcomes = time.monotonic(), []
        with tempfile.TemporaryDirectory(prefix=f"faults_{name}_") as folder:
            for outcome in part.inject(count, SEED.value, pathlib.Path(folder)):
                outcomes.append(outcome)
                if loss := loss_of(outcome):  # at once: the run may be broken off
                    print(f"\r{name}: {loss}", file=sys.stderr, flush=True)
                if sys.stderr.isatty():
                    print(f"\r{name}: {len(outcomes):,} of {count:,}", end="", file=sys.stderr)
        rows.append(row_of(part.title, outcomes, time.monotonic() - began))
        print(f"\r{line_of(rows[-1])}", file=sys.stderr, flush=True)
    print("\n".join([HEADER, *map(line_of, rows)]))
    for row in rows:
        for loss, times in list(row["losses"].items())[:SHOWN_LOSSES]:
            print(f"{row['fault']}: {times} x {loss}")
    if JSON.value:
        pathlib.Path(JSON.value).write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(any(row["losses"] for row in rows))


if __name__ == "__main__":
    app.run(main)
