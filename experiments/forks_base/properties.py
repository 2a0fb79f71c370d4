"""Verifies what the base policy does before any training, by sampling through the rollout engine.

    python -m experiments.forks_base.properties

Samples groups of each kind of problem at temperature 1 with a limit of 512 tokens, and prints a
table: each property of the student's own solutions, which the policy imitates, and of the policy's.
Entropies are estimates, the mean of -log p over sampled tokens. The recipe is configs/forks.py.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import app, flags

from configs import forks
from dapo_jax.run import build
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.tasks.base import grade_many
from dapo_jax.tasks.tokenizer import Tokenizer
from dapo_jax.types import Group, Prompt, Response
from experiments.forks_base.task import (
    KINDS,
    LOOP_LINE_TOKENS,
    PLAN,
    WORDING,
    Forks,
    loop_lines,
    on_right_road,
    solution,
)

MAX_TOKENS = 512  # of a response here, so that loops are seen to their end
PROMPTS = {"easy": 64, "road": 400, "long": 96, "closed": 32}
ON_ROAD_PROMPTS = 48
GROUP_SIZE = 8
SEED = 5
RIGHT_PLAN = " How:" + "".join(words[-1] for words in PLAN) + "\n"
FORKS = {
    **{f"plan {place + 1}": words for place, words in enumerate(PLAN)},
    **dict(zip(("subject", "verb", "filler", "noun"), WORDING, strict=True)),
}

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "model", str(pathlib.Path(__file__).parent / "checkpoint"), "Directory of the policy."
)


@dataclasses.dataclass(frozen=True)
class Samples:
    """Groups of responses to problems of one kind, graded; arrays [N] are of all responses."""

    groups: Sequence[Group]

    @property
    def responses(self) -> list[Response]:
        """All responses."""
        return [response for group in self.groups for response in group.responses]

    @property
    def length_N(self) -> np.ndarray:
        """Tokens of each response."""
        return np.concatenate([group.length_G for group in self.groups])

    @property
    def correct_N(self) -> np.ndarray:
        """True for each that counts as right, given MAX_TOKENS."""
        return np.concatenate([group.correct_G for group in self.groups])

    @property
    def solved_N(self) -> np.ndarray:
        """True if the answer is right, whatever the luck on a poor road."""
        verdicts = [response.verdict for response in self.responses]
        return np.array([v.correct or v.status == "unlucky" for v in verdicts])

    @property
    def loops_N(self) -> np.ndarray:
        """Lines of each response that go over a step again and again."""
        return np.array([len(loop_lines(response.text)) for response in self.responses])

    def informative(self, limit: int) -> float:
        """The share of groups with right and wrong responses under a length limit."""
        right_PG = np.stack([g.correct_G & (g.length_G <= limit) for g in self.groups])
        return float(np.mean(right_PG.any(axis=1) & ~right_PG.all(axis=1)))

    def nats_and_tokens(self, limit: int) -> tuple[float, float]:
        """Means over responses, each cut at the limit: the sum of -log p, and the tokens."""
        logp_N = [response.behavior_logp_T[:limit] for response in self.responses]
        return -np.mean([logp_T.sum() for logp_T in logp_N]), np.mean([len(x) for x in logp_N])


class Policy:
    """The recipe's policy and engine, with room for responses of MAX_TOKENS tokens."""

    def __init__(self, model: str):
        config = forks.get_config()
        config.model.path = model
        config.rollout.max_response_tokens = MAX_TOKENS
        config.learner.row_tokens = config.rollout.max_prompt_tokens + MAX_TOKENS
        self.tokenizer = build.tokenizer(config)
        self._programs = build.programs(config, self.tokenizer.vocab_size)
        self._params = self._programs.reshard(self._programs.start_params(), None)
        self._sampling = build.sampling(config, self.tokenizer)
        self._key = build.key(config, build.EVAL_STREAM)

    def sample(self, task: Forks, begin: str) -> Samples:
        """Samples a group for each problem of the task; each response begins with `begin`."""
        key = jax.random.fold_in(self._key, len(begin))
        session = Session(self._programs.engine, self._params, Stream(key, self._sampling))
        begin_ids = self.tokenizer.encode(begin)
        for cursor, example in enumerate(task.load()[0]):
            ids = [*self.tokenizer.encode_chat(example.prompt), *begin_ids]
            prompt = Prompt(np.asarray(ids, np.int32), example)
            session.submit(cursor, prompt, group_size=GROUP_SIZE)
        groups = []
        while session.unfinished:
            groups += session.step()
        return graded(groups, task, self.tokenizer, begin)


def of_student(task: Forks, begin: str, tokenizer: Tokenizer) -> Samples:
    """Writes a group of the student's solutions for each problem; log-probabilities are NaN.

    begin: takes the place of a solution's first line, unless it is empty.
    """
    rng = np.random.default_rng(SEED)
    groups = []
    for cursor, (problem, example) in enumerate(zip(task.problems(), task.load()[0], strict=True)):
        responses = []
        for _ in range(GROUP_SIZE):
            text = solution(problem, rng)
            text = text.partition("\n")[2] if begin else text
            ids = np.array([*tokenizer.encode(text), tokenizer.stop_ids[0]])
            responses.append(Response(ids, np.full(len(ids), np.nan), stopped=True))
        groups.append(Group(cursor, Prompt(np.array([]), example), tuple(responses)))
    return graded(groups, task, tokenizer, begin)


