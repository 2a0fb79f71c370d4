r"""Grades the answer of a response by the reference's rules, and by exact values ("strict").

Nothing here raises on any response or ground truth, and nothing that is missing, empty or not text
is ever rewarded. `Verdict.status` says why, so that every kind of failure can be counted:

correct, wrong; no_answer: none where the rules look for one; empty_answer: one with nothing in it;
empty_ground_truth; bad_input: no string, or a ground truth longer than MAX_GROUND_TRUTH_CHARS;
unreadable_answer: a text where the truth is none; by symbolic also GAVE_UP. The last answer counts,
as in the reference: words around it that take it back are not read.

Two deliberate differences from the reference: a response without an answer has the prediction
`None` (the reference's string "[INVALID]", which it rewards where the ground truth is that very
string), and an empty prediction never equals an empty ground truth (its box mode rewards that).
"""

import re

from dapo_jax.types import Verdict
from dapo_jax.verifier.equality import AlgebraNeededError, compare_exactly, equal
from dapo_jax.verifier.finding import TAIL_CHARS, last_answer, last_box
from dapo_jax.verifier.grammar import Tree, read, spelling

BOX_TAIL_CHARS = 100
MAX_GROUND_TRUTH_CHARS = 1000


def refuse(response: object, truth: object) -> Verdict | None:
    """Refuses a pair that no rules can grade; None for a pair of usable strings."""
    texts = isinstance(response, str) and isinstance(truth, str)
    usable = texts and len(truth) <= MAX_GROUND_TRUTH_CHARS
    return None if usable else Verdict(False, None, "bad_input")


def compare(prediction: str | None, truth: str) -> Verdict:
    """Compares two normal forms; nothing missing or empty equals anything."""
    if not truth.strip():
        return Verdict(False, prediction, "empty_ground_truth")
    if prediction is None:
        return Verdict(False, None, "no_answer")
    if not prediction.strip():
        return Verdict(False, prediction, "empty_answer")
    correct = prediction == truth
    return Verdict(correct, prediction, "correct" if correct else "wrong")


# Rules "dapo" and "strict_box".

_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

# In this order: each replacement sees the text that the ones before it left.
_REPLACED = r"an >|a >|.$>$|\$>|\ >| >|mbox>text|,\text{and}>,|\text{and}>,|\text{m}>\text{}"
_MINERVA_REPLACED = [pair.split(">") for pair in _REPLACED.split("|")]
_MINERVA_REMOVED = (  # in this order too, separated by single spaces
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits "
    "cents degrees cm gm pounds meters meals edges students childrentickets multiples "
    "\\text{s} \\text{.} \\text{\ns} \\text{}^2 \\text{}^3 \\text{\n} \\text{} "
    '\\mathrm{th} ^\\circ ^{\\circ} \\; ,\\! {,} " \\dots'
)
_MINERVA_UNWRAPPED = (  # an opening, and the reading of what is inside up to the closing sign
    (re.compile(r"(?m)^[^$\n]*\$([^$\n]*)\$.*"), r"\1"),
    *((re.compile(rf"\\{it}\{{([^}}\n]*)\}}"), r"\1") for it in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def dapo_form(answer: str) -> str:
    r"""Returns the reference's normal form of an answer.

    It is Minerva's (Lewkowycz et al. 2022, appendix D.1): the part after the last "=", without
    articles, spaces, a list of units, quotes and LaTeX wrappers, only the inside of the first
    "$...$", `\frac12` and `\sqrt2` with braces, a string of digits without commas. Words are
    removed wherever they occur ("banana " loses its "a "): so does the reference.
    """
    text = answer.rsplit("=", 1)[-1]
    for old, new in _MINERVA_REPLACED:
        text = text.replace(old, new)
    for word in _MINERVA_REMOVED.split(" "):
        text = text.replace(word, "")
    for pattern, inside in _MINERVA_UNWRAPPED:
        text = pattern.sub(inside, text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    return (without_commas if without_commas.isdigit() else text).strip()


def grade_dapo(response: str, truth: str) -> Verdict:
    """Grades by the rules "dapo": the last "Answer: ..." of the tail, in `dapo_form`."""
    answers = _ANSWER.findall(response[-TAIL_CHARS:])
    return compare(dapo_form(answers[-1]) if answers else None, dapo_form(truth))


def grade_box(response: str, truth: str) -> Verdict:
    """Grades by the rules "strict_box": the last box of the tail, character by character."""
    return compare(last_box(response[-BOX_TAIL_CHARS:]), truth)


# Rules "strict", and what "symbolic" decides without algebra.


def grade_strict(response: str, truth: str) -> Verdict:
    """Grades by the rules "strict": the last line "Answer: ...", by `equality` without algebra."""
    decided = decide(last_answer(response), truth)
    return decided if isinstance(decided, Verdict) else Verdict(False, decided[0], "wrong")


def decide(text: str | None, truth: str) -> Verdict | tuple[str, Tree, Tree]:
    """Returns the verdict where no algebra is needed, else what it is needed for."""
    form, answer, right = None if text is None else spelling(text), read(text or ""), read(truth)
    verdict = compare(form, spelling(truth))
    if verdict.status != "wrong":
        return verdict
    try:
        if _is_choice(form, spelling(truth)) or equal(answer, right, compare_exactly):
            return Verdict(True, form, "correct")
    except AlgebraNeededError:
        return form, answer, right
    return Verdict(False, form, "unreadable_answer" if answer[0] == "text" != right[0] else "wrong")


def _is_choice(form: str, truth: str) -> bool:
    """Tells whether a letter is one of multiple choice in the other case."""
    truth = truth.removeprefix("(").removesuffix(")")
    return truth in tuple("ABCDE") and form.removeprefix("(").removesuffix(")") == truth.lower()
