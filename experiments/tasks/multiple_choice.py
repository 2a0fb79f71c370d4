"""Questions with choices, from a file: one letter is right.

The choices are in one field, as a list of texts (MMLU), as texts with labels (ARC: {"text": [...],
"label": [...]}; MedQA: {"A": ..., "B": ...}), or in a field each (GPQA).
"""

import dataclasses
import random
import re
import string
from collections.abc import Sequence

from dapo_jax.tasks.readers import field, read_rows
from dapo_jax.tasks.rows import DataReport
from dapo_jax.tasks.templates import templated
from dapo_jax.types import Example, Message, Verdict
from dapo_jax.verifier.finding import TAIL_CHARS, last_answer, last_box
from dapo_jax.verifier.grammar import spelling

LETTERS = string.ascii_uppercase
_LETTERED = re.compile(r"\(?([A-Za-z])(?:[).:]+ ?(.*))?")  # B, (B), b: or B) and its text
TEMPLATE = (
    "Choose the right answer to a question. Think step by step; the last line of your response "
    "should be of the form Answer: X, where X is the letter of your choice.\n\n{problem}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultipleChoice:
    """Questions of a file; choices get the letters A, B, ... in their order.

    prompt_field, answer_field: "" is "question" and "answer". The answer is a label, the text of a
    choice, or, as a number, its place from 0. choices: the field of the choices, or their fields
    with commas between. shuffle: puts them in an order of their own for each question, the same one
    each time: needed where the right one is always the first. template: as
    `templates.template_text` reads it; "": TEMPLATE.
    """

    path: str
    prompt_field: str = ""
    answer_field: str = ""
    template: str = ""
    on_bad_row: str = "error"
    seed: int = 0
    choices: str = "choices"
    shuffle: bool = False

    def load(self) -> tuple[list[Example], DataReport]:
        """Reads the file; raises what `readers.read_rows` raises."""
        fields = [self.prompt_field or "question", self.answer_field or "answer"]
        fields += self.choices.split(",")
        return read_rows(self.path, fields, self._example, on_bad_row=self.on_bad_row)

    def _example(self, row: dict) -> tuple[tuple[Message, ...], str, dict]:
        question = field(row, self.prompt_field or "question")
        answer = field(row, self.answer_field or "answer")
        labels, choices = _choices([field(row, name) for name in self.choices.split(",")])
        right = choices[_place(answer, labels, choices)]
        if self.shuffle:
            random.Random(f"{self.seed} {question}").shuffle(choices)
        lettered = [f"{letter}) {text}" for letter, text in zip(LETTERS, choices, strict=False)]
        prompt = templated("\n".join([str(question), *lettered]), self.template or TEMPLATE)
        return prompt, LETTERS[choices.index(right)], {"choices": choices}

    def grade(self, response: str, example: Example) -> Verdict:
        """Grades the last line "Answer: ...", or else the last box of the response's end.

        It must say one letter, alone or before its choice ("(B)", "B) text"), or the text of one
        choice.
        """
        answer = last_answer(response)
        if answer is None:
            answer = last_box(response[-TAIL_CHARS:])
        if answer is None or not answer.strip():
            return Verdict(False, None, "no_answer" if answer is None else "empty_answer")
        form = spelling(answer)
        letter = _letter(form, example.extra["choices"])
        if letter is None:
            return Verdict(False, form, "unreadable_answer")
        if letter != example.answer:
            return Verdict(False, letter, "wrong")
        return Verdict(True, letter, "correct")


def _choices(values: Sequence) -> tuple[list[str], list[str]]:
    """Returns the labels and the texts of a row's choices; ValueError for what are none."""
    if len(values) > 1:
        labels, texts = list(LETTERS), list(values)
    elif isinstance(values[0], dict):
        named = values[0]
        labels = named.get("label", list(named))
        texts = named.get("text", list(named.values()))
    else:
        labels, texts = list(LETTERS), values[0]
    if not isinstance(texts, list) or not 2 <= len(texts) <= min(len(LETTERS), len(labels)):
        raise ValueError(f"the choices are {texts!r:.80}: 2 to {len(LETTERS)} texts, in a list")
    texts = [str(text).strip() for text in texts]
    if len(set(texts)) < len(texts) or not all(texts):
        raise ValueError(f"two of the choices {texts!r:.80} are the same, or one is empty")
    return labels[: len(texts)], texts


def _place(answer: object, labels: Sequence[str], choices: Sequence[str]) -> int:
    """Finds the place of the right choice; ValueError where the answer is no choice."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    for names in (labels, choices):
        if isinstance(answer, str) and answer.strip() in names:
            return names.index(answer.strip())
    raise ValueError(f"the answer {answer!r:.80} is no label and no text of the choices")


def _letter(form: str, choices: Sequence[str]) -> str | None:
    """Returns the letter that an answer names; letters come before texts that look like them."""
    forms = [spelling(text) for text in choices]
    if named := _LETTERED.fullmatch(form):
        place = LETTERS.index(named[1].upper())
        if place < len(forms) and (not named[2] or spelling(named[2]) == forms[place]):
            return LETTERS[place]
    return LETTERS[forms.index(form)] if form and forms.count(form) == 1 else None
