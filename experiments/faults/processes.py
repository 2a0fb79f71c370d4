"""Stops, kills and freezes processes in every phase of a step: all end alike, and can go on.

A stop by a signal (SIGTERM, Ctrl-C, a closed terminal) leaves the newest snapshot saved and all
processes with status 75. After `kill -9`, or where a process is frozen, the others leave with 75
within 15 seconds, one line each; the frozen one does when it runs again. An error in the settings
of one process is status 1 for all. The same command then goes on to the end that an undisturbed
run has.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import numpy as np

from experiments.faults import steps
from experiments.faults.parts import Outcome, Part, free_port
from sharding import hosts

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 15  # from the fault to the end of all processes that can end
FINISH_SECONDS = 120
AT_ONCE = 3  # cases; most of their time is waiting


@dataclasses.dataclass(frozen=True)
class Case:
    """A fault: what is done to which process (-1: to all), in which phase, of how many."""

    what: str
    victim: int
    phase: str
    processes: int = 2

    def __str__(self) -> str:
        whom = "all" if self.victim < 0 else f"process {self.victim}"
        return f"{self.what} of {whom} of {self.processes} while {self.phase}"


STOPS = ("SIGTERM", "SIGINT", "SIGHUP")
LATER = steps.PHASES[1:]
SHORT = (
    Case("SIGTERM", 1, "reducing"),
    Case("SIGKILL", 0, "reducing"),
    Case("SIGINT twice", 0, "saving", 1),
    Case("SIGINT", -1, "reducing"),
    Case("terminal closed", 0, "reducing", 1),
)
CASES = (
    *SHORT,
    *(Case(name, i % 2, phase) for i, phase in enumerate(LATER) for name in STOPS),
    *(Case("SIGTERM", (i + 1) % 2, phase) for i, phase in enumerate(LATER)),
    *(Case("SIGINT", -1, phase) for phase in ("starting", "saving")),
    *(Case(name, 0, phase, 1) for phase in ("starting", "saving") for name in STOPS[:2]),
    Case("terminal closed", 0, "saving", 1),
    *(Case("SIGKILL", i, phase) for i in range(2) for phase in LATER),
    *(Case("SIGSTOP", i, phase) for i in range(2) for phase in ("compiling", "waiting", "saving")),
    *(Case("SIGINT twice", i, "saving") for i in range(2)),
    Case("SIGTERM", 2, "waiting", 3),
    Case("SIGKILL", 1, "reducing", 3),
    Case("SIGSTOP", 0, "reducing", 3),
    Case("error", 1, "failing"),
)


def inject(count: int, seed: int, folder: pathlib.Path) -> Iterator[Outcome]:
    """Injects the first `count` cases, a few at a time; they are the same for all seeds."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(
            lambda i: outcome_of(CASES[i], folder / str(i)), [i % len(CASES) for i in range(count)]
        )


def outcome_of(case: Case, folder: pathlib.Path) -> Outcome:
    """Injects one fault, gives the command again, and compares."""
    folder.mkdir()
    with started(case, folder, phase=case.phase) as group:
        for process, log in zip(group, logs(case, folder, case.phase), strict=True):
            if case.phase != "failing":
                wait_for(steps.READY, log, process)
        before = saved_steps(folder)
        statuses, seconds = end_of(case, group)
    outputs = [log.read_text() for log in logs(case, folder, case.phase)]
    faults = [*wrong_statuses(case, statuses), *wrong_saves(case, folder, before)]
    if seconds > (FINISH_SECONDS if case.what == "error" else SECONDS):  # that is from the start
        faults.append(f"{seconds:.0f} s")
    if case.phase != "failing":
        faults += wrong_end(case, folder)
    return Outcome(str(case), not faults, is_said(case, outputs), "; ".join(faults))


def end_of(case: Case, group: list[subprocess.Popen]) -> tuple[list[int], float]:
    """Does to the victims what the case says; returns all statuses, and the seconds until then.

    A frozen process has its own seconds, once it runs again; the longer ones are returned.
    """
    began, others_seconds = time.monotonic(), 0.0
    victims = group if case.victim < 0 else [group[case.victim]]
    if case.what == "terminal closed":
        os.close(group[0].terminal)
    elif case.what != "error":
        number = getattr(signal, case.what.split()[0])
        for process in victims:
            process.send_signal(number)
    if case.what == "SIGINT twice":
        time.sleep(1.2)
        victims[0].send_signal(signal.SIGINT)
    if case.what == "SIGSTOP":
        for process in group:
            if process not in victims:
                process.wait(FINISH_SECONDS)
        others_seconds = time.monotonic() - began
        victims[0].send_signal(signal.SIGCONT)
        began = time.monotonic()
    statuses = [process.wait(FINISH_SECONDS) for process in group]
    return statuses, max(others_seconds, time.monotonic() - began)


