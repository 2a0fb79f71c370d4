"""Entropy on fixed texts, distance from the start and diversity of the policies of a study.

    python -m experiments.smollm2.texts NAME --workdir=DIR
    python -m experiments.smollm2.texts NAME

NAME: a study whose module has COMPARED, pairs of arms. The first command measures the policy of
each run in DIR after the steps of the study's settings, and writes texts.jsonl into its folder.
Both print its tables: means over the seeds, and differences of arms with Student's 95 % interval,
paired by seed. The fixed texts of a seed are the start policy's responses to held-out questions, so
all policies of it are measured on the same tokens, whatever they answer themselves.
"""

import collections
import dataclasses
import functools
import importlib
import itertools
import json
import operator
import pathlib
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from dapo_jax import learner
from dapo_jax.checkpoints.same_run import EVALUATE
from dapo_jax.checkpoints.store import Checkpoints
from dapo_jax.logprobs import Softmax, chosen_logprobs
from dapo_jax.logs.files import read_json, read_zipped_rows
from dapo_jax.setup import auto_sizes, components, policy
from dapo_jax.sweep.runner import is_done
from dapo_jax.types import Batch, Group, Response, Status
from experiments import study
from models.transformer import abstract_params

FILE, START = "texts.jsonl", "start"
PROMPTS = 24  # whose responses by the start policy are the fixed texts
WORDS = 6  # of each response, so that long ones do not count as less diverse
# All policies are computed in the first run's dtype.
QUESTION = dataclasses.replace(EVALUATE, but=("model.compute_dtype",))
MEASURES = (
    ("entropy", "entropy on fixed texts, nats", "{:.3f}"),
    ("kl", "KL(start || policy), nats a token", "{:.3f}"),
    ("distinct_2", "distinct-2 of a prompt's 8 responses, first 6 words", "{:.3f}"),
)


def responses_of(workdir: pathlib.Path, step: int) -> dict[int, list[dict]]:
    """The responses of a run's evaluation after a step, by the prompt's place in its one set."""
    found = collections.defaultdict(list)
    (name,) = read_json(workdir / "config.json")["eval"]["sets"]
    for response in read_zipped_rows(workdir / "eval" / f"{step}.{name}.jsonl.gz"):
        found[response["cursor"]].append(response)
    return dict(sorted(found.items()))


def distinct_2(texts: Sequence[str]) -> float:
    """Distinct pairs of neighbouring words, as a share of all pairs in the texts' beginnings."""
    pairs = []
    for text in texts:
        words = text.split()[:WORDS]
        pairs += itertools.pairwise(words)
    return len(set(pairs)) / max(1, len(pairs))


def fixed_batches(of: components.Programs, data: components.Data, tokenizer, texts) -> list[Batch]:
    """Packs the fixed texts into batches of the config's updates."""
    (held_out,) = data.eval_sets.values()
    prompts, groups = held_out.prompts, []
    for cursor, responses in list(texts.items())[:PROMPTS]:
        made = []
        for response in responses:
            ids = tokenizer.encode(response["response"])
            ids = ids if response["truncated"] else [*ids, tokenizer.stop_ids[0]]
            tokens_T = np.array(ids, np.int32)
            made.append(Response(tokens_T, np.zeros(len(ids), np.float32), status=Status.STOPPED))
        groups.append(Group(cursor, prompts[cursor], tuple(made)))
    size = of.config.rollout.num_prompts // of.config.updates_per_step
    parts = [groups[i : i + size] for i in range(0, len(groups), size)]
    one_PG = np.ones((size, len(groups[0].responses)))
    return [learner.minibatch(part, one_PG[: len(part)], of.settings, of.mesh) for part in parts]


def measure_of(of: components.Programs) -> Callable[[dict, Batch], jax.Array]:
    """Makes the program (params, batch) -> (tokens, entropy, log-probability), in sums."""
    graph, how = abstract_params(of.sizes)[0], of.settings

    def sums(params, batch):
        def add(i, total_3):
            micro = learner.micro_batch(batch, i)
            run = {"graph": graph, "mesh": of.mesh, "settings": how}
            x_BTD, head_DV, _ = learner.forward(params, None, micro, **run)
            softmax = Softmax(1.0, how.vocab_size, of.mesh)
            logp_BT, entropy_BT = chosen_logprobs(x_BTD, head_DV, micro.target_BT, softmax)
            of_token = (jnp.ones_like(logp_BT), entropy_BT, logp_BT)
            return total_3 + jnp.stack(
                [jnp.sum(jnp.where(micro.is_response_BT, value, 0.0)) for value in of_token]
            )

        return jax.lax.fori_loop(0, batch.num_micro, add, jnp.zeros(3))

    return jax.jit(sums)


def rows_of(workdir: pathlib.Path, *, of_study: study.Study, file: pathlib.Path) -> list[dict]:
    """A row for the policy of each finished run, and one a seed for the start policy.

    Rows in the file of arms and seeds that have no run in the folder stay as they are.
    """
    steps = int(of_study.settings["num_steps"])
    runs = [point for point in of_study.plan().points(workdir) if is_done(point)]
    if not runs:
        raise ValueError(f"--workdir={workdir} has no finished run of the study")
    config = policy.run_config(runs[0].workdir, trust_code=True)
    auto_sizes.fit_training(config)
    tokenizer = components.tokenizer(config)
    of = components.programs(config, tokenizer.vocab_size)
    data = components.load_data(config, tokenizer, training=False)
    sums, seeds = measure_of(of), sorted({point.seed for point in runs})

    def row(arm, seed, params, batches, responses) -> dict:
        tokens, entropy, logp = sum(np.asarray(sums(params, b), np.float64) for b in batches)
        answers = [[r["response"] for r in of_prompt] for of_prompt in responses.values()]
        return {
            "arm": arm,
            "seed": seed,
            "entropy": entropy / tokens,
            "logp": logp / tokens,
            "distinct_2": float(np.mean([distinct_2(of_prompt) for of_prompt in answers])),
        }

    there = map(json.loads, file.open()) if file.exists() else ()
    rows = {(row["arm"], row["seed"]): row for row in there}
    for seed in seeds:
        of_seed = [point for point in runs if point.seed == seed]
        texts = responses_of(of_seed[0].workdir, 0)
        batches = fixed_batches(of, data, tokenizer, texts)
        new = [row(START, seed, of.start_params(), batches, texts)]
        for point in of_seed:
            saved = Checkpoints(point.workdir / "checkpoints", keep=None)
            _, params, _ = policy.restored(of, saved, steps, QUESTION)
            responses = responses_of(point.workdir, steps)
            new.append(row(point.arm, seed, params, batches, responses))
        for one in new:
            rows[one["arm"], seed] = one | {"kl": new[0]["logp"] - one["logp"]}
    return sorted(rows.values(), key=operator.itemgetter("seed"))


def main(argv: Sequence[str]) -> None:
    name = argv[1] if len(argv) == 2 else ""
    try:
        study.load(name)  # names the studies that there are
        of_study = importlib.import_module(f"experiments.{name}.study")
        file = study.HERE / name / FILE
        if not hasattr(of_study, "COMPARED"):
            raise ValueError(f"{name} is a study without texts (its study.py has no COMPARED)")
        measure = functools.partial(rows_of, of_study=of_study.STUDY, file=file)
        study.look_into(file, measure, MEASURES, of_study.COMPARED)
    except ValueError as error:
        sys.exit(f"experiments.smollm2.texts: {error}")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", "", "The runs of the study; '': read texts.jsonl.")
    app.run(main)
