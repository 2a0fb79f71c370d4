"""Runs a recipe under several settings and seeds, and compares them: a folder of runs, tables.

    python -m dapo_jax.sweep --config=configs/tiny.py --workdir=DIR --set algo.eps_high=0.2,0.28
        --seeds=5 [--jobs=2]

The same command goes on where it stopped. Exit status: 0 all runs are done; 75 stopped by a signal,
to be given again; 1 some runs failed, which it lists.
"""

import pathlib
import re
import shlex
import sys
from collections.abc import Sequence

from absl import flags

from dapo_jax.report.__main__ import write_report
from dapo_jax.report.compare import markdown
from dapo_jax.report.rows import read_rows_file, write_rows
from dapo_jax.report.runs import load_sweep
from dapo_jax.run import command
from dapo_jax.run.files import atomic_file, locked
from dapo_jax.run.recipe import define_config
from dapo_jax.run.signals import Signals
from dapo_jax.sweep import plan as plans
from dapo_jax.sweep.plan import Plan, Point
from dapo_jax.sweep.points import LOG, TRAIN, Runner
from dapo_jax.sweep.table import SweepDisplay
from sharding import hosts


def launch_line(template: str, point: Point) -> str:
    """Fills a point's {command}, {config}, {flags}, {workdir}, {arm}, {seed}, {name} in.

    config: FILE[:PRESET]. flags: the others, but for --workdir. name: of lower-case letters, digits
    and dashes. Values are quoted for a shell where they need it. Raises ValueError for another name
    in braces.
    """
    config, *others = point.flags
    values = {
        "command": shlex.join(["python", "-m", "dapo_jax.train", *point.arguments]),
        "config": shlex.quote(config.removeprefix("--config=")),
        "flags": shlex.join(others),
        "workdir": shlex.quote(str(point.workdir)),
        "arm": shlex.quote(point.arm),
        "seed": str(point.seed),
        "name": re.sub("[^a-z0-9]+", "-", f"{point.arm}-s{point.seed}".lower()).strip("-"),
    }

    def value(match: re.Match) -> str:
        if match[1] not in values:
            raise ValueError(f"--launch has {match[0]}; there are {{{'}, {'.join(values)}}}")
        return values[match[1]]

    return re.sub(r"\{(\w+)\}", value, template)


def write_tables(folder: pathlib.Path, plan: Plan, baseline: str) -> str:
    """Writes rows.jsonl.gz and summary.md of all runs that the folder has; returns the latter."""
    rows = folder / "rows.jsonl.gz"
    write_rows(rows, load_sweep(folder))
    text = markdown(read_rows_file(rows), baseline=baseline, title=f"Sweep of {plan.config}")
    with atomic_file(folder / "summary.md") as file:
        file.write(text.encode())
    return text


def sweep(
    plan: Plan,
    folder: pathlib.Path,
    *,
    jobs: int,
    retries: int,
    baseline: str,
    program: Sequence[str] = TRAIN,
) -> None:
    """Runs the plan's points in the folder; SystemExit with 75 when stopped, 1 for failures.

    program: what is run with each point's arguments.
    """
    with locked(folder):
        plans.check_same(plan, folder)
        plans.write(plan, folder)
        points = plan.points(folder, single_device=jobs > 1)
        runner = Runner(folder, points, jobs=jobs, retries=retries, program=program)
        display = SweepDisplay(runner.progress, jobs=jobs)
        runner.say, runner.look = display.end, display.look
        done = sum(at.state == "done" for at in runner.progress.values())
        display.line(
            f"{len(plan.arms)} arms x {len(plan.seeds)} seeds in {folder}, {jobs} at once"
            + (f"; {done} of {len(points)} runs are done" if done else "")
        )
        with Signals(runner.stop), display:
            runner.run()
        if runner.stopped:
            print(f"stopped; the same command goes on with {folder}", file=sys.stderr)
            raise SystemExit(hosts.RETRYABLE)
        print(write_tables(folder, plan, baseline))
        print(f"rows: {folder / 'rows.jsonl.gz'}   tables: {folder / 'summary.md'}")
        if any(at.row for at in runner.progress.values()):
            print(f"page: {write_report([folder])}")
    failed = {point: at for point, at in runner.progress.items() if at.state == "failed"}
    for point, at in failed.items():
        print(f"failed: {point.workdir / LOG}: {at.reason}", file=sys.stderr)
    if failed:
        raise SystemExit(1)


def common_flags(arguments: list[str]) -> list[str]:
    """The --config.KEY=V of a command line, each as one argument, also where V stood apart."""
    found: list[str] = []
    apart = False
    for argument in arguments:
        if re.match(r"--?(no)?config\.", argument):
            found.append(argument)
            apart = "=" not in argument
        else:
            if apart and not argument.startswith("-"):
                found[-1] += f"={argument}"
            apart = False
    return found


def main(argv: list[str]) -> None:
    values = flags.FLAGS
    plan = plans.make(
        config=values["config"].config_filename,
        flags=common_flags(sys.argv[1:]),
        grid=values.set,
        named=values.arm,
        seeds=values.seeds,
        start=values.start,
    )
    folder = pathlib.Path(values.workdir)
    if values.baseline and values.baseline not in plan.arms:
        raise ValueError(f"--baseline={values.baseline} is no arm: {', '.join(plan.arms)}")
    if values.launch:
        plans.check_same(plan, folder)
        for point in plan.points(folder):
            print(launch_line(values.launch, point))
    else:
        sweep(plan, folder, jobs=values.jobs, retries=values.retries, baseline=values.baseline)


if __name__ == "__main__":
    define_config()
    command.define_workdir()
    flags.DEFINE_multi_string(
        "set", [], "KEY=V1,V2,...: a key of the recipe, or preset; repeated, all combinations."
    )
    flags.DEFINE_multi_string("arm", [], '"NAME: KEY=V KEY=V": settings that go together; repeat.')
    flags.DEFINE_string("seeds", "5", "How many (from 0), or a list: 0,3,7.")
    flags.DEFINE_integer("jobs", 1, "Runs at once, each on its share of the cores.", lower_bound=1)
    flags.DEFINE_integer("retries", 1, "How often a failed run is run again.", lower_bound=0)
    flags.DEFINE_string("baseline", "", "The arm that others are compared with; '': the first.")
    flags.DEFINE_string("start", "", "run:PATH@STEP, passed on; {seed} in it is each run's.")
    flags.DEFINE_string("launch", "", "Print a command a run, from this template, and run none.")
    command.run(main)
