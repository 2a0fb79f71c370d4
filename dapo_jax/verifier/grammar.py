r"""The language of answers: reads a text as a tree; what the grammar does not know is a text.

    answer  = item, or items joined by "or" (alternatives) or by "," ";" "and" (a list)
    item    = side, or sides with = < > \le \ge \ne \in \equiv between; with \pm two alternatives
    side    = operand, or operands with \cup \cap \setminus between
    operand = (side, side) tuple | [side, side) interval | \{side, side\} set | \{side : answer\}
            | matrix | number | measure | formula | text

A number is exact, a measure is a formula with a unit, or a list of such. The tokens of a formula
are for `formulas`. A tree is a tuple: its kind, and its parts; `equality` says which are equal.
"""

import functools
import re
from collections.abc import Sequence
from fractions import Fraction

from dapo_jax.verifier.notation import CLOSES, OPENS, Token, closing, joined, tokenized
from dapo_jax.verifier.units import MONEY, SIGNS, unit_of

Tree = tuple
_FUNCTIONS = (
    "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan ln log exp dim deg gcd lcm max min"
)
FUNCTIONS = frozenset((*_FUNCTIONS.split(), "sqrt"))
ROUNDED_DIGITS = 10  # a decimal of so many may be a rounded value
MAX_POWER = 1_000  # of ten

_WORDS = ("no", "or", "is", "in", "at", "of", "by", "to", "if", "on", "up", "so", "an", "as", "it")
_SIZES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_SIZES |= {"trillion": 10**12}
_LITERAL = re.compile(r"(\d*)\.?(\d*)(?:\s*\\[a-z]+\s*\{?(\d+)\}?)?(?:[eE]([+-]?\d+))?")
_JOINTS = ((";",), ("or", r"\lor"), (",", "and", "&"))
_VALUES = ("number", "formula")  # of a measure
_RELATIONS = {"<=": r"\le", ">=": r"\ge", "!=": r"\ne"}
_RELATIONS |= {it: it for it in ("=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\equiv")}
_TURNED = {">": "<", r"\ge": r"\le"}
# What is neither a difference nor a product: scores, ranges of years, dates, ordinals.
_SHAPE = re.compile(r"\d+(?:-\d+)+|\d+(?:/\d+){2,}|\d*(?:1st|2nd|3rd|\dth)")
# What is before "=" and only names a value: x, a_1, f(2), AB, m+n.
_INDEX = r"(?:_(?:\w|\{[^{}]*\}))?"
_GREEK = rf"\\(?!(?:{'|'.join(FUNCTIONS)}|infty|pi)\b)[a-zA-Z]+"
_MARKED = r"\\(?:vec|hat|overline|overrightarrow|angle|triangle)\{?\s*\w+\}?"
_LETTER = rf"(?:(?!(?:e|i){_INDEX}$)[a-zA-Z]|[A-Z]{{2,3}}|{_GREEK}|{_MARKED}){_INDEX}"
_CALL = rf"{_LETTER}'*(?:\^\{{-1\}})?\([^()]*\)"
_SEGMENTS = r"\|[A-Z]{2}\||\\frac\{[A-Z]{2}\}\{[A-Z]{2}\}"
_NAME = re.compile(rf"{_LETTER}|[^\W\dxyz](?:\+[^\W\dxyz])+|{_CALL}|{_SEGMENTS}")


@functools.lru_cache(maxsize=4096)
def read(text: str) -> Tree:
    """Reads an answer; raises nothing."""
    tokens = tokenized(text)
    try:
        return _answer(tokens)
    except Exception:  # an odd answer must not end a run
        return _text(tokens)


def spelling(text: str) -> str:
    """Returns a number as an integer or a fraction, any other answer without its typesetting."""
    tree = read(text)
    return str(tree[1]) if tree[0] == "number" else joined(tokenized(text))


def _text(tokens: Sequence[Token]) -> Tree:
    if len(tokens) > 1 and tokens[0].text in ("a", "an", "the") and len(tokens[1].text) > 2:
        tokens = tokens[1:]
    folded = [(it.kind, it.text.casefold() if len(it.text) > 1 else it.text) for it in tokens]
    return "text", joined([Token(*it) for it in folded])


