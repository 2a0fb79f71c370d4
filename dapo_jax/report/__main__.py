"""Curves and a self-contained HTML page of one or several runs.

    python -m dapo_jax.report --workdir=DIR [--workdir=DIR2 ...] [--rows=FILE ...] [--paper=FILE]

    python -m dapo_jax.report --evaluation=FILE [--evaluation=FILE2 ...]

The first writes report.html, curves.png and accuracy_vs_tokens.png into the first folder, or beside
the first file of rows. A DIR is a run's or a sweep's folder, FILE a rows.jsonl.gz of an experiment.
The second writes evaluation.html beside the first evaluation, an eval/*.json of a run or of
`dapo_jax.evaluate`, and compares those of one set, problem by problem.
"""

import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from dapo_jax.report import evaluations, events, paper, plots, runs
from dapo_jax.report.page import render
from dapo_jax.report.rows import read_rows_file
from dapo_jax.report.runs import Run
from dapo_jax.run.files import atomic_file
from dapo_jax.run.recipe import leftover

Paths = Sequence[str | pathlib.Path]


def load(workdirs: Paths, rows: Paths = ()) -> dict[str, Run]:
    """Loads the runs of folders (of runs or sweeps) and of files of rows, by distinct labels.

    Raises as `load_run`, `load_sweep` and `read_rows_file` do, and ValueError where none is there.
    """
    parts: dict[str, dict[str, Run]] = {}
    for label, folder in runs.labelled(workdirs).items():
        if (folder / "sweep.json").is_file():
            parts[label] = runs.load_sweep(folder)
        else:
            parts[label] = {label: runs.load_run(folder)}
    for label, path in runs.labelled(rows, parts=2).items():
        parts[label] = read_rows_file(path)
    return runs.merged(parts)


def write_report(
    workdirs: Paths, *, rows: Paths = (), paper_file: str | None = None
) -> pathlib.Path:
    """Writes curves.png, accuracy_vs_tokens.png and report.html; returns the path of the page.

    Raises as `load` and `paper.read` do.
    """
    loaded = load(workdirs, rows)
    if not loaded:
        raise ValueError(f"{', '.join(map(str, [*workdirs, *rows]))}: no run has a finished step")
    target = pathlib.Path(*workdirs[:1]) if workdirs else pathlib.Path(rows[0]).parent
    target = target.resolve()
    for figure in (plots.curves, plots.accuracy_vs_tokens):
        plots.save(figure(loaded), target / f"{figure.__name__}.png")
    text = render(
        loaded,
        paper=paper.read(paper_file) if paper_file else None,
        unfinished=[
            point for folder in workdirs for point in events.unfinished(pathlib.Path(folder))
        ],
    )
    with atomic_file(target / "report.html") as file:
        file.write(text.encode(errors="backslashreplace"))  # a command may hold any bytes
    return target / "report.html"


def main(argv: Sequence[str]) -> None:
    if argv[1:]:
        sys.exit(f"dapo_jax.report: {leftover(argv[1:], flags.FLAGS, None)}")
    given = flags.FLAGS
    workdirs, rows, results = (
        [part for value in values or () for part in value.split(",") if part]
        for values in (given.workdir, given.rows, given.evaluation)
    )
    if not workdirs and not rows and not results:
        sys.exit("dapo_jax.report: give --workdir=DIR, --rows=FILE or --evaluation=FILE")
    try:
        if results:
            found = [of for path in results for of in evaluations.read(path)]
            pairs = evaluations.pairs(found)
            for pair in pairs:
                print("\n".join(evaluations.compare(*pair).lines()))
            if len(found) > 1 and not pairs:
                names = ", ".join(of.name for of in found)
                print(f"nothing is compared: the sets are {names}, and none is there twice")
            print(evaluations.write_page(results))
            return
        print(write_report(workdirs, rows=rows, paper_file=given.paper))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"dapo_jax.report: {error}")


if __name__ == "__main__":
    several = "repeat it or separate by commas"
    flags.DEFINE_multi_string("workdir", None, f"Folder of a run or of a sweep; {several}.")
    flags.DEFINE_multi_string("rows", None, f"A rows.jsonl.gz; {several}.")
    flags.DEFINE_multi_string("evaluation", None, f"An eval/*.json; two are compared; {several}.")
    flags.DEFINE_string("paper", None, "The paper's curves, digitised, to be drawn beside ours.")
    app.run(main)
