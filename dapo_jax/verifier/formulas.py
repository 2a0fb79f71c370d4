r"""Reads formulas as sympy's expressions, and compares them. Only workers import it.

    sum    = term (+ term | - term)*
    term   = factor (\cdot factor | / factor | factor)*
    factor = atom, and behind it ^ exponent, !, % and degrees
    atom   = number | name | function argument | \frac | \sqrt | (sum) | |sum| | \sum ...

What has two readings, as 1/2x, is not read.
"""

import functools
import random
import re
from collections.abc import Iterator, Sequence

import sympy
from sympy.core.alphabets import greeks

from dapo_jax.verifier.grammar import FUNCTIONS, Tree, number, split
from dapo_jax.verifier.notation import Token, closing, joined, tokenized

MAX_BITS = 1 << 17  # of a power of numbers
MAX_EXPONENTS = 100, 10_000  # of a sum, of anything else
MAX_TERMS = 1_000  # of factorials, binomials and series
DIGITS = 1_000  # of a value
# Formulas are compared at points: the sign that some letters have there, and their size.
POINTS = ((1, 10), (1, 100), (1, 2), (1, 40), *((-1, it) for it in (10, 20, 30, 50, 100, 5_000)))
ENOUGH = 3  # points where both are real

_OTHER_NAMES = "lambda varepsilon vartheta varphi ell hbar emptyset"
_NAMES = frozenset((*greeks, *map(str.capitalize, greeks), *_OTHER_NAMES.split()))
_ACCENTS = frozenset(("vec", "bar", "hat", "overline", "dot", "tilde", "angle", "triangle"))
# Before a bracket these are functions; n(n+1) is a product.
_OF_ANYTHING = frozenset((*"fghFGHPQ", r"\varphi", r"\phi", r"\psi", r"\Gamma", r"\tau", r"\sigma"))
_CONSTANTS = {"e": sympy.E, "i": sympy.I, r"\pi": sympy.pi, "pi": sympy.pi, r"\infty": sympy.oo}
_MARKS = {"°": sympy.pi / 180, "%": sympy.Rational(1, 100)}
_CLOSED_BY = {"(": ")", "{": "}", "|": "|", "lfloor": r"\rfloor", "lceil": r"\rceil"}
_APPLIED = {it: getattr(sympy, it.replace("arc", "a"), None) for it in FUNCTIONS}
_APPLIED |= {"(": sympy.Add, "{": sympy.Add, "|": sympy.Abs, "lfloor": sympy.floor}
_APPLIED |= {"lceil": sympy.ceiling, "binom": sympy.binomial, "frac": lambda a, b: a / b}
_APPLIED |= {"!": sympy.factorial, "ln": sympy.log, "mod": sympy.Mod}
_APPLIED |= {"max": sympy.Max, "min": sympy.Min}
_SERIES = {"sum": sympy.Sum, "prod": sympy.Product, "int": sympy.Integral, "lim": sympy.limit}
_SYMMETRIC = ("gcd", "lcm", "max", "min")


class UnreadableError(ValueError):
    """A text that is no formula."""


class TooLargeError(Exception):
    """A formula that algebra may never finish."""


