"""SmolLM2-135M-Instruct plays a game of several turns: find a number by "higher" and "lower".

python -m experiments.smollm2.fetch --to=runs/smollm2_135m
python -m dapo_jax.train --config=configs/smollm2_135m_guess.py --workdir=runs/guess

Hardware: one GPU, or two CPU cores. Result: held-out games won (8 samples each; 4 tries, 8 numbers)
go from 6.1 to 70.2 % after 40 steps on an H100, 4 to 6 s a step beside two other runs (one seed,
commit ac5824b; experiments/guess). Without the environment's answers 50 % is the most. On two CPU
cores 10 steps (--config.num_steps=10) go from 5.9 to 49.5 % in 13 minutes (one seed, commit
4e1cb446).
"""

from configs import base, smollm2_135m


def get_config(preset: str = ""):
    config = smollm2_135m.get_config()
    config.num_steps = 40
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

    config.learner.learning_rate = 1e-5

    del config.eval.sets.sums
    config.eval.every_steps = 10
    config.eval.samples_per_prompt = 8
    config.eval.sets.guess = base.dataset(**game, count=64, seed=2, split="test")
    return base.apply_preset(config, preset)
