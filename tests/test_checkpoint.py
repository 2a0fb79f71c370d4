"""Checkpoints: bitwise, on any mesh, and what happens to a run whose newest one is broken."""

import concurrent.futures
import errno
import gc
import hashlib
import pathlib
import shutil

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from processes import started
from runs import contents, saved_steps

from dapo_jax.checkpoints import digests
from dapo_jax.checkpoints.store import Checkpoints, DamagedError
from dapo_jax.logs.metrics import LOGP, TOKENS, VERDICTS
from dapo_jax.logs.record import sample_digests
from dapo_jax.process.failures import explain
from dapo_jax.process.hosts import RETRYABLE
from dapo_jax.types import Group, Response, Verdict
from sharding.mesh import make_mesh

# Orbax abandons its other reads when one fails, and Python tells of them as they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

EVERYWHERE = PartitionSpec()
LARGE = 128  # Orbax keeps arrays of this width in files of their own, small ones in its index


def state_at(step: int, *, spec=EVERYWHERE, mesh=None) -> dict:
    """Makes a state in which every array depends on the step."""
    rng = np.random.default_rng(step)
    mesh = make_mesh(data=4, model=1) if mesh is None else mesh
    arrays = {
        "params": {
            "embed_VD": rng.normal(size=(LARGE, LARGE)).astype(np.float32),
            "norm_D": rng.normal(size=4).astype(np.float32),
        },
        "moments": {"embed_VD": rng.normal(size=(LARGE, LARGE)).astype(jnp.bfloat16)},
        "count": np.int32(step),
    }

    def place(leaf):
        sharding = NamedSharding(mesh, spec if leaf.ndim == 2 else EVERYWHERE)
        return jax.device_put(leaf, sharding)

    return jax.tree.map(place, arrays)


def abstract(state):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def assert_bitwise_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def fail(message):
    raise AssertionError(f"nothing was to be reported: {message}")


def restored(folder, report=fail):
    """(step, state, progress) of the newest checkpoint, as a new process finds it."""
    return Checkpoints(folder, keep=3).restore_latest(abstract(state_at(0)), report=report)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Makes a folder with the checkpoints 1, 2 and 3, to be copied before it is damaged."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    run = Checkpoints(folder, keep=3)
    for step in (1, 2, 3):
        assert run.save(step, state_at(step), {"cursor": step * 48})
    run.close()
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    yield shutil.copytree(saved, tmp_path / "checkpoints")
    gc.collect()


def test_state_and_progress_come_back_bitwise_on_another_mesh(tmp_path):
    progress = {
        "cursor": 2**40 + 1,
        "row": {"lr": 1e-6 / 3, "loss": -0.1 - 0.2, "entropy": 5e-324, "bad": None},
    }
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


def test_a_step_is_saved_once_and_the_newest_are_kept(tmp_path):
    run = Checkpoints(tmp_path, keep=2, keep_period=4)
    taken = [run.save(step, {"a": jnp.ones(1)}, {}) for step in (1, 2, 2, 4, 5, 6)]
    assert taken == [True, True, False, True, True, True]
    run.close()
    assert saved_steps(tmp_path) == [4, 5, 6]


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path):
    """Scores come a step later, and some without a checkpoint; of equal ones the first counts."""
    run = Checkpoints(tmp_path, keep=1)
    known = {"0": 0.9, "1": 0.1, "2": 0.5, "3": 0.5, "5": 0.2}
    for step in range(1, 6):
        scores = {at: score for at, score in known.items() if int(at) < step}
        run.save(step, {"a": jnp.ones(1)}, {"scores": {"aime24": scores}})
    run.close()
    assert saved_steps(tmp_path) == [2, 5]


def test_a_folder_that_was_moved_is_not_made_anew_in_silence(tmp_path):
    """Orbax made it again, and the run went on to status 0 without its earlier checkpoints."""
    run = Checkpoints(tmp_path / "checkpoints", keep=3)
    run.save(1, {"a": jnp.ones(1)}, {})
    (tmp_path / "checkpoints").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"'.*/checkpoints/1'"):
        run.save(2, {"a": jnp.ones(1)}, {})
    assert saved_steps(tmp_path / "checkpoints") == [2]  # nothing is lost


def test_a_folder_that_is_gone_in_the_middle_of_a_save_is_named(tmp_path):
    """Orbax's error was of an array's metadata, or of a byte range."""
    run = Checkpoints(tmp_path / "checkpoints", keep=3)
    run.save(1, {"a": jnp.ones(1)}, {})
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").touch()
    with pytest.raises(FileNotFoundError, match=r"'.*/checkpoints/1'"):
        run.save(2, {"a": jnp.ones(1)}, {})


def largest_file(folder: pathlib.Path) -> pathlib.Path:
    """Finds the file with the arrays' values."""
    return max(folder.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)


