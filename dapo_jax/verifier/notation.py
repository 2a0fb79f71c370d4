r"""Takes the typesetting of an answer off: what is left is a list of tokens, with one spelling.

Spaces, dollar signs, `\left` and `\boxed{...}` say nothing; ≤ stands for its command.
"""
# ruff: noqa: RUF001

import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_CHARS = 1000  # of a text that is read


class Token(NamedTuple):
    r"""A number, letters, a command or another sign.

    spaced: behind a space; styled: in `\text{...}`, `\mathrm{...}` and the like.
    """

    kind: str
    text: str
    spaced: bool = False
    styled: bool = False


_CHARACTERS = (
    r"∅\emptyset ∞\infty ≤\le ≥\ge ≠\ne ≈\approx ≡\equiv π\pi θ\theta α\alpha β\beta φ\varphi μ\mu "
    r"√\sqrt ×\times ·\cdot ⋅\cdot ±\pm ∓\mp ∪\cup ∩\cap ∈\in ∉\notin →\to …\dots ⟨\langle "
    r"⟩\rangle ½\frac{1}{2} ⅓\frac{1}{3} ⅔\frac{2}{3} ¼\frac{1}{4} ¾\frac{3}{4} ℝ\mathbb{R} "
    r"ℤ\mathbb{Z} ℕ\mathbb{N} ℚ\mathbb{Q} µ\mu Ω\Omega"
)
_TRANSLATED = str.maketrans(
    {it[0]: f"{it[1:]} " for it in _CHARACTERS.split()}
    | dict.fromkeys("\u200b\u2060\ufeff")  # zero width
    | dict(zip('`"“”‐‑‒–−÷，．％’′', "    -----/,.%''", strict=True))
    | {chr(0xFF10 + digit): str(digit) for digit in range(10)}
)
_RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")

