"""Tells whether a config compiles for a TPU slice or a box of GPUs and fits, without either.

    python -m dapo_jax.preflight --config=configs/qwen2_5_32b.py --topology=v5p:8x8x4 [--slices=2]
    python -m dapo_jax.preflight --config=configs/gpu_node.py --topology=h100:8

The largest of each kind of the config's own programs (update, prefill, decoding, reshard) are
compiled ahead of time for the topology by XLA's compiler for it. Printed are the bytes that a chip
holds in each phase, what it exchanges with others, and how many kernels of ours it calls. Exit
status: 0: it fits. 1: it does not; the setting to change is named. Of a GPU's memory JAX takes
three quarters, or XLA_PYTHON_CLIENT_MEM_FRACTION.

Needs libtpu, or JAX's plugin for CUDA: `make preflight` installs it beside the environment.
"""

import sys

from absl import flags

from dapo_jax.cli import command
from dapo_jax.cli.config_flags import define_config
from dapo_jax.preflight import examine


def main(_):
    given = flags.FLAGS
    try:
        examined = examine.examine(given.config, given.topology, slices=given.slices)
    except MemoryError as error:
        print(f"it does not fit: {error}\n{examine.ADVICE}")
        sys.exit(1)
    print("\n".join(examined.lines()))
    if examined.headroom < 0:
        sys.exit(1)


def define_flags() -> None:
    """Defines --config, --topology and --slices."""
    define_config()
    flags.DEFINE_string("topology", None, "A slice: v5p:8x8x4; GPUs: h100:8.", required=True)
    flags.DEFINE_integer("slices", None, "The number of slices; the config's mesh.slices.")


if __name__ == "__main__":
    define_flags()
    command.run(main)
