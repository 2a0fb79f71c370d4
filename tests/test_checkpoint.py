"""Checkpoints: bitwise, on any mesh, and what happens to a run whose newest one is broken."""

import concurrent.futures
import errno
import gc
import hashlib
import pathlib
import shutil
import time

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from processes import started
from test_learner import LEARNING

from dapo_jax.checkpoints import digests, store
from dapo_jax.checkpoints.store import (
    Checkpoints,
    DamagedError,
    WrongStateError,
    restore_params,
    save_params,
)
from dapo_jax.cli.failures import explain
from dapo_jax.learner import TrainState, init_state
from dapo_jax.logs.files import json_digest
from dapo_jax.logs.metrics import LOGP, TOKENS, VERDICTS
from dapo_jax.logs.record import sample_digests
from dapo_jax.types import Group, Response, Verdict
from sharding.hosts import RETRYABLE
from sharding.mesh import make_mesh

# Orbax abandons its other reads when one fails, and Python tells of them as they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

EVERYWHERE = PartitionSpec()
LARGE = 128  # Orbax keeps arrays of this width in files of their own, small ones in its index


def state_at(step: int, *, spec=EVERYWHERE, mesh=None) -> TrainState:
    """Makes a training state in which every array, the moments too, depends on the step."""
    rng = np.random.default_rng(step)
    params = {
        "embed_VD": jnp.asarray(rng.normal(size=(LARGE, LARGE)), jnp.float32),
        "layers": {"norm_D": jnp.asarray(rng.normal(size=4), jnp.float32)},
    }
    state = jax.tree.map(
        lambda leaf: leaf + step if leaf.dtype == jnp.int32 else leaf + rng.normal(),
        init_state(params, LEARNING),
    )
    mesh = make_mesh(data=4, model=1) if mesh is None else mesh

    def place(leaf):
        return jax.device_put(leaf, NamedSharding(mesh, spec if leaf.ndim == 2 else EVERYWHERE))

    return jax.tree.map(place, state)


def abstract(state):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def assert_bitwise_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def checkpoints(folder, *, keep=3) -> Checkpoints:
    return Checkpoints(folder, keep=keep)


def saved_steps(folder) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def fail(message):
    raise AssertionError(f"nothing was to be reported: {message}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Makes a folder with the checkpoints 1, 2 and 3, to be copied before it is damaged."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    run = checkpoints(folder)
    for step in (1, 2, 3):
        assert run.save(step, state_at(step), {"cursor": step * 48})
    run.close()
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    yield shutil.copytree(saved, tmp_path / "checkpoints")
    gc.collect()


def test_an_empty_directory_gives_none(tmp_path):
    run = checkpoints(tmp_path / "checkpoints")
    assert run.latest_step() is None
    assert run.restore_latest(abstract(state_at(0)), report=fail) is None


def test_the_state_and_the_progress_come_back_bitwise(tmp_path):
    progress = {
        "cursor": 2**40 + 1,
        "row": {"lr": 1e-6 / 3, "loss": -0.1 - 0.2, "entropy": 5e-324, "bad": None},
    }
    run = checkpoints(tmp_path)
    run.save(7, state_at(7), progress)
    run.close()
    run = checkpoints(tmp_path)
    step, state, restored = run.restore_latest(abstract(state_at(0)), report=fail)
    assert step == 7
    assert_bitwise_equal(state, state_at(7))
    assert restored == progress  # Python compares floats by value: every digit
    assert run.latest_step() == 7


def test_a_checkpoint_restores_onto_another_mesh(tmp_path):
    run = checkpoints(tmp_path)
    run.save(1, state_at(1, spec=PartitionSpec("data")), {})
    run.close()
    mesh = make_mesh(data=2, model=2)
    target = abstract(state_at(0, spec=PartitionSpec("model", "data"), mesh=mesh))
    _, state, _ = checkpoints(tmp_path).restore_latest(target, report=fail)
    assert_bitwise_equal(state, state_at(1))
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(
        lambda leaf: leaf.sharding, target
    )


def test_a_step_is_saved_once_and_the_newest_are_kept(tmp_path):
    run = Checkpoints(tmp_path, keep=2, keep_period=4)
    taken = [run.save(step, {"a": jnp.ones(1)}, {}) for step in (1, 2, 2, 4, 5, 6)]
    assert taken == [True, True, False, True, True, True]
    run.close()
    assert saved_steps(tmp_path) == [4, 5, 6]


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_folder_that_was_moved_is_not_made_anew_in_silence(tmp_path, monkeypatch, meanwhile):
    """Orbax made it again, and the run went on to status 0 without its earlier checkpoints."""
    run = checkpoints(tmp_path / "checkpoints")
    run.save(1, {"a": jnp.ones(1)}, {})
    save = run._manager.save

    def move_and_save(*arguments, **options):
        (tmp_path / "checkpoints").rename(tmp_path / "moved")
        return save(*arguments, **options)

    if meanwhile:
        monkeypatch.setattr(run._manager, "save", move_and_save)
    else:
        (tmp_path / "checkpoints").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"'.*/checkpoints/1'"):
        run.save(2, {"a": jnp.ones(1)}, {})
    run.close()
    assert saved_steps(tmp_path / "moved") == [1]
    assert saved_steps(tmp_path / "checkpoints") == [2]  # nothing is lost


