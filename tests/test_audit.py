"""The audit: the chain's equations, what it finds of a directory's files, and steps done again."""

import hashlib
import json
import pathlib
import shutil
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax import train
from dapo_jax.audit import again
from dapo_jax.audit.__main__ import audit, verdict
from dapo_jax.audit.findings import REFUSED, SAME, UNCHECKED, WRONG, Finding
from dapo_jax.run import chain, digests, provenance
from dapo_jax.run.checkpoint import Checkpoints
from dapo_jax.run.files import Rows, append_line, read_json, read_rows, write_rollouts, write_seal
from dapo_jax.run.start import Origin
from dapo_jax.types import Group, Response, Verdict
from experiments.faults.config import get_config

CONFIG = {"num_steps": 3, "seed": 0, "checkpoint": {"directory": "", "keep": 2}}


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# The chain


def test_the_chain_is_what_the_docstring_says():
    row = {"step": 1, "loss": float("nan"), "seconds/total": 2.5, "digest/b": "y"}
    linked = chain.link("before", row)
    assert linked == sha('before\n{"digest/b": "y", "loss": null, "step": 1}')
    assert chain.link("before", row | {"chain": linked}) == linked
    for key in ("seconds/total", "seconds_in_rollout/a", "tokens_per_second/step"):
        assert chain.link("before", row | {key: 1.0}) == linked
    assert chain.link("before", row | {"loss": 0.5}) != linked
    assert chain.link("other", row) != linked


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
    first = chain.of_samples([group_of()], reward_PG)
    tokens = b"[9, 2, true, []]\n" + b"\x03\0\0\0\x07\0\0\0"
    assert first[chain.TOKENS] == hashlib.sha256(tokens).hexdigest()
    assert first[chain.LOGP] == hashlib.sha256(b"\0\0\xc0\xbf\0\0\x80\xbe").hexdigest()
    line = b'[true, "4", "right", null, null]\n' + b"\0\0\0\0\0\0\xf0?"
    assert first[chain.VERDICTS] == hashlib.sha256(line).hexdigest()
    other_logp = group_of(logp=(-1.5, np.nextafter(np.float32(-0.25), np.float32(0))))
    for group, key in (
        (other_logp, chain.LOGP),
        (group_of(correct=False), chain.VERDICTS),
        (group_of(tokens=(3, 8)), chain.TOKENS),
    ):
        found = chain.of_samples([group], reward_PG)
        assert [k for k in found if found[k] != first[k]] == [key]
    assert chain.of_samples([group_of()], reward_PG * 2)[chain.VERDICTS] != first[chain.VERDICTS]


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
    assert digests.of_json(digests.described(tree)) == digests.of_json(expected)
    tree["half"] = tree["half"].at[2, 1].multiply(-1)
    assert digests.of_json(digests.described(tree)) != digests.of_json(expected)


# A directory made by hand, without devices


def write_start(workdir: pathlib.Path, config: dict, first_step: int, **others) -> None:
    path = workdir / "starts.jsonl"
    path.touch()
    start = {"config_sha256": provenance.recipe_digest(config), "first_step": first_step}
    append_line(path, start | {"origin": None} | others)


def write_checkpoint(workdir: pathlib.Path, step: int, row: dict, arrays: dict) -> None:
    progress = {"cursor": 0, "row": row}
    manifest = {"arrays": arrays, "progress": digests.of_json(progress), "identity": None}
    folder = workdir / "checkpoints" / str(step)
    for name, content in (
        ("progress", progress),
        ("manifest", manifest | {"digest": digests.of_json(manifest)}),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / "metadata").write_text(json.dumps(content))


