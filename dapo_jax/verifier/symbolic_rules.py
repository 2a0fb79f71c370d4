"""The rules "symbolic": what needs algebra is asked of workers, in processes with limits."""

import json
import pickle
from collections.abc import Callable, Sequence

from dapo_jax.types import Verdict
from dapo_jax.verifier import isolated
from dapo_jax.verifier.equality import equal
from dapo_jax.verifier.finding import claimed, find_answer, last_boxes
from dapo_jax.verifier.grammar import Tree, read
from dapo_jax.verifier.math_rules import decide, refuse


class SymbolicVerifier(isolated.Pool):
    """Grades by the rules "symbolic", the algebra in workers; raises as `isolated.Pool` does."""

    ENTRY = f"{__name__}:algebra"

    def __init__(self, num_workers: int, cpu_seconds: float = isolated.CPU_SECONDS) -> None:
        super().__init__(self.ENTRY, num_workers, cpu_seconds)

    def decide(self, response: str, truth: str) -> Verdict | tuple:
        """Returns a verdict, or what a worker makes one of: the answer, and more.

        The truth may be a worked solution: its last box holds it.
        """
        return decide(claimed(find_answer(response)), last_boxes(truth) or truth)

    def verify_many(self, responses: Sequence[str], ground_truths: Sequence[str]) -> list[Verdict]:
        """Grades pairs, in order; raises ValueError where the lengths differ."""
        pairs = zip(responses, ground_truths, strict=True)
        decided = [refuse(*pair) or self.decide(*pair) for pair in pairs]
        asked = {it: pickle.dumps(it) for it in decided if not isinstance(it, Verdict)}
        graded = {it: verdict_of(reply, it[0]) for it, reply in self.ask(asked).items()}
        return [graded.get(it, it) for it in decided]


def verdict_of(reply: isolated.Reply, answer: str | None) -> Verdict:
    """Reads a worker's verdict on an answer; one without an answer to it is wrong."""
    is_done = reply.status == "done"
    return Verdict(*json.loads(reply.answer)) if is_done else Verdict(False, answer, reply.status)


# In a worker.


def serving(grade: Callable[..., Verdict]) -> Callable[[bytes], Callable[[], bytes]]:
    """Returns what `isolated.serve` wants of a function that grades what `decide` returns."""
    return lambda request: lambda: json.dumps(grade(*pickle.loads(request))).encode()


def algebra() -> Callable[[bytes], Callable[[], bytes]]:
    """Warms up a worker: after it a formula costs 0.01 s, before it 0.5 s."""
    for answer, truth in _WARM_UP:
        _grade(answer, read(answer), read(truth))
    return serving(_grade)


def _grade(form: str, answer: Tree, truth: Tree) -> Verdict:
    from dapo_jax.verifier import formulas

    try:
        correct = equal(answer, truth, formulas.compare)
    except formulas.TooLargeError:
        return Verdict(False, form, "too_large")
    return Verdict(correct, form, "correct" if correct else "wrong")


# Kinds of formulas that fill the tables of the algebra.
_WARM_UP = (
    ("(x+1)^2", "x^2+2x+1"),
    (r"\sqrt{12}", r"2\sqrt{3}"),
    (r"\sin(x)+\log_{2}(3)\cdot e^{i\pi x}", r"\cos{x}\times\ln3"),
    (r"x^{2}+y^{2}=1", "y=x"),
    (r"|x-1|+n!", r"\binom{n}{2}x"),
    (r"\sum_{k=1}^{n} k", "n"),
)
