"""DAPO on a box of eight GPUs, with sizes that its memory decides: Qwen2.5-7B, 14B, or 32B by LoRA.

    export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92    # JAX takes three quarters otherwise
    python -m dapo_jax.train --config=configs/gpu_node.py --workdir=RUN
    ... --config.model.path=Qwen/Qwen2.5-14B --config.model.preset=14b --config.mesh.model=4
    ... --config.model.path=Qwen/Qwen2.5-32B --config.model.preset=32b --config.mesh.model=8 \\
        --config.learner.lora_rank=32

128 prompts x 8 responses of at most 8,192 tokens, 4 updates of 256 responses a rollout step.

That is one process for all eight GPUs. Two of four GPUs each, with the same programs, are started
with CUDA_VISIBLE_DEVICES=0,1,2,3 and 4,5,6,7, DAPO_COORDINATOR=localhost:7777, DAPO_PROCESSES=2,
DAPO_PROCESS=0 and 1, and --distributed.

Hardware: by XLA's compiler for eight H100 an update needs 30.7 GiB a GPU (7B), 41.4 (14B), 12.3
(32B with LoRA), and sampling 62 to 65, which the cache is chosen for. All weights of 32B need 80.4
in an update: eight H200, with responses of at most 4,096 tokens. Hours of 300 steps, estimated on
H100 (experiments/preflight): 11 to 19, 18 to 32, 26 to 47. Result: not run. Eight CPU devices have
run it with a tiny model; exchanges between GPUs (NCCL) and seconds were not seen.
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