def make_run(workdir: pathlib.Path, *, before: str = "", origin=None, first: int = 0) -> None:
    """Writes what a run of three steps leaves; the last two are of another start."""
    config = CONFIG | {"num_steps": first + 3}
    (workdir / "eval").mkdir(parents=True)
    (workdir / "config.json").write_bytes(chain.as_written(config))
    linked = before
    for steps in (range(first, first + 1), range(first + 1, first + 3)):
        write_start(workdir, config, steps[0], origin=origin, commit=f"{steps[0]}")
        resumed = steps[0] - 1 if steps[0] else None
        writer = Rows(workdir, resume_step=resumed, begin_step=first)
        for step in steps:
            arrays = {"w": [["float32[1]", f"{step:016x}"]]}
            row = {"step": step, "loss": 0.5 / (step + 1), "seconds/total": 1.0 + step}
            row["digest/state"] = digests.of_json(arrays)
            names = [f"rollouts/{step}.jsonl.gz", f"eval/{step}.a.jsonl.gz"]
            for name in names:
                content = [{"response": f"{step} {name}", "correct": True}]
                row["digest/" + name] = write_rollouts(workdir / name, content)
            row["chain"] = linked = chain.link(linked, row)
            writer.write(row)
            write_checkpoint(workdir, step + 1, row, arrays)
    shutil.rmtree(workdir / "checkpoints" / str(first + 1))  # checkpoint.keep = 2
    (workdir / "eval" / f"{first + 3}.json").write_text("{}")  # after the last row
    (workdir / "curves.png").write_bytes(b"a picture")
    (workdir / "tensorboard").mkdir()
    (workdir / "tensorboard" / "events").write_bytes(b"a writer's")
    write_seal(workdir)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("audit") / "made"
    make_run(workdir)
    return workdir


@pytest.fixture
def copy(made, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(made, tmp_path / "run"))


def found(workdir: pathlib.Path, digest=None) -> list[Finding]:
    return [*audit(workdir, steps=0, seed=0, digest=digest)]


def wrong(findings: list[Finding]) -> list[str]:
    return [finding.what for finding in findings if finding.kind == WRONG]


def state_of(folder: pathlib.Path) -> dict:
    return {
        str(path): (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in folder.rglob("*")
    }


def test_an_untouched_run_is_found_so_and_left_so(made):
    before = state_of(made)
    findings = found(made, digest=chain.of_file(made / "seal.json"))
    assert wrong(findings) == []
    assert verdict(findings) == ("OK: as the run wrote it; 2 lines say what is not checked", 0)
    assert state_of(made) == before
    row = read_rows(made / "metrics.jsonl")[1]
    assert wrong(found(made, digest=row["chain"])) == []
    assert "neither" in wrong(found(made, digest="0" * 64))[0]


def rows_with(workdir: pathlib.Path, edit) -> None:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    edit(rows)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def replaced(name: str, old: bytes, new: bytes):
    def change(workdir):
        content = (workdir / name).read_bytes()
        assert old in content
        (workdir / name).write_bytes(content.replace(old, new, 1))

    return change


def swap(workdir):
    a, b = (workdir / "rollouts" / f"{step}.jsonl.gz" for step in (0, 2))
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)


def swap_checkpoints(workdir):
    a, b = (workdir / "checkpoints" / str(step) for step in (2, 3))
    for old, new in ((a, workdir / "aside"), (b, a), (workdir / "aside", b)):
        old.rename(new)


def seal_with(**others):
    """Another seal.json, written as the run writes it."""

    def change(workdir):
        content = json.loads((workdir / "seal.json").read_bytes())
        (workdir / "seal.json").write_bytes(chain.as_written(content | others))

    return change


def forged(workdir):
    """The chain and the seal computed anew."""
    rows = read_rows(workdir / "metrics.jsonl")
    rows[1]["loss"], before = 0.125, ""
    for row in rows:
        row["chain"] = before = chain.link(before, row)
    rows_with(workdir, lambda old: old.__setitem__(slice(None), rows))
    write_seal(workdir)


