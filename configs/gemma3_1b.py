"""DAPO on Gemma 3 1B (instruction-tuned) with responses of at most 4,096 tokens.

    python -m dapo_jax.train --config=configs/gemma3_1b.py --workdir=RUN

128 prompts x 16 responses, 4 updates of 512 responses a rollout step.
Hardware: 8 TPU v5e chips (v5e-8). Minutes: 1.5 to 3.3 a step, estimated for 907 tokens a response,
with full attention in every layer (experiments/preflight). Result: not run; the TPU's compiler says
that it fits: 10.4 GiB a chip while sampling and 9.3 in the update, of 15.75. By the estimate a free
TPU's session of 9 hours has time for 160 to 300 of the 300 steps; experiments/notebook/tpu.ipynb
goes on in the next one.
"""

from configs import base, qwen2_5_0_5b


def get_config(preset: str = ""):
    config = qwen2_5_0_5b.get_config()
    config.model.path, config.model.preset = "google/gemma-3-1b-it", "1b"
    config.model.family = "gemma3_text"
    config.rollout.cache_mib = 6_144
    config.learner.micro_batch_rows = 8
    return base.apply_preset(config, preset)
