"""DAPO on a box of eight GPUs, with sizes that their memory decides: Qwen2.5-7B, or 14B, or 32B.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 python -m dapo_jax.train --config=configs/gpu_node.py \\
        --workdir=RUN
    ... --config.model.path=Qwen/Qwen2.5-14B --config.model.preset=14b --config.mesh.model=4
    ... --config.model.path=Qwen/Qwen2.5-32B --config.model.preset=32b --config.mesh.model=8 \\
        --config.learner.lora_rank=32
"""

from configs import one_gpu


def get_config(preset: str = ""):
    config = one_gpu.get_config(preset)
    config.model.path, config.model.preset = "Qwen/Qwen2.5-7B", "7b"
    config.rollout.num_prompts = 128
    config.rollout.generation_prompts = 256
    config.rollout.max_response_tokens = 8_192
    config.algo.overlong_cache_tokens = 2_048
    return config
