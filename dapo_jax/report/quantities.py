"""Numbers that say how a run went, one a run, which the tables over arms and seeds compare."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import numpy as np

from dapo_jax.report import statistics
from dapo_jax.report.runs import Run, column
from dapo_jax.run.metrics import TASK


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number that says how a run went: its name, how to compute and to print it."""

    name: str
    value: Callable[[Run], float]
    form: str = "{:.1f}"


def last_of(run: Run, key: str, *, scale: float = 1.0) -> float:
    """The mean of a metric over the run's last steps (`statistics.last_mean`)."""
    return scale * statistics.last_mean(column(run.rows, key))


def mean_of(run: Run, key: str, *, scale: float = 1.0) -> float:
    """The mean of a metric over all steps."""
    return scale * statistics.nan_mean(column(run.rows, key))


def score_of(run: Run, name: str, score: str) -> float:
    """Percent of a score after the run's last step; NaN where that was not evaluated."""
    return 100 * run.evaluations.get((name, score), {}).get(finished_steps(run), math.nan)


def tokens_of(run: Run) -> float:
    """Thousands of tokens that the run sampled for training."""
    return float(column(run.rows, "sampled_tokens_total")[-1]) / 1e3


def nonzero_updates_of(run: Run) -> float:
    """The updates of the run that changed the weights; NaN where its rows do not count them."""
    return float(np.sum(column(run.rows, "updates") - column(run.rows, "updates_zero_gradient")))


def total_of(run: Run, key: str) -> float:
    """The sum of a metric over all steps; NaN where a step has none."""
    return float(np.sum(column(run.rows, key)))


def finished_steps(run: Run) -> int:
    """How many rollout steps the run has finished."""
    return run.rows[-1]["step"] + 1


def last(name: str, key: str, *, scale: float = 1.0, form: str = "{:.1f}") -> Quantity:
    """The quantity `last_of` a metric."""
    return Quantity(name, functools.partial(last_of, key=key, scale=scale), form)


def mean(name: str, key: str, *, scale: float = 1.0, form: str = "{:.1f}") -> Quantity:
    """The quantity `mean_of` a metric."""
    return Quantity(name, functools.partial(mean_of, key=key, scale=scale), form)


def final_score(name: str, score: str) -> Quantity:
    """The quantity `score_of` an evaluation set."""
    return Quantity(f"{name} {score}, %", functools.partial(score_of, name=name, score=score))


WORK = (  # what a run was given: arms of equally many steps may differ in each
    Quantity("sampled tokens, thousands", tokens_of, "{:.0f}"),
    Quantity("non-zero updates", nonzero_updates_of, "{:.0f}"),
    Quantity("informative groups", functools.partial(total_of, key="groups/informative"), "{:.0f}"),
)
TRAINING = (
    last("train accuracy, %", "accuracy/mean", scale=100),
    last("reward", "reward/mean", form="{:.3f}"),
    last("entropy, nats", "entropy", form="{:.4f}"),
    mean("clipped high, % (all steps)", "clip_fraction/high", scale=100, form="{:.3f}"),
    last("response tokens", "response_tokens/mean"),
    last("truncated, %", "response_tokens/truncated_fraction", scale=100),
    *WORK,
)


def quantities(runs: Mapping[str, Run]) -> list[Quantity]:
    """What is compared: mean@k of training's evaluation sets, training's own, the task's own."""
    found = dict.fromkeys(
        key
        for run in runs.values()
        for key in run.evaluations
        if key[1].startswith("mean@") and " " not in key[0]  # no settings: not of `evaluate`
    )
    scores = [final_score(name, score) for name, score in found]
    measures = dict.fromkeys(key for run in runs.values() for row in run.rows for key in row)
    of_task = [
        last(f"{key.removeprefix(TASK).replace('_', ' ')}, the task's own", key, form="{:.4g}")
        for key in measures
        if key.startswith(TASK)
    ]
    return [*scores, *TRAINING, *of_task]
