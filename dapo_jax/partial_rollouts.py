"""Partial rollouts: what a step has not finished goes on in the next one.

A step ends as soon as it has enough, and new prompts fill idle slots until then: no slot waits for
the longest response (partial rollouts: Kimi k1.5, arXiv 2501.12599, section 2.6.2; APRIL, arXiv
2509.18521). A response may then have tokens of several policies, each with the log-probability at
which it was sampled, so that every ratio (Eq. 8) is to the policy that sampled the token.

    step s:     partial groups first, then new ones -> groups complete in any order
                -> enough informative ones, and none that is due unfinished: the step ends
    step s + 1: sampling goes on with the new weights behind the keys and values that are there

Keys and values stay on the devices between steps, but for those of a step that a run may resume at
(a multiple of checkpoint.every_steps): there all begin again from the tokens, computed with the new
weights. So a checkpoint needs no keys and values, and a resumed run goes on as the other would.

Which groups a step trains on depends on which are complete first, and so on the lengths of
responses, on the slots, on evaluations beside and on checkpoint.every_steps: with the same of these
a run is repeated and resumed bitwise, with others it is another run.
"""

import operator
from collections.abc import Callable, Sequence

import numpy as np

from dapo_jax.algorithm import first_informative
from dapo_jax.rollout import TRAINING, Grading, Known, rollout_stats
from dapo_jax.sampler.session import Session
from dapo_jax.types import Group, PartialGroup, Prompt, Rollouts

# Of the slots are idle when new prompts enter: a prefill call costs as much for one as for many.
IDLE_SHARE = 1 / 32


def collect_partial(
    session: Session,
    prompt_at: Callable[[int], Prompt],
    grade: Callable[[Group], Group],
    cursor: int,
    partial: Sequence[PartialGroup],
    *,
    partial_rollout_steps: int,
    group_size: int,
    num_prompts: int,
    max_prompts: int,
    expected_rate: float,
    dynamic_sampling: bool,
    report: Callable[[str], None],
    success: Callable[[Group], np.ndarray] = operator.attrgetter("correct_G"),
    on_other_groups: Callable[[Sequence[Group]], None] = lambda finished: None,
) -> Rollouts:
    """Samples until `num_prompts` groups are complete and informative; the others are partial.

    As `rollout.collect`, but: groups count as they are complete, and of those that are, the first
    in prompt order are kept. Others that are informative are partial too, complete as they are. A
    group goes on for `partial_rollout_steps` steps at most: a step does not end before those that
    it finds at this age are complete, and the last of them that it has no use for are discarded. So
    that there are few, no more prompts are issued than so many steps can train on, by the share of
    groups that is expected to be informative. A step begins `max_prompts` at most.

    A step that finds nothing partial waits for the first groups in prompt order, as `collect` does:
    those that are complete first are the short ones.

    partial: of the step before; those that the session still samples go on there. It keeps them
    for the next step (`Session.pause`). Groups of other streams are complete in the end.
    """
    known = Known(cursor, success if dynamic_sampling else lambda group: np.array([True, False]))
    due = {it.cursor for it in partial if it.age_steps >= partial_rollout_steps}
    complete, under_way = [], set(session.unfinished)
    for it in partial:
        if not any(it.unfinished_G):
            complete.append(Group(it.cursor, prompt_at(it.cursor), it.responses))
        elif (TRAINING, it.cursor) not in under_way:
            prompt = prompt_at(it.cursor)
            session.submit(it.cursor, prompt, group_size=group_size, partial=it, keeps=True)
    rate = expected_rate if dynamic_sampling else 1.0
    issued = 0

    def more() -> bool:
        unknown = len(partial) + issued - len(known.groups)
        expected = len(known.informative) + rate * unknown
        return issued < max_prompts and expected < num_prompts * (1 + partial_rollout_steps)

    def ends(waiting: set[tuple[int, int]]) -> bool:
        if len(known.informative) < num_prompts:
            return issued == max_prompts and not waiting
        last = known.informative[num_prompts - 1]
        return not any(
            stream != TRAINING or place in due or (not partial and place < last)
            for stream, place in waiting
        )

    with Grading(grade) as grading:
        known.add(grading.exchange(complete))
        known.add(grading.exchange([]))
        while True:
            waiting = set(session.unfinished)
            if ends(waiting):
                break
            if session.idle_slots >= IDLE_SHARE * session.slots:
                while session.idle_slots and more():
                    place = cursor + issued
                    session.submit(place, prompt_at(place), group_size=group_size, keeps=True)
                    issued += 1
            found = f"{len(known.informative)} informative of {len(known.groups)} groups"
            report(f"rollout: {found}, {num_prompts} wanted, {len(waiting)} under way")
            done = session.step(more=more()) if session.unfinished else []
            on_other_groups([group for group in done if group.stream != TRAINING])
            known.add(grading.exchange([group for group in done if group.stream == TRAINING]))
        known.add(grading.exchange([]))
    surplus = [place for place in known.informative[num_prompts:] if place not in due]
    sampled = [known.groups[place] for place in sorted(known.groups) if place not in surplus]
    unfinished = session.pause(TRAINING)
    go_on = [*unfinished, *(_complete(known.groups[place]) for place in surplus)]
    kept = np.arange(min(num_prompts, len(sampled)))
    if dynamic_sampling:
        success_PG = np.stack([known.success(group) for group in sampled])
        kept = first_informative(success_PG, num_prompts=num_prompts)
    return Rollouts(
        sampled=sampled,
        kept=kept,
        cursor=cursor + issued,
        issued=len(sampled),
        stats=rollout_stats(session, requests=issued * group_size, grading_seconds=grading.seconds),
        partial=sorted(go_on, key=operator.attrgetter("cursor")),
        continued_tokens=sum(it.tokens for it in partial),
    )


def _complete(group: Group) -> PartialGroup:
    """Carries a group of which all responses have ended."""
    responses = tuple(response.continued() for response in group.responses)
    return PartialGroup(group.cursor, responses, (False,) * len(responses))


def fits(partial: Sequence[PartialGroup], *, group_size: int, max_tokens: int) -> bool:
    """Returns whether a config could have sampled these; that of a fork may be another."""
    return all(
        len(it.responses) == group_size
        and len(response.tokens_T) <= max_tokens
        and (response.stopped or unfinished or len(response.tokens_T) == max_tokens)
        for it in partial
        for response, unfinished in zip(it.responses, it.unfinished_G, strict=True)
    )
