"""A small world with known probabilities: problems of four kinds, a student's solutions, grades.

* easy: 1 or 2 operations; the student solves it.
* road: a story of 3 or 4 operations. The solution begins with a plan of three words, each a fork;
  the rare word at the first two is the right road, on which alone a right answer counts.
* long: 8 to 12 operations; the student solves it soundly in 100 to 300 tokens, a part of them
  checks that are not needed.
* closed: an unknown operation, an answer of four digits; the student guesses.

Each line of a solution has four more forks of four equal words, which mean nothing. Some solutions
of road and long problems go over one line again and again, and come back.
"""

import dataclasses
import hashlib
import re
from collections.abc import Sequence

import numpy as np

from dapo_jax.tasks import arithmetic
from dapo_jax.tasks.arithmetic import Generated, Problem, examples_of
from dapo_jax.tasks.math_problems import MathTask
from dapo_jax.tasks.rows import DataError
from dapo_jax.types import Example, Verdict

KINDS = ("easy", "road", "long", "closed")
STEPS = {"easy": (1, 2), "road": (3, 4)}
UNKNOWN = " box "  # the operation of closed problems

# A plan, " How: get a bus": the words of each fork, the last one rare, and how often each is taken.
PLAN = ((" get", " do", " check"), (" a", " many", " the"), (" bus", " people", " box"))
PLAN_RATES = (0.5, 0.35, 0.15)
# The words of a line, "Tom has on 12+30=42 coins", all equally often.
WORDING = (
    ("Tom", "Mia", " He", " She"),
    (" has", " have", " does", " get"),
    (" on", " me", " is", " are"),
    (" coins", " apples", " dollars", " people"),
)
CHECKS = 0.3  # probability of a check after each step of a long solution
LOOPS = 0.15  # share of road and long solutions that go over a line again and again,
LOOP_AGAIN = 1 - 1 / 15  # so 15 times on average
LOOP_LINE_TOKENS = 12  # "What? 12+30=42"
GUESS_AGAIN = 1 - 1 / 3  # a closed problem is guessed at 3 times on average

