"""One equality of answers: random trees in random notations, and labelled pairs.

A kind of answer draws a value, spells it in one of its notations, and changes it into another.
"""

import json
import pathlib
import random
from fractions import Fraction

import pytest
from conftest import FULL
from processes import ROOT

from dapo_jax.tasks.math_problems import MathProblems
from dapo_jax.verifier import equal_answers, verify_many
from dapo_jax.verifier.grammar import read, spelling

PAIRS = 12_000 if FULL else 1_200


def spellings(table: str) -> list[list[str]]:
    """Reads a line of spellings for each value."""
    return [line.strip().split("; ") for line in table.strip().split("\n")]


def spelled_number(value: Fraction, rng: random.Random) -> str:
    sign, size = "-" * (value < 0), abs(value)
    whole, part = divmod(size, 1)
    top, bottom = size.numerator, size.denominator
    notations = [rf"\frac{{{top}}}{{{bottom}}}", rf"\dfrac{{{3 * top}}}{{{3 * bottom}}}"]
    notations += [f"{2 * top}/{2 * bottom}"]
    if bottom == 1:
        notations += [f"{top}", f"{top:,}", f"{top}.0", f"{top:,}".replace(",", "{,}"), f"{top}"]
    elif whole:
        notations += [rf"{whole}\frac{{{part.numerator}}}{{{bottom}}}", f"{whole} {part}"]
    if 10**6 % bottom == 0:
        decimal = f"{float(size):.6f}".rstrip("0").rstrip(".")
        notations += [decimal] * 2 + [rf"{float(10 * size):g} \times 10^{{-1}}"] * (size < 10)
    return sign + rng.choice(notations)


class Numbers:
    """Rational numbers: integers, fractions, mixed numbers, decimals, powers of ten."""

    def draw(self, rng):
        return Fraction(rng.randrange(-9999, 9999), rng.choice((1, 1, 2, 3, 4, 7, 8, 25)))

    spell = staticmethod(spelled_number)

    def change(self, value, rng):
        others = (-value - 1, value + 1, value * 10 + 1, 1 / (value + 7) if value != -7 else 5)
        return rng.choice(others)


class Measures:
    """Lists of numbers with units, and money."""

    SPELLED = spellings(r"""
        h; hours; \text{ hours}; hr
        min; minutes; \text{ min}
        kg; kilograms; \mathrm{~kg}
        km/h; kilometers per hour; \text{ km}/\text{h}
        m/s^2; \mathrm{m/s^2}; meters per second squared
        cm^2; square centimeters; \text{ cm}^2; cm²
        apples; \text{ apples}
        feet; ft
        %; \%; percent
    """)

    def draw(self, rng):
        units = rng.sample(range(len(self.SPELLED)), rng.choice((1, 1, 2)))
        return tuple((rng.randrange(1, 400), unit) for unit in units)

    def spell(self, value, rng):
        parts = [f"{n} {rng.choice(self.SPELLED[unit])}" for n, unit in value]
        return rng.choice((" ", ", ", " and ")).join(rng.sample(parts, len(parts)))

    def change(self, value, rng):
        (n, unit), *rest = value
        if rest and n != rest[0][0] and rng.random() < 0.5:  # 20 hours 5 minutes
            return (rest[0][0], unit), (n, rest[0][1])
        used = {u for _, u in value}
        other = rng.choice([it for it in range(len(self.SPELLED)) if it not in used])
        return rng.choice((((n + 1, unit), *rest), ((n, other), *rest)))


class Formulas:
    """Polynomials with roots, fractions and functions of letters, in any order of their terms."""

    ATOMS = spellings(r"""
        \sqrt{x}; x^{1/2}; \sqrt x
        \frac{1}{y}; y^{-1}; 1/y
        \pi; π
        \sin x; \sin(x)
        e^{2x}; (e^x)^2; \mathrm{e}^{2x}
        x^2; x·x; x²
        \ln y; \ln(y)
        a_1; a_{1}
        |x-3|; |3-x|
        \binom{n}{2}; \frac{n(n-1)}{2}
        \theta; θ
        i; \mathrm{i}
        f(2); f\left(2\right)
        \gcd(m,n); \gcd(n,m)
        xy; y \cdot x
    """)

    def draw(self, rng):
        atoms = rng.sample(range(len(self.ATOMS)), rng.choice((1, 2, 3)))
        return frozenset((rng.choice((-7, -2, -1, 1, 3, 5)), atom) for atom in atoms)

    def spell(self, value, rng):
        text = ""
        for factor, atom in rng.sample(sorted(value), len(value)):
            spelled = rng.choice(self.ATOMS[atom])
            n = abs(factor)
            if "1/y" in spelled or spelled[:2] == r"\s" or factor < 0:
                spelled = f"({spelled})"
            size = "" if n == 1 else rng.choice((f"{n}", rf"{n} \cdot "))
            text += ("-" if factor < 0 else "+") + size + spelled
        return text.removeprefix("+")

    def change(self, value, rng):
        (factor, atom), *rest = sorted(value)
        others = [it for it in range(len(self.ATOMS)) if it not in {a for _, a in value}]
        return frozenset((rng.choice(((factor + 13, atom), (factor, rng.choice(others)))), *rest))


