"""Curves and comparisons of one or several runs; evaluations compared.

    python -m dapo_jax.report --workdir PATH [PATH2 ...] [--baseline ARM]
    python -m dapo_jax.report --evaluation FILE FILE2 [...]

README.md says what they print and write.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence

from dapo_jax.logs.files import write_file
from dapo_jax.process.failures import explain
from dapo_jax.report import compare, evaluations, page, plots
from dapo_jax.report.runs import Run, load_run, load_sweep, read_rows_file
from dapo_jax.report.summary import summary_lines


def load(paths: Sequence[str | pathlib.Path]) -> dict[str, Run]:
    """Loads the runs of folders (of runs or sweeps) and of files of rows, by distinct labels.

    Of several paths, labels and arms begin with the name of the folder, or all of its path where
    two have one name. Raises as `load_run`, `load_sweep` and `read_rows_file` do.
    """
    runs, paths = {}, list(dict.fromkeys(pathlib.Path(path).resolve() for path in paths))
    folders = [path.parent if path.is_file() else path for path in paths]
    names = [folder.name for folder in folders]
    for path, folder in zip(paths, folders, strict=True):
        name = folder.name if names.count(folder.name) == 1 else str(path)
        part = f"{name}: " if len(paths) > 1 else ""
        if path.is_file():
            of_path = read_rows_file(path)
        elif (path / "sweep.json").is_file():
            of_path = load_sweep(path)
        else:
            part, of_path = name, {"": load_run(path)}
        for label, run in of_path.items():
            runs[part + label] = dataclasses.replace(run, arm=part + run.arm)
    if not runs:
        raise ValueError(f"{', '.join(map(str, paths))}: no run has a finished step")
    return runs


def write_report(
    folder: pathlib.Path, loaded: Mapping[str, Run], *, baseline: str = ""
) -> pathlib.Path:
    """Writes the page, its pictures and its table (table.csv); returns the path of the page."""
    draw = {"curves": plots.curves, "accuracy_vs_tokens": plots.accuracy_vs_tokens}
    files = {
        f"{name}.{form}": plots.rendered(figure, form)
        for name, figure in ((name, curves(loaded)) for name, curves in draw.items())
        for form in ("png", "svg", "pdf")
    }
    pngs = [files[f"{name}.png"] for name in draw]
    text = page.render(loaded, pictures=pngs, baseline=baseline)
    files["table.csv"] = compare.csv_text(loaded).encode()
    files["report.html"] = text.encode(errors="backslashreplace")  # responses may hold anything
    for name, content in files.items():
        write_file(folder / name, content)
    return folder / "report.html"


def main() -> None:
    parser = argparse.ArgumentParser("dapo_jax.report", allow_abbrev=False)
    paths = {"nargs": "+", "action": "extend", "default": []}
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--workdir", **paths, help="a run's or sweep's folder, or a rows.jsonl.gz")
    what.add_argument("--evaluation", **paths, help="eval/*.json; those of one set are compared")
    parser.add_argument("--baseline", default="", help="the arm to compare with; '': the first")
    given = parser.parse_args()
    try:
        if given.evaluation:
            print("\n".join(evaluations.compared(given.evaluation)))
        if given.workdir:
            loaded, first = load(given.workdir), pathlib.Path(given.workdir[0]).resolve()
            folder = first.parent if first.is_file() else first
            if len(loaded) > 1:
                print(compare.markdown(loaded, baseline=given.baseline, title=folder.name))
            else:
                print("\n".join(summary_lines(*loaded.values())))
            folder /= "compared" if len(set(given.workdir)) > 1 else ""
            print(f"page: {write_report(folder, loaded, baseline=given.baseline)}")
    except (EOFError, OSError, ValueError) as error:
        sys.exit(f"dapo_jax.report: {explain(error)[0]}")


if __name__ == "__main__":
    main()
