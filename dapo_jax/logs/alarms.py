"""Alarms of a running training: numbers that are not finite, and the table of conditions.

`require_finite` refuses weights before anything is computed from them. An alarm is a condition on
a step's row of metrics.jsonl: a key `alarm/<name>` there, which counts the steps in a row, and a
line for a person. All that an alarm knows of earlier steps is in the row before, which a checkpoint
carries: a resumed run gives the alarms of an undisturbed one. `python -m dapo_jax.logs.alarms`
prints the table.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from configs.base import leaves, mixture_settings
from dapo_jax.learner import TrainState, all_finite, checked_names, named
from dapo_jax.logs.metrics import Step
from dapo_jax.process import hosts
from dapo_jax.types import Rollouts

# Of a healthy run of SmolLM2 on a CPU: below 1e-5, and 0.007 to 0.018.
RATIO_GAP = {"float32": 1e-3, "bfloat16": 3e-2}
EXPLODED = 0.5  # of the entropy of a uniform choice; or
GREW = 10.0  # times the entropy of the run's first step, from
GREW_FROM_NATS = 1.0
COLLAPSED = 0.01  # of the entropy of the run's first step
ANSWERLESS = 0.99  # of the responses
SOLVED = 0.95  # of the responses
BROKEN = 0.5  # share of responses without finite log-probabilities at which a run stops
FORGOTTEN = 0.1  # of the first step's tool calls
CALLS = "task/calls"
FAILED = 0.5  # of the tool calls
LOST = 0.05  # of the groups
REPEAT_STEPS = 20  # an alarm that stays is said again every so many steps


def require_finite(tree, where: str, *, advice: str = "give another one") -> None:
    """Raises ValueError for the first array of a tree with a value that is not finite.

    The check runs where the arrays are, one after the other; on several processes all call it.
    where: what the arrays are, as a message begins.
    """
    # Not in one program: on a CPU what it compares of all arrays would lie in memory at once.
    for name, leaf in named(tree).items():
        if not hosts.fetch(_is_finite(leaf)):
            raise ValueError(f"{where}: {name} has values that are not finite; {advice}")


_is_finite = jax.jit(all_finite)


def require_finite_state(state: TrainState, step: int) -> None:
    """Refuses a step's new state that is not finite (ValueError), before it is saved or sampled."""
    advice = (
        "the newest checkpoint is finite: give the command again to go on with it, and if it ends "
        "here again, start anew with a lower learner.learning_rate, learner.weight_decay or "
        "learner.max_grad_norm"
    )
    require_finite(state, f"step {step}: the new state", advice=advice)


class Alarm(NamedTuple):
    """One alarm.

    name: its key in a row is alarm/<name>. condition: in words, what holds(row, alarms) computes of
    a step's row. text(row, alarms): what is wrong, and which settings to look at. steps: how many
    of those in a row make an alarm.
    """

    name: str
    condition: str
    holds: Callable[[Mapping[str, Any], "Alarms"], bool]
    text: Callable[[Mapping[str, Any], "Alarms"], str]
    steps: int = 1


def _is_answerless(row, _=None) -> bool:
    return row["accuracy/mean"] == 0 and row["no_answer_fraction"] >= ANSWERLESS


def _no_answers(row, run: "Alarms") -> str:
    cut, share = row["response_tokens/truncated_fraction"], row["no_answer_fraction"]
    since = row.get("alarm/no_answers", 0)
    if cut < ANSWERLESS and since <= row["step"]:
        return (
            f"{share:.0%} of the responses have no answer that is found, and earlier steps had "
            f"some: the policy has broken. Lower {run.values('learner.learning_rate')} and begin "
            f"with a checkpoint before step {row['step'] + 1 - since}"
        )
    return _no_answer_advice(run.config, cut, share)


def _no_answer_advice(config: ConfigDict, cut: float, share: float) -> str:
    """Says why there are no answers. cut, share: of the responses; the latter have none."""
    if cut >= ANSWERLESS:
        return (
            f"{cut:.0%} of the responses are cut at rollout.max_response_tokens = "
            f"{config.rollout.max_response_tokens}: raise it, or does the model not end its turn "
            "(tokenizer.chat, tokenizer.stop_tokens)?"
        )
    key, settings = next(iter(mixture_settings(config).items()))
    asks = f"Does {key}.task = {settings['task']!r} grade what this model writes?"
    if not settings["task"]:
        asks = (
            "Does the prompt say where to put it, in the form that the rules look for? "
            f"({key}.template = {settings['template']!r}, rules = {settings['rules']!r}, "
            f'model.path = {str(config.model.path)!r}; template=dapo asks for a line "Answer: ...")'
        )
    return f"{share:.0%} of the responses have no answer that is found. {asks}"


def _entropy_bound(row, run: "Alarms") -> float:
    return max(run.config.alarms.min_entropy, COLLAPSED * row.get("entropy_first", 0.0))


def _has_exploded(row, run: "Alarms") -> bool:
    grown = max(GREW_FROM_NATS, GREW * row.get("entropy_first", 0.0))
    return row.get("entropy", 0.0) > min(grown, EXPLODED * run.uniform_nats)


