"""Any Hugging Face directory: DAPO on your own problems, and `evaluate --model=DIR` of it.

    python -m dapo_jax.train --config=configs/any_model.py --workdir=runs/mine \\
        --config.model.path=DIR --config.data.train.path=problems.jsonl
    python -m dapo_jax.evaluate --model=DIR --workdir=runs/qwen --set=aime24:math:aime24.jsonl

A training step takes 64 prompts x 8 responses, 4 updates of 128 responses. There is no evaluation
set but yours. The directory, the data and the devices choose what is 0, -1, "" or "auto" here
(`dapo_jax.setup.auto_sizes`), and `train` prints it.

Hardware: what holds the model. Minutes and result depend on the model and the data; `--dry_run`
prints the memory.
"""

from configs import base


def get_config(preset: str = ""):
    config = base.get_config()
    config.model.family = ""
    config.model.compute_dtype = ""
    config.tokenizer.chat = "auto"
    config.data.on_bad_row = "skip"  # they are counted
    config.verifier.rules = "symbolic"  # answers of any kind
    config.updates_per_step = 4
    config.rollout.num_prompts = 64
    config.rollout.group_size = 8
    config.rollout.generation_prompts = 0
    config.rollout.max_prompt_tokens = 0
    config.rollout.max_response_tokens = 0
    config.rollout.cache_mib = 0
    config.rollout.slot_tokens = 0
    config.algo.overlong_cache_tokens = -1
    config.learner.row_tokens = 0
    config.learner.micro_batch_rows = 0

    config.eval.samples_per_prompt = 8
    config.eval.temperature = 0.6
    config.eval.top_p = 0.95
    return base.apply_preset(config, preset)
