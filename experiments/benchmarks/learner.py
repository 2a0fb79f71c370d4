"""The update, and a whole RL step, beside transformers with torch, on the same work.

    python -m experiments.benchmarks.learner --peers=DIR --torch_python=... \
        --lengths=response_lengths.csv

8 prompts of 64 tokens x 8 responses, float32, random weights: all responses of 128 tokens, and
lengths sampled from the CSV, a quarter of each, cut at --longest, to which the peer pads. Tokens
are those of the responses. A step is sampling, the peer's log-probabilities of what it sampled
(ours come with the samples), and one update of all 64 responses. Best of --repeats.
"""

import functools
import json
import pathlib
import subprocess
import time

import jax
import numpy as np
from absl import app, flags

from dapo_jax import learner
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.types import Prompt
from experiments.benchmarks import common
from models.kernels import KERNELS
from models.parameters import param_axes
from models.transformer import Transformer, abstract_params, split, unstack
from sharding import hosts, rules
from sharding.mesh import make_mesh, split_cpu

FLAGS = flags.FLAGS
flags.DEFINE_string("peers", None, "Folder of the peer's script, bench_torch.py.")
flags.DEFINE_string("torch_python", None, "Python with torch and transformers; none: only we run.")
flags.DEFINE_string("lengths", None, "CSV of real response lengths.", required=True)
flags.DEFINE_list("sizes", ["1.25", "11.8"], "Millions of parameters; 135 is SmolLM2's size.")
flags.DEFINE_list("work", ["equal", "real"], "Which lengths.")
flags.DEFINE_integer("devices", 1, "Devices that the CPU is counted as, for us.")
flags.DEFINE_integer("row_tokens", 1_088, "Of a packed row.")
flags.DEFINE_integer("rows", 2, "Packed rows of a micro-batch.")
flags.DEFINE_integer("longest", 1_024, "Tokens at which real lengths are cut.")
flags.DEFINE_integer("repeats", 3, "Of everything; the best counts.")
PROMPTS, GROUP, PROMPT = 8, 8, 64


