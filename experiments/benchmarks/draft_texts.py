"""The tokens that a decode step would give with drafts, from the texts of a run.

    python -m dapo_jax.train --config=configs/smollm2_135m.py --workdir=runs/epochs \\
        --config.data.train.count=64 --config.log.samples_every_steps=1
    python -m experiments.benchmarks.draft_texts --run=runs/epochs

Proposes drafts as the sampler does (`dapo_jax.sampler.drafts`), from the prompt and the response
itself, from the group's other responses too, as if they had ended, and from those to the same
prompt in an earlier step. Nothing is sampled: a draft is right where the response goes on so.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from dapo_jax.run import build, policy
from dapo_jax.run.files import read_rollouts
from dapo_jax.sampler.drafts import SOURCE_TOKENS, propose, source
from experiments.benchmarks import common

FLAGS = flags.FLAGS
flags.DEFINE_string("run", None, "The run's directory.", required=True)
flags.DEFINE_integer("drafts", 3, "Draft tokens of a step.")
KINDS = ("itself", "and its group", "and the earlier step", "all three")


def texts_of(path: pathlib.Path, tokenizer) -> dict[int, list[tuple[np.ndarray, np.ndarray]]]:
    """Reads a step's tokens: {row of the data: (prompt, response) pairs}."""
    texts = {}
    for row in read_rollouts(path):
        end = [] if row["truncated"] else [tokenizer.stop_ids[0]]
        prompt, response = (list(tokenizer.encode(row[part])) for part in ("prompt", "response"))
        pair = np.array(prompt, np.int32), np.array(response + end, np.int32)
        texts.setdefault(row["row"], []).append(pair)
    return texts


@functools.partial(jax.jit, static_argnames="count")
def right_drafts(text_BX, at_B, *, count: int):
    """Counts the drafts for places `at` that the text goes on with, up to the first wrong one."""
    drafts_BT = propose(text_BX, at_B, count=count)
    place_BT = at_B[:, None] + jnp.arange(count)
    after_BT = jnp.take_along_axis(text_BX, jnp.minimum(place_BT, text_BX.shape[1] - 1), axis=1)
    right_BT = (drafts_BT == after_BT) & (place_BT < text_BX.shape[1])
    return jnp.cumprod(right_BT, axis=1).sum(axis=1)


def tokens_a_step(responses, sources, count: int) -> float:
    """Divides the tokens of responses by their decode steps; sources: of each, its rows' tokens."""
    T = max(map(len, responses))
    text_BX = np.full((len(responses), SOURCE_TOKENS + T), -2, np.int32)  # -2: behind the end
    for b, (response, (own, others)) in enumerate(zip(responses, sources, strict=True)):
        text_BX[b, :SOURCE_TOKENS] = source(own, others, SOURCE_TOKENS)
        text_BX[b, SOURCE_TOKENS : SOURCE_TOKENS + len(response)] = response
    length_B = np.array(list(map(len, responses)))
    done_B, steps = np.zeros(len(responses), int), 0
    while (live_B := done_B < length_B).any():
        right_B = np.asarray(right_drafts(text_BX, SOURCE_TOKENS + done_B, count=count))
        steps += live_B.sum()
        done_B += live_B * (1 + right_B)
    return length_B.sum() / steps


def main(_):
    run = pathlib.Path(FLAGS.run)
    tokenizer = build.tokenizer(policy.run_recipe(run, trust_code=True))
    files = (run / "rollouts").glob("*.jsonl.gz")
    earlier, table = {}, []
    for path in sorted(files, key=lambda path: int(path.name.split(".")[0])):
        texts = texts_of(path, tokenizer)
        responses, cases = [], {kind: [] for kind in KINDS}
        for row in texts.keys() & earlier.keys():
            for prompt, response in texts[row]:
                group = [other for _, other in texts[row] if other is not response]
                before = [other for _, other in earlier[row]]
                responses.append(response)
                for kind, others in zip(KINDS, ([], group, before, group + before), strict=True):
                    cases[kind].append((prompt, others))
        earlier |= texts
        if responses:
            found = [tokens_a_step(responses, cases[kind], FLAGS.drafts) for kind in KINDS]
            step = path.name.split(".")[0]
            table.append([step, sum(map(len, responses)), *(f"{f:.2f}" for f in found)])
    if not table:
        raise app.UsageError(
            f"--run={FLAGS.run} has no steps that share a question in its rollouts/; set "
            "data.train.count and log.samples_every_steps as above"
        )
    print(f"{FLAGS.run} at {common.commit()}: tokens a decode step, {FLAGS.drafts} drafts")
    print(common.table(["step", "tokens", *KINDS], table))


if __name__ == "__main__":
    app.run(main)
