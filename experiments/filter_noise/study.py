"""Dynamic sampling's noise: few groups say anything, few are sampled, the rate does not fall."""

import math

import numpy as np

from dapo_jax.report.quantities import Quantity, last, tokens_of
from dapo_jax.report.statistics import nan_mean
from experiments.filter_noise.pod import pod_hours
from experiments.study import Claim, Study

LAST_STEPS = 20
SCORE = ("road", "mean@8")
BUDGET_HOURS = 8.0  # of the pod: less than the shortest run takes


def last_scores(run) -> np.ndarray:
    """The evaluations after one of the last steps, in percent."""
    of_step = run.evaluations.get(SCORE, {})
    first = max(of_step, default=0) - LAST_STEPS
    return 100 * np.array([score for step, score in of_step.items() if step > first])


def mean_score(run) -> float:
    """Their mean."""
    return nan_mean(last_scores(run))


def score_at_budget(run) -> float:
    """The last evaluation that the pod would have seen within BUDGET_HOURS, in percent."""
    steps = int(np.searchsorted(pod_hours(run), BUDGET_HOURS, side="right"))
    of_step = run.evaluations.get(SCORE, {})
    return 100 * of_step[max(step for step in of_step if step <= steps)]


def total_pod_hours(run) -> float:
    """The hours of the whole run on the pod."""
    return float(pod_hours(run)[-1])


def noise(run) -> float:
    """Their standard deviation about a line, by successive differences d: sqrt(var(d) / 2)."""
    return math.sqrt(np.diff(last_scores(run)).var(ddof=1) / 2)


BUDGET = Quantity(f"road accuracy at {BUDGET_HOURS:g} pod hours, %", score_at_budget)
MEAN = Quantity("road accuracy, last 20 steps, %", mean_score)
SPREAD = Quantity("its noise from one evaluation to the next", noise)

STUDY = Study(
    title="All groups, or the informative ones alone",
    config="configs/forks.py",
    settings={
        "data.train.args": "{'easy': 0.5, 'closed': 0.2, 'road': 0.3}",
        "rollout.num_prompts": "8",
        "rollout.generation_prompts": "48",
        "updates_per_step": "4",
        "num_steps": "60",
        "eval.every_steps": "4",
        "eval.samples_per_prompt": "8",
        "eval.sets.long.k": "0",
    },
    arms={"informative": "", "all": "algo.dynamic_sampling=False"},
    quantities=(
        MEAN,
        SPREAD,
        last("informative groups", "groups/informative"),
        last("groups sampled", "groups/sampled"),
        Quantity("sampled tokens, thousands", tokens_of, "{:.0f}"),
        Quantity("simulated pod hours", total_pod_hours),
        BUDGET,
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
    afterwards=(Claim(BUDGET, "informative", +1, "all"),),
)
