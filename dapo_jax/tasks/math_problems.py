"""Tasks of math problems with one right answer, which the verifier grades."""

import dataclasses
import functools
from collections.abc import Sequence

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
