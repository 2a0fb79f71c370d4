"""The decode and prefill programs of real sizes, compiled by the TPU compiler without a TPU.

    TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost TPU_ACCELERATOR_TYPE=v5p-8 \
        JAX_PLATFORMS=cpu python -m experiments.benchmarks.tpu_decode --only=7b

Needs the package libtpu. For every case: does it compile, the bytes that a chip holds (arguments,
temporaries), the largest copy of a cache page in the optimised program, and the floor of a decode
step: weights and live keys and values, read once at the chip's published bandwidth.
"""

import time

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.experimental import topologies

from dapo_jax.sampler.engine import Engine, plan_cache
from experiments.benchmarks import common
from models.qwen2 import PRESETS
from sharding.mesh import make_mesh

FLAGS = flags.FLAGS
flags.DEFINE_string("only", "", "One case.")
PROMPT, RESPONSE = 2_048, 20_480
MEAN_RESPONSE = 4_608  # tokens, the paper's early training (Figure 7)
# preset, topology, tensor parallel ways, cache of a chip in MiB, HBM of a chip in GiB, its
# bandwidth in GB/s (the vendor's pages on each generation)
CASES = {
    "7b": ("7b", "v5e:4x4", 4, 8_192, 16, 819),
    "32b": ("32b", "v5p:8x8x4", 8, 40_960, 95, 2_765),
}


def compile_case(name: str) -> list[list]:
    """Table rows of one case's programs."""
    preset, topology, ways, cache_mib, hbm_gib, bandwidth = CASES[name]
    config = PRESETS[preset]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = make_mesh(data=-1, model=ways, devices=devices)
    params, _ = common.engine_params(config, mesh, jnp.bfloat16)
    cache = plan_cache(
        config,
        cache_bytes=cache_mib * 2**20,
        slot_tokens=MEAN_RESPONSE,
        readers=16,
        page_tokens=128,
        block_tokens=16,
        max_prompt_tokens=PROMPT,
        max_response_tokens=RESPONSE,
        bytes_per_value=2,
        model_ways=ways,
        copies=False,
    )
    engine = Engine(config, mesh, cache, params=params, kernel=True)
    how = common.sampling(config, RESPONSE)
    weights = sum(p.size * p.dtype.itemsize for p in jax.tree.leaves(params)) / ways
    token_bytes = 2 * config.num_layers * config.num_kv_heads // ways * config.head_dim * 2
    live = cache.slots * MEAN_RESPONSE / 2 * token_bytes
    floor_ms = (weights + live) / bandwidth / 1e6
    rows = []
    with jax.set_mesh(mesh):
        lowered = engine.lower(how)
    for (program, _, *sizes), low in lowered.items():
        start = time.perf_counter()
        memory = low.compile().memory_analysis()
        arguments, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        rows.append(
            [
                f"{name} {topology}, TP {ways}",
                f"{program}{sizes}",
                f"{cache.slots} slots, {cache.pages} pages",
                f"{arguments / 2**30:.2f}",
                f"{temporary / 2**30:.2f}",
                f"{(arguments + temporary) / 2**30:.1f} of {hbm_gib}",
                f"{floor_ms:.1f}" if program == "decode" else "",
                f"{time.perf_counter() - start:.0f}",
            ]
        )
        print(rows[-1], flush=True)
    return rows


def main(_):
    names = [FLAGS.only] if FLAGS.only else list(CASES)
    rows = [row for name in names for row in compile_case(name)]
    header = ["case", "program", "a data shard", "arguments GiB", "temporary GiB", "HBM a chip GiB"]
    header += ["floor ms a step", "compile s"]
    print(f"\njax {jax.__version__}, commit {common.commit()}")
    print(common.table(header, rows))


if __name__ == "__main__":
    app.run(main)
