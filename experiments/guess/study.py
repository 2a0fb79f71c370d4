"""SmolLM2-135M in a game of several turns: what it learns, and what of it the answers give."""

from dapo_jax.report.compare import final_score
from experiments.study import CLIPPED, ENTROPY, Claim, Study

WON = final_score("guess", "mean@8")
GAME = "experiments.tasks.guess"

STUDY = Study(
    title="SmolLM2-135M finds a number by higher and lower",
    config="configs/smollm2_135m_guess.py",
    settings={
        "num_steps": "30",
        "learner.learning_rate": "5e-6",
        "eval.every_steps": "10",
        "eval.samples_per_prompt": "8",
        "checkpoint.every_steps": "30",
        "log.rollouts_every_steps": "10",
    },
    arms={
        "told": f"data.train.environment={GAME}:Guess eval.sets.guess.environment={GAME}:Guess",
        "silent": f"data.train.environment={GAME}:Silent eval.sets.guess.environment={GAME}:Silent",
    },
    quantities=(WON, *CLIPPED, ENTROPY),
    drawn=("eval/guess/mean@8", "accuracy/mean", "entropy"),
    claims=[Claim(WON, "told", +1, "silent")],
    seeds=(0, 1, 2),
)
