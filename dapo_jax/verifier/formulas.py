r"""Reads formulas as sympy's expressions, and compares them. Only workers import it.

    sum    = term (+ term | - term)*
    term   = factor (\cdot factor | / factor | factor)*
    factor = atom, and behind it ^ exponent, !, % and degrees
    atom   = number | name | function argument | \frac | \sqrt | (sum) | |sum| | \sum ...

1/2x, which has two readings, is not read, nor is any word.
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

_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho "
    "sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega "
    "ell hbar emptyset".split(" ")
)
_ACCENTS = frozenset("vec bar hat overline dot tilde overrightarrow angle triangle".split(" "))
# Before a bracket these are functions; n(n+1) is a product.
_OF_ANYTHING = frozenset(r"f g h F G H P Q \varphi \phi \psi \Gamma \tau \sigma \zeta".split(" "))
_CONSTANTS = {"e": sympy.E, "i": sympy.I, r"\pi": sympy.pi, "pi": sympy.pi, r"\infty": sympy.oo}
_CONSTANTS["infinity"] = sympy.oo
_MARKS = {"°": sympy.pi / 180, "%": sympy.Rational(1, 100)}
_KNOWN = {"ln": "log", "log": "log", "exp": "exp", "max": "Max", "min": "Min", "!": "factorial", "mod": "Mod"}
_KNOWN |= {it: it.replace("arc", "a") for it in FUNCTIONS if it[-3:] in ("sin", "cos", "tan")}
_KNOWN |= {"binom": "binomial"} | {it: it for it in ("cot", "sec", "csc", "sinh", "cosh", "tanh", "gcd", "lcm")}
_SERIES = {r"\sum": sympy.Sum, r"\prod": sympy.Product, r"\int": sympy.Integral}
_SYMMETRIC = ("gcd", "lcm", "max", "min")


class UnreadableError(ValueError):
    """A text that is no formula."""


class TooLargeError(Exception):
    """A formula that algebra may never finish."""


class Formula:
    """Reads tokens from left to right; `value` is sympy's expression.

    log: what a logarithm without a base is divided by. in_order: capitals are matrices.
    """

    def __init__(self, found: Sequence[Token], log=1, *, in_order: bool = False, bound=()) -> None:
        self.found, self.place, self.log, self.in_order = [*found], 0, log, in_order
        self.bound, self.letters, self.nesting, self.bars = {*bound}, set(), 0, 0
        self.value = self.sum()
        if self.next.kind != "end":
            raise UnreadableError

    @property
    def next(self) -> Token:
        return self.found[self.place] if self.place < len(self.found) else Token("end", "")

    def at(self, *texts: str) -> bool:
        """Takes the next token if it is one of the texts."""
        self.place += (fits := self.next.text in texts and self.next.kind != "end")
        return fits

    def take(self, *texts: str) -> str:
        if self.next.kind == "end" or (texts and self.next.text not in texts):
            raise UnreadableError
        self.place += 1
        return self.found[self.place - 1].text

    def part(self, found: Sequence[Token], bound=()):
        """Reads other tokens."""
        inner = Formula(found, self.log, in_order=self.in_order, bound=self.bound | {*bound})
        self.letters |= inner.letters - {*bound}
        return inner.value

    def sum(self):
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise UnreadableError
        value = -self.term() if self.at("-") else self.term(self.at("+"))
        while self.next.text in ("+", "-"):
            value = value + self.term() if self.at("+") else value - self.term(self.at("-"))
        self.nesting -= 1
        return value

    def term(self, _: bool = True):
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
            elif self.goes_on():
                if is_divided:
                    raise UnreadableError
                value = value * self.factor()
            else:
                return value

    def goes_on(self, *but: str) -> bool:
        """Tells whether a factor follows."""
        kind, text, _, _ = self.next
        if kind == "number":
            return self.found[self.place - 1].text in (")", "}", "!")
        return text not in but and (
            kind == "letters"
            or text == "("
            or (text == "|" and not self.bars)
            or (kind == "command" and text not in (r"\}", r"\rangle", r"\rfloor", r"\rceil", r"\mid"))
        )

    def is_vector(self, step: int) -> bool:
        text = "".join(it.text for it in self.found[self.place + step : self.place + step + 1])
        return text.isupper() or text in ("}", r"\vec")

    def factor(self):
        value = self.atom()
        while True:
            if self.at("^"):
                value = self.raised(value)
            elif self.at("!"):
                value = self.call("!", [value])
            elif self.next.text in _MARKS:
                value = value * _MARKS[self.take()]
            elif self.next.text in ("_", "'"):
                raise UnreadableError
            else:
                return value

    def raised(self, value):
        self.spread()
        mark = self.next.text
        if mark in (r"\top", "*", r"\dagger") or (mark == "T" and str(value).isupper()):
            self.take()
            return self.symbol(f"{value}^{'T' if mark != '*' else '*'}")
        return power(value, -self.atom() if self.at("-") else self.argument())

    def argument(self):
        """Reads what a command takes: braces, or one atom."""
        if not self.at("{"):
            return self.atom()
        value = self.sum()
        self.take("}")
        return value

    def script(self) -> list[Token]:
        """Takes the tokens of an index or a limit."""
        begin, end = self.place, closing(self.found, self.place)
        self.place = end + 1
        inner = self.found[begin : end + 1]
        return inner[1:-1] if inner and inner[0].text == "{" else inner

    def atom(self):
        begin, kind, text = self.place, self.next.kind, self.take()
        name = text.removeprefix("\\")
        if kind == "number":
            is_mixed = self.next.text == r"\frac"
            value = number(self.found[begin : begin + 8]) if is_mixed else None  # 2\frac{1}{2}
            self.place += 7 * (value is not None)
            value = number(self.found[begin : begin + 1]) if value is None else value
            return sympy.Rational(value.numerator, value.denominator)
        if name in ("sqrt", "frac", "binom", "lfloor", "lceil", "lim") or text in _SERIES:
            return self.structure(text)
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
        if name in ("angle", "triangle"):
            return self.name(f"{text} {self.take()}")
        if name in _ACCENTS:
            return self.name(f"{text} {joined(self.script())}")
        if name in _GREEK or name.startswith("mathbb"):
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
        end = closing(self.found, self.place)
        parts, _ = split(self.found[self.place + 1 : end], ",;")
        is_call = len(parts) > 1 or len(parts[0]) == 1 or re.split("[_']", text)[0] in _OF_ANYTHING
        if self.next.text != "(" or not is_call:
            return self.symbol(text)
        self.place = end + 1
        return self.symbol(f"{text}({','.join(str(self.part(it)) for it in parts)})", text)

    def symbol(self, text: str, letter: str = ""):
        self.letters |= {letter or text} - self.bound
        is_matrix = self.in_order and text[0].isupper()
        return sympy.Symbol(text, commutative=not is_matrix)

    def function(self, name: str):
        r"""Reads a base (of log), a power and the argument of a function: \sin^2 x."""
        exponent, base = None, None
        while self.next.text in ("^", "_"):
            if self.at("^"):
                exponent = self.argument()
            else:
                self.take()
                base = self.argument()
        if exponent == -1 and name in ("sin", "cos", "tan"):
            name, exponent = f"arc{name}", None
        if self.next.text == "(":
            end = closing(self.found, self.place)
            values = [self.part(it) for it in split(self.found[self.place + 1 : end], ",")[0]]
            self.place = end + 1
        else:
            is_negative = self.at("-")
            value = self.argument() if self.next.text == "{" else self.factor()
            while self.goes_on("(", "|") and self.next.text.removeprefix("\\") not in FUNCTIONS:
                value = value * self.factor()
            values = [-value if is_negative else value]
        if base is not None and name == "log":
            values.append(base)
        elif base is not None or (len(values) > 1) != (name in _SYMMETRIC):
            raise UnreadableError
        value = self.call(name, values)
        return value if exponent is None else power(value, exponent)

    def call(self, name: str, values: list):
        """Applies a function; one of unknown values is a symbol."""
        if name == "log" and len(values) == 1:
            return sympy.log(values[0]) / self.log
        if name in ("!", "binom") and any(it.is_number and abs(it) > MAX_TERMS for it in values):
            raise TooLargeError
        if name not in (*_SYMMETRIC, "mod") and name in _KNOWN:
            return getattr(sympy, _KNOWN[name])(*values)
        if name in _KNOWN and all(it.is_number for it in values):
            return getattr(sympy, _KNOWN[name])(*values)
        words = [str(it) for it in values]
        return sympy.Symbol(f"{name}({','.join(sorted(words) if name in _SYMMETRIC else words)})")

    def structure(self, text: str):
        """Reads what a command builds of its arguments."""
        if text == r"\frac":
            texts = "".join(it.text for it in self.found[self.place : self.place + 9])
            if re.match(r"\{d(?:\^\d)?\w?\}\{d\w(?:\^\d)?\}", texts):
                raise UnreadableError
            return self.argument() / self.argument()
        if text == r"\binom":
            return self.call("binom", [self.argument(), self.argument()])
        if text in (r"\sqrt", "sqrt"):
            degree = 2
            if self.at("["):
                degree = self.sum()
                self.take("]")
            return power(self.argument(), sympy.Integer(1) / degree)
        if text in (r"\lfloor", r"\lceil"):
            value = self.sum()
            self.take(rf"\r{text[2:]}")
            return sympy.floor(value) if text == r"\lfloor" else sympy.ceiling(value)
        return self.series(text)

    def series(self, text: str):
        """Reads a sum, product or limit with its index, or an integral, and computes it."""
        scripts = {"_": [], "^": []}
        while self.next.text in scripts:
            mark = self.take()
            scripts[mark] = self.script()
        if text == r"\int":
            rest = [it.text for it in self.found[self.place :]]
            last = next((i for i, it in enumerate(rest) if re.fullmatch("d[a-z]", it)), 0)
            name, low = rest[last][1:] if rest else "", self.part(scripts["_"])
            term = self.part(self.found[self.place : self.place + last], [name])
            self.place += last + 1
        else:
            parts = split(scripts["_"], ("=", r"\to"))[0]
            name, low = joined(parts[0]), self.part(parts[-1])
            self.bound |= {name}
            term = self.term()
            self.bound -= {name}
            self.letters -= {name}
        variable = sympy.Symbol(name)
        if text == r"\lim":
            return sympy.limit(term, variable, low)
        high = self.part(scripts["^"])
        if text != r"\int" and high.is_Integer and low.is_Integer and high - low > MAX_TERMS:
            raise TooLargeError
        return _SERIES[text](term, (variable, low, high)).doit()


def power(base, exponent):
    """Raises to a power; the odd root of a negative number is negative. TooLargeError for many bits."""
    if exponent.is_Rational:
        size = max(base.p.bit_length(), base.q.bit_length()) if base.is_Rational else 0
        if size * abs(exponent) > MAX_BITS or abs(exponent) > MAX_EXPONENTS[not base.is_Add]:
            if base not in (0, 1, -1):
                raise TooLargeError
        if base.is_number and base.is_negative and exponent.q % 2 and exponent.q > 1:
            return sympy.real_root(base**exponent.p, exponent.q)
    return base**exponent


# How two formulas compare.


def compare(one: Tree, other: Tree, how: str) -> bool:
    """Compares formulas, as `equality.Compare` says; those of different letters are never equal.

    A logarithm without a base is the natural one if the truth has such too.
    """
    texts = repr(one), repr(other)
    has_log = re.search(r"log(?! ?_)", texts[1])
    in_order = any(re.search(r"[A-Z][ (]?[A-Z]|\^\{?(?:T|\\+top|-1)\b\}? ?[A-Z]", it) for it in texts)
    built = [_built(it, 1 if has_log else sympy.log(sympy.Symbol("base")), in_order) for it in (one, other)]
    (a, letters), (b, its_letters) = built
    if letters != its_letters:
        return how == "checked"
    if how in ("equal", "checked"):
        return _same(a, b)
    ratios = [x / y for x, y in _values(a, b) if y != 0]
    is_constant = bool(ratios) and ratios[0] != 0 and all(_close(it, ratios[0]) for it in ratios)
    return is_constant and bool(how == "multiple" or ratios[0] > 0)


def _built(tree: Tree, log, in_order: bool) -> tuple:
    """Builds sympy's expression of a tree, and the letters in it."""
    kind, *parts = tree
    if kind == "number":
        return sympy.Rational(parts[0].numerator, parts[0].denominator), set()
    if kind == "formula":
        formula = Formula(tokens(parts[0]), log, in_order=in_order)
        return formula.value, formula.letters
    (a, letters), (b, its_letters) = (_built(it, log, in_order) for it in parts)
    return a - b if kind == "-" else a * b, letters | its_letters


