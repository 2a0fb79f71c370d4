r"""Reads formulas as sympy's expressions, and compares them. Only workers import it.

    sum    = term (+ term | - term)*
    term   = factor (\cdot factor | / factor | factor)*
    factor = atom, and behind it ^ exponent, !, % and degrees
    atom   = number | name | function argument | \frac | \sqrt | (sum) | |sum| | \sum ...

What has two readings, as 1/2x, is not read.
"""

import random
import re
from collections.abc import Sequence

import sympy

from dapo_jax.verifier.grammar import FUNCTIONS, Tree, number, split
from dapo_jax.verifier.notation import Token, closing, joined, tokens

MAX_NESTING = 25
MAX_BITS = 1 << 17  # of a power of numbers
MAX_EXPONENTS = 100, 10_000  # of a sum, of anything else
MAX_TERMS = 1_000  # of factorials, binomials and series
DIGITS = 1_000  # of a value
# Formulas are compared at points: the sign that some letters have there, and their size.
POINTS = ((1, 10), (1, 100), (1, 2), (1, 40), *((-1, it) for it in (10, 20, 30, 50, 100, 5_000)))
ENOUGH = 3  # points where both are real

_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho "
    "sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
_NAMES = frozenset((*_GREEK.split(), "ell", "hbar", "emptyset"))
_ACCENTS = frozenset(("vec", "bar", "hat", "overline", "dot", "tilde", "angle", "triangle"))
# Before a bracket these are functions; n(n+1) is a product.
_OF_ANYTHING = frozenset((*"fghFGHPQ", r"\varphi", r"\phi", r"\psi", r"\Gamma", r"\tau", r"\sigma"))
_CONSTANTS = {"e": sympy.E, "i": sympy.I, r"\pi": sympy.pi, "pi": sympy.pi, r"\infty": sympy.oo}
_MARKS = {"°": sympy.pi / 180, "%": sympy.Rational(1, 100)}
_KNOWN = {it: it.replace("arc", "a") for it in FUNCTIONS} | {
    "ln": "log",
    "max": "Max",
    "min": "Min",
}
_KNOWN |= {"!": "factorial", "mod": "Mod", "binom": "binomial", "lfloor": "floor"}
_KNOWN |= {"lceil": "ceiling", "sum": "Sum", "prod": "Product", "int": "Integral"}
_SYMMETRIC = ("gcd", "lcm", "max", "min")


class UnreadableError(ValueError):
    """A text that is no formula."""


class TooLargeError(Exception):
    """A formula that algebra may never finish."""


