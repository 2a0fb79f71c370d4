"""DAPO on Qwen2.5-1.5B with responses of at most 8,192 tokens.

    python -m dapo_jax.train --distributed --config=configs/qwen2_5_1_5b.py --workdir=RUN

256 prompts x 16 responses, 8 updates of 512 responses a rollout step.
Hardware: 16 TPU v5e chips (v5e-16). Minutes: 6 to 12 a step, estimated for 1,815 tokens a response
(experiments/preflight, commit 5956fc1). Result: not run; the TPU's compiler says that it fits.
"""

from configs import base


def get_config(preset: str = ""):
    config = base.on_dapo_math("Qwen/Qwen2.5-1.5B", "1.5b")
    config.updates_per_step = 8
    config.rollout.num_prompts = 256
    config.rollout.generation_prompts = 768
    config.rollout.max_response_tokens = 8_192
    config.rollout.slot_tokens = 2_048
    config.rollout.cache_mib = 7_168
    config.algo.overlong_cache_tokens = 2_048
    config.learner.row_tokens = 10_240
    config.learner.micro_batch_rows = 16
    return base.apply_preset(config, preset)
