"""Compiles a config's own programs ahead of time, for TPUs that are not there."""

import concurrent.futures
import os
import pathlib
import sys
import types

import jax
from jax.experimental import topologies
from ml_collections import ConfigDict

from dapo_jax import learner
from dapo_jax.preflight.chips import chip_of
from dapo_jax.process import hosts
from dapo_jax.setup import components

LIBTPU = pathlib.Path(sys.prefix) / "tpu" / "libtpu" / "libtpu.so"  # where make puts it
# With these the compiler asks for no chip and for no metadata server.
COMPILER_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def topology_devices(topology: str, *, slices: int):
    """Returns a topology's devices, which need not be there; ValueError where none is known."""
    jax.config.update("jax_platforms", "cpu")
    place = {"TPU_LIBRARY_PATH": str(LIBTPU)} if LIBTPU.exists() else {}
    os.environ.update(place | COMPILER_ENVIRONMENT | os.environ)  # what is set stays
    chip = chip_of(topology)
    try:
        return topologies.get_topology_desc(
            platform="tpu", topology_name=topology, num_slices=slices, **dict(chip.description)
        ).devices
    except Exception as error:  # of several kinds, all from the compiler
        hint = "" if LIBTPU.exists() else "; `make preflight` installs the TPU's compiler"
        raise ValueError(f"--topology={topology}: {error}{hint}") from error


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

    Prefill is that of the longest prompt, recompute (partial rollouts, episodes) of the longest
    response, decoding of all rows, the update that of the longest rows.
    """
    config, ids = built.config, any_tokenizer(built.sizes.vocab_size)
    sampling = components.sampling(config, ids)
    streams = components.eval_streams(config, ids) if config.eval.every_steps else ()
    with jax.set_mesh(built.mesh), hosts.saying_seconds("tracing the sampler's programs", say):
        programs = {"reshard": built.reshard.lower(built.state.params, built.start_weights)}
        sampler = built.engine.lower(sampling, *(stream.sampling for stream in streams))
    by_size = sorted(sampler.items(), key=lambda item: item[0][2:])
    programs |= {kind: lowered for (kind, *_), lowered in by_size}
    row_tokens = learner.row_lengths(built.learning)[-1]
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


def compiled(name: str, lowered: jax.stages.Lowered):
    """Returns XLA's analysis of a compiled program's memory on one device.

    Raises MemoryError where that is too small.
    """
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = next(line for line in str(error).splitlines() if "RESOURCE_EXHAUSTED" in line)
        raise MemoryError(f"{name}: {said}") from error
    say(f"compiled {name}")
    return memory
