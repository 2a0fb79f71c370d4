"""Token-level loss: what becomes of loops, and of the length of wrong answers."""

import pandas as pd

from dapo_jax.report import statistics
from dapo_jax.report.compare import Quantity, last
from experiments.forks_base.task import LOOP_LINE_TOKENS
from experiments.study import ACCURACY, TOKENS, Claim, Study

EARLY_STEPS = 10  # in which most loops are unlearned


def loop_shares(run) -> pd.Series:
    """Percent of the sampled tokens that lie in loops, step by step."""
    return 100 * LOOP_LINE_TOKENS * run["task/loop_lines"] / run["response_tokens/mean"]


def loop_share(run) -> float:
    """Their mean over the last steps."""
    return statistics.last_mean(loop_shares(run))


def early_loop_share(run) -> float:
    """Their mean over the first ten steps."""
    return loop_shares(run).head(EARLY_STEPS).mean()


def early_wrong(run) -> float:
    """The mean length of wrong answers over those steps."""
    return run["response_tokens/wrong"].head(EARLY_STEPS).mean()


LOOPS = Quantity("tokens in loops, %", loop_share)
WRONG = last("length of wrong answers", "response_tokens/wrong")
EARLY_LOOPS = Quantity("tokens in loops, steps 0 to 9, %", early_loop_share)
EARLY_WRONG = Quantity("length of wrong answers, steps 0 to 9", early_wrong)

STUDY = Study(
    title="Token-level against sample-level loss where long wrong answers are loops",
    config="configs/forks.py",
    settings={
        "data.train.args": "{'road': 1.0, 'luck': 1.0}",
        "algo.overlong_factor": "0.0",
        "num_steps": "40",
        "eval.every_steps": "0",
    },
    arms={
        "token_mean": "algo.loss_aggregation=token_mean",
        "sequence_mean": "algo.loss_aggregation=sequence_mean",
    },
    quantities=(LOOPS, WRONG, EARLY_LOOPS, EARLY_WRONG, ACCURACY, TOKENS),
    drawn=("task/loop_lines", "response_tokens/wrong", "accuracy/mean"),
    claims=[Claim(it, "token_mean", -1, "sequence_mean") for it in (LOOPS, WRONG)],
    post_hoc=[Claim(it, "token_mean", -1, "sequence_mean") for it in (EARLY_LOOPS, EARLY_WRONG)],
)