class Formula:
    """Reads tokens from left to right; `value` is sympy's expression, of `letters`.

    log: what a logarithm without a base is divided by. in_order: capitals are matrices.
    """

    def __init__(self, tokens: Sequence[Token], log=1, *, in_order: bool = False, bound=()) -> None:
        self.tokens = [*_letter_by_letter(tokens), Token("end", "")]
        self.log, self.in_order, self.bound = log, in_order, {*bound}
        self.place, self.bars, self.letters = 0, 0, set()
        self.value = self.sum()
        if self.next.text:
            raise UnreadableError

    # What comes next.

    @property
    def next(self) -> Token:
        return self.tokens[self.place]

    def at(self, *texts: str) -> bool:
        """Takes the next token if it is one of the texts."""
        self.place += (is_one := self.next.text in texts)
        return is_one

    def take(self, *texts: str) -> str:
        """Takes the next token, which has to be one of the texts where there are some."""
        text = self.next.text
        if not text or (texts and text not in texts):
            raise UnreadableError
        self.place += 1
        return text

    def sign(self) -> int:
        is_minus = self.next.text == "-"
        self.at("+", "-")
        return -1 if is_minus else 1

    def group(self) -> list[Token]:
        """Takes the tokens in brackets, or one token."""
        begin, end = self.place, closing(self.tokens, self.place)
        if end >= len(self.tokens) - 1:
            raise UnreadableError
        self.place = end + 1
        return self.tokens[begin + 1 : end] if end > begin else [self.tokens[begin]]

    def part(self, tokens: Sequence[Token]):
        """Reads other tokens."""
        inner = Formula(tokens, self.log, in_order=self.in_order, bound=self.bound)
        self.letters |= inner.letters
        return inner.value

    def argument(self):
        """Reads what a command takes: braces, or one atom."""
        return self.part(self.group()) if self.next.text == "{" else self.atom()

    def inside(self) -> list:
        """Reads what brackets hold, with commas between."""
        return [self.part(it) for it in split(self.group(), ",;")[0]]

    # From sums down to atoms.

    def sum(self):
        value = self.sign() * self.term()
        while self.next.text in ("+", "-"):
            value += self.sign() * self.term()
        return value

    def term(self):
        value, is_divided = self.factor(), False
        while True:
            around = [it.text for it in self.tokens[self.place - 1 : self.place + 2]]
            if self.at(r"\times"):
                right = self.sign() * self.factor()
                sides = value, right
                is_cross = any(map(_has_arrow, sides)) or all(str(it).isupper() for it in sides)
                is_cross &= not any(it.is_number for it in sides)
                value = self.symbol(f"{value} x {right}") if is_cross else value * right
            elif self.at("*", r"\cdot"):
                value *= self.sign() * self.factor()
            elif self.at("/"):
                value, is_divided = value / self.factor(), True
            elif self.at(r"\bmod"):
                value = self.call("mod", value, self.factor())
            elif self.goes_on() and not is_divided:
                if around[0] == "0":
                    raise UnreadableError  # 0xFF is no product
                value *= self.factor()
            else:
                return value

    def goes_on(self, *but: str) -> bool:
        """Tells whether a factor follows."""
        kind, text, _, _ = self.next
        if kind == "number":
            before = [it.text for it in self.tokens[max(self.place - 2, 0) : self.place]]
            return before[-1] in (")", "}", "!") or (before[0] == "^" and before[-1].isalpha())
        is_factor = kind in ("letters", "command") or text == "(" or (text == "|" and not self.bars)
        return is_factor and text not in (*but, r"\rfloor", r"\rceil", r"\end")

    def factor(self):
        value = self.atom()
        while (mark := self.next.text) in ("^", "!", *_MARKS):
            self.take()
            if mark == "^":
                value = self.raised(value)
            else:
                value = self.call("!", value) if mark == "!" else value * _MARKS[mark]
            if self.next.text == mark:
                raise UnreadableError  # n!! is no (n!)!, and x^y^z has two readings
        return value

    def raised(self, value):
        """Reads an exponent: a power, or a mark such as the T of a transpose."""
        if self.at(r"\top", "*", r"\dagger") or (str(value).isupper() and self.at("T")):
            return self.symbol(f"{value}^{self.tokens[self.place - 1].text.replace('top', 'T')}")
        marks = [it.text for it in self.tokens[self.place :][:5]]
        if marks[:2] == ["{", "("] and marks[3:] == [")", "}"]:  # y^{(4)} is a derivative
            self.place += 5
            return self.symbol(f"{value}^({marks[2]})")
        exponent = self.sign() * self.argument()
        if exponent == -1 and str(value) in _OF_ANYTHING and self.next.text == "(":
            raise UnreadableError  # an inverse function
        return power(value, exponent)

    def atom(self):
        begin, kind, text = self.place, self.next.kind, self.take()
        name = text.removeprefix("\\")
        if kind == "number":
            is_mixed = self.next.text == r"\frac" and number(self.tokens[begin : begin + 8])
            self.place += 7 if is_mixed else 0  # 2\frac{1}{2}
            return sympy.Rational(number(self.tokens[begin : self.place]))
        if name in _CLOSED_BY:
            self.bars += name == "|"
            value = self.sum()
            self.take(_CLOSED_BY[name])
            self.bars -= name == "|"
            return self.call(name, value)
        if name in ("frac", "binom"):
            texts = "".join(it.text for it in self.tokens[self.place :][:9])
            if re.match(r"\{d(?:\^\d)?\w?\}\{d\w(?:\^\d)?\}", texts):
                raise UnreadableError
            return self.call(name, self.argument(), self.argument())
        if name == "sqrt":
            degree = self.inside()[0] if self.next.text == "[" else sympy.Integer(2)
            return power(self.argument(), 1 / degree)
        if name in _SERIES:
            return self.series(name)
        if name in FUNCTIONS:
            return self.function(name)
        if text in _CONSTANTS and text not in self.bound and self.next.text != "_":
            return _CONSTANTS[text]
        if name in _ACCENTS:
            return self.name(f"{text} {joined(self.group())}")
        if kind == "letters" or name in _NAMES or name.startswith("mathbb"):
            return self.name(text)
        raise UnreadableError

    def name(self, text: str):
        """Reads the marks, the index and the arguments of a name."""
        while self.next.text in ("'", "_"):
            text += "'" if self.at("'") else f"{self.take()}{joined(self.group())}"
        inner = self.tokens[self.place + 1 : closing(self.tokens, self.place)]
        is_call = len(inner) == 1 or len(split(inner, ",;")[0]) > 1
        if self.next.text == "(" and (is_call or re.split("[_']", text)[0] in _OF_ANYTHING):
            return self.symbol(f"{text}{self.inside()}", text)
        return self.symbol(text)

    def symbol(self, text: str, letter: str = ""):
        if text not in self.bound and self.bound & {*re.findall(r"\\?[a-zA-Z]+", text)}:
            raise UnreadableError  # a_k of a sum over k
        self.letters |= {letter or text} - self.bound
        return sympy.Symbol(text, commutative=not (self.in_order and text[0].isupper()))

    def function(self, name: str):
        r"""Reads a base (of log), a power and the argument of a function: \sin^2 x."""
        scripts = {}
        while (mark := self.next.text) in ("^", "_"):
            self.take()
            scripts[mark] = self.sign() * self.argument()
        if scripts.get("^") == -1:
            name = f"arc{name}"  # where it is none, it is another inverse function
            del scripts["^"]
        if self.next.text == "(":
            values = self.inside()
        else:
            sign = self.sign()
            value = self.argument() if self.next.text == "{" else self.factor()
            while self.goes_on("(", "|") and self.next.text.removeprefix("\\") not in FUNCTIONS:
                value *= self.factor()
            values = [sign * value]
            behind = [it.text.removeprefix("\\") for it in self.tokens[self.place :][:2]]
            if behind[0] == "/" and behind[1] not in FUNCTIONS:
                raise UnreadableError  # \sin \pi/6 has two readings
        is_log = name == "log" or "_" not in scripts
        if name not in FUNCTIONS or (len(values) > 1) != (name in _SYMMETRIC) or not is_log:
            raise UnreadableError
        value = self.call(name, *values, *[scripts[it] for it in scripts if it == "_"])
        return power(value, scripts["^"]) if "^" in scripts else value

    def call(self, name: str, *values):
        """Applies a function; one of unknown numbers is a symbol."""
        if name in ("!", "binom") and any(it.is_number and abs(it) > MAX_TERMS for it in values):
            raise TooLargeError
        if name == "log" and len(values) == 1:
            return sympy.log(*values) / self.log
        is_symbol = name in (*_SYMMETRIC, "mod") and not all(it.is_number for it in values)
        if _APPLIED[name] and not is_symbol:
            pairwise = name in ("gcd", "lcm")  # sympy's third argument is no number
            return functools.reduce(_APPLIED[name], values) if pairwise else _APPLIED[name](*values)
        return sympy.Symbol(f"{name}{values if name == 'mod' else sorted(map(str, values))}")

    def series(self, kind: str):
        """Reads a sum, product or limit with its index, or an integral, and computes it."""
        scripts = {"_": [], "^": []}
        while (mark := self.next.text) in scripts:
            self.take()
            scripts[mark] = self.group()
        if kind == "int":
            end = [it.text for it in self.tokens].index("d", self.place)
            name, low = self.tokens[end + 1].text, scripts["_"]
        else:
            index, *_, low = split(scripts["_"], ("=", r"\to"))[0]
            name = joined(index)
        low, self.bound = self.part(low), self.bound | {name}
        if kind == "int":
            term, self.place = self.part(self.tokens[self.place : end]), end + 2
        else:
            term = self.term()
        self.bound -= {name}
        variable = sympy.Symbol(name)
        if kind == "lim":
            return sympy.limit(term, variable, low, "+-")
        high = self.part(scripts["^"])
        if kind != "int" and high.is_Integer and low.is_Integer and high - low > MAX_TERMS:
            raise TooLargeError
        return _SERIES[kind](term, (variable, low, high)).doit()


