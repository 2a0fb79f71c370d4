r"""The language of answers: reads a text as a tree; what the grammar does not know is a text.

    answer   = item, or items joined by "or" (alternatives) or by "," ";" "and" (a list)
    item     = side, or sides with = < > \le \ge \ne \in \equiv between them
    side     = operand, or operands with \cup \cap \setminus between them
    operand  = sum, or numbers with units
    sum      = term (+ term | - term)*; a term with \pm makes two alternatives of its item
    term     = factor (\cdot factor | / factor | factor)*
    factor   = atom, and behind it ^ exponent, !, %, degrees
    atom     = number | name | function argument | \frac | \sqrt | (sum) | |sum| | matrix
             | (side, side) tuple | [side, side) interval | \{side, side\} set | \{side : item\}

A tree is a tuple: its kind, and its parts. `equality` says which trees are equal.
"""

import functools
import re
from collections.abc import Sequence
from fractions import Fraction

from dapo_jax.verifier import notation
from dapo_jax.verifier.notation import Token
from dapo_jax.verifier.units import unit_of

MAX_NESTING = 25
Tree = tuple  # (kind, *parts)
ONE, MINUS_ONE = ("number", Fraction(1)), ("number", Fraction(-1))
# Signs behind a number that are its unit, beside those of `units`.
SIGNS = frozenset(("°", "°C", "°F", "%", "'", "''"))
CONSTANTS = SIGNS | {"e", "i", r"\pi", r"\infty", r"\dots"}
NUMERIC = ("number", "name", "+", "*", "^", "call", "matrix", "big")
TRIGONOMETRIC = frozenset("sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan".split())
ELEMENTARY = TRIGONOMETRIC | {"ln", "log", "exp", "sqrt", "abs", "floor", "ceil", "!", "det"}
SEVERAL = frozenset(("gcd", "lcm", "max", "min", "mod", "binom"))

_NUMBER = re.compile(r"(\d*)\.?(\d*)(?:\\[a-z]+\{?(\d+)\}?)?(?:[eE]([+-]?\d+))?")
# Numbers with signs between them that are no difference: scores, ranges of years, dates.
_SHAPE = re.compile(r"\d+(?:-\d+)+|\d+(?:/\d+){2,}")
_OR, _AND, _SEMICOLON = ("or", r"\lor"), (",", "and", "&"), (";",)
_RELATIONS = {"<=": r"\le", ">=": r"\ge", "!=": r"\ne"}
_RELATIONS |= {it: it for it in ("=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\notin")}
_RELATIONS |= {r"\equiv": r"\equiv"}
_TURNED = {">": "<", r"\ge": r"\le"}
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_OF_WORDS = TRIGONOMETRIC | {"ln", "log", "exp", "gcd", "lcm", "max", "min"}
_FUNCTIONS = _OF_WORDS | {"dim", "deg", "ker", "arg"}
_WORDS = frozenset("no or is in at of by to if on up so an as be do we my it".split())
_SYMBOLS = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi "
    "rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi "
    "Omega ell hbar partial emptyset dots pi infty".split()
)
_ACCENTS = frozenset("vec bar hat overline dot ddot tilde widehat overrightarrow".split())
# Before a bracket these are functions; n(n+1) is a product.
_OF_ANYTHING = frozenset(r"f g h F G H P Q \varphi \phi \psi \Gamma \tau \sigma \zeta".split())
_DERIVATIVE = re.compile(
    r"\{(?:d|\\partial)(?:\^\{?\d\}?)?\w?\}\{(?:d|\\partial)\w(?:\^\{?\d\}?)?\}"
)
ROUNDED_DIGITS = 10  # a decimal of so many may be a rounded value
_MONEY = {r"\$": "dollar", "€": "euro", "£": "£", "¥": "yen"}
_IN_UNITS = frozenset(("/", "^", "*", r"\cdot", "-", "{", "}", "(", ")", *_MONEY))
_OPENS = frozenset(("(", "[", "{", r"\{", r"\begin", r"\langle", r"\lfloor", r"\lceil"))
_CLOSES = frozenset((")", "]", "}", r"\}", r"\end", r"\rangle", r"\rfloor", r"\rceil"))


class UnreadableError(ValueError):
    """A text that the grammar does not know."""


