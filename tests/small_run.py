"""The program that tests/test_processes.py runs in each process: a few steps of a small recipe.

    python tests/small_run.py DIR [START [SETTINGS]]

The processes, of which the environment tells (process/hosts.py), have two devices or one each.
START: --start. SETTINGS: a JSON object of config keys.
"""

import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
# Compiled in a fraction of the time.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=1"

from small_config import small

from dapo_jax import train
from dapo_jax.checkpoints.begun import Parent
from dapo_jax.process import hosts
from dapo_jax.sampler import cache

KEYS = {"num_steps": 3, "eval.every_steps": 2, "checkpoint.every_steps": 1, "checkpoint.keep": 9}


def main(workdir: str, start: str = "", settings: str = "{}") -> None:
    cache.PARTS = ((1, 1),)  # one program for decoding
    devices = max(2, int(os.environ.get(hosts.PROCESSES, "1")))
    config = small(**KEYS | {"mesh.cpu_devices": devices} | json.loads(settings))
    hosts.start(several=hosts.PROCESSES in os.environ, cpu_devices=config.mesh.cpu_devices)
    try:
        with hosts.ending_when_a_peer_is_lost():
            parent = Parent.parse(start) if start else None
            train.train(config, pathlib.Path(workdir), parent)
    except Exception as error:
        hosts.fail(repr(error))
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