def _letter_by_letter(tokens: Sequence[Token]) -> Iterator[Token]:
    """Makes a token of each letter, but of sin and pi: AB is a product."""
    for token in tokens:
        is_name = token.text in FUNCTIONS or token.text in _CONSTANTS or token.kind != "letters"
        yield from [token] if is_name else (token._replace(text=it) for it in token.text)


def _has_arrow(value) -> bool:
    return bool(re.search(r"\\(?:vec|hat)", str(value)))


def power(base, exponent):
    """Raises to a power; the odd root of a negative number is negative. Raises TooLargeError."""
    if exponent.is_Rational:
        bits = max(base.p.bit_length(), base.q.bit_length()) if base.is_Rational else 0
        is_large = abs(exponent) > MAX_EXPONENTS[not base.is_Add]
        if base not in (0, 1, -1) and (is_large or bits * abs(exponent) > MAX_BITS):
            raise TooLargeError
        if base.is_negative and exponent.q % 2 and exponent.q > 1:
            return sympy.real_root(base**exponent.p, exponent.q)
    return base**exponent


# How two formulas compare.


def compare(one: Tree, other: Tree, how: str) -> bool:
    """Compares formulas, as `equality.Compare` says; those of different letters are never equal.

    A logarithm without a base is the natural one if the truth has such too.
    """
    texts = repr(one), repr(other)
    log = 1 if re.search("log(?! ?_)", texts[1]) else sympy.log(sympy.Symbol("base"))
    matrices = re.compile(r"[A-Z][ (]?[A-Z]|\^\{?(?:T|\\+top|-1)\b\}? ?[A-Z]")
    in_order = any(map(matrices.search, texts))
    try:
        (a, letters), (b, its_letters) = (_built(it, log, in_order) for it in (one, other))
        if letters != its_letters:
            return how == "checked"
        if how in ("equal", "checked"):
            return _same(a, b)
        if not (a.is_commutative and b.is_commutative):
            return 0 in (sympy.expand(a - b), sympy.expand(a + b))
        ratios = [x / y for x, y in _values(a, b) if y != 0]
    except (ValueError, TypeError, RecursionError):
        return False
    is_constant = bool(ratios) and ratios[0] != 0 and all(_close(it, ratios[0]) for it in ratios)
    return is_constant and bool(how == "multiple" or ratios[0] > 0)


