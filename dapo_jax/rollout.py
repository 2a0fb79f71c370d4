"""Collects one step's rollouts: samples and grades a stream until enough is informative."""

import bisect
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dapo_jax.algorithm import above_lowest, informative_groups, shaped_reward
from dapo_jax.grading import Grading
from dapo_jax.sampler.session import Session
from dapo_jax.types import TRAINING, Group, Prompt, Rollouts, Status

# Partial rollouts issue no prompts before so many slots are idle: a prefill costs as much for one.
IDLE_SHARE = 1 / 32


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What each step of a run samples, whatever the policy and the place in the stream.

    prompt_at(cursor): the stream's prompts. grade(group): the group with texts and verdicts.
    success(group): bool [G]; a group is informative if some but not all of it is. max_prompts: that
    a step issues. max_tokens: of a response. partial_rollout_steps: the most steps for which a
    group goes on; 0: none does.
    """

    prompt_at: Callable[[int], Prompt]
    grade: Callable[[Group], Group]
    group_size: int
    num_prompts: int
    max_prompts: int
    max_tokens: int
    dynamic_sampling: bool = True
    partial_rollout_steps: int = 0
    success: Callable[[Group], np.ndarray] = operator.attrgetter("success_G")

    def is_usable(self, group: Group) -> bool:
        """Returns whether some but not all is a success (Eq. 11); without dynamic sampling, True.

        A group of which an environment failed never is.
        """
        if group.is_left_out or not self.dynamic_sampling:
            return not group.is_left_out
        return bool(informative_groups(self.success(group)[None])[0])


def collect(
    session: Session,
    plan: StepPlan,
    cursor: int,
    partial: Sequence[Group] = (),
    *,
    informative_share: float,
    report: Callable[[str], None],
    on_other_groups: Callable[[Sequence[Group]], None] = lambda finished: None,
) -> Rollouts:
    """Samples a stream of groups until `num_prompts` are informative (dynamic sampling, Eq. 11).

    Without dynamic sampling all groups count. The policy is frozen meanwhile. Groups are graded in
    the background. `PromptOrder` says which prompts are issued and which groups are kept; with
    partial rollouts `CompletionOrder`. After `max_prompts` there may be fewer groups than wanted,
    or none. Groups of other streams, submitted before, are sampled in order, and stay unfinished
    when training has its groups; with partial rollouts they are finished first.

    partial: the groups carried over from the step before, complete or not. informative_share: of
    informative groups, `PromptOrder`'s prior and all that `CompletionOrder` knows. on_other_groups:
    takes other streams' finished groups.
    """
    by_completion = plan.partial_rollout_steps > 0
    submit = functools.partial(session.submit, group_size=plan.group_size)
    share = informative_share if plan.dynamic_sampling else 1.0
    order_of = CompletionOrder if by_completion else PromptOrder
    order = order_of(session, cursor, plan, partial, share)
    ended, under_way = [], set(session.unfinished)
    for group in partial:
        prompt = plan.prompt_at(group.cursor)
        if not group.is_unfinished:
            ended.append(dataclasses.replace(group, prompt=prompt))
        elif (TRAINING, group.cursor) not in under_way:
            submit(group.cursor, prompt, begun=group.responses)
    with Grading(plan.grade) as grading:
        # A call returns what the one before gave it, graded: the second waits for the grades.
        order.add([*grading.exchange(ended), *grading.exchange([])])
        while not order.try_to_end():
            for next_cursor in order.prompts():
                submit(next_cursor, plan.prompt_at(next_cursor))
            usable, graded = len(order.usable), len(order.groups)
            report(f"rollout: {usable} of {plan.num_prompts} groups, {graded} graded")
            done = session.step(more=order.wants_more()) if session.unfinished else []
            on_other_groups([group for group in done if group.stream != TRAINING])
            order.add(grading.exchange([group for group in done if group.stream == TRAINING]))
        if by_completion:  # what the last block finished is not graded yet
            order.add(grading.exchange([]))
    sampled, end, go_on = order.result()
    success_PG = np.stack([plan.success(group) & (not group.is_left_out) for group in sampled])
    # In prompt order: in that of completion short responses would be favoured.
    kept = np.flatnonzero([plan.is_usable(group) for group in sampled])[: plan.num_prompts]
    requests, seconds = order.issued * plan.group_size, session.stats.seconds | grading.seconds
    return Rollouts(
        sampled=sampled,
        kept=kept,
        informative=informative_groups(success_PG),
        cursor=end,
        issued=len(sampled) if by_completion else order.issued,  # there none is cancelled
        stats=dataclasses.replace(session.stats, requests=requests, seconds=seconds),
        partial=go_on,
        continued_tokens=sum(group.sampled_tokens for group in partial),
    )


@dataclasses.dataclass
class PromptOrder:
    """Keeps the first informative groups in prompt order, whatever their lengths.

    Prompts are issued as slots fall idle, as many as the share of informative groups so far
    predicts. Other streams change how many are issued, never which groups are kept.

    informative_share: as of `collect`. groups: the graded ones by cursor; they finish in any order.
    usable: the cursors of those that can be kept, ascending.
    """

    session: Session
    cursor: int
    plan: StepPlan
    partial: Sequence[Group]
    informative_share: float
    issued: int = 0
    groups: dict[int, Group] = dataclasses.field(default_factory=dict)
    usable: list[int] = dataclasses.field(default_factory=list)

    def add(self, graded: Sequence[Group]) -> None:
        """Adds graded groups."""
        for group in graded:
            self.groups[group.cursor] = group
            if self.plan.is_usable(group):
                bisect.insort(self.usable, group.cursor)

    @property
    def graded_end(self) -> int:
        """The cursor of the first group that is not graded yet."""
        return next(i for i in itertools.count(self.cursor) if i not in self.groups)

    @property
    def end(self) -> int:
        """One past the last cursor that can be kept."""
        plan = self.plan
        if len(self.usable) >= plan.num_prompts:  # none behind these can be among the first
            return self.usable[plan.num_prompts - 1] + 1
        return self.cursor + (plan.max_prompts if plan.dynamic_sampling else plan.num_prompts)

    def try_to_end(self) -> bool:
        """Cancels groups after the last kept one; returns whether all up to it are graded."""
        for stream, cursor in self.session.unfinished:
            if stream == TRAINING and cursor >= self.end:
                self.session.cancel(cursor)
        return self.graded_end >= self.end

    def prompts(self) -> Iterator[int]:
        """Yields the cursors of the prompts to issue before the next block."""
        while self.wants_more() and (self.session.idle_slots or not self.plan.dynamic_sampling):
            self.issued += 1
            yield self.cursor + self.issued - 1

    def wants_more(self) -> bool:
        """Returns whether prompts would be issued if there were idle slots.

        That is so until the usable groups, with the informative ones expected among those under
        way, less one standard deviation, reach num_prompts. Their share is that of the groups up to
        the first ungraded one, since those that finish early may be of another kind, with
        `informative_share` as a prior worth num_prompts / 4 groups.
        """
        plan, end, prior_groups = self.plan, self.graded_end, self.plan.num_prompts / 4
        share = bisect.bisect_left(self.usable, end) + self.informative_share * prior_groups
        share /= end - self.cursor + prior_groups
        under_way = self.issued - len(self.groups)
        spread = math.sqrt(under_way * share * (1 - share))
        expected = len(self.usable) + under_way * share - spread
        return self.cursor + self.issued < self.end and expected < plan.num_prompts

    def result(self) -> tuple[list[Group], int, list[Group]]:
        """Returns (the groups up to the last one kept, the next cursor, none that goes on)."""
        return [self.groups[i] for i in range(self.cursor, self.end)], self.end, []


@dataclasses.dataclass
class CompletionOrder(PromptOrder):
    """Takes the groups that are complete first, and lets the others go on (partial rollouts).

    No slot waits for the longest response (Kimi k1.5, arXiv 2501.12599, section 2.6.2; APRIL, arXiv
    2509.18521). A response may have tokens of several policies, each with the log-probability at
    which it was sampled, so that every ratio (Eq. 8) is to the policy that sampled the token.

    Of the complete informative groups the first in prompt order are kept. The others go on, and are
    there for the next step. A step ends once there are enough and those that are `due`, as old as a
    group may be, are complete. A due group that is not kept is discarded. To keep these few, the
    groups of at most 1 + partial_rollout_steps steps are under way, by `informative_share`. A step
    that takes up no group waits for the first ones in prompt order, as `PromptOrder` does: the
    first to complete are short.
    """

    @functools.cached_property
    def due(self) -> set[int]:
        """The cursors of the groups that may go on no more."""
        most = self.plan.partial_rollout_steps
        return {it.cursor for it in self.partial if len(it.responses[0].ends) >= most}

    def try_to_end(self) -> bool:
        """Returns whether the step has its groups and nothing due runs, or no prompt is left."""
        waiting = self.session.unfinished
        if len(self.usable) < self.plan.num_prompts:
            return self.issued == self.plan.max_prompts and not waiting
        last = self.usable[self.plan.num_prompts - 1]
        return not any(
            stream != TRAINING or cursor in self.due or (not self.partial and cursor < last)
            for stream, cursor in waiting
        )

    def prompts(self) -> Iterator[int]:
        """Yields the cursors of the prompts to issue before the next block."""
        if self.session.idle_slots >= IDLE_SHARE * self.session.slots:
            while self.session.idle_slots and self.wants_more():
                self.issued += 1
                yield self.cursor + self.issued - 1

    def wants_more(self) -> bool:
        """Returns whether prompts would be issued if there were idle slots."""
        plan = self.plan
        unknown = len(self.partial) + self.issued - len(self.groups)
        expected = len(self.usable) + self.informative_share * unknown
        most_groups = plan.num_prompts * (1 + plan.partial_rollout_steps)
        return self.issued < plan.max_prompts and expected < most_groups

    def result(self) -> tuple[list[Group], int, list[Group]]:
        """Returns (the complete groups to train on or discard, the next cursor, those to go on)."""
        extra = {*self.usable[self.plan.num_prompts :]} - self.due
        sampled = [self.groups[cursor] for cursor in sorted(self.groups.keys() - extra)]
        go_on = [*self.session.pause(), *(self.groups[cursor].continued() for cursor in extra)]
        next_cursor = self.cursor + self.issued
        return sampled, next_cursor, sorted(go_on, key=operator.attrgetter("cursor"))


def taken_up(plan: StepPlan, cursor: int, partial: Sequence[Group]) -> tuple[int, Sequence[Group]]:
    """Returns what a step goes on with: (next cursor, partial groups).

    Where a fork's config cannot take these up: (the lowest of their cursors, none).
    """
    fit = all(
        len(group.responses) == plan.group_size
        and len(response.tokens_T) <= plan.max_tokens
        and (
            response.status is not Status.CUT
            or response.turns is not None  # the environment's answer had no room
            or len(response.tokens_T) == plan.max_tokens
        )
        for group in partial
        for response in group.responses
    )
    if plan.partial_rollout_steps and fit:
        return cursor, partial
    return min([cursor, *(it.cursor for it in partial)]), ()


def success_by(filter_groups: str, **overlong) -> Callable[[Group], np.ndarray]:
    """Returns what the filter of dynamic sampling looks at: a group -> bool [G].

    "correctness": `Group.success_G`. "reward": a shaped reward above the lowest of the group.
    """

    def by_reward(group: Group) -> np.ndarray:
        reward_G = shaped_reward(group.correct_G, group.score_G, group.length_G, **overlong)
        return above_lowest(reward_G[None])[0]

    return {"correctness": operator.attrgetter("success_G"), "reward": by_reward}[filter_groups]
