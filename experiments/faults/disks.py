"""Full, read-only and vanished disks, broken files of a run, locks, what dead processes left.

Real commands run on a disk of a few megabytes: a tmpfs where this process may mount one; elsewhere
their files are limited in size, which fails a write in the middle as well. After each, the command
is given again with room: the rows have to be those of an undisturbed run. The faster cases use the
parts of a run in this process.
"""

import contextlib
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from dapo_jax.cli import failures
from dapo_jax.logs.files import LOCK, Rows, atomic_file, locked, read_rows
from dapo_jax.logs.metrics import untimed
from dapo_jax.setup import checks
from experiments.faults.config import get_config
from experiments.faults.parts import Outcome, Part, compiled

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS = [{"step": step, "reward/mean": step / 3, "entropy": 0.1 * step} for step in range(40)]
STEPS = 3
COMMANDS = 12  # of the full part; the others take milliseconds
HOLD = """
import os, pathlib, socket, sys, time
from dapo_jax.logs.files import append_line, atomic_file, locked
folder = pathlib.Path(sys.argv[1])
with locked(folder), atomic_file(folder / "eval" / "3.json") as file:
    (folder / "starts.jsonl").touch()
    start = {"pid": os.getpid(), "host": socket.gethostname(), "time": "2026"}
    append_line(folder / "starts.jsonl", start)
    print("held", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def small_files(size: int) -> Iterator[None]:
    """Lets no file of this process grow over so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_rows(folder: pathlib.Path) -> None:
    writer = Rows(folder, resume_step=None)
    for row in ROWS:
        writer.write(row)


def full_disk_under_rows(folder: pathlib.Path, chance: random.Random) -> Outcome:
    """A write of a row or of a result fails at a random byte."""
    size = chance.randrange(10, 3_000)
    error, done = None, []
    with small_files(size):
        try:
            writer = Rows(folder, resume_step=None)
            for row in ROWS:
                writer.write(row)
                done.append(row)
                with atomic_file(folder / "eval" / f"{row['step']}.json") as file:
                    file.write(b"x" * (100 * row["step"]))
        except OSError as raised:
            error = raised
    file = folder / "metrics.jsonl"
    rows = read_rows(file) if file.exists() else []
    whole = rows[: len(done)] == done and len(rows) <= len(done) + 1
    line, status = failures.explain(error)
    said = str(folder) in line and "EFBIG" in line and "\n" not in line and status == 1
    left = [path for path in folder.rglob("*") if path.suffix == ".tmp"]
    last = len(rows) - 1 if rows else None
    writer = Rows(folder, resume_step=last)
    for row in ROWS[len(rows) :]:
        writer.write(row)
    whole = whole and not left and read_rows(file) == ROWS
    return Outcome(f"no room after {size} bytes", whole, said, "" if whole else "rows")


def cut_config(folder: pathlib.Path, chance: random.Random) -> Outcome:
    """The run's config.json ends at a random byte: it is refused, by name."""
    config, file = get_config(), folder / "config.json"
    text = json.dumps(json.loads(config.to_json_best_effort()), indent=1)
    size = chance.choice([0, chance.randrange(len(text))])
    file.write_text(text[:size])
    try:
        checks.check_same_recipe(config, folder)
    except ValueError as error:
        line, status = failures.explain(error)
        said = str(file) in line and "\n" not in line and status == 1
        kept = file.read_text() == text[:size]
        return Outcome(f"config.json cut at {size}", kept, said, "" if kept else "config.json")
    return Outcome(f"config.json cut at {size}", False, False, "it was taken for the config")


def cut_rows(folder: pathlib.Path, chance: random.Random) -> Outcome:
    """The rows end at a random byte, or are gone: what is there stays, and the loss is said."""
    write_rows(folder)
    file = folder / "metrics.jsonl"
    data = file.read_bytes()
    size = chance.randrange(len(data) - len(data.splitlines()[-1]))
    file.write_bytes(data[:size])
    if gone := chance.random() < 0.3:
        file.unlink()
    resume, there = len(ROWS) - 1, 0 if gone else data[:size].count(b"\n")
    writer = Rows(folder, resume_step=resume)
    notes = writer.notes
    if not writer.has(resume):
        writer.write(ROWS[-1])  # which the checkpoint has
    rows = read_rows(file)
    kept = rows[:-1] in (ROWS[:there], ROWS[: there + 1]) and rows[-1] == ROWS[-1]
    said = len(notes) == 1 and f"lacks {resume - len(rows) + 1} of the {len(ROWS)} rows" in notes[0]
    fault = "metrics.jsonl deleted" if gone else f"metrics.jsonl cut at {size}"
    return Outcome(fault, kept, said, "" if kept else "rows that were there")


