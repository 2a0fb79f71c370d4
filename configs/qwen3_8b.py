"""DAPO on Qwen3-8B-Base with the paper's lengths.

    python -m dapo_jax.train --distributed --config=configs/qwen3_8b.py --workdir=RUN

512 prompts x 16 responses of at most 20,480 tokens; 16 updates of 512 responses a rollout step.
Hardware: 64 TPU v5e chips (v5e-64). Minutes: 51 to 125 a step, estimated for 4,537 tokens a
response (experiments/preflight, commit 5956fc1). Result: not run. The TPU's compiler says 10.6 GiB
a chip while sampling and 7.6 in the update, of 15.75. On 16 chips (micro_batch_rows 2, cache_mib
5120) the update needs 16.8 and does not fit.
"""

from configs import base


def get_config(preset: str = ""):
    config = base.on_dapo_math("Qwen/Qwen3-8B-Base", "8b", "qwen3")
    config.num_steps = 330
    config.rollout.cache_mib = 7_168
    config.learner.micro_batch_rows = 8
    config.mesh.model = 8  # the 8 key/value heads
    return base.apply_preset(config, preset)