# fmt: off
ALARMS: tuple[Alarm, ...] = (
    Alarm("skipped_updates", "An update was skipped: its loss or gradient is not finite.",
          lambda row, run: row["updates_skipped"] > 0, lambda row, run: (
        f"{row['updates_skipped']} of {row['updates_skipped'] + row['updates']} updates were left "
        f"out, {row['updates_skipped_in_a_row']} in a row by now: {run.bad} was not finite. Look "
        "at " + run.values("learner.learning_rate", "learner.max_grad_norm",
                           "learner.max_skipped_updates")
    )),
    Alarm("not_finite_samples", "A sampled response has a log-probability that is not finite.",
          lambda row, run: row["responses_not_finite"] > 0, lambda row, run: (
        f"{row['responses_not_finite']} responses were sampled with log-probabilities that are not "
        "finite: the policy's logits overflow. Lower " + run.values("learner.learning_rate")
    )),
    Alarm("empty_updates", "An update has no token with any weight.",
          lambda row, run: row["updates_empty"] > 0, lambda row, run: (
        f"{row['updates_empty']} updates had no token with any weight. Look at "
        + run.values("algo.overlong_filtering", "rollout.max_response_tokens")
    )),
    Alarm("zero_gradients", "The gradient of every update of the step is exactly zero.",
          lambda row, run: row["updates_zero_gradient"] == row["updates"] > 0,
          lambda row, run: (
        f"the gradient of all {row['updates']} updates is exactly zero: nothing is learned. Look "
        "at " + run.values("algo.dynamic_sampling", "algo.eps_low", "algo.eps_high")
    )),
    Alarm("no_answers", f"Accuracy 0, and {ANSWERLESS:.0%} of the responses have no answer.",
          _is_answerless, _no_answers, steps=2),
    Alarm("nothing_to_learn", "No group has right and wrong responses, though answers are found.",
          lambda row, run: row["groups/informative"] == 0 and not _is_answerless(row),
          lambda row, run: (
        f"no group has right and wrong responses, at an accuracy of {row['accuracy/mean']:.1%}: "
        "the problems are too hard or too easy for this model. Look at data.train, "
        + run.values("model.path", "rollout.max_response_tokens", "algo.filter_groups")
    )),
    Alarm("entropy_collapse",
          f"Entropy below alarms.min_entropy, or {COLLAPSED:.0%} of the first step's.",
          lambda row, run: row.get("entropy", math.inf) < _entropy_bound(row, run),
          lambda row, run: (
        f"the entropy is {row['entropy']:.2g} nats, below {_entropy_bound(row, run):.2g}: the "
        "policy hardly varies its responses. Raise "
        + run.values("algo.eps_high", "rollout.temperature") + " or lower "
        + run.values("learner.learning_rate", "alarms.min_entropy")
    )),
    Alarm("entropy_explosion",
          f"Entropy over {EXPLODED:.0%} of log(vocabulary), or {GREW:g} times the first step's.",
          _has_exploded, lambda row, run: (
        f"the entropy is {row['entropy']:.2f} nats of {run.uniform_nats:.2f} at most, and was "
        f"{row['entropy_first']:.2g} at first: the policy falls apart, or has no trained weights. "
        "Look at " + run.values("learner.learning_rate", "model.path")
    )),
    Alarm("no_calls", f"Fewer than {FORGOTTEN:.0%} of the first step's tool calls.",
          lambda row, run: row.get(CALLS, 0) < FORGOTTEN * row.get(f"{CALLS}_first", 0),
          lambda row, run: (
        f"an episode has {row[CALLS]:.2g} tool calls, and had {row[f'{CALLS}_first']:.2g} at first:"
        " the policy has given up its tools. Does the reward need them? Look at data.train, "
        + run.values("learner.learning_rate")
    )),
    Alarm("failed_calls", f"More than {FAILED:.0%} of the tool calls failed.",
          lambda row, run: row.get("task/failed_calls", 0) > FAILED * row.get(CALLS, math.inf),
          lambda row, run: (
        f"{row['task/failed_calls'] / row[CALLS]:.0%} of the tool calls failed, "
        f"{row['task/timeouts'] / row[CALLS]:.0%} by time. Are the errors the model's? "
        "rollouts/*.jsonl.gz has what it read; look at "
        + run.values("rollout.environment_seconds")
    )),
    Alarm("left_out", f"Environments failed in more than {LOST:.0%} of the groups.",
          lambda row, run: row.get("groups/left_out", 0) > LOST * row["groups/sampled"],
          lambda row, run: (
        f"environments failed in {row['groups/left_out']} of {row['groups/sampled']} groups, which "
        "no update trains on; rollouts/*.jsonl.gz says why. Look at "
        + run.values("rollout.on_environment_failure", "rollout.environment_seconds")
    )),
    Alarm("ratio_gap", f"ratio_gap over alarms.max_ratio_gap (0: {RATIO_GAP}).",
          lambda row, run: row.get("ratio_gap", 0.0) > run.ratio_gap, lambda row, run: (
        f"sampler and learner disagree: the first update's ratio is off by {row['ratio_gap']:.2g} "
        f"on average, over {run.ratio_gap:.2g}. Have all hosts the same model, data and settings? "
        "algo.old_logprobs = 'learner' takes the gap out of the ratio. Look at "
        + run.values("model.kernels", "model.compute_dtype", "alarms.max_ratio_gap")
    )),
)
# fmt: on


