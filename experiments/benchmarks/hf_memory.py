"""Host memory while a Hugging Face checkpoint is read onto devices, and while it is written.

    python -m experiments.benchmarks.hf_memory [--preset=1.5b] [--dtype=float32]

Random bfloat16 weights in files of at most --file_mib are made in --folder, where they stay for
the next run. Each row of the table is a fresh process on the host's CPU, whose devices keep their
arrays in the host's memory, too. So "beyond" is the peak of the resident memory less what was there
before, less the arrays themselves; "arrays" are a process's shards, "largest array" those of one
parameter.
"""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.benchmarks import common
from models.hf import load_params, save_hf
from models.parameters import param_axes
from models.qwen2 import PRESETS
from models.transformer import abstract_params
from sharding import rules
from sharding.mesh import make_mesh

FLAGS = flags.FLAGS
flags.DEFINE_string("preset", "1.5b", "Sizes of the model.")
flags.DEFINE_string("dtype", "float32", "What the arrays have.")
flags.DEFINE_string("folder", "/tmp/hf_memory", "Where checkpoints are made.")
flags.DEFINE_integer("file_mib", 768, "A file of the checkpoint has at most so much.")
flags.DEFINE_list("ways", [], "Of the program itself: data and model ways of the mesh.")
flags.DEFINE_string("address", "", "Of the program itself: where its processes meet.")
flags.DEFINE_integer("process", None, "Of the program itself: its number.")
MIB = 2**20
# What is shown, processes, data ways, model ways
CASES = (("1 device", 1, 1, 1), ("4 devices", 1, 2, 2), ("2 processes, 2 devices each", 2, 2, 2))


def make_checkpoint(config, path: pathlib.Path):
    """Random weights, every layer's the same: no more than one layer's are ever in memory."""
    rng = np.random.default_rng(0)

    def stacked(key_path, leaf):
        one = leaf.shape[1:] if key_path[0].key == "layers" else leaf.shape
        return np.broadcast_to(rng.standard_normal(one, np.float32), leaf.shape)

    params = jax.tree_util.tree_map_with_path(stacked, abstract_params(config)[1])
    save_hf(params, config, path, dtype="bfloat16", max_shard_bytes=FLAGS.file_mib * MIB)


def resident_mib(field: str) -> float:
    """VmRSS (now) or VmHWM (at most, since the start or `forget_peak`) of this process."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def forget_peak():
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def mib(array) -> float:
    """MiB that this process holds of an array."""
    return sum(shard.data.nbytes for shard in array.addressable_shards) / MIB


def measured(work) -> tuple[object, float, float]:
    """(what `work` returns, seconds, MiB of its peak over what was resident before)."""
    forget_peak()
    before, start = resident_mib("VmRSS"), time.perf_counter()
    result = work()
    return result, time.perf_counter() - start, resident_mib("VmHWM") - before


def measure(config, source: pathlib.Path, target: pathlib.Path):
    """One process's part of a case; prints a row's figures as JSON."""
    if FLAGS.process is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(FLAGS.address, num_processes=2, process_id=FLAGS.process)
    data, model = map(int, FLAGS.ways)
    mesh = make_mesh(data=data, model=model, devices=jax.devices())
    _, abstract = abstract_params(config)
    shardings = rules.param_shardings(mesh, param_axes(abstract), abstract, rules.LEARNER)
    params, load_seconds, load_peak = measured(
        lambda: jax.block_until_ready(
            load_params(source, config, dtype=FLAGS.dtype, shardings=shardings)
        )
    )
    held = [mib(leaf) for leaf in jax.tree.leaves(params)]
    _, save_seconds, save_peak = measured(
        lambda: save_hf(params, config, target, dtype="bfloat16", max_shard_bytes=5 * 10**9)
    )
    print(json.dumps([sum(held), max(held), load_peak, load_seconds, save_peak, save_seconds]))


def run_case(processes: int, data: int, model: int) -> list[list[float]]:
    """The figures of every process of a case."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={data * model // processes}",
    }
    module = [sys.executable, "-m", "experiments.benchmarks.hf_memory", *sys.argv[1:]]
    started = []
    for process in range(processes):
        own = [f"--ways={data},{model}"]
        own += [f"--address={address}", f"--process={process}"] if processes > 1 else []
        started.append(subprocess.Popen(module + own, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in started]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main(_):
    config, folder = PRESETS[FLAGS.preset], pathlib.Path(FLAGS.folder)
    source, target = folder / f"{FLAGS.preset}_{FLAGS.file_mib}", folder / "exported"
    if FLAGS.ways:
        measure(config, source, target)
        return
    if not (source / "config.json").exists():
        shutil.rmtree(source, ignore_errors=True)
        make_checkpoint(config, source)
    table = []
    for name, processes, data, model in CASES:
        shutil.rmtree(target, ignore_errors=True)
        for process, figures in enumerate(run_case(processes, data, model)):
            held, largest, load_peak, load_seconds, save_peak, save_seconds = figures
            row = [held, largest, load_peak - held, load_seconds, save_peak, save_seconds]
            shown = f"{name}, process {process}" if processes > 1 else name
            table.append([shown, *(f"{value:,.0f}" for value in row)])
            print(table[-1], flush=True)
    shutil.rmtree(target)
    files = sorted(source.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files) / MIB
    tensor = config.vocab_size * config.width * jnp.dtype(FLAGS.dtype).itemsize / MIB
    print(
        f"\n{FLAGS.preset}, {FLAGS.dtype}: {len(files)} files, {size:,.0f} MiB in bfloat16, the "
        f"largest tensor {tensor:,.0f} MiB; commit {common.commit()}, jax {jax.__version__}; MiB"
    )
    header = ["", "arrays", "largest array", "load: beyond", "s", "export: beyond", "s"]
    print(common.table(header, table))


if __name__ == "__main__":
    app.run(main)
