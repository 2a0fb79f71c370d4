"""Puts every config through its chip's compiler: the table of experiments/preflight.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 python -m experiments.preflight.all [--only=7b]

One after the other. Exit status 1 if one does not fit.
"""

import importlib
import sys

from absl import app, flags

from dapo_jax.preflight import examine
from dapo_jax.preflight.chips import GIB
from dapo_jax.report.compare import table
from experiments.benchmarks import common

FLAGS = flags.FLAGS
flags.DEFINE_string("only", "", "Configs with this in their names.")

SHORTER = {"rollout.max_response_tokens": 4_096, "algo.overlong_cache_tokens": 1_024}
# config_name, topology, slices, settings beside the config's
CASES = (
    ("qwen2_5_0_5b", "v5e:2x4", 1, {}),
    ("qwen2_5_1_5b", "v5e:4x4", 1, {}),
    ("qwen2_5_3b", "v5e:4x8", 1, {}),
    ("qwen2_5_7b", "v5e:8x8", 1, {}),
    ("qwen2_5_7b", "v6e:4x4", 1, {"learner.micro_batch_rows": 4, "rollout.cache_mib": 14_336}),
    ("qwen2_5_14b", "v6e:8x8", 1, {}),
    ("qwen2_5_32b", "v5p:8x8x4", 1, {}),
    (*("qwen2_5_32b", "v6e:16x16", 1), {"rollout.cache_mib": 12_288, "learner.remat": "full"}),
    ("qwen3_8b", "v5e:8x8", 1, {}),
    ("gemma3_1b", "v5e:2x4", 1, {}),
    ("gemma3_4b", "v5e:2x4", 1, {}),
    ("qwen2_5_7b", "v6e:4x4", 2, {"learner.micro_batch_rows": 8, "rollout.cache_mib": 14_336}),
    ("qwen2_5_7b", "v4:4x4x4", 1, {}),
    ("qwen2_5_32b", "tpu7x:4x4x4", 1, {"learner.micro_batch_rows": 16}),
    ("gpu_node", "h100:8", 1, {}),
    ("gpu_node", "h100:8", 1, {"model.preset": "14b", "mesh.model": 4}),
    ("gpu_node", "h100:8", 1, {"model.preset": "32b", "mesh.model": 8, "learner.lora_rank": 32}),
    (*("gpu_node", "h200:8", 1), {"model.preset": "32b", "mesh.model": 8} | SHORTER),
    ("gpu_node", "a100:8", 1, {}),
    ("gpu_node", "a100-40:8", 1, {}),
    ("gpu_node", "rtx4090:2", 1, {"model.preset": "1.5b"} | SHORTER),
    ("gpu_node", "rtx4090:1", 1, {"model.preset": "0.5b"} | SHORTER),
)
HEADER = ("config", "topology", "beside the config", "chips", "GiB sampling and update", "free")


def row_of(config_name: str, topology: str, slices: int, settings: dict) -> tuple[list[str], bool]:
    """Compiles a config: (its row of the table, whether it fits)."""
    config = importlib.import_module(f"configs.{config_name}").get_config()
    config.update_from_flattened_dict(settings)
    where = topology + (f" x {slices}" if slices > 1 else "")
    row = [config_name, where, ", ".join(f"{key} {value}" for key, value in settings.items())]
    try:
        found = examine.examine(config, topology, slices=slices)
    except MemoryError as error:
        return [*row, f"does not fit: {error}", "", ""], False
    sampling, update = (
        max(size for name, size in found.totals.items() if (name == "update") == updates) / GIB
        for updates in (False, True)
    )
    row += [
        f"{found.chips}, TP {found.built.mesh.shape['model']}",
        f"{sampling:.1f} and {update:.1f} of {found.chip.hbm_bytes / GIB:.1f}",
        f"{found.headroom:.0%}",
    ]
    return row, found.headroom >= 0


def main(_):
    rows, fits = [], True
    for case in CASES:
        if FLAGS.only in case[0]:
            row, one_fits = row_of(*case)
            rows, fits = [*rows, row], fits and one_fits
            print(row, flush=True)
    print("\n".join(["", common.origin(), *table(HEADER, rows)]))
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    app.run(main)
