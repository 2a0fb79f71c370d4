"""SIGTERM in every phase of a step, with one process and with two: how soon is all saved?

    python -m experiments.preemption.phases --folder=runs/preemption

Every run is stopped in its third step, while the phase (made to last a minute) is under way; what
it prints, its exit status and the seconds are noted, and the same command goes on to the end. Then
rows (timings aside), evaluations and responses must be those of a run that nobody stopped.
"""

import functools
import gzip
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

from absl import app, flags

from dapo_jax import evaluate, train
from dapo_jax.run import build
from dapo_jax.run.chain import untimed
from dapo_jax.run.files import read_rows
from dapo_jax.run.snapshots import Snapshots
from dapo_jax.sampler import cache, engine
from dapo_jax.tasks import math_problems
from experiments.benchmarks import common
from experiments.preemption.config import get_config
from sharding import hosts

FLAGS = flags.FLAGS
flags.DEFINE_string("folder", "runs/preemption", "Where the runs go.")
flags.DEFINE_string("phase", "", "In a run: the phase that lasts a minute.")
flags.DEFINE_string("workdir", "", "In a run: its directory.")
flags.DEFINE_bool("several", False, "In a run: whether there are other processes.")

PHASES = ("compile", "prefill", "decode", "verify", "update", "evaluate")
STEP = 2  # finished when the signal comes
LASTS_SECONDS = 60
READY = "the phase is under way"


def last_a_minute() -> None:
    """Lasts as a long phase does: nothing returns."""
    print(READY, flush=True)
    time.sleep(LASTS_SECONDS)


def prolong(phase: str) -> None:
    """Makes a phase of this process's run last, in the step after STEP finished ones."""
    finished = {"steps": 0}

    def lasting(function, *, after=False):
        @functools.wraps(function)
        def prolonged(*args, **kwargs):
            now = finished["steps"] == (0 if phase == "compile" else STEP)
            if now and not after:
                last_a_minute()
            result = function(*args, **kwargs)
            if now and after:
                last_a_minute()
            return result

        return prolonged

    take, compile_update = Snapshots.take, build.Programs.compile_update

    def counted(self, step, *args, **kwargs):
        finished["steps"] = step
        return take(self, step, *args, **kwargs)

    Snapshots.take = counted
    if phase == "compile":
        build.Programs.compile_update = lasting(compile_update)
    elif phase in ("prefill", "decode"):
        setattr(engine.Engine, phase, lasting(getattr(engine.Engine, phase)))
    elif phase == "verify":
        math_problems.verify_many = lasting(math_problems.verify_many)
    elif phase == "update":  # the state before it is gone then, its memory reused
        build.Programs.compile_update = lambda *args: lasting(compile_update(*args), after=True)
    elif phase == "evaluate":
        evaluate.Evaluation.finish = lasting(evaluate.Evaluation.finish)


def run_here() -> None:
    """Runs one process of a run."""
    cache.PARTS = ((1, 1),)  # one program for decoding
    config = get_config()
    if FLAGS.phase:
        prolong(FLAGS.phase)
    hosts.start(several=FLAGS.several, cpu_devices=config.mesh.cpu_devices)
    with hosts.ending_when_a_peer_is_lost():
        train.train(config, pathlib.Path(FLAGS.workdir))


def start(workdir: pathlib.Path, *, processes: int, phase: str) -> list[subprocess.Popen]:
    """Starts the processes of a run."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "experiments.preemption.phases", f"--workdir={workdir}"]
    command += [f"--phase={phase}", f"--several={processes > 1}"]
    several = {"DAPO_COORDINATOR": f"localhost:{port}", "DAPO_PROCESSES": str(processes)}
    alone = {
        "JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return [
        subprocess.Popen(
            command,
            env=os.environ | (several | {"DAPO_PROCESS": str(i)} if processes > 1 else alone),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(processes)
    ]


def finish(run: list[subprocess.Popen]) -> list[str]:
    """Waits for processes that must end well, and returns their outputs."""
    outputs = [process.communicate()[0] for process in run]
    if any(process.returncode for process in run):
        raise RuntimeError("\n".join(outputs))
    return outputs


def stop_in(phase: str, workdir: pathlib.Path, *, processes: int) -> list[str]:
    """Stops a run in the phase, finishes it, and returns the line of the table."""
    run = start(workdir, processes=processes, phase=phase)
    for line in run[0].stdout:
        if line.strip() == READY:
            break
    signalled = time.monotonic()
    for process in run:
        process.send_signal(signal.SIGTERM)
    outputs = [process.communicate()[0] for process in run]
    seconds = time.monotonic() - signalled
    codes = ", ".join(str(process.returncode) for process in run)
    said = re.findall(r"SIGTERM: .*", outputs[0])
    finish(start(workdir, processes=processes, phase=""))
    return [phase, str(processes), codes, f"{seconds:.1f}", said[0] if said else "nothing"]


def contents(workdir: pathlib.Path) -> list:
    """Reads all of a run that no clock decides."""
    rows = [untimed(row) for row in read_rows(workdir / "metrics.jsonl")]
    rollouts = [
        gzip.decompress((workdir / "rollouts" / f"{row['step']}.jsonl.gz").read_bytes())
        for row in rows
    ]
    return [rows, rollouts, [file.read_text() for file in sorted(workdir.glob("eval/*.json"))]]


def main(_):
    if FLAGS.workdir:
        run_here()
        return
    folder, table = pathlib.Path(FLAGS.folder), []
    shutil.rmtree(folder, ignore_errors=True)
    for processes in (1, 2):
        expected = folder / f"whole_{processes}"
        finish(start(expected, processes=processes, phase=""))
        for phase in PHASES:
            workdir = folder / f"{phase}_{processes}"
            row = stop_in(phase, workdir, processes=processes)
            row.append("bitwise" if contents(workdir) == contents(expected) else "differs")
            table.append(row)
            print(row, flush=True)
    header = ["phase", "processes", "exit status", "seconds to the end", "said", "resumed run"]
    print(f"\ncommit {common.commit()}\n{common.table(header, table)}")


if __name__ == "__main__":
    app.run(main)