def rows_of_lost_steps(folder: pathlib.Path, chance: random.Random) -> Outcome:
    """The checkpoint is older than the rows, twice: rows that are done again are kept in copies."""
    write_rows(folder)
    resume = chance.randrange(len(ROWS) - 1)
    said, kept, file = True, True, folder / "metrics.jsonl"
    for name in ("metrics.cut-1.jsonl", "metrics.cut-2.jsonl"):
        writer = Rows(folder, resume_step=resume)
        said = said and len(writer.notes) == 1 and name in writer.notes[0]
        kept = kept and read_rows(file) + read_rows(folder / name) == ROWS
        for row in ROWS[resume + 1 :]:
            writer.write(row)
    return Outcome(f"resumed at step {resume} of {len(ROWS)}", kept, said, "" if kept else "rows")


@contextlib.contextmanager
def holder(folder: pathlib.Path) -> Iterator[subprocess.Popen]:
    """Another process that has the lock and is in the middle of a file."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def tried(folder: pathlib.Path) -> str:
    """Takes the lock, and writes a file; the refusal, "" where there was none."""
    try:
        with locked(folder), atomic_file(folder / "eval" / "3.json") as file:
            file.write(b"{}")
    except ValueError as error:
        return str(error)
    return ""


def locked_by_a_live_run(folder: pathlib.Path, chance: random.Random) -> Outcome:
    """A second run is refused, also while the first is stopped, and leaves its files alone."""
    with holder(folder) as process:
        if stopped := chance.random() < 0.5:
            process.send_signal(signal.SIGSTOP)
        files = set(folder.rglob("*"))
        message = tried(folder)
        kept = bool(message) and files == set(folder.rglob("*"))
        said = f"process {process.pid} on " in message and str(folder / LOCK) in message
    fault = f"a second run{', the first one stopped' if stopped else ''}"
    return Outcome(fault, kept, said, "" if kept else "the first run's folder")


def locked_by_a_dead_run(folder: pathlib.Path, chance: random.Random) -> Outcome:
    """The lock of a killed one is taken over at once, and its half-written file replaced."""
    with holder(folder) as process:
        process.kill()
        process.wait()
        before = list(folder.glob("eval/*.tmp"))
        message = tried(folder)
    left = [path.name for path in folder.glob("eval/*")]
    free = len(before) == 1 and not message and left == ["3.json"]
    return Outcome("kill -9 with the lock", free, None, "" if free else f"{message}{left}")


def started_at_once(folder: pathlib.Path, chance: random.Random) -> Outcome:
    """Several processes take the lock at the same moment: one has it."""
    count = chance.randrange(2, 5)
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-c", HOLD, str(folder)]
        processes = [
            subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for _ in range(count)
        ]
        for process in processes:
            stack.callback(process.communicate)
            stack.callback(process.kill)
        until = time.monotonic() + 20
        while sum(p.poll() is None for p in processes) > 1 and time.monotonic() < until:
            time.sleep(0.01)
        ended = [p for p in processes if p.poll() is not None]
        said = all("belongs to a run that is going on" in p.stderr.read() for p in ended)
    one = len(ended) == count - 1
    return Outcome(f"{count} starts at once", one, said, "" if one else "more than one has it")


class Runs:
    """Real commands, each on a disk of its own, and the rows of an undisturbed one."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._may_mount = os.geteuid() == 0
        self.expected = self.rows(self._made("undisturbed"))

    def _made(self, name: str) -> pathlib.Path:
        (self._folder / name).mkdir()
        return self._folder / name

    def start(self, workdir: pathlib.Path, *, file_bytes: int | None = None) -> subprocess.Popen:
        """Starts a run of a few steps with a checkpoint after each."""
        arguments = ["--config=experiments/faults/config.py", f"--workdir={workdir}"]
        arguments += [f"--config.num_steps={STEPS}", "--config.checkpoint.every_steps=1"]
        limit = ["prlimit", f"--fsize={file_bytes}"] if file_bytes else []
        return subprocess.Popen(
            [*limit, sys.executable, "-m", "dapo_jax.train", *arguments],
            cwd=ROOT,
            env=compiled(self._folder) | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def rows(self, workdir: pathlib.Path) -> list[dict]:
        """The rows of a run that is given (again) until it is done, without timings."""
        process = self.start(workdir)
        output, _ = process.communicate()
        if process.returncode:
            return [{"failed": output[-500:]}]
        return [untimed(row) for row in read_rows(workdir / "metrics.jsonl")]

    @contextlib.contextmanager
    def disk(self, mebibytes: float) -> Iterator[pathlib.Path | None]:
        """A folder on a disk of its own; None where this process may mount none."""
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            options = f"size={int(mebibytes * 1024)}k"
            mount = ["mount", "-t", "tmpfs", "-o", options, "none", name]
            if not self._may_mount or subprocess.run(mount, capture_output=True).returncode:
                yield None
                return
            try:
                yield pathlib.Path(name)
            finally:
                subprocess.run(["umount", name], check=True)

    def outcome(
        self, fault: str, workdir, process, *, words: str, mend: Callable[[], object]
    ) -> Outcome:
        """Returns what a run said that was to end, and what the same command gives after `mend`."""
        output, _ = process.communicate()
        lines = [line for line in output.splitlines() if line.startswith("error: ")]
        clean = "Traceback" not in output and "Exception ignored" not in output
        said = clean and process.returncode == 1 and len(lines) == 1 and words in lines[0]
        if not said:
            fault += f" (status {process.returncode}: {' '.join(output.split())[-300:]!r})"
        mend()
        same = self.rows(workdir) == self.expected
        return Outcome(fault, same, said, "" if same else "the run's rows")

    def full(self, folder: pathlib.Path, chance: random.Random) -> Outcome:
        """The disk has no room left at some point of the run, which would need 38 MiB."""
        mebibytes = 2 ** chance.uniform(-6, 5)
        with self.disk(mebibytes) as disk:
            if disk is None:
                size, run = int(2 ** chance.uniform(9, 18)), folder / "run"
                process = self.start(run, file_bytes=size)
                fault = f"no file of a run over {size:,} bytes"
                return self.outcome(fault, run, process, words="(EFBIG", mend=lambda: None)
            room = ["mount", "-o", "remount,size=256m", str(disk)]
            return self.outcome(
                f"a disk of {mebibytes:.2f} MiB",
                disk / "run",
                self.start(disk / "run"),
                words="(ENOSPC",
                mend=lambda: subprocess.run(room, check=True),
            )

    def read_only(self, folder: pathlib.Path, chance: random.Random) -> Outcome:
        """A killed run finds that nothing can be written there any more."""
        step = chance.randrange(STEPS - 1)
        with self.disk(256) as disk:
            run = (disk or folder) / "run"
            process = self.start(run)
            _wait_for_row(run, step, process)
            process.kill()
            process.communicate()
            if disk is None:  # where nothing can be mounted, this is no root either
                words, change, back = "(EACCES)", ["chmod", "a-w", run], ["chmod", "u+w", run]
            else:
                words = "(EROFS)"
                change, back = (["mount", "-o", f"remount,{how}", disk] for how in ("ro", "rw"))
            subprocess.run(change, check=True)
            process = self.start(run)
            mend = lambda: subprocess.run(back, check=True)  # noqa: E731
            return self.outcome(
                f"read-only after step {step}", run, process, words=words, mend=mend
            )

    def moved(self, folder: pathlib.Path, chance: random.Random) -> Outcome:
        """The run's folder, or its checkpoints', is moved away, and back for the next command."""
        step, name = chance.randrange(STEPS - 1), chance.choice(["run", "run", "run/checkpoints"])
        process = self.start(folder / "run")
        _wait_for_row(folder / "run", step, process)
        (folder / name).rename(folder / "moved")

        def back():
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / "moved").rename(folder / name)

        fault = f"{name} moved after step {step}"
        return self.outcome(fault, folder / "run", process, words="(ENOENT)", mend=back)

    def twice(self, folder: pathlib.Path, chance: random.Random) -> Outcome:
        """The same command comes twice at the same moment: one goes on, the other says why not."""
        processes = [self.start(folder / "run") for _ in range(2)]
        outputs = [process.communicate()[0] for process in processes]
        statuses = sorted(process.returncode for process in processes)
        said = statuses == [0, 1] and any("belongs to a run that is going on" in o for o in outputs)
        same = self.rows(folder / "run") == self.expected
        return Outcome("two commands at once", same, said, "" if same else "the run's rows")


