"""eps_high on a task whose right road is rare: entropy, accuracy, and when the road is found."""

import numpy as np

from dapo_jax.report.quantities import Quantity, final_score, finished_steps, last, mean
from dapo_jax.report.runs import column
from experiments.study import Claim, Study

HALF = 0.5


def steps_until_half(run) -> float:
    """The first step that samples the rare road in half of the responses; all steps if none."""
    reached = np.flatnonzero(column(run.rows, "task/right_road") >= HALF)
    return float(reached[0]) if len(reached) else finished_steps(run)


ENTROPY = last("entropy, nats, last 10 steps", "entropy", form="{:.3f}")
ROAD = last("rare road, %", "task/right_road", scale=100)
ACCURACY = final_score("road", "mean@8")

STUDY = Study(
    title="eps_high where the right road is rare",
    config="configs/forks.py",
    settings={
        "data.train.args": "{'road': 1.0}",
        "num_steps": "60",
        "eval.every_steps": "20",
        "eval.samples_per_prompt": "8",
        "eval.sets.long.k": "0",
        "log.rollouts_every_steps": "0",
        "log.samples_every_steps": "0",
    },
    arms={
        f"eps_high={eps}": f"algo.eps_high={eps}" for eps in ("0.2", "0.24", "0.28", "0.4", "0.8")
    },
    quantities=(
        ACCURACY,
        ROAD,
        Quantity("steps until the rare road has half", steps_until_half, "{:.0f}"),
        ENTROPY,
        mean("clipped high, %", "clip_fraction/high", scale=100, form="{:.2f}"),
    ),
    drawn={
        "accuracy/mean": "accuracy of the sampled responses",
        "entropy": "policy entropy, nats",
        "task/right_road": "share of the rare road",
        "clip_fraction/high": "tokens clipped high",
    },
    claims=(
        Claim(ENTROPY, "eps_high=0.28", +1, "eps_high=0.2"),
        Claim(ENTROPY, "eps_high=0.4", +1, "eps_high=0.2"),
        Claim(ROAD, "eps_high=0.28", +1, "eps_high=0.2"),
        Claim(ROAD, "eps_high=0.4", +1, "eps_high=0.2"),
        Claim(ACCURACY, "eps_high=0.28", +1, "eps_high=0.2"),
        Claim(ACCURACY, "eps_high=0.4", +1, "eps_high=0.2"),
    ),
)
