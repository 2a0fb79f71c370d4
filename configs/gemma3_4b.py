"""DAPO on Gemma 3 4B (instruction-tuned) with responses of at most 4,096 tokens.

    python -m dapo_jax.train --config=configs/gemma3_4b.py --workdir=RUN

128 prompts x 16 responses, 4 updates of 512 responses a rollout step.
Hardware: 8 TPU v5e chips (v5e-8). Minutes: 8 to 20 a step, estimated for 907 tokens a response,
with full attention in every layer (experiments/preflight). Result: not run; the TPU's compiler says
that it fits, hardly: 9.8 GiB a chip while sampling and 14.7 in the update, of 15.75.
"""

from configs import base, gemma3_1b


def get_config(preset: str = ""):
    config = gemma3_1b.get_config()
    config.model.path, config.model.preset = "google/gemma-3-4b-it", "4b"
    config.rollout.cache_mib = 2_048
    config.learner.micro_batch_rows = 2
    config.mesh.model = 4  # the 4 key/value heads
    return base.apply_preset(config, preset)