def wrong_statuses(case: Case, statuses: list[int]) -> list[str]:
    expected = [hosts.RETRYABLE] * case.processes
    if case.what == "SIGKILL":
        expected[case.victim] = -signal.SIGKILL
    elif case.what == "SIGINT twice":
        expected[case.victim] = 128 + signal.SIGINT
    elif case.what == "error":
        expected = [1] * case.processes
    return [] if statuses == expected else [f"statuses {statuses}, not {expected}"]


def wrong_saves(case: Case, folder: pathlib.Path, before: list[int]) -> list[str]:
    """A stop saves the newest snapshot, and nothing that was saved goes."""
    after = saved_steps(folder)
    faults = [f"checkpoint {step} is gone" for step in before if step not in after]
    stopped = case.what in (*STOPS, "terminal closed")
    newest = steps.STEP + (case.phase == "saving")
    if stopped and case.phase != "starting" and newest not in after:
        faults.append(f"{newest} finished steps are not saved, only {after}")
    return faults


def wrong_end(case: Case, folder: pathlib.Path) -> list[str]:
    """Gives the command again, without a fault: it must end as if nothing had been."""
    with started(case, folder, phase="") as group:
        statuses = [process.wait(FINISH_SECONDS) for process in group]
    state = np.arange(2 * case.processes)
    for _ in range(steps.STEPS):
        state = steps.after(state)
    said = f"all steps are done: {state.tolist()}"
    outputs = [log.read_text() for log in logs(case, folder, "")]
    if set(statuses) == {0} and all(said in output for output in outputs):
        return []
    return [f"given again: statuses {statuses}, {outputs[0][-200:]!r}"]


def is_said(case: Case, outputs: list[str]) -> bool | None:
    """True if every process that could speak says the fault, once, and without a traceback."""
    if case.what == "terminal closed":
        return None  # to whom?
    name = case.what.split()[0]
    line = {
        "SIGKILL": r"another process (is gone|has ended)",
        "SIGSTOP": r"another process (is gone|has ended)",
        "error": r"error: data\.train\.path = 'nowhere' has no prompts",
    }.get(name, rf"{name}: (\d+ finished steps are saved|stopped, with nothing to save)")
    if case.what == "SIGINT twice":
        line = r"SIGINT again: ended at once|another process (is gone|has ended)"
    heard = [
        output for i, output in enumerate(outputs) if case.what != "SIGKILL" or i != case.victim
    ]
    return all(len(re.findall(line, output)) == 1 and "Traceback" not in output for output in heard)


@contextlib.contextmanager
def started(case: Case, folder: pathlib.Path, *, phase: str) -> Iterator[list[subprocess.Popen]]:
    """Starts the processes of a case, each with a log; kills what is left."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    if case.processes > 1:
        env |= {hosts.COORDINATOR: f"localhost:{free_port()}"}
        env |= {hosts.PROCESSES: str(case.processes), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    with contextlib.ExitStack() as stack:
        group = []
        for i, log in enumerate(logs(case, folder, phase)):
            output = stack.enter_context(log.open("w"))
            terminal = {}
            if case.what == "terminal closed" and phase:
                ours, theirs = pty.openpty()
                stack.callback(os.close, theirs)
                terminal = {"stdin": theirs, "stdout": theirs, "start_new_session": True}
                terminal |= {"preexec_fn": lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)}
            process = subprocess.Popen(
                [sys.executable, "-m", "experiments.faults.steps", str(folder / "saved"), phase],
                cwd=ROOT,
                env=env | {hosts.PROCESS: str(i)} if case.processes > 1 else env,
                **{"stdout": output, "stderr": output} | terminal,
            )
            if terminal:
                process.terminal = ours
            stack.callback(process.kill)
            group.append(process)
        yield group


def logs(case: Case, folder: pathlib.Path, phase: str) -> list[pathlib.Path]:
    return [folder / f"{phase or 'again'}_{i}.txt" for i in range(case.processes)]


def wait_for(text: str, log: pathlib.Path, process: subprocess.Popen) -> None:
    """Waits until a process has written it, into its log or to its terminal."""
    until, seen = time.monotonic() + FINISH_SECONDS, ""
    while text not in seen + log.read_text():
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"{process.args}: {process.poll()}, {log.read_text()[-2000:]}")
        if hasattr(process, "terminal"):
            seen += os.read(process.terminal, 1_000).decode()
        time.sleep(0.05)


def saved_steps(folder: pathlib.Path) -> list[int]:
    if not (folder / "saved").exists():
        return []
    return sorted(int(path.name) for path in (folder / "saved").iterdir() if path.name.isdigit())


PART = Part("signals, killed and frozen processes", len(CASES), len(SHORT), inject)