@functools.lru_cache(maxsize=4096)
def read(text: str) -> Tree:
    """Reads an answer; raises nothing."""
    found = notation.tokens(text)
    try:
        return _answer(found)
    except (UnreadableError, RecursionError):
        return _text(found)


def spelling(text: str) -> str:
    """Returns a number as an integer or a fraction, any other answer without its typesetting."""
    tree = read(text)
    return str(tree[1]) if tree[0] == "number" else notation.joined(notation.tokens(text))


def _text(found: Sequence[Token]) -> Tree:
    if len(found) > 1 and found[0].text in ("a", "an", "the") and len(found[1].text) > 2:
        found = found[1:]
    texts = [it.text.casefold() if len(it.text) > 1 else it.text for it in found]
    return "text", notation.joined([Token(it.kind, text) for it, text in zip(found, texts, strict=True)])


# An answer of several items.


def _answer(found: Sequence[Token]) -> Tree:
    for joints in (_SEMICOLON, _OR, _AND):
        parts = _split(found, joints)
        if len(parts) > 1:
            cases = joints is _SEMICOLON and any(it.text == "=" for it in found)
            return _joined("or" if joints is _OR or cases else "list", [_answer(it) for it in parts])
    return _item(found)


def _split(found: Sequence[Token], joints: Sequence[str]) -> list[Sequence[Token]]:
    """Splits at the joints outside of brackets; UnreadableError for nothing between two."""
    parts, depth, begin = [], 0, 0
    for place, token in enumerate(found):
        depth += (token.text in _OPENS) - (token.text in _CLOSES)
        if depth == 0 and token.text.lower() in joints:
            parts.append(found[begin:place])
            begin = place + 1
    if not parts:
        return [found]
    parts.append(found[begin:])
    # The comma of ", and" joins nothing.
    parts = [it for i, it in enumerate(parts) if it or joints is not _AND or i in (0, len(parts) - 1)]
    parts = [it[:-1] if it and it[-1].text == "," else it for it in parts]
    if not all(parts):
        raise UnreadableError
    return parts


def _joined(kind: str, items: list[Tree]) -> Tree:
    """Joins items; values of different names are a map, those of one name are its values."""
    if kind == "or" and not {it[0] for part in items if part[0] == "list" for it in part[1:]} & {"=", "map"}:
        items = [it for part in items for it in (part[1:] if part[0] == "list" else [part])]
    for place, item in enumerate(items[1:], start=1):  # x = 1, 2 and (x, y) = (1, 2), (3, 4)
        before = items[place - 1]
        if before[0] == "=" and item[0] in (*NUMERIC, "tuple"):
            items[place] = ("=", before[1], item)
        if before[0] == "map" and item[0] == "tuple" and len(item) == len(before):
            items[place] = _map([name for name, _ in before[1:]], item[1:])
    names = [it[1] for it in items if it[0] == "="]
    if len(names) == len(items) and all(map(is_name, names)):
        if len({*names}) == 1:
            return "=", names[0], (kind, *(it[2] for it in items))
        if len({*names}) == len(names) and kind == "list":
            return _map(names, [it[2] for it in items])
    return kind, *items


def _map(names: Sequence[Tree], values: Sequence[Tree]) -> Tree:
    return "map", *zip(names, values, strict=True)


def _item(found: Sequence[Token]) -> Tree:
    try:
        if _SHAPE.fullmatch(notation.joined(found)):
            raise UnreadableError
        reader = _Reader(found)
        item = reader.item()
        if not reader.has_sign:
            return item
        return _joined("or", [item, _Reader(found, turned=True).item()])
    except (UnreadableError, RecursionError):
        return _text(found)


def is_name(tree: Tree, *, loose: bool = False) -> bool:
    """Tells whether what is before "=" only names a value: x, a_1, f(2), AB, m+n.

    loose: so does all that has no number and no sign before it, such as ln(y).
    """
    kind, *parts = tree
    if kind == "name":
        return parts[0] not in CONSTANTS and (loose or not {*"'/"} & {*parts[0]})
    if kind == "call":
        return loose or parts[0] not in ELEMENTARY | SEVERAL or _is_segment(parts[1])
    if kind == "+":
        return all(is_name(it, loose=loose) and (loose or it[0] == "name") for it in parts)
    if kind == "^" and parts[1] == MINUS_ONE:
        return is_name(parts[0], loose=loose)
    if kind == "*" and not loose:
        return _is_segment(tree) or (len(parts) == 3 and _is_segment(tree[:3]))
    return kind in ("*", "^") and all(is_name(it, loose=True) for it in parts)


