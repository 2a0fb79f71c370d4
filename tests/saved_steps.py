"""The program of each process of test_faults_stops.py: steps of a small state, and their saves.

    python tests/saved_steps.py FOLDER PHASE

Each step is a real computation over the devices of all processes, which the environment tells of
(process/hosts.py). After STEP steps the phase begins: it says so and lasts until the process ends.
"""

import ctypes
import fcntl
import os
import sys
import termios
import time

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.checkpoints import digests
from dapo_jax.checkpoints.progress import Progress
from dapo_jax.checkpoints.snapshots import Snapshots
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.process import hosts, signals
from sharding import rules
from sharding.mesh import make_mesh

PHASES = ("starting", "compiling", "reducing", "waiting", "saving")
STEP, STEPS, EVERY_STEPS = 3, 9, 4
READY = "the phase is under way"
SECONDS = 90
SAVING_SECONDS = 4.0  # how long a slow storage takes
NUMBERS = 2**20  # of a sum over all devices: 4 MB of each


class Slow(Checkpoints):
    """Checkpoints on a storage that takes a while; says when it is at it."""

    def save(self, step, *content):
        print(READY, flush=True)
        time.sleep(SAVING_SECONDS)
        return super().save(step, *content)


def after(state: np.ndarray) -> np.ndarray:
    """The state after another step: any mistake of a number or a step shows in all later ones."""
    return (3 * state + state.sum()) % 1_000_003


def last(phase: str, mesh) -> None:
    """Lasts as a phase of a step does, in every process or with one that the others wait for."""
    # What each process adds to the sum.
    numbers = jax.device_put(np.ones((mesh.size, NUMBERS), np.float32), rules.rows(mesh))
    total = jax.jit(lambda numbers: numbers.sum(0))
    total(numbers).block_until_ready()
    if phase != "saving":
        print(READY, flush=True)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        if phase == "compiling" or (phase == "waiting" and not hosts.is_main_host()):
            ctypes.CDLL(None).sleep(SECONDS)  # no Python runs in this thread; a signal ends it
        else:
            total(numbers).block_until_ready()


def main(folder: str, phase: str) -> None:
    if os.isatty(0):  # as a shell does, so that it hears when the terminal is closed
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY)
    several = hosts.PROCESSES in os.environ
    if phase == "starting":  # the others wait for the main process, before there is any snapshot
        print(READY, flush=True)
        if os.environ.get(hosts.PROCESS, "0") == "0":
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:  # a signal ends a sleep, but no start
                ctypes.CDLL(None).sleep(1)
    processes = int(os.environ.get(hosts.PROCESSES, "1"))
    hosts.start(several=several, cpu_devices=processes)
    if phase == "failing" and not hosts.is_main_host():
        raise ValueError("data.train.path = 'nowhere' has no prompts")
    mesh = make_mesh(data=-1, model=1)
    step_of = jax.jit(after)
    checkpoints = (Slow if phase == "saving" else Checkpoints)(folder, keep=None)
    with Snapshots(checkpoints, every_steps=EVERY_STEPS, say=print) as snapshots:
        state = hosts.place(np.arange(2 * mesh.size, dtype=np.int32), rules.rows(mesh))
        abstract = {"a": jax.ShapeDtypeStruct(state.shape, jnp.int32, sharding=state.sharding)}
        restored = checkpoints.restore_latest(abstract, report=print)
        first, state = (restored[0], restored[1]["a"]) if restored else (0, state)
        for step in range(first, STEPS):
            if phase and step == STEP + (phase == "saving"):
                last(phase, mesh)
            state, last_one = step_of(state), step + 1 == STEPS
            of_step = (step + 1, {"a": state}, Progress(cursor=step + 1))
            snapshots.take(*of_step, digests.of_arrays({"a": state}), force=last_one)
            hosts.gather(step)
    print(f"all steps are done: {hosts.fetch(state).tolist()}", flush=True)


if __name__ == "__main__":
    with signals.Signals(signals.end_command), hosts.ending_when_a_peer_is_lost():
        try:
            main(*sys.argv[1:])
        except ValueError as error:
            if not hosts.is_lost(error):
                hosts.fail(f"error: {error}", code=1)
            raise
