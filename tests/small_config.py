"""The tiny recipe made small: a few steps in seconds, with programs that compile quickly.

python -m dapo_jax.train --config=tests/small_config.py --workdir=RUN
"""

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.num_steps = 4
    config.data.train.count = 200
    config.rollout.num_prompts = 4
    config.rollout.generation_prompts = 8
    config.rollout.max_response_tokens = 32
    config.rollout.page_tokens = 96
    config.rollout.cache_mib = 3
    config.algo.overlong_cache_tokens = 8
    config.learner.remat = "full"
    config.learner.row_tokens = 256
    config.eval.sets.arithmetic.count = 6
    config.eval.samples_per_prompt = 4
    config.eval.every_steps = 3
    config.checkpoint.every_steps = 100
    return config
