"""Grades finished groups behind decoding."""

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Sequence

from dapo_jax.process import hosts
from dapo_jax.types import Group

# One thread for all: no task is asked by two at once.
_GRADER = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grader")


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
        concurrent.futures.wait([job for _, job in self._pending if job and not job.cancel()])

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
