"""The real data sets, tokenizer and template on a small random policy. README.md has the commands.

The policy is never right, so without dynamic sampling the groups differ in length penalties alone;
`config.py:dapo` samples until the generation cap.
"""

from configs import base


def get_config(preset: str = ""):
    config = base.get_config()
    config.num_steps = 3
    config.updates_per_step = 2

    config.model.compute_dtype = "float32"
    config.tokenizer.stop_tokens = ("<|endoftext|>", "<|im_end|>")
    config.tokenizer.chat = "template"

    config.rollout.num_prompts = 8
    config.rollout.group_size = 4
    config.rollout.max_response_tokens = 16  # a policy of make_model.py stops after 8 on average
    config.rollout.generation_prompts = 8
    config.rollout.max_generation_batches = 2
    config.rollout.cache_mib = 4
    config.rollout.page_tokens = 16
    config.rollout.block_tokens = 8

    config.algo.dynamic_sampling = False
    config.algo.overlong_cache_tokens = 8

    config.learner.learning_rate = 1e-4
    config.learner.warmup_steps = 2
    config.learner.row_tokens = 2_064
    config.learner.micro_batch_rows = 2

    config.eval.sets.aime24 = base.dataset(kind="dapo_parquet")
    config.eval.sets.gsm8k = base.dataset(kind="gsm8k_jsonl")
    config.eval.every_steps = 3
    config.eval.max_prompts = 30  # all of AIME 2024, the first of GSM8K

    config.checkpoint.every_steps = 1
    config.log.samples_every_steps = 1
    return base.apply_preset(config, preset)
