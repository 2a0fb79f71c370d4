"""Checkpoints: bitwise, on any mesh, and what happens to a run whose newest one is broken."""

import concurrent.futures
import errno
import gc
import hashlib
import json
import pathlib
import shutil

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import states
from jax.sharding import NamedSharding, PartitionSpec
from runs import contents, saved_steps
from states import abstract, assert_bitwise_equal, assert_restored, fail, restored, saved, state_at

from configs import base
from dapo_jax.checkpoints import digests, store
from dapo_jax.checkpoints.begun import Parent, best_step
from dapo_jax.checkpoints.store import Checkpoints, DamagedError
from dapo_jax.logs.metrics import LOGP, TOKENS, VERDICTS
from dapo_jax.logs.record import sample_digests
from dapo_jax.process.failures import explain
from dapo_jax.process.hosts import RETRYABLE
from dapo_jax.types import Group, Response, Status, Verdict
from sharding.mesh import make_mesh

# Orbax abandons its other reads when one fails, and Python tells of them as they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
TINY = {"a": jnp.ones(1)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Makes a folder with the checkpoints 1, 2 and 3, to be copied before it is damaged."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    saved(folder, 1, 2, 3).close()
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    yield shutil.copytree(whole, tmp_path / "checkpoints")
    gc.collect()


def test_state_and_progress_come_back_bitwise_on_another_mesh(tmp_path):
    row = {"lr": 1e-6 / 3, "loss": -0.1 - 0.2, "entropy": 5e-324, "bad": None}
    progress = {"cursor": 2**40 + 1, "row": row}
    run = Checkpoints(tmp_path, keep=3)
    assert run.restore_latest(abstract(state_at(0)), report=fail) is None
    run.save(7, state_at(7, spec=PartitionSpec("data")), progress)
    run.close()
    mesh = make_mesh(data=2, model=2)
    target = abstract(state_at(0, spec=PartitionSpec("model", "data"), mesh=mesh))
    step, state, found = Checkpoints(tmp_path, keep=3).restore_latest(target, report=fail)
    assert (step, found) == (7, progress)  # Python compares floats by value: every digit
    assert_bitwise_equal(state, state_at(7))
    shardings = [jax.tree.map(lambda leaf: leaf.sharding, it) for it in (state, target)]
    assert shardings[0] == shardings[1]


def test_a_step_is_saved_once_and_the_newest_the_best_and_every_fourth_are_kept(tmp_path):
    """Scores come a step later, and some without a checkpoint; of equal ones the first counts."""
    run, known = Checkpoints(tmp_path, keep=2, keep_period=4), {0: 0.9, 1: 0.1, 2: 0.5, 3: 0.5}
    for step in range(1, 8):
        scores = {str(at): score for at, score in known.items() if at < step}
        taken = [run.save(step, TINY, {"scores": {"aime24": scores}}) for _ in range(2)]
        assert taken == [True, False]
    run.close()
    assert saved_steps(tmp_path) == [2, 4, 6, 7]
    run = Checkpoints(tmp_path, keep=2, keep_period=4)
    run.save(8, TINY, {"scores": {"aime24": {"2": 0.5, "8": 0.6}}})  # the last one has its own
    run.close()
    assert saved_steps(tmp_path) == [4, 7, 8]


def test_the_best_step_is_named_by_the_evaluations_of_one_kind(tmp_path):
    """Nobody could ask for the checkpoint that checkpoint.best had kept."""

    def write(step, k, score):
        sets, settings = {"aime24": {f"mean@{k}": score, "problems": 30}}, {"aime24": {"k": k}}
        content = {"step": step, "sets": sets, "settings": settings}
        (tmp_path / "eval" / f"{step}.json").write_text(json.dumps(content))

    (tmp_path / "eval").mkdir()
    for result in ((0, 4, 0.9), (2, 8, 0.8), (4, 4, 0.5), (6, 4, 0.5), (8, 4, 0.4), (9, 4, 0.6)):
        write(*result)
    (tmp_path / "eval" / "8.aime24.t1_p1_k4.json").write_text("{}")  # of `evaluate`
    (saved := tmp_path / "checkpoints").mkdir()
    config = base.get_config()
    config.checkpoint.best = "aime24"
    with pytest.raises(ValueError, match=r"none of the checkpoints \[\] .*best = 'aime24'; give"):
        best_step(config, tmp_path)
    for step in (2, 4, 6, 8):
        (saved / f"{step}").mkdir()
    assert best_step(config, tmp_path) == 4  # 0 and 9 have no checkpoint
    for name in ("aime24", ""):
        content = {"checkpoint": {"directory": "", "best": name}}
        (tmp_path / "config.json").write_text(json.dumps(content))
        if name:
            assert Parent.parse(f"run:{tmp_path}@best") == Parent(tmp_path, 4)
            (fork := tmp_path / "fork").mkdir()  # it began when another step was the best
            (fork / "starts.jsonl").write_text(json.dumps({"origin": f"run:{tmp_path}@2"}))
            assert Parent.parse(f"run:{tmp_path}@best", fork) == Parent(tmp_path, 2)
    with pytest.raises(ValueError, match=r"best = ''; give the number"):
        Parent.parse(f"run:{tmp_path}@best")


@pytest.mark.parametrize("gone", ["moved", "a file"])
def test_a_folder_that_is_gone_is_named_and_not_made_anew_in_silence(tmp_path, gone):
    run, folder = Checkpoints(tmp_path / "checkpoints", keep=3), tmp_path / "checkpoints"
    run.save(1, TINY, {})
    folder.rename(tmp_path / "moved")
    if gone == "a file":
        folder.touch()
    with pytest.raises(FileNotFoundError, match=r"'.*/checkpoints/1'"):
        run.save(2, TINY, {})
    assert gone == "a file" or saved_steps(folder) == [2]  # nothing is lost


def largest_file(folder: pathlib.Path) -> pathlib.Path:
    return max(folder.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)


def truncate(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def another_cursor(folder: pathlib.Path) -> None:
    """A digit is a digit: the run went on from another prompt in silence."""
    progress = folder / "progress" / "metadata"
    progress.write_text(progress.read_text().replace("144", "145"))


# A bit of any file: test_faults_flips.py.
DAMAGE = {
    "array values truncated": lambda folder: truncate(largest_file(folder)),
    "progress edited": another_cursor,
    "manifest deleted": lambda folder: shutil.rmtree(folder / "manifest"),
    "everything deleted": lambda folder: [shutil.rmtree(path) for path in folder.glob("*/")],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_broken_newest_checkpoint_is_reported_and_the_one_before_is_taken(folder, damage):
    """Reading one alone, as `evaluate` and `convert` do, changes nothing."""
    damage(folder / "3")
    before, reports = contents(folder), []
    message = r"checkpoint 3 in .*/checkpoints cannot be read \(.*: \[1, 2\]"
    with pytest.raises(DamagedError, match=message):
        Checkpoints(folder, keep=None).restore(3, abstract(state_at(0)))
    assert contents(folder) == before
    assert_restored(restored(folder, reports.append), 2)
    (report,) = reports
    assert f"checkpoint 3 in {folder} cannot be read" in report and len(report) < 500


def test_what_one_process_cannot_read_for_now_is_no_damage_that_another_has_found(
    folder, monkeypatch
):
    """The worst that any process met counts: a checkpoint that is set aside here is lost to all."""
    truncate(largest_file(folder / "3"))
    before, gather = contents(folder), store.hosts.gather

    def with_another(value):
        is_outcome = isinstance(value, tuple) and value[0] == store.DAMAGED
        other = (store.TRANSIENT, "the bucket is away", None, {})
        return [value, other] if is_outcome else gather(value)

    monkeypatch.setattr(store.hosts, "gather", with_another)
    with pytest.raises(OSError, match="process 1: the bucket is away"):
        restored(folder, fail)
    assert contents(folder) == before


def test_after_a_fallback_the_run_saves_the_lost_steps_again(folder, monkeypatch):
    """Orbax itself saves nothing at or below the newest step, which is the broken one.

    It stays, as it was, beside the others. NFS may list it where it was for a minute.
    """
    truncate(largest_file(folder / "3"))
    broken = contents(folder / "3")
    run = Checkpoints(folder, keep=3)
    lists = iter([run._manager.reload, lambda: None, run._manager.reload])
    monkeypatch.setattr(run._manager, "reload", lambda: next(lists)())
    run.restore_latest(abstract(state_at(0)), report=lambda message: None)
    assert saved_steps(folder) == [1, 2]
    assert contents(folder / "damaged.3.0") == broken
    assert run.save(3, state_at(3), states.progress_at(3))
    run.close()
    assert_restored(restored(folder), 3)


def test_if_all_are_broken_the_run_stops_and_deletes_nothing(folder):
    for step in ("1", "2", "3"):
        truncate(largest_file(folder / step))
    with pytest.raises(ValueError, match=r"none of the checkpoints \[3, 2, 1\] in .*workdir"):
        restored(folder, report=lambda message: None)
    assert saved_steps(folder) == [1, 2, 3]


def test_another_models_checkpoint_is_refused_and_the_difference_named(folder):
    """Neither a cast nor a silent start from an older checkpoint, nor from the beginning."""
    for change, message in (
        ({"count": jnp.ones(2)}, r"count is int32\[\] there and float32\[2\] here"),
        ({"params": {}}, r"params.norm_D is float32\[4\] there and absent here"),
    ):
        with pytest.raises(ValueError, match=f"checkpoint 3 in .*{message}"):
            Checkpoints(folder, keep=3).restore_latest(abstract(state_at(0) | change), report=fail)


LOST = 'INTERNAL: Error reading local file "/r/3/d/1": Failed to open: Transport endpoint is not '
LOST += "connected [os_error_code='107']"
# What a storage answers, how often, and what a start then raises; more answers: test_files.py.
ANSWERS = [
    (ValueError(LOST), 99, OSError),
    (aiohttp.ServerDisconnectedError(), 99, OSError),  # gcsfs's
    (PermissionError(errno.EACCES, "denied"), 99, PermissionError),
    (MemoryError(), 99, MemoryError),
    (ValueError("DATA_LOSS: a checksum differs"), 1, None),
]


@pytest.mark.parametrize(("error", "times", "raised"), ANSWERS)
def test_a_storage_that_fails_for_a_while_costs_no_checkpoint(
    folder, monkeypatch, error, times, raised
):
    """It is no damage: the command ends, to be given again, and changes nothing."""
    before, left, read = contents(folder), [error] * times, Checkpoints._restored

    def failing(self, *arguments):
        if left:  # a library's error: our own are not searched for the system's words
            answer = concurrent.futures.Future()
            answer.set_exception(left.pop())
            answer.result()
        return read(self, *arguments)

    monkeypatch.setattr(Checkpoints, "_restored", failing)
    if raised is None:
        assert restored(folder)[0] == 3
        return
    with pytest.raises(raised) as ended:
        restored(folder)
    if raised is OSError:
        line, status = explain(ended.value)
        assert status == RETRYABLE and line.startswith(f"{folder / '3'}: ")
    assert contents(folder) == before


# As the first version wrote them: older checkpoints verify.
ARRAYS = [
    (np.int32(-5), "00000000fffffffb"),
    ((np.arange(24).reshape(2, 3, 4) / 7 - 1).astype(jnp.bfloat16), "0345392cfe7ab311"),
    (np.arange(70_000, dtype=np.int32) * 1664525, "12b374290e566d64"),
]


def digest_of(array) -> str:
    return digests.of_arrays({"a": jnp.asarray(array)})["a"][1]


def test_digests_are_what_they_were_the_same_on_any_mesh_and_see_what_is_exchanged():
    for array, digest in ARRAYS:
        assert digest_of(array) == digest
    array = np.random.default_rng(0).normal(size=(8, 12, 20)).astype(np.float32)
    for data, model in ((4, 1), (2, 2)):
        mesh = make_mesh(data=data, model=model)
        for spec in (PartitionSpec("model", "data"), PartitionSpec(None, None, "data")):
            placed = jax.device_put(array, NamedSharding(mesh, spec))
            assert digest_of(placed) == digest_of(array)
    # Sums of 32 bits would not see two signs: their highest bits cancel.
    signs = array.copy()
    signs[3, [4, 5], 6] *= -1
    assert len({*map(digest_of, [array, signs, array[::-1], array[:, ::-1]])}) == 4


def test_samples_are_digested_by_what_they_are():
    arrays = np.array([3, 7], np.int32), np.array([-1.5, -0.25], np.float32)
    response = Response(*arrays, Status.STOPPED, "text", Verdict(True, "4", "right"))
    found = sample_digests([Group(9, None, (response,))], np.array([[1.0]]))
    tokens = b"[9, 2, true, []]\n" + b"\x03\0\0\0\x07\0\0\0"
    line = b'[true, "4", "right", null, null]\n' + b"\0\0\0\0\0\0\xf0?"
    written = {TOKENS: tokens, LOGP: b"\0\0\xc0\xbf\0\0\x80\xbe", VERDICTS: line}
    assert found == {key: hashlib.sha256(content).hexdigest() for key, content in written.items()}
