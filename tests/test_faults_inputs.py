"""A resumed run whose inputs have changed: its data, model, tokenizer, config or checkpoints.

It is refused by the key before anything is computed, and checkpoints and rows are as they were.
"""

import json
import pathlib
import shutil

import pytest
from conftest import FULL
from runs import contents
from small_config import small

from configs import base
from dapo_jax import train
from dapo_jax.checkpoints import fingerprint
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.setup import components

pytestmark = pytest.mark.faults
ROWS, DONE = 40, 3
SETTINGS = {  # another value of each of these is another run
    "algo.eps_high": 0.24,
    "learner.warmup_steps": 9,
    "rollout.top_p": 0.9,
    "seed": 7,
    "updates_per_step": 1,
    "verifier.rules": "strict",
}


def row_of(i: int) -> dict:
    """Makes a row of the training data."""
    return {"prompt": f"{i} + {3 * i} = ?", "answer": str(4 * i)}


def config_of(folder: pathlib.Path):
    """Makes the config of the run in a folder."""
    steps = {"num_steps": 5, "checkpoint.every_steps": 1, "eval.every_steps": 0}
    config = small(**steps, **{"model.path": str(folder / "model")})
    config.data.train = base.dataset(path=str(folder / "train.jsonl"))
    return config


def write_data(folder: pathlib.Path, rows) -> None:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> pathlib.Path:
    """The folder of a run, whose path belongs to its config; its files come from `original`."""
    return tmp_path_factory.mktemp("runs") / "place"


@pytest.fixture(scope="module")
def original(place) -> pathlib.Path:
    """A run's inputs, and what it leaves after some steps."""
    shutil.copytree(small().model.path, place / "model")
    write_data(place, map(row_of, range(ROWS)))
    config, workdir = config_of(place), place / "run"
    words = components.tokenizer(config)
    checkpoints = Checkpoints(workdir / "checkpoints", keep=2)
    data = components.load_data(config, words, training=True)
    checkpoints.fingerprint = fingerprint.of_run(config, data)
    state = components.programs(config, words.vocab_size).start_state()
    progress = {"cursor": 0, "sampled_tokens_total": 0, "row": {"step": DONE - 1}}
    checkpoints.save(DONE, state, progress)
    checkpoints.close()
    (workdir / "config.json").write_text(config.to_json_best_effort())
    rows = "".join(json.dumps({"step": step}) + "\n" for step in range(DONE))
    (workdir / "metrics.jsonl").write_text(rows)
    return place.rename(place.with_name("original"))


# The tokenizer's has a field that the library does not know: a file that differs, and loads.
FILES = {
    "model.safetensors": lambda data: data[:-1] + bytes([data[-1] ^ 4]),
    "config.json": lambda data: json.dumps(json.loads(data) | {"rms_norm_eps": 1e-5}).encode(),
    "tokenizer.model": lambda data: data + b"\xa2\x06\x01x",
}
DATA = {
    "another answer": lambda rows: rows[7].update(answer="17"),
    "another prompt": lambda rows: rows[7].update(prompt="7 - 1 = ?"),
    "a row added": lambda rows: rows.insert(7, row_of(1_000)),
    "a row removed": lambda rows: rows.pop(7),
    "two rows swapped": lambda rows: rows.insert(7, rows.pop(8)),
}


CASES = (
    *((what, "data.train.path") for what in DATA),
    *((name, f"model.path: {name}") for name in FILES),
    ("no checkpoints", "checkpoint.directory"),
    ("another directory", "checkpoint.directory"),
    ("fewer steps", "num_steps"),
    *zip(SETTINGS, SETTINGS, strict=True),
)


@pytest.mark.parametrize(("what", "named"), CASES if FULL else CASES[4:13])
def test_another_run_is_refused_by_its_key(what, named, original, place):
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(original, place)
    config, workdir = config_of(place), place / "run"
    if what in DATA:
        rows = [*map(row_of, range(ROWS))]
        DATA[what](rows)
        write_data(place, rows)
    elif what in FILES:
        file = place / "model" / what
        file.write_bytes(FILES[what](file.read_bytes()))
    elif what == "no checkpoints":
        shutil.rmtree(workdir / "checkpoints")
    elif what == "another directory":
        config.checkpoint.directory = str(place / "elsewhere")
    elif what == "fewer steps":
        config.num_steps = DONE - 1
    else:  # in another --workdir, which has no config.json to compare with
        config.update_from_flattened_dict({what: SETTINGS[what]})
        config.checkpoint.directory, workdir = str(workdir / "checkpoints"), place / "another"

    def saved() -> dict[str, bytes]:
        files = contents(place / "run").items()
        return {name: it for name, it in files if name.startswith("metrics") or name.count("/") > 1}

    before = saved()
    with pytest.raises((ValueError, OSError)) as raised:
        train.train(config, workdir)
    assert named in str(raised.value)
    assert saved() == before
