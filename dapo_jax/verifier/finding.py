r"""Finds the answer in a response: the last line "Answer: ...", or the last box.

A box is the answer unless it is a part of a formula. A sentence that states a value, such as "The
largest $n$ is 34", says that value.
"""

import re

from dapo_jax.verifier.grammar import read
from dapo_jax.verifier.notation import tokenized

TAIL_CHARS = 300
SYMBOLIC_TAIL_CHARS = 1000
# Words that make another answer of the number beside them, or no answer.
DOUBT = (
    r"(?i:\b(?:no|not|never|none|nobody|neither|nor|cannot|without|unless|except|excluded|if|whether"
    r"|let|suppose|assume|doubt|guess|maybe|may|might|could|perhaps|possibly|probably|wrong|false"
    r"|incorrect|mistaken|contradiction|fail|check|try|tries|tried|unknown|unlikely|sure|about"
    r"|around|approximate|nearly|almost|roughly|hardly|bound|more|less|fewer|than|between|at least"
    r"|at most|plus|minus|half|twice|double|triple|squared|cubed|percent points|each|hundred"
    r"|thousand|times (?:as|the)|dozen|[mbt]r?illion|of the answer)s?\b|n['\u2019]t\b|\?)"
)
_ANSWER_LINE = re.compile(
    r"[\W_]{0,20}(?:(?:the|my)\s{1,4})?(?:final\s{1,4})?answer[\s*_]{0,8}[:\uff1a](.*)",
    re.IGNORECASE,
)
_TEXT_GROUP = re.compile(r"\\(?:text(?:rm|normal)?|mathrm|mbox)\{([^{}]*)\}")
_SAYS_NOTHING = re.compile(r" (?:such|distinct|different|possible)\b| to \w+ (?:this|it|so)$")
_BOX = re.compile(r"\\f?box(?:ed)?\{")
_BETWEEN_BOXES = re.compile(
    r"|(?=[^,]*,)(?:[\s$,;{}&]|\\[()\[\],;: ]|\\q?quad)*"
    rf"|(?=.*\b(?:and|or)\b)(?:(?!{DOUBT}|\b(?:answer|so|thus|hence)\b)[^.;:!\n]){{0,90}}"
)
# The box is a part of a formula.
_OF_MORE = re.compile(
    r"(?:\\neq? ?|≠ ?|\\(?:cdot|times|[lg]t) ?|\\(?:sqrt|[dt]?frac)\{|[}_^]\{|[\d/^]|(?<!-)-"
    r"|(?<![\w</])[\w)}]{1,3} ?[<>] ?"
    r"|(?:(?<=[^-\n])[-\u2212+]|\\pm|\\(?:ln|log|pi|theta|alpha)|\\sqrt ?\w)"
    r"(?: |\\[;,!:]|\\left[(\[])*\$?)$"
)
_GOES_ON = re.compile(
    r"\^(?!\{?\\circ)| ?\\(?:cdot|times|div|pm|pi|sqrt|[dt]?frac|ln|log)(?![a-z])|\.?\d"
    r"| ?\\(?:theta|alpha|sin|cos|left)(?![a-z])| ?\\mathrm\{[a-z]\}|,\d{3}|:\d| ?- ?\d"
    r"| ?\((?=[\w+-]+\))|[ $]*or \$?\d"
    r"| ?[+/] ?(?:[\d\\({]|\w\b)|[abceiknpqruwxyzR](?![a-z])"
    r"|[ $]*(?:thousand|[mbt]r?illion|dozen)\b"
)
# The unit behind a box; "in" is most often no inch.
_BEHIND = re.compile(
    r"\}?\$?((?:\\[,;: ]|[ ~])*(?:\\(?:text(?:rm|normal)?|mathrm|mbox)\{[ ~]*(?!(?:is|as|for|where)"
    r"\b)\w[^{}]*\}|(?<= )(?!(?:in|A) \w)(?:(?:square|cubic) )?[A-Za-z]+\b)"
    r"(?:(?: per |/)[A-Za-z]+)?(?:\^\{?\d\}?)?|)"
)
_LEAD_IN = (
    r"(?:(?:so|thus|hence|therefore|then|and|finally|it follows that"
    r"|we (?:find|get|have|obtain|conclude)(?: that)?)\b[\s,:*]*)"
)
_THE_ANSWER = r"(?:(?:the|our|my)\s+)?(?:(?:final|correct)\s+)?(?:answer|result|solution)"
_PHRASE = re.compile(
    rf"(?i)(?:(?:^|[.!?:\n])[^\w.!?:\n]*{_LEAD_IN}{{0,2}}{_THE_ANSWER}"
    r"(?:\s+(?:is|equals|(?:should|must|would) be)\b\s*:?|(?=\s*(?:\$|\\[(\[])))|(?:^|\n)####)(?!"
    r"\s*(?:an?\b|[a-z]{2})|[^.,;\n]* (?:if|when) )\s*((?:(?:\\\[|\$\$)\s*)?[^\n]+?)(?=\.(?:\s|$)"
    r"|\n|$)"
)
# "The largest $n$ is 34", "There are 34 ways", "John has 34 apples": up to the end of the sentence.
_CLAIM = re.compile(
    rf"(?i)(?:(?!{DOUBT}|\bI\b)[^\d.;:=\n])*?(?:(?:there (?:are|is)|(?<!we )\b(?:has|have|needs?"
    r"|costs?|paid|earned|travels at))\s+(?P<number>[$\\-]*\d[\d,]*)\$?(?P<noun>(?: [a-z-]+)*?)"
    r"(?: in total)?|(?:\b(?:is|are|equals)\b(?!.*: ?\$):?|:(?= ?\$)) *(?P<value>.+?))(?=\.\s|\.?$)"
)


