"""One sentence with three given words: a task with many right answers, so that diversity can stay.

SmolLM2-135M is right in one of ten samples before training.
"""

import dataclasses
import re

import numpy as np

from dapo_jax.tasks.arithmetic import Generated, Problem, examples_of
from dapo_jax.types import Example, Verdict

TEXT = (
    "apple bell bird boat book bread bridge button candle car cat chair clock cloud coat coin "
    "cook dance doctor dog door dream farm field fire fish flower forest friend garden gate gift "
    "grass green hat hill horse house island king lake lamp leaf letter map milk mirror moon "
    "mountain music night ocean old paint paper piano queen quiet rain red ring river road rock "
    "school sea shadow ship shop silver sing sister sky sleep small snow song spoon star stone "
    "storm street sun table tea tower train tree village walk wall water wind window winter wolf "
    "write yellow"
)
WORDS = tuple(TEXT.split())
SENTENCE = re.compile(r"[^.!?\n]+[.!?]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenWords(Generated):
    """Requests for one sentence with three words of WORDS; train and test share none."""

    count: int = 600

    def load(self) -> list[Example]:
        """Draws the requests; raises what `distinct` raises."""
        source = "three of the given words"
        return examples_of(self.distinct(_sample, source), source)

    def grade(self, response: str, example: Example) -> Verdict:
        """Grades a response: right where it is one sentence that has all the words as they are."""
        text = response.strip()
        found = set(re.findall(r"[a-z]+", text.lower()))
        if not SENTENCE.fullmatch(text):
            return Verdict(False, None, "no_sentence")
        right = found.issuperset(example.answer.split())
        return Verdict(right, text, "correct" if right else "wrong")


def _sample(rng: np.random.Generator) -> Problem:
    words = [str(word) for word in rng.choice(WORDS, size=3, replace=False)]
    first, second, third = words
    question = f"Write one short sentence with the words {first}, {second} and {third}."
    return Problem(question, " ".join(words))
