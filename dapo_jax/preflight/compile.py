"""Compiles a recipe's own programs ahead of time, for TPUs that are not there.

Needs the package libtpu, which holds the TPU's compiler: `make preflight` installs it beside the
environment.
"""

import concurrent.futures
import dataclasses
import os
import pathlib
import sys
import time
import types
from collections.abc import Callable

import jax
from jax.experimental import topologies
from ml_collections import ConfigDict

from dapo_jax.preflight.chips import chip_of
from dapo_jax.run import build

LIBTPU = pathlib.Path(sys.prefix) / "tpu" / "libtpu" / "libtpu.so"  # where make puts it
# With these the compiler asks for no chip and for no metadata server.
COMPILER_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# The mean prompt of the paper's training data, with Qwen2.5's tokenizer.
PROMPT_TOKENS = 145


class DoesNotFit(Exception):
    """A program that needs more memory than there is."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program on one device.

    arguments, temporaries: bytes. text: its optimised, partitioned HLO.
    """

    arguments: int
    temporaries: int
    text: str = dataclasses.field(repr=False)
    compile_seconds: float


def topology_devices(topology: str, *, slices: int):
    """Returns the devices of so many slices, none of which is there.

    Raises ValueError for a topology that the compiler does not have, or without the compiler.
    """
    jax.config.update("jax_platforms", "cpu")
    if LIBTPU.exists():
        os.environ.setdefault("TPU_LIBRARY_PATH", str(LIBTPU))
    for name, value in COMPILER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    chip = chip_of(topology)
    name = f"{chip.name}:{topology.partition(':')[2]}"
    several = {"num_slices": slices} if slices > 1 else {}
    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=name, **several, **dict(chip.description)
        )
    except Exception as error:  # of several kinds, all from the compiler
        if "libtpu" in str(error):
            message = f"the TPU's compiler, libtpu, is missing: run `make preflight` ({error})"
            raise ValueError(message) from error
        raise ValueError(f"--topology={topology}: {error}") from error
    return description.devices


def without_weights(config: ConfigDict) -> ConfigDict:
    """Returns a recipe with the sizes of its preset, so that no weights are needed."""
    config = config.copy_and_resolve_references()
    if config.model.preset:
        config.model.path = ""
    return config


def mean_prompt(config: ConfigDict) -> int:
    """Returns the tokens of a prompt of mean length, cut at the recipe's limit."""
    return min(PROMPT_TOKENS, config.rollout.max_prompt_tokens)


def decode_name(rows: int, all_rows: int) -> str:
    """Returns the name of the decoding program for so many rows."""
    return "decode" if rows == all_rows else f"decode[{rows}]"


def update_name(row_tokens: int, config: ConfigDict) -> str:
    """Returns the name of the update for rows of this length."""
    return "update" if row_tokens == config.learner.row_tokens else f"update[{row_tokens}]"


def lowered_programs(built: build.Programs) -> dict[str, jax.stages.Lowered]:
    """Returns the recipe's programs by name, ready for the compiler.

    Prefill is there for a prompt of mean length and for the longest one, refill (carry-over) for
    the longest response, decoding for all rows ("decode") and for fewer ("decode[32]"), the update
    for the shortest rows ("update") and for longer ones ("update[1024]").
    """
    config, sizes = built.config, built.sizes
    ids = types.SimpleNamespace(  # stands for the tokenizer, of which programs need only this
        stop_ids=(sizes.vocab_size - 1,), pad_id=0, vocab_size=sizes.vocab_size
    )
    sampling = build.sampling(config, ids)
    evaluating = build.eval_samplings(config, ids).values() if config.eval.every_steps else ()
    with jax.set_mesh(built.mesh):
        sampler = built.engine.lower(sampling, *evaluating)
        programs = {"reshard": built.reshard.lower(built.state.params, built.start_weights)}
    decodes = {key[2]: low for key, low in sampler.items() if key[0] == "decode"}
    for rows, lowered in decodes.items():
        programs[decode_name(rows, max(decodes))] = lowered
    prefills = sorted(key[2] for key in sampler if key[0] == "prefill")
    mean_bucket = built.engine.cache.bucket(mean_prompt(config))
    for bucket in sorted({mean_bucket, *prefills[-1:]} - {0}):
        programs[f"prefill[{bucket}]"] = sampler["prefill", None, bucket]
    for bucket in built.engine.cache.refill_buckets[-1:]:
        programs[f"refill[{bucket}]"] = sampler["refill", None, bucket]
    if copies := [key for key in sampler if key[0] == "copy"]:
        programs["copy"] = sampler[max(copies)]
    for row_tokens in build.row_lengths(config):
        programs[update_name(row_tokens, config)] = built.lower_update(row_tokens)
    return programs


def compiled_programs(built: build.Programs, *, say: Callable[[str], None]) -> dict[str, Program]:
    """Compiles the recipe's programs in parallel. Raises DoesNotFit for the first that does not.

    say: reports each that is ready.
    """
    lowered, programs = lowered_programs(built), {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {name: pool.submit(compiled, name, low) for name, low in lowered.items()}
        for name, job in jobs.items():
            programs[name] = job.result()
            say(f"compiled {name} in {programs[name].compile_seconds:.0f} s")
    return programs


def compiled(name: str, lowered: jax.stages.Lowered) -> Program:
    """Compiles a program. Raises DoesNotFit where the memory is too small."""
    start = time.perf_counter()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = next(line for line in str(error).splitlines() if "RESOURCE_EXHAUSTED" in line)
        raise DoesNotFit(f"{name}: {said}") from error
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    return Program(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        text=program.as_text(),
        compile_seconds=seconds,
    )