class Formula:
    """Reads tokens from left to right; `value` is sympy's expression, of `letters`.

    log: what a logarithm without a base is divided by. in_order: capitals are matrices.
    """

    def __init__(self, found: Sequence[Token], log=1, *, in_order: bool = False, bound=()) -> None:
        self.found, self.place, self.log, self.in_order = [*found], 0, log, in_order
        self.bound, self.letters, self.nesting, self.bars = {*bound}, set(), 0, 0
        self.value = self.sum()
        if self.place < len(self.found):
            raise UnreadableError

    @property
    def next(self) -> Token:
        return self.found[self.place] if self.place < len(self.found) else Token("end", "")

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

    def part(self, found: Sequence[Token]):
        """Reads other tokens."""
        inner = Formula(found, self.log, in_order=self.in_order, bound=self.bound)
        self.letters |= inner.letters
        return inner.value

    def sum(self):
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise UnreadableError
        sign = self.take() if self.next.text in ("+", "-") else "+"
        value = self.term() if sign == "+" else -self.term()
        while self.next.text in ("+", "-"):
            value = value + self.term() if self.take() == "+" else value - self.term()
        self.nesting -= 1
        return value

    def term(self):
        value, is_divided = self.factor(), False
        while True:
            if self.next.text == r"\times" and self.is_vector(-1) and self.is_vector(1):
                self.take()
                value = self.symbol(f"{value} x {self.factor()}")
            elif self.at("*", r"\cdot", r"\times"):
                value = value * (-self.factor() if self.at("-") else self.factor())
            elif self.at("/"):
                value, is_divided = value / self.factor(), True
            elif self.at(r"\bmod"):
                value = self.call("mod", [value, self.factor()])
            elif self.goes_on() and not is_divided:
                value = value * self.factor()
            else:
                return value

    def is_vector(self, step: int) -> bool:
        text = self.found[min(self.place + step, len(self.found) - 1)].text
        return text.isupper() or text in ("}", r"\vec")

    def goes_on(self, *but: str) -> bool:
        """Tells whether a factor follows."""
        kind, text, _, _ = self.next
        if kind == "number":
            before = [it.text for it in self.found[max(self.place - 2, 0) : self.place]]
            return before[-1] in (")", "}", "!") or (before[0] == "^" and before[-1].isalpha())
        is_factor = kind in ("letters", "command") or text == "(" or (text == "|" and not self.bars)
        return is_factor and text not in (*but, r"\rfloor", r"\rceil", r"\end")

    def factor(self):
        value = self.atom()
        while True:
            if self.at("^"):
                value = self.raised(value)
            elif self.at("!"):
                if self.next.text == "!":
                    raise UnreadableError  # a double factorial
                value = self.call("!", [value])
            elif self.next.text in _MARKS:
                value = value * _MARKS[self.take()]
            else:
                return value

    def raised(self, value):
        """Reads an exponent: a power, or a mark such as the T of a transpose."""
        self.spread()
        if self.at(r"\top", "*", r"\dagger") or (str(value).isupper() and self.at("T")):
            return self.symbol(f"{value}^{self.found[self.place - 1].text.replace('top', 'T')}")
        exponent = -self.atom() if self.at("-") else self.argument()
        if exponent == -1 and str(value) in _OF_ANYTHING and self.next.text == "(":
            raise UnreadableError  # an inverse function
        return power(value, exponent)

    def argument(self):
        """Reads what a command takes: braces, or one atom."""
        return self.part(self.script()) if self.next.text == "{" else self.atom()

    def script(self) -> list[Token]:
        """Takes the tokens in braces, or one token."""
        begin, end = self.place, closing(self.found, self.place)
        self.place = end + 1
        inner = self.found[begin : end + 1]
        return inner[1:-1] if inner and inner[0].text == "{" else inner

    def inside(self) -> list:
        """Reads what brackets hold, with commas between."""
        end = closing(self.found, self.place)
        parts = split(self.found[self.place + 1 : end], ",;")[0]
        self.place = end + 1
        return [self.part(it) for it in parts]

    def atom(self):
        begin, kind, text = self.place, self.next.kind, self.take()
        name = text.removeprefix("\\")
        if kind == "number":
            is_mixed = self.next.text == r"\frac"
            value = number(self.found[begin : begin + 8]) if is_mixed else None  # 2\frac{1}{2}
            self.place += 7 * (value is not None)
            value = number(self.found[begin : begin + 1]) if value is None else value
            return sympy.Rational(value.numerator, value.denominator)
        if name in ("frac", "binom", "sqrt", "lfloor", "lceil", "sum", "prod", "int", "lim"):
            return self.structure(name)
        if name in FUNCTIONS:
            return self.function(name)
        if text in _CONSTANTS and text not in self.bound and self.next.text != "_":
            return _CONSTANTS[text]
        if kind == "letters":
            self.place = begin
            self.spread()
            return self.name(self.take())
        if text in ("(", "|"):
            self.bars += text == "|"
            value = self.sum()
            self.take(")" if text == "(" else "|")
            self.bars -= text == "|"
            return sympy.Abs(value) if text == "|" else value
        if name in _ACCENTS:
            is_angle = name in ("angle", "triangle")
            return self.name(f"{text} {self.take() if is_angle else joined(self.script())}")
        if name in _NAMES or name.startswith("mathbb"):
            return self.name(text)
        raise UnreadableError

    def spread(self) -> None:
        """Makes a token of each letter that follows."""
        if self.next.kind == "letters" and self.next.text not in FUNCTIONS:
            letters = [Token("letters", it) for it in self.next.text]
            self.found[self.place : self.place + 1] = letters

    def name(self, text: str):
        """Reads the marks, the index and the arguments of a name."""
        while self.next.text in ("'", "_"):
            text += "'" if self.at("'") else f"{self.take()}{joined(self.script())}"
        inner = self.found[self.place + 1 : closing(self.found, self.place)]
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
        exponent, base = None, []
        while self.next.text in ("^", "_"):
            if self.take() == "^":
                exponent = self.argument()
            else:
                base = [self.argument()]
        if exponent == -1:
            if f"arc{name}" not in FUNCTIONS:
                raise UnreadableError  # another inverse function
            name, exponent = f"arc{name}", None
        if self.next.text == "(":
            values = self.inside()
        else:
            sign = -1 if self.at("-") else 1
            value = self.argument() if self.next.text == "{" else self.factor()
            while self.goes_on("(", "|") and self.next.text.removeprefix("\\") not in FUNCTIONS:
                value = value * self.factor()
            values = [sign * value]
            behind = [it.text.removeprefix("\\") for it in self.found[self.place :][:2]]
            if behind[:1] == ["/"] and behind[-1] not in FUNCTIONS:
                raise UnreadableError  # \sin \pi/6 has two readings
        if (len(values) > 1) != (name in _SYMMETRIC) or (base and name != "log"):
            raise UnreadableError
        value = self.call(name, [*values, *base])
        return value if exponent is None else power(value, exponent)

    def call(self, name: str, values: list):
        """Applies a function; one of unknown numbers is a symbol."""
        if name in ("!", "binom") and any(it.is_number and abs(it) > MAX_TERMS for it in values):
            raise TooLargeError
        if name == "log" and len(values) == 1:
            return sympy.log(values[0]) / self.log
        is_symbol = name in (*_SYMMETRIC, "mod") and not all(it.is_number for it in values)
        if name in _KNOWN and hasattr(sympy, _KNOWN[name]) and not is_symbol:
            return getattr(sympy, _KNOWN[name])(*values)
        words = sorted(map(str, values)) if name in _SYMMETRIC else [*map(str, values)]
        return sympy.Symbol(f"{name}{words}")

    def structure(self, name: str):
        """Reads what a command builds of its arguments."""
        if name == "frac":
            texts = "".join(it.text for it in self.found[self.place : self.place + 9])
            if re.match(r"\{d(?:\^\d)?\w?\}\{d\w(?:\^\d)?\}", texts):
                raise UnreadableError
            return self.argument() / self.argument()
        if name == "binom":
            return self.call(name, [self.argument(), self.argument()])
        if name == "sqrt":
            degree = self.inside()[0] if self.next.text == "[" else sympy.Integer(2)
            return power(self.argument(), 1 / degree)
        if name in ("lfloor", "lceil"):
            value = self.sum()
            self.take(rf"\r{name[1:]}")
            return self.call(name, [value])
        return self.series(name)

    def series(self, kind: str):
        """Reads a sum, product or limit with its index, or an integral, and computes it."""
        scripts = {"_": [], "^": []}
        while (mark := self.next.text) in scripts:
            self.take()
            scripts[mark] = self.script()
        if kind == "int":
            rest = [it.text for it in self.found[self.place :]]
            length = next((i for i, it in enumerate(rest) if re.fullmatch("d[a-z]", it)), 0)
            name, low = "".join(rest[length : length + 1])[1:], scripts["_"]
        else:
            index, *_, low = split(scripts["_"], ("=", r"\to"))[0]
            name = joined(index)
        low, self.bound = self.part(low), self.bound | {name}
        if kind == "int":
            term = self.part(self.found[self.place : self.place + length])
            self.place += length + 1
        else:
            term = self.term()
        self.bound -= {name}
        variable = sympy.Symbol(name)
        if kind == "lim":
            return sympy.limit(term, variable, low)
        high = self.part(scripts["^"])
        if kind != "int" and high.is_Integer and low.is_Integer and high - low > MAX_TERMS:
            raise TooLargeError
        return getattr(sympy, _KNOWN[kind])(term, (variable, low, high)).doit()


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
    except (UnreadableError, TypeError, RecursionError):
        return False
    if letters != its_letters:
        return how == "checked"
    if how in ("equal", "checked"):
        return _same(a, b)
    if not (a.is_commutative and b.is_commutative):
        return 0 in (sympy.expand(a - b), sympy.expand(a + b))
    ratios = [x / y for x, y in _values(a, b) if y != 0]
    is_constant = bool(ratios) and ratios[0] != 0 and all(_close(it, ratios[0]) for it in ratios)
    return is_constant and bool(how == "multiple" or ratios[0] > 0)


