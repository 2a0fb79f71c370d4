"""DAPO on Qwen3-32B with the paper's config (section 4.1).

    python -m dapo_jax.train --distributed --config=configs/qwen3_32b.py --workdir=RUN

512 prompts x 16 responses of at most 20,480 tokens; 16 updates of 512 responses a rollout step.
Qwen3-32B is published without a base model. Layout and cache are those of qwen2_5_32b.py, whose
keys and values have the same size.
Hardware: 256 TPU v5p chips (v5p-512). Minutes: 11 to 24 a step, estimated for 4,537 tokens a
response (experiments/preflight, commit 5956fc1). Result: neither run nor compiled.
"""

from configs import base


def get_config(preset: str = ""):
    config = base.on_dapo_math("Qwen/Qwen3-32B", "32b", "qwen3")
    config.num_steps = 330
    config.rollout.cache_mib = 61_440  # of 95 GiB a v5p chip
    config.rollout.slot_tokens = 3_072  # as in qwen2_5_32b.py
    config.learner.remat = "keep_products"
    config.mesh.model = 8  # the 8 key/value heads
    return base.apply_preset(config, preset)
