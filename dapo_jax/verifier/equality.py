"""Tells whether two trees are one answer: a rule for each kind, in one place.

Numbers are compared exactly, formulas by a `Compare`: in this process those of one spelling are the
same, and `formulas` knows about the others.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from dapo_jax.verifier.grammar import Tree, is_name
from dapo_jax.verifier.units import compatible

# (answer, truth, how): whether the one is "equal" to the other, a "multiple" of it by a number, a
# "positive" one, or "checked": equal, or of other letters.
Compare = Callable[[Tree, Tree, str], bool]
FORMULA = ("number", "formula", "-", "*")
DEGREE, PERCENT, MINUS = ("formula", "1°"), ("number", Fraction(1, 100)), ("number", Fraction(-1))
INFINITY = ("formula", r"\infty")


class AlgebraNeededError(Exception):
    """Two formulas that only algebra can compare."""


def compare_exactly(one: Tree, other: Tree, how: str) -> bool:
    """Compares numbers, and formulas that are spelled alike; AlgebraNeededError for others."""
    if one == other:
        return True
    if one[0] == other[0] == "number" and how in ("equal", "checked"):
        return one[1] == other[1] or _is_rounded(one, other) or _is_rounded(other, one)
    spelled = [it[1] for it in (one, other) if it[0] == "formula" and it[1].isalpha()]
    is_word = len(spelled) == 2 and (max(map(len, spelled)) != 2 or {*spelled[0]} <= {*"ivx"})
    if how == "equal" and is_word:
        return False  # two letters, or what may be words: bad is no dab, and iv no vi
    raise AlgebraNeededError


def _is_rounded(decimal: Tree, value: Tree) -> bool:
    """Tells whether a decimal of many digits is a value that was rounded."""
    return len(decimal) > 2 and decimal[1] == round(value[1], decimal[2]) and abs(value[1]) > 1e-3


def equal(one: Tree, other: Tree, compare: Compare) -> bool:
    """Tells whether an answer is right where another is the truth; raises what `compare` does."""
    kind, kinds = one[0], {one[0], other[0]}
    if one == other or other[0] == "approximate":
        return one == other or equal(one, other[1], compare)
    if kinds & {"text", "approximate"}:
        return False
    for name, rule in (("=", _equations), ("measure", _measures), ("map", _maps)):
        if name in kinds:
            return rule(one, other, compare)
    if kinds <= {*FORMULA}:
        return compare(one, other, "equal")
    if kinds == {"matrix", "tuple"}:  # of one column
        column = [("tuple", it) for it in (one if kind == "tuple" else other)[1:]]
        return _in_order(column, (other if kind == "tuple" else one)[1:], compare)
    if len(kinds) == 1 and kind in _RULES:
        return _RULES[kind](one[1:], other[1:], compare)
    if kinds <= {"list", "or", "set"} and _collections(one, other, compare):
        return True
    if kinds == {"<"} and one[1] == other[1]:
        steps = [[("-", b, a) for a, b in itertools.pairwise(it[2:])] for it in (one, other)]
        if all(compare(a, b, "positive") for a, b in zip(*steps, strict=True)):
            return True
    (name, region), (its_name, its_region) = _region(one), _region(other)
    if None in (region, its_region) or (region, its_region) == (one, other):
        return False
    return (name == its_name or "" in (name, its_name)) and equal(region, its_region, compare)


def _equations(one: Tree, other: Tree, compare: Compare) -> bool:
    if other[0] != "=":  # one name is none of several
        return other[0] != "map" and _is_consistent(one, compare) and equal(one[-1], other, compare)
    if one[0] != "=":
        return one[0] != "map" and is_name(other[1]) and equal(one, other[-1], compare)
    if is_name(other[1]) and one[1] == other[1]:
        return _is_consistent(one, compare) and equal(one[-1], other[-1], compare)
    sides = one[2:], other[2:]
    if any(len(it) != 2 or not {it[0][0], it[1][0]} <= {*FORMULA} for it in sides):
        return False
    return compare(("-", *sides[0]), ("-", *sides[1]), "multiple")


def _is_consistent(equation: Tree, compare: Compare) -> bool:
    """Tells whether the sides of an equation are its last one, or name it.

    Behind a name, formulas of other letters are not checked: A = bh/2 = 12.
    """
    _, name, *sides, last = equation
    is_named = is_name(name, loose=True)
    for side in sides[is_named:]:
        is_formula = is_named and {side[0], last[0]} <= {*FORMULA}
        same = compare(side, last, "checked") if is_formula else equal(side, last, compare)
        if r"\dots" not in str(side[1]) and not same:
            return False
    return True


def _measures(one: Tree, other: Tree, compare: Compare) -> bool:
    """Compares numbers with units, or one of them without: 28 and 0.28 are 28 %, 0.25 is no 0.25 %.

    An angle without its sign is one of degrees if it is a number, else of radians.
    """
    values = [it[1] if it[0] == "measure" else it for it in (one, other)]
    units = [_unit(one), _unit(other)]
    if any(it[0] not in FORMULA for it in values):
        return False
    plain = values[units.index("")] if "" in units else None
    is_number = plain is not None and plain[0] == "number"
    if {*units} == {"%", ""} or ({*units} == {"°", ""} and not is_number):
        scaled = map(_without_unit, values, units)
        is_part = "°" in units or (is_number and 0 < abs(plain[1]) < 1)
        return equal(*scaled, compare) or (not is_part and equal(*values, compare))
    return compatible(*units) and equal(*values, compare)


def _without_unit(value: Tree, unit: str) -> Tree:
    if unit == "%" and value[0] == "number":
        return "number", value[1] / 100
    return ("*", value, PERCENT if unit == "%" else DEGREE) if unit else value


def _collections(one: Tree, other: Tree, compare: Compare) -> bool:
    """Compares items in any order; "and" is "or" between values, but not between words."""
    items, its_items, both = one[1:], other[1:], (*one[1:], *other[1:])
    if one[0] == other[0] == "set":
        pairs = (items, its_items), (its_items, items)
        return all(any(equal(a, b, compare) for b in right) for left, right in pairs for a in left)
    are_values = all(
        it[0] in ("number", "formula", "tuple", "measure", "map")
        and not (it[0] == "formula" and is_name(it[1]))
        for it in both
    )
    names = [{it[1] if it[0] == "=" else "" for it in side} for side in (items, its_items)]
    if (one[0] != other[0] and not are_values) or (names[0] != names[1] and len(names[1]) > 1):
        return False
    # Of several units none may be left out: a number without one has a unit of its own.
    if max(len({*map(_unit, side)}) for side in (items, its_items)) > 1:
        items, its_items = (
            [("measure", it, "none") if it[0] in FORMULA else it for it in side]
            for side in (items, its_items)
        )
    return _matched(items, its_items, compare)


def _unit(tree: Tree) -> str:
    return tree[2] if tree[0] == "measure" else ""


def _matched(items: Sequence[Tree], its_items: Sequence[Tree], compare: Compare) -> bool:
    left = [*its_items]
    for item in items if len(items) == len(left) else ():
        place = next((i for i, it in enumerate(left) if equal(item, it, compare)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _in_order(items: Sequence[Tree], its_items: Sequence[Tree], compare: Compare) -> bool:
    pairs = itertools.zip_longest(items, its_items, fillvalue=("text",))
    return all(equal(*pair, compare) for pair in pairs)


def _maps(one: Tree, other: Tree, compare: Compare) -> bool:
    """Compares values by their names.

    Values without names are in the order that the map has them in; coordinates are in theirs. An
    answer may name what a truth has not where its names are in order.
    """
    pairs, plain = (one[1:], other) if one[0] == "map" else (other[1:], one)
    if plain[0] == "map":
        (names, values), (its_names, its_values) = (
            zip(*sorted(it), strict=True) for it in (pairs, plain[1:])
        )
        return names == its_names and _in_order(values, its_values, compare)
    pairs = sorted(pairs) if {name for name, _ in pairs} <= {*"xyz"} else pairs
    names, values = zip(*pairs, strict=True)
    is_known = one is plain or [*names] == sorted(names)
    return is_known and plain[0] in ("list", "tuple") and _in_order(plain[1:], values, compare)


def _unequal(sides: Sequence[Tree], its_sides: Sequence[Tree], compare: Compare) -> bool:
    return compare(("-", *sides), ("-", *its_sides), "multiple")


def _congruent(sides: Sequence[Tree], its_sides: Sequence[Tree], compare: Compare) -> bool:
    (name, rest, modulus), (_, its_rest, _) = sides, its_sides
    if {rest[0], its_rest[0], modulus[0]} == {"number"} and modulus[1]:
        rest = its_rest if (rest[1] - its_rest[1]) % modulus[1] == 0 else rest
    return _in_order((name, rest, modulus), its_sides, compare)


ORDERED = ("tuple", "matrix", "builder", r"\setminus", "[]", "[)", "(]", "()", "[")
_RULES = dict.fromkeys(ORDERED, _in_order) | {r"\cup": _matched, r"\cap": _matched}
_RULES |= {r"\ne": _unequal, r"\equiv": _congruent}


def _region(tree: Tree) -> tuple[str, Tree | None]:
    """Reads an inequality or a membership as (letter, interval or set); None for others."""
    kind, *parts = tree
    if kind in ("[]", "[)", "(]", "()", r"\cup", "set", "list", "tuple"):
        is_pair = kind == "tuple" and len(parts) == 2
        return "", ("()", *parts) if is_pair else tree
    if tree == ("formula", r"\mathbb{R}"):
        return "", ("()", ("*", MINUS, INFINITY), INFINITY)
    if kind == r"\in" and parts[0][0] == "formula" and is_name(parts[0][1]):
        return parts[0][1], _region(parts[1])[1] or parts[1]
    if kind == "or":
        names, regions = zip(*map(_region, parts), strict=True)
        is_union = len({*names}) == 1 and None not in regions
        return names[0], (r"\cup", *regions) if is_union else None
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
    if len(sides) != 3 or sides[1][0] != "formula":
        return "", None
    (low, (_, name), high), ends = sides, "(["[signs[0] != "<"] + ")]"[signs[1] != "<"]
    if shifted := re.fullmatch(r"([a-z])([+-]\d+)", name):  # -2 < x-1 < 2
        name, shift = shifted[1], ("number", Fraction(shifted[2]))
        low, high = ("-", low, shift), ("-", high, shift)
    return (name, (ends, low, high)) if is_name(name) else ("", None)
