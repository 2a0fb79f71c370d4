"""A page of one or several runs, or of evaluations compared.

    python -m dapo_jax.report --workdir DIR [DIR2 ...] [--rows FILE ...]
    python -m dapo_jax.report --evaluation FILE [FILE2 ...]

The first writes report.html, curves.png and accuracy_vs_tokens.png into the folder, or beside the
file of rows. A DIR is a run's or a sweep's folder, FILE a rows.jsonl.gz of a study.
The second writes evaluation.html beside the evaluation, an eval/*.json of a run or of
`dapo_jax.evaluate`, and compares those of one set, problem by problem. What is of several goes into
the folder compared/ there, and leaves the page of the first alone as it is.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from dapo_jax.report import evaluations, page, plots, runs
from dapo_jax.report.rows import read_rows_file
from dapo_jax.report.runs import Run

Paths = Sequence[str | pathlib.Path]


def load(workdirs: Paths, rows: Paths = ()) -> dict[str, Run]:
    """Loads the runs of folders (of runs or sweeps) and of files of rows, by distinct labels.

    Raises as `load_run`, `load_sweep` and `read_rows_file` do.
    """
    parts: dict[str, dict[str, Run]] = {}
    for label, folder in runs.labelled(workdirs).items():
        is_sweep = (folder / "sweep.json").is_file()
        parts[label] = runs.load_sweep(folder) if is_sweep else {label: runs.load_run(folder)}
    for label, path in runs.labelled(rows, parts=2).items():
        parts[label] = read_rows_file(path)
    return runs.merged(parts)


def write_report(workdirs: Paths, *, rows: Paths = ()) -> pathlib.Path:
    """Writes curves.png, accuracy_vs_tokens.png and report.html; returns the path of the page.

    Raises as `load` does, and ValueError where no run has a finished step.
    """
    loaded = load(workdirs, rows)
    if not loaded:
        raise ValueError(f"{', '.join(map(str, [*workdirs, *rows]))}: no run has a finished step")
    target = pathlib.Path(*workdirs[:1]) if workdirs else pathlib.Path(rows[0]).parent
    target = target.resolve() / folder_of([*workdirs, *rows])
    for figure in (plots.curves, plots.accuracy_vs_tokens):
        plots.save(figure(loaded), target / f"{figure.__name__}.png")
    unfinished = [point for folder in workdirs for point in page.unfinished(pathlib.Path(folder))]
    page.write(target / "report.html", page.render(loaded, unfinished=unfinished))
    return target / "report.html"


def folder_of(paths: Paths) -> str:
    """Names the folder of a page, in that of the first path: of several it is one of its own."""
    return "compared" if len(runs.labelled(paths)) > 1 else ""


def main() -> None:
    parser = argparse.ArgumentParser("dapo_jax.report", allow_abbrev=False)
    for name, value in (
        ("workdir", "the folder of a run or of a sweep"),
        ("rows", "a rows.jsonl.gz"),
        ("evaluation", "an eval/*.json; two of one set are compared"),
    ):
        parser.add_argument(f"--{name}", nargs="+", action="extend", default=[], help=value)
    given = parser.parse_args()
    if not given.workdir and not given.rows and not given.evaluation:
        parser.error("give --workdir=DIR, --rows=FILE or --evaluation=FILE")
    try:
        if given.evaluation:
            both = evaluations.compared(given.evaluation)
            print("\n".join(evaluations.lines(*both)))
            print(
                evaluations.write_page(given.evaluation, *both, folder=folder_of(given.evaluation))
            )
        if given.workdir or given.rows:
            print(write_report(given.workdir, rows=given.rows))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"dapo_jax.report: {error}")


if __name__ == "__main__":
    main()
