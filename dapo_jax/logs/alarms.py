"""Alarms of a running training: numbers that are not finite, and the table of conditions.

`require_finite` refuses weights before anything is computed from them. An alarm is a condition on
a step's row of metrics.jsonl: a key `alarm/<name>` there, which counts the steps in a row, and a
line for a person. All that an alarm knows of earlier steps is in the row before, which a checkpoint
carries: a resumed run gives the alarms of an undisturbed one. `python -m dapo_jax.logs.alarms`
prints the table.
"""

import collections
import math
import re
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

# On a CPU it is 0. SmolLM2 had less than 1e-5, and 0.007 to 0.018, with sums in two orders.
RATIO_GAP = {"float32": 1e-3, "bfloat16": 3e-2}
EXPLODED = 0.5  # of the entropy of a uniform choice; or
GREW = 10.0  # times the entropy of the run's first step, from
GREW_FROM_NATS = 1.0
COLLAPSED = 0.01  # of the entropy of the run's first step
ANSWERLESS = 0.99  # of the responses
SOLVED = 0.95  # of the responses
BROKEN = 0.5  # share of responses without finite log-probabilities at which a run stops
FORGOTTEN = 0.1  # of the first step's tool calls
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

    name: its key in a row is alarm/<name>. condition: in words, what holds(row) computes of a row
    with the settings beside. text: what is wrong, and which settings to look at, all `filled` in;
    or what makes it of these facts and the config. steps: how many in a row make an alarm.
    """

    name: str
    condition: str
    holds: Callable[[Mapping[str, Any]], bool]
    text: str | Callable[[Mapping[str, Any], ConfigDict], str]
    steps: int = 1


def _is_answerless(row: Mapping) -> bool:
    return row["accuracy/mean"] == 0 and row["no_answer_fraction"] >= ANSWERLESS


def _most_gap(row: Mapping) -> float:
    """The bound of the ratio's gap; none where sampling is cut, which the update leaves out."""
    is_cut = row["rollout.top_p"] < 1 or row["rollout.top_k"] > 0
    by_dtype = math.inf if is_cut else RATIO_GAP[row["model.compute_dtype"]]
    return row["alarms.max_ratio_gap"] or by_dtype


def why_no_answers(row: Mapping[str, Any], config: ConfigDict) -> str:
    """Returns the text, to be `filled`, that says why responses have no answers."""
    if row["response_tokens/truncated_fraction"] >= ANSWERLESS:
        return (
            "{response_tokens/truncated_fraction:.0%} of the responses are cut at "
            "{rollout.max_response_tokens}: raise it, or does the model not end its turn "
            "(tokenizer.chat, tokenizer.stop_tokens)?"
        )
    data = next(iter(mixture_settings(config)))
    why = (
        "Does the prompt say where to put it, in the form that the rules look for? "
        f"({{{data}.template}}, {{{data}.rules}}, {{verifier.rules}}, {{model.path}}; "
        'template=dapo asks for a line "Answer: ...")'
    )
    if row[f"{data}.task"]:
        why = f"Does what {{{data}.task}} looks for fit what this model writes?"
    if row["first_answerless"] > 0:
        why = (
            "Earlier steps had some: the policy has broken. Lower {learner.learning_rate} and "
            "begin with a checkpoint before step {first_answerless}"
        )
    return f"{{no_answer_fraction:.0%}} of the responses have no answer that is found. {why}"


