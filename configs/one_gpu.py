"""DAPO on one GPU, with sizes that its memory decides: Qwen2.5-1.5B, or another from 0.5B to 7B.

    python -m dapo_jax.train --config=configs/one_gpu.py --workdir=RUN
    ... --config.model.path=Qwen/Qwen2.5-3B --config.model.preset=3b
    ... --config.model.path=Qwen/Qwen2.5-7B --config.model.preset=7b --config.learner.lora_rank=32

64 prompts x 8 responses of at most 4,096 tokens, 4 updates of 128 responses a rollout step.

Hardware: by XLA's compiler for an H100 an update needs 11.6 GB (0.5B), 34.6 (1.5B), 67.2 (3B), 24.1
(7B with LoRA). JAX takes three quarters of a GPU's memory. XLA_PYTHON_CLIENT_MEM_FRACTION=0.92
gives it more, which 3B needs on 80 GB.

Seconds a step on an H100, by the arithmetic of experiments.preflight.estimate at the efficiencies
of one H200 (responses grow to 908 tokens): 12 to 21 (0.5B), 33 to 59 (1.5B), 111 to 198 (7B with
LoRA). The config as a whole was not run. On that H200 (commit 5e82132) an update of four rows of
4,096 tokens took 0.30 s with 0.5B, 0.59 s with 1.5B, and a decode step of 256 slots with 1,024
tokens each 3.0 ms with 0.5B, 11.5 ms with 7B.

Qwen3-30B-A3B needs a card of 141 GB and LoRA of attention, by arithmetic: its bfloat16 weights are
61 GB, and the start's are there beside the sampler's. So 122 GB are taken before any cache, and
what lays one out as the other needs was not measured on a GPU.
"""

from configs import base


def get_config(preset: str = ""):
    config = base.on_dapo_math("Qwen/Qwen2.5-1.5B", "1.5b")
    config.updates_per_step = 4
    config.rollout.num_prompts = 64
    config.rollout.generation_prompts = 128
    config.rollout.group_size = 8
    config.rollout.max_response_tokens = 4_096
    config.rollout.slot_tokens = 0  # these four: chosen by the lengths and the memory
    config.rollout.cache_mib = 0
    config.learner.row_tokens = 0
    config.learner.micro_batch_rows = 0
    config.algo.overlong_cache_tokens = 1_024
    return base.apply_preset(config, preset)
