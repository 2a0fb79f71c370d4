"""Tampers with copies of one small run, and audits them.

Survived, and said: the audit says that something is not what the run wrote. What is changed by
somebody who computes the chain anew is audited with the digest that the run had printed, or by
doing again all steps that checkpoints reach, of which the changed one is one.
"""

import gzip
import json
import pathlib
import random
import shutil
from collections.abc import Callable, Iterator

from dapo_jax import train
from dapo_jax.audit.__main__ import audit
from dapo_jax.audit.findings import WRONG
from dapo_jax.run import chain, digests
from dapo_jax.run.files import json_line, read_json, read_rows, write_seal
from experiments.faults.config import get_config
from experiments.faults.parts import Outcome, Part

STEPS = 6
AGAIN = (0, 1, 4, 5)  # the steps that its checkpoints reach


def recipe():
    """Makes the recipe of the run."""
    config = get_config()
    config.num_steps, config.checkpoint.every_steps = STEPS, 2
    return config


def files(folder: pathlib.Path, pattern: str = "*") -> list[pathlib.Path]:
    """Lists the files that a run is made of, but empty ones and those that writers made."""
    paths = (path for path in sorted(folder.rglob(pattern)) if path.is_file())
    without = (folder / "tensorboard", folder / chain.LOCK)
    return [p for p in paths if p.stat().st_size and not {p, p.parent}.intersection(without)]


def flipped(folder, chance):
    """One bit of any file."""
    path = chance.choice(files(folder))
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"a bit of byte {place} of {path.relative_to(folder)}"


def cut(folder, chance):
    path = chance.choice(files(folder))
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])
    return f"{path.relative_to(folder)} cut short"


def removed(folder, chance):
    path = chance.choice(files(folder))
    path.unlink()
    return f"{path.relative_to(folder)} removed"


def swapped(kind: str):
    """Two files, or folders, of two steps in each other's place."""

    def change(folder, chance):
        a, b = chance.sample(sorted((folder / kind).parent.glob((folder / kind).name)), 2)
        aside = folder / "aside"
        a.rename(aside)
        b.rename(a)
        aside.rename(b)
        return f"{a.name} and {b.name} swapped"

    return change


def added(name: str):
    def change(folder, chance):
        path = folder / name
        source = chance.choice(files(path.parent, f"*{path.suffix}"))
        shutil.copy(source, path)
        return f"{name} added"

    return change


def of_rows(what: str, edit: Callable[[list, random.Random], None]):
    """Other rows in metrics.jsonl."""

    def change(folder, chance):
        rows = read_rows(folder / "metrics.jsonl")
        edit(rows, chance)
        write_rows(folder, rows)
        return what

    return change


def write_rows(folder: pathlib.Path, rows: list[dict]) -> None:
    (folder / "metrics.jsonl").write_bytes(b"".join(map(json_line, rows)))


def a_number(rows, chance):
    row = chance.choice(rows)
    key = chance.choice([key for key in chain.numbers(row) if key != "step"])
    row[key] = row[key] + chance.choice([1, 0.25, 1e-6])


def a_row_less(rows, chance):
    rows.pop(chance.randrange(len(rows)))


def a_row_more(rows, chance):
    rows.append(rows[-1] | {"step": rows[-1]["step"] + 1})


def rows_swapped(rows, chance):
    i = chance.randrange(len(rows) - 1)
    rows[i], rows[i + 1] = rows[i + 1] | {"step": i}, rows[i] | {"step": i + 1}


def chain_taken_out(rows, chance):
    for row in rows:
        for key in [key for key in row if chain.is_text(key)]:
            del row[key]


def config_changed(folder, chance):
    config = read_json(folder / "config.json")
    key, value = chance.choice([("seed", 1), ("num_steps", 5), ("updates_per_step", 1)])
    config[key] = value
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return f"config.json: another {key}"


def start_changed(folder, chance):
    (line,) = (folder / "starts.jsonl").read_text().splitlines()
    key, value = chance.choice([("commit", "0" * 40), ("host", "other"), ("command", "rm")])
    (folder / "starts.jsonl").write_text(json.dumps(json.loads(line) | {key: value}) + "\n")
    return f"starts.jsonl: another {key}"


def start_added(folder, chance):
    path = folder / "starts.jsonl"
    path.write_bytes(path.read_bytes() * 2)
    return "starts.jsonl: a start more"


def a_verdict(folder, chance):
    """A response that is right now, in a whole file."""
    step = chance.randrange(STEPS)
    verdict_of(folder, step, chance)
    return f"rollouts/{step}: a verdict turned"


def verdict_of(folder, step: int, chance) -> None:
    path = folder / "rollouts" / f"{step}.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    row = chance.choice(rows)
    row["correct"] = not row["correct"]
    data = b"".join(map(json_line, rows))
    path.write_bytes(gzip.compress(data, compresslevel=1, mtime=0))


