"""Tasks of math problems with one right answer, which the verifier grades."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

from dapo_jax.tasks import readers
from dapo_jax.tasks.readers import DataReport
from dapo_jax.types import Example, Verdict
from dapo_jax.verifier import check_ground_truth, verify, verify_many

# What asks for an answer, by template; and the templates that ask for what rules read, of which
# the first is that of plain prompts by default.
_ASKED = {"dapo": "Answer:", "boxed": r"\boxed"}
TEMPLATES_OF = {
    "dapo": ("dapo",),
    "strict": ("dapo",),
    "strict_box": ("boxed",),
    "math_verify": ("dapo", "boxed"),
}


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
    """Problems of a file; `readers.read` says what the fields mean.

    default_template: of plain prompts, where it is not the one that the rules read.
    """

    default_template: ClassVar[str] = ""

    path: str
    kind: str = ""
    prompt_field: str = ""
    answer_field: str = ""
    template: str = ""

    def load(self) -> tuple[list[Example], DataReport]:
        """Reads the file; raises what `readers.read` raises.

        The report counts the prompts that do not ask for what the rules read: a model that is
        never told where its answer goes has no right one.
        """
        templates = TEMPLATES_OF[self.rules]
        examples, report = readers.read(
            self.path,
            kind=self.kind,
            prompt_field=self.prompt_field,
            answer_field=self.answer_field,
            template=self.template,
            default_template=self.default_template or templates[0],
            on_bad_row=self.on_bad_row,
            check_answer=functools.partial(check_ground_truth, rules=self.rules),
        )
        asked = [_ASKED[template] for template in templates]
        texts = [example.text.lower() for example in examples]
        silent = sum(not any(words.lower() in text for words in asked) for text in texts)
        if silent and not self.default_template and self.template in ("", *_ASKED):
            note = (
                f"{silent:,} of {len(texts):,} prompts do not ask for what rules={self.rules} read "
                f"({' or '.join(asked)}); template={' or '.join(templates)} does"
            )
            report = dataclasses.replace(report, notes=(*report.notes, note))
        return examples, report
