"""Resumes a run whose inputs have changed: its data, model, tokenizer, recipe or checkpoints.

Survived: it is refused before anything is computed, and checkpoints and rows are as they were.
Said: the message names the key.
"""

import contextlib
import dataclasses
import json
import pathlib
import random
import shutil
from collections.abc import Callable, Iterator

from configs import base
from dapo_jax import lifetime
from dapo_jax.checkpoints import fingerprint
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.setup import components
from experiments.faults.config import get_config
from experiments.faults.parts import Outcome, Part

ROWS, DONE = 40, 3
RECIPE = {  # another value of each of these is another run
    "algo.eps_high": 0.24,
    "algo.kl_coef": 0.5,
    "algo.loss_aggregation": "sequence_mean",
    "learner.learning_rate": 1e-6,
    "learner.max_grad_norm": 0.5,
    "learner.warmup_steps": 9,
    "rollout.temperature": 0.9,
    "rollout.top_p": 0.9,
    "rollout.group_size": 4,
    "seed": 7,
    "updates_per_step": 1,
    "verifier.rules": "strict",
}


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of a run's inputs.

    make(folder, config, chance): makes it, and may name another --workdir. named: what the refusal
    has to say.
    """

    what: str
    make: Callable
    named: str


def row_of(i: int) -> dict:
    """Makes a row of the training data."""
    return {"prompt": f"{i} + {3 * i} = ?", "answer": str(4 * i)}


def edit(folder: pathlib.Path, change: Callable[[list], None]) -> None:
    """Changes the training data's rows."""
    file = folder / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    change(rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def answer(folder, config, chance):
    row = chance.randrange(ROWS)
    edit(folder, lambda rows: rows[row].update(answer="17"))


def prompt(folder, config, chance):
    row = chance.randrange(ROWS)
    edit(folder, lambda rows: rows[row].update(prompt=f"{row} - 1 = ?"))


def added(folder, config, chance):
    edit(folder, lambda rows: rows.insert(chance.randrange(ROWS), row_of(1_000)))


def removed(folder, config, chance):
    edit(folder, lambda rows: rows.pop(chance.randrange(ROWS)))


def swapped(folder, config, chance):
    a, b = chance.sample(range(ROWS), 2)

    def swap(rows):
        rows[a], rows[b] = rows[b], rows[a]

    edit(folder, swap)


def model_bit(folder, config, chance):
    file = folder / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content) // 2, len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def model_config(folder, config, chance):
    file = folder / "model" / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"rms_norm_eps": chance.choice([1e-5, 2e-6])}))


def tokenizer(folder, config, chance):
    """A field that the library does not know: a tokenizer file that differs, and loads."""
    with (folder / "model" / "tokenizer.model").open("ab") as file:
        file.write(b"\xa2\x06\x01" + chance.randbytes(1))


def fewer_steps(folder, config, chance):
    config.num_steps = chance.randrange(1, DONE)


def no_checkpoints(folder, config, chance):
    shutil.rmtree(folder / "run" / "checkpoints")


def empty_directory(folder, config, chance):
    config.checkpoint.directory = str(folder / f"elsewhere{chance.randrange(9)}")


def of_recipe(key: str, value) -> Change:
    def make(folder, config, chance):
        """In another --workdir, which has no config.json to compare with."""
        config.update_from_flattened_dict({key: value})
        config.checkpoint.directory = str(folder / "run" / "checkpoints")
        return "another"

    return Change(f"another {key}", make, key)


CHANGES = [
    *(Change("another answer", answer, "data.train.path"),) * 6,
    *(Change("another prompt", prompt, "data.train.path"),) * 6,
    *(Change("a row added", added, "data.train.path"),) * 5,
    *(Change("a row removed", removed, "data.train.path"),) * 5,
    *(Change("two rows swapped", swapped, "data.train.path"),) * 5,
    *(Change("a bit of the start model", model_bit, "model.path: model.safetensors"),) * 7,
    *(Change("another config.json of the model", model_config, "model.path: config.json"),) * 3,
    *(Change("another tokenizer", tokenizer, "model.path: tokenizer.model"),) * 4,
    *(Change("fewer steps than done", fewer_steps, "num_steps"),) * 3,
    *(Change("the checkpoints gone", no_checkpoints, "checkpoint.directory"),) * 2,
    *(Change("an empty checkpoint directory", empty_directory, "checkpoint.directory"),) * 2,
    *(of_recipe(key, value) for key, value in RECIPE.items()),
]


def config_of(folder: pathlib.Path):
    """Makes the config of the run in a folder."""
    config = get_config()
    config.num_steps, config.checkpoint.every_steps, config.eval.every_steps = 5, 1, 0
    config.model.path = str(folder / "model")
    config.data.train = base.dataset(path=str(folder / "train.jsonl"))
    return config


def make_run(folder: pathlib.Path) -> None:
    """Makes a run's inputs, and what it leaves after some steps."""
    shutil.copytree(get_config().model.path, folder / "model")
    rows = "".join(json.dumps(row_of(i)) + "\n" for i in range(ROWS))
    (folder / "train.jsonl").write_text(rows)
    config, workdir = config_of(folder), folder / "run"
    words = components.tokenizer(config)
    programs = components.programs(config, words.vocab_size)
    checkpoints = Checkpoints(workdir / "checkpoints", keep=2)
    checkpoints.fingerprint = fingerprint.of_run(
        config, components.load_data(config, words, training=True)
    )
    progress = {"cursor": 0, "sampled_tokens_total": 0, "row": {"step": DONE - 1}}
    checkpoints.save(DONE, programs.start_state(), progress)
    checkpoints.close()
    (workdir / "config.json").write_text(config.to_json_best_effort())
    rows = "".join(json.dumps({"step": step}) + "\n" for step in range(DONE))
    (workdir / "metrics.jsonl").write_text(rows)


def saved(folder: pathlib.Path) -> dict[str, bytes]:
    """Reads what a refused start has to leave as it was."""
    files = [*(folder / "run").glob("metrics*"), *(folder / "run" / "checkpoints").glob("*/**/*")]
    return {str(file): file.read_bytes() for file in files if file.is_file()}


def outcome_of(change: Change, folder: pathlib.Path, chance: random.Random) -> Outcome:
    """Makes the change, and starts the run as the command does."""
    config = config_of(folder)
    workdir = folder / (change.make(folder, config, chance) or "run")
    before, error = saved(folder), None
    with contextlib.suppress(Exception), contextlib.ExitStack() as stack:
        try:
            lifetime.begin(config, workdir, stack)
        except Exception as raised:
            error = raised
            raise
    same, refused = saved(folder) == before, isinstance(error, ValueError | OSError)
    lost = "" if refused and same else "went on" if not refused else "files were changed"
    return Outcome(change.what, refused and same, change.named in str(error), lost)


def inject(count: int, seed: int, folder: pathlib.Path) -> Iterator[Outcome]:
    """Changes a copy of a run's inputs so many times, and starts it."""
    place, original = folder / "place", folder / "original"  # the paths belong to the config
    place.mkdir()
    make_run(place)
    place.rename(original)
    chance = random.Random(seed)
    for i in range(count):
        change = CHANGES[i * len(CHANGES) // count % len(CHANGES)]
        shutil.copytree(original, place)
        yield outcome_of(change, place, chance)
        shutil.rmtree(place)


PART = Part("changed inputs of a resumed run", full=60, short=12, inject=inject)
