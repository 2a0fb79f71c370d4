"""Collects one step's rollouts: samples and grades a stream until enough is informative."""

import bisect
import concurrent.futures
import math
import operator
import time
from collections.abc import Callable, Sequence

import numpy as np

from dapo_jax.algorithm import above_lowest, first_informative, informative_groups, shaped_reward
from dapo_jax.sampler.session import Session
from dapo_jax.types import BlockRecord, Group, Prompt, Rollouts, RolloutStats
from sharding import hosts

TRAINING = 0  # of a session's streams the one that is trained on
# One thread for all: no task is asked by two at once.
_GRADER = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grader")


def collect(
    session: Session,
    prompt_at: Callable[[int], Prompt],
    grade: Callable[[Group], Group],
    cursor: int,
    *,
    group_size: int,
    num_prompts: int,
    max_prompts: int,
    expected_rate: float,
    dynamic_sampling: bool,
    report: Callable[[str], None],
    success: Callable[[Group], np.ndarray] = operator.attrgetter("correct_G"),
    on_other_groups: Callable[[Sequence[Group]], None] = lambda finished: None,
) -> Rollouts:
    """Samples a stream of groups until `num_prompts` are informative (dynamic sampling, Eq. 11).

    A group is informative if some but not all of it is a success: bool [G], by default raw
    correctness. The policy is frozen meanwhile.
    The first informative groups in prompt order are kept, as if prompts had been sampled batch
    after batch and waited for: neither length nor speed of a response decides. Groups are
    graded in the background while decoding goes on. Prompts are issued as slots fall idle, as
    many as the share of informative groups so far lets expect to be needed (`expected_rate`
    before there are any). After `max_prompts` there may be fewer groups than wanted, or none: the
    caller decides what to do then. Without dynamic sampling the first `num_prompts` are all kept.

    The session may have groups of other streams, submitted before: they are sampled in order, and
    those that are unfinished when training has its groups stay so. Which groups are kept does not
    depend on them; how many prompts are issued does, as slots fall idle at other times.

    prompt_at(cursor): the stream's prompts. grade(group): the group with texts and verdicts; every
    process grades its share of the groups, and all get all verdicts. on_other_groups: called
    with the groups of other streams that finish.
    """
    limit = cursor + (max_prompts if dynamic_sampling else num_prompts)
    known = Known(cursor, success, prior_rate=expected_rate, prior_groups=num_prompts / 4)
    issued = 0
    with Grading(grade) as grading:
        while True:
            # No group behind enough informative ones can be among the first.
            enough = dynamic_sampling and len(known.informative) >= num_prompts
            end = known.informative[num_prompts - 1] + 1 if enough else limit
            for stream, place in session.unfinished:
                if stream == TRAINING and place >= end:
                    session.cancel(place)
            if known.end >= end:
                break
            more = False
            while cursor + issued < end:
                expected = known.expected_informative(issued)
                if dynamic_sampling and (session.idle_slots == 0 or expected >= num_prompts):
                    more = expected < num_prompts
                    break
                place = cursor + issued
                session.submit(place, prompt_at(place), group_size=group_size)
                issued += 1
            found = f"{len(known.informative)} informative of " if dynamic_sampling else ""
            report(f"rollout: {found}{len(known.groups)} groups, {num_prompts} wanted")
            finished = session.step(more=more) if session.unfinished else []
            on_other_groups([group for group in finished if group.stream != TRAINING])
            known.add(grading.exchange([g for g in finished if g.stream == TRAINING]))
    sampled = [known.groups[place] for place in range(cursor, end)]
    kept = np.arange(num_prompts)
    if dynamic_sampling:
        success_PG = np.stack([success(group) for group in sampled])
        kept = first_informative(success_PG, num_prompts=num_prompts)
    stats = rollout_stats(session, requests=issued * group_size, grading_seconds=grading.seconds)
    return Rollouts(sampled, kept, end, issued, stats)


def success_by(filter_groups: str, **overlong) -> Callable[[Group], np.ndarray]:
    """Returns what the filter of dynamic sampling looks at: a group -> bool [G].

    "correctness": the raw one (Eq. 11). "reward": whether the shaped reward is above the lowest of
    the group. overlong: as of `soft_overlong_penalty`.
    """

    def by_reward(group: Group) -> np.ndarray:
        reward_G = shaped_reward(group.correct_G, group.score_G, group.length_G, **overlong)
        return above_lowest(reward_G[None])[0]

    return {"correctness": operator.attrgetter("correct_G"), "reward": by_reward}[filter_groups]