class Items:
    """Sets, lists and alternatives of numbers in any order; a tuple in its own."""

    def draw(self, rng):
        kind = rng.choice(("set", "tuple"))
        return kind, tuple(rng.sample(range(-20, 90), rng.choice((2, 3, 4))))

    def spell(self, value, rng):
        kind, numbers = value
        if kind == "tuple":
            spelled = [spelled_number(Fraction(it), rng).replace(",", "") for it in numbers]
            return rf"\left({', '.join(spelled)}\right)"
        spelled = [str(it) for it in rng.sample(numbers, len(numbers))]
        ends = rng.choice((", ", " and ", " or ", ", and "))
        listed = ", ".join(spelled[:-1]) + ends + spelled[-1]
        return rng.choice((listed, rf"\{{{', '.join(spelled)}\}}", "; ".join(spelled)))

    def change(self, value, rng):
        kind, numbers = value
        other = {"set": "tuple", "tuple": "set"}[kind]
        turned = (numbers[1], numbers[0], *numbers[2:]) if kind == "tuple" else (*numbers, 91)
        others = ((*numbers[:-1], 95), numbers[:-1] or (3,), turned)
        return rng.choice((*((kind, it) for it in others), (other, numbers)))


class Intervals:
    """Intervals and unions, also as inequalities of x."""

    def draw(self, rng):
        ends = sorted(rng.sample(range(-9, 30), rng.choice((2, 4))))
        pairs = zip(ends[::2], ends[1::2], strict=True)
        return frozenset((rng.choice("(["), low, high, rng.choice(")]")) for low, high in pairs)

    def spell(self, value, rng):
        parts, as_chain = rng.sample(sorted(value), len(value)), rng.random() < 0.4
        less = {"(": "<", "[": r"\le ", ")": "<", "]": r"\le "}
        if not as_chain:
            return r" \cup ".join(f"{a}{low}, {high}{b}" for a, low, high, b in parts)
        chains = [
            (f"{low}{less[a]}x{less[b]}{high}", f"{high}{more(less[b])}x{more(less[a])}{low}")
            for a, low, high, b in parts
        ]
        return " or ".join(map(rng.choice, chains))

    def change(self, value, rng):
        (a, low, high, b), *rest = sorted(value)
        turned = {"(": "[", "[": "("}[a]
        first = rng.choice(((turned, low, high, b), (a, low - 1, high, b), (a, low, high + 30, b)))
        return frozenset((first, *rest))


def more(less: str) -> str:
    return {"<": ">", r"\le ": r"\ge "}[less]


class Maps:
    """Values of names, in any order, and several solutions."""

    NAMES = (("x", "y"), ("f(1)", "f(2)", "f(3)"), ("a_1", "a_2"), (r"\alpha", r"\beta"))

    def draw(self, rng):
        names = rng.choice(self.NAMES)
        return frozenset(zip(names, rng.sample(range(-5, 40), len(names)), strict=True))

    def spell(self, value, rng):
        parts = [f"{name}={n}" for name, n in rng.sample(sorted(value), len(value))]
        return rng.choice((", ", " and ", r" \text{ and } ")).join(parts)

    def change(self, value, rng):
        (name, n), (other, m), *rest = sorted(value)
        others = (((name, m), (other, n)), ((name, n + 50), (other, m)), (("z", n), (other, m)))
        return frozenset((*rng.choice(others), *rest))


class Equations:
    """Equations of a line, and congruences."""

    def draw(self, rng):
        kind = rng.choice(("line", "congruence"))
        return kind, *(rng.randrange(*ends) for ends in ((2, 9), (2, 9), (1, 9), (10, 20)))

    def spell(self, value, rng):
        kind, a, b, c, m = value
        if kind == "congruence":
            return rng.choice((rf"x \equiv {c} \pmod {{{m}}}", rf"x\equiv{c + m} (\bmod {m})"))
        lines = (f"{a}x+{b}y={c}", f"{b}y = {c} - {a}x", f"{2 * a}x+{2 * b}y-{2 * c}=0")
        return rng.choice((*lines, f"-{a}x-{b}y=-{c}"))

    def change(self, value, rng):
        kind, a, b, c, m = value
        return rng.choice(((kind, a, b, c + 9, m), (kind, a, b + 1, c, m + 1)))


class Texts:
    """Words, choices, ratios, scores, dates, times and numerals, which are compared as texts."""

    TEXTS = spellings(r"""
        ellipse; an ellipse; \text{Ellipse}
        hyperbola
        Monday and Friday; \text{Monday and Friday}
        Monday or Friday
        3:2; 3 : 2
        2:3
        3-2; 3 - 2
        4-3
        101_2; 101_{2}
        101_3
        12/25/2020
        6/25/1010
        10:30 AM; 10:30 \text{ a.m.}
        0x1F
        0x1E
        no solution; \text{No solution}
        Ann: 5, Bob: 7; Bob: 7, Ann: 5
        Ann: 7, Bob: 5
        A and C; A, C
        A or C
        5 red; 5 \text{ red}
        H_2O; H_{2}O
    """)

    def draw(self, rng):
        return rng.randrange(len(self.TEXTS))

    def spell(self, value, rng):
        return rng.choice(self.TEXTS[value])

    def change(self, value, rng):
        return rng.choice([it for it in range(len(self.TEXTS)) if it != value])