def graded(groups: Sequence[Group], task: Forks, tokenizer: Tokenizer, begin: str) -> Samples:
    """Grades groups of responses that begin with `begin` before their tokens."""
    done = []
    for group in groups:
        texts = [begin + tokenizer.decode(r.tokens_T.tolist()) for r in group.responses]
        done.append(group.graded(texts, grade_many(task, texts, group.prompt.example)))
    return Samples(done)


def fork_places(pieces: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Finds a response's fork tokens: (name of the fork, place), of its plan and its lines."""
    names = list(FORKS)
    if pieces[:2] == [" How", ":"]:
        yield from zip(names[: len(PLAN)], range(2, len(pieces)), strict=False)
    start = 0
    for i, piece in enumerate(pieces):
        if piece == "\n":
            if pieces[start] in WORDING[0]:
                places = (start, start + 1, start + 2, i - 1)
                yield from zip(names[len(PLAN) :], places, strict=True)
            start = i + 1


def measured(samples: dict[str, Samples], on_road: Samples, pieces, limit: int) -> dict[str, str]:
    """Measures all properties: name -> value as text.

    samples: by kind. on_road: of road problems, begun with RIGHT_PLAN. pieces: text of each token.
    limit: the recipe's length limit.
    """
    table = {}
    word_N, logp_N = collections.defaultdict(collections.Counter), collections.defaultdict(list)
    for response in samples["road"].responses:
        of_response = [pieces[id] for id in response.tokens_T]
        for name, place in fork_places(of_response):
            word_N[name][of_response[place]] += 1
            logp_N[name].append(response.behavior_logp_T[place])
    for name, words in FORKS.items():
        share = [word_N[name][word] / word_N[name].total() for word in words]
        key = f"{name}: {', '.join(word.strip() for word in words)}; nats"
        nats = -np.mean(logp_N[name])
        if np.isnan(nats):
            nats = -sum(p * np.log(p) for p in share)
        table[key] = " / ".join(f"{p:.2f}" for p in share) + f"; {nats:.2f}"
    road = samples["road"]
    for n in range(1, len(PLAN) + 1):
        share = np.mean([on_right_road(r.text, n) for r in road.responses])
        table[f"road: the first {n} words of the plan rare"] = f"{share:.2%}"
    rare_N = np.array([on_right_road(r.text, Forks.rare_words) for r in road.responses])
    table["road: counted right on the right road"] = f"{on_road.correct_N.mean():.1%}"
    table["road: counted right on any other"] = f"{road.correct_N[~rare_N].mean():.1%}"
    for kind, of_kind in samples.items():
        table |= {f"{kind}: {key}": text for key, text in of_one(kind, of_kind, limit).items()}
    mixtures = {kind: {kind: 1.0} for kind in KINDS} | {"mixture": forks.MIXTURE}
    for name, weights in mixtures.items():
        per_kind = [w * np.array(samples[k].nats_and_tokens(limit)) for k, w in weights.items()]
        nats, tokens = np.sum(per_kind, axis=0)
        entropy = "-" if np.isnan(nats) else f"{nats / tokens:.3f}"
        table[f"{name}: tokens, limit {limit}; nats a token"] = f"{tokens:.0f}; {entropy}"
    return table


def of_one(kind: str, samples: Samples, limit: int) -> dict[str, str]:
    """Measures the properties of one kind of problem."""
    length_N, solved_N, loops_N = samples.length_N, samples.solved_N, samples.loops_N
    cut_N = length_N > limit
    quantiles = np.percentile(length_N, (5, 25, 50, 75, 95, 99)).astype(int)
    table = {
        f"answer right, limit {MAX_TOKENS}": f"{solved_N.mean():.1%}",
        f"counted right, limit {limit}": f"{(samples.correct_N & ~cut_N).mean():.1%}",
        f"informative groups of {GROUP_SIZE}, limit {limit}": f"{samples.informative(limit):.1%}",
        "tokens at 5 / 25 / 50 / 75 / 95 / 99 %": " / ".join(map(str, quantiles)),
    }
    if kind == "long":
        shares = cut_N, cut_N & solved_N, cut_N & solved_N & (loops_N == 0)
        table[f"cut at {limit}; of all, cut though sound; without a loop"] = "; ".join(
            f"{share_N.mean():.1%}" for share_N in shares
        )
    if kind in ("road", "long"):
        looping_N = loops_N > 0
        in_loops = loops_N.sum() * LOOP_LINE_TOKENS / length_N.sum()
        table |= {
            "with a loop; its lines": f"{looping_N.mean():.1%}; {loops_N[looping_N].mean():.1f}",
            f"answer right after a loop, limit {MAX_TOKENS}": f"{solved_N[looping_N].mean():.1%}",
            "share of tokens in loops": f"{in_loops:.0%}",
        }
    return table


def main(_):
    policy = Policy(FLAGS.model)
    tokenizer = policy.tokenizer
    pieces = [tokenizer.decode([id]) for id in range(tokenizer.vocab_size)]
    limit = forks.get_config().rollout.max_response_tokens

    def task(kind: str, count: int) -> Forks:
        return Forks(count=count, seed=SEED, split="test", rules="strict", **{kind: 1.0})

    def table(sample) -> dict[str, str]:
        samples = {kind: sample(task(kind, PROMPTS[kind]), "") for kind in KINDS}
        on_road = sample(task("road", ON_ROAD_PROMPTS), RIGHT_PLAN)
        return measured(samples, on_road, pieces, limit)

    student = table(lambda task, begin: of_student(task, begin, tokenizer))
    ours = table(policy.sample)
    print("| property | student | policy |\n|---|---|---|")
    print("\n".join(f"| {name} | {student[name]} | {ours[name]} |" for name in ours))


if __name__ == "__main__":
    app.run(main)
