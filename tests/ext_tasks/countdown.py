"""A task of one's own, from outside the packages: reach a target with some numbers.

    PYTHONPATH=tests/ext_tasks python -m dapo_jax.train --config=configs/tiny.py --workdir=DIR \
        --config.data.train.task=countdown:Countdown
"""

import ast
import random
import re

from dapo_jax.types import Example, Verdict

FORM = re.compile(r"Answer: ([\d+*() -]+)$")


class Countdown:
    """`count` problems with `numbers` numbers each; a well-formed wrong answer earns 0.1."""

    def __init__(self, count: int, seed: int, numbers: int = 3):
        self.count, self.seed, self.numbers = count, seed, numbers

    def load(self):
        rng = random.Random(self.seed)
        for row in range(self.count):
            numbers = [rng.randint(1, 9) for _ in range(self.numbers)]
            target = sum(n * rng.choice((-1, 1)) for n in numbers)
            text = f"Use {numbers} to make {target}, each number once."
            prompt = ({"role": "user", "content": text},)
            yield Example(prompt, str(target), "countdown", row, extra={"numbers": numbers})

    def grade(self, response, example):
        found = FORM.search(response)
        if not found:
            return Verdict(False, None, "no_answer", score=-1.0)
        used = sorted(map(int, re.findall(r"\d+", found[1])))
        try:
            value = eval(compile(ast.parse(found[1].strip(), mode="eval"), "", "eval"), {})
        except (SyntaxError, TypeError):
            return Verdict(False, found[1], "unreadable", score=-1.0)
        correct = str(value) == example.answer and used == sorted(example.extra["numbers"])
        return Verdict(
            correct, found[1], "correct" if correct else "wrong", 1.0 if correct else 0.1
        )
