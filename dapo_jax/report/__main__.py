"""Curves, comparisons and samples of one or several runs; evaluations compared.

    python -m dapo_jax.report --workdir DIR [DIR2 ...] [--rows FILE ...] [--baseline ARM]
    python -m dapo_jax.report --evaluation FILE FILE2 [...]

The first prints the summary of a run, or the tables of several, and writes report.html, curves.png
and accuracy_vs_tokens.png into the folder, or beside the file of rows; what is of several goes into
the folder compared/ there. A DIR is a run's or a sweep's folder, FILE a rows.jsonl.gz of a study.
The second compares evaluations of one set, eval/*.json, problem by problem.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from dapo_jax.report import compare, evaluations, page, plots, runs
from dapo_jax.report.rows import read_rows_file
from dapo_jax.report.runs import Run

Paths = Sequence[str | pathlib.Path]


def load(workdirs: Paths, rows: Paths = ()) -> dict[str, Run]:
    """Loads the runs of folders (of runs or sweeps) and of files of rows, by distinct labels.

    Raises as `load_run`, `load_sweep` and `read_rows_file` do, and ValueError where there is none.
    """
    parts: dict[str, dict[str, Run]] = {}
    for label, folder in runs.labelled(workdirs).items():
        is_sweep = (folder / "sweep.json").is_file()
        parts[label] = runs.load_sweep(folder) if is_sweep else {label: runs.load_run(folder)}
    for label, path in runs.labelled(rows, parts=2).items():
        parts[label] = read_rows_file(path)
    if found := runs.merged(parts):
        return found
    raise ValueError(f"{', '.join(map(str, [*workdirs, *rows]))}: no run has a finished step")


def write_report(
    folder: pathlib.Path, loaded: dict[str, Run], *, baseline: str = ""
) -> pathlib.Path:
    """Writes curves.png, accuracy_vs_tokens.png and report.html; returns the path of the page."""
    pictures = [folder / "curves.png", folder / "accuracy_vs_tokens.png"]
    plots.save(plots.curves(loaded), pictures[0])
    plots.save(plots.accuracy_vs_tokens(loaded), pictures[1])
    data = [path.read_bytes() for path in pictures]
    page.write(folder / "report.html", page.render(loaded, pictures=data, baseline=baseline))
    return folder / "report.html"


def main() -> None:
    parser = argparse.ArgumentParser("dapo_jax.report", allow_abbrev=False)
    for name, value in (
        ("workdir", "the folder of a run or of a sweep"),
        ("rows", "a rows.jsonl.gz"),
        ("evaluation", "an eval/*.json; those of one set are compared"),
    ):
        parser.add_argument(f"--{name}", nargs="+", action="extend", default=[], help=value)
    parser.add_argument("--baseline", default="", help="the arm to compare with; '': the first")
    given = parser.parse_args()
    paths = [pathlib.Path(path).resolve() for path in dict.fromkeys([*given.workdir, *given.rows])]
    if not paths and not given.evaluation:
        parser.error("give --workdir=DIR, --rows=FILE or --evaluation=FILE")
    try:
        if given.evaluation:
            print("\n".join(evaluations.compared(given.evaluation)))
        if paths:
            loaded = load(given.workdir, given.rows)
            folder = paths[0] if given.workdir else paths[0].parent
            if len(loaded) > 1:
                print(compare.markdown(loaded, baseline=given.baseline, title=folder.name))
            else:
                print("\n".join(runs.summary_lines(*loaded.values())))
            folder /= "compared" if len(paths) > 1 else ""
            print(f"page: {write_report(folder, loaded, baseline=given.baseline)}")
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"dapo_jax.report: {error}")


if __name__ == "__main__":
    main()
