"""Estimates the seconds of a recipe's step on a TPU slice, beside its memory, without a TPU.

    python -m experiments.preflight.estimate --config=configs/qwen2_5_32b.py --topology=v5p:8x8x4
        [--slices=2] [--suggest] [--json=FILE] [--png=FILE] [--mean_response_tokens=4000]

Compiles and prints as `python -m dapo_jax.preflight` does, with its exit status. Printed beside are
the costs of each program with its loops counted in full, and the time of a simulated RL step and
run as a range. --suggest also simulates the recipe with proposed settings, and takes the faster.
"""

import pathlib
import sys
import time

from absl import flags

from dapo_jax.preflight import render as memory
from dapo_jax.preflight.__main__ import compile_candidates, define_flags
from dapo_jax.run import command
from experiments.preflight.estimate import ranges, render


def main(_):
    given, start = flags.FLAGS, time.perf_counter()
    candidates = {
        name: ranges.estimate(found, mean=given.mean_response_tokens)
        for name, found in compile_candidates().items()
    }
    seconds = time.perf_counter() - start
    taken = ranges.fastest(candidates)
    if given.suggest:
        print("\n".join(render.choice_lines(candidates, taken)))
    estimated = candidates[taken]
    print("\n".join(render.lines(estimated)))
    if given.json:
        render.write_json(estimated, pathlib.Path(given.json), seconds=seconds)
    if given.png:
        render.plot(estimated, pathlib.Path(given.png))
    print("\n".join(memory.verdict_lines(estimated.found, seconds=seconds)))
    if estimated.found.headroom < 0:
        sys.exit(1)


if __name__ == "__main__":
    define_flags()
    flags.DEFINE_float("mean_response_tokens", None, "Of the simulated step.")
    flags.DEFINE_string("json", None, "Write the findings here.")
    flags.DEFINE_string("png", None, "Draw memory and time here.")
    command.run(main)
