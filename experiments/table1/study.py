"""Table 1 in small: each technique added to the one before, on the mixture of all problems."""

import itertools
import math

import numpy as np

from configs.base import TABLE_1
from dapo_jax.report.quantities import Quantity, final_score, last, mean, tokens_of
from dapo_jax.report.runs import column
from dapo_jax.report.statistics import nan_mean
from experiments.eps_high.study import HALF
from experiments.study import CLIPPED, Claim, Study
from experiments.token_level.study import EARLY_LOOPS

BUDGET_TOKENS = 400_000
WINDOW_TOKENS = 80_000
NO_FILTER = "token_level"  # the row before the last is DAPO without dynamic sampling


def accuracy_at_budget(run) -> float:
    """Percent right at the budget of sampled tokens, over a window around it; NaN beyond the run.

    The window is one of tokens, equal for arms that sample more or fewer of them a step.
    """
    spent, right = (column(run.rows, key) for key in ("sampled_tokens_total", "accuracy/mean"))
    if spent[-1] < BUDGET_TOKENS + WINDOW_TOKENS / 2:
        return math.nan
    return 100 * nan_mean(right[np.abs(spent - BUDGET_TOKENS) <= WINDOW_TOKENS / 2])


STEPS = last("accuracy, %", "accuracy/mean", scale=100)
ROAD, LONG = final_score("road", "mean@8"), final_score("long", "mean@8")
TRUNCATED = mean("truncated, %", "response_tokens/truncated_fraction", scale=100)
TOKENS = Quantity(f"accuracy at {BUDGET_TOKENS // 1000} k tokens, %", accuracy_at_budget)

STUDY = Study(
    title="Table 1 in small",
    config="configs/forks.py",
    settings={
        "num_steps": "60",
        "eval.every_steps": "30",
        "eval.samples_per_prompt": "8",
    },
    arms={preset: f"preset={preset}" for preset in TABLE_1},
    quantities=(
        STEPS,
        TOKENS,
        ROAD,
        LONG,
        last("entropy, nats", "entropy", form="{:.3f}"),
        last("rare road, %", "task/right_road", scale=100),
        TRUNCATED,
        CLIPPED[0],
        EARLY_LOOPS,
        HALF,
        Quantity("sampled tokens, thousands", tokens_of, "{:.0f}"),
    ),
    drawn={
        "accuracy/mean": "accuracy of the sampled responses",
        "entropy": "policy entropy, nats",
        "response_tokens/mean": "response length, tokens",
        "task/right_road": "share of the rare road",
    },
    claims=(
        *(Claim(STEPS, after, +1, before) for before, after in itertools.pairwise(TABLE_1)),
        Claim(STEPS, "dapo", +1, "naive_grpo"),
        Claim(TOKENS, "dapo", +1, "naive_grpo"),
        Claim(TOKENS, "dapo", +1, NO_FILTER),
    ),
    afterwards=(
        Claim(TRUNCATED, "overlong_filtering", +1, "naive_grpo"),
        Claim(TRUNCATED, "soft_overlong", -1, "naive_grpo"),
        Claim(ROAD, "overlong_filtering", +1, "naive_grpo"),
        Claim(EARLY_LOOPS, "token_level", -1, "soft_overlong"),
        Claim(HALF, "token_level", -1, "soft_overlong"),
        *(Claim(LONG, after, +1, before) for before, after in itertools.pairwise(TABLE_1)),
        Claim(LONG, "soft_overlong", +1, "naive_grpo"),
        Claim(LONG, "dapo", +1, "naive_grpo"),
    ),
)
