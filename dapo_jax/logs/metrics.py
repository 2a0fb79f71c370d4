"""The table of metrics: what each one means, how a step computes it, where a person sees it.

A new metric is a row of METRICS and nothing else; metrics.jsonl, TensorBoard, the live line, the
summary and the curves follow. `python -m dapo_jax.logs.metrics` prints the table. log.metrics names
your own: "module:function" of a Step. Host only: no jax.
"""

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.outside import imported, running
from dapo_jax.types import GAVE_UP, Response, Rollouts, RolloutStats

STATE, TOKENS, LOGP, VERDICTS = "digest/state", "digest/tokens", "digest/logp", "digest/verdicts"
# The keys of a row that are no metrics: text each, in no curve.
DIGESTS = {
    STATE: "Of the digests of all weights and moments after the step, a checkpoint's `arrays`.",
    TOKENS: "Of all sampled tokens.",
    LOGP: "Of the bits of their log-probabilities.",
    VERDICTS: "Of all verdicts and rewards.",
}


@dataclasses.dataclass(frozen=True)
class Step:
    """The facts of a finished rollout step: all that a metric may be computed from.

    config: the config. rollouts: all that was sampled, and which of it was kept. reward_PG: of all
    sampled responses, by group. updates: what `learner.update` returned, a dict a mini-batch.
    sampled_tokens_total: of the whole run so far. evaluation: `eval/<set>/<score>` of the policy
    that the step sampled, where that was evaluated. seconds: wall time of each phase so far, and in
    "total".
    """

    config: Any
    step: int
    rollouts: Rollouts
    reward_PG: np.ndarray
    updates: Sequence[Mapping[str, Any]]
    learning_rate: float
    evaluation: Mapping[str, float]
    sampled_tokens_total: int = 0
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def stats(self) -> RolloutStats:
        """The work that sampling took."""
        return self.rollouts.stats

    @property
    def responses(self) -> list[Response]:
        """All sampled responses, in the order of reward_PG.ravel()."""
        return [response for group in self.rollouts.sampled for response in group.responses]

    @property
    def taken(self) -> list[Mapping[str, Any]]:
        """The updates that changed the weights: those in which all was finite."""
        return [update for update in self.updates if update["taken"]]

    @property
    def gave_up(self) -> dict[str, int]:
        """Responses whose grade nobody knows, by the status that says why; see `GAVE_UP`."""
        count_of = collections.Counter(it.verdict.status for it in self.responses)
        return {status: count_of[status] for status in GAVE_UP if count_of[status]}

    @property
    def partial_rollouts(self) -> bool:
        """Returns whether groups go on from step to step."""
        return self.config.rollout.partial_rollout_steps > 0

    @property
    def partial_tokens(self) -> int:
        """Tokens of the groups that go on in the next step."""
        return sum(group.sampled_tokens for group in self.rollouts.partial)

    @property
    def spent_tokens(self) -> int:
        """Tokens sampled for training, now or partial here, that no later step can train on."""
        return self.stats.sampled_tokens + self.rollouts.continued_tokens - self.partial_tokens

    @property
    def aging(self) -> list[Response]:
        """The trained responses where groups go on from step to step; elsewhere none."""
        kept = self.rollouts.kept if self.partial_rollouts else ()
        return [response for p in kept for response in self.rollouts.sampled[p].responses]

    def mean_age(self, count: Callable[[Response], int]) -> float | None:
        """Averages over the trained tokens; None without partial rollouts."""
        return sum(map(count, self.aging)) / self.rollouts.kept_tokens if self.aging else None

    def mean_length(self, *, correct: bool) -> float | None:
        """Mean tokens of the right or of the wrong responses; None where there are none."""
        length_N = self.rollouts.length_PG[self.rollouts.correct_PG == correct]
        return length_N.mean() if length_N.size else None

    def per_second(self, tokens: int, phase: str) -> float:
        """Tokens a second of a phase's wall time."""
        return tokens / max(self.seconds.get(phase, 0.0), 1e-9)


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric: all that the files, the display and the report need to know of it.

    key: its name in metrics.jsonl and TensorBoard. unit: a "share" is drawn in percent. value:
    computes it; None where a step has none. Without a function the metric is the number that a
    step already has under this key: the mean over the updates of what `update` returned, the
    seconds of a phase or of a part of sampling, a score. form: how a person reads it, as wide as
    the live line's column. panel: the title above its curve and others. line, summary: its label
    in the live line, and in the summary of first against last; "" leaves it out.
    higher_is_better: whether the summary also has its best step.
    """

    key: str
    unit: str
    meaning: str
    value: Callable[[Step], Any] | None = None
    form: str = "{:z.4g}"
    panel: str = ""
    line: str = ""
    summary: str = ""
    higher_is_better: bool = False

    def text(self, value: float | None) -> str:
        """The value as a person reads it, as wide as the format says; '-' where it is missing."""
        if value is None:
            return "-".rjust(len(self.form.format(0)))
        whole = isinstance(value, int) and self.form == Metric.form
        return str(value) if whole else self.form.format(value)


NOT_AVERAGED = ("taken", "bad", "empty", "on_policy")  # of what an update returns
TASK = "task/"  # begins the keys of what a task measures of its own
SECONDS = "seconds a step"  # the panel of the parts of seconds/total
CLIPPED = "clipped tokens"  # the panel of the clip fractions

# fmt: off
METRICS: list[Metric] = [
    Metric("step", "", "The rollout step, from 0.", lambda s: s.step),
    Metric("prompts_seen", "prompts", "Prompts of the stream that the run has gone through.",
           lambda s: s.rollouts.cursor),
    Metric("sampled_tokens_total", "tokens", "Tokens sampled for training by the run so far.",
           lambda s: s.sampled_tokens_total),
    Metric("reward/mean", "reward", "Mean reward (Eq. 7 and 13) of the sampled responses.",
           lambda s: s.reward_PG.mean(), form="{:+z6.3f}", panel="mean reward", line="reward",
           summary="reward", higher_is_better=True),
    Metric("accuracy/mean", "share", "Correct share of the sampled responses.",
           lambda s: s.rollouts.correct_PG.mean(), form="{:6.1%}", panel="accuracy",
           line="accuracy", summary="train accuracy", higher_is_better=True),
    Metric("response_tokens/mean", "tokens", "Mean length of the sampled responses.",
           lambda s: s.rollouts.length_PG.mean(), form="{:7.1f}",
           panel="mean response length, tokens", line="tokens", summary="response tokens"),
    Metric("response_tokens/correct", "tokens", "Mean length of the right responses.",
           lambda s: s.mean_length(correct=True), panel="length of right and wrong, tokens"),
    Metric("response_tokens/wrong", "tokens", "Mean length of the wrong responses.",
           lambda s: s.mean_length(correct=False), panel="length of right and wrong, tokens"),
    Metric("response_tokens/max", "tokens", "Length of the longest response.",
           lambda s: s.rollouts.length_PG.max()),
    Metric("response_tokens/truncated_fraction", "share", "Responses that reached the limit.",
           lambda s: 1 - np.mean([r.stopped for r in s.responses]), form="{:6.1%}",
           panel="truncated responses", line="truncated", summary="truncated"),
    Metric("no_answer_fraction", "share", "Responses in which no answer is found.",
           lambda s: np.mean([r.verdict.has_no_answer for r in s.responses])),
    Metric("responses_not_finite", "responses", "Those with a log-probability that is not finite.",
           lambda s: sum(not math.isfinite(r.behavior_logp_T.sum()) for r in s.responses)),
    Metric("verdicts/gave_up", "responses",
           "Responses without a verdict; `verdicts/<status>` counts each kind.",
           lambda s: sum(s.gave_up.values())),
    Metric("groups/sampled", "groups", "Groups up to the last one kept, as in the metrics above.",
           lambda s: len(s.rollouts.sampled)),
    Metric("groups/informative", "groups",
           "Groups with right and wrong responses (Eq. 11; see `algo.filter_groups`).",
           lambda s: s.rollouts.informative.sum(), panel="groups"),
    Metric("groups/all_correct", "groups", "Groups with right responses only.",
           lambda s: s.rollouts.correct_PG.all(axis=1).sum(), panel="groups"),
    Metric("groups/all_wrong", "groups", "Groups with wrong responses only.",
           lambda s: (~s.rollouts.correct_PG).all(axis=1).sum(), panel="groups"),
    Metric("groups/left_out", "groups", "Groups of which an environment failed.",
           lambda s: sum(group.is_left_out for group in s.rollouts.sampled)),
    Metric("groups/discarded", "groups", "Sampled groups that the update does not train on.",
           lambda s: len(s.rollouts.sampled) - len(s.rollouts.kept)),
    Metric("groups/cancelled", "groups", "Unfinished groups when the step had enough.",
           lambda s: s.rollouts.issued - len(s.rollouts.sampled)),
    Metric("generation_batches", "batches", "The sampled groups in generation batches, rounded up.",
           lambda s: -(-len(s.rollouts.sampled) // s.config.rollout.generation_prompts)),
    Metric("engine/occupancy", "share",
           "Slot-steps of decoding that sampled a token, evaluation included.",
           lambda s: s.stats.busy_slot_steps / max(s.stats.slot_steps, 1)),
    Metric("engine/occupancy_while_waiting", "share", "The same, while requests waited for slots.",
           lambda s: s.stats.busy_waiting_slot_steps / max(s.stats.waiting_slot_steps, 1)),
    Metric("engine/decode_steps", "steps", "Decode steps of the rollout.",
           lambda s: s.stats.decode_steps),
    Metric("engine/requests", "responses", "Requested responses, cancelled ones included.",
           lambda s: s.stats.requests),
    Metric("engine/prefilled_prompts", "prompts", "Prefilled prompts, evaluation included.",
           lambda s: s.stats.prefilled_prompts),
    Metric("engine/cache_use", "share", "Greatest share of the cache's pages in use.",
           lambda s: s.stats.cache_use),
    Metric("engine/drawn_tokens", "tokens", "Tokens sampled for training, discarded ones included.",
           lambda s: s.stats.sampled_tokens),
    Metric("engine/unused_tokens_fraction", "share",
           "Tokens that no update trains on; those that the next step continues do not count.",
           lambda s: 1 - s.rollouts.kept_tokens / max(s.spent_tokens, 1)),
    Metric("partial_rollouts/groups", "groups", "Groups that continue in the next step.",
           lambda s: len(s.rollouts.partial) if s.partial_rollouts else None, panel="groups"),
    Metric("partial_rollouts/tokens", "tokens", "Tokens of these groups so far.",
           lambda s: s.partial_tokens if s.partial_rollouts else None),
    Metric("staleness/tokens_fraction", "share", "Trained tokens that an earlier policy sampled.",
           lambda s: s.mean_age(lambda r: r.stale_tokens), form="{:6.1%}", panel="staleness",
           summary="stale tokens"),
    Metric("staleness/mean_steps", "steps", "Mean age of the trained tokens.",
           lambda s: s.mean_age(lambda r: sum(map(r.sampled_before, r.ends)))),
    Metric("staleness/max_steps", "steps", "Age of the oldest trained token.",
           lambda s: max((sum(map(bool, r.ends)) for r in s.aging), default=None)),
    Metric("updates", "updates", "Updates taken; the metrics below are means over them.",
           lambda s: len(s.taken)),
    Metric("updates_skipped", "updates", "Updates skipped because a value was not finite.",
           lambda s: len(s.updates) - len(s.taken)),
    Metric("updates_skipped_in_a_row", "updates", "Consecutive skipped updates up to here."),
    Metric("updates_empty", "updates", "Updates in which no token has any weight.",
           lambda s: sum(bool(update.get("empty")) for update in s.updates)),
    Metric("updates_zero_gradient", "updates", "Updates taken whose gradient is exactly zero.",
           lambda s: sum(update["grad_norm"] == 0 for update in s.taken)),
    Metric("alarms", "", "Active alarms; `alarm/<name>` counts the consecutive steps of each."),
    Metric("loss", "loss", "The loss (Eq. 8)."),
    Metric("entropy", "nats", "Entropy of the policy at the trained tokens.", form="{:5.3f}",
           panel="policy entropy, nats", line="entropy", summary="entropy"),
    Metric("entropy_first", "nats", "Entropy of the run's first step with an update."),
    Metric("mean_prob", "probability", "Probability of the trained tokens.", form="{:.3f}",
           panel="mean token probability", summary="mean token probability"),
    Metric("kl", "nats", "KL divergence from the start policy; 0 if its coefficient is 0."),
    Metric("clip_fraction/high", "share", "Tokens clipped at the upper bound of the ratio.",
           panel=CLIPPED),
    Metric("clip_fraction/low", "share", "Tokens clipped at the lower bound. Where both clip none, "
           "bfloat16 weights may not move: learner.spread_start.", panel=CLIPPED),
    Metric("clip_fraction/dual", "share", "Tokens held by the dual clip.", panel=CLIPPED),
    Metric("clip_fraction/tis", "share",
           "Tokens whose weight of learner to sampler `algo.tis_cap` holds.", panel=CLIPPED),
    Metric("grad_norm", "norm", "Global gradient norm before clipping.", form="{:.3g}",
           panel="gradient norm before clipping", summary="gradient norm"),
    Metric("ratio_gap", "ratio",
           "Mean |ratio - 1| in the first update, over the groups that began in this step.",
           lambda s: s.updates[0].get("ratio_gap") if s.taken and s.updates[0].get("on_policy", 1)
           else None,
           panel="sampler/learner gap, mean |ratio - 1|"),
    Metric("routes/differ", "share",
           "Of tokens and layers those for which the learner would have chosen another set of "
           "experts in the first update than the sampler did; replayed or not.",
           lambda s: s.updates[0].get("routes/differ") if s.taken else None,
           panel="experts that differ"),
    Metric("lr", "", "Learning rate of the step.", lambda s: s.learning_rate),
    Metric("seconds/load", "s", "Reading data and weights at a start."),
    Metric("seconds/compile", "s", "Compiling at a start."),
    Metric("seconds/rollout", "s", "Sampling and grading.", panel=SECONDS),
    Metric("seconds/update", "s", "Packing and updates.", panel=SECONDS),
    Metric("seconds/evaluate", "s",
           "The rest of an overlapped evaluation, after the rollout.", panel=SECONDS),
    Metric("seconds/save", "s", "Digests, and the wait for the responses' file.", panel=SECONDS),
    Metric("seconds/snapshot", "s", "The hand-over of the snapshot before this step, and the wait "
           "for a save under way.", panel=SECONDS),
    Metric("seconds/total", "s", "The whole step.", form="{:7.1f}", line="seconds"),
    Metric("seconds_in_rollout/prefill", "s", "Prompts, on the devices."),
    Metric("seconds_in_rollout/decode", "s", "Blocks of decode steps, on the devices."),
    Metric("seconds_in_rollout/host", "s", "Scheduling, on the host."),
    Metric("seconds_in_rollout/environment", "s", "Waiting for environments; their answers."),
    Metric("seconds_in_rollout/verify", "s", "Grading, behind decoding."),
    Metric("seconds_in_rollout/verify_wait", "s", "Waiting for grades."),
    Metric("tokens_per_second/rollout", "tokens/s", "Tokens sampled a second of sampling.",
           lambda s: s.per_second(s.stats.sampled_tokens, "rollout"), panel="tokens / s"),
    Metric("tokens_per_second/rollout_used", "tokens/s", "The same, of tokens trained on.",
           lambda s: s.per_second(s.rollouts.kept_tokens, "rollout")),
    Metric("tokens_per_second/update", "tokens/s", "Tokens trained on a second of updates.",
           lambda s: s.per_second(s.rollouts.kept_tokens, "update"), panel="tokens / s"),
    Metric("tokens_per_second/step", "tokens/s", "Tokens sampled a second of the whole step.",
           lambda s: s.per_second(s.stats.sampled_tokens, "total"), form="{:6.0f}",
           panel="tokens / s", line="tokens/s"),
]
# fmt: on


def score_metric(key: str) -> Metric:
    """The metric of `eval/<set>/<score>`: a share, unless it is what the task measures."""
    measured = key.split("/")[2] + "/" == TASK
    form = "{:.4g}" if measured else "{:.1%}"
    return Metric(key, "" if measured else "share", "", form=form, higher_is_better=not measured)


def mean_measures(responses: Sequence[Response]) -> dict[str, float]:
    """Name -> mean of what the task measured of its own, over the responses that have it."""
    values = collections.defaultdict(list)
    for response in responses:
        for name, value in (response.verdict.measures or {}).items():
            values[name].append(value)
    return {name: float(np.mean(values[name])) for name in sorted(values)}


def own_metrics(names: Sequence[str]) -> dict[str, Callable[[Step], Any]]:
    """Imports what log.metrics names, by the functions' names; ValueError for what is none."""
    own = [name.rpartition(":")[2] for name in names]
    keys = [*own, *(metric.key for metric in METRICS)]
    if taken := next((key for key in own if keys.count(key) > 1), None):
        raise ValueError(f"log.metrics: another metric is called {taken}; rename your function")
    return {k: imported(f"log.metrics has {it!r}", it) for k, it in zip(own, names, strict=True)}