def is_word(token: Token) -> bool:
    """Tells whether letters are a word; others are factors, as xy and mgh, or a function."""
    text, vowels = token.text, {*token.text.lower()} & {*"aeiou"}
    if token.kind != "letters" or text in FUNCTIONS:
        return False
    if len(text) < 3:
        return text.lower() in _WORDS and not text.isupper()
    return bool(vowels - {"a"} or (vowels and not text.isupper() and {*text} - {*"abcdxyz"}))


def split(tokens: Sequence[Token], joints: Sequence[str]) -> tuple[list[list[Token]], list[str]]:
    """Splits at the joints outside of brackets; returns the parts and the joints."""
    parts, between, depth = [[]], [], 0
    for token in tokens:
        depth += (token.text in OPENS) - (token.text in CLOSES)
        if depth or token.text not in joints:
            parts[-1].append(token)
        elif parts[-1] or token.text not in ("and", "or"):  # the comma of ", and" joins nothing
            parts.append([])
            between.append(token.text)
    return [it[:-1] if it[-1:] and it[-1].text == "," else it for it in parts], between


# An answer of several items.


def _answer(tokens: Sequence[Token]) -> Tree:
    for joints in _JOINTS:
        parts, between = split(tokens, joints)
        if between:
            items = [*map(_answer, parts)]
            is_or = "or" in joints or (";" in joints and any(it[0] == "map" for it in items))
            return _joined("or" if is_or else "list", items) if all(parts) else _text(tokens)
    return _item(tokens)


def _joined(kind: str, items: list[Tree]) -> Tree:
    """Joins items; values of different names are a map, those of one name are its values."""
    inner = {it[0] for part in items if part[0] == "list" for it in part[1:]}
    if kind == "or" and not inner & {"=", "map"}:
        items = [it for part in items for it in (part[1:] if part[0] == "list" else [part])]
    if kind == "list" and [it[0] for it in items] == ["<", "<"]:  # x < 5 and 3 < x are a chain
        for (_, signs, *sides), (_, more, *rest) in (items, items[::-1]):
            if sides[-1] == rest[0]:
                return "<", (*signs, *more), *sides, *rest[1:]
    for place, item in enumerate(items[1:], start=1):  # x = 1, 2 and (x, y) = (1, 2), (3, 4)
        before = items[place - 1]
        if before[0] == "=" and item[0] in ("number", "formula", "tuple"):
            items[place] = ("=", before[1], before[2], item)
        if before[0] == "map" and item[0] == "tuple" and len(item) == len(before):
            items[place] = _map([name for name, _ in before[1:]], item[1:])
    names = [it[1] for it in items if it[0] == "="]
    if len(names) == len(items) and all(map(is_name, names)):
        if len({*names}) == 1:
            return "=", names[0], items[0][2], (kind, *(it[-1] for it in items))
        if len({*names}) == len(names) and kind == "list":
            return _map(names, [it[-1] for it in items])
    return kind, *items


def _map(names: Sequence[str], values: Sequence[Tree]) -> Tree:
    return "map", *zip(names, values, strict=True)


def is_name(name: str, *, loose: bool = False) -> bool:
    """Tells whether what is before "=" is the name of a value, or a word.

    loose: so is all that has letters, but no number and no sign before it, such as ln(y).
    """
    if _NAME.fullmatch(name) or (name.isalpha() and is_word(Token("letters", name))):
        return True
    bare = re.sub(r"\([^()]*\)|_(?:\w|\{[^{}]*\})", "", name)
    has_letters = re.search("[a-zA-Z]", bare) and not any(map(is_word, tokenized(name)))
    return bool(loose and has_letters and not re.search(r"^-|\d|\\(?:sqrt|frac)", bare))


