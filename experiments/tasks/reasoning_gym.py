"""Any generator of the package reasoning-gym by its name, graded by its own scorer.

An optional extra: pip install reasoning-gym. Scorers read answers by parsers that may take forever,
so they run in processes with limits (`dapo_jax.verifier.isolated`).
"""

import dataclasses
import functools
import importlib
import json
import math
import pickle
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dapo_jax.tasks.arithmetic import TEST_SHARE, Generated, is_of
from dapo_jax.tasks.rows import DataError
from dapo_jax.tasks.templates import templated
from dapo_jax.types import Example, Verdict
from dapo_jax.verifier import isolated
from dapo_jax.verifier.symbolic_rules import verdict_of
from experiments.tasks.format_answer import tagged_answer

TEMPLATE = (
    "{problem}\n\nThink step by step. End your response with the answer alone, between <answer> "
    "and </answer>."
)
MAX_ANSWER_CHARS = 20_000  # grids are answers too
GENERATOR_SECONDS = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGym(Generated):
    """Problems of one generator; train and test share no question.

    name: of the generator. config: arguments of it, as {"max_terms": 4}. The reward is the scorer's
    0 to 1 as -1 to 1, and a response is correct with 1.
    """

    name: str
    config: Mapping = dataclasses.field(default_factory=dict)

    def load(self) -> list[Example]:
        """Generates the problems; DataError without the package, or for wrong arguments."""
        entries = _generated(self.name, self.count, self.seed, self.split, dict(self.config))
        # Some have no answer: their scorers know what is right.
        answers = ["" if entry["answer"] is None else str(entry["answer"]) for entry in entries]
        return [
            Example(templated(entry["question"], TEMPLATE), answer, self.name, row, entry)
            for row, (entry, answer) in enumerate(zip(entries, answers, strict=True))
        ]

    def grade(self, response: str, example: Example) -> Verdict:
        """Grades one response."""
        return self.grade_many([response], example)[0]

    def grade_many(self, responses: Sequence[str], example: Example) -> list[Verdict]:
        """Grades what stands in answer tags at each response's end, by the generator's scorer."""
        answers = [tagged_answer(response, MAX_ANSWER_CHARS) for response in responses]
        generator = self.name, json.dumps(dict(self.config))
        asked = {it: pickle.dumps((generator, example.extra, it)) for it in answers if it}
        graded = {it: verdict_of(reply, it) for it, reply in _scorers().ask(asked).items()}
        return [graded[it] if it else _without(it) for it in answers]


def _generated(*request) -> list[dict]:
    """Generates in a worker, which orders sets the same each time: some problems depend on it.

    A resumed run would have others, and be refused.
    """
    with isolated.Pool(f"{__name__}:generator", 1, cpu_seconds=GENERATOR_SECONDS) as pool:
        (reply,) = pool.ask({request[0]: pickle.dumps(request)}).values()
    entries = pickle.loads(reply.answer) if reply.status == "done" else reply.status
    if isinstance(entries, str):
        raise DataError(f"reasoning-gym's {request[0]}: {entries}")
    return entries


def generator() -> Callable[[bytes], Callable[[], bytes]]:
    """Returns a function that generates the entries of a request, or the message of an error."""

    def entries(request: bytes) -> bytes:
        try:
            return pickle.dumps(generate(*pickle.loads(request)))
        except Exception as error:  # wrong arguments, or no such package
            return pickle.dumps(f"{type(error).__name__}: {error}")

    return lambda request: lambda: entries(request)


def generate(name: str, count: int, seed: int, split: str, config: dict) -> list[dict]:
    """Returns entries with different questions, those of a split; ValueError for too few."""
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
    raise ValueError(
        f"only {len(entries)} questions of the split {split} in {tries:,}, for count = {count}: "
        "ask for fewer, or change args.config"
    )


def make_dataset(name: str, **config):
    """Makes a generator of reasoning-gym, imported here since it is an optional package."""
    return importlib.import_module("reasoning_gym").create_dataset(name, **config)


def _without(answer: str | None) -> Verdict:
    return Verdict(False, None, "no_answer" if answer is None else "empty_answer", -1.0)


@functools.cache
def _scorers() -> isolated.Pool:
    """Starts the pool that this process shares, at the first call."""
    return isolated.Pool(f"{__name__}:scorer", isolated.one_a_core())


def scorer() -> Callable[[bytes], Callable[[], bytes]]:
    """Returns a function that makes a request's generator in the worker, to score in a child."""
    made = functools.cache(
        lambda name, config: make_dataset(name, size=1, seed=0, **json.loads(config))
    )

    def prepare(request: bytes) -> Callable[[], bytes]:
        generator, entry, answer = pickle.loads(request)
        dataset = made(*generator)
        return lambda: json.dumps(score(answer, dataset, entry)).encode()

    return prepare


def score(answer: str, dataset, entry: dict) -> Verdict:
    """Scores an answer; one on which the scorer fails is wrong, as one that it cannot read."""
    try:
        value = float(dataset.score_answer(answer, entry))
    except Exception:  # it may be any
        return Verdict(False, answer, "unreadable_answer", -1.0)
    value = min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0
    return Verdict(value == 1.0, answer, "correct" if value == 1.0 else "wrong", 2 * value - 1)
