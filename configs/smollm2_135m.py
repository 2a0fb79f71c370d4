"""SmolLM2-135M-Instruct learns sums: what `make real` runs.

python -m experiments.smollm2.fetch --to=runs/smollm2_135m
python -m dapo_jax.train --config=configs/smollm2_135m.py --workdir=runs/real

Hardware: two CPU cores, or one GPU. Minutes: 7 for 12 steps (commit 7264780); a step took 0.4 to
0.8 s on an H200 (commit 5e82132). Result: mean@4 on held-out sums goes from 2.8 to 78.1 % (one
seed, commit 7264780, pages of 48 tokens; of 64: 3.5 to 76.0 % on another CPU, commit d395fec), and
from 4.5 to 77.4 % on the H200.
"""

from configs import base


def get_config(preset: str = ""):
    config = base.get_config()
    config.num_steps = 12
    config.updates_per_step = 4

    config.model.path = "runs/smollm2_135m"
    config.model.family = "llama"
    config.model.compute_dtype = "float32"
    config.tokenizer.chat = "template"

    sums = "experiments.smollm2.sums:Sums"
    config.data.train = base.dataset(task=sums, count=600, seed=1)

    config.rollout.num_prompts = 16
    config.rollout.group_size = 8
    config.rollout.max_prompt_tokens = 48
    config.rollout.max_response_tokens = 48
    config.rollout.generation_prompts = 24
    config.rollout.cache_mib = 0
    config.rollout.slot_tokens = 0
    config.rollout.page_tokens = 64
    config.rollout.block_tokens = 8

    config.algo.overlong_cache_tokens = 16

    config.learner.learning_rate = 5e-6
    config.learner.warmup_steps = 0
    config.learner.row_tokens = 0
    config.learner.micro_batch_rows = 0
    config.learner.remat = "none"

    config.eval.sets.sums = base.dataset(task=sums, count=72, seed=2, split="test")
    config.eval.every_steps = 4
    config.eval.samples_per_prompt = 4
    config.eval.top_p = 1.0

    config.checkpoint.every_steps = 6
    config.log.samples_every_steps = 4
    return base.apply_preset(config, preset)