class Known:
    """Keeps the graded groups of a step, which finish in any order.

    groups: by cursor. informative: the cursors of those that are, ascending. end: the cursor of
    the first group that is not graded yet.
    """

    def __init__(self, cursor: int, success, *, prior_rate: float = 1.0, prior_groups: float = 1.0):
        self.groups: dict[int, Group] = {}
        self.informative: list[int] = []
        self.end = self._start = cursor
        self.success = success
        self._prior_rate, self._prior_groups = prior_rate, prior_groups

    def add(self, groups: Sequence[Group]) -> None:
        """Adds graded groups."""
        for group in groups:
            self.groups[group.cursor] = group
            if informative_groups(self.success(group)[None])[0]:
                bisect.insort(self.informative, group.cursor)
        while self.end in self.groups:
            self.end += 1

    def expected_informative(self, issued: int) -> float:
        """Estimates the informative groups among all issued ones, less one standard deviation.

        The share of informative ones is that of the groups in order: those that finished early
        may be of another kind. The prior counts like a quarter of the step.
        """
        in_order = self.end - self._start
        informative = bisect.bisect_left(self.informative, self.end)
        rate = informative + self._prior_rate * self._prior_groups
        rate /= in_order + self._prior_groups
        under_way = issued - len(self.groups)
        spread = math.sqrt(under_way * rate * (1 - rate))
        return len(self.informative) + under_way * rate - spread


class Grading:
    """Grades finished groups behind the decoding of the next block, a share on each process.

    Verdicts are used one block after the group finished, waiting if need be, so that what is
    issued when does not depend on the grader's speed. Leaving the context gives up what is pending.
    seconds: of grading, and of waiting for it.
    """

    def __init__(self, grade: Callable[[Group], Group]):
        self.seconds = {"verify": 0.0, "verify_wait": 0.0}
        self._grade = grade
        self._pending: list[tuple[Group, concurrent.futures.Future | None]] = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        jobs = [job for _, job in self._pending if job is not None]
        concurrent.futures.wait([job for job in jobs if not job.cancel()])

    def exchange(self, finished: Sequence[Group]) -> list[Group]:
        """Begins to grade groups; returns those of the call before, graded, in their order."""
        pending, self._pending = self._pending, []
        for group in finished:
            mine = hosts.is_mine(group.cursor)
            self._pending.append((group, _GRADER.submit(self._timed, group) if mine else None))
        if not pending:
            return []
        start = time.perf_counter()
        mine = {i: job.result().grades for i, (_, job) in enumerate(pending) if job is not None}
        grades = {i: it for share in hosts.gather(mine) for i, it in share.items()}
        self.seconds["verify_wait"] += time.perf_counter() - start
        return [group.graded(*grades[i]) for i, (group, _) in enumerate(pending)]

    def _timed(self, group: Group) -> Group:
        start = time.perf_counter()
        group = self._grade(group)
        self.seconds["verify"] += time.perf_counter() - start
        return group


def rollout_stats(
    session: Session, *, requests: int, grading_seconds: dict[str, float]
) -> RolloutStats:
    """Adds up the session's blocks: the tokens of training, the work of all streams."""
    blocks = session.blocks
    waiting = [block for block in blocks if block.waiting]

    def slot_steps(of: Sequence[BlockRecord]) -> int:
        return sum(block.steps * len(block.useful_B) for block in of)

    def busy(of: Sequence[BlockRecord]) -> int:
        return sum(int(block.useful_B.sum()) for block in of)

    return RolloutStats(
        sampled_tokens=sum(int(b.useful_B[b.stream_B == TRAINING].sum()) for b in blocks),
        decode_steps=sum(block.steps for block in blocks),
        slot_steps=slot_steps(blocks),
        busy_slot_steps=busy(blocks),
        waiting_slot_steps=slot_steps(waiting),
        busy_waiting_slot_steps=busy(waiting),
        requests=requests,
        prefilled_prompts=session.prefilled_prompts,
        cache_use=max((block.cache_use for block in blocks), default=0.0),
        seconds=session.seconds | grading_seconds,
        blocks=blocks,
    )


def minibatches(kept: np.ndarray, *, groups_per_update: int) -> list[np.ndarray]:
    """Splits kept groups into consecutive chunks of at most `groups_per_update`, evenly.

    Adam takes a full step whatever the mini-batch's size: one left-over group must not make one.
    """
    chunks = -(-len(kept) // groups_per_update)
    return np.array_split(kept, chunks) if chunks else []
