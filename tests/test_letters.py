"""The letters that end an array's name are its axes: checked in all our functions, over a step."""

import collections
import re
import sys

import pytest
from processes import ROOT
from small_config import small

from dapo_jax import train

NAME = re.compile(r"\w+_([A-Z0-9]+)")
OURS = tuple(f"{ROOT / package}/" for package in ("dapo_jax", "models", "sharding"))
SPLIT = "D"  # a matrix's width, over the data axis
# Prompts and responses of a group are not as many as anything else.
SIZES = {"updates_per_step": 1, "rollout.num_prompts": 5, "rollout.group_size": 7}
# Its functions are of one token as well as of [R, T].
ELEMENTWISE = str(ROOT / "dapo_jax" / "algorithm.py")


class Letters:
    """A profiler that looks at a function's arrays where it returns.

    One whose name ends in capitals and digits has as many axes; it may have more. Where it has no
    more, axes of one letter have one size in a function, or 1; that of SPLIT may be a part.
    """

    def __init__(self):
        self.names, self.faults = collections.Counter(), set()

    def __call__(self, frame, event, _):
        code = frame.f_code
        if event != "return" or not code.co_filename.startswith(OURS):
            return
        sizes = {}
        for name, value in frame.f_locals.items():
            match, shape = NAME.fullmatch(name), getattr(value, "shape", None)
            if match is None or shape is None or code.co_filename == ELEMENTWISE:
                continue
            letters = match[1]
            self.names[name] += 1
            fits = len(letters) <= len(shape)
            if len(letters) == len(shape):
                for letter, size in zip(letters, shape, strict=True):
                    known = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
                    is_part = letter == SPLIT and max(size, known) % min(size, known) == 0
                    fits &= size == known or 1 in (size, known) or is_part
            if not fits:
                self.faults.add((code.co_name, name, tuple(shape), str(sizes)))


@pytest.mark.slow
def test_names_have_the_axes_of_their_arrays(tmp_path):
    letters = Letters()
    sys.setprofile(letters)
    try:
        train.train(small(num_steps=1, **SIZES), tmp_path)
    finally:
        sys.setprofile(None)
    assert not letters.faults, "\n".join(map(str, sorted(letters.faults)))
    assert len(letters.names) > 300
