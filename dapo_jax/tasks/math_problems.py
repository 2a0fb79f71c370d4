r"""Tasks of math problems with one right answer, and the rules that grade them.

Rules
* `dapo`: what the published DAPO runs were trained with, false verdicts included (`dapo_form`).
* `strict`: the same contract ("Answer: $Answer" on a line of its own) read exactly (`strict_form`).
* `strict_box`: the last `\boxed{...}` of the last 100 characters, compared character by character.
* `math_verify`: symbolic equivalence (`symbolic_rules`), by the library of that name where it
  takes algebra, in processes with limits (`SymbolicVerifier`).
"""

import dataclasses
import functools
from collections.abc import Sequence

from dapo_jax.tasks import readers, symbolic_rules
from dapo_jax.tasks.math_rules import grade_box, grade_dapo, grade_strict, pairs, refuse
from dapo_jax.tasks.readers import DataReport
from dapo_jax.types import Example, Verdict

_GRADERS = {"dapo": grade_dapo, "strict": grade_strict, "strict_box": grade_box}
RULES = (*_GRADERS, "math_verify")
# What asks for an answer, by template; and the templates that ask for what rules read, of which
# the first is that of plain prompts by default.
_ASKED = {"dapo": "Answer:", "boxed": r"\boxed"}
TEMPLATES_OF = {
    "dapo": ("dapo",),
    "strict": ("dapo",),
    "strict_box": ("boxed",),
    "math_verify": ("dapo", "boxed"),
}


def verify(response: str, ground_truth: str, *, rules: str) -> Verdict:
    """Grades one response (Eq. 7's equivalence) by one of RULES.

    response: the decoded response without special tokens; only its tail is read, so its length
    costs nothing. Raises ValueError for unknown rules, and for no response or ground truth;
    `math_verify` raises what SymbolicVerifier raises when its workers cannot be started.
    """
    return verify_many([response], [ground_truth], rules=rules)[0]


def verify_many(
    responses: Sequence[str], ground_truths: Sequence[str], *, rules: str
) -> list[Verdict]:
    """Grades pairs, in order; under `math_verify` they share the default worker pool.

    Raises ValueError where the two lengths differ, and as `verify` does.
    """
    if rules not in RULES:
        raise ValueError(
            f"verifier.rules is {rules!r}; it must be one of {', '.join(RULES)} "
            "(config key `verifier.rules`)"
        )
    if rules == "math_verify":
        return symbolic_rules.default_verifier().verify_many(responses, ground_truths)
    return [
        refuse(response, truth) or _GRADERS[rules](response, truth)
        for response, truth in pairs(responses, ground_truths)
    ]


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
    line, box = f"Answer: {truth}", rf"\boxed{{{truth}}}"
    if rules == "math_verify":
        verdicts = [symbolic_rules.decide_locally(response, truth) for response in (line, box)]
        return any(isinstance(it, Verdict) and it.correct for it in verdicts)
    return verify(box if rules == "strict_box" else line, truth, rules=rules).correct


@dataclasses.dataclass(frozen=True, kw_only=True)
class MathTask:
    """Grades by rules; where the problems come from is for the tasks below this one.

    rules: one of RULES. on_bad_row: "error" or "skip" (`readers.Rows`).
    """

    rules: str = "dapo"
    on_bad_row: str = "error"

    def grade(self, response: str, example: Example) -> Verdict:
        """Grades one response."""
        return verify(response, example.answer, rules=self.rules)

    def grade_many(self, responses: Sequence[str], example: Example) -> list[Verdict]:
        """Grades all responses to an example at once, which keeps symbolic workers busy."""
        return verify_many(responses, [example.answer] * len(responses), rules=self.rules)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MathProblems(MathTask):
    """Problems of a file; `readers.read` says what the fields mean."""

    path: str
    kind: str = ""
    prompt_field: str = ""
    answer_field: str = ""
    template: str = ""

    def load(self) -> tuple[list[Example], DataReport]:
        """Reads the file; raises what `readers.read` raises."""
        asking = TEMPLATES_OF[self.rules]
        examples, report = self.read(default_template=asking[0])
        if self.template in ("", *_ASKED):
            asked = [_ASKED[template] for template in asking]
            texts = [example.text.lower() for example in examples]
            if silent := sum(not any(it.lower() in text for it in asked) for text in texts):
                note = (
                    f"{silent:,} of {len(texts):,} prompts do not ask for what rules={self.rules}"
                )
                note += f" read ({' or '.join(asked)}); template={' or '.join(asking)} does"
                report = dataclasses.replace(report, notes=(*report.notes, note))
        return examples, report

    def read(self, *, default_template: str) -> tuple[list[Example], DataReport]:
        """Reads the file, for a task that asks for its answers in another way."""
        return readers.read(
            self.path,
            kind=self.kind,
            prompt_field=self.prompt_field,
            answer_field=self.answer_field,
            template=self.template,
            default_template=default_template,
            on_bad_row=self.on_bad_row,
            check_answer=functools.partial(check_ground_truth, rules=self.rules),
        )
