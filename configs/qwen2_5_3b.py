"""DAPO on Qwen2.5-3B with responses of at most 8,192 tokens.

    python -m dapo_jax.train --distributed --config=configs/qwen2_5_3b.py --workdir=RUN

256 prompts x 16 responses, 8 updates of 512 responses a rollout step.
Hardware: 32 TPU v5e chips (v5e-32). Minutes: 4 to 9 a step, estimated for 1,815 tokens a response
(experiments/preflight, commit 5956fc1). Result: not run; the TPU's compiler says that it fits.
"""

from configs import base, qwen2_5_1_5b


def get_config(preset: str = ""):
    config = qwen2_5_1_5b.get_config()
    config.model.path, config.model.preset = "Qwen/Qwen2.5-3B", "3b"
    config.mesh.model = 2  # the 2 key/value heads
    return base.apply_preset(config, preset)
