"""eps_high, and DAPO against naive GRPO, on SmolLM2-135M: sums, while its entropy collapses."""

import functools
import math

import numpy as np

from dapo_jax.report.compare import Quantity, final_score, last
from dapo_jax.report.runs import column
from experiments.study import CLIPPED, Claim, Study

RATE = 5e-6
NO_CLIP = 1e9
BUDGET_TOKENS = 32_000
CLIPS = {"eps_0.2": 0.2, "eps_0.28": 0.28, "no_upper_clip": NO_CLIP}
RATES = {"": RATE, "_rate_x2": 2 * RATE}
NAIVE = "naive_grpo"


def accuracy_area(run, *, budget: int = BUDGET_TOKENS) -> float:
    """Mean accuracy, in percent, of the first `budget` sampled tokens; NaN where the run has fewer.

    Each step's accuracy counts by the tokens that it sampled. All its prompts are new: an epoch is
    longer than the run.
    """
    spent = column(run.rows, "sampled_tokens_total")
    if spent[-1] < budget:
        return math.nan
    tokens = np.diff(np.minimum(spent, budget), prepend=0.0)
    return 100 * float(np.average(column(run.rows, "accuracy/mean"), weights=tokens))


def accuracy_of_steps(run, *, steps: int = 8) -> float:
    """Mean accuracy, in percent, of the first steps."""
    return 100 * float(np.mean(column(run.rows, "accuracy/mean")[:steps]))


AREA = Quantity(f"accuracy, mean of the first {BUDGET_TOKENS // 1000} k tokens, %", accuracy_area)
EQUAL_STEPS = Quantity("accuracy, mean of the first 8 steps, %", accuracy_of_steps)
ENTROPY = last("entropy of trained tokens, nats, last third", "entropy", form="{:.3f}")
score = functools.partial(final_score, "sums")

STUDY = Study(
    title="eps_high on SmolLM2-135M",
    config="configs/smollm2_135m.py",
    settings={
        "num_steps": "8",
        "eval.every_steps": "8",
        "eval.samples_per_prompt": "8",
        "checkpoint.every_steps": "8",
    },
    arms={
        f"{clip}{name}": f"algo.eps_high={eps} learner.learning_rate={rate}"
        for name, rate in RATES.items()
        for clip, eps in CLIPS.items()
    }
    | {
        f"{NAIVE}{name}": f"preset={NAIVE} learner.learning_rate={rate} num_steps=16"
        for name, rate in RATES.items()
    },
    quantities=(AREA, EQUAL_STEPS, score("mean@8"), score("pass@8"), ENTROPY, *CLIPPED),
    drawn={
        "accuracy/mean": "accuracy of the sampled responses",
        "entropy": "policy entropy, nats",
        "clip_fraction/high": "tokens clipped high",
        "response_tokens/mean": "response length, tokens",
    },
    claims=[
        Claim(AREA, f"{above}{name}", +1, f"{below}{name}")
        for name in RATES
        for above, below in (("eps_0.28", "eps_0.2"), ("no_upper_clip", "eps_0.28"))
    ]
    + [
        Claim(quantity, f"eps_0.28{name}", sign, f"{NAIVE}{name}")
        for name in RATES
        for quantity, sign in ((AREA, -1), (EQUAL_STEPS, +1))
    ],
    seeds=(0, 1),
)