def _is_segment(tree: Tree) -> bool:
    return tree[0] == "*" and all(it[0] == "name" and it[1][-1].isupper() for it in tree[1:3])


# Formulas.


def times(*factors: Tree) -> Tree:
    """Multiplies trees; a number comes first where it is the first."""
    flat = [it for tree in factors for it in (tree[1:] if tree[0] == "*" else [tree])]
    if any(it[0] not in NUMERIC for it in flat):
        raise UnreadableError
    return "*", *flat


def negative(tree: Tree) -> Tree:
    """Returns a tree with the other sign."""
    if tree[0] == "number":
        return "number", -tree[1], *tree[2:]
    if tree[0] == "*" and tree[1][0] == "number":
        return "*", negative(tree[1]), *tree[2:]
    return times(MINUS_ONE, tree)


class _Reader:
    """Reads the tokens of one item from left to right; turned: takes the lower sign of \pm."""

    def __init__(self, found: Sequence[Token], *, turned: bool = False) -> None:
        self.found, self.place, self.turned = [*found], 0, turned
        self.has_sign, self.nesting, self.bars = False, 0, 0
        self.money = ""  # before the number that is read
        self.is_closed = False  # whether a number may be a factor behind what was read

    @property
    def next(self) -> Token:
        return self.found[self.place] if self.place < len(self.found) else Token("end", "")

    def at(self, *texts: str) -> bool:
        return self.next.text in texts and self.next.kind != "end"

    def take(self) -> Token:
        if self.next.kind == "end":
            raise UnreadableError
        self.place += 1
        return self.found[self.place - 1]

    def skip(self, text: str) -> None:
        if not self.at(text):
            raise UnreadableError
        self.place += 1

    def item(self) -> Tree:
        """Reads sides with relations between them."""
        if self.at(r"\approx"):
            self.take()
            return "approximate", self.item()
        sides, relations = [self.side()], []
        while self.next.text in _RELATIONS:
            relations.append(_RELATIONS[self.take().text])
            sides.append(self.side())
        modulus = self.modulus() if relations == [r"\equiv"] else None
        if self.next.kind != "end":
            raise UnreadableError
        left, *middle, right = [*sides, sides[-1]][: len(sides) + (not relations)]
        if not relations:
            return left
        if {*relations} == {"="}:
            if left[0] == right[0] == "tuple" and len(left) == len(right) and not middle:
                return _map(left[1:], right[1:])
            return "=", left, right, *middle
        if {*relations} <= {*_TURNED}:
            sides, relations = sides[::-1], [_TURNED[it] for it in reversed(relations)]
        if {*relations} <= {*_TURNED.values()}:
            return "<", tuple(sides), tuple(relations)
        if len(relations) > 1 or (modulus is None) != (relations != [r"\equiv"]):
            raise UnreadableError
        return relations[0], left, right, *([modulus] if modulus else [])

    def modulus(self) -> Tree:
        """Reads (mod 7) in one of its spellings."""
        opened = self.at("(") and self.take()
        if self.take().text not in (r"\pmod", r"\bmod", r"\mod", "mod"):
            raise UnreadableError
        modulus = self.argument()
        if opened:
            self.skip(")")
        return modulus

    def side(self) -> Tree:
        """Reads operands of unions, intersections and complements."""
        tree = self.operand()
        while self.at(r"\cup", r"\cap", r"\setminus"):
            kind = self.take().text
            flat = tree[1:] if tree[0] == kind != r"\setminus" else [tree]
            tree = (kind, *flat, self.operand())
        return tree

    def operand(self) -> Tree:
        """Reads a sum, or numbers with units."""
        if self.next.kind == "letters" and self.is_word() and self.found[self.place + 1 :][:1]:
            if self.found[self.place + 1].text == "=":
                return "name", self.take().text.casefold()
        measures = [self.measure()]
        while self.next.kind == "number" and measures[-1][0] == "measure":
            measures.append(self.measure())
        return ("list", *measures) if len(measures) > 1 else measures[0]

    def measure(self) -> Tree:
        self.money = _MONEY[self.take().text] if self.next.text in _MONEY else ""
        tree = self.sum()
        unit, end = self.unit()
        if unit is not None and end > self.place:
            self.place = end
        elif tree[0] == "*" and tree[-1][0] == "name" and tree[-1][1] in SIGNS:
            *factors, (_, unit) = tree[1:]
            tree = factors[0] if len(factors) == 1 else ("*", *factors)
        return ("measure", tree, unit) if unit else tree

    def unit(self) -> tuple[str | None, int]:
        """Finds the unit that follows, and its end; it is "" or None where there is none."""
        first, before, words = self.next, self.found[self.place - 1], [self.money] * bool(self.money)
        if first.kind == "letters" and not first.styled:
            is_behind = before.kind == "number" or before.text in ("°", "%")
            if not first.spaced and (not is_behind or len(first.text) == 1 or first.text == "mg"):
                return self.money, self.place
            if len(first.text) == 1 and not is_behind:
                return self.money, self.place
        elif first.kind != "letters" and first.text not in (*_MONEY, "/" * bool(self.money)):
            return self.money, self.place
        end = self.place
        while end < len(self.found):
            token = self.found[end]
            is_power = token.kind == "number" and self.found[end - 1].text in ("^", "-", "{")
            if token.kind != "letters" and not is_power and token.text not in _IN_UNITS:
                break
            if words[-1:] == ["-"]:
                words[-1] = f"-{token.text}"
            elif token.text not in ("{", "}"):
                words.append(_MONEY.get(token.text, token.text))
            end += 1
        return unit_of(words), end

    def sum(self) -> Tree:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise UnreadableError
        terms = [self.signed()]
        while self.at("+", "-", r"\pm", r"\mp"):
            terms.append(self.signed())
        self.nesting -= 1
        if len(terms) > 1 and any(it[0] not in NUMERIC for it in terms):
            raise UnreadableError
        return terms[0] if len(terms) == 1 else ("+", *terms)

    def signed(self) -> Tree:
        sign = self.take().text if self.at("+", "-", r"\pm", r"\mp") else "+"
        self.has_sign |= sign in (r"\pm", r"\mp")
        term = self.term()
        minus = sign == "-" or sign == (r"\pm" if self.turned else r"\mp")
        return negative(term) if minus else term

    def term(self) -> Tree:
        tree, divided = self.factor(), False
        while True:
            if self.at("*", r"\cdot", r"\times"):
                cross = self.take().text == r"\times"
                other = self.signed_factor()
                if cross and tree[0] == other[0] == "name" and _is_vector(tree) and _is_vector(other):
                    tree = ("call", r"\times", tree, other)
                else:
                    tree = times(tree, other)
            elif self.at("/") and not (self.money and self.unit()[0]):
                self.take()
                tree, divided = times(tree, ("^", self.factor(), MINUS_ONE)), True
            elif self.at(r"\bmod"):
                self.take()
                tree = ("call", "mod", tree, self.factor())
            elif self.goes_on(tree):
                if divided:  # 1/2x has two readings
                    raise UnreadableError
                tree = times(tree, self.factor())
            else:
                return tree

    def goes_on(self, tree: Tree) -> bool:
        """Tells whether what follows is a factor of the product that was read."""
        token = self.next
        if token.kind == "letters":
            return not self.unit()[0] and not self.is_word()
        if token.kind == "number":
            return self.is_closed
        if token.text == "|":
            return not self.bars
        name = token.text[1:]
        known = name in _SYMBOLS | _ACCENTS | _FUNCTIONS or name in _STRUCTURES
        return token.text == "(" or (token.kind == "command" and known)

    def is_word(self) -> bool:
        """Tells whether letters are a word; others are factors, as xy and mgh, or a function."""
        text = self.next.text
        if len(text) < 3 or text in _FUNCTIONS or text in ("gcd", "lcm", "max", "min", "sqrt"):
            return text.lower() in _WORDS
        vowels = {*text.lower()} & {*"aeiou"}
        return text != "infinity" and not (vowels <= {"a"} and (
            not vowels or text.isupper() or {*text} <= {*"abcdxyz"}
        ))

    def signed_factor(self) -> Tree:
        return negative(self.signed_factor()) if self.at("-") and self.take() else self.factor()

    def factor(self) -> Tree:
        """Reads an atom, and what is raised or stands behind it."""
        tree = self.atom()
        while True:
            if self.at("^"):
                self.take()
                tree = self.raised(tree)
            elif self.at(r"\circ"):
                self.take()
                tree = self.degrees(tree)
            elif self.at("!"):
                self.take()
                tree = ("call", "!", tree)
            elif self.at("%") or (self.at("'") and tree[0] in ("number", "*")):
                sign = self.take().text
                sign += self.take().text if sign == "'" and self.at("'") else ""
                tree = times(tree, ("name", sign))
            elif self.at("_") or (self.at("!") and tree[:2] == ("call", "!")):
                raise UnreadableError
            else:
                return tree

    def degrees(self, tree: Tree) -> Tree:
        is_heat = self.at("C", "F")
        return times(tree, ("name", f"°{self.take().text}" if is_heat else "°"))

    def raised(self, tree: Tree) -> Tree:
        """Reads an exponent: a power, degrees, or a mark such as the T of a transpose."""
        if self.next.kind == "end":
            raise UnreadableError
        if self.next.kind == "letters":
            self.spread()
        end = notation.closing(self.found, self.place)
        texts = [it.text for it in self.found[self.place : end + 1]]
        texts = texts[1:-1] if texts[0] == "{" else texts[:1]
        if texts == [r"\circ"]:
            self.place = end + 1
            return self.degrees(tree)
        is_mark = texts in (["T"], [r"\top"], ["*"], [r"\dagger"], [r"\prime"])
        if is_mark and (texts != ["T"] or _is_capital(tree)):
            self.place = end + 1
            return "call", f"^{texts[0]}", tree
        if self.at("{"):
            return "^", tree, self.braces()
        return "^", tree, self.signed_factor() if self.at("-") else self.atom()

    def braces(self) -> Tree:
        self.skip("{")
        tree = self.sum()
        self.skip("}")
        return tree

    def argument(self) -> Tree:
        """Reads what a command takes: braces, or one atom."""
        return self.braces() if self.at("{") else self.atom()

    def script(self) -> list[Token]:
        """Takes the tokens of an index or limit."""
        begin, end = self.place, notation.closing(self.found, self.place)
        self.place = end + 1
        inner = self.found[begin : end + 1]
        if not inner:
            raise UnreadableError
        return inner[1:-1] if inner[0].text == "{" else inner

    def inside(self, closer: str) -> list[Tree]:
        """Reads sides with commas between up to a bracket, which it takes."""
        sides = [self.side()]
        while self.at(",", ";"):
            self.take()
            sides.append(self.side())
        self.skip(closer)
        return sides

    def atom(self) -> Tree:
        self.is_closed = False
        token = self.take()
        if token.kind == "number":
            return self.number(token)
        if token.kind == "letters":
            return self.letters(token)
        if token.text in ("(", "["):
            return self.brackets(token.text)
        if token.text == r"\{":
            return self.set()
        if token.text in ("|", r"\|"):
            self.bars += 1
            tree = self.sum()
            self.skip(token.text)
            self.bars -= 1
            return "call", "abs" if token.text == "|" else "norm", tree
        if token.kind != "command":
            raise UnreadableError
        name = token.text[1:]
        if name in _STRUCTURES:
            return getattr(self, _STRUCTURES[name])(name)
        if name in _FUNCTIONS | SEVERAL:
            return self.function(name)
        if name in _ACCENTS:
            return self.name(f"{token.text} {notation.joined(self.script())}")
        if name in _SYMBOLS or name.startswith("mathbb"):
            return self.name(token.text)
        raise UnreadableError

    def number(self, token: Token) -> Tree:
        whole, digits, again, power = _NUMBER.fullmatch(re.sub("[ ,]", "", token.text)).groups()
        value = Fraction(int(f"{whole}{digits}"), 10 ** len(digits))
        if again:
            value += Fraction(int(again), 10 ** len(digits) * (10 ** len(again) - 1))
        value *= Fraction(10) ** int(power or 0)
        unit = self.next
        if unit.kind == "letters":
            if not unit.spaced and unit.text in ("st", "nd", "rd", "th"):
                raise UnreadableError
            name = unit.text.lower()
            if name in _POWERS_OF_TEN or name == "dozen":
                self.take()
                return "number", value * (12 if name == "dozen" else 10 ** _POWERS_OF_TEN[name])
        if token.text.isdigit() and (fraction := self.fraction_behind()):
            return "number", value + fraction
        exact = len(digits) >= ROUNDED_DIGITS and not again
        return ("number", value, len(digits)) if exact else ("number", value)

    def fraction_behind(self) -> Fraction | None:
        """Takes the fraction of a mixed number: 2 1/2 or 2\frac{1}{2}."""
        texts = [it.text for it in self.found[self.place : self.place + 7]]
        if texts[1:2] == ["/"] and self.next.spaced and self.next.kind == "number":
            parts, length = (texts[0], texts[2] if len(texts) > 2 else ""), 3
        elif texts[:1] == [r"\frac"] and "".join(texts[1::2][:1] + texts[3:5]) == "{}{":
            parts, length = (texts[2], texts[5] if len(texts) > 5 else ""), 7
        else:
            return None
        if not all(it.isdigit() for it in parts) or not int(parts[1]):
            return None
        self.place += length
        return Fraction(int(parts[0]), int(parts[1]))

    def letters(self, token: Token) -> Tree:
        text = token.text
        if text in _FUNCTIONS | {"gcd", "lcm", "max", "min"}:
            return self.function(text)
        if text == "sqrt":
            return self.root(text)
        if text in ("pi", "infinity"):
            return "name", {"pi": r"\pi", "infinity": r"\infty"}[text]
        if token.styled and len(text) > 1 and self.at("("):
            self.take()
            return "call", text, *self.inside(")")
        self.place -= 1
        if self.is_word():
            raise UnreadableError
        self.spread()
        return self.name(self.take().text)

    def spread(self) -> None:
        """Makes a token of each letter."""
        token = self.next
        letters = [Token(token.kind, token.text[0], token.spaced), *(Token(token.kind, it) for it in token.text[1:])]
        self.found[self.place : self.place + 1] = letters

    def name(self, text: str) -> Tree:
        """Reads the marks, the index and the arguments of a name."""
        while self.at("'", "_"):
            is_index = self.take().text == "_"
            text += f"_{notation.joined(self.script())}" if is_index else "'"
        letter = text.partition("_")[0].rstrip("'")
        texts = [it.text for it in self.found[self.place : self.place + 6]]
        if letter in _OF_ANYTHING and texts == ["^", "{", "-", "1", "}", "("]:
            self.place += 5
            text += "^-1"
        if not self.at("(") or text in CONSTANTS:
            return "name", text
        end = _closing_bracket(self.found, self.place)
        inner = self.found[self.place + 1 : end]
        is_several = len(_split(inner, (",", ";"))) > 1
        if letter not in _OF_ANYTHING and len(inner) != 1 and not is_several:
            return "name", text
        self.place = end + 1
        return "call", text, *(_answer(it) for it in _split(inner, (",", ";")))

    def function(self, name: str) -> Tree:
        """Reads an index (of log), a power and the argument of a function: \sin^2 x."""
        power, base = None, ()
        while self.at("^", "_"):
            if self.take().text == "_":
                base = (self.argument(),)
            else:
                power = self.argument()
        if power == MINUS_ONE and name in TRIGONOMETRIC:
            name, power = f"arc{name}", None
        if base and name != "log":
            raise UnreadableError
        if self.at("("):
            self.take()
            tree = ("call", name, *self.inside(")"), *base)
        else:
            argument = self.braces() if self.at("{") else self.signed_factor()
            while self.goes_on(argument) and not self.at("(", "|") and not self.is_function():
                argument = times(argument, self.factor())
            tree = ("call", name, argument, *base)
        if name not in SEVERAL and len(tree) > 3 + len(base):
            raise UnreadableError
        return ("^", tree, power) if power else tree

    def is_function(self) -> bool:
        return self.next.text.removeprefix("\\") in _FUNCTIONS

    def brackets(self, opener: str) -> Tree:
        sides = [self.side()]
        begin = self.place
        while self.at(",", ";"):
            self.take()
            sides.append(self.side())
        closer = self.take().text if self.at(")", "]") else ""
        if opener == "(" and closer == ")":
            self.is_closed = sides[0][0] != "name"
            return sides[0] if len(sides) == 1 else ("tuple", *sides)
        if len(sides) == 2 and closer:
            return "interval", opener, *sides, closer
        if opener == "[" and closer == "]":
            return "row", *sides
        raise UnreadableError

    def set(self) -> Tree:
        self.bars += 1  # a bar is no absolute value here
        sides = [self.side()]
        self.bars -= 1
        if len(sides) == 1 and self.at("|", ":", r"\mid"):
            self.take()
            end = _closing_bracket(self.found, self.place - 1)
            condition = _answer(self.found[self.place : end])
            self.place = end + 1
            return "builder", sides[0], condition
        while self.at(",", ";"):
            self.take()
            sides.append(self.side())
        self.skip(r"\}")
        return "set", *sides

    def angles(self, _: str) -> Tree:
        return "tuple", *self.inside(r"\rangle")

    def floor(self, name: str) -> Tree:
        tree = self.sum()
        self.skip(rf"\r{name[1:]}")
        return "call", name[1:], tree

    def fraction(self, _: str) -> Tree:
        texts = [it.text for it in self.found[self.place :]]
        if _DERIVATIVE.match("".join(texts)):
            return "name", notation.joined([*self.script(), Token("sign", "/"), *self.script()])
        tree = times(self.argument(), ("^", self.argument(), MINUS_ONE))
        self.is_closed = True
        return tree

    def binomial(self, _: str) -> Tree:
        tree = ("call", "binom", self.argument(), self.argument())
        self.is_closed = True
        return tree

    def root(self, _: str) -> Tree:
        degree = ("number", Fraction(2))
        if self.at("["):
            self.take()
            degree = self.sum()
            self.skip("]")
        return "^", self.argument(), ("^", degree, MINUS_ONE)

    def angle(self, name: str) -> Tree:
        if self.next.kind != "letters":
            raise UnreadableError
        return self.name(f"\\{name} {self.take().text}")

    def matrix(self, _: str) -> Tree:
        kind, rows = notation.joined(self.script()), [[]]
        if kind == "array":
            self.script()
        if kind not in ("pmatrix", "bmatrix", "matrix", "array", "vmatrix"):
            raise UnreadableError
        while not self.at(r"\end"):
            rows[-1].append(self.sum())
            if self.at(r"\\"):
                rows.append([])
            elif not self.at("&"):
                break
            self.take()
        self.skip(r"\end")
        self.script()
        rows = [tuple(row) for row in rows if row]
        if len({*map(len, rows)}) != 1:
            raise UnreadableError
        return ("call", "det", ("matrix", *rows)) if kind == "vmatrix" else ("matrix", *rows)

    def series(self, name: str) -> Tree:
        """Reads a sum, a product or a limit with its index, or an integral: (big, ...)."""
        below, above = [], []
        while self.at("_", "^"):
            if self.take().text == "_":
                below = self.script()
            else:
                above = self.script()
        if name == "int":
            end = next(
                (i for i in range(self.place, len(self.found)) if _is_differential(self.found[i])),
                len(self.found),
            )
            inner, last = self.found[self.place : end], self.found[end : end + 1]
            variable = ("name", last[0].text[1]) if last else ONE
            self.place = end + 1
            low, high, body = (_formula(it) for it in (below, above, inner))
        else:
            split = _split(below, ("=", r"\to"))
            if len(split) != 2:
                raise UnreadableError
            variable, low = map(_formula, split)
            high = _formula(above) if above else ONE
            body = self.term()
        if variable[0] != "name":
            raise UnreadableError
        return "big", name, variable, low, high, body


def _formula(found: Sequence[Token]) -> Tree:
    reader = _Reader(found)
    tree = reader.sum()
    if reader.next.kind != "end" or tree[0] not in NUMERIC:
        raise UnreadableError
    return tree


def _is_differential(token: Token) -> bool:
    return token.kind == "letters" and len(token.text) == 2 and token.text[0] == "d"


def _closing_bracket(found: Sequence[Token], place: int) -> int:
    depth = 1
    for i in range(place + 1, len(found)):
        depth += (found[i].text in _OPENS) - (found[i].text in _CLOSES)
        if depth == 0:
            return i
    raise UnreadableError


def _is_capital(tree: Tree) -> bool:
    return any(it[0] == "name" and it[1][0].isupper() for it in (tree, *tree[1:]) if it)


def _is_vector(tree: Tree) -> bool:
    return tree[1][0].isupper() or tree[1].startswith("\\")


_STRUCTURES = {
    **{"frac": "fraction", "binom": "binomial", "sqrt": "root", "langle": "angles"},
    **{"begin": "matrix", "lfloor": "floor", "lceil": "floor", "angle": "angle"},
    **dict.fromkeys(("sum", "prod", "int", "lim"), "series"),
}