def cap_advice(config: ConfigDict, rollouts: Rollouts) -> str:
    """Says what to do where the cap on generation left too few informative groups."""
    responses = [r for group in rollouts.sampled for r in group.responses]
    cut = np.mean([not r.stopped for r in responses])
    share = np.mean([r.verdict.has_no_answer for r in responses])
    right = rollouts.correct_PG.mean()
    if any(group.is_left_out for group in rollouts.sampled):
        return "Environments failed in some of them (rollout.on_environment_failure)"
    score_PG = rollouts.score_PG[~rollouts.informative]
    if (np.ptp(score_PG, axis=1) > 0).any() and config.algo.filter_groups != "reward":
        return "Rewards differ in groups of one correctness: algo.filter_groups=reward takes them"
    if right == 0 and max(cut, share) >= ANSWERLESS:
        return _no_answer_advice(config, cut, share)
    if right >= SOLVED:
        return "The model solves these problems: start anew with harder ones"
    return "Raise rollout.max_generation_batches and go on, or start anew with other data"


class Alarms:
    """Looks at each step of a run. `say` is called with the lines for a person."""

    def __init__(
        self, config: ConfigDict, state: TrainState, *, vocab_size: int, say: Callable[[str], None]
    ):
        self.config, self.uniform_nats = config, math.log(vocab_size)  # nats of a uniform choice
        self.bad = ""  # the value that was not finite in the step
        self._names, self._say = checked_names(state), say

    @property
    def ratio_gap(self) -> float:
        """The bound of the ratio's gap; none where sampling is cut, which the update leaves out."""
        r, bound = self.config.rollout, self.config.alarms.max_ratio_gap
        is_cut = r.top_p < 1 or r.top_k > 0
        return bound or (math.inf if is_cut else RATIO_GAP[self.config.model.compute_dtype])

    def values(self, *names: str) -> str:
        """Shows settings with their values."""
        value = dict(leaves(self.config))
        return ", ".join(f"{name} = {value[name]!r}" for name in names)

    def look(self, row: dict, done: Step, before: Mapping) -> str:
        """Adds the alarms' keys to a step's row; returns why to stop, "" where the run continues.

        before: the row of the step before; {} at the run's first. Says the alarms that begin, those
        that stay, now and then, and the ends.
        """
        in_a_row, most, self.bad = before.get("updates_skipped_in_a_row", 0), 0, ""
        for update in done.updates:
            in_a_row = 0 if update["taken"] else in_a_row + 1
            most = max(most, in_a_row)
            if not update["taken"]:
                self.bad = self.bad or self._names[int(update["bad"])]
        if not np.isfinite(done.reward_PG).all():
            self.bad = "a reward"
        row |= {"updates_skipped_in_a_row": in_a_row, "alarms": 0}
        for key in ("entropy", CALLS):
            if (first := before.get(f"{key}_first", row.get(key))) is not None:
                row[f"{key}_first"] = first
        for alarm in ALARMS:
            key = f"alarm/{alarm.name}"
            count, was = 0, before.get(key, 0)
            if alarm.holds(row, self):
                count = row[key] = was + 1
            elif was > alarm.steps:
                name = alarm.name.replace("_", " ")
                self._say(f"step {row['step']}: no more {name} after {was}")
            if count >= alarm.steps:
                row["alarms"] += 1
                if (count - alarm.steps) % REPEAT_STEPS == 0:
                    since = f" ({count} steps in a row)" if count > 1 else ""
                    self._say(f"alarm at step {row['step']}{since}: {alarm.text(row, self)}")
        return self._reason_to_stop(row, most)

    def _reason_to_stop(self, row: Mapping, skipped: int) -> str:
        step, limit = row["step"], self.config.learner.max_skipped_updates
        samples = row["groups/sampled"] * self.config.rollout.group_size
        if skipped >= limit:
            what = f"{skipped} updates in a row were left out: {self.bad} was not finite"
        elif (share := row["responses_not_finite"] / samples) >= BROKEN:
            what = f"{share:.0%} of the responses have log-probabilities that are not finite"
        else:
            return ""
        settings = ("learning_rate", "max_grad_norm", "adam_eps", "max_skipped_updates")
        return (
            f"step {step}: {what}. Look at {self.values(*(f'learner.{s}' for s in settings))}, "
            f"{self.values('rollout.temperature', 'model.compute_dtype')}; lower the learning rate "
            f"and start anew. Saved as {step + 1} finished steps: the weights of the last update "
            "that was taken, which are finite"
        )


if __name__ == "__main__":
    print("\n".join(f"{alarm.name:20}{alarm.condition}" for alarm in ALARMS))