def truncate(file: pathlib.Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def flip(folder: pathlib.Path) -> None:
    """Flips a bit of the arrays' values. Of any file: test_faults_flips.py."""
    file = largest_file(folder)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def another_cursor(folder: pathlib.Path) -> None:
    """A digit is a digit: the run went on from another prompt in silence."""
    progress = folder / "progress" / "metadata"
    progress.write_text(progress.read_text().replace("144", "145"))


DAMAGE = {
    "array values truncated": lambda folder: truncate(largest_file(folder)),
    "a bit flipped": flip,
    "array index deleted": lambda folder: (folder / "state" / "manifest.ocdbt").unlink(),
    "description truncated": lambda folder: truncate(folder / "state" / "_METADATA"),
    "progress edited": another_cursor,
    "progress empty": lambda folder: (folder / "progress" / "metadata").write_bytes(b""),
    "manifest deleted": lambda folder: shutil.rmtree(folder / "manifest"),
    "everything deleted": lambda folder: [shutil.rmtree(path) for path in folder.glob("*/")],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_broken_newest_checkpoint_is_reported_and_the_one_before_is_taken(folder, damage):
    """Reading one alone, as `evaluate` and `convert` do, changes nothing."""
    damage(folder / "3")
    before, reports = contents(folder), []
    with pytest.raises(
        DamagedError, match=r"checkpoint 3 in .*/checkpoints cannot be read \(.*: \[1, 2\]"
    ):
        Checkpoints(folder, keep=None).restore(3, abstract(state_at(0)))
    assert contents(folder) == before
    step, state, progress = restored(folder, reports.append)
    assert (step, progress) == (2, {"cursor": 96})
    assert_bitwise_equal(state, state_at(2))
    assert len(reports) == 1
    assert f"checkpoint 3 in {folder} cannot be read" in reports[0]
    assert len(reports[0]) < 500


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
    assert run.save(3, state_at(33), {"cursor": 99})
    run.close()
    step, state, progress = restored(folder)
    assert (step, progress) == (3, {"cursor": 99})
    assert_bitwise_equal(state, state_at(33))


def test_if_all_are_broken_the_run_stops_and_deletes_nothing(folder):
    for step in ("1", "2", "3"):
        truncate(largest_file(folder / step))
    with pytest.raises(ValueError, match=r"none of the checkpoints \[3, 2, 1\] in .*workdir"):
        restored(folder, report=lambda message: None)
    assert saved_steps(folder) == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": jnp.ones(2)}, r"count is int32\[\] there and float32\[2\] here"),
        ({"params": {}}, r"params.norm_D is float32\[4\] there and absent here"),
    ],
)
def test_another_models_checkpoint_is_refused_and_the_difference_named(folder, change, message):
    """Neither a cast nor a silent start from an older checkpoint, nor from the beginning."""
    other = abstract(state_at(0) | change)
    with pytest.raises(ValueError, match=f"checkpoint 3 in .*{message}"):
        Checkpoints(folder, keep=3).restore_latest(other, report=fail)


def failing(monkeypatch, error: Exception, times: int) -> None:
    """Lets so many readings of a checkpoint fail with what a storage answers."""
    left, restored = [error] * times, Checkpoints._restored

    def read(self, *arguments):
        if left:  # a library's error: our own are not searched for the system's words
            answer = concurrent.futures.Future()
            answer.set_exception(left.pop())
            answer.result()
        return restored(self, *arguments)

    monkeypatch.setattr(Checkpoints, "_restored", read)


PASSING = {
    "503": ValueError("UNAVAILABLE: Error reading gs://bucket/x: HTTP response code: 503"),
    "ESTALE": OSError(errno.ESTALE, "Stale file handle"),
    "ENOTCONN": ValueError(
        'INTERNAL: Error reading local file "/r/3/d/1": Failed to open: Transport endpoint is not '
        "connected [os_error_code='107']"
    ),
    "gcsfs": aiohttp.ServerDisconnectedError(),
}


@pytest.mark.parametrize("error", PASSING.values(), ids=PASSING.keys())
def test_a_storage_that_fails_for_a_while_costs_no_checkpoint(folder, monkeypatch, error):
    """A 503 was taken for damage: the run went on from the one before, and the next save deleted
    the newest checkpoint, which was good. The command ends, to be given again, and changes nothing.
    """
    before = contents(folder)
    failing(monkeypatch, error, times=99)
    with pytest.raises(OSError, match="3'") as raised:
        restored(folder)
    line, status = explain(raised.value)
    assert status == RETRYABLE
    assert line.startswith(f"{folder / '3'}: ")
    assert contents(folder) == before


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "denied"), MemoryError()])
def test_what_is_no_fault_of_the_files_sets_nothing_aside(folder, monkeypatch, error):
    failing(monkeypatch, error, times=99)
    with pytest.raises(type(error)):
        restored(folder)
    assert saved_steps(folder) == [1, 2, 3]


def test_a_reading_that_was_wrong_once_damages_nothing(folder, monkeypatch):
    failing(monkeypatch, ValueError("DATA_LOSS: a checksum differs"), times=1)
    assert restored(folder)[0] == 3


