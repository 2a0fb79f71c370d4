"""Units of numbers in one spelling: "km h^-1" for kilometers per hour. None is converted."""

import functools
import itertools
from collections import Counter
from collections.abc import Sequence

# Each entry is a symbol and its names. The metric ones take a prefix: km, kilometer.
_METRIC = (
    "m:meter:metre g:gram:gramme:gm s:second:sec l:liter:litre:L J:joule N:newton W:watt V:volt "
    "A:ampere:amp K:kelvin C:coulomb Pa:pascal Hz:hertz eV:electronvolt mol:mole Ω:ohm T:tesla "
    "F:farad H:henry Wb:weber B:byte cal:calorie bar pc:parsec rad:radian t:ton:tonne M:molar"
)
_OTHER = (
    "min:minute h:hour:hr day:d week:wk month year:yr in:inch:inche ft:feet:foot mi:mile yd:yard "
    "lb:pound:lbf oz:ounce gal:gallon acre hectare:ha dollar:usd:$ cent euro:€ £ yuan:元 yen:¥ "
    "%:percent:pct °:degree:deg:度 °C:celsius °F:fahrenheit Å:angstrom atm:atmosphere erg ' '' "
    "ly:lightyear dyn:dyne G:gauss rpm bit person:people child:children :unit:old"
)
_PREFIXES = "n:nano μ:micro m:milli c:centi d:deci k:kilo M:mega G:giga T:tera p:pico f:femto"
_COMPOUNDS = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "cc": "cm^3", "kWh": "kW*h"}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
MONEY = frozenset(("dollar", "cent", "euro", "£", "yuan", "yen"))
# Words that make another number of the one before them.
_NO_COUNTS = ("times", "halves", "thirds", "quarters", "plus", "minus")


@functools.cache
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


def symbol_of(word: str) -> str | None:
    """Finds the symbol of a unit's name, singular or plural; "" for a word that says nothing."""
    lower = word.lower()
    tries = (word, lower, lower.removesuffix("s"), lower.removesuffix("es"))
    known = [_spellings()[it] for it in tries if it in _spellings() and (it == word or len(it) > 1)]
    return known[0] if known else None


def is_count(word: str) -> bool:
    """Tells whether a word is what a number may count: a plural such as apples."""
    fits = len(word) > 3 and word.isalpha() and word.islower() and word.endswith("s")
    return fits and not word.endswith(("ths", "ss")) and word not in _NO_COUNTS


def unit_of(words: Sequence[str]) -> str | None:
    """Returns one spelling of a unit, "m s^-2" for m / s ^ 2; None where a word is none."""
    total: Counter = Counter()
    words = [part for word in words for part in _parts(_COMPOUNDS.get(word, word))]
    sign, power, last, behind_per = 1, 1, "", False
    for word in words:
        if word in ("/", "per"):
            sign, behind_per = -1, True
        elif word == "^":
            continue
        elif word.lstrip("-").isdigit() or word in ("squared", "cubed"):
            if not last:
                return None
            total[last] *= _POWERS.get(word) or int(word)
        elif word in _POWERS:
            power = _POWERS[word]
        elif word not in ("*", r"\cdot", "(", ")"):
            last = symbol_of(word)
            if last is None and (behind_per or (len(words) == 1 and is_count(word))):
                last = word.lower()
            if last is None or (last and last in total):
                return None
            total[last] += sign * power
            power = 1
    return " ".join(s if n == 1 else f"{s}^{n}" for s, n in sorted(total.items()) if s and n)


def _parts(word: str) -> list[str]:
    for sign in "/*^":
        word = word.replace(sign, f" {sign} ")
    return word.split()


def compatible(one: str, other: str) -> bool:
    """Tells whether two units of one number may be the same: none says nothing of one that is.

    Degrees of a temperature, minutes of an arc and feet by sign are asked for. Money may be left
    out where another unit stays.
    """
    if one == other:
        return True
    if not one or not other:
        return not {*f"{one} {other}".split()} & {"°C", "°F", "'", "''"}
    factors = [[it for it in unit.split() if it not in MONEY] for unit in (one, other)]
    has_money = [len(it) < len(unit.split()) for it, unit in zip(factors, (one, other), strict=True)]
    return has_money[0] != has_money[1] and factors[0] == factors[1] != []
