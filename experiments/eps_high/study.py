"""eps_high where the right road is rare: when it is found, and at what entropy and accuracy."""

import math

import numpy as np

from dapo_jax.report.compare import Quantity, last
from dapo_jax.report.runs import tokens_before
from experiments.study import ALL_STEPS, CLIPPED, ROAD, Claim, Study


def half_reached(run) -> float:
    """The step, between two, at which half of the responses take the rare road; NaN for never.

    A straight line joins the shares of successive steps.
    """
    share = run["task/right_road"]
    if not (share >= 0.5).any():
        return math.nan
    reached = (share >= 0.5).idxmax()
    around = [max(reached - 1, 0), reached]
    return float(np.interp(0.5, share[around], around))


def steps_until_half(run) -> float:
    """The steps until then; all of the run's if they never do."""
    half = half_reached(run)
    return float(run.finished_steps) if math.isnan(half) else half


def tokens_until_half(run) -> float:
    """Thousands of tokens sampled until then, on a straight line between two steps."""
    spent = tokens_before(run)
    return float(np.interp(steps_until_half(run), spent.index, spent)) / 1e3


def entropy_at_half(run) -> float:
    """The entropy at that point, on a straight line between the two steps; NaN if it never is."""
    return float(np.interp(half_reached(run), run["entropy"].index, run["entropy"]))


HALF = Quantity("steps until the rare road has half", steps_until_half, "{:.2f}")
TOKENS_HALF = Quantity("tokens until it has half, thousands", tokens_until_half, "{:.0f}")
ENTROPY_AT_HALF = Quantity("entropy when it has half, nats", entropy_at_half, "{:.3f}")
ENTROPY = last("entropy, nats, last third", "entropy", form="{:.3f}")
EPS = (0.2, 0.24, 0.28, 0.4, 0.8)
RATE = 2e-4
NO_CLIP = "no_upper_clip"
FASTER = {f"eps_high=0.2_rate_x{times}": times for times in (1.5, 2)}

STUDY = Study(
    title="eps_high where the right road is rare",
    config="configs/forks.py",
    settings={
        "data.train.args": "{'road': 1.0}",
        "eval.sets.long.k": "0",
        "eval.every_steps": "20",
        "eval.samples_per_prompt": "8",
        "rollout.num_prompts": "32",
        "rollout.generation_prompts": "64",
        "updates_per_step": "16",
        "learner.learning_rate": str(RATE),
        "num_steps": "20",
    },
    arms={f"eps_high={eps}": f"algo.eps_high={eps}" for eps in EPS}
    | {NO_CLIP: "algo.eps_high=1e9"}
    | {
        arm: f"algo.eps_high=0.2 learner.learning_rate={times * RATE:g}"
        for arm, times in FASTER.items()
    },
    quantities=(
        HALF,
        TOKENS_HALF,
        ENTROPY_AT_HALF,
        ALL_STEPS,
        ROAD,
        last("rare road, %, last third", "task/right_road", scale=100),
        ENTROPY,
        *CLIPPED,
    ),
    drawn=("task/right_road", "accuracy/mean", "entropy", "clip_fraction/high"),
    claims=(
        *(Claim(HALF, f"eps_high={eps}", -1, "eps_high=0.2") for eps in EPS[1:]),
        *(Claim(ENTROPY, f"eps_high={eps}", +1, "eps_high=0.2") for eps in EPS[1:]),
        *(Claim(ROAD, f"eps_high={eps}", +1, "eps_high=0.2") for eps in EPS[1:]),
    ),
    post_hoc=[
        Claim(quantity, f"eps_high={eps}", sign, "eps_high=0.2")
        for quantity, sign in ((ENTROPY_AT_HALF, +1), (ALL_STEPS, +1), (TOKENS_HALF, -1))
        for eps in EPS[1:]
    ]
    + [
        Claim(quantity, arm, sign, than)
        for quantity, sign in ((HALF, -1), (ALL_STEPS, +1))
        for arm, than in (
            *((arm, "eps_high=0.2") for arm in (NO_CLIP, *FASTER)),
            *((arm, "eps_high=0.28") for arm in FASTER),
            (NO_CLIP, "eps_high=0.8"),
        )
    ],
)
