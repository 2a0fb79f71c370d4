"""Decoding and updates on one GPU at Qwen2.5's sizes, against what the GPU can do.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m experiments.benchmarks.gpu_decode \
        [--torch_python=PYTHON]

bf16, random weights. A decode step of 256 slots (or as many as fit) that have sampled 1k, 4k and
16k tokens each, by the GPU's kernels, by plain XLA and by transformers; the floor is that of
experiments.preflight.estimate at the rates of a large copy and product, measured in the same run.
Then an update of rows of 4k, 8k and 22k tokens, one response each. Nothing decodes to the context:
pages are filled with random numbers, and every block begins at the same token. To see it work on a
CPU:

    python -m experiments.benchmarks.gpu_decode --presets=tiny --contexts=64,256 --slots=32 \
        --page_tokens=32 --kernels=gpu_interpret,xla --update_presets=tiny --row_tokens=256,512 \
        --copy_mib=64 --product=512 --repeats=1
"""

import functools
import json
import pathlib
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from dapo_jax import learner
from dapo_jax.preflight.examine import parameter_count
from dapo_jax.sampler.cache import Cache
from dapo_jax.sampler.engine import Engine, token_bytes
from dapo_jax.types import Group, Prompt, Response
from experiments.benchmarks import common
from experiments.preflight.estimate import Device
from models.kernels import kernels_for, platform_of
from models.parameters import normal, ones
from models.qwen2 import PRESETS
from sharding import hosts, rules

FLAGS = flags.FLAGS
flags.DEFINE_list("presets", ["0.5b", "1.5b", "7b"], "Names of models.qwen2.PRESETS to decode.")
flags.DEFINE_list("contexts", ["1024", "4096", "16384"], "Tokens that every slot has sampled.")
flags.DEFINE_list("kernels", ["gpu", "xla"], "Names of models.kernels.KERNELS.")
flags.DEFINE_integer("slots", 256, "Requests decoded at once, or fewer where they do not fit.")
flags.DEFINE_integer("page_tokens", 128, "Of a page.")
flags.DEFINE_string("torch_python", None, "Python of an environment with torch and transformers.")
flags.DEFINE_list("update_presets", ["0.5b", "1.5b"], "Those whose state fits on one device.")
flags.DEFINE_list("row_tokens", ["4096", "8192", "22528"], "Of an update's rows.")
flags.DEFINE_integer("copy_mib", 2_048, "Of the copy that gives the bandwidth.")
flags.DEFINE_integer("product", 8_192, "Rows and columns of the product that gives the FLOP rate.")
flags.DEFINE_integer("repeats", 5, "Of everything; the best counts.")
BLOCK = 16
SPARE_BYTES = 4 * 2**30  # of the device: logits and pieces of attention
PROMPT, MICRO_BATCHES = 64, 4  # of an update


