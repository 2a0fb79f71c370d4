r"""The rules "math_verify": the published library as it is, in processes with limits.

For whoever compares a run with TRL or open-r1, whose rewards call it so. What it finds in the
response is the answer; `symbolic` is our own equality.
"""

import functools
import json
import re
from collections.abc import Callable, Sequence

from dapo_jax.types import Verdict
from dapo_jax.verifier import isolated
from dapo_jax.verifier.math_rules import refuse
from dapo_jax.verifier.symbolic_rules import verdict_of


@functools.cache
def _pool() -> isolated.Pool:
    return isolated.Pool(f"{__name__}:library", isolated.one_a_core())


def verify_many(responses: Sequence[str], ground_truths: Sequence[str]) -> list[Verdict]:
    """Grades pairs, in order; raises what `isolated.Pool` does."""
    pairs = [*zip(responses, ground_truths, strict=True)]
    refused = [refuse(*pair) for pair in pairs]
    asked = {it: json.dumps(it).encode() for it, no in zip(pairs, refused, strict=True) if not no}
    graded = {it: verdict_of(reply, None) for it, reply in _pool().ask(asked).items()}
    return [no or graded[it] for it, no in zip(pairs, refused, strict=True)]


def library() -> Callable[[bytes], Callable[[], bytes]]:
    """Returns a function that grades a request; the library's own clocks are off."""
    import math_verify

    def grade(response: str, truth: str) -> Verdict:
        truth = truth if re.search(r"\$|\\boxed", truth) else f"${truth}$"  # it reads formulas so
        gold, answer = (math_verify.parse(it, parsing_timeout=None) for it in (truth, response))
        if not gold:
            return Verdict(False, None, "unreadable_ground_truth")
        if not answer:
            return Verdict(False, None, "no_answer")
        correct = math_verify.verify(gold, answer, timeout_seconds=None)
        return Verdict(correct, str(answer[-1]), "correct" if correct else "wrong")

    grade("$\\frac{1}{2}$", "$x^2$")
    return lambda request: lambda: json.dumps(grade(*json.loads(request))).encode()
