"""SIGKILL at random moments of a run, each time followed by the same command.

Survived: at the end the rows (timings aside), all responses, the final state and the progress are
bitwise those of a run that nobody killed. Every checkpoint is due, so that many a kill comes in the
middle of a save; a quarter of them come before the first step. `short` kills a program that does
nothing but take snapshots, since a run's start takes seconds.
"""

import concurrent.futures
import gzip
import json
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from dapo_jax.logs.files import read_rows
from dapo_jax.logs.metrics import untimed
from experiments.faults.parts import Outcome, Part, compiled

KILLS_A_RUN = 10
AT_ONCE = 2
STEPS = 12
SHORT = 1
POLL_SECONDS = 0.01
TRAIN = [
    *("-m", "dapo_jax.train", "--config=experiments/faults/config.py"),
    *(f"--config.num_steps={STEPS}", "--config.checkpoint.every_steps=1"),
    *("--config.checkpoint.keep=2", "--config.eval.every_steps=0"),
]
# Restores, goes on to the last step and prints what it has then.
SNAPSHOTS = """
import sys, time, jax, jax.numpy as jnp
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.checkpoints.digests import described
from dapo_jax.checkpoints.snapshots import Snapshots
from dapo_jax.checkpoints.progress import Progress
checkpoints = Checkpoints(sys.argv[1], keep=2)
state = {"a": jnp.arange(2**18, dtype=jnp.uint32)}
abstract = {"a": jax.ShapeDtypeStruct(state["a"].shape, jnp.uint32, sharding=state["a"].sharding)}
first, state, saved = checkpoints.restore_latest(abstract, report=print) or (0, state, {})
cursor = Progress.from_json(saved).cursor
with Snapshots(checkpoints, every_steps=1, say=print) as run:
    for step in range(first, 30):
        state = {"a": state["a"] * 1664525 + step}
        cursor += step
        run.take(step + 1, state, Progress(cursor=cursor), described(state))
        time.sleep(0.01)
print(int(state["a"][12345]), cursor)
"""


def start(arguments: list[str], log: pathlib.Path) -> subprocess.Popen:
    """Starts a Python program with its output in `log` and the programs compiled before."""
    with log.open("a") as output:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=compiled(log.parent) | {"PYTHONPATH": str(pathlib.Path.cwd())},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def finish(arguments: list[str], log: pathlib.Path) -> None:
    """Runs a program to its end, which must be a good one."""
    if start(arguments, log).wait():
        raise RuntimeError(log.read_text()[-2_000:])


def names(folder: pathlib.Path) -> set[str]:
    """Lists what is in a folder, half-written checkpoints too."""
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def kill(arguments: list[str], log: pathlib.Path, checkpoints: pathlib.Path, wait) -> bool:
    """Starts a program and kills it; False where it was at its end before.

    wait: (whether for the first new save to begin, seconds after that).
    """
    before, process = names(checkpoints), start(arguments, log)
    until_save, seconds = wait
    while until_save and process.poll() is None and names(checkpoints) <= before:
        time.sleep(POLL_SECONDS)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def contents(workdir: pathlib.Path) -> list:
    """Reads all of a run that no clock decides; of the state the digests."""
    rows = [untimed(row) for row in read_rows(workdir / "metrics.jsonl")]
    files = [workdir / "rollouts" / f"{row['step']}.jsonl.gz" for row in rows]
    newest = workdir / "checkpoints" / str(STEPS)
    progress = json.loads((newest / "progress" / "metadata").read_text())
    progress["row"] = untimed(progress["row"])
    arrays = json.loads((newest / "manifest" / "metadata").read_text())["arrays"]
    return [rows, [gzip.decompress(file.read_bytes()) for file in files], progress, arrays]


def killed_run(folder: pathlib.Path, number: int, kills: int, seed: int, expected) -> list[Outcome]:
    """Kills one run so often, or until it is done, lets it end, and compares."""
    whole, start_seconds, step_seconds = expected
    workdir, log = folder / str(number), folder / f"{number}.log"
    arguments, moments = [*TRAIN, f"--workdir={workdir}"], random.Random(f"{seed} {number}")
    faults = []
    while len(faults) < kills:
        early = moments.random() < 0.25
        seconds = moments.uniform(0, start_seconds if early else 2 * step_seconds)
        if not kill(arguments, log, workdir / "checkpoints", (not early, seconds)):
            break
        what = "after the start" if early else "after a save began"
        faults.append(f"SIGKILL {seconds:.2f} s {what}")
    try:
        finish(arguments, log)
        same = contents(workdir) == whole
    except (RuntimeError, OSError, ValueError) as error:
        return [Outcome(fault, False, None, str(error)[-200:]) for fault in faults]
    return [Outcome(fault, same, None, "" if same else "another run") for fault in faults]


def runs(count: int, seed: int, folder: pathlib.Path) -> Iterator[Outcome]:
    """Kills real runs, two side by side, until there were so many kills."""
    arguments = [*TRAIN, f"--workdir={folder / 'whole'}"]
    finish([*TRAIN, f"--workdir={folder / 'compiled_run'}"], folder / "whole.log")
    began = time.monotonic()
    finish(arguments, folder / "whole.log")
    rows = read_rows(folder / "whole" / "metrics.jsonl")
    stepping = sum(row["seconds/total"] for row in rows)
    start_seconds = max(1.0, time.monotonic() - began - stepping)
    expected = contents(folder / "whole"), start_seconds, stepping / STEPS
    done = number = 0
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        while done < count:
            left = count - done
            kills = [min(KILLS_A_RUN, -(-left // AT_ONCE))] * AT_ONCE if left > 1 else [1]
            group = [
                pool.submit(killed_run, folder, number + i, n, seed, expected)
                for i, n in enumerate(kills)
            ]
            number += len(group)
            for outcome in (outcome for future in group for outcome in future.result()):
                done += 1
                if done <= count:
                    yield outcome


def snapshots(count: int, seed: int, folder: pathlib.Path) -> Iterator[Outcome]:
    """Kills the program that takes snapshots alone, and lets it end."""
    moments = random.Random(seed)
    for i in range(count):
        workdir, log = folder / str(i), folder / f"{i}.log"
        arguments = ["-c", SNAPSHOTS, str(workdir)]
        wait = (True, moments.uniform(0, 0.3))
        killed = kill(arguments, log, workdir, wait)
        finish(arguments, log)
        a = 12345
        for step in range(30):
            a = (a * 1664525 + step) % 2**32
        last = log.read_text().splitlines()[-1]
        same = last == f"{a} {sum(range(30))}"
        fault = f"SIGKILL {wait[1]:.2f} s after a save began"
        yield Outcome(fault, killed and same, None, "" if killed and same else f"ended with {last}")


def inject(count: int, seed: int, folder: pathlib.Path) -> Iterator[Outcome]:
    """Kills so often: a real run, or where it is the short part, snapshots alone."""
    yield from (snapshots if count <= SHORT else runs)(count, seed, folder)


PART = Part("kill -9", full=100, short=SHORT, inject=inject)