# fmt: off
ALARMS: tuple[Alarm, ...] = (
    Alarm("skipped_updates", "An update was skipped: its loss or gradient is not finite.",
          lambda row: row["updates_skipped"] > 0,
          "{updates_skipped} updates were left out, {updates_skipped_in_a_row} in a row by now: "
          "{bad} was not finite. Look at {learner.learning_rate}, {learner.max_grad_norm}, "
          "{learner.max_skipped_updates}"),
    Alarm("not_finite_samples", "A sampled response has a log-probability that is not finite.",
          lambda row: row["responses_not_finite"] > 0,
          "{responses_not_finite} responses were sampled with log-probabilities that are not "
          "finite: the policy's logits overflow. Lower {learner.learning_rate}"),
    Alarm("empty_updates", "An update has no token with any weight.",
          lambda row: row["updates_empty"] > 0,
          "{updates_empty} updates had no token with any weight. Look at "
          "{algo.overlong_filtering}, {rollout.max_response_tokens}"),
    Alarm("zero_gradients", "The gradient of every update of the step is exactly zero.",
          lambda row: row["updates_zero_gradient"] == row["updates"] > 0,
          "the gradient of all {updates} updates is exactly zero: nothing is learned. Look at "
          "{algo.dynamic_sampling}, {algo.eps_low}, {algo.eps_high}"),
    Alarm("no_answers", f"Accuracy 0, and {ANSWERLESS:.0%} of the responses have no answer.",
          _is_answerless, why_no_answers, steps=2),
    Alarm("nothing_to_learn", "No group has right and wrong responses, though answers are found.",
          lambda row: row["groups/informative"] == 0 and not _is_answerless(row),
          "no group has right and wrong responses, at an accuracy of {accuracy/mean:.1%}: the "
          "problems are too hard or too easy for this model. Look at data.train, {model.path}, "
          "{rollout.max_response_tokens}, {algo.filter_groups}"),
    Alarm("entropy_collapse",
          f"Entropy below alarms.min_entropy, or {COLLAPSED:.0%} of the first step's.",
          lambda row: row["entropy"] < max(
              row["alarms.min_entropy"], COLLAPSED * row["entropy_first"]),
          "the entropy is {entropy:.2g} nats, and was {entropy_first:.2g} at first: the policy "
          "hardly varies its responses. Raise {algo.eps_high}, {rollout.temperature} or lower "
          "{learner.learning_rate}, {alarms.min_entropy}"),
    Alarm("entropy_explosion",
          f"Entropy over {EXPLODED:.0%} of log(vocabulary), or {GREW:g} times the first step's.",
          lambda row: row["entropy"] > min(
              EXPLODED * row["uniform_nats"],
              max(GREW_FROM_NATS, GREW * row["entropy_first"])),
          "the entropy is {entropy:.2f} nats of {uniform_nats:.2f} at most, and was "
          "{entropy_first:.2g} at first: the policy falls apart, or has no trained weights. Look "
          "at {learner.learning_rate}, {model.path}"),
    Alarm("no_calls", f"Fewer than {FORGOTTEN:.0%} of the first step's tool calls.",
          lambda row: row["task/calls"] < FORGOTTEN * row["task/calls_first"],
          "an episode has {task/calls:.2g} tool calls, and had {task/calls_first:.2g} at first: "
          "the policy has given up its tools. Does the reward need them? Look at data.train, "
          "{learner.learning_rate}"),
    Alarm("failed_calls", f"More than {FAILED:.0%} of the tool calls failed.",
          lambda row: row["task/failed_calls"] > FAILED * row["task/calls"],
          "of {task/calls:.2g} tool calls of an episode {task/failed_calls:.2g} failed. Are the "
          "errors the model's, or is time too short? rollouts/*.jsonl.gz has what it read; look "
          "at {rollout.environment_seconds}"),
    Alarm("left_out", f"Environments failed in more than {LOST:.0%} of the groups.",
          lambda row: row["groups/left_out"] > LOST * row["groups/sampled"],
          "environments failed in {groups/left_out} of {groups/sampled} groups, which no update "
          "trains on; rollouts/*.jsonl.gz says why. Look at {rollout.on_environment_failure}, "
          "{rollout.environment_seconds}"),
    Alarm("ratio_gap", f"ratio_gap over alarms.max_ratio_gap (0: {RATIO_GAP}).",
          lambda row: row["ratio_gap"] > _most_gap(row),
          "sampler and learner disagree: the first update's ratio is off by {ratio_gap:.2g} on "
          "average. Have all hosts the same model, data and settings? "
          "algo.old_logprobs = 'learner' takes the gap out of the ratio. Look at {model.kernels}, "
          "{model.compute_dtype}, {alarms.max_ratio_gap}"),
)
# fmt: on
STOPPED = (
    "step {step}: {why}. Look at {learner.learning_rate}, {learner.max_grad_norm}, "
    "{learner.adam_eps}, {learner.max_skipped_updates}, {rollout.temperature}, "
    "{model.compute_dtype}; lower the learning rate and start anew. Saved as {finished_steps} "
    "finished steps: the weights of the last update that was taken, which are finite"
)


