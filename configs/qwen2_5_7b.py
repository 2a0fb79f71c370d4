"""DAPO on Qwen2.5-7B with the paper's lengths.

    python -m dapo_jax.train --distributed --config=configs/qwen2_5_7b.py --workdir=RUN

512 prompts x 16 responses of at most 20,480 tokens; 16 updates of 512 responses a rollout step.
On v6e-16 add --config.learner.micro_batch_rows=4 --config.rollout.cache_mib=14336.
Hardware: 64 TPU v5e chips (v5e-64), or 16 of v6e (v6e-16). Minutes: 30 to 71 a step on v5e-64,
estimated for 4,537 tokens a response (experiments/preflight, commit 5956fc1). Result: not run; the
TPU's compiler says that it fits.
"""

from configs import base


def get_config(preset: str = ""):
    config = base.on_dapo_math("Qwen/Qwen2.5-7B", "7b")
    config.num_steps = 330
    config.rollout.cache_mib = 6_656
    config.learner.micro_batch_rows = 16
    config.mesh.model = 4  # the 4 key/value heads
    return base.apply_preset(config, preset)
