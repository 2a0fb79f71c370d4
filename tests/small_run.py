"""What tests/test_processes.py runs in each process: a few steps of the tiny recipe.

    python tests/small_run.py DIR DEVICES STEPS

DEVICES are those of all processes, which the environment tells of (sharding.hosts).
"""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from configs import tiny
from dapo_jax import command, train
from dapo_jax.sampler import engine
from sharding import hosts


def small_config(devices: int, steps: int):
    """Programs that compile quickly: one for decoding, one for prefill, layers in a loop."""
    config = tiny.get_config()
    config.num_steps = steps
    config.data.train.count = 200
    config.rollout.num_prompts = 4
    config.rollout.generation_prompts = 8
    config.rollout.max_response_tokens = 32
    config.rollout.page_tokens = 96
    config.rollout.cache_mib = 3
    config.algo.overlong_cache_tokens = 8
    config.learner.remat = "full"
    config.learner.row_tokens = 256
    config.mesh.cpu_devices = devices
    config.eval.sets.arithmetic.count = 6
    config.eval.samples_per_prompt = 4
    config.eval.every_steps = 2
    config.checkpoint.every_steps = 1
    config.checkpoint.keep = 9
    return config


def main(workdir: str, devices: str, steps: str) -> None:
    engine.PARTS = ((1, 1),)
    config = small_config(int(devices), int(steps))
    hosts.start(several=hosts.PROCESSES in os.environ, cpu_devices=int(devices))
    try:
        train.train(config, pathlib.Path(workdir))
    except Exception as error:
        command.end_all(repr(error))
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
