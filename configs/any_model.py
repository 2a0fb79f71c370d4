"""Any model as it is: what `evaluate` and `sample` do with --model=DIR where no run is there.

    python -m dapo_jax.evaluate --model=DIR --workdir=runs/qwen --set=aime24:math:aime24.jsonl \\
        --k=32 --temperature=0.6 --top_p=0.95
    python -m dapo_jax.sample --model=DIR --prompt="What is 7 * 8?"

What is 0 or "" here is chosen by the model's directory, the data and the devices
(`dapo_jax.run.fit`).
"""

from configs import base


def get_config():
    config = base.get_config()
    config.model.family = ""  # by model_type in the directory's config.json
    config.model.compute_dtype = ""  # bfloat16; on a CPU float32
    config.rollout.max_prompt_tokens = 0  # the data's longest
    config.rollout.max_response_tokens = 0  # what the model has positions for, 20,480 at most
    config.rollout.cache_mib = 0  # what is asked for, as far as the device has it
    config.algo.overlong_cache_tokens = -1
    config.learner.row_tokens = 0

    config.eval.samples_per_prompt = 8
    config.eval.temperature = 0.6
    config.eval.top_p = 0.95
    return config
