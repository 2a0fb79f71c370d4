"""SmolLM2-135M-Instruct plays a game of several turns: find a number by "higher" and "lower".

python -m experiments.smollm2.fetch --to=runs/smollm2_135m
python -m dapo_jax.train --config=configs/smollm2_135m_guess.py --workdir=runs/guess

Hardware: two CPU cores. The result is open: before training 5.9 % of 57 held-out games are won (4
samples each; 4 tries, 8 numbers), and no run has reached its 12 steps yet; the first four took
155 to 260 s each beside other work.
"""

from configs import base, smollm2_135m


def get_config(preset: str = ""):
    config = smollm2_135m.get_config()
    config.num_steps = 12
    config.updates_per_step = 2

    game = {
        "task": "experiments.tasks.guess:Guesses",
        "environment": "experiments.tasks.guess:Guess",
    }
    config.data.train = base.dataset(**game, count=2_000, seed=1)

    config.rollout.num_prompts = 8
    config.rollout.generation_prompts = 16
    config.rollout.max_prompt_tokens = 64
    config.rollout.max_response_tokens = 96
    config.rollout.slot_tokens = 96
    config.rollout.page_tokens = 32
    config.algo.overlong_cache_tokens = 16

    del config.eval.sets.sums
    config.eval.every_steps = 6
    config.eval.sets.guess = base.dataset(**game, count=64, seed=2, split="test")
    return base.apply_preset(config, preset)
