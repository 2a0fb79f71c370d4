"""Flips one random bit of the newest checkpoint: in a random file, or at a random byte of all.

Survived: what a resumed run then restores is bitwise a state that was saved, the newest one where
the bit does not matter and else the one before, with the damaged one kept as it was.
"""

import pathlib
import shutil
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.checkpoints.store import Checkpoints
from experiments.faults.parts import Outcome, Part

WIDTH = 128  # arrays of this width have files of their own, small ones are in Orbax's index


def state_at(step: int) -> dict:
    """Makes a state in which every array depends on the step."""
    rng = np.random.default_rng(step)
    return {
        "params": {
            "embed_VD": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32),
            "norm_D": jnp.asarray(rng.normal(size=4), jnp.float32),
        },
        "moments": {"embed_VD": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.bfloat16)},
        "count": jnp.int32(step),
    }


def progress_at(step: int) -> dict:
    """Makes a progress that depends on the step."""
    return {"cursor": 48 * step, "row": {"step": step - 1, "reward/mean": step / 7}}


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Reads all files under a folder."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def outcome_of(folder: pathlib.Path, fault: str) -> Outcome:
    """Restores as a resumed run does, and compares with what was saved."""
    flipped, reports = contents(folder / "2"), []
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        state_at(0),
    )
    try:
        step, state, progress = Checkpoints(folder, keep=2).restore_latest(
            abstract, report=reports.append
        )
    except Exception as error:
        return Outcome(fault, False, False, f"{type(error).__name__}: {error}"[:200])
    same = jax.tree.map(
        lambda a, b: a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes(),
        state,
        state_at(step),
    )
    right = all(jax.tree.leaves(same)) and progress == progress_at(step)
    if step == 2:
        return Outcome(fault, right, None, "" if right else "went on with wrong numbers")
    kept = contents(folder / "damaged.2.0") == flipped
    lost = "" if right and kept else "wrong numbers" if kept else "the damaged one was not kept"
    return Outcome(fault, right and kept, "checkpoint 2" in "".join(reports), lost)


def inject(count: int, seed: int, folder: pathlib.Path) -> Iterator[Outcome]:
    """Flips a bit of a copy of two checkpoints, and restores, so many times."""
    saved = folder / "saved"
    run = Checkpoints(saved, keep=2)
    for step in (1, 2):
        run.save(step, state_at(step), progress_at(step))
    run.close()
    rng = np.random.default_rng(seed)
    sizes = {name: len(content) for name, content in contents(saved / "2").items() if content}
    by_byte = np.array([*sizes.values()]) / sum(sizes.values())
    for i in range(count):
        name = rng.choice([*sizes], p=by_byte if i % 2 else None)
        copy = folder / str(i)
        shutil.copytree(saved, copy)
        content = bytearray((copy / "2" / name).read_bytes())
        place, bit = rng.integers(len(content)), rng.integers(8)
        content[place] ^= 1 << int(bit)
        (copy / "2" / name).write_bytes(content)
        yield outcome_of(copy, f"bit {bit} of byte {place} of {name}")
        shutil.rmtree(copy)


PART = Part("a flipped bit in a checkpoint", full=500, short=20, inject=inject)