SEAL, AT_END = "seal.json: not what the run wrote", "not what was there at the run's end"
TAMPERINGS = {
    "a number": (lambda w: rows_with(w, lambda r: r[0].update(loss=9.0)), "chain does not hold"),
    "a time": (
        lambda w: rows_with(w, lambda r: r[2].update({"seconds/total": 1.0})),
        f"metrics.jsonl: {AT_END}",
    ),
    "a space": (replaced("metrics.jsonl", b": ", b":"), "not written as the run writes it"),
    "a row less": (lambda w: rows_with(w, lambda r: r.pop(1)), "rows are of the steps 0, 2"),
    "the last row": (lambda w: rows_with(w, lambda r: r.pop()), SEAL),
    "no chain in one": (lambda w: rows_with(w, lambda r: r[2].pop("chain")), "a row has no chain"),
    "a start": (
        replaced("starts.jsonl", b'"commit": "1"', b'"commit": "2"'),
        f"starts.jsonl: {AT_END}",
    ),
    "the recipe": (
        replaced("config.json", b'"seed": 0', b'"seed": 1'),
        "config.json: not the recipe",
    ),
    "the recipe's form": (replaced("config.json", b"\n ", b"\n  "), "config.json: not the recipe"),
    "two rollouts swapped": (swap, "rollouts/0.jsonl.gz: not what the run wrote"),
    "no rollouts": (lambda w: (w / "rollouts" / "1.jsonl.gz").unlink(), "1.jsonl.gz: gone"),
    "the last evaluation": (lambda w: (w / "eval" / "3.json").write_text("{ }"), AT_END),
    "rollouts more": (
        lambda w: (w / "rollouts" / "7.jsonl.gz").write_bytes(b"x"),
        "rollouts/7.jsonl.gz: added",
    ),
    "a picture": (lambda w: (w / "curves.png").write_bytes(b"b"), f"curves.png: {AT_END}"),
    "the seal's count": (seal_with(rows=2), SEAL),
    "a seal of another form": (seal_with(files=[1]), "seal.json: not what a run writes (Attr"),
    "no seal": (lambda w: (w / "seal.json").unlink(), "seal.json: not there, though all steps"),
    "two checkpoints swapped": (
        swap_checkpoints,
        "checkpoint 2: its arrays' digests, its row: not what the rows say",
    ),
    "a checkpoint's arrays": (
        replaced("checkpoints/3/manifest/metadata", b"00002", b"00003"),
        "checkpoint 3: its manifest, its arrays' digests: not what the rows say",
    ),
    "a checkpoint's progress": (
        replaced("checkpoints/3/progress/metadata", b'"cursor": 0', b'"cursor": 8'),
        "checkpoint 3: its progress",
    ),
    "the order of keys": (
        lambda w: rows_with(w, lambda r: r.append(dict(reversed(r.pop().items())))),
        f"metrics.jsonl: {AT_END}",
    ),
    "a link to nothing": (
        lambda w: (w / "rollouts" / "7.jsonl.gz").symlink_to("nothing"),
        "rollouts/7.jsonl.gz: no file, the run did not write it",
    ),
    "a digest that is a list": (
        lambda w: rows_with(w, lambda r: r[1].update({"digest/config.json": [1]})),
        "config.json: not what the run wrote",
    ),
    "a recipe of another form": (
        replaced("config.json", b'"checkpoint": {', b'"checkpoint": 1, "old": {'),
        "checkpoints: not what a run writes (AttributeError",
    ),
    "a row without a bottom": (
        lambda w: (w / "metrics.jsonl").write_text("[" * 100_000 + "\n"),
        "nested too deeply",
    ),
    "no manifest": (
        lambda w: (w / "checkpoints" / "3" / "manifest" / "metadata").write_text("null"),
        "checkpoint 3: its files (",
    ),
    "a checkpoint gone": (lambda w: shutil.rmtree(w / "checkpoints"), "metadata: gone"),
}