def last_answer(response: str) -> str | None:
    """Finds what the last line "Answer: ..." says, there or on the first line after with text."""
    lines = response[-TAIL_CHARS - 1 :].splitlines()
    if len(response) > TAIL_CHARS:
        lines = lines[1:]  # its beginning was cut off
    for index in reversed(range(len(lines))):
        if match := _ANSWER_LINE.match(lines[index]):
            candidates = [match[1], *lines[index + 1 :]]
            return next((it for it in candidates if it.strip() and tokenized(it)), "")
    return None


def last_box(text: str) -> str | None:
    r"""Returns what the last `\boxed{...}` holds; None where there is none, or it does not end."""
    _, box, inside = text.rpartition(r"\boxed{")
    end = closing_brace(box + inside, len(box) - 1) if box else None
    return None if end is None else inside[: end - len(box)]


def closing_brace(text: str, opening: int) -> int | None:
    """Finds the index of the brace that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return index
    return None


def find_answer(response: str) -> str | None:
    r"""Finds the answer; None where there is none.

    It is the last line "Answer: ..."; without one the last `\boxed{...}`, with those joined to it
    by "," or "and", or the value of a sentence "The answer is ..." after the box.
    """
    answer, tail = last_answer(response), response[-SYMBOLIC_TAIL_CHARS:]
    if answer is not None or not (boxes := _boxes(tail)):
        return answer
    *_, phrase = [None, *_PHRASE.finditer(tail)]
    return phrase[1] if phrase and phrase.start() > boxes[-1][2] else last_boxes(tail)


def claimed(sentence: str | None) -> str | None:
    """Returns the value that a sentence states, or all of it."""
    if sentence is None:
        return None
    sentence = re.sub(
        rf"(?i)^\s*(?:{_LEAD_IN}+|answer(?=\s*[$\\]))|\s+is\s+{_THE_ANSWER}\.?$", "", sentence
    )
    claim = _CLAIM.match(_TEXT_GROUP.sub(r"\1", sentence))
    if not claim:
        return sentence
    return claim["value"] or f"{claim['number'].strip('$')} {_SAYS_NOTHING.sub('', claim['noun'])}"


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """Finds the outermost boxes: start, start of the inside, end of the inside."""
    boxes, end = [], 0
    for match in _BOX.finditer(text):
        closing = closing_brace(text, match.end() - 1)
        if closing is not None and match.start() >= end:
            boxes.append((match.start(), match.end(), closing))
            end = closing
    return boxes


def last_boxes(text: str) -> str | None:
    """Joins the last boxes, with the unit behind them; None where they are part of a formula."""
    if not (boxes := _boxes(text)):
        return None
    joined = [boxes.pop()]
    rest = text[joined[0][2] + 1 :]
    while boxes and _BETWEEN_BOXES.fullmatch(text[boxes[-1][2] + 1 : joined[0][0]]):
        joined.insert(0, boxes.pop())
    if _OF_MORE.search(text[max(0, joined[0][0] - 60) : joined[0][0]]) or _GOES_ON.match(rest):
        return None
    answer = ", ".join(text[start:end] for _, start, end in joined)
    unit = _BEHIND.match(rest)[1]
    has_unit = read(answer)[0] != "measure" and read(answer + unit)[0] in ("measure", "number")
    return answer + unit * has_unit