_PLAN_LINE = re.compile(r"\s*How:( \w+)( \w+)( \w+)\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forks(Generated, MathTask):
    """Problems of the mixture `easy`, `road`, `long`, `closed` (weights, which are normalised).

    long_steps: numbers of operations of a long problem. wrong_keys: the share of long problems with
    a key that no solution ends in; their questions look like the others. A right answer to a road
    problem counts where the first two words of the plan are the rare ones, and else with
    probability `luck`, by a coin that depends on question and response alone. The grader, and not
    wrong steps of the student, keeps the other roads poor: wrong steps are soon unlearned.
    """

    easy: float = 0.0
    road: float = 0.0
    long: float = 0.0
    closed: float = 0.0
    long_steps: Sequence[int] = (8, 10, 12)
    wrong_keys: float = 0.0
    luck: float = 0.0

    def problems(self) -> list[Problem]:
        """Generates the problems; raises DataError for weights or a count that cannot be."""
        weights = {kind: getattr(self, kind) for kind in KINDS}
        if min(weights.values()) < 0 or sum(weights.values()) <= 0:
            raise DataError(f"args has the weights {weights}: none below 0, and one above it")
        share_K = np.array(list(weights.values())) / sum(weights.values())
        steps = STEPS | {"long": tuple(self.long_steps)}

        def sample(rng: np.random.Generator) -> Problem:
            kind = str(rng.choice(KINDS, p=share_K))
            if kind == "closed":
                return _closed(rng)
            problem = _chain(kind, steps[kind], rng)
            if kind == "long" and coin(problem.question, "key") < self.wrong_keys:
                return problem._replace(answer=_four_digits(problem.question))
            return problem

        return self.distinct(sample, f"the mixture {weights}")

    def load(self) -> list[Example]:
        """Generates the examples; `extra` has the problem's kind and its number of steps."""
        return examples_of(self.problems(), f"forks ({self.split})", "dapo")

    def grade(self, response: str, example: Example) -> Verdict:
        """Grades the answer by the rules and, of a road problem, the road.

        Measures: `loop_lines`, and of a road problem `right_road`, 0 or 1.
        """
        verdict = super().grade(response, example)
        looping = [line for line in response.split("\n") if line.startswith("What?")]
        measures = {"loop_lines": len(looping)}
        if example.extra["kind"] == "road":
            is_safe = on_right_road(response)
            measures["right_road"] = int(is_safe)
            if verdict.correct and not is_safe and coin(example.text, response) >= self.luck:
                verdict = verdict._replace(correct=False, status="unlucky")
        return verdict._replace(measures=measures)

    def grade_many(self, responses: Sequence[str], example: Example) -> list[Verdict]:
        """Grades each response for itself."""
        return [self.grade(response, example) for response in responses]


def coin(*texts: str) -> float:
    """A number from [0, 1) that looks random and depends on the texts alone."""
    digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def on_right_road(response: str) -> bool:
    """Says whether it begins with a plan whose first two words are the rare ones."""
    plan = _PLAN_LINE.match(response)
    return plan is not None and plan.groups()[:2] == (PLAN[0][-1], PLAN[1][-1])


def solution(problem: Problem, rng: np.random.Generator) -> str:
    """Writes the student's solution, a step a line; it ends in "Answer: n"."""
    kind = problem.extra["kind"]
    if kind == "closed":
        return _guesses(problem, rng)
    lines = [_plan(rng)] if kind == "road" else []
    can_loop = kind != "easy" and rng.random() < LOOPS
    loop_step = int(rng.integers(len(problem.steps))) if can_loop else None
    value = problem.start
    for step, (operation, operand) in enumerate(problem.steps):
        result = arithmetic.apply(value, operation, operand)
        formula = f"{value}{operation}{operand}={result}"
        lines.append(_line(formula, rng))
        if kind == "long" and rng.random() < CHECKS:
            lines.append(f"Let me check: {formula}")
        if step == loop_step:
            lines += [f"What? {formula}"] * int(rng.geometric(1 - LOOP_AGAIN))
        value = result
    return "\n".join([*lines, f"Answer: {value}"])


def _guesses(problem: Problem, rng: np.random.Generator) -> str:
    guesses = rng.integers(1_000, 10_000, size=int(rng.geometric(1 - GUESS_AGAIN)))
    formula = problem.question.removeprefix("What is ").removesuffix("?")
    lines = [_line(f"{formula}={guess}", rng) for guess in guesses]
    return "\n".join([*lines, f"Answer: {guesses[-1]}"])


def _line(formula: str, rng: np.random.Generator) -> str:
    subject, verb, filler, noun = (words[int(rng.integers(len(words)))] for words in WORDING)
    return f"{subject}{verb}{filler} {formula}{noun}"


def _plan(rng: np.random.Generator) -> str:
    return " How:" + "".join(str(rng.choice(words, p=PLAN_RATES)) for words in PLAN)


def _chain(kind: str, levels: Sequence[int], rng: np.random.Generator) -> Problem:
    value = start = int(rng.integers(2, 100))
    steps = {}  # operand -> operation: no operand twice, so that a line tells its place
    for _ in range(int(rng.choice(levels))):
        operation, operand = _sample_step(value, steps, rng)
        steps[operand] = operation
        value = arithmetic.apply(value, operation, operand)
    steps = [(operation, operand) for operand, operation in steps.items()]
    ask = arithmetic.story if kind == "road" else arithmetic.expression
    return _problem(kind, ask(start, steps, rng), str(value), start, steps)


def _sample_step(value: int, taken, rng: np.random.Generator) -> tuple[str, int]:
    while True:
        operation, operand = "+-"[int(rng.integers(2))], int(rng.integers(2, 100))
        result = arithmetic.apply(value, operation, operand)
        if operand not in taken and 0 <= result <= arithmetic.MAX_VALUE:
            return operation, operand


def _closed(rng: np.random.Generator) -> Problem:
    start, *operands = (int(value) for value in rng.integers(2, 100, size=3))
    question = f"What is {UNKNOWN.join(map(str, (start, *operands)))}?"
    steps = [(UNKNOWN, operand) for operand in operands]
    return _problem("closed", question, _four_digits(question), start, steps)


def _problem(kind: str, question: str, answer: str, start: int, steps) -> Problem:
    extra = {"kind": kind, "steps": len(steps)}
    return Problem(question, answer, extra, start, tuple(steps))


def _four_digits(question: str) -> str:
    """An answer that depends on the question alone, and that no solution reaches but by a guess."""
    return str(1_000 + int(9_000 * coin(question)))