def test_restore_of_a_step_that_is_not_there_names_those_that_are(folder):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint 9, only \[1, 2, 3\]"):
        checkpoints(folder).restore(9, abstract(state_at(0)))
    state, progress = checkpoints(folder).restore(2, abstract(state_at(0)))
    assert_bitwise_equal(state, state_at(2))
    assert progress == {"cursor": 96}


def largest_file(folder: pathlib.Path) -> pathlib.Path:
    """Finds the file with the arrays' values."""
    return max(folder.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Reads all files under a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def truncate(file: pathlib.Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


DAMAGE = {
    "array values truncated": lambda folder: truncate(largest_file(folder)),
    "array index deleted": lambda folder: (folder / "state" / "manifest.ocdbt").unlink(),
    "description truncated": lambda folder: truncate(folder / "state" / "_METADATA"),
    "progress empty": lambda folder: (folder / "progress" / "metadata").write_bytes(b""),
    "manifest deleted": lambda folder: shutil.rmtree(folder / "manifest"),
    "everything deleted": lambda folder: [shutil.rmtree(path) for path in folder.glob("*/")],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_broken_newest_checkpoint_is_reported_and_the_one_before_is_taken(folder, damage):
    damage(folder / "3")
    reports = []
    step, state, progress = checkpoints(folder).restore_latest(
        abstract(state_at(0)), report=reports.append
    )
    assert (step, progress) == (2, {"cursor": 96})
    assert_bitwise_equal(state, state_at(2))
    assert len(reports) == 1
    assert "checkpoint 3 cannot be read" in reports[0]
    assert len(reports[0]) < 400


def test_after_a_fallback_the_run_saves_the_lost_steps_again(folder):
    """Orbax itself saves nothing at or below the newest step, which is the broken one.

    It was deleted by the next save; now it is kept, as it was, beside the others.
    """
    truncate(largest_file(folder / "3"))
    broken = contents(folder / "3")
    run = checkpoints(folder)
    run.restore_latest(abstract(state_at(0)), report=lambda message: None)
    assert saved_steps(folder) == [1, 2]
    assert contents(folder / "damaged.3.0") == broken
    assert run.save(3, state_at(33), {"cursor": 99})
    run.close()
    step, state, progress = checkpoints(folder).restore_latest(abstract(state_at(0)), report=fail)
    assert (step, progress) == (3, {"cursor": 99})
    assert_bitwise_equal(state, state_at(33))


def test_a_machine_that_lists_the_damaged_one_for_a_while_waits(folder, monkeypatch):
    """NFS lists a moved folder for a minute: that process saved the step no more, and the main one
    waited for its digests for ever."""
    truncate(largest_file(folder / "3"))
    run = checkpoints(folder)
    reload, calls = run._manager.reload, []

    def late():
        calls.append(None)
        if len(calls) not in (2, 3):  # the first is before the restore
            reload()

    monkeypatch.setattr(run._manager, "reload", late)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    run.restore_latest(abstract(state_at(0)), report=lambda message: None)
    assert len(calls) == 4
    assert run.save(3, state_at(33), {"cursor": 99})


def test_if_all_are_broken_the_run_stops_and_deletes_nothing(folder):
    for step in ("1", "2", "3"):
        truncate(largest_file(folder / step))
    run = checkpoints(folder)
    with pytest.raises(ValueError, match=r"none of the checkpoints \[3, 2, 1\] in .*workdir"):
        run.restore_latest(abstract(state_at(0)), report=lambda message: None)
    assert saved_steps(folder) == [1, 2, 3]


def test_an_unfinished_checkpoint_is_ignored(folder):
    shutil.copytree(folder / "3", folder / "4.orbax-checkpoint-tmp")
    truncate(largest_file(folder / "4.orbax-checkpoint-tmp"))
    run = checkpoints(folder)
    assert run.restore_latest(abstract(state_at(0)), report=fail)[0] == 3
    assert run.save(4, state_at(4), {"cursor": 192})
    run.close()
    assert checkpoints(folder).restore_latest(abstract(state_at(0)), report=fail)[0] == 4


def another_model(state: TrainState, params: dict) -> TrainState:
    """Makes the abstract state of a model with other parameters, the moments included."""
    new = jax.eval_shape(lambda: init_state(params, LEARNING))
    sharding = jax.tree.leaves(state)[0].sharding
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), new
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"embed_VD": jax.ShapeDtypeStruct((LARGE, LARGE), jnp.bfloat16)},
            r"params\.embed_VD is float32\[128, 128\] there and bfloat16\[128, 128\] here",
        ),
        (
            {"head_DV": jax.ShapeDtypeStruct((4, 4), jnp.float32)},
            r"params\.head_DV is absent there and float32\[4, 4\] here",
        ),
        (
            {"layers": {"scale_D": jax.ShapeDtypeStruct((4,), jnp.float32)}},
            r"params\.layers\.norm_D is float32\[4\] there and absent here",
        ),
    ],
    ids=["dtype", "added", "renamed"],
)
def test_another_models_checkpoint_is_refused_and_the_difference_named(folder, change, message):
    """Neither a cast nor a silent start from an older checkpoint, nor from the beginning."""
    state = state_at(0)
    with pytest.raises(WrongStateError, match=f"checkpoint 3 in .*{message}"):
        checkpoints(folder).restore_latest(
            another_model(state, jax.eval_shape(lambda: state.params) | change), report=fail
        )


