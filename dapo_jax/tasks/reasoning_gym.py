"""Any generator of the package reasoning-gym by its name, graded by its own scorer.

An optional extra: pip install reasoning-gym. Scorers read answers by parsers that may take forever,
so they run in processes with limits (`symbolic.Workers`).
"""

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from dapo_jax.tasks import interpreter, symbolic
from dapo_jax.tasks.arithmetic import TEST_SHARE, is_of
from dapo_jax.tasks.format_answer import tagged_answer
from dapo_jax.tasks.readers import DataError, DataReport, Rows, templated
from dapo_jax.types import Example, Verdict

TEMPLATE = (
    "{problem}\n\nThink step by step. End your response with the answer alone, between <answer> "
    "and </answer>."
)
MAX_ANSWER_CHARS = 20_000  # grids are answers too
SCORES, GENERATES = range(2)  # what a process of this module does


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """Problems of one generator; train and test share no question.

    name: of the generator. config: arguments of it, as {"max_terms": 4}. The reward is the scorer's
    0 to 1 as -1 to 1, and a response is correct with 1.
    """

    name: str
    count: int = 10_000
    seed: int = 0
    split: str = "train"
    config: Mapping = dataclasses.field(default_factory=dict)

    def load(self) -> tuple[list[Example], DataReport]:
        """Generates the problems; DataError without the package, or for wrong arguments."""
        entries = _in_another_process(
            self.name, self.count, self.seed, self.split, dict(self.config)
        )
        rows = Rows(f"{self.name} (reasoning-gym, {self.split})", "row", "error")
        for row, entry in enumerate(entries):
            with rows.reading(row):
                answer = entry["answer"]  # some have none: their scorers know what is right
                text = "" if answer is None else str(answer)
                rows.add(row, templated(entry["question"], TEMPLATE), text, entry)
        return rows.result()

    def grade(self, response: str, example: Example) -> Verdict:
        """Grades one response."""
        return self.grade_many([response], example)[0]

    def grade_many(self, responses: Sequence[str], example: Example) -> list[Verdict]:
        """Grades what stands in answer tags at each response's end, by the generator's scorer."""
        truth = pickle.dumps((self.name, dict(self.config), example.extra))
        answers = [tagged_answer(response, MAX_ANSWER_CHARS) for response in responses]
        verdicts = _scorers().grade((answer, truth) for answer in answers if answer)
        return [verdicts[answer, truth] if answer else _without(answer) for answer in answers]


def _in_another_process(*request) -> list[dict]:
    """Generates in an interpreter that orders sets the same each time: some problems depend on it.

    A resumed run would have others, and be refused.
    """
    require_package()
    connection, far_end = multiprocessing.Pipe()
    with subprocess.Popen(
        interpreter.command(__name__, far_end.fileno(), GENERATES),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[far_end.fileno()],
        env={**os.environ, "PYTHONHASHSEED": "0"},
    ) as process:
        far_end.close()
        try:
            connection.send(request)
            entries = connection.recv()
        except (EOFError, OSError) as error:
            message = f"ended with status {process.wait()}, and what it said is on the error output"
            raise DataError(f"reasoning-gym's {request[0]} {message}") from error
        finally:
            connection.close()
    if isinstance(entries, str):
        raise DataError(entries)
    return entries


def generate(name: str, count: int, seed: int, split: str, config: dict) -> list[dict]:
    """Returns entries with different questions, those of a split; DataError where there are few."""
    own = np.random.SeedSequence(seed).generate_state(1)  # seeds beside each other overlap
    tries = (2 if split == "train" else 2 * TEST_SHARE) * count + 1_000
    dataset = make_dataset(name, size=tries, seed=int(own[0]), **config)
    entries: dict[str, dict] = {}
    for place in range(tries):
        if len(entries) == count:
            return list(entries.values())
        entry = dataset[place]
        if is_of(split, entry["question"]):
            entries.setdefault(entry["question"], entry)
    raise DataError(
        f"count is {count}, but reasoning-gym's {name} gave only {len(entries)} questions of the "
        f"split {split} in {tries:,}: ask for fewer, or change args.config"
    )


def require_package() -> None:
    """Raises DataError, with how to install it, where reasoning-gym is not there."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise DataError(
            "the task reasoning_gym needs the package reasoning-gym, which is not installed: "
            f"{sys.executable} -m pip install reasoning-gym"
        )


def make_dataset(name: str, **config):
    """Makes a generator of reasoning-gym; DataError where it cannot be."""
    factory = importlib.import_module("reasoning_gym.factory")
    importlib.import_module("reasoning_gym")  # registers them
    if name not in factory.DATASETS:
        near = difflib.get_close_matches(name, factory.DATASETS, n=3, cutoff=0.0)
        raise DataError(
            f"args.name is {name!r}: reasoning-gym has no such generator; near are "
            f"{', '.join(near)}, and there are {len(factory.DATASETS)}"
        )
    try:
        return factory.create_dataset(name, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"args.config of {name} is {config}: {error}") from error


def _without(answer: str | None) -> Verdict:
    return Verdict(False, None, "no_answer" if answer is None else "empty_answer", -1.0)


@functools.cache
def _scorers() -> symbolic.Workers:
    """Starts the pool that this process shares, at the first call."""
    seconds = symbolic.ANSWER_CPU_SECONDS
    return symbolic.Workers(symbolic.one_a_core(), seconds, module=__name__, name="reasoning_gym")


def serve(pipe: int, what: int = SCORES) -> None:
    """Scores, inside a worker, what comes through the pipe, or generates what it asks for, once."""
    if what == SCORES:
        symbolic.serve_by(score, pipe, prepared=_prepared)
        return
    with multiprocessing.connection.Connection(pipe) as connection:
        try:
            connection.send(generate(*connection.recv()))
        except DataError as error:
            connection.send(str(error))


def _prepared(truth: bytes) -> tuple:
    name, config, entry = pickle.loads(truth)
    return _generator(name, json.dumps(config)), entry


@functools.cache
def _generator(name: str, config: str):
    return make_dataset(name, size=1, seed=0, **json.loads(config))


def score(answer: str, truth: tuple) -> Verdict:
    """Scores an answer; one on which the scorer fails is wrong, as one that it cannot read."""
    generator, entry = truth
    try:
        value = float(generator.score_answer(answer, entry))
    except Exception:  # it may be any
        return Verdict(False, answer, "unreadable_answer", -1.0)
    value = min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0
    return Verdict(value == 1.0, answer, "correct" if value == 1.0 else "wrong", 2 * value - 1)
