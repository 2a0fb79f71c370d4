"""SmolLM2-135M-Instruct writes a sentence with three given words: many answers are right.

python -m experiments.smollm2.fetch --to=runs/smollm2_135m
python -m dapo_jax.train --config=configs/smollm2_135m_words.py --workdir=runs/words

Hardware: one CPU core and 9.4 GB. Minutes: 8 to 11 for 8 of its 12 steps. Result: mean@8 on
held-out requests goes from 10.5 to 87.0 % in 8 steps (three seeds, commit 99ee084,
experiments/eps_high_words).
"""

from configs import base, smollm2_135m


def get_config(preset: str = ""):
    config = smollm2_135m.get_config()
    words = "experiments.smollm2.words:GivenWords"
    config.data.train = base.dataset(task=words, count=600, seed=1)
    config.eval.sets = {"words": base.dataset(task=words, count=72, seed=2, split="test")}
    config.learner.learning_rate = 1e-5
    return base.apply_preset(config, preset)
