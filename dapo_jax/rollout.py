"""Collects one step's rollouts: samples and grades a stream until enough is informative."""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dapo_jax.algorithm import above_lowest, first_informative, shaped_reward
from dapo_jax.grading import Graded, Grading
from dapo_jax.sampler.session import Session
from dapo_jax.types import (
    TRAINING,
    Group,
    PartialGroup,
    Prompt,
    Rollouts,
    RolloutStats,
)

# Of the slots are idle when partial rollouts issue prompts: a prefill of one costs as
# much as one of many.
IDLE_SHARE = 1 / 32


def collect(
    session: Session,
    prompt_at: Callable[[int], Prompt],
    grade: Callable[[Group], Group],
    cursor: int,
    partial: Sequence[PartialGroup] = (),
    *,
    group_size: int,
    num_prompts: int,
    max_prompts: int,
    expected_rate: float,
    dynamic_sampling: bool,
    report: Callable[[str], None],
    partial_rollout_steps: int = 0,
    success: Callable[[Group], np.ndarray] = operator.attrgetter("correct_G"),
    on_other_groups: Callable[[Sequence[Group]], None] = lambda finished: None,
) -> Rollouts:
    """Samples a stream of groups until `num_prompts` are informative (dynamic sampling, Eq. 11).

    A group is informative if some but not all of it is a success: bool [G], by default raw
    correctness; without dynamic sampling all groups count. The policy is frozen meanwhile. Groups
    are graded in the background. `InOrder` says which prompts are issued and which groups are kept;
    with `partial_rollout_steps`, the most steps for which a group goes on, `AnyOrder`. After
    `max_prompts` there may be fewer groups than wanted, or none. Groups of other streams, submitted
    before, are sampled in order, and stay unfinished when training has its groups.

    prompt_at(cursor): the stream's prompts. grade(group): the group with texts and verdicts.
    partial: the groups of the step before that go on. expected_rate: the share of informative
    groups before there are any. on_other_groups: takes other streams' finished groups.
    """
    keeps = partial_rollout_steps > 0
    if keeps and not dynamic_sampling:
        expected_rate, success = 1.0, lambda group: np.array([True, False])
    graded = Graded(cursor, success, prior_rate=expected_rate, prior_groups=num_prompts / 4)
    most = max_prompts if dynamic_sampling or keeps else num_prompts
    step = InOrder(session, graded, cursor, num_prompts, most, dynamic_sampling)
    if keeps:
        step = AnyOrder(
            **vars(step),
            due={it.cursor for it in partial if it.age_steps >= partial_rollout_steps},
            num_partial=len(partial),
            most_groups=num_prompts * (1 + partial_rollout_steps),
        )
    ended, under_way = [], set(session.unfinished)
    for it in partial:
        if not any(it.unfinished_G):
            ended.append(Group(it.cursor, prompt_at(it.cursor), it.responses))
        elif (TRAINING, it.cursor) not in under_way:
            prompt = prompt_at(it.cursor)
            session.submit(it.cursor, prompt, group_size=group_size, partial=it, keeps=True)
    with Grading(grade) as grading:
        graded.add([*grading.exchange(ended), *grading.exchange([])])
        while not step.has_enough():
            for place in step.prompts():
                session.submit(place, prompt_at(place), group_size=group_size, keeps=keeps)
            found = f"{len(graded.informative)} informative of {len(graded.groups)} groups"
            report(f"rollout: {found}, {num_prompts} wanted")
            done = session.step(more=step.wants_more()) if session.unfinished else []
            on_other_groups([group for group in done if group.stream != TRAINING])
            graded.add(grading.exchange([group for group in done if group.stream == TRAINING]))
        if keeps:
            graded.add(grading.exchange([]))
    sampled, end, go_on = step.result()
    kept = np.arange(min(num_prompts, len(sampled)))
    if dynamic_sampling:
        success_PG = np.stack([success(group) for group in sampled])
        kept = first_informative(success_PG, num_prompts=num_prompts)
    requests = step.issued * group_size
    return Rollouts(
        sampled=sampled,
        kept=kept,
        cursor=end,
        issued=len(sampled) if keeps else step.issued,
        stats=rollout_stats(session, requests=requests, grading_seconds=grading.seconds),
        partial=go_on,
        continued_tokens=sum(it.tokens for it in partial),
    )