def pages_of(context: int) -> int:
    """The pages of a slot that samples another block behind so many tokens."""
    return -(-(context + BLOCK) // FLAGS.page_tokens)


def slots_that_fit(preset: str, context: int) -> int:
    """As many slots as were asked for, or as the device holds."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        return FLAGS.slots
    c = PRESETS[preset]
    head = c.vocab_size * c.width if c.tie_embeddings else 0  # an array of its own
    left = limit - SPARE_BYTES - 2 * (parameter_count(c) + head)
    of_slot = pages_of(context) * FLAGS.page_tokens
    return min(FLAGS.slots, left // (of_slot * token_bytes(c, bytes_per_value=2, model_degree=1)))


@functools.cache
def maker(like):
    """A program for each kind of array: one for all of them took a GPU's compiler minutes."""
    make = functools.partial(normal if like.ndim > 1 else ones, jax.random.key(0), like.shape)
    return jax.jit(lambda: make().astype(like.dtype), out_shardings=like.sharding)


def step_seconds(preset: str, context: int, slots: int, kernels: str) -> float:
    """The time of a decode step when every slot has sampled `context` tokens; best of repeats.

    Raises MemoryError where the weights leave no room for a slot.
    """
    if slots < 1:
        raise MemoryError("the weights leave no room for a slot")
    how = {"rollout__max_prompt_tokens": 1, "model__compute_dtype": "bfloat16"}
    how["rollout__max_response_tokens"] = pages_of(context) * FLAGS.page_tokens
    built = common.programs(preset, devices=jax.devices()[:1], **how)
    mesh, own = built.mesh, pages_of(context)
    cache = Cache(
        slots=slots,
        pages=slots * own + 1,
        prompt_pages=1,
        readers=1,
        page_tokens=FLAGS.page_tokens,
        block_tokens=BLOCK,
        max_prompt_tokens=1,
        max_response_tokens=own * FLAGS.page_tokens,
    )
    chosen, abstract = kernels_for(kernels, platform_of(mesh)), built.engine.params
    engine = Engine(PRESETS[preset], mesh, cache, params=abstract, kernels=chosen)
    engine.sizes = engine.sizes[-1:]  # the program of all slots and pages
    sampling = common.stream(built).sampling
    engine.compile(sampling)
    ((size, _),) = engine.sizes
    rows = np.zeros(size, cache.row_dtype)
    busy = rows[:slots]
    busy["active"], busy["token"], busy["cursor"] = 1, 1, np.arange(slots)
    busy["sampled"], busy["limit"] = context, cache.max_response_tokens
    shuffled = 1 + np.random.default_rng(0).permutation(slots * own)
    busy["response_pages"] = shuffled.reshape(slots, own)
    key_Z = np.stack([jax.random.key_data(jax.random.key(0))])
    key_Z = hosts.place(key_Z, rules.replicated(mesh))

    def random_pages():
        def pool(s):
            page = jax.random.normal(jax.random.key(1), s.shape[1:], s.dtype)
            return jnp.broadcast_to(page, s.shape)

        return jax.tree.map(pool, engine.pages)

    shardings = jax.tree.map(lambda s: s.sharding, engine.pages)
    prompt_pages, pages = jax.jit(random_pages, out_shardings=shardings)()
    params = jax.tree.map(lambda like: maker(like)(), abstract)
    page_P = np.arange(cache.pages, dtype=np.int32)
    seconds = []
    for _ in range(1 + FLAGS.repeats):
        start = time.perf_counter()
        pages, token_SB, _ = engine.decode(
            params, prompt_pages, pages, key_Z, rows, page_P, (sampling,)
        )
        seconds.append((time.perf_counter() - start) / BLOCK)
        assert token_SB.shape == (BLOCK, size)
    return min(seconds[1:])


def torch_step(preset: str, context: int) -> tuple[str, int, float]:
    """(name with its device, slots, seconds of a step) of transformers, as many slots as fit."""
    c = PRESETS[preset]
    work = {"head_dim": c.head_dim, "tied": int(c.tie_embeddings), "slots": FLAGS.slots}
    script = pathlib.Path(__file__).with_name("torch_decode.py")
    result = common.run_peer(script, c, **work, context=context, repeats=FLAGS.repeats)
    return f"transformers, {result['device']}", result["slots"], result["step_s"]


def update_seconds(preset: str, row_tokens: int) -> float:
    """The time of an update of full rows, layers recomputed, one response a row."""
    built = common.programs(
        preset,
        devices=jax.devices()[:1],
        updates_per_step=1,
        model__compute_dtype="bfloat16",
        rollout__num_prompts=MICRO_BATCHES,
        rollout__group_size=1,
        learner__row_tokens=row_tokens,
        learner__micro_batch_rows=1,
    )
    update, state, rng = built.compile_update(), built.start_state(), np.random.default_rng(0)
    vocab, tokens = built.sizes.vocab_size, row_tokens - PROMPT + 1
    uniform_T = np.full(tokens, -np.log(vocab), np.float32)

    def response() -> Response:
        return Response(rng.integers(1, vocab, tokens).astype(np.int32), uniform_T, False)

    prompts = common.random_prompts(built, MICRO_BATCHES, PROMPT)
    groups = [Group(i, Prompt(prompt), (response(),)) for i, prompt in enumerate(prompts)]
    batch = learner.minibatch(
        groups, rng.normal(size=(MICRO_BATCHES, 1)).astype(np.float32), built.learning, built.mesh
    )

    def one_update():
        nonlocal state
        state, metrics = update(state, None, batch, np.float32(1e-6))
        return metrics

    return common.best_seconds(one_update, repeats=FLAGS.repeats)


def result_or_reason(run, *arguments):
    """(what a run gives, ""), or (None, why there is nothing), so that the other runs go on."""
    try:
        return run(*arguments), ""
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        reason = str(error)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or str(error)).strip().splitlines()[-1]
    return None, " ".join(reason.split())[:60]


