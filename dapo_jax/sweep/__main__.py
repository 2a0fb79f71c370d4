"""Runs a config under several settings and seeds, and compares them on the same seed.

    python -m dapo_jax.sweep --config=configs/tiny.py --workdir=DIR --set algo.eps_high=0.2,0.28
        --seeds=5 [--jobs=2]

The same command resumes. Exit status: 0: all runs are done. 75: stopped by a signal; run the same
command again. 1: some runs failed, which are listed.
"""

import pathlib
import sys
from collections.abc import Sequence

from absl import flags
from ml_collections.config_flags import get_override_values

from dapo_jax.cli import command
from dapo_jax.cli.config_flags import define_config
from dapo_jax.logs.files import locked, write_file
from dapo_jax.process import hosts
from dapo_jax.process.signals import Signals
from dapo_jax.report.__main__ import write_report
from dapo_jax.report.compare import markdown
from dapo_jax.report.runs import load_sweep, read_rows_file, write_rows
from dapo_jax.sweep import plan as plans
from dapo_jax.sweep.plan import Plan
from dapo_jax.sweep.runner import LOG, TRAIN, Runner


def sweep(plan: Plan, folder: pathlib.Path, *, jobs: int, program: Sequence[str] = TRAIN) -> None:
    """Runs the plan's points by `program`; SystemExit with 75 when stopped, 1 for failures."""
    with locked(folder):
        plans.record(plan, folder)
        points = plan.points(folder, single_device=jobs > 1)
        runner = Runner(points, jobs=jobs, program=program)
        text = f"{len(plan.arms)} arms x {len(plan.seeds)} seeds in {folder}, {jobs} at once; "
        print(text + f"{runner.done} of {len(points)} runs are done", flush=True)
        with Signals(runner.stop):
            runner.run()
        if runner.stopped:
            print(f"stopped; the same command goes on with {folder}", file=sys.stderr)
            raise SystemExit(hosts.RETRYABLE)
        print(write_tables(folder, plan))
    for point in runner.failed:
        print(f"failed: {point.workdir / LOG}", file=sys.stderr)
    if runner.failed:
        raise SystemExit(1)


def write_tables(folder: pathlib.Path, plan: Plan) -> str:
    """Writes rows.jsonl.gz, summary.md and the page of all runs; returns the summary, and where."""
    runs, rows = load_sweep(folder), folder / "rows.jsonl.gz"
    if not runs:
        return "no run has finished a step"
    write_rows(rows, runs)
    text = markdown(read_rows_file(rows), title=f"Sweep of {plan.config}")
    write_file(folder / "summary.md", text.encode())
    page = write_report(folder, runs)
    return f"{text}\nrows: {rows}   tables: {folder / 'summary.md'}   page: {page}"


def main(_: list[str]) -> None:
    values = flags.FLAGS
    plan = plans.make(
        config=values["config"].config_filename,
        settings=get_override_values(values["config"]),
        grid=values.set,
        named=values.arm,
        seeds=values.seeds,
        start=values.start,
    )
    sweep(plan, pathlib.Path(values.workdir), jobs=values.jobs)


if __name__ == "__main__":
    define_config()
    command.define_workdir()
    flags.DEFINE_multi_string(
        "set", [], "KEY=V1,V2,...: a key of the config, or preset; repeated, all combinations."
    )
    flags.DEFINE_multi_string("arm", [], '"NAME: KEY=V KEY=V": settings that go together; repeat.')
    flags.DEFINE_string("seeds", "5", "How many (from 0), or a list: 0,3,7.")
    flags.DEFINE_integer("jobs", 1, "Runs at once, which share cores and a GPU.", lower_bound=1)
    flags.DEFINE_string("start", "", "run:PATH@STEP, passed on; {seed} in it is each run's.")
    command.run(main)