def filled(text: str, facts: Mapping[str, Any]) -> str:
    """Fills in facts, as str.format does, and settings, whose names have a dot, as NAME = VALUE."""

    def fill(field: re.Match) -> str:
        name, value = field[1], facts[field[1]]
        return f"{name} = {value!r}" if "." in name else format(value, field[2])

    return re.sub(r"{([\w./]+):?(.*?)}", fill, text)


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
        row = {"response_tokens/truncated_fraction": cut, "no_answer_fraction": share}
        facts = dict(leaves(config)) | row | {"first_answerless": 0}
        return filled(why_no_answers(facts, config), facts)
    if right >= SOLVED:
        return "The model solves these problems: start anew with harder ones"
    return "Raise rollout.max_generation_batches and go on, or start anew with other data"


class Alarms:
    """Looks at each step of a run. `say` is called with the lines for a person."""

    def __init__(
        self, config: ConfigDict, state: TrainState, *, vocab_size: int, say: Callable[[str], None]
    ):
        self._config, self._names, self._say = config, checked_names(state), say
        self._constants = {**dict(leaves(config)), "uniform_nats": math.log(vocab_size)}

    def look(self, row: dict, done: Step, before: Mapping) -> str:
        """Adds the alarms' keys to a step's row; returns why to stop, "" where the run continues.

        before: the row of the step before; {} at the run's first. Says the alarms that begin, those
        that stay, now and then, and the ends.
        """
        in_a_row, most = before.get("updates_skipped_in_a_row", 0), 0
        for update in done.updates:
            in_a_row = 0 if update["taken"] else in_a_row + 1
            most = max(most, in_a_row)
        row |= {"updates_skipped_in_a_row": in_a_row, "alarms": 0}
        for key in ("entropy", "task/calls"):
            if (first := before.get(f"{key}_first", row.get(key))) is not None:
                row[f"{key}_first"] = first
        facts = self._facts(row, done, before)
        for alarm in ALARMS:
            key = f"alarm/{alarm.name}"
            count, was = 0, before.get(key, 0)
            if alarm.holds(facts):
                count = row[key] = was + 1
            elif was > alarm.steps:
                name = alarm.name.replace("_", " ")
                self._say(f"step {row['step']}: no more {name} after {was}")
            if count >= alarm.steps:
                row["alarms"] += 1
                if (count - alarm.steps) % REPEAT_STEPS == 0:
                    since = f" ({count} steps in a row)" if count > 1 else ""
                    text = alarm.text
                    text = text if isinstance(text, str) else text(facts, self._config)
                    self._say(f"alarm at step {row['step']}{since}: {filled(text, facts)}")
        samples = row["groups/sampled"] * self._config.rollout.group_size
        if most >= self._config.learner.max_skipped_updates:
            why = f"{most} updates in a row were left out: {facts['bad']} was not finite"
        elif (share := row["responses_not_finite"] / samples) >= BROKEN:
            why = f"{share:.0%} of the responses have log-probabilities that are not finite"
        else:
            return ""
        return filled(STOPPED, facts | {"why": why, "finished_steps": row["step"] + 1})

    def _facts(self, row: Mapping, done: Step, before: Mapping) -> Mapping[str, Any]:
        """Returns the row, the settings, and what else texts tell.

        What is absent is NaN, of which no condition holds.
        """
        skipped = (self._names[int(it["bad"])] for it in done.updates if not it["taken"])
        facts = collections.defaultdict(lambda: math.nan, self._constants | row)
        facts["bad"] = next(skipped, "") if np.isfinite(done.reward_PG).all() else "a reward"
        facts["first_answerless"] = row["step"] - before.get("alarm/no_answers", 0)
        return facts


if __name__ == "__main__":
    print("\n".join(f"{alarm.name:20}{alarm.condition}" for alarm in ALARMS))