def seal_changed(folder, chance):
    """Another count, chain or digest in seal.json, one of them left out, or no seal."""
    path = folder / chain.SEAL
    seal = read_json(path)
    what = chance.choice(["rows", chain.CHAIN, "files", "nothing"])
    if what == "nothing":
        path.unlink()
        return "seal.json removed"
    if what == "files":
        files = seal["files"]
        what = chance.choice([*files])
        files[what] = chance.choice(["0" * 64, None])
        if files[what] is None:
            del files[what]
    else:
        seal[what] = 5 if what == "rows" else "0" * 64
    path.write_text(json.dumps(seal, indent=1) + "\n")
    return f"seal.json: another entry of {what}"


def a_progress(folder, chance):
    """A checkpoint that goes on elsewhere in the prompts, with a manifest that says so."""
    step = chance.choice([4, 6])
    with_progress(folder / "checkpoints" / str(step), lambda it: it.update(cursor=it["cursor"] - 1))
    return f"checkpoint {step}: another cursor"


def with_progress(folder: pathlib.Path, edit) -> None:
    path, described = folder / "progress" / "metadata", folder / "manifest" / "metadata"
    progress, manifest = read_json(path), read_json(described)
    edit(progress)
    del manifest["digest"]
    manifest["progress"] = digests.of_json(progress)
    manifest["digest"] = digests.of_json(manifest)
    path.write_text(json.dumps(progress))
    described.write_text(json.dumps(manifest))


def forged(step: int):
    """A better reward in a row and in rollouts, and all digests computed anew."""

    def change(folder, chance):
        verdict_of(folder, step, chance)
        rows = read_rows(folder / "metrics.jsonl")
        better = rows[step]["reward/mean"] + 0.01 * chance.randrange(1, 9)
        rows[step]["reward/mean"] = better
        name = f"rollouts/{step}.jsonl.gz"
        rows[step][chain.DIGEST + name] = chain.of_file(folder / name)
        before = ""
        for row in rows:
            row[chain.CHAIN] = before = chain.link(before, row)
        write_rows(folder, rows)
        for saved in (folder / "checkpoints").iterdir():
            row = rows[int(saved.name) - 1]
            with_progress(saved, lambda it, row=row: it["row"].update(chain.untimed(row)))
        write_seal(folder)
        return f"step {step} and the whole chain after it forged"

    return change


# What is done to a copy of the run, and how it is audited: with the digest that the run printed, or
# by doing all steps again that can be.
BY_FILES, BY_DIGEST, BY_STEPS = "files", "digest", "steps"
TAMPERINGS = [
    *((flipped, BY_FILES),) * 13,
    *((cut, BY_FILES),) * 4,
    *((removed, BY_FILES),) * 4,
    (swapped("rollouts/*"), BY_FILES),
    (swapped("eval/*.json"), BY_FILES),
    (swapped("checkpoints/*"), BY_FILES),
    (added("rollouts/9.jsonl.gz"), BY_FILES),
    (added("eval/5.json"), BY_FILES),
    *((of_rows("a number in metrics.jsonl", a_number), BY_FILES),) * 5,
    (of_rows("a row less", a_row_less), BY_FILES),
    (of_rows("a row more", a_row_more), BY_FILES),
    (of_rows("two rows swapped", rows_swapped), BY_FILES),
    (of_rows("the chain taken out", chain_taken_out), BY_FILES),
    (config_changed, BY_FILES),
    (start_changed, BY_FILES),
    (start_added, BY_FILES),
    *((a_verdict, BY_FILES),) * 2,
    (seal_changed, BY_FILES),
    (a_progress, BY_FILES),
    *((forged(step), BY_DIGEST) for step in (0, 2, 3, 5)),
    *((forged(step), BY_STEPS) for step in AGAIN),
]


def outcome_of(folder: pathlib.Path, what: str, how: str, digest: str) -> Outcome:
    """Audits a copy."""
    steps = len(AGAIN) if how == BY_STEPS else 0
    given = digest if how == BY_DIGEST else None
    try:
        found = [it for it in audit(folder, steps=steps, seed=0, digest=given) if it.kind == WRONG]
        lines = [it.what for it in found]
    except (ValueError, OSError) as error:  # rows that cannot be read: the command says so
        lines = [str(error)]
    said = bool(lines)
    return Outcome(f"{what} ({how})", said, said, "" if said else "was not found")


def inject(count: int, seed: int, folder: pathlib.Path) -> Iterator[Outcome]:
    """Makes a run, and tampers with so many copies of it."""
    original = folder / "original"
    train.train(recipe(), original)
    digest, chance = chain.of_file(original / chain.SEAL), random.Random(seed)
    for i in range(count):
        change, how = TAMPERINGS[i * len(TAMPERINGS) // count % len(TAMPERINGS)]
        copy = folder / str(i)
        shutil.copytree(original, copy)
        yield outcome_of(copy, change(copy, chance), how, digest)
        shutil.rmtree(copy)


PART = Part("tampering with a finished run", full=50, short=10, inject=inject)
