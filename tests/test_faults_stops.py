"""Processes are stopped, killed and frozen in every phase of a step: all end alike, and can go on.

A stop by a signal (SIGTERM, Ctrl-C, a closed terminal) leaves the newest snapshot saved and all
processes with status 75. After `kill -9`, or where a process is frozen, the others leave with 75
within 15 seconds, or JAX aborts them; so does the frozen one when it runs again. An error in the
settings of one process is status 1 for all. The same command then goes on to the end that an
undisturbed run has.
"""

import contextlib
import dataclasses
import os
import pathlib
import pty
import re
import signal
import time

import numpy as np
import pytest
import saved_steps
from conftest import FULL
from processes import started, wait_for
from runs import saved_steps as steps_in

from dapo_jax.process import hosts

pytestmark = pytest.mark.faults
SECONDS = 15  # from the fault to the end of all processes that can end
START_SECONDS = 120


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
STOPPED = r"(\d+ finished steps are saved|stopped, with nothing to)"
AGAIN, LOST = {hosts.RETRYABLE}, {hosts.RETRYABLE, -signal.SIGABRT}
# The statuses of the victim and of the others, and the pattern of the one line that each says, of
# which JAX may have aborted those that lost one.
ENDS = {
    **{name: (AGAIN, AGAIN, f"{name}: {STOPPED}") for name in STOPS},
    "terminal closed": (AGAIN, AGAIN, ""),  # to whom?
    "SIGKILL": ({-signal.SIGKILL}, LOST, ""),
    "SIGSTOP": (LOST, LOST, ""),
    "SIGINT twice": ({128 + signal.SIGINT}, LOST, "SIGINT again: ended at once"),
    "error": ({1}, {1}, r"error: data\.train\.path = 'nowhere' has no prompts"),
}
LATER = saved_steps.PHASES[1:]
SHORT = (
    Case("SIGTERM", 1, "reducing"),
    Case("SIGKILL", 0, "reducing"),
    pytest.param(Case("terminal closed", 0, "reducing", 1), marks=pytest.mark.slow),
)
CASES = (
    *SHORT,
    Case("SIGINT twice", 0, "saving", 1),
    Case("SIGINT", -1, "reducing"),
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


@contextlib.contextmanager
def running(case: Case, folder: pathlib.Path, phase: str):
    """Starts the processes of a case: (processes, files of their output, the terminal or None)."""
    command = ["tests/saved_steps.py", str(folder / "saved"), phase]
    logs = [folder / f"{phase or 'again'}_{i}.txt" for i in range(case.processes)]
    with contextlib.ExitStack() as stack:
        ours, stdin = None, None
        outputs = [stack.enter_context(log.open("w")) for log in logs]
        if case.what == "terminal closed" and phase:
            ours, stdin = pty.openpty()
            stack.callback(os.close, stdin)
            outputs = [stdin]
        how = {"processes": case.processes, "outputs": outputs, "stdin": stdin}
        yield stack.enter_context(started(command, **how)), logs, ours


def injected(case: Case, group, terminal: int | None) -> None:
    """Does to the victims what the case says, and waits until all have ended in time."""
    victims = group if case.victim < 0 else [group[case.victim]]
    if case.what == "terminal closed":
        os.close(terminal)
    elif case.what != "error":
        for process in victims:
            process.send_signal(getattr(signal, case.what.split()[0]))
    began = time.monotonic()
    if case.what == "SIGINT twice":
        time.sleep(1.2)
        victims[0].send_signal(signal.SIGINT)
    if case.what == "SIGSTOP":
        for process in group:
            if process not in victims:
                process.wait(SECONDS)
        began = time.monotonic()  # the frozen one has its own seconds, once it runs again
        victims[0].send_signal(signal.SIGCONT)
    limit = START_SECONDS if case.what == "error" else SECONDS  # that is from the start
    for process in group:
        process.wait(began + limit - time.monotonic())


@pytest.mark.parametrize("case", CASES if FULL else SHORT, ids=str)
def test_processes_end_alike_and_the_same_command_goes_on(case, tmp_path):
    with running(case, tmp_path, case.phase) as (group, logs, terminal):
        for process, log in zip(group, logs, strict=True) if case.phase != "failing" else ():
            heard = []

            def is_ready(process=process, log=log, heard=heard):
                assert process.poll() is None, log.read_text()[-2_000:]
                if terminal is not None:
                    heard.append(os.read(terminal, 1_000).decode())
                return saved_steps.READY in "".join(heard) + log.read_text()

            wait_for(is_ready, seconds=START_SECONDS)
        before = {*steps_in(tmp_path / "saved")}
        injected(case, group, terminal)
    own, others, line = ENDS[case.what]
    for i, (process, log) in enumerate(zip(group, logs, strict=True)):
        output = log.read_text()
        assert process.returncode in (own if i == case.victim else others), output
        if line and (others != LOST or i == case.victim):
            assert len(re.findall(line, output)) == 1 and "Traceback" not in output, output

    after = {*steps_in(tmp_path / "saved")}
    assert before <= after
    if case.what in (*STOPS, "terminal closed") and case.phase != "starting":
        assert saved_steps.STEP + (case.phase == "saving") in after  # the newest snapshot
    if case.phase == "failing":
        return
    with running(case, tmp_path, "") as (group, logs, _):
        assert [process.wait(START_SECONDS) for process in group] == [0] * case.processes
    state = np.arange(2 * case.processes)
    for _ in range(saved_steps.STEPS):
        state = saved_steps.after(state)
    for log in logs:
        assert f"all steps are done: {state.tolist()}" in log.read_text()