def _item(tokens: Sequence[Token]) -> Tree:
    signs = {r"\pm": "+-", r"\mp": "-+"}
    doubled = sum(it.text in signs for it in tokens)
    if doubled > 1 or _SHAPE.fullmatch(joined(tokens)):
        return _text(tokens)
    if doubled:
        cases = (
            [it._replace(text=signs.get(it.text, [it.text] * 2)[i]) for it in tokens]
            for i in (0, 1)
        )
        return _joined("or", [*map(_item, cases)])
    parts, between = split(tokens, _RELATIONS)
    if not between:
        is_rounded = [it.text for it in tokens[:1]] == [r"\approx"]
        return ("approximate", _item(tokens[1:])) if is_rounded else _side(tokens)
    relations = [_RELATIONS[it] for it in between]
    if relations == [r"\equiv"]:
        parts[1:] = split(parts[1], [r"\pmod"])[0]
    sides = [*map(_side, parts)]
    if not all(parts) or (relations == [r"\equiv"]) != (len(parts) == len(relations) + 2):
        return _text(tokens)
    if {*relations} == {"="}:
        if sides[0][0] == sides[-1][0] == "tuple" and len(sides[0]) == len(sides[-1]):
            names = [joined(it) for it in split(parts[0][1:-1], ",;")[0]]
            if len(names) == len(sides[-1]) - 1:
                return _map(names, sides[-1][1:])
            return _text(tokens)
        names = [joined(it) for it in parts[:-1]]
        if len(names) > 1 and all(len(it) == 1 and it.islower() for it in names):  # x = y = 2
            return _map(names, sides[-1:] * len(names))
        return "=", _name(parts[0]), *sides
    if {*relations} <= {*_TURNED}:
        sides, relations = sides[::-1], [_TURNED[it] for it in reversed(relations)]
    if {*relations} <= {*_TURNED.values()}:
        return "<", tuple(relations), *sides
    return (relations[0], *sides) if len(relations) == 1 else _text(tokens)


def _name(tokens: Sequence[Token]) -> str:
    """Spells what is before "="; a word in any case."""
    is_one_word = len(tokens) == 1 and is_word(tokens[0])
    return tokens[0].text.casefold() if is_one_word else joined(tokens)


def _side(tokens: Sequence[Token]) -> Tree:
    if not tokens:
        return "text", ""
    for kind in (r"\setminus", r"\cup", r"\cap"):
        parts, between = split(tokens, [kind])
        if between:
            return (kind, *map(_side, parts)) if all(parts) else _text(tokens)
    if tokens[0].text in OPENS and (tree := _bracketed(tokens)):
        return tree
    if (value := number(tokens)) is not None:
        digits = joined(tokens).partition(".")[2]
        is_long = digits.isdigit() and len(digits) >= ROUNDED_DIGITS
        return "number", value, *([len(digits)] if is_long else [])
    return _measures(tokens) or (
        _text(tokens)
        if any(is_word(it) or it.text in ":?#@~&" for it in tokens)
        else ("formula", joined([it._replace(spaced=False) for it in tokens]))
    )


def _bracketed(tokens: Sequence[Token]) -> Tree | None:
    """Reads what is in one pair of brackets; None for anything else."""
    end = closing(tokens, 0)
    brackets, inner = f"{tokens[0].text}{tokens[min(end, len(tokens) - 1)].text}", tokens[1:end]
    if tokens[0].text == r"\begin" and 4 < end == len(tokens) - 4:
        name, rows = inner[1].text, split(inner[3:], ["\\\\"])[0]
        cells = (("tuple", *map(_side, split(row, "&")[0])) for row in rows if row)
        return ("matrix", *cells) if name in ("pmatrix", "bmatrix", "matrix") else None
    if end != len(tokens) - 1 or not inner:
        return None
    for bar in (r"\mid", ":", "|"):
        parts, between = split(inner, [bar])
        if brackets == r"\{\}" and len(between) == 1 and all(parts):
            return "builder", _side(parts[0]), _answer(parts[1])
    sides = [*map(_side, split(inner, ",;")[0])]
    if ("text", "") in sides:
        return None
    if len(sides) == 1 and (brackets == "()" or sides[0][0] == "matrix"):
        return sides[0]
    if brackets in ("()", r"\langle\rangle"):
        return "tuple", *sides
    if brackets == r"\{\}":
        return "set", *sides
    return (brackets if len(sides) == 2 else "[", *sides) if brackets[0] in "[(" else None


# Numbers, and measures.