def _built(tree: Tree, log, in_order: bool) -> tuple:
    """Builds sympy's expression of a tree, and lists the letters in it."""
    kind, *parts = tree
    if kind == "number":
        return sympy.Rational(parts[0]), set()
    if kind == "formula":
        formula = Formula(tokenized(parts[0]), log, in_order=in_order)
        return formula.value, formula.letters
    (a, letters), (b, its_letters) = (_built(it, log, in_order) for it in parts)
    return a - b if kind == "-" else a * b, letters | its_letters


def _same(a, b) -> bool:
    if any(it.has(sympy.nan, sympy.zoo) for it in (a, b)):
        return False
    if a == b or (a.is_Rational and b.is_Rational):
        return a == b
    if not (a.is_commutative and b.is_commutative):
        return sympy.expand(a - b) == 0
    return sympy.oo not in (abs(a), abs(b)) and all(_close(*pair) for pair in _values(a, b))


def _values(a, b) -> list[list]:
    """Evaluates two expressions at points where both are real, or at all where there are few."""
    both, rng = sympy.Tuple(a, b), random.Random(0)
    letters = sorted(both.free_symbols, key=str)
    # A letter in bars may be a complex number, if it is called z.
    has_size = both.has(sympy.Abs)
    turns = {it: 1 + sympy.I * int(has_size and str(it)[0] in "zw") for it in letters}
    points = [
        {
            it: turns[it] * rng.choice((1, sign)) * rng.randrange(100, 1000) * size / 3310
            for it in letters
        }
        for sign, size in (POINTS if letters else POINTS[:1])
    ]
    if not both.has(sympy.I):
        real = [it for it in points if _is_real(both, it)]
        points = real if len(real) >= ENOUGH else points
    if both.has(sympy.floor, sympy.ceiling):
        # At whole numbers, powers of two among them, and between them.
        for first in (1, 2, 3, 4, 8, 9, sympy.Rational(7, 2)):
            points.append({letter: first + i for i, letter in enumerate(letters)})
    digits = 30 if both.has(sympy.Sum, sympy.Product, sympy.Integral) else DIGITS  # those are slow
    return [[it.subs(point).evalf(digits) for it in both] for point in points]


def _is_real(both, point: dict) -> bool:
    """Tells whether no root or logarithm in expressions is one of a negative number."""
    roots = [it.base for it in both.atoms(sympy.Pow) if not it.exp.subs(point).is_integer]
    logarithms = [it.args[0] for it in both.atoms(sympy.log)]
    return all(it.subs(point).evalf(15).is_positive for it in (*roots, *logarithms))


def _close(a, b) -> bool:
    """Tells whether two values agree in nearly all digits; of a zero no digit is known."""
    if not (a.is_number and b.is_number) or a.has(sympy.nan, sympy.zoo, sympy.oo):
        return False
    size = max(abs(a), abs(b))
    for x, y in zip(a.as_real_imag(), b.as_real_imag(), strict=True):
        bits = max((it._prec for it in (x, y) if it.is_Float), default=100)
        is_close = abs(x - y) < size * sympy.Rational(1, 2 ** (4 * bits // 5))
        if not is_close and not all(it == 0 or it._prec == 1 for it in (x, y)):
            return False
    return True