# As the first version wrote them: older checkpoints verify.
ARRAYS = {
    "count": (np.int32(-5), "00000000fffffffb"),
    "half": ((np.arange(24).reshape(2, 3, 4) / 7 - 1).astype(jnp.bfloat16), "0345392cfe7ab311"),
    "float": (np.arange(35, dtype=np.float32).reshape(5, 7) / 3 - 4, "01c97d7b3aa41192"),
    "long": (np.arange(70_000, dtype=np.int32) * 1664525, "12b374290e566d64"),
}


def digest_of(array) -> str:
    return digests.described({"a": jnp.asarray(array)})["a"][1]


def test_digests_are_what_they_were_and_the_same_on_any_mesh():
    found = digests.described({name: jnp.asarray(array) for name, (array, _) in ARRAYS.items()})
    assert {name: digest for name, (_, digest) in found.items()} == {
        name: digest for name, (_, digest) in ARRAYS.items()
    }
    assert found["half"][0] == "bfloat16[2, 3, 4]"
    array = np.random.default_rng(0).normal(size=(8, 12, 20)).astype(np.float32)
    for data, model in ((4, 1), (2, 2)):
        mesh = make_mesh(data=data, model=model)
        for spec in (PartitionSpec("model", "data"), PartitionSpec(None, None, "data")):
            placed = jax.device_put(array, NamedSharding(mesh, spec))
            assert digest_of(placed) == digest_of(array)


def test_a_digest_changes_where_signs_or_rows_are_exchanged():
    """Sums of 32 bits would not see two signs: their highest bits cancel."""
    array = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    signs = array.copy()
    signs[[3, 40], [5, 6]] *= -1
    assert len({*map(digest_of, [array, signs, array[::-1], array.T])}) == 4


def group_of(logp=(-1.5, -0.25), correct=True, tokens=(3, 7)) -> Group:
    response = Response(
        np.array(tokens, np.int32),
        np.array(logp, np.float32),
        True,
        "text",
        Verdict(correct, "4", "right"),
    )
    return Group(9, None, (response,))


def test_samples_are_digested_by_what_they_are():
    reward_PG = np.array([[1.0]])
    first = sample_digests([group_of()], reward_PG)
    tokens = b"[9, 2, true, []]\n" + b"\x03\0\0\0\x07\0\0\0"
    assert first[TOKENS] == hashlib.sha256(tokens).hexdigest()
    assert first[LOGP] == hashlib.sha256(b"\0\0\xc0\xbf\0\0\x80\xbe").hexdigest()
    line = b'[true, "4", "right", null, null]\n' + b"\0\0\0\0\0\0\xf0?"
    assert first[VERDICTS] == hashlib.sha256(line).hexdigest()
    other_logp = group_of(logp=(-1.5, np.nextafter(np.float32(-0.25), np.float32(0))))
    for group, key in (
        (other_logp, LOGP),
        (group_of(correct=False), VERDICTS),
        (group_of(tokens=(3, 8)), TOKENS),
    ):
        found = sample_digests([group], reward_PG)
        assert [k for k in found if found[k] != first[k]] == [key]
    assert sample_digests([group_of()], reward_PG * 2)[VERDICTS] != first[VERDICTS]


TOGETHER = """
import numpy as np
from types import SimpleNamespace
from dapo_jax.checkpoints import fingerprint
from dapo_jax.types import Example, Prompt
from small_config import get_config
from dapo_jax.process import hosts
hosts.start(several=True, cpu_devices=2)
def tried(answer):
    example = Example(({"role": "user", "content": "?"},), answer, "file", 0)
    sets = {"data.train": SimpleNamespace(prompts=[Prompt(np.zeros(1, np.int32), example)])}
    try:
        data = SimpleNamespace(train=SimpleNamespace(sets=sets), eval_sets={})
        return fingerprint.of_run(config, data) and "done"
    except Exception as error:
        return str(error)
config, main = get_config(), hosts.is_main_host()
print("same:", tried("7"), flush=True)
print("data:", tried("7" if main else "8"), flush=True)
config.rollout.top_p = 1.0 if main else 0.5
print("config:", tried("7"), flush=True)
hosts.gather("done")
"""


def test_processes_with_different_data_or_settings_are_refused():
    """Another training set on one of them went on, with a ratio gap of 0.14 as its only sign.

    That all restore the same checkpoint where one finds damage is in test_processes.py.
    """
    with started(["-c", TOGETHER], processes=2) as group:
        outputs = [process.communicate(timeout=240)[0] for process in group]
    for output in outputs:
        assert "same: done" in output, output
        differs = "process 1 differs from process 0: "
        assert f"data: {differs}data.train: its prompts differ" in output
        assert f"config: {differs}rollout.top_p is 0.5, but 1.0 on process 0" in output
    assert [process.returncode for process in group] == [0, 0]
