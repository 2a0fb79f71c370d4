"""Token-level loss: what becomes of loops, and of the length of wrong answers."""

import numpy as np

from dapo_jax.report import statistics
from dapo_jax.report.compare import Quantity, last
from dapo_jax.report.runs import column
from experiments.forks_base.task import LOOP_LINE_TOKENS
from experiments.study import ACCURACY, TOKENS, Claim, Study

EARLY_STEPS = 10  # in which most loops are unlearned


def loop_shares(run) -> np.ndarray:
    """Percent of the sampled tokens that lie in loops, step by step."""
    lines, tokens = (column(run.rows, key) for key in ("task/loop_lines", "response_tokens/mean"))
    return 100 * LOOP_LINE_TOKENS * lines / tokens


def loop_share(run) -> float:
    """Their mean over the last steps."""
    return statistics.last_mean(loop_shares(run))


def early_loop_share(run) -> float:
    """Their mean over the first ten steps."""
    return statistics.nan_mean(loop_shares(run)[:EARLY_STEPS])


def early_wrong(run) -> float:
    """The mean length of wrong answers over those steps."""
    return statistics.nan_mean(column(run.rows, "response_tokens/wrong")[:EARLY_STEPS])


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
