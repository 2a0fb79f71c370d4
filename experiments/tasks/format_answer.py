"""Problems whose responses have to keep a form: thoughts in tags, then the answer in tags.

The reward grades both: the answer as in Eq. 7, and a part of it for the form.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from dapo_jax.tasks.math_problems import MathProblems
from dapo_jax.tasks.rows import DataError, DataReport
from dapo_jax.types import Example, Verdict
from dapo_jax.verifier import verify_many

TEMPLATE = (
    "{problem}\n\nThink first, between <think> and </think>. Then give the answer alone, between "
    "<answer> and </answer>."
)
MAX_ANSWER_CHARS = 200  # the rules read 300 characters


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormatAnswer(MathProblems):
    """Problems of a file, as `MathProblems` reads them.

    form_reward: what of the reward is for the form: a right answer in the form has 1, one without
    it 1 - form_reward, a wrong one in the form -1 + form_reward, and all else -1. From 0 to below
    1, so that a right answer is always better. template: "": TEMPLATE.
    """

    default_template: ClassVar[str] = TEMPLATE

    form_reward: float = 0.2

    def load(self) -> tuple[list[Example], DataReport]:
        """Reads the file; raises what `MathProblems.load` raises."""
        if not 0 <= self.form_reward < 1:
            raise DataError(f"args.form_reward is {self.form_reward}: must be 0 to below 1")
        examples, report = super().load()
        note = "in form: <think> and <answer>; a <think> that the chat template writes counts"
        return examples, dataclasses.replace(report, notes=(*report.notes, note))

    def grade(self, response: str, example: Example) -> Verdict:
        """Grades one response."""
        return self.grade_many([response], example)[0]

    def grade_many(self, responses: Sequence[str], example: Example) -> list[Verdict]:
        """Grades the answer in tags by the rules, and the form; `in_form` is measured, 0 or 1."""
        mark = r"\boxed{%s}" if self.rules == "strict_box" else "Answer: %s"
        lines = [mark % answer if answer else "" for answer in map(_one_line, responses)]
        verdicts = verify_many(lines, [example.answer] * len(lines), rules=self.rules)
        return [
            self._scored(verdict, keeps_form(response))
            for verdict, response in zip(verdicts, responses, strict=True)
        ]

    def _scored(self, verdict: Verdict, in_form: bool) -> Verdict:
        if verdict.correct:
            score = 1.0 if in_form else 1.0 - self.form_reward
        else:
            score = -1.0 + self.form_reward * in_form
        return verdict._replace(score=score, measures={"in_form": float(in_form)})


def _one_line(response: str) -> str | None:
    """Returns the answer in tags; one of several lines, which could hold "Answer:", is none."""
    answer = tagged_answer(response, MAX_ANSWER_CHARS)
    return answer if answer is None or answer.isprintable() else None


def tagged_answer(response: str, max_chars: int) -> str | None:
    """Returns what stands between the last <answer> and the </answer> that ends the response.

    None where there is no such end, or where the answer is longer than `max_chars`.
    """
    text = response.rstrip()
    _, found, answer = text.removesuffix("</answer>").rpartition("<answer>")
    if not found or not text.endswith("</answer>") or "</answer>" in answer:
        return None
    answer = answer.strip()
    return answer if len(answer) <= max_chars else None


def keeps_form(response: str) -> bool:
    """True for <think>thoughts</think><answer>answer</answer>, each once and neither empty."""
    text = response.strip()
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if any(text.count(tag) != 1 for tag in tags) or not text.startswith("<think>"):
        return False
    thoughts, _, rest = text.removeprefix("<think>").partition("</think>")
    in_order = rest.lstrip().startswith("<answer>")
    return bool(in_order and thoughts.strip() and _one_line(text))
