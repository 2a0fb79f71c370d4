"""DAPO on Qwen2.5-32B: the paper's config (section 4.1).

    python -m dapo_jax.train --distributed --config=configs/qwen2_5_32b.py --workdir=RUN

512 prompts x 16 responses of at most 20,480 tokens; 16 updates of 512 responses a rollout step.
On v6e-256 add --config.rollout.cache_mib=12288 --config.learner.remat=full. For partial rollouts,
whose cache leaves room for the update, add --config.rollout.partial_rollout_steps=8
--config.rollout.cache_mib=43008 --config.rollout.slot_tokens=4096.
Hardware: 256 TPU chips, v5p-512 or v6e-256. Minutes: 11 to 23 a step on v5p, estimated for 4,537
tokens a response (experiments/preflight, commit 5956fc1). Result: not run; the TPU's compiler says
that it fits. The paper reports 50 points on AIME 2024 (mean@32) after about 330 steps.
"""

from configs import base


def get_config(preset: str = ""):
    config = base.on_dapo_math("Qwen/Qwen2.5-32B", "32b")
    config.num_steps = 330
    config.rollout.cache_mib = 61_440  # of 95 GiB a v5p chip
    # A slot for every response of a step, or nearly: the longest ones begin at once, and nothing is
    # preempted up to a mean of 5,000 tokens (simulated).
    config.rollout.slot_tokens = 3_072
    config.rollout.block_tokens = 32  # half as many blocks for the host to plan
    # Without longer rows a sixth of an update is padding: its last micro-batch is nearly empty.
    config.learner.row_lengths = 3
    config.learner.remat = "keep_products"
    config.mesh.model = 8  # the 8 key/value heads
    return base.apply_preset(config, preset)
