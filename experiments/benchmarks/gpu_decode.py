"""Decoding and updates on one GPU at Qwen2.5's sizes, against what the GPU can do.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m experiments.benchmarks.gpu_decode \
        [--torch_python=PYTHON]

bf16, random weights. A decode step of 256 slots (or as many as fit) that have sampled 1k, 4k and
16k tokens each, by the GPU's kernels, by plain XLA and by transformers; the floor is the weights
and the live keys and values read once, at the bandwidth of a large copy measured in the same run.
Then an update of rows of 4k, 8k and 22k tokens, one response each: its products' FLOP against the
rate of a large product. Nothing decodes to the context: pages are filled with random numbers, and
every block begins at the same token. To see it work on a CPU:

    python -m experiments.benchmarks.gpu_decode --presets=tiny --contexts=64,256 --slots=32 \
        --page_tokens=32 --kernels=gpu_interpret,xla --update_presets=tiny --row_tokens=256,512 \
        --copy_mib=64 --product=512 --repeats=1
"""

import json
import pathlib
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from dapo_jax.sampler.cache import Cache
from dapo_jax.sampler.engine import Engine, token_bytes
from experiments.benchmarks import common, gpu_update
from models.kernels import kernels_for, platform_of
from models.qwen2 import PRESETS
from sharding import hosts, rules
from sharding.mesh import make_mesh

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


