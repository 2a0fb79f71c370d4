"""The algebra of the rules "symbolic": formulas become sympy's, in processes with limits."""

import functools
import json
import operator
import pickle
import random
from collections.abc import Callable, Sequence

from dapo_jax.types import Verdict
from dapo_jax.verifier import isolated
from dapo_jax.verifier.equality import (
    AlgebraNeededError,
    TooLargeError,
    compare_exactly,
    equal,
    exact,
)
from dapo_jax.verifier.finding import claimed, find_answer, last_boxes
from dapo_jax.verifier.grammar import NUMERIC, TRIGONOMETRIC, Tree, read
from dapo_jax.verifier.math_rules import decide, refuse

DIGITS = 1_000  # to which two formulas agree that are equal
# Two formulas are compared where their letters have these values, times powers of two roots.
POINTS = 8
ENOUGH = 3  # points where both are real


class SymbolicVerifier(isolated.Pool):
    """Grades by the rules "symbolic", the algebra in workers; raises as `isolated.Pool` does."""

    def __init__(self, num_workers: int, cpu_seconds: float = isolated.CPU_SECONDS) -> None:
        super().__init__(f"{__name__}:algebra", num_workers, cpu_seconds)

    def verify_many(self, responses: Sequence[str], ground_truths: Sequence[str]) -> list[Verdict]:
        """Grades pairs, in order; raises ValueError where the lengths differ."""
        decided = [
            refuse(response, truth) or decide(_stated(response), _box_of(truth))
            for response, truth in zip(responses, ground_truths, strict=True)
        ]
        asked = {it: pickle.dumps(it) for it in decided if not isinstance(it, Verdict)}
        graded = {it: verdict_of(reply, it[0]) for it, reply in self.ask(asked).items()}
        return [graded.get(it, it) for it in decided]


def _stated(response: str) -> str | None:
    answer = find_answer(response)
    return None if answer is None else claimed(answer)


def _box_of(truth: str) -> str:
    """Returns what the last box of a worked solution holds; another truth as it is."""
    return last_boxes(truth) or truth


def verdict_of(reply: isolated.Reply, answer: str) -> Verdict:
    """Reads a worker's verdict on an answer; one without an answer to it is wrong."""
    if reply.status == "done":
        return Verdict(*json.loads(reply.answer))
    return Verdict(False, answer, reply.status)


@functools.cache
def default_verifier() -> SymbolicVerifier:
    """Starts the pool that this process shares, one worker a core, at the first call."""
    return SymbolicVerifier(isolated.one_a_core())


# In a worker.


def algebra() -> Callable[[bytes], Callable[[], bytes]]:
    """Warms up a worker: after it a formula costs 0.01 s, before it 0.5 s."""
    for answer, truth in _WARM_UP:
        equal(read(answer), read(truth), compare_formulas)

    def prepare(request: bytes) -> Callable[[], bytes]:
        form, *trees = pickle.loads(request)
        return lambda: json.dumps(grade_formulas(form, *trees)).encode()

    return prepare


def grade_formulas(form: str, answer: Tree, truth: Tree) -> Verdict:
    """Grades by algebra, which may take forever: only inside a worker."""
    try:
        correct = equal(answer, truth, compare_formulas)
    except TooLargeError:
        return Verdict(False, form, "too_large")
    return Verdict(correct, form, "correct" if correct else "wrong")


def compare_formulas(one: Tree, other: Tree, how: str) -> bool:
    """Compares formulas, as `equality.Compare` says: by their values at POINTS, to DIGITS."""
    try:
        return compare_exactly(one, other, how)
    except AlgebraNeededError:
        import sympy

    # A logarithm without a base is the natural one if the truth has such too.
    base = None if _has_log(other) else sympy.Symbol("base")
    in_order = _has_ordered_product(one) or _has_ordered_product(other)
    try:
        a, b = (_formula(it, base, in_order) for it in (one, other))
    except (TypeError, ValueError, sympy.ShapeError):
        return False
    cells = [it if isinstance(it, sympy.MatrixBase) else None for it in (a, b)]
    if cells != [None, None]:
        alike = None not in cells and a.shape == b.shape and how == "equal"
        return alike and all(_same(*pair) for pair in zip(a, b, strict=True))
    if how == "equal":
        return _same(a, b)
    ratios = [x / y for x, y in _values(a, b) if y != 0]
    first = ratios[0] if ratios else 0
    is_constant = first != 0 and all(_close(it, first) for it in ratios)
    return bool(is_constant and (how == "multiple" or first > 0))


def _has_log(tree: Tree) -> bool:
    return tree[:2] == ("call", "log") and len(tree) == 3 or any(
        _has_log(it) for it in tree if isinstance(it, tuple)
    )


def _has_ordered_product(tree: Tree) -> bool:
    """Tells whether capitals, which may be matrices, stand side by side."""
    if tree[0] == "*" and sum(_is_capital(it) for it in tree[1:]) > 1:
        return True
    return any(_has_ordered_product(it) for it in tree if isinstance(it, tuple) and it)


def _is_capital(tree: Tree) -> bool:
    if tree[0] == "^" or tree[:2] == ("call", "^T"):
        tree = tree[1] if tree[0] == "^" else tree[2]
    return tree[0] == "name" and tree[1][0].isupper()