def step_row(step: Step) -> dict[str, float]:
    """The step's row of metrics.jsonl: every metric of the table that the step has.

    Numbers without a row in the table (of a new loss, a task, an evaluation) follow. ValueError for
    a metric that is none, or one of log.metrics that raises.
    """
    averaged = [key for key in (step.taken or [{}])[0] if key not in NOT_AVERAGED]
    given = {
        **{key: np.mean([update[key] for update in step.taken]) for key in averaged},
        **{f"seconds/{phase}": seconds for phase, seconds in step.seconds.items()},
        **{f"seconds_in_rollout/{part}": spent for part, spent in step.stats.seconds.items()},
        **{f"verdicts/{status}": count for status, count in step.gave_up.items()},
        **{f"{TASK}{name}": mean for name, mean in mean_measures(step.responses).items()},
        **step.evaluation,
    }
    values = dict.fromkeys(metric.key for metric in METRICS) | given  # in the order of the table
    values |= {metric.key: metric.value(step) for metric in METRICS if metric.value}
    names = step.config.log.metrics
    for (key, metric), name in zip(own_metrics(names).items(), names, strict=True):
        with running(f"log.metrics: {key} of step {step.step}", name):
            values[key] = metric(step)
    row = {}
    for key, value in values.items():
        if value is not None:
            is_numpys = isinstance(value, np.generic | np.ndarray) and value.size == 1
            row[key] = value.item() if is_numpys else value
            if not isinstance(row[key], bool | int | float):
                text = f"log.metrics: {key} of step {step.step} gives {value!r:.80}, no number"
                raise ValueError(text)
    return row


class Stopwatch:
    """Collects the wall seconds of one step's phases: `with watch("rollout"): ...`.

    A phase may be entered again; its seconds add up, also when the block raises. The total runs
    from the making of the watch. annotate: names a phase to a profiler.
    """

    def __init__(self, annotate: Callable = contextlib.nullcontext):
        self._annotate = annotate
        self._start_seconds = time.perf_counter()
        self._phase_seconds = collections.Counter()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start_seconds = time.perf_counter()
        try:
            with self._annotate(phase):
                yield
        finally:
            self._phase_seconds[phase] += time.perf_counter() - start_seconds

    def seconds(self) -> dict[str, float]:
        """Seconds so far of each phase in order of first use, and since the start as "total"."""
        return {**self._phase_seconds, "total": time.perf_counter() - self._start_seconds}


if __name__ == "__main__":
    for metric in METRICS:
        print(f"{metric.key:36}{metric.unit:13}{metric.meaning}")
    for key, meaning in DIGESTS.items():
        print(f"{key:36}{'SHA-256':13}{meaning}")
