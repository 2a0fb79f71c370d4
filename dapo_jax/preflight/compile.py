"""Compiles a config's own programs ahead of time, for TPUs and GPUs that are not there."""

import concurrent.futures
import os
import pathlib
import re
import sys
import types

import jax
from jax.experimental import topologies
from ml_collections import ConfigDict

from dapo_jax import learner
from dapo_jax.preflight.chips import CHIPS, chip_of
from dapo_jax.process import hosts
from dapo_jax.setup import components
from sharding.collectives import exchanged

# Where make puts the compilers.
LIBTPU = pathlib.Path(sys.prefix) / "tpu" / "libtpu" / "libtpu.so"
CUDA = pathlib.Path(sys.prefix) / "cuda"
# What XLA asks of a GPU; sizes that a chip does not give are an H100's.
GPU = """platform_name: "CUDA" runtime_version { major: 13 } dnn_version_info { major: 9 }
device_description_str: "%s" gpu_device_info { cuda_compute_capability { major: %d minor: %d }
shared_memory_per_block_optin: %d core_count: %d memory_bandwidth: %d device_memory_size: %d
shared_memory_per_block: 49152 shared_memory_per_core: 233472 l2_cache_size: 52428800
registers_per_block_limit: 65536 registers_per_core_limit: 65536 fpus_per_core: 128
threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048 clock_rate_ghz: 1.98
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 }"""
KERNEL = re.compile(r'custom_call_target="(tpu_custom_call|__gpu\$xla\.gpu\.triton)"')
# With these the compiler asks for no chip and for no metadata server.
COMPILER_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


def topology_devices(topology: str, *, slices: int):
    """Returns a topology's devices, which need not be there; ValueError where none is known."""
    jax.config.update("jax_platforms", "cpu")
    chip = chip_of(topology)
    place = {"TPU_LIBRARY_PATH": str(LIBTPU)} if LIBTPU.exists() else {}
    os.environ.update(place | COMPILER_ENVIRONMENT | os.environ)  # what is set stays
    how = {"platform": "tpu", "topology_name": topology, "num_slices": slices}
    if chip.gpu:
        sys.path.append(str(CUDA))
        how = {"platform": "cuda", "topology": f"{slices}x1x{topology.partition(':')[2]}"}
        how["target_config"] = GPU % (*chip.gpu, chip.hbm_rate, CHIPS[chip.name].hbm_bytes)
    try:
        return topologies.get_topology_desc(**how, **dict(chip.description)).devices
    except Exception as error:  # of several kinds, all from the compiler
        hint = "" if (CUDA if chip.gpu else LIBTPU).exists() else "; `make preflight` installs it"
        raise ValueError(f"--topology={topology}, by its compiler: {error}{hint}") from error


def without_weights(config: ConfigDict) -> ConfigDict:
    """Returns a config with the sizes of its preset, so that no weights are needed."""
    config = config.copy_and_resolve_references()
    if config.model.preset:
        config.model.path = ""
    return config


def any_tokenizer(vocab_size: int) -> types.SimpleNamespace:
    """Stands for the tokenizer, of which programs need only this."""
    return types.SimpleNamespace(stop_ids=(vocab_size - 1,), vocab_size=vocab_size)


def lowered_programs(built: components.Programs) -> dict[str, jax.stages.Lowered]:
    """Returns the config's programs by name, ready for the compiler: the largest of each kind.

    Prefill and the update are those of the longest rows, decoding is that of all rows.
    """
    config, ids = built.config, any_tokenizer(built.sizes.vocab_size)
    sampling = components.sampling(config, ids)
    streams = components.eval_streams(config, ids, {}) if config.eval.every_steps else ()
    with jax.set_mesh(built.mesh), hosts.saying_seconds("tracing the sampler's programs", say):
        programs = {"reshard": built.reshard.lower(built.state.params, built.start_weights)}
        sampler = built.engine.lower(sampling, *(stream.sampling for stream in streams))
    by_size = sorted(sampler.items(), key=lambda item: item[0][2:])
    programs |= {kind: lowered for (kind, *_), lowered in by_size}
    row_tokens = learner.row_lengths(built.settings)[-1]
    with hosts.saying_seconds(f"tracing the update of rows of {row_tokens} tokens", say):
        return built.lower_learner(row_tokens) | programs  # the longest compile first


def compiled_programs(built: components.Programs) -> dict:
    """Compiles the config's programs in parallel, as `compiled` does each, and says how far."""
    lowered, workers = lowered_programs(built), os.cpu_count()
    say(f"{len(lowered)} programs to compile, {workers} at once; the update takes longest")
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return dict(zip(lowered, pool.map(compiled, lowered, lowered.values()), strict=True))


def say(message: str) -> None:
    """Shows progress, apart from the result."""
    print(message, file=sys.stderr, flush=True)


def compiled(name: str, lowered: jax.stages.Lowered) -> tuple:
    """Compiles a program: (memory of a device, our kernels, collectives, bytes that they exchange).

    Kernels are counted as the text has them, once for all layers of a loop. Raises MemoryError
    where the memory is too small.
    """
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = next(line for line in str(error).splitlines() if "RESOURCE_EXHAUSTED" in line)
        raise MemoryError(f"{name}: {said}") from error
    say(f"compiled {name}")
    text = program.as_text()
    return program.memory_analysis(), len(KERNEL.findall(text)), *exchanged(text)
