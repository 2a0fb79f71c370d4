r"""Units and unknowns of answers, in one spelling: 7 km is not 7 m, nor x=5 y=5.

An answer without a unit or a name says nothing against one that has it: 7 is right for 7 m. Units
are told apart, never converted.
"""

import functools
import itertools
import re
from collections import Counter

# Each entry is a symbol and its names. The metric ones take a prefix: km, kilometer. Words that
# count things have the symbol #, those that say nothing none.
_METRIC = (
    "m:meter:metre g:gram:gramme:gm s:second:sec l:liter:litre:L J:joule N:newton W:watt V:volt "
    "A:ampere:amp K:kelvin C:coulomb Pa:pascal Hz:hertz eV:electronvolt mol:mole Ω:ohm T:tesla "
    "F:farad H:henry Wb:weber B:byte cal:calorie bar pc:parsec rad:radian t:ton:tonne M:molar"
)
_OTHER = (
    "min:minute h:hour:hr day:d week:wk month year:yr in:inch:inche ft:feet:foot mi:mile yd:yard "
    "lb:pound:lbf oz:ounce gal:gallon acre hectare:ha dollar:usd cent €:euro £ yuan:元 ¥:yen "
    "%:percent:pct °:degree:deg:度 °C:°celsius °F:°fahrenheit Å:angstrom atm:atmosphere erg "
    "ly:lightyear dyn:dyne G:gauss μm:micron rpm bit "
    "#:point:way:integer:digit:student:edge:meal:multiple:solution:pair:people:person:child"
    ":children:ticket:个:個:种:種:人 :unit:old"
)
_PREFIXES = "n:nano μ:micro m:milli c:centi d:deci k:kilo M:mega G:giga T:tera p:pico f:femto"
_COMPOUNDS = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "cc": "cm^3", "kWh": "kW h"}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
MAX_UNIT_CHARS = 100


def _spellings() -> dict[str, str]:
    """Maps each symbol and name, with and without a prefix, to the symbol."""
    metric, other, prefixes = (
        {symbol: names for symbol, *names in (entry.split(":") for entry in text.split())}
        for text in (_METRIC, _OTHER, _PREFIXES)
    )
    found = {}
    for (prefix, (word,)), (symbol, names) in itertools.product(prefixes.items(), metric.items()):
        found |= dict.fromkeys([prefix + symbol, *(word + name for name in names)], prefix + symbol)
    for symbol, names in (metric | other).items():
        found |= dict.fromkeys([symbol, *names], symbol)
    return found


_SPELLINGS = _spellings()
_MEASURES = frozenset(_SPELLINGS.values()) - {"#", ""}
RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
RAISED_DIGITS = "[⁻⁰¹²³⁴-⁹]+"
TEXT = r"\\(?:text(?:rm|normal)?|mathrm|mbox)"
TEXT_GROUP = re.compile(TEXT + r"\{((?:[^{}]|\^\{-?\d\})*)\}")
_NAME = re.compile(r"[A-Za-z]\w*(?:\([^()]*\))?(?:[-+/][A-Za-z]\w*(?:\([^()]*\))?)*")
_VARIABLE_ARGUMENT = re.compile(r"\([a-z]\)")
# What makes more than a name of the left side of "=": |z|, y', dy/dx, e^x, ln x; not f^-1, nor
# lengths between points and their ratio.
_FORMULA = re.compile(
    r"^(?!\|[A-Z]{2}\|$|\\frac[A-Z]{4}$).*"
    r"(?:['|]|\^(?![-\d])|\\(?:bar|ddot|dot|frac|partial|ln|log|exp|sqrt|cdot|times|sin|cos|tan))"
)

# Words that make another answer of the number beside them, or no answer.
DOUBT = (
    r"(?i:\b(?:no|not|never|none|nobody|neither|nor|cannot|without|unless|except|excluded|if|whether"
    r"|let|suppose|assume|doubt|guess|maybe|may|might|could|perhaps|possibly|probably|wrong|false"
    r"|incorrect|mistaken|contradiction|fail|check|try|tries|tried|unknown|unlikely|sure|about"
    r"|around|approximate|nearly|almost|roughly|hardly|bound|more|less|fewer|than|between|at least"
    r"|at most|plus|minus|half|twice|double|triple|squared|cubed|percent points|each|hundred"
    r"|thousand|times (?:as|the)|dozen|[mbt]r?illion)s?\b|n['\u2019]t\b|\?)"
)
_LETTER = r"[^\W\d_]"
_DEGREE = r"(?:°|\^\\circ|\^\{\\circ\})"
_GREEK = r"\\(?:mu|Omega|AA|circ)(?![a-z])"
_EXPONENT = rf"\^-?\d|\^[{{(]-?\d[)}}]|{RAISED_DIGITS}"
_NO_UNIT = re.compile(
    rf"{DOUBT}|\b(?:and|or)\b"
    # Letters that are factors, and words that make another number of the one before them.
    r"|\{ *[a-zA-Z] *\}|\b(?:halves|thirds|quarters|\w+ths|factorial|pi|below|above|mod|modulo|base"
    r"|minus|negative|onwards)\b"
)
_NO_ENDS = ("/", "*", "^", "-", "(", "{", "\\", r"\cdot", r"\times")
# Where a unit may begin: a letter alone only after a space (5m is a product).
_START = re.compile(
    rf"(?: ?/)? ?(?:{TEXT}\{{|{_DEGREE}|{_GREEK}|[%€£¥]|(?<= ){_LETTER}"
    rf"|(?<![^\W\d_\\]){_LETTER}{{2}})"
)
_TAIL = re.compile(
    rf"(?:{TEXT}\{{(?:[^{{}}\d]|{_EXPONENT})*\}}|{_DEGREE}|{_GREEK}|[%€£¥]"
    rf"|(?<![A-Za-z\\]){_LETTER}+(?!{_LETTER})|{_EXPONENT}|\\cdot|[ /*().\u00b7\u22c5-]++){{1,12}}"
)
_SPELLED = (
    (TEXT_GROUP, r" \1 "),
    (re.compile(r"\\cdot|\\?[,;: ~]"), " "),
    (re.compile(r"(?:\\mu(?![a-z])|\u00b5)\s*"), "μ"),
    (re.compile(r"\\Omega|\u2126"), "Ω"),
    (re.compile(r"\\AA(?![a-z])|\u212b"), "Å"),
    (re.compile(rf"{_DEGREE}|\\circ"), "°"),
    (re.compile(r"(?i)(?:°|\bdeg(?:ree)?s?)\s*(?=[cf]\b|celsius|fahrenheit)"), "°"),
    (re.compile(RAISED_DIGITS), lambda digits: f"^{digits[0].translate(RAISED)}"),
    (re.compile(rf"\b(?:{'|'.join(_COMPOUNDS)})\b"), lambda word: _COMPOUNDS[word[0]]),
)
_TOKEN = re.compile(rf"(/|\bper\b)|\^[{{(]?(-?\d)|(°?{_LETTER}+|[°%€£¥])")


