"""The page of runs: one HTML file of pictures and tables, with its pictures in it, no scripts."""

import base64
import contextlib
import itertools
import pathlib
import zlib
from collections.abc import Mapping, Sequence

import jinja2

from dapo_jax.logs.files import read_zipped_rows
from dapo_jax.printable import conversation, shortened
from dapo_jax.report import compare, plots
from dapo_jax.report.runs import Run
from dapo_jax.report.summary import summary_lines
from dapo_jax.tasks.templates import problem_of
from dapo_jax.types import UNSEARCHED

SAMPLES = 8  # of a step, each to another problem
SHOWN_CHARS = 1_500  # of a problem and of a response


def render(runs: Mapping[str, Run], *, pictures: Sequence[bytes] = (), baseline: str = "") -> str:
    """Renders the page of runs by label, with PNG files; all text in it is escaped."""
    tables, notes = compare.tables(runs, baseline=baseline)
    text = pathlib.Path(__file__).with_name("page.html.j2").read_text()
    template = jinja2.Template(text, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return template.render(
        title=plots.titled(runs),
        notes=notes,
        compared=tables if len(runs) > 1 else [],
        method=compare.METHOD,
        summaries={label: summary_lines(run) for label, run in runs.items()},
        pictures=[base64.b64encode(picture).decode() for picture in pictures],
        samples=samples(runs),
    )


def samples(runs: Mapping[str, Run]) -> list[list[str]]:
    """Lists the page's samples of each arm, of the first and last step that it has written."""
    written = {}
    for label, run in runs.items():
        files = (run.workdir / "rollouts").glob("[0-9]*.jsonl.gz") if run.workdir else ()
        if steps := {int(file.name.split(".")[0]): file for file in files}:
            written.setdefault(run.arm, (label, steps))
    return [
        [label, str(step), *cells]
        for label, steps in written.values()
        for step in dict.fromkeys((min(steps), max(steps)))
        for cells in _responses(steps[step])
    ]


def outcome(row: Mapping) -> str:
    """Says what a response was graded as; an environment looks for no answer in it."""
    grade = "right" if row["correct"] else "truncated" if row["truncated"] else "wrong"
    if row["prediction"] is None and row.get("status") in UNSEARCHED:
        return grade
    return f"{grade}: {row['prediction']}, answer {row['ground_truth']}"


def _responses(path: pathlib.Path) -> list[list[str]]:
    rows = []
    with contextlib.suppress(EOFError, OSError, ValueError, zlib.error):  # cut or broken: its start
        firsts = (row for row in read_zipped_rows(path) if not row.get("sample"))
        rows.extend(itertools.islice(firsts, SAMPLES))
    return [
        [
            shortened(problem_of(row["prompt"]).strip(), limit=SHOWN_CHARS),
            shortened(conversation(row.get("turns") or ()) or row["response"], limit=SHOWN_CHARS),
            outcome(row),
            f"{row['tokens']:,}",
            f"{row['reward']:.3g}",
        ]
        for row in rows
    ]
