"""The end of a run: its curves and its summary."""

import pathlib

from dapo_jax.logs.files import append_log, write_file
from dapo_jax.report import plots, runs


def conclude(workdir: pathlib.Path, *, was_finished: bool) -> bool:
    """Draws a finished run's curves, unless it was so before; returns whether it trained."""
    run, curves = runs.load_run(workdir), workdir / "curves.png"
    if not (was_finished and curves.is_file()):  # a kill after the last row leaves none
        write_file(curves, plots.rendered(plots.curves({workdir.name: run})))
    lines = [*runs.summary_lines(run), f"curves: {curves}"]
    if was_finished:
        done = run.finished_steps
        more = f"raise num_steps to go on, as --config.num_steps={2 * done}"
        lines.insert(0, f"finished: {done} of {done} steps in {workdir}; {more}")
    print("\n".join(lines))
    if not was_finished:
        append_log(workdir, "\n".join(lines))
    return runs.idle_steps(run) < len(run.rows)
