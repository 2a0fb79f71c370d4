"""DAPO on Qwen2.5-14B with the paper's lengths.

    python -m dapo_jax.train --distributed --config=configs/qwen2_5_14b.py --workdir=RUN

512 prompts x 16 responses of at most 20,480 tokens; 16 updates of 512 responses a rollout step.
Hardware: 64 TPU v6e chips (v6e-64). Minutes: 30 to 75 a step, estimated for 4,537 tokens a response
(experiments/preflight, commit 5956fc1). Result: not run; the TPU's compiler says that it fits.
"""

from configs import base


def get_config(preset: str = ""):
    config = base.on_dapo_math("Qwen/Qwen2.5-14B", "14b")
    config.num_steps = 330
    config.rollout.cache_mib = 16_384
    config.learner.micro_batch_rows = 8
    config.mesh.model = 8  # the 8 key/value heads
    return base.apply_preset(config, preset)
