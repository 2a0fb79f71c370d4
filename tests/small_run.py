"""The program that tests/test_processes.py runs in each process: a few steps of a small recipe.

    python tests/small_run.py DIR DEVICES STEPS [START] [CHECKPOINTS]

DEVICES are those of all processes, which the environment tells of (process/hosts.py).
START: --start. CHECKPOINTS: checkpoint.directory.
"""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from small_config import get_config

from dapo_jax import train
from dapo_jax.checkpoints.fingerprint import Parent
from dapo_jax.process import hosts
from dapo_jax.sampler import cache


def main(workdir: str, devices: str, steps: str, start: str = "", checkpoints: str = "") -> None:
    cache.PARTS = ((1, 1),)  # one program for decoding
    config = get_config()
    config.num_steps = int(steps)
    config.mesh.cpu_devices = int(devices)
    config.eval.every_steps = 2
    config.checkpoint.every_steps = 1
    config.checkpoint.keep = 9
    config.checkpoint.directory = checkpoints
    hosts.start(several=hosts.PROCESSES in os.environ, cpu_devices=int(devices))
    try:
        with hosts.ending_when_a_peer_is_lost():
            parent = Parent.parse(start) if start else None
            train.train(config, pathlib.Path(workdir), parent)
    except Exception as error:
        hosts.fail(repr(error))
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