def _formula(tree: Tree, base, in_order: bool, bound: frozenset[str] = frozenset()):
    """Builds sympy's expression of a tree; ValueError for what it has none for."""
    import sympy

    kind, *parts = tree
    constants = {"e": sympy.E, "i": sympy.I, r"\pi": sympy.pi, r"\infty": sympy.oo}
    constants |= {"°": sympy.pi / 180, "%": sympy.Rational(1, 100)}

    def build(part):
        return _formula(part, base, in_order, bound)

    if kind == "number":
        return sympy.Rational(parts[0].numerator, parts[0].denominator)
    if kind == "name":
        name = parts[0]
        if name in constants and name not in bound:
            return constants[name]
        return sympy.Symbol(name, commutative=not (in_order and name[0].isupper()))
    if kind == "+":
        return functools.reduce(operator.add, map(build, parts))
    if kind == "*":
        return functools.reduce(operator.mul, map(build, parts))
    if kind == "^":
        root = build(parts[1])
        number = exact(parts[0])
        if number is not None and number < 0 and root.is_Rational and root.q % 2:
            return sympy.real_root(build(parts[0]) ** root.p, root.q)
        return build(parts[0]) ** root
    if kind == "matrix":
        return sympy.Matrix([[build(it) for it in row] for row in parts])
    if kind == "big":
        return _series(*parts, base, in_order, bound)
    if kind != "call":
        raise ValueError(kind)
    name, arguments = parts[0], [build(it) if it[0] in NUMERIC else it for it in parts[1:]]
    if name == "log" and len(arguments) == 1 and base:
        return sympy.log(arguments[0]) / sympy.log(base)
    known = {"ln": "log", "abs": "Abs", "ceil": "ceiling", "!": "factorial", "binom": "binomial"}
    known |= {it: it.replace("arc", "a") for it in TRIGONOMETRIC}
    if name in known or name in ("log", "exp", "floor"):
        return getattr(sympy, known.get(name, name))(*arguments)
    if name == "det":
        return arguments[0].det()
    if name in ("max", "min") and all(it.is_number for it in arguments):
        return getattr(sympy, name.title())(*arguments)
    words = [str(it) for it in arguments]
    words = sorted(words) if name in ("gcd", "lcm", "max", "min") else words
    is_ordered = in_order and name.startswith("^")
    return sympy.Symbol(f"{name}({', '.join(words)})", commutative=not is_ordered)


def _series(kind: str, index: Tree, low: Tree, high: Tree, body: Tree, base, in_order, bound):
    import sympy

    low, high = (_formula(it, base, in_order, bound) for it in (low, high))
    term = _formula(body, base, in_order, bound | {index[1]})
    variable = sympy.Symbol(index[1])
    if kind == "lim":
        return sympy.limit(term, variable, low)
    makers = {"sum": sympy.Sum, "prod": sympy.Product, "int": sympy.Integral}
    return makers[kind](term, (variable, low, high)).doit()


def _same(a, b) -> bool:
    import sympy

    if a == b or a.has(sympy.nan, sympy.zoo) or b.has(sympy.nan, sympy.zoo):
        return bool(a == b) and not a.has(sympy.nan, sympy.zoo)
    if not (a.is_commutative and b.is_commutative):
        return sympy.expand(a - b) == 0
    if sympy.oo in (abs(a), abs(b)):
        return False
    return all(_close(*pair) for pair in _values(a, b))


def _values(a, b) -> list[tuple]:
    """Evaluates two expressions at points where both are real, or at all where there are few."""
    import sympy

    letters = sorted(a.free_symbols | b.free_symbols, key=str)
    is_series = a.has(sympy.Sum, sympy.Integral) or b.has(sympy.Sum, sympy.Integral)
    digits, rng, points = (30 if is_series else DIGITS), random.Random(0), []
    for number in range(POINTS if letters else 1):
        signs = (1, -1) if number >= ENOUGH else (1,)
        points.append(
            {it: sympy.Rational(rng.choice(signs) * rng.randrange(20, 400), 101) for it in letters}
        )
    if letters and not a.has(sympy.I) and not b.has(sympy.I):
        real = [it for it in points if _is_real(a, it) and _is_real(b, it)]
        points = real if len(real) >= ENOUGH else points
    return [tuple(it.subs(point).evalf(digits) for it in (a, b)) for point in points]


def _is_real(expression, point: dict) -> bool:
    """Tells whether no root or logarithm in an expression is one of a negative number."""
    import sympy

    for part in expression.atoms(sympy.Pow, sympy.log):
        if part.func is sympy.log or not part.exp.subs(point).is_integer:
            inner = part.args[0].subs(point).evalf(15)
            if not (inner.is_real and inner > 0):
                return False
    return True


def _close(a, b) -> bool:
    """Tells whether two values agree in nearly all digits; a zero is one of low precision."""
    size = max(abs(a), abs(b))
    if not size.is_comparable:
        return False
    digits = a._prec if hasattr(a, "_prec") else 100
    return bool(abs(a - b) <= size * 10 ** -(digits // 5)) if size else True


# Kinds of formulas that fill the tables of the algebra.
_WARM_UP = (
    ("(x+1)^2", "x^2+2x+1"),
    (r"\sqrt{12}", r"2\sqrt{3}"),
    (r"\begin{pmatrix}1&2\\3&x\end{pmatrix}", r"\begin{pmatrix}1&2\\3&2x\end{pmatrix}"),
    (r"\sin(x)+\log_{2}(3)\cdot e^{i\pi x}", r"\cos{x}\times\ln3"),
    (r"x^{2}+y^{2}=1", "y=x"),
    (r"|x-1|+n!", r"\binom{n}{2}x"),
    (r"\sum_{k=1}^{n} k", "n"),
)
