"""Snapshots are saved behind the run's back when due; a stop saves the newest from any phase."""

import errno
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import started
from runs import saved_steps
from states import snapshots, take

from dapo_jax.checkpoints.snapshots import HOST_MEMORY, host_copy
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.process import hosts, signals
from dapo_jax.process.hosts import RETRYABLE

STATE = {"a": jnp.ones(1)}


def test_due_and_forced_snapshots_are_saved(tmp_path):
    with snapshots(tmp_path, every_steps=3) as run:
        for step in range(1, 9):
            take(run, step, STATE, cursor=step, force=step == 8)
        assert saved_steps(tmp_path) == [3, 6, 8]  # the forced one before `take` returns
        assert run.spent_seconds() > run.spent_seconds() == 0  # told once


def test_the_best_policy_is_saved_once_it_is_known_whether_it_is_due_or_not(tmp_path):
    """Evaluated a step after its snapshot, between two saves, the best policy was lost."""
    with snapshots(tmp_path, every_steps=3) as run:
        for step in range(1, 6):
            take(run, step, STATE, cursor=step)
            for known in (step - 1, step - 1, step - 4):
                if step == 3:
                    run.keep(known)  # -1: of a step that another process has done
                    assert 2 in saved_steps(tmp_path)
    assert saved_steps(tmp_path) == [2, 3]


def test_a_state_that_is_donated_after_the_snapshot_is_saved_as_it_was(tmp_path):
    """The learner's update overwrites its input while the checkpoint is being written."""
    overwrite = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0, state), donate_argnums=0)
    state = {"a": jax.random.normal(jax.random.key(0), (2048, 2048))}
    expected = np.array(state["a"], copy=True)
    with snapshots(tmp_path, every_steps=1) as run:
        take(run, 1, state)
        state = jax.block_until_ready(overwrite(state))
    saved, _ = Checkpoints(tmp_path, keep=None).restore(1, jax.eval_shape(lambda: state))
    np.testing.assert_array_equal(saved["a"], expected)


def test_a_copy_lies_in_the_hosts_memory_and_shares_none():
    """JAX's CPU devices have that memory too, so that this is what a pod does."""
    array = jnp.arange(8.0)
    copy = host_copy({"a": array})["a"]
    assert copy.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()
    assert copy.sharding == array.sharding.with_memory_kind(HOST_MEMORY)
    np.testing.assert_array_equal(copy, array)


class Full(Checkpoints):
    """Checkpoints on a disk that is full after one step."""

    def save(self, step, *content):
        if step > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory / str(step)))
        return super().save(step, *content)


def test_a_failed_save_is_raised_in_the_run(tmp_path):
    run = snapshots(tmp_path, every_steps=1, of=Full)
    with pytest.raises(OSError, match="No space left"), run:
        for step in range(1, 100):
            take(run, step, STATE)


def test_what_a_process_ends_with_says_what_failed(tmp_path, monkeypatch):
    said = []

    def end(*line_and_status):
        said.append(line_and_status)
        raise SystemExit

    monkeypatch.setattr(hosts, "end", end)
    run = snapshots(tmp_path, every_steps=1, of=Full)
    take(run, 2, STATE)
    text = "UNAVAILABLE: Failed to send RPC: recvmsg:Connection reset by peer"
    gone = jax.errors.JaxRuntimeError(text)
    monkeypatch.setattr(hosts, "started", lambda: True)
    with pytest.raises(SystemExit):
        run._fail(gone)
    run._stop("SIGTERM")
    with pytest.raises(SystemExit):
        run._fail(gone)
    monkeypatch.setattr(hosts, "started", lambda: False)
    with pytest.raises(SystemExit):
        run._run()
    (lost, unsaved, full), statuses = zip(*said, strict=True)
    assert "2: No space left on device" in full and {*statuses} == {RETRYABLE}
    assert lost.startswith(f"another process is gone (JaxRuntimeError: {text})")
    assert unsaved == f"SIGTERM: the newest step to resume at could not be saved: {lost}"


def test_sigterm_leaves_out_a_pending_checkpoint_that_is_older_than_the_newest_snapshot(tmp_path):
    """The saver's next order, before and after SIGTERM; nobody carries it out here."""
    run = snapshots(tmp_path, every_steps=2)
    for step in range(1, 4):
        take(run, step, STATE)
    assert run._order() == "save 2"
    run._stop("SIGTERM")
    assert run._order() == "stop SIGTERM 3"


def test_a_copy_of_ctrl_c_by_a_launcher_does_not_count_as_the_second_one(monkeypatch):
    """Signals of real processes, in all phases of a step, are in test_faults_stops.py."""
    now, ended, stopped = [0.0], [], []
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    heard = signals.Signals(stopped.append)
    for seconds, statuses in ((0.0, []), (signals.AGAIN_SECONDS, []), (1.1, [130])):
        now[0] = seconds
        heard._take(signal.SIGINT)
        assert (stopped, ended) == (["SIGINT"], statuses)


def test_afterwards_signals_are_as_they_were_and_an_ignored_one_stays_so():
    """Nohup, and a shell's background job, ignore some."""
    term, hup = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.Signals(print):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not term
        assert signal.getsignal(signal.SIGTERM) is term
    finally:
        signal.signal(signal.SIGHUP, hup)


def test_any_exception_saves_the_newest_snapshot(tmp_path):
    with pytest.raises(KeyError), snapshots(tmp_path, every_steps=5) as run:
        for step in range(1, 10):
            take(run, step, STATE)
        raise KeyError("my grader")
    assert saved_steps(tmp_path) == [5, 9]


RAISES = """
import sys
import jax
import numpy as np
from states import snapshots, take
from dapo_jax.cli import command
from dapo_jax.process import hosts
from sharding import rules
from sharding.mesh import make_mesh
folder, failing = sys.argv[1:]
del sys.argv[1:]
def main(_):
    hosts.start(several=True, cpu_devices=2)
    rows = rules.rows(make_mesh(data=-1, model=1))
    with snapshots(folder, every_steps=2) as run:
        for step in range(1, 6):
            take(run, step, {"a": hosts.place(np.arange(4, dtype=np.int32) + step, rows)})
            hosts.gather(step)  # what a step has all do together
        if str(jax.process_index()) in failing:
            raise KeyError("a grader's error")
        hosts.gather(0)  # as a step does, while another process fails
command.run(main)
"""


@pytest.mark.parametrize("failing", ["1", pytest.param("01", marks=pytest.mark.slow)])
def test_whichever_process_raises_all_save_the_newest_snapshot(tmp_path, failing):
    with started(["-c", RAISES, str(tmp_path), failing], processes=2) as group:
        outputs = [process.communicate(timeout=60)[0] for process in group]
    assert [process.returncode for process in group] == [1, 1], outputs
    assert "a grader's error" in outputs[int(failing[0])], outputs
    assert saved_steps(tmp_path) == [2, 4, 5]
    state = {"a": jax.ShapeDtypeStruct((4,), jnp.int32, sharding=jnp.ones(1).sharding)}
    saved, _ = Checkpoints(tmp_path, keep=None).restore(5, state)
    assert saved["a"].tolist() == [5, 6, 7, 8]