def _same(a, b) -> bool:
    if a.has(sympy.nan, sympy.zoo) or b.has(sympy.nan, sympy.zoo):
        return False
    if a.is_Rational and b.is_Rational:
        return a == b
    if a == b or not (a.is_commutative and b.is_commutative):
        return a == b or sympy.expand(a - b) == 0
    return sympy.oo not in (abs(a), abs(b)) and all(_close(*pair) for pair in _values(a, b))


def _values(a, b) -> list[tuple]:
    """Evaluates two expressions at points where both are real, or at all where there are few."""
    letters = sorted(a.free_symbols | b.free_symbols, key=str)
    rng, points = random.Random(0), []
    for sign, size in POINTS if letters else POINTS[:1]:
        values = [rng.choice((1, sign)) * rng.randrange(100, 1000) * size for _ in letters]
        points.append(dict(zip(letters, (sympy.Rational(it, 3310) for it in values), strict=True)))
    if not a.has(sympy.I) and not b.has(sympy.I):
        real = [it for it in points if _is_real(a, it) and _is_real(b, it)]
        points = real if len(real) >= ENOUGH else points
    slow = a.has(*_SERIES.values()) or b.has(*_SERIES.values())
    return [tuple(it.subs(point).evalf(30 if slow else DIGITS) for it in (a, b)) for point in points]


def _is_real(expression, point: dict) -> bool:
    """Tells whether no root or logarithm in an expression is one of a negative number."""
    for part in expression.atoms(sympy.Pow, sympy.log):
        if part.func is sympy.log or not part.exp.subs(point).is_integer:
            inner = part.args[0].subs(point).evalf(15)
            if not (inner.is_real and inner > 0):
                return False
    return True


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