@pytest.mark.parametrize("what", TAMPERINGS)
def test_tampering_is_found_and_named(copy, what):
    change, message = TAMPERINGS[what]
    change(copy)
    findings = found(copy)
    assert any(message in line for line in wrong(findings)), findings
    assert verdict(findings)[1] == 1


def test_a_forged_chain_is_not_that_of_the_digest(copy):
    """Who computes all digests anew leaves no other trace in the files but the checkpoints'."""
    published = chain.of_file(copy / "seal.json")
    shutil.rmtree(copy / "checkpoints")
    forged(copy)
    assert wrong(found(copy)) == []
    assert f"--digest={published} is neither" in "".join(wrong(found(copy, digest=published)))


def test_a_run_without_its_end_is_not_that_of_the_digest(copy):
    """Without seal and last rows it looks like one that was killed before them."""
    published = chain.of_file(copy / "seal.json")
    (copy / "seal.json").unlink()
    shutil.rmtree(copy / "checkpoints" / "3")
    rows_with(copy, lambda rows: rows.pop())
    assert wrong(found(copy)) == []
    assert "is neither" in "".join(wrong(found(copy, digest=published)))


def test_what_others_write_into_the_directory_is_named(copy):
    """`evaluate` and `report` come later; nobody has digests of what they wrote."""
    for name in ("eval/3.a.t1_p1_k4_dapo_s0.0123ab.json", "report.html"):
        (copy / name).write_text("{}")
    findings = found(copy)
    assert wrong(findings) == []
    (line,) = (f.what for f in findings if f.kind == UNCHECKED and "no digest of" in f.what)
    names = "eval/3.a.t1_p1_k4_dapo_s0.0123ab.json, report.html, tensorboard/events"
    assert line == f"no digest of: {names}"


def test_what_report_draws_anew_is_no_alarm(copy):
    """It writes a curves.png too, with the folder's name of today."""
    (copy / "report.html").write_text("of a run that was going on")
    write_seal(copy)
    for name in ("curves.png", "report.html"):
        (copy / name).write_text("of today")
    findings = found(copy)
    assert wrong(findings) == []
    assert any("curves.png: another one" in f.what for f in findings if f.kind == UNCHECKED)


@pytest.mark.parametrize("name", ["rollouts", "checkpoints"])
def test_a_folder_may_lie_on_another_disk(copy, name):
    (copy / name).rename(copy.parent / "elsewhere")
    (copy / name).symlink_to(copy.parent / "elsewhere")
    assert wrong(found(copy)) == []
    assert chain.files_in(copy).keys() >= {"curves.png", "rollouts/1.jsonl.gz"}
    (copy / "more").symlink_to(copy)  # is named, not followed
    (line,) = (f.what for f in found(copy) if f.kind == UNCHECKED and "no digest of" in f.what)
    assert line == "no digest of: more, tensorboard/events"


def going_on(workdir: pathlib.Path, *, steps: int = 9) -> None:
    """Makes the run one that is told to do more steps, and has started again."""
    (workdir / "seal.json").unlink()
    config = CONFIG | {"num_steps": steps}
    (workdir / "config.json").write_bytes(chain.as_written(config))
    write_start(workdir, config, 3, commit="1")


