"""Table 1 in small: each technique added to the one before, on the mixture of all problems."""

import itertools
import math

from configs.base import TABLE_1
from dapo_jax.report.compare import Quantity, mean
from experiments.eps_high.study import HALF
from experiments.study import ACCURACY, CLIPPED, ENTROPY, LONG, ROAD, Claim, Study
from experiments.token_level.study import EARLY_LOOPS

BUDGET_TOKENS = 400_000
WINDOW_TOKENS = 80_000
LATER_TOKENS = (350_000, 450_000, 500_000, 520_000)  # post hoc; naive GRPO takes 562 k at least
BUDGET_GROUPS, WINDOW_GROUPS = 370, 80  # a little less than the rows without filter find
NO_FILTER = "token_level"  # the row before the last is DAPO without dynamic sampling


def accuracy_around(run, spent, budget: float, window: float) -> float:
    """Percent right where `spent` lies within the window around the budget; NaN beyond the run.

    The window is one of what is spent, equal for arms that spend more or less of it a step.
    """
    if spent.iloc[-1] < budget + window / 2:
        return math.nan
    return 100 * run["accuracy/mean"][(spent - budget).abs() <= window / 2].mean()


def accuracy_at(budget: int) -> Quantity:
    """Returns the percent right at a budget of sampled tokens."""

    def value(run) -> float:
        return accuracy_around(run, run["sampled_tokens_total"], budget, WINDOW_TOKENS)

    return Quantity(f"accuracy at {budget // 1000} k tokens, %", value)


def accuracy_at_groups(run) -> float:
    """Percent right at equally many informative groups."""
    spent = run["groups/informative"].cumsum()
    return accuracy_around(run, spent, BUDGET_GROUPS, WINDOW_GROUPS)


TRUNCATED = mean("truncated, %", "response_tokens/truncated_fraction", scale=100)
TOKENS, *LATER = map(accuracy_at, (BUDGET_TOKENS, *LATER_TOKENS))
GROUPS = Quantity(f"accuracy at {BUDGET_GROUPS} informative groups, %", accuracy_at_groups)

STUDY = Study(
    title="Table 1 in small",
    config="configs/forks.py",
    settings={"num_steps": "60", "eval.every_steps": "30", "eval.samples_per_prompt": "8"},
    arms={preset: f"preset={preset}" for preset in TABLE_1},
    quantities=(
        ACCURACY,
        *sorted((TOKENS, *LATER), key=lambda quantity: quantity.name),
        GROUPS,
        ROAD,
        LONG,
        ENTROPY,
        TRUNCATED,
        CLIPPED[0],
        EARLY_LOOPS,
        HALF,
        mean("groups sampled a step", "groups/sampled"),
    ),
    drawn=("accuracy/mean", "entropy", "response_tokens/mean", "task/right_road"),
    over_tokens=True,
    claims=(
        *(Claim(ACCURACY, after, +1, before) for before, after in itertools.pairwise(TABLE_1)),
        Claim(ACCURACY, "dapo", +1, "naive_grpo"),
        Claim(TOKENS, "dapo", +1, "naive_grpo"),
        Claim(TOKENS, "dapo", +1, NO_FILTER),
    ),
    post_hoc=(
        *(Claim(at, "dapo", +1, "naive_grpo") for at in LATER),
        *(Claim(GROUPS, "dapo", +1, than) for than in (NO_FILTER, "naive_grpo")),
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
