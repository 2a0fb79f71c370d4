"""A task of one's own, to copy: reach a target with given numbers, each used once.

    PYTHONPATH=tests/ext_tasks python -m dapo_jax.train --config=configs/tiny.py --workdir=DIR \
        --config.data.train.task=countdown:Countdown --config.data.train.count=5000
"""

import random
import re

from dapo_jax.types import Example, Verdict

ANSWER = re.compile(r"Answer: (-?[0-9]([-+*][0-9])*)$")


class Countdown:
    """Makes `count` problems of `numbers` numbers each; these are the keys it is made of."""

    def __init__(self, count: int, seed: int, numbers: int = 3):
        self.count, self.seed, self.numbers = count, seed, numbers

    def load(self):
        """Yields the examples, the same ones each time."""
        rng = random.Random(self.seed)
        for row in range(self.count):
            numbers = [rng.randint(1, 9) for _ in range(self.numbers)]
            target = sum(number * rng.choice((-1, 1)) for number in numbers)
            text = f"Use {numbers} to make {target}, each number once."
            prompt = ({"role": "user", "content": text},)
            yield Example(prompt, str(target), "countdown", row, extra={"numbers": numbers})

    def grade(self, response, example):
        """Scores 1 for a right answer, 0.1 for a wrong one in the right form, -1 for none."""
        found = ANSWER.search(response)
        if not found:
            return Verdict(False, None, "no_answer", score=-1.0)
        used = sorted(map(int, re.findall("[0-9]", found[1])))
        if used == sorted(example.extra["numbers"]) and str(eval(found[1])) == example.answer:
            return Verdict(True, found[1], "correct", score=1.0)
        return Verdict(False, found[1], "wrong", score=0.1)