@functools.lru_cache(maxsize=1024)
def split_unit(text: str, *, of_number: bool) -> tuple[str, str]:
    """Splits off the unit that ends a number or a formula; it is "" where there is none.

    What a text group says may be a unit of a number (apples); other words are one where they are
    known, and degrees of a formula are a part of it.
    """
    for begins in _START.finditer(text, max(0, len(text) - MAX_UNIT_CHARS)):
        rest, tail = text[: begins.start()].rstrip(), text[begins.start() :]
        if rest.endswith(_NO_ENDS) or not _TAIL.fullmatch(tail):
            continue
        words, outside = _words(tail), _words(TEXT_GROUP.sub(" ", tail))
        if None in words or not words:  # words of a text group say what is counted
            fits = of_number and None not in outside and not _NO_UNIT.search(tail)
        else:
            fits = of_number or ("°" not in words and len(tail.strip()) > 1)
        if fits:
            return rest, tail
    return text, ""


def _tokens(text: str) -> list[tuple[str, str, str]]:
    for pattern, new in _SPELLED:
        text = pattern.sub(new, text)
    return _TOKEN.findall(text)


def _words(text: str) -> list[str | None]:
    """Lists the symbols of a unit's words; None for a word that is not known."""
    return [_symbol(word) for *_, word in _tokens(text) if word and word not in _POWERS]


def _symbol(word: str) -> str | None:
    """Finds the symbol of a unit's name, singular or plural, or of the symbol in other letters."""
    lower = word.lower()
    tries = (word, lower, lower.removesuffix("s"), lower.removesuffix("es"))
    known = [_SPELLINGS[it] for it in tries if it in _SPELLINGS and (it == word or len(it) > 1)]
    return known[0] if known else None


def unit_of(text: str) -> str:
    r"""Returns one spelling for all of a unit: "m s^-2" for `\mathrm{~m} / \mathrm{s}^{2}`.

    It is "" for no unit, and "#" for words that count things (points, ways, students).
    """
    factors: list[list] = []
    sign, power = 1, 1
    for slash, exponent, word in _tokens(text):
        if slash:
            sign = -1
        elif exponent or word in ("squared", "cubed"):
            for last in factors[-1:]:
                last[1] *= int(exponent or _POWERS[word])
        elif word in _POWERS:
            power = _POWERS[word]
        else:
            symbol = _symbol(word)
            factors.append([word.lower() if symbol is None else symbol, sign * power])
            power = 1
    total: Counter = Counter()
    for symbol, of_symbol in factors:
        total[symbol] += of_symbol
    return " ".join(s if n == 1 else f"{s}^{n}" for s, n in sorted(total.items()) if s and n)


def differ(one: str, other: str, *, part_of_one: bool = False) -> bool:
    """Returns True where the unit or name of an answer is another than that of the truth.

    A count is no measure. Degrees of a temperature, and a formula before "=", are asked for, and so
    is the percent sign of a part_of_one, a number below 1: 1/4 is 25 %, and no 1/4 %.
    """
    if part_of_one and (one == "%") != (other == "%"):
        return True
    if "#" in (one, other):
        factors = f"{one} {other}".replace("#", "").split()
        return bool(factors) and all(it.partition("^")[0] in _MEASURES for it in factors)
    return one != other and bool((other and one) or one in ("°C", "°F") or _FORMULA.search(other))


def name_of(text: str) -> str:
    """Returns one spelling for all of an unknown or function before "="; "" for other text.

    The order of a sum of unknowns says nothing (m+n is n+m), nor does the letter of an argument;
    a formula is its own name.
    """
    name = re.sub(r"[\s{}]|\\angle(?![a-z])", "", text)
    if _FORMULA.search(re.sub(r"\([^()]*\)", "", name)):  # P(A|B) is a name
        return name
    if not _NAME.fullmatch(name) or max(map(len, re.split(r"[^A-Za-z]+", name))) > 2:
        return ""
    return "+".join(sorted(_VARIABLE_ARGUMENT.sub("", name).split("+")))
