"""Decode rate on one GPU at Qwen2.5's sizes, against the bandwidth floor.

    python -m experiments.benchmarks.gpu_decode [--torch_python=... --peers=DIR]

bf16, random weights, 256 slots, contexts of 1k, 4k and 16k tokens. The floor is the weights and
the live keys and values read once a step, at the bandwidth of a large copy measured in the same
run. Not run yet: no GPU was at hand.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from dapo_jax.sampler.cache import Cache
from dapo_jax.sampler.engine import Engine
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.types import Prompt
from experiments.benchmarks import common
from models.kernels import kernels_for, platform_of
from models.qwen2 import PRESETS
from sharding.mesh import make_mesh

FLAGS = flags.FLAGS
flags.DEFINE_list("presets", ["0.5b", "1.5b", "7b"], "Names of models.qwen2.PRESETS.")
flags.DEFINE_list("contexts", ["1024", "4096", "16384"], "Tokens of context when measured.")
flags.DEFINE_integer("slots", 256, "Requests decoded at once.")
BLOCK, BLOCKS, PAGE = 16, 4, 128


def copy_bandwidth() -> float:
    """Bytes a second read and written by a copy of 2 GiB."""
    array = jnp.zeros(2**30, jnp.bfloat16)
    copy = jax.jit(lambda a: a + 1)
    copy(array).block_until_ready()
    start = time.perf_counter()
    for _ in range(10):
        array = copy(array)
    array.block_until_ready()
    return 10 * 2 * array.nbytes / (time.perf_counter() - start)


def measure(preset: str, context: int, bandwidth: float) -> list:
    """One row: the rate when every slot has `context` tokens behind it."""
    config = PRESETS[preset]
    mesh = make_mesh(data=-1, model=1)
    abstract, make = common.engine_params(config, mesh, jnp.bfloat16)
    response = BLOCK * (BLOCKS + 1)
    own_pages = -(-response // PAGE)
    cache = Cache(
        slots=FLAGS.slots,
        pages=FLAGS.slots * own_pages + 1,
        prompt_pages=FLAGS.slots * -(-context // PAGE) + 1,
        readers=1,  # every slot reads a context of its own
        page_tokens=PAGE,
        block_tokens=BLOCK,
        max_prompt_tokens=context,
        max_response_tokens=response,
    )
    engine = Engine(
        config, mesh, cache, params=abstract, kernels=kernels_for("auto", platform_of(mesh))
    )
    how = common.sampling(config, response)
    params = make()
    session = Session(engine, params, Stream(jax.random.key(0), how))
    rng = np.random.default_rng(0)
    for cursor in range(FLAGS.slots):
        session.submit(cursor, Prompt(rng.integers(1, 1_000, context)), group_size=1)
    session.step()
    while session.unfinished:
        session.step()
    seconds = min(b.end_seconds - b.start_seconds for b in session.blocks[1:]) / BLOCK
    weights = sum(p.size * p.dtype.itemsize for p in jax.tree.leaves(abstract))
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    floor = (weights + FLAGS.slots * context * token_bytes) / bandwidth
    return [
        preset,
        f"{context:,}",
        f"{FLAGS.slots / seconds:,.0f}",
        f"{seconds * 1e3:.2f}",
        f"{floor * 1e3:.2f}",
        f"{floor / seconds:.0%}",
    ]


def main(_):
    bandwidth = copy_bandwidth()
    rows = []
    for preset in FLAGS.presets:
        for context in map(int, FLAGS.contexts):
            try:
                rows.append(measure(preset, context, bandwidth))
            except jax.errors.JaxRuntimeError as error:  # out of memory: say so and go on
                rows.append([preset, f"{context:,}", str(error).splitlines()[0][:60], "", "", ""])
            print(rows[-1], flush=True)
    print(f"\n{common.machine()}, commit {common.commit()}; copy {bandwidth / 1e9:,.0f} GB/s")
    header = ["model", "context", "tokens/s", "ms a step", "floor ms", "of the floor"]
    print(common.table(header, rows))


if __name__ == "__main__":
    app.run(main)
