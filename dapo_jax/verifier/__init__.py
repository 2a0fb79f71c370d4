r"""The math verifier: `verify` grades one response (Eq. 7) by one of RULES.

Rules
* `dapo`: what the published DAPO runs were trained with, false verdicts included (`dapo_form`).
* `strict`: "Answer: $Answer" on a line of its own, by the equality of `symbolic` without algebra.
* `strict_box`: the last `\boxed{...}` of the last 100 characters, compared character by character.
* `symbolic`: what the grammar of answers reads (`grammar`), by `equality`; formulas by algebra in
  processes with limits (`symbolic_rules`).
* `math_verify`: the published library of that name as it is (`library_rules`).
"""

import functools
from collections.abc import Sequence

from dapo_jax.types import Verdict
from dapo_jax.verifier import isolated
from dapo_jax.verifier.finding import find_answer
from dapo_jax.verifier.grammar import read
from dapo_jax.verifier.library_rules import LibraryVerifier
from dapo_jax.verifier.math_rules import (
    MAX_GROUND_TRUTH_CHARS,
    grade_box,
    grade_dapo,
    grade_strict,
    refuse,
)
from dapo_jax.verifier.symbolic_rules import SymbolicVerifier

_GRADERS = {"dapo": grade_dapo, "strict": grade_strict, "strict_box": grade_box}
_IN_PROCESSES = {"symbolic": SymbolicVerifier, "math_verify": LibraryVerifier}
RULES = (*_GRADERS, *_IN_PROCESSES)
_LINE, _BOX = "Answer: %s", r"\boxed{%s}"


def verify(response: str, ground_truth: str, *, rules: str) -> Verdict:
    """Grades one response (Eq. 7's equivalence) by one of RULES.

    response: the decoded response without special tokens; only its tail is read, so its length
    costs nothing. Raises ValueError for unknown rules; `symbolic` and `math_verify` raise what
    `isolated.Pool` does when its workers cannot be started.
    """
    return verify_many([response], [ground_truth], rules=rules)[0]


def verify_many(
    responses: Sequence[str], ground_truths: Sequence[str], *, rules: str
) -> list[Verdict]:
    """Grades pairs, in order; under `symbolic` and `math_verify` by worker pools of this process.

    Raises ValueError where the two lengths differ, and as `verify` does.
    """
    if rules not in RULES:
        raise ValueError(f"verifier.rules is {rules!r}; it must be one of {', '.join(RULES)}")
    if rules in _IN_PROCESSES:
        return _workers(rules).verify_many(responses, ground_truths)
    pairs = zip(responses, ground_truths, strict=True)
    return [refuse(*pair) or _GRADERS[rules](*pair) for pair in pairs]


@functools.cache
def _workers(rules: str) -> SymbolicVerifier:
    """Starts the pool that this process shares, one worker a core, at the first call."""
    return _IN_PROCESSES[rules](isolated.one_a_core())


def equal_answers(pairs: Sequence[tuple[str, str]], *, rules: str) -> list[bool]:
    """Tells of each pair whether the first, as a response's answer, is right where the second is.

    What grades responses also joins the votes of maj@k and the rows of one prompt.
    """
    form = _BOX if rules in ("strict_box", "math_verify") else _LINE
    answers, others = [form % one for one, _ in pairs], [other for _, other in pairs]
    return [verdict.correct for verdict in verify_many(answers, others, rules=rules)]


def texts_among(truths: Sequence[str], *, rules: str) -> list[str]:
    """Lists the truths that the grammar of `strict` and `symbolic` reads as no more than texts."""
    has_grammar = rules in ("strict", "symbolic")
    return [truth for truth in truths if has_grammar and read(truth)[0] == "text"]


def check_ground_truth(truth: str, *, rules: str) -> None:
    r"""Raises ValueError for a ground truth that no response can match by one of RULES.

    Such as "$" under `dapo`, whose normal form is empty, or one longer than what the rules read:
    "Answer: <truth>" (`\boxed{<truth>}`, where the rules read boxes) must be right. No algebra is
    needed for it, and each truth is tried once.
    """
    if not _matches_itself(truth, rules):
        raise ValueError(
            f"the answer {truth!r:.80} is one that no response can match by the rules {rules!r} "
            "(verifier.rules, or `rules` of the data set)"
        )


@functools.lru_cache(maxsize=1 << 16)
def _matches_itself(truth: str, rules: str) -> bool:
    if not any(character.isprintable() and not character.isspace() for character in truth):
        return False  # a zero-width space equals itself, but nobody means it
    if rules in _IN_PROCESSES:  # without the workers of `equal_answers`
        return len(truth) <= MAX_GROUND_TRUTH_CHARS and any(
            read(find_answer(form % truth) or "") == read(truth) != read("")
            for form in (_LINE, _BOX)
        )
    return equal_answers([(truth, truth)], rules=rules)[0]
