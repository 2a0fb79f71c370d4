"""Tells whether two trees are one answer: a rule for each kind, in one place.

Numbers are compared exactly, formulas by a `Compare`: in this process those that are spelled alike
are the same, and `formulas` knows about the others.
"""

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

from dapo_jax.verifier.grammar import Tree, is_name
from dapo_jax.verifier.units import compatible

# (answer, truth, how): whether the one is "equal" to the other, a "multiple" of it by a number, a
# "positive" one, or "checked": equal, or of other letters.
Compare = Callable[[Tree, Tree, str], bool]
FORMULA = ("number", "formula", "-", "*")
INFINITY, DEGREE = ("formula", r"\infty"), ("formula", "1°")


class AlgebraNeededError(Exception):
    """Two formulas that only algebra can compare."""


def compare_exactly(one: Tree, other: Tree, how: str) -> bool:
    """Compares numbers, and formulas that are spelled alike; AlgebraNeededError for others."""
    if one == other:
        return True
    if one[0] == other[0] == "number" and how in ("equal", "checked"):
        return one[1] == other[1] or _is_rounded(one, other) or _is_rounded(other, one)
    raise AlgebraNeededError


def _is_rounded(decimal: Tree, value: Tree) -> bool:
    """Tells whether a decimal of many digits is a value that was rounded."""
    return len(decimal) > 2 and decimal[1] == round(value[1], decimal[2]) and abs(value[1]) > 1e-3


def equal(one: Tree, other: Tree, compare: Compare) -> bool:
    """Tells whether an answer is right where another is the truth; raises what `compare` does."""
    if one == other:
        return True
    kinds, kind = {one[0], other[0]}, one[0]
    if other[0] == "approximate":
        return equal(one, other[1], compare)
    if kinds & {"text", "approximate"}:
        return False
    if "=" in kinds:
        return _equations(one, other, compare)
    if "measure" in kinds:
        return _measures(one, other, compare)
    if kinds <= {*FORMULA}:
        return compare(one, other, "equal")
    if "map" in kinds:
        return _maps(one, other, compare)
    if kinds <= {"list", "or", "set"} and _collections(one, other, compare):
        return True
    if len(kinds) == 1:
        if kind in ("tuple", "matrix", "builder", r"\setminus", "[]", "[)", "(]", "()", "["):
            return _in_order(one[1:], other[1:], compare)
        if kind in (r"\cup", r"\cap"):
            return _matched(one[1:], other[1:], compare)
        if kind == r"\ne":
            return compare(("-", *one[1:]), ("-", *other[1:]), "multiple")
        if kind == r"\equiv":
            return _congruent(one, other, compare)
        if kind == "<" and one[1] == other[1]:
            steps = [[("-", b, a) for a, b in itertools.pairwise(it[2:])] for it in (one, other)]
            if all(compare(a, b, "positive") for a, b in zip(*steps, strict=True)):
                return True
    return _regions(one, other, compare)


# An answer with a name, or with a unit.


def _equations(one: Tree, other: Tree, compare: Compare) -> bool:
    if other[0] != "=":
        return _is_consistent(one, compare) and equal(one[-1], other, compare)
    if one[0] != "=":
        return is_name(other[1]) and equal(one, other[-1], compare)
    if is_name(other[1]) and one[1] == other[1] and _is_consistent(one, compare):
        return equal(one[-1], other[-1], compare)
    sides = one[2:], other[2:]
    if any(len(it) != 2 or it[0][0] not in FORMULA or it[1][0] not in FORMULA for it in sides):
        return False
    return compare(("-", *sides[0]), ("-", *sides[1]), "multiple")


def _is_consistent(equation: Tree, compare: Compare) -> bool:
    """Tells whether the sides of an equation are its last one, or name it.

    Behind a name, formulas of other letters are not checked: A = bh/2 = 12.
    """
    _, name, *sides, last = equation
    named = is_name(name, loose=True)
    for side in sides[named:]:
        if r"\dots" in str(side[1]):
            continue
        alike = side[0] in FORMULA and last[0] in FORMULA and named
        if not (compare(side, last, "checked") if alike else equal(side, last, compare)):
            return False
    return True


def _measures(one: Tree, other: Tree, compare: Compare) -> bool:
    """Compares numbers with units, or one of them without: 28 and 0.28 are 28 %, 0.25 is no 0.25 %.

    An angle without its sign is one of degrees if it is a number, else of radians.
    """
    (value, unit), (its_value, its_unit) = (
        it[1:] if it[0] == "measure" else (it, "") for it in (one, other)
    )
    if value[0] not in FORMULA or its_value[0] not in FORMULA:
        return False
    signed, plain = (value, its_value) if unit else (its_value, value)
    is_number = plain[0] == "number"
    if {unit, its_unit} == {"%", ""}:
        if (not is_number or abs(plain[1]) >= 1 or not plain[1]) and equal(signed, plain, compare):
            return True
        return equal(("*", signed, ("number", Fraction(1, 100))), plain, compare)
    if {unit, its_unit} == {"°", ""} and not is_number:
        return equal(("*", signed, DEGREE), plain, compare)
    return compatible(unit, its_unit) and equal(value, its_value, compare)


