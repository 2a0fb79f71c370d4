"""Tells whether a recipe fits a TPU slice, and how long a step takes, without a TPU.

    python -m dapo_jax.preflight --config=configs/qwen2_5_32b.py --topology=v5p:8x8x4
        [--slices=2] [--suggest] [--json=FILE] [--png=FILE] [--mean_response_tokens=4000]

The recipe's own programs (update, prefill, decoding for training and for evaluation, reshard) are
compiled ahead of time for the topology by the TPU's compiler. Reported: the bytes that a chip holds
in each phase, the costs of each program with its loops counted in full, and the time of a simulated
RL step and run as a range. Exit status: 0 if it fits, 1 if it does not, with the setting to change.
--suggest compiles and simulates the recipe with proposed settings too, and takes the faster.

Needs the package libtpu: `make preflight` installs it beside the environment.
"""

import pathlib
import sys

import jax
from absl import flags

from dapo_jax.preflight import examine, render
from dapo_jax.preflight.chips import chip_of
from dapo_jax.preflight.compile import DoesNotFit, topology_devices, without_weights
from dapo_jax.run import command
from dapo_jax.run.recipe import define_config

ADVICE = (
    "Set learner.remat to offload, lower learner.micro_batch_rows, learner.row_tokens or "
    "rollout.cache_mib, raise mesh.model, or take a larger topology; --suggest proposes settings"
)


def main(_):
    config, topology = without_weights(CONFIG.value), TOPOLOGY.value
    slices = SLICES.value or config.mesh.slices
    config.mesh.slices = slices
    devices = topology_devices(topology, slices=slices)
    where = topology if slices == 1 else f"{topology} x {slices}"
    recipe = pathlib.Path(flags.FLAGS["config"].config_filename).stem
    tried = {"the recipe as it is": {}}
    if SUGGEST.value:
        proposal = examine.suggested(config, devices, chip_of(topology), slices=slices)
        tried[" ".join(f"--config.{key}={value}" for key, value in proposal.items())] = proposal
    mean = MEAN.value or round(examine.MEAN_LENGTHS[-1] * config.rollout.max_response_tokens)
    candidates = {}
    for name, settings in tried.items():
        candidate = config.copy_and_resolve_references()
        candidate.update_from_flattened_dict(settings)
        how = {"recipe": recipe, "where": where, "mean": mean, "say": say}
        try:
            candidates[name] = examine.examine(candidate, devices, **how)
        except DoesNotFit as error:
            print(f"{recipe} on {where} does not fit: {error}")
        except ValueError as error:
            if len(tried) == 1:
                raise
            print(f"{name}: {error}")
    if not candidates:
        print(ADVICE)
        sys.exit(1)
    taken, found = examine.fastest(candidates)
    if SUGGEST.value:
        print("\n".join(render.choice_lines(candidates, taken)))
    print("\n".join(render.lines(found)))
    for flag, write in ((JSON, render.write_json), (PNG, render.plot)):
        if flag.value:
            write(found, pathlib.Path(flag.value))
            print(f"written: {flag.value}")
    print(f"preflight took {found.seconds:.0f} s with JAX {jax.__version__}")
    if found.headroom < examine.WANTED_HEADROOM:
        print(f"less than {examine.WANTED_HEADROOM:.0%} is free: {found.advice}")
    if found.headroom < 0:
        print("it does not fit")
        sys.exit(1)
    print("it fits")


def say(message: str) -> None:
    """Shows progress on stderr, apart from the result."""
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    CONFIG = define_config()
    TOPOLOGY = flags.DEFINE_string("topology", None, "A slice: v5p:8x8x4.", required=True)
    SLICES = flags.DEFINE_integer("slices", None, "How many of them; the recipe's mesh.slices.")
    SUGGEST = flags.DEFINE_bool(
        "suggest", False, "Compare with proposed settings, and take the faster."
    )
    MEAN = flags.DEFINE_float("mean_response_tokens", None, "Of the simulated step.")
    JSON = flags.DEFINE_string("json", None, "Write the findings here.")
    PNG = flags.DEFINE_string("png", None, "Draw memory and time here.")
    command.run(main)
