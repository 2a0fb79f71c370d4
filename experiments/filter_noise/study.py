"""Dynamic sampling's noise: few groups say anything, few are sampled, the rate does not fall."""

import functools
import math

import numpy as np

from dapo_jax.report.compare import Quantity, last, nonzero_updates
from dapo_jax.report.runs import column
from dapo_jax.report.statistics import nan_mean
from experiments.filter_noise.pod import pod_hours
from experiments.study import Claim, Study

LAST_STEPS = 20
SCORE = ("road", "mean@8")
BUDGET_TOKENS = 160_000  # a little less than the arm on all groups takes, as the hours below
BUDGET_UPDATES = 110  # a little less than the non-zero updates of that arm


def last_scores(run) -> np.ndarray:
    """The evaluations after one of the last steps, in percent."""
    of_step = run.evaluations.get(SCORE, {})
    first = max(of_step, default=0) - LAST_STEPS
    return 100 * np.array([score for step, score in of_step.items() if step > first])


def mean_score(run) -> float:
    """Their mean."""
    return nan_mean(last_scores(run))


def score_at(run, spent, budget: float) -> float:
    """Percent right where `spent`, summed over steps, reaches the budget; NaN beyond the run."""
    of_step = run.evaluations.get(SCORE, {})
    at = [0.0, *spent]  # by finished steps
    if at[-1] < budget:
        return math.nan
    return 100 * float(np.interp(budget, [at[step] for step in of_step], list(of_step.values())))


def score_at_tokens(run) -> float:
    """At BUDGET_TOKENS sampled tokens."""
    return score_at(run, column(run.rows, "sampled_tokens_total"), BUDGET_TOKENS)


def score_at_tokens_after_warmup(run) -> float:
    """At BUDGET_TOKENS sampled tokens after the steps in which the learning rate rises."""
    spent = column(run.rows, "sampled_tokens_total")
    return score_at(run, spent, BUDGET_TOKENS + warmup_tokens(run))


def warmup_tokens(run) -> float:
    """The tokens sampled in those steps."""
    return run.rows[run.config["learner.warmup_steps"] - 1]["sampled_tokens_total"]


def score_at_updates(run) -> float:
    """After BUDGET_UPDATES updates whose gradient is not zero."""
    return score_at(run, np.cumsum(nonzero_updates(run)), BUDGET_UPDATES)


def score_at_hours(run, *, budget: float, **how) -> float:
    """After so many hours of the pod."""
    return score_at(run, pod_hours(run, **how), budget)


def total_pod_hours(run, **how) -> float:
    """The hours of the whole run on the pod."""
    return float(pod_hours(run, **how)[-1])


def noise(run) -> float:
    """Their standard deviation about a line, by successive differences d: sqrt(var(d) / 2)."""
    return math.sqrt(np.diff(last_scores(run)).var(ddof=1) / 2)


AT_TOKENS = Quantity(f"at {BUDGET_TOKENS // 1000} k tokens, %", score_at_tokens)
AFTER_WARMUP = Quantity(
    f"at {BUDGET_TOKENS // 1000} k tokens after warm-up, %", score_at_tokens_after_warmup
)
WARMUP = Quantity("tokens of the warm-up, thousands", lambda run: warmup_tokens(run) / 1e3)
AT_UPDATES = Quantity(f"at {BUDGET_UPDATES} non-zero updates, %", score_at_updates)
# The two ends of the estimate: the fast one, with cancelled groups for nothing, and the slow one,
# with all that was begun of them.
HOURS = [
    quantity
    for name, end, cancelled, budget in (("fewest", 0, 0.0, 8.0), ("most", 1, 1.0, 12.0))
    for quantity in (
        Quantity(
            f"{name} pod hours",
            functools.partial(total_pod_hours, end=end, cancelled=cancelled),
        ),
        Quantity(
            f"at {budget:g} of these hours, %",
            functools.partial(score_at_hours, budget=budget, end=end, cancelled=cancelled),
        ),
    )
]
MEAN = Quantity("road accuracy, last 20 steps, %", mean_score)
SPREAD = Quantity("its noise between evaluations", noise)

STUDY = Study(
    title="All groups, or the informative ones alone",
    config="configs/forks.py",
    settings={
        "data.train.args": "{'easy': 0.5, 'closed': 0.2, 'road': 0.3}",
        "rollout.num_prompts": "8",
        "rollout.generation_prompts": "48",
        "updates_per_step": "4",
        "algo.overlong_factor": "0.0",  # or groups would differ in length alone
        "num_steps": "60",
        "eval.every_steps": "4",
        "eval.samples_per_prompt": "8",
        "eval.sets.long.k": "0",
    },
    arms={"informative": "", "all": "algo.dynamic_sampling=False"},
    quantities=(
        MEAN,
        SPREAD,
        last("informative groups a step, last ten", "groups/informative"),
        last("groups sampled a step, last ten", "groups/sampled"),
        AT_UPDATES,
        AT_TOKENS,
        WARMUP,
        AFTER_WARMUP,
        *HOURS,
    ),
    drawn={
        "eval/road/mean@8": "accuracy on road problems",
        "groups/informative": "informative groups",
        "entropy": "policy entropy, nats",
    },
    claims=(
        Claim(MEAN, "informative", +1, "all"),
        Claim(SPREAD, "informative", -1, "all"),
    ),
    post_hoc=tuple(
        Claim(at, "informative", +1, "all")
        for at in (AT_UPDATES, AT_TOKENS, AFTER_WARMUP, HOURS[1], HOURS[3])
    ),
)