_REWRITTEN = (
    (re.compile("[⁻⁰¹²³⁴-⁹]+"), lambda it: f"^{{{it[0].translate(_RAISED)}}}"),
    (re.compile(r"(?<=[\d)])\*\*(?=[-(\d])"), "^"),
    (re.compile(r"\*\*|\\hspace\{[^{}]*\}"), " "),
    # Separators of thousands that nothing else can be.
    (re.compile(r"(?<=\d)(?:\{,\}|,?\\! ?|\\,|')(?=\d{3}(?!\d))|\\!"), ""),
    (re.compile(r"\\not\s*="), r"\\ne "),
    (re.compile(r"\\mathbb\s*\{?\s*([A-Z])\s*\}?"), r"\\mathbb{\1}"),
    (re.compile(r"\.{2,}"), r"\\dots "),
    (re.compile(r"\b([AaPp])\.\s?[Mm]\b\.?"), r"\1m"),
    (re.compile(r"\(\s*(?:\\text\{\s*)?\\?b?mod\b\s*\}?([^()]*)\)"), r"\\pmod{\1}"),
    (re.compile(r"(?<=[^\\\w])mod(?=[ }]*\d)"), r"\\pmod "),
    (re.compile(r"(?<!\\)\{([^{}]*)\\choose\b([^{}]*)\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"(?<!\\)\{([^{}]*)\\over\b([^{}]*)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"(\d\.)\((\d+)\)"), r"\1\\overline{\2}"),
    (re.compile(r"(?<!\w)\((\d[\dA-F]*)\)(?=_)"), r"\1"),
    (re.compile(r"(begin|end)\{array\}(?:\{[clr| ]*\})?"), r"\1{matrix}"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\circ"), "°"),
    (
        re.compile(r"°\s*(?:\\(?:text|mathrm)\s*\{\s*)?([CF])(?![a-zA-Z])\}?"),
        lambda it: "℃℉"["CF".find(it[1])],
    ),
    # \frac12 has two digits, one of them over the other.
    (re.compile(r"\\[dtc](frac|binom)"), r"\\\1"),
    (re.compile(r"\\(frac|binom)\s*(\d)"), r"\\\1{\2}"),
    (re.compile(r"(\\(?:frac|binom)(?:\{[^{}]*\}|\s*\\?[a-zA-Z]+))\s*(\d)"), r"\1{\2}"),
    (re.compile(r"(?<!\\)\b[Ii]nfinity\b"), r"\\infty "),
    (re.compile(r"\\sqrt\s*(\d+|[a-zA-Z](?![a-zA-Z]))"), r"\\sqrt{\1}"),
    (re.compile(r"\\\{\s*\\\}"), r"\\emptyset "),
)
_SAME = (
    r"leq>\le leqslant>\le geq>\ge geqslant>\ge neq>\ne varnothing>\emptyset ldots>\dots lvert>| "
    r"cdots>\dots wedge>\land vee>\lor rightarrow>\to degree>° mod>\pmod backslash>\setminus "
    r"rvert>| vert>| colon>: div>/ lt>< gt>> %>% &>&"
)
_ALIASES = dict(pair.split(">", 1) for pair in _SAME.split())
# Between brackets a comma separates: (1,200) is a pair.
_NUMBER = r"(?:\.[0-9]+|%s[0-9]+(?:\.[0-9]+)?)(?:[eE][+-]?[0-9]{1,3}(?![\w.]))?"
_THOUSANDS = (
    r"(?<![\^_])[0-9]{1,3}(?:,[0-9]{3})+(?!,?[0-9])(?:\.[0-9]+)?|"
    r"(?<![\^_])[0-9]{1,3}(?: [0-9]{3})+(?![0-9/]| [0-9])(?:\.[0-9]+)?|"
)
_OUTSIDE, _INSIDE = (
    re.compile(
        r"(?s)(?P<space>(?:\s|\$|(?<=[\w}){])~|\\[,;: ()\[\]]|\\(?:q?quad|left|right|[bB]igg?[lrm]?"
        r"|limits|displaystyle|textstyle|large|rm)(?![a-zA-Z]))+)"
        r"|(?P<style>\\(?:boxed|fbox|mathbf|boldsymbol|textbf|bm|mathit|textit|emph)\s*\{)"
        r"|(?P<styled>\\(?:text(?:rm|normal)?|math(?:rm|sf)|mbox|operatorname\*?)\s*\{)"
        r"|(?P<number>[0-9]*\.[0-9]*\s*\\(?:overline|bar|dot)\s*\{?[0-9]+\}?"
        rf"|{_NUMBER % thousands})"
        r"|(?P<command>\\mathbb\{[A-Z]\}|\\[a-zA-Z]+|\\.)|(?P<letters>[^\W\d_]+)|(?P<sign><=|>=|(?<![\d)])!=|.)"
    )
    for thousands in (_THOUSANDS, "")
)


def tokenized(text: str) -> list[Token]:
    """Lists what a text says, without marks around it; nothing of one that is too long."""
    text = text.translate(_TRANSLATED)
    text = text if len(text) <= MAX_CHARS else ""
    if text.replace(r"\$", "").count("$") == 1:  # a currency's, where no other ends a formula
        text = re.sub(r"(?<!\\)\$(?=\d)", r"\\$", text)
    if r"\begin" not in text:  # some data is escaped twice
        text = text.replace("\\\\", "\\")
    for pattern, new in () if text.strip().isdecimal() else _REWRITTEN:  # most are integers
        text = pattern.sub(new, text)
    tokens, styles, depth, place, spaced = [], [], 0, 0, False
    while place < len(text):
        match = (_INSIDE if depth > 0 else _OUTSIDE).match(text, place)
        kind, word, place = match.lastgroup, match[0], match.end()
        if kind == "command":
            word = _ALIASES.get(word[1:], word)
        if kind in ("style", "styled") or word == "{":
            styles.append(kind)
        is_end = word == "}" and styles and styles.pop() in ("style", "styled")
        if kind in ("space", "style", "styled") or is_end:
            spaced |= kind == "space" or is_end
            continue
        depth += (word in ("(", "[", r"\{")) - (word in (")", "]", r"\}"))
        is_script = word == "}" and [it.text for it in tokens[-3:-1]] in (["^", "{"], ["_", "{"])
        if is_script and (len(tokens[-1].text) == 1 or tokens[-1].kind != "letters"):
            del tokens[-2]  # x^{2} is x^2
            continue
        tokens.append(Token(kind, word, spaced, "styled" in styles))
        spaced = False
    is_open = {"style", "styled"} & {*styles}  # \boxed{42 is no number
    return _trimmed([*tokens, Token("sign", "?")] if is_open else tokens)


def _trimmed(tokens: list[Token]) -> list[Token]:
    while tokens and tokens[0].text in ("*", "_", ":"):  # emphasis has another one behind it
        tokens = tokens[1:-1] if tokens[-1].text == tokens[0].text else tokens[1:]
    power = [Token("sign", "^")]
    while tokens and tokens[-1].text in tuple(",;:.。、_") and tokens[-2:-1] != power:
        tokens = tokens[:-1]
    is_group = tokens and tokens[0].text == "{" and closing(tokens, 0) == len(tokens) - 1
    return _trimmed(tokens[1:-1]) if is_group else tokens


def closing(tokens: Sequence[Token], place: int) -> int:
    """Finds the token that closes the brace or bracket at a place; the end where none does."""
    depth = 0
    for i in range(place, len(tokens)):
        depth += (tokens[i].text in OPENS) - (tokens[i].text in CLOSES)
        if depth <= 0:
            return i
    return len(tokens)


OPENS = frozenset(("(", "[", "{", r"\{", r"\begin", r"\langle", r"\lfloor", r"\lceil"))
CLOSES = frozenset((")", "]", "}", r"\}", r"\end", r"\rangle", r"\rfloor", r"\rceil"))


def joined(tokens: Sequence[Token]) -> str:
    """Returns the one spelling of tokens, which reads as the same tokens."""
    text, last = "", None
    for token in tokens:
        if last and token.kind in ("letters", "number"):
            is_apart = token.spaced and last.kind in ("letters", "number")
            text += " " * (is_apart or last.kind in (token.kind, "command") or last.text == ",")
        text, last = text + token.text, token
    return text