KINDS = (Numbers(), Measures(), Formulas(), Items(), Intervals(), Maps(), Equations(), Texts())


def wrapped(text: str, rng: random.Random) -> str:
    frame = rng.choice(("%s", "$%s$", r"\boxed{%s}", "  %s.", r"\(%s\)", "**%s**"))
    return frame.replace("%s", text)


@pytest.mark.parametrize("kind", KINDS, ids=lambda it: type(it).__name__)
def test_equal_trees_are_equal_in_any_notation_and_changed_ones_are_not(kind):
    rng, pairs = random.Random(str(type(kind).__name__)), []
    for _ in range(PAIRS // len(KINDS) // 2):
        value = kind.draw(rng)
        other = kind.change(value, rng)
        for it in (value, other):
            text = wrapped(kind.spell(it, rng), rng)
            assert read(spelling(text)) == read(text)
            pairs.append((text, kind.spell(value, rng), it == value))
    found = equal_answers([pair[:2] for pair in pairs], rules="symbolic")
    wrong = [pair for pair, same in zip(pairs, found, strict=True) if same != pair[2]]
    assert not wrong, wrong[:10]


def rows(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def near_misses(shared) -> list[tuple[str, str, bool]]:
    """Near misses of the kinds that the rules of before rewarded, and right answers beside them."""
    return [
        (f"Answer: {answer}", row["truth"], label == "right")
        for row in rows(shared / "golden" / "near_misses.jsonl")
        for label in ("right", "wrong")
        for answer in row[label]
    ]


def own_answers(shared) -> list[tuple[str, str, bool]]:
    """The labelled pairs of this project; a bare answer stands where its rules look for it."""
    return [
        (row.get("response", f"So\nAnswer: {row.get('answer', '')}"), row["truth"], row["right"])
        for row in rows(ROOT / "tests" / "answers.jsonl")
    ]


def own_near_misses(shared) -> list[tuple[str, str, bool]]:
    """Near misses of each kind, but for three that one may argue about: truth @@ right @@ wrong."""
    lines = (ROOT / "tests" / "near_misses.txt").read_text(encoding="utf-8").splitlines()
    return [
        (f"Answer: {answer}", truth.strip(), place == 0)
        for truth, *answers in (line.split("@@") for line in lines)
        for place, listed in enumerate(answers)
        for answer in listed.strip().split(" ;; ")
    ]


def equivalences(shared) -> list[tuple[str, str, bool]]:
    """Pairs of other verifiers' tests, each as an answer line unless it has a box."""
    return [
        (text if "boxed" in (text := it["pred"]) else f"Answer: {text}", it["gold"], it["expected"])
        for it in rows(shared / "golden" / "math_equivalence.jsonl")
    ]


LABELLED = [
    # The rewarded ones are those that words take back: "Wait", "No, 43", "is not", "or maybe".
    (own_answers, "dapo", 195, 283),
    (own_answers, "strict", 9, 154),
    (own_answers, "symbolic", 28, 14),  # the refused ones have neither a line "Answer:" nor a box
    (near_misses, "dapo", 33, 193),
    (near_misses, "strict", 0, 73),
    (near_misses, "symbolic", 0, 0),
    (own_near_misses, "symbolic", 0, 0),
    (equivalences, "symbolic", 1, 28),  # the order of a list, 10, 4, -2
]


@pytest.mark.parametrize(("pairs", "rules", "rewarded", "refused"), LABELLED)
def test_labelled_pairs_are_graded_as_the_readme_counts_them(
    shared, pairs, rules, rewarded, refused
):
    responses, truths, right = zip(*pairs(shared), strict=True)
    verdicts = verify_many(responses, truths, rules=rules)
    graded = [*zip(responses, truths, right, verdicts, strict=True)]
    wrong = [it[:2] for it in graded if it[3].correct > it[2]]
    missed = [it[:2] for it in graded if it[3].correct < it[2]]
    assert (len(wrong), len(missed)) == (rewarded, refused), (wrong, missed)


@pytest.mark.parametrize(
    "name", ["gsm8k/train.jsonl", "gsm8k/test.jsonl", "dapo_math_17k", "aime24"]
)
def test_every_published_truth_equals_itself_in_three_notations(shared, name):
    (file,) = (shared / "data").glob(name if "." in name else f"{name}/*.parquet")
    how = {"kind": "gsm8k" if "gsm8k" in name else "dapo_parquet", "on_bad_row": "skip"}
    examples, _ = MathProblems(path=str(file), rules="symbolic", **how).load()
    truths = {it.answer for it in examples}
    notations = (r"$%s$", r"\boxed{%s}", r" **\left( %s \right)**.")
    pairs = [(form % truth, truth) for truth in sorted(truths) for form in notations]
    assert all(equal_answers(pairs, rules="symbolic"))
