"""The places of the lost entropy: the forks of the student's own solutions, and all other tokens.

    python -m experiments.random_rewards.forks --workdir=DIR
    python -m experiments.random_rewards.forks

The first reads the last checkpoint of each run of the study in DIR and writes forks.jsonl; both
print the table of it: means over the seeds, and the differences from the first arm on one seed.
The texts are fixed, so what the policy's own text has become plays no part.
"""

import functools
import operator
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from configs import forks
from dapo_jax import convert
from dapo_jax.report.compare import Comparison, Quantity, interval_text, spread_text, table
from dapo_jax.run import build
from dapo_jax.sweep.plan import Plan
from experiments.forks_base.properties import fork_places
from experiments.forks_base.task import Forks, solution
from experiments.random_rewards.study import STUDY
from experiments.study import look_into
from models.transformer import abstract_params

FILE = pathlib.Path(__file__).parent / "forks.jsonl"
PROBLEMS, WIDTH = 128, 160
START = "start"
KINDS = {
    kind: Quantity(title, operator.itemgetter(kind), "{:.3f}")
    for kind, title in (("forks", "nats at forks"), ("rest", "at other tokens"))
}


def solutions() -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Problems with the student's solutions: (tokens [B, T], segments [B, T], places by kind).

    places: which entries of [B, T] come before a token of that kind.
    """
    tokenizer = build.tokenizer(forks.get_config())
    task = Forks(count=PROBLEMS, seed=5, split="test", rules="strict", easy=1.0)
    rng = np.random.default_rng(0)
    tokens_BT = np.zeros((PROBLEMS, WIDTH), np.int32)
    segment_BT = np.zeros_like(tokens_BT)
    before = {kind: np.zeros(tokens_BT.shape, bool) for kind in KINDS}
    for i, (problem, example) in enumerate(zip(task.problems(), task.load()[0], strict=True)):
        prompt = tokenizer.encode_chat(example.prompt)
        response = tokenizer.encode(solution(problem, rng))
        ids = [*prompt, *response]
        tokens_BT[i, : len(ids)], segment_BT[i, : len(ids)] = ids, 1
        before["rest"][i, len(prompt) - 1 : len(ids) - 1] = True
        for _, place in fork_places([tokenizer.decode([id]) for id in response]):
            before["forks"][i, len(prompt) + place - 1] = True
    before["rest"] &= ~before["forks"]
    return tokens_BT, segment_BT, before


@jax.jit(static_argnames="sizes")
def entropy(params, tokens_BT, segment_BT, *, sizes):
    """The entropy of the next token, float32 [B, T]."""
    graph, _ = abstract_params(sizes)
    logp_BTV = jax.nn.log_softmax(nnx.merge(graph, params)(tokens_BT, segment_BT=segment_BT))
    return -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, axis=-1)


def measure(plan: Plan, workdir: pathlib.Path) -> list[dict]:
    """Rows of the start policy and of each run of the study: arm, seed, nats by kind."""
    tokens_BT, segment_BT, before = solutions()
    rows = []

    def add(arm: str, seed: int, params, sizes):
        nats_BT = np.asarray(entropy(params, tokens_BT, segment_BT, sizes=sizes))
        nats = {kind: float(nats_BT[places_BT].mean()) for kind, places_BT in before.items()}
        rows.append({"arm": arm, "seed": seed, **nats})

    start = build.programs(forks.get_config(), vocab_size=0)
    add(START, 0, start.start_params(), start.sizes)
    for point in plan.points(workdir):
        params, sizes, *_ = convert.load_run(point.workdir, None, dtype="float32")
        add(point.arm, point.seed, params, sizes)
    return rows


def result(rows: list[dict]) -> str:
    """The table as Markdown."""
    first = STUDY.claims[0].than
    heads = ["arm", *(text for nats in KINDS.values() for text in (nats.name, f"less {first}"))]
    lines = []
    for arm in (START, *STUDY.arms):
        cells = [arm]
        for nats in KINDS.values():
            ours, theirs = (
                {row["seed"]: nats.value(row) for row in rows if row["arm"] == a}
                for a in (arm, first)
            )
            less = interval_text(nats, Comparison.of(ours, theirs).paired)
            cells += [spread_text(nats, ours), "" if arm in (START, first) else less]
        lines.append(cells)
    return "\n".join(table(heads, lines))


def main(_):
    look_into(FILE, functools.partial(measure, STUDY.plan()), result)


if __name__ == "__main__":
    flags.DEFINE_string("workdir", "", "The runs of the study; '': read forks.jsonl.")
    app.run(main)