# An answer of several parts.


def _collections(one: Tree, other: Tree, compare: Compare) -> bool:
    """Compares items in any order; "and" is "or" between values, but not between words."""
    kinds, items, its_items = {one[0], other[0]}, one[1:], other[1:]
    if kinds == {"set"}:
        return all(
            any(equal(a, b, compare) for b in right)
            for left, right in ((items, its_items), (its_items, items))
            for a in left
        )
    everything = (*items, *its_items)
    are_values = all(it[0] in ("number", "formula", "tuple", "measure", "map") for it in everything)
    if len(kinds) > 1 and (
        not are_values or any(it[0] == "formula" and it[1].isalpha() for it in everything)
    ):
        return False
    # Of several units none may be left out.
    units = {it[2] if it[0] == "measure" else "" for it in everything}
    return not ("" in units and len(units) > 2) and _matched(items, its_items, compare)


def _matched(items: Sequence[Tree], its_items: Sequence[Tree], compare: Compare) -> bool:
    left = [*its_items]
    for item in items:
        place = next((i for i, it in enumerate(left) if equal(item, it, compare)), None)
        if place is None or len(items) != len(its_items):
            return False
        del left[place]
    return not left


def _in_order(items: Sequence[Tree], its_items: Sequence[Tree], compare: Compare) -> bool:
    pairs = zip(items, its_items, strict=False)
    return len(items) == len(its_items) and all(equal(*pair, compare) for pair in pairs)


def _maps(one: Tree, other: Tree, compare: Compare) -> bool:
    """Compares values by their names; those of a tuple have the names in their order.

    Values without names are in the order that the map has them in, unless its names are one letter
    with indices.
    """
    if one[0] == other[0]:
        (names, values), (its_names, its_values) = (
            zip(*sorted(it[1:]), strict=True) for it in (one, other)
        )
        return names == its_names and _in_order(values, its_values, compare)
    pairs, plain = (one[1:], other) if one[0] == "map" else (other[1:], one)
    if plain[0] == "tuple":
        return _in_order(plain[1:], [value for _, value in sorted(pairs)], compare)
    values = [value for _, value in pairs]
    if len({name.partition("_")[0] for name, _ in pairs}) == 1 and plain[0] in ("list", "set"):
        return _matched(plain[1:], values, compare)
    return plain[0] == "list" and _in_order(plain[1:], values, compare)


def _congruent(one: Tree, other: Tree, compare: Compare) -> bool:
    (name, rest, modulus), (its_name, its_rest, its_modulus) = one[1:], other[1:]
    alike = _in_order((name, modulus), (its_name, its_modulus), compare)
    if {rest[0], its_rest[0], modulus[0]} == {"number"} and modulus[1]:
        return alike and (rest[1] - its_rest[1]) % modulus[1] == 0
    return alike and equal(rest, its_rest, compare)


def _regions(one: Tree, other: Tree, compare: Compare) -> bool:
    (name, region), (its_name, its_region) = _region(one), _region(other)
    if not region or not its_region or (one[0] == other[0] == "tuple"):
        return False
    if "" not in (name, its_name) and name != its_name:
        return False
    return (region, its_region) != (one, other) and equal(region, its_region, compare)


def _region(tree: Tree) -> tuple[str, Tree | None]:
    """Reads an inequality or a membership as (letter, interval or set)."""
    kind, *parts = tree
    if kind in ("[]", "[)", "(]", "()", r"\cup", "set", "list"):
        return "", tree
    if tree == ("formula", r"\mathbb{R}"):
        return "", ("()", ("*", ("number", Fraction(-1)), INFINITY), INFINITY)
    if kind == "tuple" and len(parts) == 2:
        return "", ("()", *parts)
    if kind == r"\in" and parts[0][0] == "formula" and is_name(parts[0][1]):
        return parts[0][1], _region(parts[1])[1] or parts[1]
    if kind == "or":
        regions = [_region(it) for it in parts]
        is_one = len({name for name, _ in regions}) == 1 and all(it for _, it in regions)
        return regions[0][0], ((r"\cup", *(it for _, it in regions)) if is_one else None)
    if kind != "<":
        return "", None
    signs, *sides = parts
    first = sides[0][1] if sides[0][0] == "formula" else ""
    if len(sides) == 2 and first[:1] == "|" == first[-1:]:
        signs, sides = signs * 2, [("*", MINUS, sides[1]), ("formula", first[1:-1]), sides[1]]
    elif len(sides) == 2 and is_name(first):
        signs, sides = ("<", *signs), [("*", MINUS, INFINITY), *sides]
    elif len(sides) == 2:
        signs, sides = (*signs, "<"), [*sides, INFINITY]
    if len(sides) != 3 or sides[1][0] != "formula" or not is_name(sides[1][1]):
        return "", None
    ends = "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"
    return sides[1][1], ("".join(ends), sides[0], sides[2])


MINUS = ("number", Fraction(-1))
