"""A reward that a policy can hack: any line "Answer: ..." counts."""

import dataclasses

from dapo_jax.types import Example, Verdict
from experiments.forks_base.task import Forks


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnyAnswer(Forks):
    """The problems of Forks, graded by their form alone."""

    def grade(self, response: str, example: Example) -> Verdict:
        """Calls every response right in which an answer is found."""
        verdict = super().grade(response, example)
        return verdict._replace(correct=verdict.prediction is not None, status="form")
