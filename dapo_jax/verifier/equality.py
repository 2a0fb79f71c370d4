"""Tells whether two trees are one answer: a rule for each kind, in one place.

Numbers are compared exactly. Formulas are left to a `Compare`: `compare_exactly` knows those that
are alike, or of different letters, and asks for algebra about the others.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from dapo_jax.verifier.grammar import (
    CONSTANTS,
    ELEMENTARY,
    NUMERIC,
    SEVERAL,
    Tree,
    is_name,
    negative,
    times,
)
from dapo_jax.verifier.units import compatible

MAX_BITS = 1 << 17  # of a power that is computed
MAX_EXPONENT = 10_000
MAX_TERMS = 1_000  # of factorials, binomials and series
MAX_PARTS = 400  # of a tree that algebra gets
# (answer, truth, how) -> whether the one is "equal" to the other, a "multiple" of it by a number,
# or a "positive" one.
Compare = Callable[[Tree, Tree, str], bool]


class AlgebraNeededError(Exception):
    """Two formulas that only algebra can compare."""


class TooLargeError(Exception):
    """A formula that algebra may never finish."""


def exact(tree: Tree) -> Fraction | None:
    """Computes the value of a rational formula; None for any other. Raises TooLargeError."""
    kind, *parts = tree
    if kind == "number":
        return parts[0]
    if kind not in ("+", "*", "^", "call"):
        return None
    values = [exact(it) for it in (parts if kind != "call" else parts[1:])]
    if None in values:
        return None
    if kind == "+":
        return sum(values, Fraction(0))
    if kind == "*":
        return math.prod(values, start=Fraction(1))
    if kind == "^":
        return _power(*values)
    return _call(parts[0], values)


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator > 1 or (base == 0 and exponent < 0):
        return None
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and base != 0 and bits * abs(exponent) > MAX_BITS:
        raise TooLargeError
    return base ** int(exponent) if abs(exponent) < MAX_BITS else base ** (int(exponent) % 2 + 2)


def _call(name: str, values: list[Fraction]) -> Fraction | None:
    if name == "mod" and len(values) == 2 and values[1]:
        return values[0] % values[1]
    if name in ("max", "min"):
        return max(values) if name == "max" else min(values)
    if len(values) == 1 and name in ("abs", "floor", "ceil"):
        return Fraction({"abs": abs, "floor": math.floor, "ceil": math.ceil}[name](values[0]))
    if any(it.denominator > 1 or it < 0 for it in values):
        return None
    whole = [int(it) for it in values]
    if name in ("gcd", "lcm"):
        return Fraction(getattr(math, name)(*whole))
    if name == "!" or (name == "binom" and len(whole) == 2):
        if max(whole) > MAX_TERMS:
            raise TooLargeError
        return Fraction(math.factorial(*whole) if name == "!" else math.comb(*whole))
    return None


def letters(tree: Tree) -> frozenset[str]:
    """Lists the names in a formula that stand for something unknown."""
    kind, *parts = tree
    if kind == "number":
        return frozenset()
    if kind == "name":
        return frozenset(parts) - CONSTANTS
    own, inner = frozenset(), parts
    if kind == "call":
        own, inner = frozenset(parts[:1]) - ELEMENTARY - SEVERAL, parts[1:]
    elif kind == "matrix":
        inner = [it for row in parts for it in row]
    elif kind == "big":
        return (letters(parts[4]) - letters(parts[1])) | letters(parts[2]) | letters(parts[3])
    elif kind not in NUMERIC:
        return frozenset((repr(tree),))
    return own.union(*map(letters, inner))


def size(tree: Tree) -> int:
    """Counts the parts of a formula; raises TooLargeError for one that algebra may never finish."""
    if not isinstance(tree, tuple) or tree[0] == "number":
        return 1
    if tree[0] == "^":
        exponent = exact(tree[2])
        limit = 100 if tree[1][0] in ("+", "*") else MAX_EXPONENT
        if exponent is not None and abs(exponent) > limit:
            raise TooLargeError
    if tree[0] == "big":
        low, high = exact(tree[3]), exact(tree[4])
        if tree[1] in ("sum", "prod") and None not in (low, high) and high - low > MAX_TERMS:
            raise TooLargeError
    exact(tree)
    parts = 1 + sum(map(size, tree[1:]))
    if parts > MAX_PARTS:
        raise TooLargeError
    return parts


def compare_exactly(one: Tree, other: Tree, how: str) -> bool:
    """Compares formulas as far as no algebra is needed; AlgebraNeededError for the others."""
    if one == other:
        return True
    values = exact(one), exact(other)
    if None not in values:
        return values[0] == values[1] or (how != "equal" and values[0] * values[1] > 0)
    if letters(one) != letters(other):
        return False
    size(one), size(other)
    raise AlgebraNeededError


def equal(one: Tree, other: Tree, compare: Compare) -> bool:
    """Tells whether an answer is right where another is the truth; raises what `compare` does."""
    if one == other:
        return True
    mine, right = one[0], other[0]
    if right == "approximate":
        return equal(one, other[1], compare)
    if "text" in (mine, right) or mine == "approximate":
        return False
    for kind, rule in ((r"\in", _members), ("=", _equations), ("measure", _measures)):
        if kind in (mine, right):
            return rule(one, other, compare)
    if mine in NUMERIC and right in NUMERIC:
        return _is_rounded(one, other) or compare(one, other, "equal")
    if "map" in (mine, right):
        return _maps(one, other, compare)
    if mine in _JOINED and right in _JOINED and _collections(one, other, compare):
        return True
    if mine == right and mine in _RULES and _RULES[mine](one, other, compare):
        return True
    regions = _region(one), _region(other)
    if None in regions or (mine == right and mine not in ("<", "or")):
        return False
    (name, region), (its_name, its_region) = regions
    same_name = None in (name, its_name) or name == its_name
    return same_name and (region, its_region) != (one, other) and equal(region, its_region, compare)


# An answer with a name, or with a unit.


def _same_name(one: Tree, other: Tree) -> bool:
    """f(x) is f(t), if both are functions of a letter."""
    if one[0] == other[0] == "call" and len(one) == len(other) == 3:
        letters_of = [it[2] for it in (one, other) if it[2][0] == "name" and it[2][1].islower()]
        return one[1] == other[1] and (one[2] == other[2] or len(letters_of) == 2)
    return one == other


def _members(one: Tree, other: Tree, compare: Compare) -> bool:
    if one[0] == other[0]:
        return one[1] == other[1] and equal(one[2], other[2], compare)
    if other[0] in ("=", "<"):
        return other[0] == "<" and _regions_equal(one, other, compare)
    if one[0] in ("=", "<"):
        return one[0] == "<" and _regions_equal(one, other, compare)
    return equal(*(it[2] if it[0] == r"\in" and is_name(it[1]) else it for it in (one, other)), compare)


def _equations(one: Tree, other: Tree, compare: Compare) -> bool:
    if other[0] != "=":
        return _is_consistent(one, compare) and equal(one[2], other, compare)
    if one[0] != "=":
        return is_name(other[1]) and equal(one, other[2], compare)
    if is_name(other[1]) and _same_name(one[1], other[1]) and _is_consistent(one, compare):
        if equal(one[2], other[2], compare):
            return True
    if any(it[0] not in NUMERIC for it in (*one[1:3], *other[1:3])) or len(one) > 3:
        return False
    return compare(_difference(*one[1:3]), _difference(*other[1:3]), "multiple")


def _difference(one: Tree, other: Tree) -> Tree:
    return "+", one, negative(other)


def _is_consistent(equation: Tree, compare: Compare) -> bool:
    """Tells whether the sides of an equation are its last one, or name it.

    Behind a name, formulas of other letters are not checked: A = bh/2 = 12.
    """
    _, left, right, *middle = equation
    is_named = bool(letters(left)) and is_name(left, loose=True)
    for side in middle if is_named else (left, *middle):
        known = _letters_of(side) == _letters_of(right)
        if r"\dots" in repr(side) or (is_named and not known):
            continue
        if not known or not equal(side, right, compare):
            return False
    return True


def _letters_of(tree: Tree) -> frozenset[str]:
    return letters(tree[1] if tree[0] == "measure" else tree)


def _measures(one: Tree, other: Tree, compare: Compare) -> bool:
    """Compares numbers with units, or one of them without: 28 and 0.28 are 28 %, 0.25 is no 0.25 %.

    An angle without its sign is one of degrees if it is a number, else of radians.
    """
    (value, unit), (its_value, its_unit) = (
        it[1:] if it[0] == "measure" else (it, "") for it in (one, other)
    )
    if value[0] not in NUMERIC or its_value[0] not in NUMERIC:
        return False
    if {unit, its_unit} == {"%", ""}:
        percent, plain = (value, its_value) if unit else (its_value, value)
        number = exact(plain)
        if number is None or abs(number) >= 1 or number == 0:
            if equal(percent, plain, compare):
                return True
        return equal(times(percent, ("number", Fraction(1, 100))), plain, compare)
    if {unit, its_unit} == {"°", ""}:
        degrees, plain = (value, its_value) if unit else (its_value, value)
        if exact(plain) is None:
            return equal(times(degrees, ("name", "°")), plain, compare)
    return compatible(unit, its_unit) and equal(value, its_value, compare)


def _is_rounded(one: Tree, other: Tree) -> bool:
    """Tells whether one of two numbers is the other, written as a decimal of many digits."""
    for decimal, number in ((one, other), (other, one)):
        if decimal[0] == "number" and len(decimal) > 2 and (value := exact(number)) is not None:
            if decimal[1] == round(value, decimal[2]) and abs(value) * 10 ** decimal[2] > 10**9:
                return True
    return False


# An answer of several parts.

_JOINED = ("list", "or", "set")


def _collections(one: Tree, other: Tree, compare: Compare) -> bool:
    """Compares items in any order; "and" is "or" between values, but not between words."""
    kinds, items, its_items = {one[0], other[0]}, [*one[1:]], [*other[1:]]
    if kinds == {"set"}:
        pairs = ((items, its_items), (its_items, items))
        return all(any(equal(a, b, compare) for b in many) for few, many in pairs for a in few)
    values = (*NUMERIC, "tuple", "measure", "map")
    if len(kinds) > 1 and not all(it[0] in values[1:] and it[0] != "name" or it[0] == "number" for it in (*items, *its_items)):
        return False
    # Of several units none may be left out.
    if len({it[2] for it in (*items, *its_items) if it[0] == "measure"}) > 1:
        if any(it[0] in NUMERIC for it in (*items, *its_items)):
            return False
    return _matched(items, its_items, compare)


def _matched(items: Sequence[Tree], its_items: Sequence[Tree], compare: Compare) -> bool:
    left = [*its_items]
    if len(items) != len(left):
        return False
    for item in items:
        place = next((i for i, it in enumerate(left) if equal(item, it, compare)), None)
        if place is None:
            return False
        del left[place]
    return True


def _in_order(items: Sequence[Tree], its_items: Sequence[Tree], compare: Compare) -> bool:
    pairs = zip(items, its_items, strict=False)
    return len(items) == len(its_items) and all(equal(*pair, compare) for pair in pairs)


def _maps(one: Tree, other: Tree, compare: Compare) -> bool:
    """Compares values by their names; those of a tuple have the names in their order.

    Values without names are in the order that the map has them in, unless its names are one letter
    with indices.
    """
    if one[0] == other[0]:
        values, its_values = dict(one[1:]), dict(other[1:])
        return values.keys() == its_values.keys() and all(
            equal(value, its_values[name], compare) for name, value in values.items()
        )
    pairs, plain = (one[1:], other) if one[0] == "map" else (other[1:], one)
    names, values = [name for name, _ in pairs], [value for _, value in pairs]
    if plain[0] == "tuple" and all(name[0] == "name" and len(name[1]) == 1 for name in names):
        ordered = [value for _, value in sorted(pairs, key=lambda it: it[0])]
        return _in_order(plain[1:], ordered, compare)
    is_indexed = len({name[1].partition("_")[0] for name in names if name[0] == "name"}) == 1
    if is_indexed and plain[0] in _JOINED:
        return _matched(plain[1:], values, compare)
    return plain[0] == "list" and _in_order(plain[1:], values, compare)


def _chains(one: Tree, other: Tree, compare: Compare) -> bool:
    (sides, relations), (its_sides, its_relations) = one[1:], other[1:]
    if relations != its_relations or any(it[0] not in NUMERIC for it in (*sides, *its_sides)):
        return False
    steps, its_steps = (
        [_difference(b, a) for a, b in zip(it, it[1:], strict=False)] for it in (sides, its_sides)
    )
    return all(compare(a, b, "positive") for a, b in zip(steps, its_steps, strict=True))


def _congruences(one: Tree, other: Tree, compare: Compare) -> bool:
    values = [exact(it) for it in (one[2], other[2], other[3])]
    congruent = None not in values and values[2] and (values[0] - values[1]) % values[2] == 0
    ends = (one[1], one[3]), (other[1], other[3])
    return _in_order(*ends, compare) and (congruent or equal(one[2], other[2], compare))


def _ordered(one: Tree, other: Tree, compare: Compare) -> bool:
    return _in_order(one[1:], other[1:], compare)


def _unordered(one: Tree, other: Tree, compare: Compare) -> bool:
    return _matched(one[1:], other[1:], compare)


def _intervals(one: Tree, other: Tree, compare: Compare) -> bool:
    same_ends = (one[1], one[4]) == (other[1], other[4])
    return same_ends and _in_order(one[2:4], other[2:4], compare)


def _unequal(one: Tree, other: Tree, compare: Compare) -> bool:
    return compare(_difference(*one[1:]), _difference(*other[1:]), "multiple")


_RULES = {
    **dict.fromkeys(("tuple", "row", "builder", r"\setminus", r"\notin"), _ordered),
    **dict.fromkeys((r"\cup", r"\cap"), _unordered),
    **{"interval": _intervals, "<": _chains, r"\equiv": _congruences, r"\ne": _unequal},
}


def _regions_equal(one: Tree, other: Tree, compare: Compare) -> bool:
    regions = _region(one), _region(other)
    if None in regions:
        return False
    (name, region), (its_name, its_region) = regions
    return (None in (name, its_name) or name == its_name) and equal(region, its_region, compare)


def _region(tree: Tree) -> tuple[str | None, Tree] | None:
    """Reads an inequality of one letter as an interval of it: (letter, interval), or None."""
    kind, *parts = tree
    infinity = ("name", r"\infty")
    if kind in ("interval", r"\cup"):
        return None, tree
    if tree == ("name", r"\mathbb{R}"):
        return None, ("interval", "(", negative(infinity), infinity, ")")
    if kind == "tuple" and len(parts) == 2:
        return None, ("interval", "(", *parts, ")")
    if kind == r"\in" and is_name(parts[0]) and (inner := _region(parts[1])):
        return parts[0], inner[1]
    if kind == "or":
        regions = [_region(it) for it in parts]
        if None in regions or len({name for name, _ in regions}) > 1:
            return None
        return regions[0][0], (r"\cup", *(region for _, region in regions))
    if kind != "<":
        return None
    sides, relations = parts
    if len(sides) == 2:
        if sides[0][:2] == ("call", "abs"):
            sides, relations = (negative(sides[1]), sides[0][2], sides[1]), relations * 2
        elif is_name(sides[0]):
            sides, relations = (negative(infinity), *sides), ("<", *relations)
        else:
            sides, relations = (*sides, infinity), (*relations, "<")
    low, name, high = sides if len(sides) == 3 else (None, ("number",), None)
    if name[0] != "name" or not is_name(name) or letters(low) or letters(high):
        return None
    ends = "(" if relations[0] == "<" else "[", ")" if relations[1] == "<" else "]"
    return name, ("interval", ends[0], low, high, ends[1])
