"""Puts every recipe through the TPU's compiler: the table of experiments/preflight.

    python -m experiments.preflight.all [--only=7b] [--folder=runs/preflight]

The cases run one after the other, each by `python -m experiments.preflight.estimate`. Each leaves
its JSON, its PNG and its output in the folder; results of earlier runs are taken from there. Exit
status 1 if one does not fit.
"""

import json
import pathlib
import subprocess
import sys

from absl import app, flags

from experiments.benchmarks import common
from experiments.preflight.estimate import render

FLAGS = flags.FLAGS
flags.DEFINE_string("only", "", "Cases with this in their names.")
flags.DEFINE_string("folder", "runs/preflight", "Where results go.")

# recipe, topology, slices, settings beside the recipe's
CASES = (
    ("qwen2_5_0_5b", "v5e:2x4", 1, {}),
    ("qwen2_5_1_5b", "v5e:4x4", 1, {}),
    ("qwen2_5_3b", "v5e:4x8", 1, {}),
    ("qwen2_5_7b", "v5e:8x8", 1, {}),
    ("qwen2_5_7b", "v6e:4x4", 1, {"learner.micro_batch_rows": 4, "rollout.cache_mib": 14_336}),
    ("qwen2_5_14b", "v6e:8x8", 1, {}),
    ("qwen2_5_32b", "v5p:8x8x4", 1, {}),
    (
        *("qwen2_5_32b", "v6e:16x16", 1),
        {"rollout.cache_mib": 12_288, "learner.remat": "full"},
    ),
    ("qwen3_8b", "v5e:8x8", 1, {}),
    ("qwen2_5_7b", "v6e:4x4", 2, {"learner.micro_batch_rows": 8, "rollout.cache_mib": 14_336}),
    ("qwen2_5_7b", "v4:4x4x4", 1, {}),
    ("qwen2_5_32b", "tpu7x:4x4x4", 1, {"learner.micro_batch_rows": 16}),
)


def name_of(recipe: str, topology: str, slices: int) -> str:
    """Returns a case's name, which its files have."""
    return f"{recipe}_{topology.replace(':', '_')}" + (f"_{slices}_slices" if slices > 1 else "")


def examine(folder: pathlib.Path, recipe: str, topology: str, slices: int, settings) -> dict | None:
    """Returns the JSON of a case; None where it does not fit or does not compile."""
    name = name_of(recipe, topology, slices)
    result = folder / f"{name}.json"
    if not result.exists():
        command = [
            *(sys.executable, "-m", "experiments.preflight.estimate"),
            f"--config=configs/{recipe}.py",
            *(f"--topology={topology}", f"--slices={slices}", f"--json={result}"),
            f"--png={folder / name}.png",
            *(f"--config.{key}={value}" for key, value in settings.items()),
        ]
        with (folder / f"{name}.txt").open("w") as output:
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    return json.loads(result.read_text()) if result.exists() else None


def row(recipe: str, topology: str, slices: int, settings, found: dict | None) -> list[str]:
    """Returns a line of the table."""
    where = topology + (f" x {slices}" if slices > 1 else "")
    changed = ", ".join(f"{key} {value}" for key, value in settings.items())
    return [recipe, where, changed, *render.table_row(found)]


def main(_):
    folder = pathlib.Path(FLAGS.folder)
    folder.mkdir(parents=True, exist_ok=True)
    table, fits = [], True
    for case in CASES:
        if FLAGS.only not in name_of(*case[:3]):
            continue
        found = examine(folder, *case)
        fits &= found is not None and found["headroom"] >= 0
        table.append(row(*case, found))
        print(table[-1], flush=True)
    header = ["recipe", "topology", "beside the recipe", *render.TABLE_HEADER]
    print(f"\ncommit {common.commit()}\n{common.table(header, table)}")
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    app.run(main)