def _literal(text: str) -> Fraction:
    """Reads one token: 1,000.5, .5e-3, 0.1\\overline{6}."""
    whole, digits, again, power = _LITERAL.fullmatch(re.sub("[ ,]", "", text)).groups()
    value = Fraction(int(f"0{whole}{digits}"), 10 ** len(digits))
    if again:
        value += Fraction(int(again), 10 ** len(digits) * (10 ** len(again) - 1))
    return value * Fraction(10) ** int(power or 0)


def number(tokens: Sequence[Token]) -> Fraction | None:
    """Reads an integer, decimal, fraction or mixed number, one with a power of ten, 4 million."""
    if tokens and tokens[0].text in ("-", "+"):
        value = number(tokens[1:]) if tokens[1:] and tokens[1].text not in ("-", "+") else None
        return -value if value is not None and tokens[0].text == "-" else value
    if len(tokens) > 1 and tokens[-1].text.lower() in _SIZES:
        value = number(tokens[:-1])
        return None if value is None else value * _SIZES[tokens[-1].text.lower()]
    parts = [it for it in tokens if it.text not in ("{", "}")]
    values = [_literal(it.text) for it in parts if it.kind == "number"]
    shape = " ".join("#" if it.kind == "number" else it.text for it in parts)
    if shape in ("#", "# / #", r"\frac # #", r"\frac - # #"):
        top, bottom = (*values, Fraction(1))[:2]
        return (-top if "-" in shape else top) / bottom if bottom else None
    if shape in ("# # / #", r"# \frac # #") and parts[0].text.isdigit():
        return values[0] + values[1] / values[2] if values[2] else None
    if power := re.fullmatch(r"(?:# (?:\\times|\\cdot|\*|x) )?# \^ (- )?#", shape):
        *factor, ten, exponent = values
        if ten == 10 and exponent.denominator == 1 and exponent <= MAX_POWER:
            return (*factor, Fraction(1))[0] * ten ** int(-exponent if power[1] else exponent)
    return None


def _measures(tokens: Sequence[Token]) -> Tree | None:
    """Reads a number or formula with its unit, or several; None for anything else."""
    measures, place = [], 0
    while place < len(tokens):
        begin = place + (tokens[place].text in MONEY)
        for middle in range(begin + 1, len(tokens) + 1):
            unit, end = _unit(tokens, middle, tokens[place:begin])
            if unit is not None:
                break
        else:
            return None
        inner = tokens[begin:middle]
        texts = {it.text.removeprefix("\\") for it in inner}
        if _SHAPE.fullmatch(joined(inner)):  # 5-10 years
            return _text(tokens)
        behind = tokens[middle] if middle < len(tokens) else Token("end", "")
        is_letter = behind.kind == "letters" and len(behind.text) == 1 and not behind.styled
        if is_letter and number(inner) is None:  # r^2 h is no measure in hours
            return None
        is_angle = unit == "°" and texts & FUNCTIONS  # of a function: \sin 30°
        # In this order: one of 300 signs would be read again for each.
        has_sign = any(it.text in SIGNS for it in inner)
        if is_angle or has_sign or (value := _side(inner))[0] not in _VALUES:
            return None
        if value[0] == "formula" and r"\times" in value[1]:  # 3 ft x 4 ft
            return _text(tokens)
        measures.append(("measure", value, unit) if unit else value)
        place = end
    return ("list", *measures) if len(measures) > 1 else measures[0]


def _unit(tokens: Sequence[Token], begin: int, money: Sequence[Token]) -> tuple[str | None, int]:
    """Reads the unit that begins at a place, up to the next number: (unit or None, its end)."""
    end = begin
    while end < len(tokens) and (
        tokens[end].kind != "number" or tokens[end - 1].text in ("^", "-", "{")
    ):
        end += 1
    words, is_behind = tokens[begin:end], tokens[begin - 1].kind == "number"
    first = words[0] if words else Token("end", "")
    if first.kind == "letters":
        # A factor has at most one of these marks: xy, 2x.
        is_unit = first.styled or first.spaced + is_behind + (len(first.text) > 1) > 1
    elif first.text in SIGNS:
        is_unit = is_behind or first.text != "'"
    else:
        is_unit = bool(money) and (begin == len(tokens) or first.text == "/")
    return unit_of([it.text for it in (*money, *words)]) if is_unit else None, end
