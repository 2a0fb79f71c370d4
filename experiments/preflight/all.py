"""Every recipe on its TPU slices, through the TPU's compiler: the table of experiments/preflight.

    python -m experiments.preflight.all [--only=7b] [--folder=runs/preflight]

A case after the other, each by `python -m dapo_jax.preflight`; what was found before is taken from
the folder, where each leaves its JSON, its PNG and its output. Exit status 1 if one does not fit.
"""

import json
import pathlib
import subprocess
import sys

from absl import app, flags

from experiments.benchmarks import common

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
    ("qwen2_5_32b", "v6e:16x16", 1, {"rollout.cache_mib": 12_288}),
    ("qwen2_5_7b", "v6e:4x4", 2, {"learner.micro_batch_rows": 8, "rollout.cache_mib": 14_336}),
    ("qwen2_5_7b", "v4:4x4x4", 1, {}),
    ("qwen2_5_32b", "tpu7x:4x4x4", 1, {"learner.micro_batch_rows": 16}),
)


def name_of(recipe: str, topology: str, slices: int) -> str:
    """A case's name, which its files have."""
    return f"{recipe}_{topology.replace(':', '_')}" + (f"_{slices}_slices" if slices > 1 else "")


def examine(folder: pathlib.Path, recipe: str, topology: str, slices: int, settings) -> dict | None:
    """The JSON of a case; None where it does not fit or does not compile."""
    name = name_of(recipe, topology, slices)
    found = folder / f"{name}.json"
    if not found.exists():
        command = [
            *(sys.executable, "-m", "dapo_jax.preflight", f"--config=configs/{recipe}.py"),
            *(f"--topology={topology}", f"--slices={slices}", f"--json={found}"),
            f"--png={folder / name}.png",
            *(f"--config.{key}={value}" for key, value in settings.items()),
        ]
        with (folder / f"{name}.txt").open("w") as output:
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    return json.loads(found.read_text()) if found.exists() else None


def row(recipe: str, topology: str, slices: int, settings, report: dict | None) -> list[str]:
    """A line of the table."""
    where = topology + (f" x {slices}" if slices > 1 else "")
    changed = ", ".join(f"{key} {value}" for key, value in settings.items())
    first = [recipe, where, changed]
    if report is None:
        return [*first, "does not compile", *[""] * 7]
    step, gib = report["step"], 2**30
    phases = {name: sum(parts.values()) for name, parts in report["phases"].items()}
    sampling = max(size for name, size in phases.items() if name != "update")
    return [
        *first,
        f"{report['chips']}, TP {report['mesh']['model']}",
        f"{sampling / gib:.1f} and {phases['update'] / gib:.1f} of {report['hbm_bytes'] / gib:.1f}",
        f"{report['headroom']:.0%}",
        f"{step['mean_response_tokens']:,}",
        f"{(step['rollout'] + step['prefill']) / 60:.1f} + {step['update'] / 60:.1f}",
        f"{step['sampled_tokens'] / step['total']:,.0f}",
        f"{step['mfu_of_update']:.0%}",
        f"{report['run_hours']:.0f}; {report['chip_hours']:,.0f}",
        f"{report['seconds']:.0f}",
    ]


def main(_):
    folder = pathlib.Path(FLAGS.folder)
    folder.mkdir(parents=True, exist_ok=True)
    table, fits = [], True
    for case in CASES:
        if FLAGS.only not in name_of(*case[:3]):
            continue
        report = examine(folder, *case)
        fits &= report is not None and report["headroom"] >= 0
        table.append(row(*case, report))
        print(table[-1], flush=True)
    header = ["recipe", "topology", "beside the recipe", "chips", "GiB sampling and update"]
    header += ["free", "mean tokens", "rollout + update, minutes", "tokens/s", "MFU of update"]
    header += ["run: hours; chip-hours", "preflight s"]
    print(f"\ncommit {common.commit()}\n{common.table(header, table)}")
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    app.run(main)