def test_another_model_is_refused_also_behind_a_broken_checkpoint(folder):
    truncate(folder / "3" / "manifest" / "metadata")
    reports = []
    with pytest.raises(WrongStateError, match=r"checkpoint 2 in .* and 6 more"):
        checkpoints(folder).restore_latest(
            another_model(state_at(0), {"a": jnp.ones(3)}), report=reports.append
        )
    assert len(reports) == 1


def flip(file: pathlib.Path, place: int, bit: int = 0) -> None:
    """Flips one bit of a file."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


def test_another_digit_in_the_progress_is_seen(folder):
    """A digit is a digit: the run went on from another prompt in silence.

    Flipped bits of any file, the arrays' too, are in test_faults_flips.py.
    """
    progress = folder / "3" / "progress" / "metadata"
    progress.write_text(progress.read_text().replace("144", "145"))
    reports = []
    step, _, progress = checkpoints(folder).restore_latest(
        abstract(state_at(0)), report=reports.append
    )
    assert (step, progress) == (2, {"cursor": 96})
    assert "progress is not what was saved" in reports[0]


def test_a_damaged_checkpoint_that_is_only_read_stays_where_it_is(folder):
    """`evaluate` and `convert` restore one step, and change nothing."""
    values = largest_file(folder / "3")
    flip(values, values.stat().st_size // 2)
    before = contents(folder)
    with pytest.raises(DamagedError, match=r"checkpoint 3 cannot be read \(.*others: \[1, 2\]"):
        checkpoints(folder).restore(3, abstract(state_at(0)))
    assert contents(folder) == before


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
    monkeypatch.setattr(store, "RETRY_SECONDS", (0, 0, 0))


UNAVAILABLE = ValueError("UNAVAILABLE: Error reading gs://bucket/x: HTTP response code: 503")
STALE = OSError(errno.ESTALE, "Stale file handle")
UNREACHED = ValueError(
    'ABORTED: Error reading "params/0.0" in OCDBT database at gs://bucket/3/: All 32 retry '
    "attempts failed: CURL error Couldn't resolve host name"
)
UNMOUNTED = ValueError(
    'INTERNAL: Error reading local file "/r/3/d/1": Failed to open: Transport endpoint is not '
    "connected [os_error_code='107']"
)
PASSING = {
    "503": UNAVAILABLE,
    "ESTALE": STALE,
    "no network": UNREACHED,
    "ENOTCONN": UNMOUNTED,
    "gcsfs": aiohttp.ServerDisconnectedError(),
}


@pytest.mark.parametrize("error", PASSING.values(), ids=PASSING.keys())
def test_a_storage_that_fails_for_a_while_is_read_again(folder, monkeypatch, error):
    failing(monkeypatch, error, times=2)
    reports = []
    assert checkpoints(folder).restore_latest(abstract(state_at(0)), report=reports.append)[0] == 3
    assert len(reports) == 2
    assert all("cannot be read for now" in report for report in reports)


@pytest.mark.parametrize("error", [UNAVAILABLE, UNREACHED], ids=["503", "no network"])
def test_a_storage_that_goes_on_failing_costs_no_checkpoint(folder, monkeypatch, error):
    """A 503 was taken for damage: the run went on from the one before, and the next save deleted
    the newest checkpoint, which was good. Now it ends, as what comes back later, and changes
    nothing. So does a bucket without a network: after minutes of its own, tensorstore says
    ABORTED, which was damage still.
    """
    before = contents(folder)
    failing(monkeypatch, error, times=99)
    run = checkpoints(folder)
    with pytest.raises(OSError, match="3'") as raised:
        run.restore_latest(abstract(state_at(0)), report=lambda message: None)
    line, status = explain(raised.value)
    assert status == RETRYABLE
    assert line.startswith(f"{folder / '3'}: ")
    assert contents(folder) == before


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "denied"), MemoryError()])
def test_what_is_no_fault_of_the_files_sets_nothing_aside(folder, monkeypatch, error):
    failing(monkeypatch, error, times=99)
    with pytest.raises(type(error)):
        checkpoints(folder).restore_latest(abstract(state_at(0)), report=fail)
    assert saved_steps(folder) == [1, 2, 3]


def test_a_reading_that_was_wrong_once_damages_nothing(folder, monkeypatch):
    failing(monkeypatch, ValueError("DATA_LOSS: a checksum differs"), times=1)
    assert checkpoints(folder).restore_latest(abstract(state_at(0)), report=fail)[0] == 3


def test_a_flipped_bit_in_parameters_alone_is_seen(tmp_path):
    params = {"embed_VD": np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)}
    save_params(tmp_path / "params", params)

    def restored():
        return restore_params(
            tmp_path / "params", params, dtype="float32", check=lambda stored: None
        )

    np.testing.assert_array_equal(restored()["embed_VD"], params["embed_VD"])
    values = largest_file(tmp_path / "params")
    flip(values, values.stat().st_size // 2)
    with pytest.raises(DamagedError, match=r"params cannot be read"):
        restored()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_a_digest_is_the_same_on_any_mesh_and_changes_with_any_bit(dtype):
    rng = np.random.default_rng(0)
    array = jnp.asarray(rng.normal(size=(8, 12, 20)) > 0.3, dtype)
    whole = digests.of_block(np.asarray(array), (0, 0, 0))
    for data, model in ((4, 1), (2, 2), (1, 4)):
        mesh = make_mesh(data=data, model=model)
        placed = jax.device_put(array, NamedSharding(mesh, PartitionSpec("data", None, "model")))
        for spec in (PartitionSpec("model", "data"), PartitionSpec(None, None, "data")):
            placed = jax.device_put(placed, NamedSharding(mesh, spec))
            parts = digests.of_shards(placed, replicas=False)
            assert digests.text(sum(part for _, part in parts)) == digests.text(whole)
    content = np.asarray(array).tobytes()
    for place in rng.integers(len(content), size=50):
        changed = bytearray(content)
        changed[place] ^= 1 << int(rng.integers(8))
        other = np.frombuffer(bytes(changed), np.asarray(array).dtype).reshape(array.shape)
        assert digests.of_block(other, (0, 0, 0)) != whole


def test_a_digest_changes_where_signs_rows_or_columns_are_exchanged():
    """Sums of 32 bits would not see two signs: their highest bits cancel."""
    array = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    signs = array.copy()
    signs[[3, 40], [5, 6]] *= -1
    different = [array, signs, -array, array[::-1], array[:, ::-1], array.T, np.roll(array, 1, 1)]
    assert len({digests.of_block(other, (0, 0)) for other in different}) == len(different)


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


@pytest.mark.parametrize("sharding", [(), ("x",), (None, "x")])
def test_digests_on_devices_are_those_of_a_manifest(sharding):
    """Whatever the sharding: so a row names the checkpoint that its step ended with."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rng = np.random.default_rng(0)
    tree = {
        "cube": jnp.asarray(rng.normal(size=(4, 8, 3)), jnp.float32),
        "half": jnp.asarray(rng.normal(size=(8, 4)), jnp.bfloat16),
        "count": jnp.int32(-5),
    }
    tree = {
        name: jax.device_put(it, NamedSharding(mesh, PartitionSpec(*sharding[: it.ndim])))
        for name, it in tree.items()
    }
    expected = {
        name: [
            digests.shape_text(it),
            digests.text(sum(part for _, part in digests.of_shards(it, replicas=False))),
        ]
        for name, it in tree.items()
    }
    assert json_digest(digests.described(tree)) == json_digest(expected)
    tree["half"] = tree["half"].at[2, 1].multiply(-1)
    assert json_digest(digests.described(tree)) != json_digest(expected)


