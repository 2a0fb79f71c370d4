"""Table 1 in small: each technique added to the one before, on the mixture of all problems."""

import itertools
import math

import numpy as np

from configs.base import TABLE_1
from dapo_jax.report.quantities import Quantity, final_score, last, tokens_of
from dapo_jax.report.runs import column
from experiments.study import Claim, Study

BUDGET_TOKENS = 400_000
AVERAGED_STEPS = 10
NO_FILTER = "token_level"  # the row before the last is DAPO without dynamic sampling


def accuracy_at_budget(run) -> float:
    """Percent right in the ten steps before the budget of tokens is spent; NaN if it never is."""
    spent, right = (column(run.rows, key) for key in ("sampled_tokens_total", "accuracy/mean"))
    end = int(np.searchsorted(spent, BUDGET_TOKENS))
    if end == len(spent):
        return math.nan
    return 100 * float(np.mean(right[max(0, end - AVERAGED_STEPS) : end]))


STEPS = last("accuracy, %", "accuracy/mean", scale=100)
TOKENS = Quantity(f"accuracy at {BUDGET_TOKENS // 1000} k tokens, %", accuracy_at_budget)

STUDY = Study(
    title="Table 1 in small",
    config="configs/forks.py",
    settings={
        "num_steps": "60",
        "eval.every_steps": "30",
        "eval.samples_per_prompt": "8",
        "log.rollouts_every_steps": "0",
        "log.samples_every_steps": "0",
    },
    arms={preset: f"preset={preset}" for preset in TABLE_1},
    quantities=(
        STEPS,
        TOKENS,
        final_score("road", "mean@8"),
        final_score("long", "mean@8"),
        last("entropy, nats", "entropy", form="{:.3f}"),
        last("rare road, %", "task/right_road", scale=100),
        Quantity("sampled tokens, thousands", tokens_of, "{:.0f}"),
    ),
    drawn={
        "accuracy/mean": "accuracy of the sampled responses",
        "entropy": "policy entropy, nats",
        "response_tokens/mean": "response length, tokens",
        "task/right_road": "share of the rare road",
    },
    claims=(
        *(Claim(STEPS.name, after, +1, before) for before, after in itertools.pairwise(TABLE_1)),
        Claim(STEPS.name, "dapo", +1, "naive_grpo"),
        Claim(TOKENS.name, "dapo", +1, "naive_grpo"),
        Claim(TOKENS.name, "dapo", +1, NO_FILTER),
    ),
)