def rates() -> tuple[float, float]:
    """(bytes a second read and written by a copy, FLOP a second of a product in bfloat16)."""
    array = jnp.zeros(FLAGS.copy_mib * 2**19, jnp.bfloat16)
    copy = jax.jit(lambda a: a + 1)
    bandwidth = 2 * array.nbytes / common.best_seconds(lambda: copy(array), repeats=10)
    n = FLAGS.product
    square = jnp.ones((n, n), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    return bandwidth, 2 * n**3 / common.best_seconds(lambda: product(square, square), repeats=10)


def read_bytes(preset: str, slots: int, context: int) -> int:
    """The bytes that a step has to read: the weights without the embedding's, live keys, values."""
    config = PRESETS[preset]
    abstract, _ = common.engine_params(config, one_device(), jnp.bfloat16)
    del abstract["embed_VD"]  # the head is an array of its own
    weights = sum(p.size * p.dtype.itemsize for p in jax.tree.leaves(abstract))
    return weights + slots * context * token_bytes(config, bytes_per_value=2, model_degree=1)


def one_device():
    return make_mesh(data=1, model=1, devices=jax.devices()[:1])


def slots_that_fit(preset: str, context: int) -> int:
    """As many slots as were asked for, or as the device holds."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        return FLAGS.slots
    tokens = -(-(context + BLOCK) // FLAGS.page_tokens) * FLAGS.page_tokens
    weights = read_bytes(preset, 0, 0) + 2 * PRESETS[preset].vocab_size * PRESETS[preset].width
    left = limit - SPARE_BYTES - weights
    return min(FLAGS.slots, left // (read_bytes(preset, 1, tokens) - read_bytes(preset, 0, 0)))


def step_seconds(preset: str, context: int, slots: int, kernels: str) -> float:
    """The time of a decode step when every slot has sampled `context` tokens; best of repeats.

    Raises MemoryError where the weights leave no room for a slot.
    """
    if slots < 1:
        raise MemoryError("the weights leave no room for a slot")
    config, mesh = PRESETS[preset], one_device()
    abstract, make = common.engine_params(config, mesh, jnp.bfloat16)
    own = -(-(context + BLOCK) // FLAGS.page_tokens)
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
    chosen = kernels_for(kernels, platform_of(mesh))
    engine = Engine(config, mesh, cache, params=abstract, kernels=chosen)
    engine.sizes = engine.sizes[-1:]  # the program of all slots and pages
    how = common.sampling(config, cache.max_response_tokens)
    engine.compile(how)
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
    params, page_P = make(), np.arange(cache.pages, dtype=np.int32)
    seconds = []
    for _ in range(1 + FLAGS.repeats):
        start = time.perf_counter()
        pages, token_SB, _ = engine.decode(params, prompt_pages, pages, key_Z, rows, page_P, (how,))
        seconds.append((time.perf_counter() - start) / BLOCK)
        assert token_SB.shape == (BLOCK, size)
    return min(seconds[1:])


def torch_step(preset: str, context: int) -> tuple[str, int, float]:
    """(name with its device, slots, seconds of a step) of transformers, as many slots as fit."""
    c = PRESETS[preset]
    sizes = {
        "layers": c.num_layers,
        "width": c.width,
        "heads": c.num_heads,
        "kv": c.num_kv_heads,
        "head_dim": c.head_dim,
        "mlp": c.mlp_width,
        "vocab": c.vocab_size,
        "tied": int(c.tie_embeddings),
        "slots": FLAGS.slots,
        "context": context,
        "repeats": FLAGS.repeats,
    }
    script = pathlib.Path(__file__).with_name("torch_decode.py")
    command = [FLAGS.torch_python, str(script)]
    command += [item for name, value in sizes.items() for item in (f"--{name}", str(value))]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    result = common.last_json(run.stdout)
    return f"transformers, {result['device']}", result["slots"], result["step_s"]


def result_or_reason(run, *arguments, **options):
    """(what a run gives, ""), or (None, why there is nothing), so that the other runs go on."""
    try:
        return run(*arguments, **options), ""
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
    bandwidth, flop_rate = rates()
    rows = []

    def add(preset, context, party, slots, seconds):
        floor = read_bytes(preset, slots, context) / bandwidth
        shown = [f"{slots / seconds:,.0f}", f"{seconds * 1e3:.2f}", f"{floor * 1e3:.2f}"]
        rows.append([preset, f"{context:,}", party, slots, *shown, f"{floor / seconds:.0%}"])
        print(rows[-1], flush=True)

    def add_reason(preset, context, party, slots, reason):
        rows.append([preset, f"{context:,}", party, slots, reason, "", "", ""])
        print(rows[-1], flush=True)

    for preset, context in works:
        slots = slots_that_fit(preset, context)
        for kernels in FLAGS.kernels:
            seconds, reason = result_or_reason(step_seconds, preset, context, slots, kernels)
            if reason:
                add_reason(preset, context, kernels, slots, reason)
            else:
                add(preset, context, kernels, slots, seconds)
        peer, reason = peers.get((preset, context), (None, ""))
        if reason:
            add_reason(preset, context, "transformers", "", reason)
        elif peer:
            add(preset, context, *peer)
    updates = []
    for preset in FLAGS.update_presets:
        for row_tokens in map(int, FLAGS.row_tokens):
            measured, reason = result_or_reason(
                gpu_update.measure, preset, row_tokens, repeats=FLAGS.repeats
            )
            shown = [reason, "", ""]
            if measured:
                seconds, flop = measured
                rate = flop / seconds
                shown = [f"{seconds:.3f}", f"{rate / 1e12:.2f}", f"{rate / flop_rate:.0%}"]
            updates.append([preset, f"{row_tokens:,}", *shown])
            print(updates[-1], flush=True)
    print(f"\n{common.machine()}, commit {common.commit()}; copy {bandwidth / 1e9:,.0f} GB/s,")
    print(f"product of {FLAGS.product} rows and columns {flop_rate / 1e12:,.2f} TFLOP/s\n")
    header = [
        "model",
        "context",
        "by",
        "slots",
        "tokens/s",
        "ms a step",
        "floor ms",
        "of the floor",
    ]
    print(common.table(header, rows))
    print()
    print(common.table(["model", "row", "update s", "TFLOP/s", "of the product"], updates))


if __name__ == "__main__":
    app.run(main)
