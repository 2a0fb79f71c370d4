"""What is due is saved behind the run's back; SIGTERM saves the last boundary from any phase."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.run.checkpoint import Checkpoints
from dapo_jax.run.snapshots import Boundaries, host_copy
from sharding.hosts import COME_AGAIN

ROOT = pathlib.Path(__file__).resolve().parent.parent


def saved_steps(folder) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def boundaries(folder, *, every_steps, keep=None) -> Boundaries:
    return Boundaries(Checkpoints(folder, keep=keep), every_steps=every_steps, say=print)


def test_due_and_forced_boundaries_are_saved(tmp_path):
    with boundaries(tmp_path, every_steps=3) as run:
        for step in range(1, 9):
            run.passed(step, {"a": jnp.full(2, step)}, {"cursor": step}, force=step == 8)
    assert saved_steps(tmp_path) == [3, 6, 8]


def test_a_state_that_is_donated_behind_the_boundary_is_saved_as_it_was(tmp_path):
    """The learner's update overwrites its input while the checkpoint is being written."""
    overwrite = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0, state), donate_argnums=0)
    state = {"a": jax.random.normal(jax.random.key(0), (2048, 2048))}
    expected = np.array(state["a"], copy=True)
    with boundaries(tmp_path, every_steps=1) as run:
        run.passed(1, state, {})
        state = jax.block_until_ready(overwrite(state))
    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
    )
    restored, _ = Checkpoints(tmp_path, keep=None).restore(1, abstract)
    np.testing.assert_array_equal(restored["a"], expected)


def test_a_copy_shares_no_memory():
    array = jnp.arange(8.0)
    copy = host_copy({"a": array})["a"]
    assert copy.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()
    assert copy.sharding == array.sharding


class Broken:
    """Checkpoints on a disk that is full."""

    def save(self, step, state, progress):
        raise OSError("no space left on device")


def test_a_failed_save_is_raised_in_the_run():
    with (
        pytest.raises(OSError, match="no space left"),
        Boundaries(Broken(), every_steps=1, say=print) as run,
    ):
        for step in range(1, 100):
            run.passed(step, {"a": jnp.ones(1)}, {})


VICTIM = """
import ctypes, sys, jax.numpy as jnp
from dapo_jax.run.snapshots import Boundaries
from dapo_jax.run.checkpoint import Checkpoints
folder, steps = sys.argv[1], int(sys.argv[2])
with Boundaries(Checkpoints(folder, keep=None), every_steps=2, say=print) as run:
    for step in range(1, steps + 1):
        run.passed(step, {"a": jnp.full(3, step)}, {"cursor": 10 * step})
    print("ready", flush=True)
    ctypes.CDLL(None).sleep(60)  # as a compiler or a device: no Python runs in this thread
"""


@pytest.mark.parametrize(
    ("steps", "saved", "message"),
    [
        (3, [2, 3], r"SIGTERM: 3 finished steps are saved \(after .* s\); give the command again"),
        (4, [2, 4], r"SIGTERM: 4 finished steps are saved"),
        (0, [], r"SIGTERM: no step was finished since the start"),
    ],
)
def test_sigterm_saves_the_last_boundary_while_the_main_thread_is_deep_in_c(
    tmp_path, steps, saved, message
):
    """A handler in Python would run only after the compiler returns, minutes later."""
    folder = tmp_path / "checkpoints"
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(folder), str(steps)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert victim.stdout.readline() == "ready\n"
    start = time.monotonic()
    victim.send_signal(signal.SIGTERM)
    out, _ = victim.communicate(timeout=120)
    assert victim.returncode == COME_AGAIN == 75
    assert time.monotonic() - start < 15
    assert re.search(message, out)
    assert saved_steps(folder) == saved
    if saved:
        state = {"a": jax.ShapeDtypeStruct((3,), jnp.int32, sharding=jnp.ones(1).sharding)}
        restored, progress = Checkpoints(folder, keep=None).restore(steps, state)
        assert restored["a"].tolist() == [steps] * 3
        assert progress == {"cursor": 10 * steps}


CREW = """
import sys, time, jax, numpy as np
from dapo_jax.run.snapshots import Boundaries
from dapo_jax.run.checkpoint import Checkpoints
from sharding import hosts, rules
from sharding.mesh import make_mesh
folder = sys.argv[1]
hosts.start(several=True, cpu_devices=2)
rows = rules.rows(make_mesh(data=-1, model=1))
with Boundaries(Checkpoints(folder, keep=None), every_steps=2, say=print) as run:
    for step in range(1, 6):
        run.passed(step, {"a": hosts.place(np.arange(4) + step, rows)}, {"cursor": step})
        hosts.gather(step)  # what a step has all do together
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("told", [[0], [1], [0, 1]])
def test_whichever_process_is_told_all_save_the_same_boundary(tmp_path, told):
    folder = tmp_path / "checkpoints"
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    base = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    base |= {"PYTHONPATH": str(ROOT), "DAPO_COORDINATOR": f"localhost:{port}"}
    crew = [
        subprocess.Popen(
            [sys.executable, "-c", CREW, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=base | {"DAPO_PROCESSES": "2", "DAPO_PROCESS": str(i)},
        )
        for i in range(2)
    ]
    try:
        for process in crew:
            while process.stdout.readline() != "ready\n":
                assert process.poll() is None
        start = time.monotonic()
        for i in told:
            crew[i].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=120)[0] for process in crew]
    finally:
        for process in crew:
            process.kill()
    assert time.monotonic() - start < 15
    assert [process.returncode for process in crew] == [COME_AGAIN] * 2
    assert "SIGTERM: 5 finished steps are saved" in outputs[0]
    assert saved_steps(folder) == [2, 4, 5]
    state = {"a": jax.ShapeDtypeStruct((4,), jnp.int32, sharding=jnp.ones(1).sharding)}
    restored, _ = Checkpoints(folder, keep=None).restore(5, state)
    assert restored["a"].tolist() == [5, 6, 7, 8]


def test_afterwards_signals_are_as_they_were(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with boundaries(tmp_path, every_steps=1):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