def ours(size: str, lengths: np.ndarray):
    """Functions that take one update, and one whole step, and return its seconds."""
    config = common.SIZES[size]
    mesh = make_mesh(data=-1, model=1)
    degree = rules.row_degree(mesh)
    slots, longest = PROMPTS * GROUP, int(lengths.max())
    learning = learner.Learning(
        compute_dtype="float32",
        vocab_size=config.vocab_size,
        remat="none",
        row_tokens=FLAGS.row_tokens,
        micro_batch_rows=FLAGS.rows,
        update_responses=slots,
        kernels=KERNELS["cpu"],
    )
    graph, abstract = abstract_params(config)
    param_shardings = rules.param_shardings(mesh, param_axes(abstract), abstract, rules.LEARNER)
    init = functools.partial(learner.init_state, learning=learning)
    shardings = learner.shardings_like_params(
        jax.eval_shape(init, abstract), param_shardings, rules.replicated(mesh)
    )
    update = jax.jit(
        functools.partial(learner.update, graph=graph, mesh=mesh, learning=learning),
        out_shardings=(shardings, rules.replicated(mesh)),
        donate_argnums=0,
    )
    engine, engine_params = common.make_engine(
        config,
        slots=slots,
        prompt=PROMPT,
        response=longest,
        pages=int(sum(-(-n // 64) for n in lengths)) // degree + longest // 64 + 2,
        prompt_pages=PROMPTS // degree + 1,
        readers=GROUP,
        page_tokens=64,
        block_tokens=16,
    )
    how = common.sampling(config, longest)
    engine.compile(how)
    reshard = jax.jit(
        unstack, out_shardings=jax.tree.map(lambda array: array.sharding, engine_params)
    )
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, config.vocab_size, (PROMPTS, PROMPT)).astype(np.int32)
    advantage_PG = rng.normal(size=(PROMPTS, GROUP)).astype(np.float32)
    limits = lengths.reshape(PROMPTS, GROUP)
    state = jax.jit(
        lambda: init(split(Transformer(config, key=jax.random.key(0)))[1]), out_shardings=shardings
    )()

    def rollout():
        session = Session(engine, reshard(state.params), Stream(jax.random.key(1), how))
        for cursor, prompt in enumerate(prompts):
            max_tokens = limits[cursor].tolist()
            session.submit(cursor, Prompt(prompt), group_size=GROUP, max_tokens=max_tokens)
        finished = {}
        while session.unfinished:
            finished |= {group.cursor: group for group in session.step()}
        return [finished[cursor] for cursor in range(PROMPTS)]

    def take_update(groups):
        nonlocal state
        batch = learner.minibatch(groups, advantage_PG, learning, mesh)
        state, metrics = update(state, None, batch, 1e-6)
        return hosts.fetch(metrics)

    sampled = rollout()
    assert float(take_update(sampled)["ratio_gap"]) < 1e-3

    def timed(work) -> float:
        start = time.perf_counter()
        work()
        jax.block_until_ready(state)
        return time.perf_counter() - start

    return lambda: timed(lambda: take_update(sampled)), lambda: timed(
        lambda: take_update(rollout())
    )


def torch_seconds(size: str, new_tokens: int) -> dict[str, float]:
    """Best seconds of transformers' and torch's update and step."""
    sizes = common.peer_arguments(
        size,
        prompts=PROMPTS,
        group=GROUP,
        prompt_len=PROMPT,
        new_tokens=new_tokens,
        iters=FLAGS.repeats,
    )
    command = [FLAGS.torch_python, str(pathlib.Path(FLAGS.peers) / "bench_torch.py"), *sizes]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    result = common.last_json(run.stdout)
    return {"update": result["update_best_s"], "step": result["step_best_s"]}


def main(_):
    split_cpu(FLAGS.devices)
    works = {
        "equal": np.full(PROMPTS * GROUP, 128),
        "real": common.real_lengths(pathlib.Path(FLAGS.lengths), PROMPTS * GROUP, FLAGS.longest),
    }
    _, rate = common.measured_rates(make_mesh(data=-1, model=1))
    table, shares = [], []
    for size in FLAGS.sizes:
        for work in FLAGS.work:
            lengths = works[work]
            tokens, padded = int(lengths.sum()), 128 if work == "equal" else FLAGS.longest
            functions = dict(zip(("update", "step"), ours(size, lengths), strict=True))
            seconds = {
                "dapo_jax": {
                    name: min(run() for _ in range(FLAGS.repeats))
                    for name, run in functions.items()
                }
            }
            if FLAGS.torch_python:
                seconds["transformers"] = torch_seconds(size, padded)
            print(json.dumps({"size": size, "work": work, "tokens": tokens, **seconds}), flush=True)
            for name in functions:
                rates = {party: tokens / of[name] for party, of in seconds.items()}
                over = rates["dapo_jax"] / rates.get("transformers", float("nan"))
                shown = [f"{rate:,.0f}" for rate in rates.values()]
                table.append([f"{size} M, {work}", name, *shown, f"{over:.2f}"])
            length_PG = lengths.reshape(PROMPTS, GROUP)
            flops = (
                common.update_flops(common.SIZES[size], PROMPT, length_PG)
                / seconds["dapo_jax"]["update"]
            )
            shares.append(f"{size} M, {work}: {flops / 1e9:.0f} GFLOP/s, {flops / rate:.0%}")
    print(f"\n{common.machine()}, commit {common.commit()}; response tokens per second")
    print(common.table(["", "", *seconds, "over it"], table))
    print(f"our update, of the {rate / 1e9:.0f} GFLOP/s of a large product: {'; '.join(shares)}")


if __name__ == "__main__":
    app.run(main)
