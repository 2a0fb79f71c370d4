"""Grades finished groups behind decoding, and keeps those of a step."""

import bisect
import concurrent.futures
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence

from dapo_jax.process import hosts
from dapo_jax.types import Group

# One thread for all: no task is asked by two at once.
_GRADER = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grader")


@dataclasses.dataclass
class Graded:
    """Keeps the graded groups of a step, which finish in any order.

    groups: by cursor. informative: the cursors of those that are, ascending. end: the cursor of
    the first group that is not graded yet.
    """

    cursor: int
    is_informative: Callable[[Group], bool]
    prior_rate: float
    prior_groups: float
    groups: dict[int, Group] = dataclasses.field(default_factory=dict)
    informative: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.end = self.cursor

    def add(self, groups: Sequence[Group]) -> None:
        """Adds graded groups."""
        for group in groups:
            self.groups[group.cursor] = group
            if self.is_informative(group):
                bisect.insort(self.informative, group.cursor)
        while self.end in self.groups:
            self.end += 1

    def expected_informative(self, issued: int) -> float:
        """Estimates the informative groups among all issued ones, less one standard deviation.

        The share of informative ones is that of the groups in order: those that finished early
        may be of another kind. The prior counts like a quarter of the step.
        """
        in_order = self.end - self.cursor
        informative = bisect.bisect_left(self.informative, self.end)
        rate = informative + self.prior_rate * self.prior_groups
        rate /= in_order + self.prior_groups
        under_way = issued - len(self.groups)
        spread = math.sqrt(under_way * rate * (1 - rate))
        return len(self.informative) + under_way * rate - spread


class Grading(contextlib.AbstractContextManager):
    """Grades finished groups behind the decoding of the next block, a share on each process.

    Verdicts are used one block after the group finished, waiting if need be, so that what is
    issued when does not depend on the grader's speed. Leaving the context gives up what is pending.
    seconds: of grading, and of waiting for it.
    """

    def __init__(self, grade: Callable[[Group], Group]):
        self.seconds = {"verify": 0.0, "verify_wait": 0.0}
        self._grade = grade
        self._pending: list[tuple[Group, concurrent.futures.Future | None]] = []

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
