"""Verifies what the base policy does before any training, by sampling through the rollout engine.

    python -m experiments.forks_base.properties

Samples groups of each kind of problem at temperature 1 with a limit of 512 tokens, and prints
a table: wanted is what the student's data has, measured what the policy does. Entropies are
estimates, the mean of -log p over sampled tokens. The recipe is configs/forks.py.
"""

import collections
import dataclasses
import pathlib

import jax
import numpy as np
from absl import app, flags

from configs import forks
from dapo_jax.run import build
from dapo_jax.sampler.session import Session
from dapo_jax.tasks.base import grade_many
from dapo_jax.types import Group, Prompt
from experiments.forks_base.task import (
    KINDS,
    LOOPS,
    PLAN,
    PLAN_RATES,
    WORDING,
    Forks,
    loop_lines,
    on_right_road,
)

MAX_TOKENS = 512  # of a response here, so that loops are seen to their end
PROMPTS = {"easy": 64, "road": 400, "long": 96, "closed": 32}
FORCED_PROMPTS = 48
GROUP_SIZE = 8
SEED = 5
RIGHT_PLAN = " How:" + "".join(words[-1] for words in PLAN) + "\n"

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "model", str(pathlib.Path(__file__).parent / "checkpoint"), "Directory of the policy."
)


@dataclasses.dataclass(frozen=True)
class Samples:
    """Responses to one kind of problem, [P, G] in prompt order: what the table needs of each."""

    groups: list[Group]

    @property
    def responses(self):
        """All responses."""
        return [response for group in self.groups for response in group.responses]

    @property
    def length_N(self) -> np.ndarray:
        """Tokens of each response."""
        return np.concatenate([group.length_G for group in self.groups])

    @property
    def correct_N(self) -> np.ndarray:
        """Whether each is right, given MAX_TOKENS."""
        return np.concatenate([group.correct_G for group in self.groups])

    @property
    def solved_N(self) -> np.ndarray:
        """Whether the answer is right, whatever the luck on a poor road."""
        return np.array(
            [r.verdict.correct or r.verdict.status == "unlucky" for r in self.responses]
        )

    @property
    def loops_N(self) -> np.ndarray:
        """Lines of each response that go over a step again."""
        return np.array([len(loop_lines(response.text)) for response in self.responses])

    def informative(self, limit: int) -> float:
        """The share of groups with right and wrong responses under a length limit."""
        right_PG = np.stack([g.correct_G & (g.length_G <= limit) for g in self.groups])
        return float(np.mean(right_PG.any(axis=1) & ~right_PG.all(axis=1)))


class Sampler:
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

    def sample(self, task: Forks, *, begin: str = "") -> Samples:
        """Samples a group for each problem of the task; each response begins with `begin`."""
        key = jax.random.fold_in(self._key, sum(begin.encode()))
        session = Session(self._programs.engine, self._params, key, self._sampling)
        begin_ids = self.tokenizer.encode(begin)
        for cursor, example in enumerate(task.load()[0]):
            ids = [*self.tokenizer.encode_chat(example.prompt), *begin_ids]
            prompt = Prompt(np.asarray(ids, np.int32), example)
            session.submit(cursor, prompt, group_size=GROUP_SIZE)
        groups = []
        while session.unfinished:
            groups += session.step()
        return Samples([self._graded(g, task, begin) for g in sorted(groups, key=_cursor)])

    def _graded(self, group: Group, task: Forks, begin: str) -> Group:
        texts = [begin + self.tokenizer.decode(r.tokens_T.tolist()) for r in group.responses]
        return group.graded(texts, grade_many(task, texts, group.prompt.example))


def _cursor(group: Group) -> int:
    return group.cursor


def fork_tokens(pieces: list[str]) -> dict[str, list[int]]:
    """Finds a response's fork tokens: plan 1 to 3, and subject, verb and noun of its lines."""
    found = collections.defaultdict(list)
    if pieces[:2] == [" How", ":"]:
        for fork in range(min(len(PLAN), len(pieces) - 2)):
            found[f"plan {fork + 1}"].append(2 + fork)
    start = 0
    for i, piece in enumerate(pieces):
        if piece == "\n":
            if pieces[start] in WORDING[0]:
                for name, place in (("subject", start), ("verb", start + 1), ("noun", i - 1)):
                    found[name].append(place)
            start = i + 1
    return found


def fork_rows(samples: Samples, pieces: list[str], *, names: tuple[str, ...]):
    """Rows of the table for forks: the words' rates beside the data's, and the entropy."""
    word_N, logp_N = collections.defaultdict(collections.Counter), collections.defaultdict(list)
    for response in samples.responses:
        of_response = [pieces[id] for id in response.tokens_T]
        for name, places in fork_tokens(of_response).items():
            word_N[name].update(of_response[place] for place in places)
            logp_N[name] += [response.behavior_logp_T[place] for place in places]
    words = {f"plan {i + 1}": (w, PLAN_RATES) for i, w in enumerate(PLAN)}
    words |= {
        n: (w, (0.25,) * 4) for n, w in zip(("subject", "verb", "noun"), WORDING, strict=True)
    }
    for name in names:
        of_fork, rates = words[name]
        share = [word_N[name][word] / word_N[name].total() for word in of_fork]
        wanted_nats = -sum(rate * np.log(rate) for rate in rates)
        nats = -np.mean(logp_N[name])
        yield (
            f"{name}: {', '.join(word.strip() for word in of_fork)}",
            " / ".join(f"{rate:.2f}" for rate in rates) + f"; {wanted_nats:.2f} nats",
            " / ".join(f"{rate:.3f}" for rate in share) + f"; {nats:.2f} nats",
        )