@pytest.mark.parametrize("left", [1, 40])
def test_what_a_kill_cut_short_is_no_alarm(copy, left):
    """A row's last line, and a line of starts.jsonl with a whole one after it."""
    with (copy / "starts.jsonl").open("ab") as file:
        file.write(b'{"time": "2026-01-01T00:00:00+00:00", "ho'[:left])
    going_on(copy)
    with (copy / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "loss": 0.25, "seconds/total": 1'[:left])
    findings = found(copy)
    assert wrong(findings) == []
    lines = [f.what for f in findings if f.kind == UNCHECKED]
    assert "metrics.jsonl: its last line has no end yet" in lines
    assert "seal.json: none, the run has not ended" in lines


def test_what_a_running_run_writes_ahead_of_its_row_is_no_alarm(copy):
    """Responses, evaluations and checkpoints are on disk before the row that has their digests."""
    going_on(copy)
    shutil.copytree(copy / "checkpoints" / "3", copy / "checkpoints" / "4")
    for name in ("rollouts/3.jsonl.gz", "eval/4.json"):
        (copy / name).write_bytes(b"of step 3")
    assert wrong(found(copy)) == []
    (copy / "rollouts" / "3.jsonl.gz").rename(copy / "rollouts" / "01.jsonl.gz")
    assert "rollouts/01.jsonl.gz: no row has it" in "".join(wrong(found(copy)))


def test_a_checkpoint_that_a_running_run_removes_is_no_alarm(copy, monkeypatch):
    """It keeps its newest ones, and an audit had listed the one that went."""
    going_on(copy)
    of_json = digests.of_json

    def removed_meanwhile(value):
        shutil.rmtree(copy / "checkpoints" / "3", ignore_errors=True)
        return of_json(value)

    monkeypatch.setattr(digests, "of_json", removed_meanwhile)
    assert wrong(found(copy)) == []


def test_a_forks_chain_goes_on_from_its_parents(tmp_path):
    make_run(tmp_path / "parent")
    last = read_rows(tmp_path / "parent" / "metrics.jsonl")[-1]
    fork, origin = tmp_path / "fork", f"run:{tmp_path / 'parent'}@3"
    make_run(fork, before=last["chain"], origin=origin, first=3)
    (row, *_) = read_rows(fork / "metrics.jsonl")
    assert (row["step"], row["chain"]) == (3, chain.link(last["chain"], row))
    assert wrong(found(fork, digest=row["chain"])) == []
    rows_with(tmp_path / "parent", lambda rows: rows[-1].update(chain="0" * 64))
    assert "chain does not hold at step 3" in "".join(wrong(found(fork)))
    shutil.rmtree(tmp_path / "parent")
    findings = found(fork)
    assert wrong(findings) == []
    assert f"metrics.jsonl: the row before the first is of {origin}" in [f.what for f in findings]


def test_a_first_row_without_its_parents_proves_no_digest(tmp_path):
    """The chain of a fork's first row could be any text: that of --digest, before forged rows."""
    published, fork = "ab" * 32, tmp_path / "fork"
    make_run(fork, before="", origin=f"run:{tmp_path / 'gone'}@3", first=3)

    def forge(rows):
        rows[0]["chain"] = before = published
        for row in rows[1:]:
            row["chain"] = before = chain.link(before, row)

    rows_with(fork, forge)
    shutil.rmtree(fork / "checkpoints")
    write_seal(fork)
    assert wrong(found(fork)) == []
    assert "is neither" in "".join(wrong(found(fork, digest=published)))


# Which steps can be done again, and whether they can here

START = {
    "devices": {"kind": "cpu", "count": 2, "processes": 1},
    "versions": {"jax": "1", "jaxlib": "1"},
    "steps_sha256": "a",
}


@pytest.mark.parametrize(
    ("here", "why"),
    [
        ({}, ""),
        ({"devices": {"kind": "TPU v5", "count": 2}}, "2 x cpu, and here are 2 x TPU v5"),
        ({"devices": {"kind": "cpu", "count": 4}}, "2 x cpu, and here are 4 x cpu"),
        ({"versions": {"jax": "2", "jaxlib": "1"}}, "jax 1, and here is 2"),
        ({"steps_sha256": "b"}, "under another recipe"),
    ],
)
def test_steps_of_other_machines_and_recipes_are_not_compared(here, why):
    said = again.other_bits(START, START | here)
    assert why in said if why else said == ""
    assert "does not tell" in again.other_bits({}, START)


def test_a_step_is_done_again_from_the_nearest_checkpoint():
    can = {0, 1, 2, 3, 4, 5}
    assert again.reached([0, 4, 6], can, run_on=2) == {0: 0, 1: 0, 4: 4, 5: 4}
    assert again.reached([0, 1], can, run_on=3) == {0: 0, 1: 1, 2: 1, 3: 1}
    assert again.reached([4], can - {5}, run_on=9) == {4: 4}
    assert again.reached([0, 4], can, run_on=9, not_over={3, 5}) == {0: 0, 1: 0, 2: 0, 4: 4}


def test_a_step_that_differs_is_named_by_what_differs():
    row = {"step": 4, "loss": 1.0, "seconds/total": 3.0, chain.STATE: "a", chain.LOGP: "b"}
    run = types.SimpleNamespace(rows=[row], known={})
    assert again.compared(run, 4, row | {"seconds/total": 9.0}).kind == SAME
    other = again.compared(run, 4, row | {"loss": 2.0, chain.STATE: "c"})
    assert other == Finding(WRONG, "step 4 done again has other weights, loss")


def test_a_check_that_could_not_be_made_is_no_success():
    findings = [Finding(SAME, ""), Finding(REFUSED, "")]
    assert verdict(findings) == ("nothing wrong was found, but 1 checks could not be made", 1)


def small_config():
    """Makes a recipe of three steps with an evaluation and a checkpoint after the second."""
    config = get_config()
    config.num_steps, config.checkpoint.every_steps, config.eval.every_steps = 3, 2, 2
    return config


@pytest.mark.slow
def test_a_resumed_run_is_done_again_bit_by_bit_and_forged_numbers_are_found(tmp_path, monkeypatch):
    """Stopped after two steps, a step's rows lost, and resumed."""
    config = small_config()
    config.num_steps = 2
    train.train(config, tmp_path)
    (tmp_path / "seal.json").unlink()  # as a start with more steps does, killed in its third
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": 123.0}\n{"step": 3, "rewa')
    train.train(small_config(), tmp_path)
    before, kept = state_of(tmp_path), []

    def stepping(*arguments, step=train.rl_step):
        done = step(*arguments)
        kept.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(done[0]))
        return done

    def restoring(*arguments, restore=Checkpoints.restore, **others):
        assert not any(leaf() is not None for leaf in kept), "two training states at once"
        return restore(*arguments, **others)

    monkeypatch.setattr(train, "rl_step", stepping)
    monkeypatch.setattr(Checkpoints, "restore", restoring)
    findings = [*audit(tmp_path, steps=3, seed=0)]
    assert kept
    assert {f.kind for f in findings} == {SAME, UNCHECKED}, findings
    (line,) = (f.what for f in findings if f.kind == UNCHECKED)
    assert line.startswith("no digest of: tensorboard/")
    assert sum("done again: samples" in finding.what for finding in findings) == 3
    assert state_of(tmp_path) == before

    def forge(rows):
        rows[2]["entropy"] *= 1.5
        rows[2]["chain"] = chain.link(rows[1]["chain"], rows[2])

    rows_with(tmp_path, forge)
    lines = wrong([*audit(tmp_path, steps=3, seed=0)])
    assert "step 2 done again has other entropy" in lines


@pytest.mark.slow
def test_a_forks_first_step_is_done_again_with_the_evaluation_before_it(tmp_path):
    """An honest fork whose start was evaluated was "NOT what the run wrote"."""
    config = small_config()
    config.num_steps, config.checkpoint.every_steps = 2, 1
    train.train(config, tmp_path / "parent")
    origin = Origin.parse(f"run:{tmp_path / 'parent'}@1")
    config.algo.eps_high = 0.5
    train.train(config, tmp_path / "fork", origin)
    assert "eval/1.json" in read_json(tmp_path / "fork" / "seal.json")["files"]
    findings = [*audit(tmp_path / "fork", steps=1, seed=0)]
    assert {f.kind for f in findings} == {SAME, UNCHECKED}, findings
    assert sum("step 1 done again: samples" in finding.what for finding in findings) == 1
