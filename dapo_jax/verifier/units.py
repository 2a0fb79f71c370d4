"""Units of numbers in one spelling: "h^-1 km" for kilometers per hour. None is converted."""

import functools
import itertools
import re
from collections.abc import Sequence

# Each entry is a symbol and its names. The metric ones take a prefix: km, kilometer.
_METRIC = (
    "m:meter:metre g:gram:gramme:gm s:second:sec l:liter:litre:L J:joule N:newton W:watt V:volt "
    "A:ampere:amp K:kelvin C:coulomb Pa:pascal Hz:hertz eV:electronvolt mol:mole Ω:ohm T:tesla "
    "F:farad H:henry Wb:weber B:byte cal:calorie bar pc:parsec rad:radian t:ton:tonne M:molar"
)
_OTHER = (
    r"min:minute h:hour:hr day:d week:wk month year:yr in:inch:inche ft:feet:foot mi:mile yd:yard "
    r"lb:pound:lbf oz:ounce gal:gallon acre hectare:ha dollar:usd:\$ cent euro:€ £ yuan:元 yen:¥ "
    r"%:percent:pct °:degree:deg:度 ℃:celsius ℉:fahrenheit Å:angstrom atm:atmosphere erg ' '' "
    r"ly:lightyear dyn:dyne G:gauss rpm bit person:people child:children :unit:old"
)
_PREFIXES = "n:nano μ:micro m:milli c:centi d:deci k:kilo M:mega G:giga T:tera p:pico f:femto"
_COMPOUNDS = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "cc": "cm^3", "kWh": "kW*h"}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
# "per square meter", "/ s ^ -2", "* h", "seconds squared".
_FACTOR = re.compile(
    r" *(?P<per>/ *|per )?(?:\* *)?(?:(?P<before>square|sq|cubic|cu) )?"
    r"(?P<name>(?!(?:per|squared?|cubed|cubic|sq|cu)(?: |$))[^\s\d*/^-]+)"
    r"(?: *\^ *(?P<power>-?\d+)| (?P<behind>squared|cubed)(?!\S))? *"
)
MONEY = frozenset((r"\$", "€", "£", "¥"))
SIGNS = MONEY | {"%", "°", "℃", "℉", "'"}  # units that are no words
# Words that make another number of the one before them.
_PARTS = "times halves thirds quarters plus minus pairs doubles triples squares cubes roots powers"
_AMOUNTS = "tens dozens scores hundreds thousands millions billions trillions zeros negatives"
_NO_COUNTS = frozenset(f"{_PARTS} {_AMOUNTS}".split())


@functools.cache
def _spellings() -> dict[str, str]:
    """Maps each symbol and name, with and without a prefix, to the symbol."""
    metric, other, prefixes = (
        {symbol: names for symbol, *names in (entry.split(":") for entry in text.split())}
        for text in (_METRIC, _OTHER, _PREFIXES)
    )
    symbols = {}
    for (prefix, (word,)), (symbol, names) in itertools.product(prefixes.items(), metric.items()):
        whole = prefix + symbol
        symbols |= dict.fromkeys([whole, *(word + name for name in names)], whole)
    for symbol, names in (metric | other).items():
        symbols |= dict.fromkeys([symbol, *names], symbol)
    return symbols


def _symbol(word: str, *, is_known: bool) -> str | None:
    """Finds the symbol of a unit's name; a plural that is no unit may be what is counted."""
    lower, known = word.lower(), _spellings()
    for name in (word, lower, lower.removesuffix("s"), lower.removesuffix("es")):
        if name in known and (name == word or len(name) > 1):
            return known[name]
    is_count = len(word) > 3 and word.isalpha() and word == lower and word[-1] == "s" != word[-2]
    is_count = is_count and not word.endswith("ths") and word not in _NO_COUNTS
    return word if is_count or (is_known and word.isalpha()) else None


def unit_of(words: Sequence[str]) -> str | None:
    """Returns one spelling of a unit, "m s^-2" for m / s ^ 2; None where a word is none."""
    text = " ".join(_COMPOUNDS.get(word, word) for word in words if word not in ("{", "}"))
    text = text.replace(r"\cdot", "*").replace("- ", "-")
    powers: dict[str, int] = {}
    sign, place = 1, 0
    while place < len(text):
        if not (factor := _FACTOR.match(text, place)):
            return None
        place, sign = factor.end(), -1 if factor["per"] else sign
        symbol = _symbol(factor["name"], is_known=sign < 0)
        is_count = symbol == factor["name"] not in _spellings()
        if symbol is None or symbol in powers or (powers and is_count and sign > 0):
            return None
        power = _POWERS.get(factor["before"] or factor["behind"]) or int(factor["power"] or 1)
        powers[symbol] = sign * power
    return " ".join(s if n == 1 else f"{s}^{n}" for s, n in sorted(powers.items()) if s and n)


def compatible(one: str, other: str) -> bool:
    """Tells whether two units of one number may be the same: none says nothing of one that is.

    Degrees of a temperature, minutes of an arc and feet by sign are asked for. Money may be left
    out where another unit stays.
    """
    if not one or not other:
        return one == other or not {one, other} & {"℃", "℉", "'", "''"}
    bare, its_bare = (
        [it for it in unit.split() if it not in ("dollar", "cent", "euro", "£", "yuan", "yen")]
        for unit in (one, other)
    )
    has_one_money = (len(bare) < len(one.split())) != (len(its_bare) < len(other.split()))
    return one == other or (has_one_money and bare == its_bare != [])