def _wait_for_row(run: pathlib.Path, step: int, process: subprocess.Popen) -> None:
    file = run / "metrics.jsonl"
    while process.poll() is None and not (file.exists() and file.read_bytes().count(b"\n") > step):
        time.sleep(0.02)


IN_PROCESS = (
    full_disk_under_rows,
    cut_config,
    cut_rows,
    locked_by_a_live_run,
    locked_by_a_dead_run,
    rows_of_lost_steps,
    started_at_once,
)


def inject(count: int, seed: int, folder: pathlib.Path) -> Iterator[Outcome]:
    """Injects `count` of these faults, the last COMMANDS of the full part into real commands."""
    chance = random.Random(seed)
    commands = max(0, count - (PART.full - COMMANDS))
    for number in range(count - commands):
        place = folder / f"case_{number}"
        place.mkdir()
        yield IN_PROCESS[number % len(IN_PROCESS)](place, chance)
    if commands:
        runs = Runs(folder)
        kinds = (runs.full, runs.full, runs.read_only, runs.full, runs.moved, runs.full, runs.twice)
        for number in range(commands):
            place = folder / f"command_{number}"
            place.mkdir()
            yield kinds[number % len(kinds)](place, chance)


PART = Part("disks: full, read-only, moved; broken files; locks", full=60, short=7, inject=inject)
