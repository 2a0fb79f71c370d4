r"""Takes an answer's typesetting off: what is left is a list of tokens, which has one spelling.

Spaces, dollar signs, `\left`, `\boxed{...}` and the like say nothing, a character such as ≤ stands
for its command.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_CHARS = 1000  # of a text that is read


class Token(NamedTuple):
    r"""A number, letters, a command or another sign.

    spaced: behind a space. styled: inside of `\text{...}`, `\mathrm{...}` and the like.
    """

    kind: str
    text: str
    spaced: bool = False
    styled: bool = False


_SIGNS = (
    r"∅\emptyset ∞\infty ≤\le ≥\ge ≠\ne ≈\approx ≡\equiv π\pi θ\theta α\alpha β\beta φ\varphi μ\mu "
    r"°\circ √\sqrt ×\times ·\cdot ⋅\cdot ÷/ ±\pm ∓\mp ∪\cup ∩\cap ∈\in ∉\notin →\to …\dots ⟨\langle "
    r"⟩\rangle ½\frac{1}{2} ⅓\frac{1}{3} ⅔\frac{2}{3} ¼\frac{1}{4} ¾\frac{3}{4} ℝ\mathbb{R} "
    r"ℤ\mathbb{Z} ℕ\mathbb{N} ℚ\mathbb{Q} ℂ\mathbb{C} µ\mu Ω\Omega"
)
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u200b\u2060\ufeff"),  # zero width
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-"),
        **dict.fromkeys('`"\u201c\u201d', " "),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        **{"\uff0c": ",", "\uff0e": ".", "\uff05": "%", "\u2019": "'", "\u2032": "'"},
        **{sign[0]: f"{sign[1:]} " for sign in _SIGNS.split()},
    }
)
_RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_REWRITTEN = (
    (re.compile("[⁻⁰¹²³⁴-⁹]+"), lambda it: f"^{{{it[0].translate(_RAISED)}}}"),
    (re.compile(r"(?<=[\d)])\*\*(?=[-(\d])"), "^"),
    (re.compile(r"\*\*|\\hspace\{[^{}]*\}"), " "),
    # Separators of thousands that nothing else can be, and 10^6 in a calculator's form.
    (re.compile(r"(?<=\d)(?:\{,\}|,?\\!|\\,|')(?=\d{3}(?!\d))|\\!"), ""),
    (re.compile(r"\.{2,}"), r"\\dots "),
    (re.compile(r"\b([AaPp])\.\s?[Mm]\b\.?"), r"\1m"),
    # \frac12 has two digits, one of them over the other.
    (re.compile(r"\\[dtc]?(frac|binom)\s*(\d)"), r"\\\1{\2}"),
    (re.compile(r"\\[dtc]?(frac|binom)(?![a-z])"), r"\\\1"),
    (re.compile(r"(\\(?:frac|binom)\s*(?:\{[^{}]*\}|\\?[a-zA-Z]+))\s*(\d)"), r"\1{\2}"),
    (re.compile(r"\\\{\s*\\\}"), r"\\emptyset "),
)
_ALIASES = {
    **{"leq": "le", "leqslant": "le", "leqq": "le", "geq": "ge", "geqslant": "ge", "geqq": "ge"},
    **{"neq": "ne", "varnothing": "emptyset", "ldots": "dots", "cdots": "dots", "dotsc": "dots"},
    **{"wedge": "land", "vee": "lor", "rightarrow": "to", "lbrace": "{", "rbrace": "}"},
    **{"degree": "circ", "backslash": "setminus", "lVert": "|", "rVert": "|", "Vert": "|"},
    **{"dotsm": "dots", "dotsb": "dots"},
}
_PLAIN = {"lvert": "|", "rvert": "|", "vert": "|", "colon": ":", "div": "/", "lt": "<", "gt": ">"}
_PLAIN |= {"%": "%", "&": "&", "_": "_", "#": "#"}
_SPACE = (
    r"(?P<space>(?:\s|\$|(?<=[\w})])~|\\[,;: ()\[\]]|\\(?:q?quad|left|right|[bB]igg?[lrm]?|limits"
    r"|displaystyle|textstyle|large|Large|bf|rm|it)(?![a-zA-Z]))+)"
)
_STYLE = r"(?P<style>\\(?:boxed|fbox|mathbf|boldsymbol|textbf|bm|mathit|textit|emph)\s*\{)"
_TEXT = r"(?P<styled>\\(?:text(?:rm|normal)?|math(?:rm|sf|normal)|mbox|operatorname\*?)\s*\{)"
_FIELD = r"(?P<field>\\mathbb\s*\{?\s*[A-Z]\s*\}?)"
_REPEATING = r"\d*\.\d*\s*\\(?:overline|bar|dot)\s*\{?\d+\}?"
_NUMBER = r"(?:\.\d+|%s\d+(?:\.\d+)?)(?:[eE][+-]?\d{1,3}(?![\w.]))?"
_THOUSANDS = r"\d{1,3}(?:,\d{3})+(?!,?\d)(?:\.\d+)?|\d{1,3}(?: \d{3})+(?![\d/]| \d)(?:\.\d+)?|"
_REST = r"(?P<command>\\[a-zA-Z]+|\\.)|(?P<letters>[^\W\d_]+)|(?P<sign><=|>=|(?<![\d)])!=|.)"
# Between brackets a comma separates: (1,200) is a pair.
_OUTSIDE, _INSIDE = (
    re.compile(f"(?s){_SPACE}|{_STYLE}|{_TEXT}|{_FIELD}|(?P<number>{_REPEATING}|{n})|{_REST}")
    for n in (_NUMBER % _THOUSANDS, _NUMBER % "")
)
_PAIRS = {"(": ")", "[": "]", r"\{": r"\}"}
_ENDS = frozenset((",", ";", ":", ".", "。", "、", "*", "_"))


def tokens(text: str) -> list[Token]:
    """Lists what a text says; nothing of one that is too long."""
    text = text.translate(_CHARACTERS) if len(text) <= MAX_CHARS else ""
    for pattern, new in _REWRITTEN:
        text = pattern.sub(new, text)
    found, styles, depth, place, spaced = [], [], 0, 0, False
    while place < len(text):
        match = (_INSIDE if depth > 0 else _OUTSIDE).match(text, place)
        kind, word, place = match.lastgroup, match[0], match.end()
        if kind == "command":
            name = _ALIASES.get(word[1:], word[1:])
            word = _PLAIN.get(name, f"\\{name}")
        if word == "}" and styles and (style := styles.pop()):
            spaced |= style == "styled"
            continue
        if kind in ("style", "styled") or word == "{":
            styles.append(kind if word != "{" else "")
        if kind in ("space", "style", "styled"):
            spaced |= kind == "space"
            continue
        depth += (word in _PAIRS) - (word in _PAIRS.values())
        if kind == "field":
            kind, word = "command", rf"\mathbb{{{word.rstrip('} ')[-1]}}}"
        found.append(Token(kind, word, spaced, "styled" in styles))
        spaced = False
    return _trimmed(found)


def _trimmed(found: list[Token]) -> list[Token]:
    """Takes off marks around an answer: the end of a sentence, emphasis, a pair of braces."""
    while found and found[0].text in ("*", "_", ":"):
        found = found[1:]
    while found and found[-1].text in _ENDS and (len(found) == 1 or found[-2].text != "^"):
        found = found[:-1]
    if found and found[0].text == "{" and closing(found, 0) == len(found) - 1:
        return _trimmed(found[1:-1])
    return found


def closing(found: Sequence[Token], place: int) -> int:
    """Finds the token that closes the brace at a place; the end where none does."""
    depth = 0
    for i in range(place, len(found)):
        depth += (found[i].text == "{") - (found[i].text == "}")
        if depth == 0:
            return i
    return len(found)


def joined(found: Sequence[Token]) -> str:
    """Returns the one spelling of tokens, which reads as the same tokens."""
    text, last = "", None
    for i, token in enumerate(found):
        # The braces of one token behind "^" or "_" say nothing.
        if token.text == "{" and last and last.text in "^_" and closing(found, i) == i + 2:
            continue
        if token.text == "}" and i > 2 and found[i - 2].text == "{" and found[i - 3].text in "^_":
            continue
        if last and token.kind in ("letters", "number") and last.kind != "sign":
            text += " " * (token.spaced or last.kind in (token.kind, "command"))
        text, last = text + token.text, token
    return text
