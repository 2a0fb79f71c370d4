"""Tells whether a config compiles for a TPU slice and fits its memory, without a TPU.

    python -m dapo_jax.preflight --config=configs/qwen2_5_32b.py --topology=v5p:8x8x4
        [--slices=2] [--suggest]

The largest of each kind of the config's own programs (update, prefill, decoding, reshard) are
compiled ahead of time for the topology by the TPU's compiler. Printed are the bytes that a chip
holds in each phase. Exit status: 0: it fits. 1: it does not; the setting to change is named.
--suggest compiles the config with proposed settings too, and one of the two has to fit.

Needs the package libtpu: `make preflight` installs it beside the environment.
"""

import pathlib
import sys

from absl import flags

from dapo_jax.cli import command
from dapo_jax.cli.config_flags import define_config
from dapo_jax.preflight import examine

ADVICE = (
    "Set learner.remat to offload, lower learner.micro_batch_rows, learner.row_tokens, "
    "learner.row_lengths or rollout.cache_mib, raise mesh.model, or take a larger topology; "
    "--suggest proposes settings"
)


def main(_):
    given = flags.FLAGS
    found = examine.candidates(
        given.config,
        given.topology,
        config_name=pathlib.Path(given["config"].config_filename).stem,
        slices=given.slices,
        suggest=given.suggest,
        say=lambda message: print(message, file=sys.stderr, flush=True),
    )
    if not found:
        print(ADVICE)
    for name, one in found.items():
        if given.suggest:
            print(f"{name}:")
        print("\n".join(one.lines()))
    if all(one.headroom < 0 for one in found.values()):
        sys.exit(1)


def define_flags() -> None:
    """Defines --config, --topology and --slices."""
    define_config()
    flags.DEFINE_string("topology", None, "A slice: v5p:8x8x4.", required=True)
    flags.DEFINE_integer("slices", None, "The number of slices; the config's mesh.slices.")


if __name__ == "__main__":
    define_flags()
    flags.DEFINE_bool("suggest", False, "Compile the config with proposed settings too.")
    command.run(main)
