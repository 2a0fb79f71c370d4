"""A 1 M-parameter policy on which each of DAPO's techniques can have an effect.

python -m dapo_jax.train --config=configs/forks.py --workdir=runs/forks
python -m dapo_jax.train --config=configs/forks.py:naive_grpo --workdir=runs/forks_grpo

It trains on a mixture of four kinds of problems (experiments/forks_base). Its other settings are
those of tiny.py. One flag chooses another mixture:

    --config.data.train.args="{'road': 1.0}"

Hardware: one CPU core. Minutes: 6 for 62 steps of DAPO; the default is 50. Result of the 62 steps:
mean@8 on held-out problems goes from 2.5 to 94.3 % (road) and from 34.8 to 79.5 % (long), in five
seeds (commit 99ee084, experiments/equal_tokens).
"""

from configs import base, tiny

TASK = "experiments.forks_base.task:Forks"
MIXTURE = {"easy": 0.3, "road": 0.4, "long": 0.2, "closed": 0.1}


def get_config(preset: str = ""):
    config = tiny.get_config()
    config.num_steps = 50
    config.updates_per_step = 8
    config.model.path = "experiments/forks_base/checkpoint"

    config.data.train = base.dataset(task=TASK, args=MIXTURE, count=20_000, seed=1)
    config.verifier.rules = "strict"

    config.rollout.num_prompts = 16
    config.rollout.max_response_tokens = 216
    config.rollout.generation_prompts = 32
    config.rollout.cache_mib = 24
    config.rollout.slot_tokens = 96
    config.algo.overlong_cache_tokens = 64
    config.learner.learning_rate = 1e-4
    config.learner.micro_batch_rows = 2
    config.mesh.cpu_devices = 1

    del config.eval.sets.arithmetic
    config.eval.sets.road = base.dataset(
        task=TASK, args={"road": 1.0}, count=32, seed=2, split="test"
    )
    config.eval.sets.long = base.dataset(
        task=TASK, args={"long": 1.0, "long_steps": (12,)}, count=32, seed=2, split="test"
    )
    config.eval.every_steps = 25
    config.eval.samples_per_prompt = 4
    return base.apply_preset(config, preset)
