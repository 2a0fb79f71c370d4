"""DAPO on Qwen3-30B-A3B-Base, 128 experts of which 8 a token, with the paper's lengths.

    python -m dapo_jax.train --distributed --config=configs/qwen3_30b_a3b.py --workdir=RUN

512 prompts x 16 responses of at most 20,480 tokens; 16 updates of 512 responses a rollout step.
Hardware: 64 TPU v5p chips (v5p-128). Minutes: 12 to 30 a step, estimated for 4,537 tokens a
response (experiments/preflight). Result: not run. The TPU's compiler says 60.3 GiB a chip while
sampling and 28.2 in the update, of 95.0.
"""

from configs import base


def get_config(preset: str = ""):
    config = base.on_dapo_math("Qwen/Qwen3-30B-A3B-Base", "30b_a3b", "qwen3_moe")
    config.num_steps = 330
    config.rollout.cache_mib = 40_960  # of 95 GiB a v5p chip
    config.rollout.slot_tokens = 3_072  # a slot for every response of a step
    config.learner.micro_batch_rows = 16
    config.mesh.model = 4  # the 4 key/value heads
    return base.apply_preset(config, preset)