@dataclasses.dataclass
class InOrder:
    """Keeps the first informative groups in prompt order, whatever their lengths.

    Sampling batch after batch, waiting for each, would keep the same. Prompts are issued as slots
    fall idle, as many as the share of informative groups so far lets expect to be needed: that
    depends on groups of other streams, and which groups are kept does not.
    """

    session: Session
    graded: Graded
    cursor: int
    num_prompts: int
    max_prompts: int
    dynamic_sampling: bool
    issued: int = 0

    @property
    def end(self) -> int:
        """The cursor behind all groups that can be kept."""
        # No group behind enough informative ones can be among the first.
        informative = self.graded.informative
        if self.dynamic_sampling and len(informative) >= self.num_prompts:
            return informative[self.num_prompts - 1] + 1
        return self.cursor + self.max_prompts

    def has_enough(self) -> bool:
        """Returns whether all groups up to the last kept one are graded; cancels those behind."""
        for stream, place in self.session.unfinished:
            if stream == TRAINING and place >= self.end:
                self.session.cancel(place)
        return self.graded.end >= self.end

    def prompts(self) -> Iterator[int]:
        """Yields the cursors of the prompts to issue before the next block."""
        while self.cursor + self.issued < self.end:
            if self.dynamic_sampling and not (self.session.idle_slots and self.wants_more()):
                return
            self.issued += 1
            yield self.cursor + self.issued - 1

    def wants_more(self) -> bool:
        """Returns whether prompts would be issued if there were idle slots."""
        expected = self.graded.expected_informative(self.issued)
        open_ = self.dynamic_sampling and self.cursor + self.issued < self.end
        return open_ and expected < self.num_prompts

    def result(self) -> tuple[list[Group], int, list[PartialGroup]]:
        """Returns (the groups up to the last one kept, the next cursor, none that goes on)."""
        return [self.graded.groups[i] for i in range(self.cursor, self.end)], self.end, []


@dataclasses.dataclass
class AnyOrder(InOrder):
    """Takes the groups that are complete first, and lets the others go on (partial rollouts).

    No slot waits for the longest response (Kimi k1.5, arXiv 2501.12599, section 2.6.2; APRIL, arXiv
    2509.18521). A response may have tokens of several policies, each with the log-probability at
    which it was sampled, so that every ratio (Eq. 8) is to the policy that sampled the token.

    The complete groups that come first in prompt order are kept; other informative ones go on,
    complete as they are. A step ends once the groups that are `due`, as old as a group may be, are
    complete; those of them that it has no use for are discarded. So that there are few, no more
    prompts are issued than give `most_groups` by the share of informative ones that was expected. A
    step that finds nothing partial waits for the first groups in prompt order, as `InOrder` does:
    those that are complete first are the short ones.
    """

    due: set[int] = frozenset()
    num_partial: int = 0
    most_groups: int = 0

    def has_enough(self) -> bool:
        """Returns whether enough groups are complete, and none that is waited for is not."""
        waiting, informative = self.session.unfinished, self.graded.informative
        if len(informative) < self.num_prompts:
            return self.issued == self.max_prompts and not waiting
        last = informative[self.num_prompts - 1]
        return not any(
            stream != TRAINING or place in self.due or (not self.num_partial and place < last)
            for stream, place in waiting
        )

    def prompts(self) -> Iterator[int]:
        """Yields the cursors of the prompts to issue before the next block."""
        if self.session.idle_slots >= IDLE_SHARE * self.session.slots:
            while self.session.idle_slots and self.wants_more():
                self.issued += 1
                yield self.cursor + self.issued - 1

    def wants_more(self) -> bool:
        """Returns whether prompts would be issued if there were idle slots."""
        unknown = self.num_partial + self.issued - len(self.graded.groups)
        expected = len(self.graded.informative) + self.graded.prior_rate * unknown
        return self.issued < self.max_prompts and expected < self.most_groups

    def result(self) -> tuple[list[Group], int, list[PartialGroup]]:
        """Returns (the complete groups to train on or discard, the next cursor, those to go on)."""
        groups = self.graded.groups
        extra = {p for p in self.graded.informative[self.num_prompts :] if p not in self.due}
        sampled = [groups[place] for place in sorted(groups.keys() - extra)]
        go_on = [*self.session.pause(TRAINING), *(_complete(groups[place]) for place in extra)]
        next_cursor = self.cursor + self.issued
        return sampled, next_cursor, sorted(go_on, key=operator.attrgetter("cursor"))


