"""Full, read-only and vanished disks, broken files of a run, locks, what dead processes left.

Real commands run on a disk of a few megabytes, a tmpfs where this process may mount one, and with
files limited in size, which fails a write in the middle as well. The command is given again after
each: in the end the rows have to be those of an undisturbed run.
"""

import contextlib
import os
import pathlib
import random
import shutil
import signal
import subprocess

import pytest
from conftest import cases
from disturbed import has, refused, rows_of, training
from processes import small_files, started

from dapo_jax.logs.files import LOCK, append_line, begin_rows, locked, read_rows, write_file
from dapo_jax.process import failures

pytestmark = pytest.mark.faults
ROWS = [{"step": step, "reward/mean": step / 3, "entropy": 0.1 * step} for step in range(40)]
STEPS = "num_steps=3"
HOLD = """
import os, pathlib, socket, sys, time
from dapo_jax.logs.files import append_line, locked, write_file
def hold(file):
    print("held", flush=True)
    time.sleep(60)
folder = pathlib.Path(sys.argv[1])
with locked(folder):
    (folder / "starts.jsonl").touch()
    start = {"pid": os.getpid(), "host": socket.gethostname(), "time": "2026"}
    append_line(folder / "starts.jsonl", start)
    os.fsync = hold
    write_file(folder / "eval" / "3.json", b"{}")
"""


def written(folder: pathlib.Path, rows=ROWS, *, first_step: int = 0) -> None:
    """Writes rows as a run does that goes on with a step."""
    begin_rows(folder, first_step=first_step)
    for row in rows:
        append_line(folder / "metrics.jsonl", row)


@pytest.mark.parametrize("seed", cases(1, 7))
def test_a_write_that_fails_at_any_byte_leaves_whole_rows(seed, tmp_path):
    size, file, done = random.Random(seed).randrange(10, 3_000), tmp_path / "metrics.jsonl", []
    with pytest.raises(OSError) as raised, small_files(size):
        begin_rows(tmp_path, first_step=0)
        for row in ROWS:
            append_line(file, row)
            done.append(row)
            write_file(tmp_path / "eval" / f"{row['step']}.json", b"x" * (100 * row["step"]))
    line, status = failures.explain(raised.value)
    assert str(tmp_path) in line and "EFBIG" in line and "\n" not in line and status == 1
    rows = read_rows(file)
    assert rows[: len(done)] == done and len(rows) <= len(done) + 1
    written(tmp_path, ROWS[len(rows) :], first_step=len(rows))
    assert read_rows(file) == ROWS


@pytest.mark.parametrize("seed", cases(2, 7))
def test_rows_that_are_cut_or_gone_are_missed_and_the_others_stay(seed, tmp_path):
    written(tmp_path)
    file, chance, last = tmp_path / "metrics.jsonl", random.Random(seed), len(ROWS) - 1
    data = file.read_bytes()
    data = data[: chance.randrange(len(data) - len(data.splitlines()[-1]))]
    file.write_bytes(data)
    if seed % 3 == 1:
        file.unlink()
    there = data.count(b"\n") if file.exists() else 0
    (note,) = begin_rows(tmp_path, first_step=last + 1, last_row=ROWS[-1])
    rows = read_rows(file)
    assert rows[:-1] in (ROWS[:there], ROWS[: there + 1]) and rows[-1] == ROWS[-1]
    assert f"lacks {len(ROWS) - len(rows)} of the {len(ROWS)} rows" in note


@pytest.mark.parametrize("seed", cases(1, 7))
def test_rows_that_are_newer_than_the_checkpoint_are_kept_in_copies(seed, tmp_path):
    written(tmp_path)
    resume, file = random.Random(seed).randrange(len(ROWS) - 1), tmp_path / "metrics.jsonl"
    for name in ("metrics.cut-1.jsonl", "metrics.cut-2.jsonl"):
        (note,) = begin_rows(tmp_path, first_step=resume + 1)
        assert name in note and read_rows(file) + read_rows(tmp_path / name) == ROWS
        for row in ROWS[resume + 1 :]:
            append_line(file, row)


@contextlib.contextmanager
def holding(folder: pathlib.Path):
    """Starts a process that has the lock, and is in the middle of a file."""
    with started(["-c", HOLD, str(folder)]) as (process,):
        assert process.stdout.readline() == "held\n"
        yield process


def test_a_second_run_touches_nothing_and_a_killed_ones_lock_is_free(tmp_path):
    """Refused also while the first one is stopped. The killed one's half file is replaced."""
    with holding(tmp_path) as process:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            files = set(tmp_path.rglob("*"))
            with pytest.raises(ValueError, match=rf"process {process.pid} on .*{LOCK}"):
                locked(tmp_path).__enter__()
            assert files == set(tmp_path.rglob("*"))
            process.send_signal(number)
        process.wait()
    assert len([*tmp_path.glob("eval/*.tmp")]) == 1
    with locked(tmp_path):
        write_file(tmp_path / "eval" / "3.json", b"{}")
    assert [path.name for path in tmp_path.glob("eval/*")] == ["3.json"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[dict]:
    return rows_of(tmp_path_factory.mktemp("undisturbed") / "run", STEPS)


@contextlib.contextmanager
def disk(folder: pathlib.Path, mebibytes: float):
    """Makes a folder on a disk of its own, and yields a function that mounts it otherwise.

    Skips the test where this process may mount none.
    """
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={int(mebibytes * 1024)}k", "none", folder]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may mount no disk")

    def remount(how):
        subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)

    try:
        yield remount
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", cases(1, 6))
def test_a_full_and_then_read_only_disk_ends_a_run_in_one_line(seed, expected, tmp_path):
    """Full at some point of the run, which needs 38 MiB; read-only where it is resumed."""
    workdir = tmp_path / "disk" / "run"
    rows = workdir / "metrics.jsonl"
    with disk(tmp_path / "disk", 2 ** random.Random(seed).uniform(-6, 5)) as remount:
        with training(workdir, STEPS) as process:
            refused(process, "(ENOSPC")
        remount("size=256m")
        with training(workdir, STEPS) as process:
            has(lambda: rows.exists() and rows.read_bytes().count(b"\n") > seed % 2, process)
        remount("ro")
        with training(workdir, STEPS) as process:
            refused(process, "(EROFS)")
        remount("rw")
        assert rows_of(workdir, STEPS) == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", cases(1, 4))
def test_a_failed_write_and_then_a_moved_folder_end_a_run_in_one_line(seed, expected, tmp_path):
    """A limit of the files' size, which any user may set; the folder goes on where it is back."""
    workdir, limit = tmp_path / "run", int(2 ** random.Random(seed).uniform(9, 18))
    with contextlib.ExitStack() as stack:
        with small_files(limit):
            process = stack.enter_context(training(workdir, STEPS))
        refused(process, "(EFBIG")
    moved = workdir / "checkpoints" if seed % 2 == 0 else workdir
    with training(workdir, STEPS) as process:
        has((workdir / "checkpoints" / "1").is_dir, process)
        moved.rename(tmp_path / "moved")
        refused(process, "(ENOENT)")
    shutil.rmtree(moved, ignore_errors=True)
    (tmp_path / "moved").rename(moved)
    assert rows_of(workdir, STEPS) == expected
