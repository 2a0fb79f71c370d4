"""Tasks of math problems with one right answer, which the verifier grades."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from dapo_jax.tasks import readers
from dapo_jax.tasks.readers import FORMATS, KINDS, field
from dapo_jax.tasks.rows import UNANSWERED, Columns, DataError, DataReport
from dapo_jax.tasks.templates import template_text
from dapo_jax.types import Example, Verdict
from dapo_jax.verifier import (
    check_ground_truth,
    equal_answers,
    texts_among,
    verify,
    verify_many,
)

# What asks for an answer, by template; and the templates that ask for what rules read, of which
# the first is that of plain prompts by default.
_ASKED = {"dapo": "Answer:", "boxed": r"\boxed"}
TEMPLATES_OF = {
    "dapo": ("dapo",),
    "strict": ("dapo",),
    "strict_box": ("boxed",),
    "symbolic": ("dapo", "boxed"),
    "math_verify": ("boxed", "dapo"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MathTask:
    """Grades by one of RULES; where the problems come from is for the tasks below this one."""

    rules: str = "dapo"

    def grade(self, response: str, example: Example) -> Verdict:
        """Grades one response."""
        return verify(response, example.answer, rules=self.rules)

    def grade_many(self, responses: Sequence[str], example: Example) -> list[Verdict]:
        """Grades all responses to an example at once, which keeps symbolic workers busy."""
        return verify_many(responses, [example.answer] * len(responses), rules=self.rules)

    def same(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Tells which pairs of answers are two spellings of one, by the rules that grade them."""
        return equal_answers(pairs, rules=self.rules)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MathProblems(MathTask):
    """Problems of a file, by the settings of a data set (`configs.base.dataset`).

    default_template: of a class whose plain prompts take another than the rules'. With an
    environment a row is what it begins with, needs no answer, and has no template by default.
    """

    default_template: ClassVar[str] = ""

    path: str
    kind: str = ""
    prompt_field: str = ""
    answer_field: str = ""
    template: str = ""
    environment: str = ""
    on_bad_row: str = "error"

    def load(self) -> tuple[list[Example], DataReport]:
        """Reads the file, and merges its rows as `readers.read_rows` does.

        The report counts the prompts that do not ask for what the rules read: a model that is
        never told where its answer goes has no right one. Raises what `readers.read_rows` does,
        and DataError for a wrong setting.
        """
        file_format = self.kind if self.kind in FORMATS else readers.format_of(self.path)
        kind = self.kind or ("dapo_parquet" if file_format == "parquet" else file_format)
        if kind not in KINDS:
            raise DataError(f"kind = {kind!r}: must be one of {', '.join(KINDS)} or arithmetic.")
        prompt_field = self.prompt_field or KINDS[kind].prompt_field
        answer_field = self.answer_field or KINDS[kind].answer_field
        mark, templates = KINDS[kind].answer_mark, TEMPLATES_OF[self.rules]
        asks = self.default_template or ("none" if self.environment else templates[0])
        template = template_text(self.template or asks)

        def answer_in(row: dict) -> str:
            answer = readers.answer_of(field(row, answer_field), answer_field, mark)
            if file_format == "csv":  # it has no numbers: 27.0 is how they are written into one
                answer = readers.WHOLE_NUMBER.sub(r"\1", answer)
            if not mark and "####" in answer:
                raise ValueError(f'{answer_field} has "####" before its result: set kind=gsm8k')
            check_ground_truth(answer, rules=self.rules)
            return answer

        def make(row: dict) -> tuple:
            value = field(row, prompt_field)
            if self.environment:
                columns, answer = Columns(row), UNANSWERED
                try:
                    answer = answer_in(row)
                except ValueError as error:
                    if self.answer_field:
                        raise
                    columns.why = str(error)
                return readers.messages_of(value, prompt_field, template), answer, columns
            if not isinstance(value, str) and self.template not in ("", "none"):
                raise ValueError(
                    f"{prompt_field} has messages, which take no template: set it to none"
                )
            answer = answer_in(row)
            messages = readers.messages_of(value, prompt_field, template)
            begun = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
            if verify(begun, answer, rules=self.rules).correct:
                raise ValueError(f"{prompt_field} ends with an assistant's message that is right")
            return messages, answer

        examples, report = readers.read_rows(
            self.path,
            [] if self.environment else [prompt_field, answer_field],
            make,
            file_format=file_format,
            on_bad_row=self.on_bad_row,
            same=self.same,
        )
        if self.environment:
            return examples, report
        if words := texts_among([it.answer for it in examples], rules=self.rules):
            note = f"{len(words):,} of {len(examples):,} answers are compared as texts, such as "
            report = dataclasses.replace(report, notes=(*report.notes, f"{note}{words[0]!r:.80}"))
        asked = [_ASKED[name] for name in templates]
        texts = [example.text.lower() for example in examples]
        silent = sum(not any(words.lower() in text for words in asked) for text in texts)
        if silent and not self.default_template and self.template in ("", *_ASKED):
            note = f"{silent:,} of {len(texts):,} prompts do not ask for what rules={self.rules} "
            note += f"read ({' or '.join(asked)})"
            report = dataclasses.replace(report, notes=(*report.notes, note))
        return examples, report
