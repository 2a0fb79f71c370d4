r"""Grades the answer of a response by its text: the reference's rules and two stricter ones.

Nothing here raises on any response or ground truth, and nothing that is missing, empty or not text
is ever rewarded. `Verdict.status` says why, so that every kind of failure can be counted:

correct, wrong; no_answer: none where the rules look for one; empty_answer: one with nothing in it;
empty_ground_truth; bad_input: no string, or a ground truth longer than MAX_GROUND_TRUTH_CHARS;
other_unit, other_name: the right number of something else, or value of another unknown. By
math_verify also unreadable_answer, unreadable_ground_truth, GAVE_UP. The last answer counts, as in
the reference: words around it that take it back are not read.

Two deliberate differences from the reference: a response without an answer has the prediction
`None` (the reference's string "[INVALID]", which it rewards where the ground truth is that very
string), and an empty prediction never equals an empty ground truth (its box mode rewards that).
"""

import re
from fractions import Fraction
from typing import NamedTuple

from dapo_jax.types import Verdict
from dapo_jax.verifier.units import (
    DOUBT,
    RAISED,
    RAISED_DIGITS,
    TEXT,
    differ,
    name_of,
    split_unit,
    unit_of,
)

TAIL_CHARS = 300
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
_MINERVA_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_MINERVA_REMOVED = (  # in this order too, separated by single spaces
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits "
    "cents degrees cm gm pounds meters meals edges students childrentickets multiples "
    "\\text{s} \\text{.} \\text{\ns} \\text{}^2 \\text{}^3 \\text{\n} \\text{} "
    '\\mathrm{th} ^\\circ ^{\\circ} \\; ,\\! {,} " \\dots'
)
_MINERVA_UNWRAPPED = (  # an opening, and the reading of what is inside up to the closing sign
    (re.compile(r"(?m)^[^$\n]*\$([^$\n]*)\$.*"), r"\1"),
    (re.compile(r"\\text\{([^}\n]*)\}"), r"\1"),
    (re.compile(r"\\textbf\{([^}\n]*)\}"), r"\1"),
    (re.compile(r"\\overline\{([^}\n]*)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def dapo_form(answer: str) -> str:
    r"""Returns the reference's normal form of an answer.

    It is Minerva's (Lewkowycz et al. 2022, appendix D.1): the part after the last "=", without
    articles, spaces, a list of units, quotes and LaTeX wrappers, only the inside of the first
    "$...$", `\frac12` and `\sqrt2` with braces, a string of digits without commas. Words are
    removed wherever they occur ("banana " loses its "a "): so does the reference, and `strict_form`
    lists what comes of it.
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


def last_box(text: str) -> str | None:
    r"""Returns what the last `\boxed{...}` holds; None where there is none, or it does not end."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    opening = start + len(r"\boxed")
    closing = closing_brace(text, opening)
    return None if closing is None else text[opening + 1 : closing]


def closing_brace(text: str, opening: int) -> int | None:
    """Finds the index of the brace that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return index
    return None


# Rules "strict".

_ANSWER_LINE = re.compile(
    r"[\W_]{0,20}(?:(?:the|my)\s{1,4})?(?:final\s{1,4})?answer[\s*_]{0,8}[:\uff1a](.*)",
    re.IGNORECASE,
)
_PLAIN_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u200b\u2060\ufeff"),  # zero width
        **dict.fromkeys("\u2010\u2011\u2013\u2212", "-"),
        **dict.fromkeys('`"\u201c\u201d$', " "),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        "\uff0c": ",",
        "\u2205": r"\emptyset ",
        "\u221e": r"\infty ",
        "\uff0e": ".",
        "\uff05": "%",
    }
)
_TEXT_PART = rf"({TEXT}\{{[^{{}}]*\}}\S{{0,5}})"
_STRICT_REPLACED = (
    (re.compile(r"\\! ?"), ""),
    (re.compile(r"\\varnothing(?![a-zA-Z])|\\\{ ?\\\}"), r"\\emptyset "),
    (re.compile(r"(?i)\b(?<!\\)infinity\b"), r"\\infty "),
    (re.compile(r"(?<=\d)\*\*(?=[-({\d])"), "^"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<!\\)\\(?:[()\[\],;: ]|(?:q?quad|displaystyle|large)(?![a-zA-Z]))|\*\*"), " "),
    (re.compile(r"\\hspace\{[^{}]*\}|(?<=[\w})])~"), " "),
    (re.compile(r"\^?\\degree(?![a-zA-Z])"), r"^\\circ"),
    (re.compile(r"\s+"), " "),
    (re.compile(rf"(?<=\d){RAISED_DIGITS}"), lambda it: f"^{{{it[0].translate(RAISED)}}}"),
    (re.compile(rf"\\frac\{{{_TEXT_PART}\}}\{{{_TEXT_PART}\}}"), r"\1/\2"),
    (re.compile(r"\\(?:left|right)(?![a-zA-Z])"), ""),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\frac ?([0-9])"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\{[^{}]*\}) ?([0-9])"), r"\1{\2}"),
    (re.compile(r"\\sqrt ?([0-9A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"(?<=\d) (?!\d{3}/)(\d+)/(\d+)"), r"\\frac{\1}{\2}"),  # 2 1/2 is a mixed number
    # A list: 101, 103 is no 101103.
    (re.compile(r"(?<=\d), (?=\d{3}(?!\d))(?![^()\[\]{}]*[)\]}])"), ";"),
    # A space says something only between two words, and before a unit.
    (re.compile(r"(?<![\w}]) | (?!\w)"), ""),
)
_STYLE = re.compile(r"\\(?:boxed|fbox|textbf|mathbf|bm|textit|mathit|emph)\{")
_WRAPPER = re.compile(rf"(?:{TEXT})?\{{")
# Outside brackets.
EQUALS = re.compile(r"(?<![<>:=\\/])(?<!\\not)(?<![^\d)}]!)=(?![=/]|[^(){}]*[)}])")
_LITERAL = re.compile(
    r"[+-]?(?:(?:[0-9]{1,3}([ ,'])[0-9]{3}(?:\1[0-9]{3})*|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_REPEATING = re.compile(r"([+-]?\d+)\.(\d*)\\(?:overline|bar|dot) ?\{?(\d+)\}?")
_SCIENTIFIC = re.compile(
    r"(?:(.*\d)(?:[eE]|(?: ?(?:\\times|\\cdot|[*\u00d7\u00b7\u22c5x]) ?)\{?10\}?\^)|([+-]?)10\^)"
    r"[{(]*([+-]?[0-9]{1,3})[)}]*"
)
_FRACTION = re.compile(r"([+-]?)([0-9]*)\\frac\{([^{}]*)\}\{([^{}]*)\}")
_WORDS = rf"{TEXT}\{{(?![^{{}}]*{DOUBT})[^{{}}\d]*\}}"
_NO_VALUE = re.compile(rf"_(?:\{{\w+\}}|\w)|(?<=[a-zA-Z'])\([^()]*\)|{_WORDS}")
_NO_NAME = re.compile(r"[\d,]|^-|(?<!\\)\b[A-Za-z]+ \w|\\text|\\mbox")
_MAX_PASSES = 100  # two or three do, except for strings made to nest


def strict_form(answer: str) -> str:
    r"""Returns the normal form of an answer under the rules "strict"; a fixed point of itself.

    Integers, decimals and fractions become the exact rational ("42", "-1/2"); anything else the
    string without what says nothing: markup, math delimiters, wrappers, spacing, a name before "=".

    Not read are a sum or product that is not partial out (`40+2=42`), words for numbers and lists
    with "and". Units, "%" and names before "=" are no part of the form; `compare_answers` refuses
    two that differ, and converts nothing.
    """
    return read_answer(answer).form


class Answer(NamedTuple):
    """An answer in the form of "strict", and its name and unit, which the form leaves out."""

    form: str
    name: str
    unit: str


def read_answer(text: str) -> Answer:
    """Reads an answer; name and unit are "" where there is none, each in one spelling."""
    name, unit = "", "dollar" if r"\$" in text else ""
    for _ in range(_MAX_PASSES):
        its_name, side = _last_side(_plain(text))
        value = exact_number(side)
        side, its_unit = split_unit(side, of_number=value is not None)
        unit, side = unit or unit_of(its_unit), side.replace("} ", "}")
        name = name or its_name
        simpler = side if value is None else str(value)
        if simpler == text:
            break
        text = simpler
    return Answer(text, name, unit)


def _plain(text: str) -> str:
    text = _without_styles(text.translate(_PLAIN_CHARACTERS))
    for pattern, new in _STRICT_REPLACED:
        text = pattern.sub(new, text)
    text = text.lstrip("*_: ").rstrip("*_,;:。、 ")
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1]
    while (it := _WRAPPER.match(text)) and closing_brace(text, it.end() - 1) == len(text) - 1:
        text = text[it.end() : -1]
    return text


def _without_styles(text: str) -> str:
    r"""Blanks out `\boxed{`, `\textbf{` and the like, and the braces that close them."""
    for style in _STYLE.finditer(text):
        begins, end = style.span()
        if (closing := closing_brace(text, end - 1)) is not None:
            text = f"{text[:begins]}{' ' * (end - begins)}{text[end:closing]} {text[closing + 1 :]}"
    return text


def _last_side(text: str) -> tuple[str, str]:
    """Splits off what is before the last "=" if it is names (m+n, f(2), a_1) or that number."""
    *others, last = EQUALS.split(text)
    value, found = exact_number(last), ""
    for side in dict.fromkeys(others):  # each once: repetition costs no time
        if is_name(side):
            found = found or name_of(side)
        elif value is None or exact_number(side) != value:
            return "", text
    return found, last


def is_name(side: str) -> bool:
    """Returns True for a side of "=" that is a name: m+n, f(2), a_1, (x,y), Total."""
    if re.fullmatch(r"\([A-Za-z](,[A-Za-z])+\)", side):
        return list(side[1::2]) == sorted(side[1::2])
    return not _NO_NAME.search(_NO_VALUE.sub("", side))


def exact_number(text: str) -> Fraction | None:
    """Reads the exact value of a decimal, a fraction or a mixed number, with or without a unit.

    Decimals may have a power of ten, as in `4.65 \\times 10^{5}` and `4.65e5`.
    """
    text, _ = split_unit(text, of_number=True)
    if match := _FRACTION.fullmatch(text):
        sign, whole, top, bottom = match.groups()
    else:
        sign, whole = "", ""
        top, slash, bottom = text.partition("/")
        bottom = bottom if slash else "1"
    whole_value, top_value, bottom_value = map(_literal, (whole or "0", top, bottom))
    if whole_value is None or top_value is None or not bottom_value:
        return None
    value = whole_value + top_value / bottom_value
    return -value if sign == "-" else value


def _literal(text: str) -> Fraction | None:
    if len(text) <= MAX_GROUND_TRUTH_CHARS and (match := _REPEATING.fullmatch(text)):
        whole, digits, again = match.groups()
        short, long = (int(f"{whole}{digits}{more}" or 0) for more in ("", again))
        return Fraction(long - short, 10 ** len(digits) * (10 ** len(again) - 1))
    power = 0
    if match := _SCIENTIFIC.fullmatch(text):
        text, power = match[1] or f"{match[2]}1", int(match[3])
    if len(text) > MAX_GROUND_TRUTH_CHARS or not _LITERAL.fullmatch(text):
        return None
    return Fraction(re.sub("[ ,']", "", text)) * Fraction(10) ** power


def last_answer(response: str) -> str | None:
    """Finds what the last line "Answer: ..." says, there or on the first line after with text."""
    lines = response[-TAIL_CHARS - 1 :].splitlines()
    if len(response) > TAIL_CHARS:
        lines = lines[1:]  # its beginning was cut off
    for index in reversed(range(len(lines))):
        if match := _ANSWER_LINE.match(lines[index]):
            candidates = [match[1], *lines[index + 1 :]]
            return next((it for it in candidates if it.strip() and strict_form(it)), "")
    return None


def compare_answers(answer: Answer | None, truth: Answer) -> Verdict:
    """Compares two answers as "strict" does."""
    verdict = compare(None if answer is None else answer.form, truth.form)
    if not verdict.correct:
        return verdict
    part_of_one = "/" in truth.form and abs(exact_number(truth.form) or 1) < 1
    if differ(answer.unit, truth.unit, part_of_one=part_of_one):
        return Verdict(False, verdict.prediction, "other_unit")
    if differ(answer.name, truth.name):
        return Verdict(False, verdict.prediction, "other_name")
    return verdict


def grade_strict(response: str, truth: str) -> Verdict:
    """Grades by the rules "strict": the last line "Answer: ...", in `strict_form`."""
    text = last_answer(response)
    return compare_answers(None if text is None else read_answer(text), read_answer(truth))
