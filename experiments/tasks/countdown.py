"""Countdown: reach a target from given numbers, each used once. A task of search, graded.

Many expressions are right, and the reward tells three kinds apart: right; the given numbers with
another value; anything else.
"""

import ast
import dataclasses
import operator
import re
from fractions import Fraction

import numpy as np

from dapo_jax.tasks.arithmetic import Generated, Problem, examples_of
from dapo_jax.types import Example, Verdict
from dapo_jax.verifier.finding import last_answer

MAX_TARGET = 999
MAX_CHARS = 200  # of an expression: Python's parser is safe with so many
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_READABLE = re.compile(rf"[0-9+\-*/() ]{{1,{MAX_CHARS}}}")
_SPELLINGS = (
    *((sign, "*") for sign in ("\u00d7", r"\times", r"\cdot", "\u00b7")),
    *((sign, "/") for sign in ("\u00f7", r"\div")),
    *((sign, "-") for sign in ("\u2212", "\u2013")),
    *((sign, "") for sign in (r"\left", r"\right", r"\(", r"\)", r"\[", r"\]", "$", "`")),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Countdown(Generated):
    """Generated puzzles that have a solution; train and test share none.

    numbers: how many a puzzle has. largest: of them. tried: the reward of an expression of the
    given numbers, each once, that has another value; a right one's is 1, anything else's -1.
    template: as `templates.template_text` reads it, which has to ask for a last line "Answer: ...".
    """

    template: str = ""
    numbers: int = 4
    largest: int = 20
    tried: float = -0.8

    def load(self) -> list[Example]:
        """Generates the puzzles; raises DataError where so many are not found."""
        source = f"countdown of {self.numbers} numbers to {self.largest}"
        puzzles = self.distinct(lambda rng: _sample(rng, self.numbers, self.largest), source)
        return examples_of(puzzles, source, self.template or "dapo")

    def grade(self, response: str, example: Example) -> Verdict:
        """Grades the expression on the last line "Answer: ..."; "= target" may follow it."""
        answer = last_answer(response)
        if answer is None or not answer.strip():
            status = "no_answer" if answer is None else "empty_answer"
            return Verdict(False, None, status, score=-1.0)
        expression, *equals = plain(answer).split("=")
        prediction = expression.replace(" ", "")
        read = evaluate(expression)
        if read is None or any(side.strip() != example.answer for side in equals):
            return Verdict(False, prediction, "unreadable_answer", score=-1.0)
        value, used = read
        if sorted(used) != sorted(example.extra["numbers"]):
            return Verdict(False, prediction, "other_numbers", score=-1.0)
        if value != Fraction(example.answer):
            return Verdict(False, prediction, "wrong", score=self.tried)
        return Verdict(True, prediction, "correct", score=1.0)


def plain(answer: str) -> str:
    """Spells an expression with + - * / and brackets, without what is put around formulas."""
    for sign, spelling in _SPELLINGS:
        answer = answer.replace(sign, spelling)
    return answer.strip(" *.")


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """Returns the exact value of sums, products and quotients, and the numbers in it.

    None for anything else, a sign before a number and a division by 0 included.
    """
    if not _READABLE.fullmatch(expression):
        return None
    used: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if not isinstance(node, ast.Constant):
            raise ValueError("no number, sum, product or quotient")
        used.append(node.value)
        return Fraction(node.value)

    try:
        return value(ast.parse(expression.strip(), mode="eval").body), used
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _sample(rng: np.random.Generator, count: int, largest: int) -> Problem:
    """Joins random numbers by random operations, so that their result can be reached."""
    while True:
        numbers = [int(number) for number in rng.integers(1, largest + 1, size=count)]
        values = list(numbers)
        while len(values) > 1:
            a, b = (values.pop(int(rng.integers(len(values)))) for _ in range(2))
            a, b = max(a, b), min(a, b)
            results = [a + b, a - b, a * b] + ([a // b] if b and a % b == 0 else [])
            values.append(results[int(rng.integers(len(results)))])
        if 1 <= (target := values[0]) <= MAX_TARGET:
            numbers = tuple(sorted(numbers))
            question = (
                f"Use {', '.join(map(str, numbers))}, each once, with + - * / and brackets to make "
                f"{target}. The answer is the expression, such as (1+2)*3."
            )
            return Problem(question, str(target), {"numbers": numbers})