# Checkpoint 2 has a file that process 1 alone reads, which is then cut.
TOGETHER = """
import pathlib, sys, jax, numpy as np
from types import SimpleNamespace
from dapo_jax.checkpoints import fingerprint
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.types import Example, Prompt
from small_config import get_config
from sharding import hosts, rules
from sharding.mesh import make_mesh
hosts.start(several=True, cpu_devices=2)
rows = rules.rows(make_mesh(data=-1, model=1))
values = np.random.default_rng(0).normal(size=(2, 128, 128)).astype(np.float32)
def state(step):
    return {"a": hosts.place(values + step, rows)}
folder = pathlib.Path(sys.argv[1])
run = Checkpoints(folder, keep=None)
for step in (1, 2):
    run.save(step, state(step), {"cursor": step})
def cut():
    file = max((folder / "2/state/ocdbt.process_1/d").iterdir(), key=lambda f: f.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1000])
hosts.on_main(cut)
abstract = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state(0))
def read_alone():
    try:
        handler, args = run._state_handler, __import__("orbax.checkpoint").checkpoint.args
        handler.restore(folder.absolute() / "2/state", args=args.StandardRestore(abstract))
    except Exception:
        return False
    return True
print("alone:", hosts.gather(read_alone()), flush=True)
step, restored, progress = run.restore_latest(abstract, report=print)
right = all(np.array_equal(a.data, b.data) for a, b in zip(
    restored["a"].addressable_shards, state(step)["a"].addressable_shards))
print("restored:", step, progress, right, sorted(p.name for p in folder.iterdir()), flush=True)
print("saved:", run.save(2, state(2), {"cursor": 2}), flush=True)
def with_answer(answer):
    prompts = [Prompt(np.zeros(1, np.int32), Example(
        ({"role": "user", "content": "?"},), answer if row == 17 else "7", "file", row))
        for row in range(40)]
    sets = {"data.train": SimpleNamespace(prompts=prompts)}
    return SimpleNamespace(train=SimpleNamespace(sets=sets), eval_sets={})
config, process = get_config(), hosts.gather(0) and (0 if hosts.is_main_host() else 1)
def refused(config, data):
    try:
        fingerprint.of_run(config, data)
    except ValueError as error:
        return str(error)
    return "nothing"
print("same:", refused(config, with_answer("7")), flush=True)
print("data:", refused(config, with_answer("7" if process == 0 else "8")), flush=True)
config.rollout.top_p = 1.0 if process == 0 else 0.5
print("recipe:", refused(config, with_answer("7")), flush=True)
hosts.gather("done")
"""


def test_all_processes_restore_the_same_checkpoint_and_differences_are_refused(tmp_path):
    """Each decided alone: one restored checkpoint 2 and the other 1, and both trained on.

    Another training set on one of them went on too, with a ratio gap of 0.14 as its only sign.
    """
    with started(["-c", TOGETHER, str(tmp_path / "checkpoints")], processes=2) as group:
        outputs = [process.communicate(timeout=240)[0] for process in group]
    for output in outputs:
        assert "alone: [True, False]" in output, output
        assert "restored: 1 {'cursor': 1} True ['1', 'damaged.2.0']" in output
        assert "checkpoint 2 cannot be read (process 1: " in output
        assert "saved: True" in output
        assert "same: nothing" in output
        differs = "process 1 differs from process 0: "
        assert f"data: {differs}data.train: its prompts differ" in output
        assert f"recipe: {differs}rollout.top_p is 0.5, but 1.0 on process 0" in output
    assert [process.returncode for process in group] == [0, 0]