def _built(tree: Tree, log, in_order: bool) -> tuple:
    """Builds sympy's expression of a tree, and lists the letters in it."""
    kind, *parts = tree
    if kind == "number":
        return sympy.Rational(parts[0].numerator, parts[0].denominator), set()
    if kind == "formula":
        formula = Formula(tokens(parts[0]), log, in_order=in_order)
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


def _values(a, b) -> list[tuple]:
    """Evaluates two expressions at points where both are real, or at all where there are few."""
    letters = sorted(a.free_symbols | b.free_symbols, key=str)
    rng, points = random.Random(0), []
    has_size = a.has(sympy.Abs) or b.has(sympy.Abs)  # of a complex number, if it is called z
    for sign, size in POINTS if letters else POINTS[:1]:
        values = [rng.choice((1, sign)) * rng.randrange(100, 1000) * size for _ in letters]
        points.append(
            {
                letter: value * (1 + sympy.I * int(has_size and str(letter)[0] in "zw")) / 3310
                for letter, value in zip(letters, map(sympy.Integer, values), strict=True)
            }
        )
    if not a.has(sympy.I) and not b.has(sympy.I):
        real = [it for it in points if _is_real(a, it) and _is_real(b, it)]
        points = real if len(real) >= ENOUGH else points
    if any(it.has(sympy.floor, sympy.ceiling) for it in (a, b)):
        points.append({letter: sympy.Integer(3 + i) for i, letter in enumerate(letters)})
    is_slow = any(it.has(sympy.Sum, sympy.Product, sympy.Integral) for it in (a, b))
    digits = 30 if is_slow else DIGITS
    return [(a.subs(point).evalf(digits), b.subs(point).evalf(digits)) for point in points]


def _is_real(expression, point: dict) -> bool:
    """Tells whether no root or logarithm in an expression is one of a negative number."""
    roots = [it.base for it in expression.atoms(sympy.Pow) if not it.exp.subs(point).is_integer]
    logarithms = [it.args[0] for it in expression.atoms(sympy.log)]
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