def _complete(group: Group) -> PartialGroup:
    """Carries a group of which all responses have ended."""
    responses = tuple(response.continued() for response in group.responses)
    return PartialGroup(group.cursor, responses, (False,) * len(responses))


def continued(
    cursor: int,
    partial: Sequence[PartialGroup],
    *,
    go_on: bool,
    group_size: int,
    max_tokens: int,
) -> tuple[int, Sequence[PartialGroup]]:
    """Returns (next cursor, partial groups): none where a fork's config cannot go on with them."""
    fit = all(
        len(it.responses) == group_size
        and len(response.tokens_T) <= max_tokens
        and (response.stopped or unfinished or len(response.tokens_T) == max_tokens)
        for it in partial
        for response, unfinished in zip(it.responses, it.unfinished_G, strict=True)
    )
    if go_on and fit:
        return cursor, partial
    return min([cursor, *(it.cursor for it in partial)]), ()


def success_by(filter_groups: str, **overlong) -> Callable[[Group], np.ndarray]:
    """Returns what the filter of dynamic sampling looks at: a group -> bool [G].

    "correctness": Eq. 11's. "reward": a shaped reward above the lowest of the group.
    """

    def by_reward(group: Group) -> np.ndarray:
        reward_G = shaped_reward(group.correct_G, group.score_G, group.length_G, **overlong)
        return above_lowest(reward_G[None])[0]

    return {"correctness": operator.attrgetter("correct_G"), "reward": by_reward}[filter_groups]


def rollout_stats(
    session: Session, *, requests: int, grading_seconds: dict[str, float]
) -> RolloutStats:
    """Adds up the session's blocks: the tokens of training, the work of all streams."""
    blocks = session.blocks
    steps_N = np.array([block.steps * len(block.useful_B) for block in blocks], int)
    busy_N = np.array([block.useful_B.sum() for block in blocks], int)
    waiting_N = np.array([block.waiting for block in blocks], bool)
    return RolloutStats(
        sampled_tokens=sum(int(b.useful_B[b.stream_B == TRAINING].sum()) for b in blocks),
        decode_steps=sum(block.steps for block in blocks),
        slot_steps=int(steps_N.sum()),
        busy_slot_steps=int(busy_N.sum()),
        waiting_slot_steps=int(steps_N[waiting_N].sum()),
        busy_waiting_slot_steps=int(busy_N[waiting_N].sum()),
        requests=requests,
        prefilled_prompts=session.prefilled_prompts,
        cache_use=max((block.cache_use for block in blocks), default=0.0),
        seconds=session.seconds | grading_seconds,
    )


def minibatches(kept: np.ndarray, *, groups_per_update: int) -> list[np.ndarray]:
    """Splits kept groups into consecutive chunks of at most `groups_per_update`, evenly.

    Adam takes a full step whatever the mini-batch's size: one left-over group must not make one.
    """
    chunks = -(-len(kept) // groups_per_update)
    return np.array_split(kept, chunks) if chunks else []
