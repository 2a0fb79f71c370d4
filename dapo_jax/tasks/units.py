r"""Units and unknowns of answers, in one spelling: 7 km is not 7 m, nor x=5 y=5.

An answer without a unit or a name says nothing against one that has it: 7 is right for 7 m.
"""

import re

_COUNTED_WORDS = (
    "unit point way integer digit student edge meal multiple solution pair people child children "
    "ticket old 个 個 种 種 人"
)
_SYMBOLS = {
    "millimeter": "mm",
    "centimeter": "cm",
    "meter": "m",
    "kilometer": "km",
    "inch": "in",
    "inche": "in",
    "feet": "ft",
    "foot": "ft",
    "mile": "mi",
    "yard": "yd",
    "gram": "g",
    "gm": "g",
    "kilogram": "kg",
    "pound": "lb",
    "ounce": "oz",
    "milliliter": "ml",
    "cc": "cm^3",
    "liter": "l",
    "second": "s",
    "sec": "s",
    "minute": "min",
    "hour": "h",
    "hr": "h",
    "wk": "week",
    "yr": "year",
    "per": "/",
    "mi/h": "mph",
    "kmh": "km/h",
    "kph": "km/h",
    "radian": "rad",
    "circ": "degree",
    "°": "degree",
    "度": "degree",
    "percent": "%",
    "pct": "%",
    "usd": "dollar",
    "元": "yuan",
}
_POWERS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
_POWER = re.compile(r"\^\{?([23])\}?|([²³])")
TEXT = r"\\(?:text(?:rm|normal)?|mathrm|mbox)"
TEXT_GROUP = re.compile(TEXT + r"\{([^{}]*)\}")
_NAME = re.compile(r"[A-Za-z]\w*(?:\([^()]*\))?(?:[-+/][A-Za-z]\w*(?:\([^()]*\))?)*")
_VARIABLE_ARGUMENT = re.compile(r"\([A-Za-z]\)")


def unit_of(text: str) -> str:
    r"""Returns one spelling for all of a unit: "cm^2" for `\text{ square centimeters}` and `cm²`.

    It is "" for no unit, and for words that count things (points, ways, students).
    """
    power = "".join(f"^{a or '23'['²³'.index(b)]}" for a, b in _POWER.findall(text))
    text = TEXT_GROUP.sub(r" \1 ", _POWER.sub("", text)).lower()
    text = text.replace("tre", "ter").replace("/", " / ")
    words = [_singular(word) for word in re.split(r"[\s{}\\^.,]+", text) if word]
    power = "".join(_POWERS.get(word, "") for word in words) or power
    words = [word for word in words if word not in _POWERS and word not in _COUNTED_WORDS.split()]
    joined = "".join(words)
    joined = _SYMBOLS.get(joined, joined)
    return joined and joined + power


def _singular(word: str) -> str:
    one = word.removesuffix("s")
    if len(word) > 3 or (len(word) == 3 and (one in _SYMBOLS or one in _SYMBOLS.values())):
        word = one  # hrs and lbs, but not ms and gas
    return _SYMBOLS.get(word, word)


def differ(one: str, other: str) -> bool:
    """Returns True where two units or two names are there and differ."""
    return bool(one and other and one != other)


def name_of(text: str) -> str:
    """Returns one spelling for all of an unknown or function before "="; "" for other text.

    The order of a sum of unknowns says nothing (m+n is n+m), nor does the letter of an argument.
    """
    name = re.sub(r"[\s{}]", "", text)
    if not _NAME.fullmatch(name) or max(map(len, re.split(r"[^A-Za-z]+", name))) > 2:
        return ""
    return "+".join(sorted(_VARIABLE_ARGUMENT.sub("", name).split("+")))
