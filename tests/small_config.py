"""The tiny recipe made small: a few steps in seconds, with programs that compile quickly.

python -m dapo_jax.train --config=tests/small_config.py --workdir=RUN
"""

from configs import base, tiny
from dapo_jax.tasks.base import make_task

KEYS = {
    "num_steps": 4,
    "data.train.count": 200,
    "rollout.num_prompts": 4,
    "rollout.generation_prompts": 8,
    "rollout.max_response_tokens": 32,
    "rollout.page_tokens": 96,
    "rollout.cache_mib": 3,
    "algo.overlong_cache_tokens": 8,
    "learner.remat": "full",
    "learner.row_tokens": 256,
    "eval.sets.arithmetic.count": 6,
    "eval.samples_per_prompt": 4,
    "eval.every_steps": 3,
    "checkpoint.every_steps": 100,
}


def small(preset: str = "", **keys):
    """Makes the small config with other values of these keys, as in `**{"algo.eps_low": 0.1}`."""
    config = tiny.get_config(preset)
    config.update_from_flattened_dict(KEYS | keys)
    return config


def get_config():
    return small()


def set_of(on_bad_row: str = "error", **settings):
    """The settings of a training set, as a command has them."""
    config = base.get_config()
    config.data.on_bad_row, config.data.train = on_bad_row, base.dataset(**settings)
    return base.mixture_settings(config)["data.train"]


def task_of(**settings):
    return make_task("data.train", set_of(**settings))