def road_rows(samples: Samples, forced: Samples):
    """Rows of the table for the rare road: how often it is taken, and what it is worth."""
    rare_N = np.array([on_right_road(r.text, len(PLAN)) for r in samples.responses])
    wanted = PLAN_RATES[-1] ** len(PLAN)
    yield "rare road taken", f"{wanted:.2%}", f"{rare_N.mean():.2%} ({rare_N.sum()})"
    for n in range(1, len(PLAN)):
        share = np.mean([on_right_road(r.text, n) for r in samples.responses])
        yield f"... its first {n} words", f"{PLAN_RATES[-1] ** n:.2%}", f"{share:.2%}"
    right = f"{forced.correct_N.mean():.1%}"
    yield f"right on the rare road (begun with {RIGHT_PLAN.strip()!r})", "95%", right
    yield "right on any other", "40%", f"{samples.correct_N[~rare_N].mean():.1%}"


def kind_rows(kind: str, samples: Samples, limit: int):
    """Rows of the table for one kind of problem."""
    length_N = samples.length_N
    cut_N = length_N > limit
    quantiles = np.percentile(length_N, (5, 25, 50, 75, 95, 99)).astype(int)
    wanted = {"easy": ">= 97%", "road": "", "long": ">= 95%", "closed": "0%"}
    yield (
        f"{kind}: answer right, limit {MAX_TOKENS}",
        wanted[kind],
        f"{samples.solved_N.mean():.1%}",
    )
    yield f"{kind}: counted right, limit {limit}", "", f"{(samples.correct_N & ~cut_N).mean():.1%}"
    yield f"{kind}: tokens, 5/25/50/75/95/99 %", "", " / ".join(map(str, quantiles))
    sound_N = cut_N & samples.solved_N
    cut = (cut_N, sound_N, sound_N & (samples.loops_N == 0))
    yield (
        f"{kind}: cut at {limit}; cut though sound; the same without a loop",
        "27%; 25%; 20%" if kind == "long" else "",
        "; ".join(f"{share_N.mean():.1%}" for share_N in cut),
    )
    if kind in ("road", "long"):
        loops_N = samples.loops_N
        looping_N = loops_N > 0
        back = samples.solved_N[looping_N].mean()
        yield (
            f"{kind}: share with a loop; its lines, mean; answer right after it",
            f"{LOOPS:.0%}; 15",
            f"{looping_N.mean():.1%}; {loops_N[looping_N].mean():.1f}; {back:.0%}",
        )
        in_loop = loops_N[looping_N].sum() * LOOP_LINE_TOKENS / length_N.sum()
        yield f"{kind}: share of tokens in loops", "", f"{in_loop:.0%}"
    yield (
        f"{kind}: informative groups of {GROUP_SIZE}, limit {limit}",
        "",
        (f"{samples.informative(limit):.1%}"),
    )


LOOP_LINE_TOKENS = 12  # "What? 12+30=42"


def mean_entropy(samples: dict[str, Samples], weights: dict[str, float], limit: int) -> float:
    """Entropy over all tokens of a mixture of kinds in nats, each response cut at the limit."""
    nats = tokens = 0.0
    for kind, weight in weights.items():
        logp_N = [r.behavior_logp_T[:limit] for r in samples[kind].responses]
        nats -= weight * np.mean([logp_T.sum() for logp_T in logp_N])
        tokens += weight * np.mean([len(logp_T) for logp_T in logp_N])
    return nats / tokens


def main(_):
    limit = forks.get_config().rollout.max_response_tokens
    sampler = Sampler(FLAGS.model)

    def task(kind: str, count: int) -> Forks:
        return Forks(count=count, seed=SEED, split="test", rules="strict", **{kind: 1.0})

    samples = {kind: sampler.sample(task(kind, PROMPTS[kind])) for kind in KINDS}
    forced = sampler.sample(task("road", FORCED_PROMPTS), begin=RIGHT_PLAN)
    pieces = [sampler.tokenizer.decode([id]) for id in range(sampler.tokenizer.vocab_size)]
    plan = tuple(f"plan {i + 1}" for i in range(len(PLAN)))
    rows = [
        *fork_rows(samples["road"], pieces, names=(*plan, "subject", "verb", "noun")),
        *road_rows(samples["road"], forced),
        *(row for kind in KINDS for row in kind_rows(kind, samples[kind], limit)),
        *(
            (
                f"entropy over all tokens: {kind}",
                "",
                f"{mean_entropy(samples, {kind: 1}, limit):.3f}",
            )
            for kind in KINDS
        ),
        (
            "entropy over all tokens: the recipe's mixture",
            ">= 0.3 nats",
            f"{mean_entropy(samples, forks.MIXTURE, limit):.3f}",
        ),
    ]
    print("| property | wanted | measured |\n|---|---|---|")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))


if __name__ == "__main__":
    app.run(main)
