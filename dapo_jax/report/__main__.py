"""Curves and a self-contained HTML page from the folders of one or several runs.

    python -m dapo_jax.report --workdir=DIR [--workdir=DIR2 ...]

writes report.html, curves.png and accuracy_vs_tokens.png into the first folder.
"""

import base64
import pathlib
import sys
from collections.abc import Mapping, Sequence

import jinja2
from absl import app, flags

from dapo_jax.report import plots, runs
from dapo_jax.report.runs import Run
from dapo_jax.run.arguments import leftover
from dapo_jax.run.files import atomic_file
from dapo_jax.run.metrics import METRICS, Metric

TABLE_ROWS = 30  # rows of metrics shown for a run in the page


def page(loaded: Mapping[str, Run], images: Mapping[str, bytes]) -> str:
    """The HTML page of the runs, by label; the PNGs, by name, become a part of it."""
    keys = {
        label: dict.fromkeys(key for row in run.rows for key in row)
        for label, run in loaded.items()
    }
    plain = [Metric(key, "", "") for by_run in keys.values() for key in by_run]
    # Names and settings may hold anything: all text is escaped.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=f"DAPO: {', '.join(loaded)}",
        runs=loaded,
        changes={label: runs.changes(run) for label, run in loaded.items()},
        totals={label: runs.totals(run) for label, run in loaded.items()},
        averaged=[runs.averaged_rows(run.rows) for run in loaded.values()],
        differences=runs.config_differences(loaded),
        images={name: base64.b64encode(png).decode() for name, png in images.items()},
        keys=keys,
        rows={label: runs.thinned(run.rows, limit=TABLE_ROWS) for label, run in loaded.items()},
        metrics={metric.key: metric for metric in plain + METRICS},
    )


def write_report(workdirs: Sequence[str | pathlib.Path]) -> pathlib.Path:
    """Writes curves.png, accuracy_vs_tokens.png and report.html into the first folder.

    Returns the path of the page, which needs no other file. Raises as `load_run` does.
    """
    folders = runs.labelled(workdirs)
    loaded = {label: runs.load_run(folder) for label, folder in folders.items()}
    target = next(iter(folders.values()))
    images = {}
    for figure in (plots.curves, plots.accuracy_vs_tokens):
        path = target / f"{figure.__name__}.png"
        plots.save(figure(loaded), path)
        images[figure.__name__] = path.read_bytes()
    with atomic_file(target / "report.html") as file:
        file.write(page(loaded, images).encode())
    return target / "report.html"


def main(argv: Sequence[str]) -> None:
    if argv[1:]:
        sys.exit(f"dapo_jax.report: {leftover(argv[1:], flags.FLAGS, None)}")
    workdirs = [part for value in flags.FLAGS.workdir for part in value.split(",") if part]
    try:
        print(write_report(workdirs))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"dapo_jax.report: {error}")


if __name__ == "__main__":
    flags.DEFINE_multi_string(
        "workdir", None, "Folder of a run; repeat it or separate by commas.", required=True
    )
    app.run(main)
