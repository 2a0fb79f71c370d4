"""DAPO on Qwen2.5-0.5B with responses of at most 4,096 tokens.

    python -m dapo_jax.train --config=configs/qwen2_5_0_5b.py --workdir=RUN

128 prompts x 16 responses, 4 updates of 512 responses a rollout step.
Hardware: 8 TPU v5e chips (v5e-8), or a GPU. Minutes: 0.7 to 1.5 a step, estimated for 907 tokens a
response (experiments/preflight, commit 5956fc1). Result: not run; the TPU's compiler says that it
fits.
"""

from configs import base


def get_config(preset: str = ""):
    config = base.on_dapo_math("Qwen/Qwen2.5-0.5B", "0.5b")
    config.updates_per_step = 4
    config.rollout.num_prompts = 128
    config.rollout.generation_prompts = 384
    config.rollout.max_response_tokens = 4_096
    config.rollout.slot_tokens = 1_024
    config.rollout.cache_mib = 8_192
    config.algo.overlong_cache_tokens = 1_024
    config.learner.row_tokens = 6_144
    config.learner.micro_batch_rows = 16
    return base.apply_preset(config, preset)
