r"""The rules "math_verify": the published library as it is, in processes with limits.

For whoever compares a run with TRL or open-r1, whose rewards call it so. What it finds in the
response is the answer; `symbolic` is our own equality.
"""

import re
from collections.abc import Callable

from dapo_jax.types import Verdict
from dapo_jax.verifier.symbolic_rules import SymbolicVerifier, serving


class LibraryVerifier(SymbolicVerifier):
    """Grades by the library, in workers; raises as `isolated.Pool` does."""

    ENTRY = f"{__name__}:library"

    def decide(self, response: str, truth: str) -> tuple:
        """Leaves all to the library."""
        return None, response, truth


def library() -> Callable[[bytes], Callable[[], bytes]]:
    """Returns a function that grades a request; the library's own clocks are off."""
    import math_verify

    def grade(_: None, response: str, truth: str) -> Verdict:
        truth = truth if re.search(r"\$|\\boxed", truth) else f"${truth}$"  # it reads formulas so
        gold, answer = (math_verify.parse(it, parsing_timeout=None) for it in (truth, response))
        if not gold:
            return Verdict(False, None, "unreadable_ground_truth")
        if not answer:
            return Verdict(False, None, "no_answer")
        correct = math_verify.verify(gold, answer, timeout_seconds=None)
        return Verdict(correct, str(answer[-1]), "correct" if correct else "wrong")

    grade(None, "$\\frac{1}{2}$", "$x^2$")
    return serving(grade)