def main(_):
    works = [(preset, int(context)) for preset in FLAGS.presets for context in FLAGS.contexts]
    peers = {}
    if FLAGS.torch_python:  # before JAX takes the device's memory
        for work in works:
            peers[work] = result_or_reason(torch_step, *work)
            print(json.dumps([*work, *peers[work]]), flush=True)
    how = {"copy_mib": FLAGS.copy_mib, "product": FLAGS.product, "dtype": "bfloat16"}
    chip = common.measured_chip(**how, devices=jax.devices()[:1])
    decodes, updates = [], []

    def add(rows, first, measured, shown):
        """shown: of what was measured, the last cells."""
        found, reason = measured
        rows.append([*first, *(shown(found) if found is not None else [reason])])
        print(rows[-1], flush=True)

    for preset, context in works:
        device = Device(chip, PRESETS[preset])

        def of_step(seconds, slots, device=device, context=context):
            floor = device.decode_seconds(slots, slots * context)
            milliseconds = f"{seconds * 1e3:.2f}", f"{floor * 1e3:.2f}"
            return [f"{slots / seconds:,.0f}", *milliseconds, f"{floor / seconds:.0%}"]

        slots = slots_that_fit(preset, context)
        for kernels in FLAGS.kernels:
            found = result_or_reason(step_seconds, preset, context, slots, kernels)
            first = [preset, f"{context:,}", kernels, slots]
            add(decodes, first, found, functools.partial(of_step, slots=slots))
        if (preset, context) in peers:
            peer, reason = peers[preset, context]
            by, count, seconds = peer or ("transformers", "", None)
            shown = functools.partial(of_step, slots=count)
            add(decodes, [preset, f"{context:,}", by, count], (seconds, reason), shown)
    for preset in FLAGS.update_presets:
        for row_tokens in map(int, FLAGS.row_tokens):
            work = MICRO_BATCHES * row_tokens, [row_tokens] * MICRO_BATCHES, 1
            least = Device(chip, PRESETS[preset]).update_seconds(*work)

            def of_update(seconds, least=least):
                rate = least / seconds
                return [f"{seconds:.3f}", f"{rate * chip.flop_rate / 1e12:.2f}", f"{rate:.0%}"]

            found = result_or_reason(update_seconds, preset, row_tokens)
            add(updates, [preset, f"{row_tokens:,}"], found, of_update)
    print(f"\n{common.machine()}, commit {common.commit()}; copy {chip.hbm_rate / 1e9:,.0f} GB/s,")
    print(f"product of {FLAGS.product} rows and columns {chip.flop_rate / 1e12:,.2f} TFLOP/s\n")
    header = ["model", "context", "by", "slots", "tokens/s", "ms a step", "floor ms"]
    print(common.table([*header, "of the floor"], decodes))
    print()
    print(common.table(["model", "row", "update s", "TFLOP/s", "of the product"], updates))


if __name__ == "__main__":
    app.run(main)
