"""Bytes that an update holds on a device, by the length of a row and by what is kept.

    python -m experiments.benchmarks.memory --case=cpu
    TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost TPU_ACCELERATOR_TYPE=v5p-8 \
        JAX_PLATFORMS=cpu python -m experiments.benchmarks.memory --case=7b

The compiler's figures: nothing runs, and a TPU's need the package libtpu instead of a TPU. Rows of
every length with learner.remat = full, then the longest with every other policy.
"""

import time

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.experimental import topologies

from configs import base
from dapo_jax import learner
from dapo_jax.run import build
from experiments.benchmarks import common
from models.transformer import REMAT
from sharding import rules

FLAGS = flags.FLAGS
flags.DEFINE_string("case", "cpu", "cpu, 7b or 32b.")
flags.DEFINE_list("row_tokens", ["2048", "4096", "8192", "16384", "22528"], "Lengths of a row.")
flags.DEFINE_list("remat", list(REMAT), "Policies, of which the longest row is compiled with all.")
MICRO_BATCHES = 16
# preset, dtype of compute, topology (None: this machine's), tensor parallel ways, rows on a data
# shard, HBM of a chip in GiB
CASES = {
    "cpu": ("tiny", "float32", None, 1, 1, None),
    "7b": ("7b", "bfloat16", "v5e:8x8", 4, 1, 16),
    "32b": ("32b", "bfloat16", "v5p:8x8x4", 8, 1, 95),
}


def compiled(name: str, row_tokens: int, remat: str):
    """(compiled update, seconds it took to compile) of one case."""
    preset, dtype, topology, ways, rows, _ = CASES[name]
    config = base.get_config()
    config.model.preset, config.model.compute_dtype = preset, dtype
    config.mesh.model = ways
    config.learner.remat = remat
    devices = jax.devices()[:1]
    if topology:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    policy = build.programs(config, vocab_size=0, devices=devices)
    shape = (MICRO_BATCHES, rows * rules.row_degree(policy.mesh), row_tokens)
    batch = learner.abstract_batch(shape, policy.mesh)
    rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=rules.replicated(policy.mesh))
    start = time.perf_counter()
    program = policy.update.lower(policy.state, None, batch, rate).compile()
    return program, time.perf_counter() - start


def main(_):
    name = FLAGS.case
    lengths = sorted(int(tokens) for tokens in FLAGS.row_tokens)
    others = [(lengths[-1], remat) for remat in FLAGS.remat if remat != "full"]
    table = []
    for tokens, remat in [*((tokens, "full") for tokens in lengths), *others]:
        try:
            program, seconds = compiled(name, tokens, remat)
        except jax.errors.JaxRuntimeError as error:
            table.append([f"{tokens:,}", remat, "", "", str(error).splitlines()[0], ""])
        else:
            memory = program.memory_analysis()
            held, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
            shown = [f"{size / 2**20:,.0f}" for size in (held, temporary, held + temporary)]
            table.append([f"{tokens:,}", remat, *shown, f"{seconds:.0f}"])
        print(table[-1], flush=True)
    preset, dtype, topology, ways, rows, hbm_gib = CASES[name]
    where = f"{topology}, TP {ways}, {hbm_gib} GiB a chip" if topology else common.machine()
    print(f"\n{preset}, {dtype}, {rows} row a data shard, {where}; commit {common.commit()}; MiB")
    header = ["tokens a row", "remat", "arguments", "temporaries", "both", "compile s"]
    print(common.table(header, table))


if __name__ == "__main__":
    app.run(main)
