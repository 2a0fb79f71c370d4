"""Compiles a config's own programs ahead of time, for TPUs that are not there.

Needs the package libtpu, which holds the TPU's compiler: `make preflight` installs it beside the
environment.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import time
import types
from collections.abc import Callable

import jax
from jax.experimental import topologies
from ml_collections import ConfigDict

from dapo_jax import learner
from dapo_jax.cli import compile_cache
from dapo_jax.logs import files
from dapo_jax.preflight.chips import chip_of
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
KEPT = 200  # programs of this command and of earlier ones: their sizes
# The mean prompt of the paper's training data, with Qwen2.5's tokenizer.
PROMPT_TOKENS = 145


class DoesNotFit(Exception):
    """A program that needs more memory than there is."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program on one device; arguments, temporaries: bytes."""

    arguments: int
    temporaries: int
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
    if "TPU_LIBRARY_PATH" not in os.environ and importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "the TPU's compiler, libtpu, is missing: `make preflight CONFIG=configs/FILE.py "
            f"TOPOLOGY={topology}` installs it beside the environment and does the same"
        )
    name = f"{chip.name}:{topology.partition(':')[2]}"
    several = {"num_slices": slices} if slices > 1 else {}
    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=name, **several, **dict(chip.description)
        )
    except Exception as error:  # of several kinds, all from the compiler
        raise ValueError(f"--topology={topology}: {error}") from error
    return description.devices


def without_weights(config: ConfigDict) -> ConfigDict:
    """Returns a config with the sizes of its preset, so that no weights are needed."""
    config = config.copy_and_resolve_references()
    if config.model.preset:
        config.model.path = ""
    return config


def mean_prompt(config: ConfigDict) -> int:
    """Returns the tokens of a prompt of mean length, cut at the config's limit."""
    return min(PROMPT_TOKENS, config.rollout.max_prompt_tokens)


def decode_name(rows: int, all_rows: int) -> str:
    """Returns the name of the decoding program for so many rows."""
    return "decode" if rows == all_rows else f"decode[{rows}]"


def update_name(row_tokens: int, config: ConfigDict) -> str:
    """Returns the name of the update for rows of this length."""
    return "update" if row_tokens == config.learner.row_tokens else f"update[{row_tokens}]"


def lowered_programs(built: components.Programs) -> dict[str, jax.stages.Lowered]:
    """Returns the config's programs by name, ready for the compiler.

    Prefill is there for a prompt of mean length and for the longest one, recompute (partial
    rollouts) for the longest response, decoding for all rows ("decode") and for fewer
    ("decode[32]"), the update for the shortest rows ("update") and for longer ones
    ("update[1024]").
    """
    config, sizes = built.config, built.sizes
    ids = types.SimpleNamespace(  # stands for the tokenizer, of which programs need only this
        stop_ids=(sizes.vocab_size - 1,), pad_id=0, vocab_size=sizes.vocab_size
    )
    sampling = components.sampling(config, ids)
    evaluating = components.eval_samplings(config, ids).values() if config.eval.every_steps else ()
    with jax.set_mesh(built.mesh):
        sampler = built.engine.lower(sampling, *evaluating)
        programs = {"reshard": built.reshard.lower(built.state.params, built.start_weights)}
    decodes = {key[2]: low for key, low in sampler.items() if key[0] == "decode"}
    for rows, lowered in decodes.items():
        programs[decode_name(rows, max(decodes))] = lowered
    prefills = sorted(key[2] for key in sampler if key[0] == "prefill")
    cache = built.engine.cache
    mean_bucket = cache.prompt_buckets.of(cache.pages_of_prompt(mean_prompt(config)))
    for bucket in sorted({mean_bucket, *prefills[-1:]} - {0}):
        programs[f"prefill[{bucket}]"] = sampler["prefill", None, bucket]
    for bucket in cache.recompute_buckets.sizes[-1:]:
        programs[f"recompute[{bucket}]"] = sampler["recompute", None, bucket]
    if copies := [key for key in sampler if key[0] == "copy"]:
        programs["copy"] = sampler[max(copies)]
    for row_tokens in learner.row_lengths(built.learning):
        programs[update_name(row_tokens, config)] = built.lower_update(row_tokens)
    return programs


def compiled_programs(
    built: components.Programs, *, say: Callable[[str], None]
) -> dict[str, Program]:
    """Compiles the config's programs in parallel. Raises DoesNotFit for one that does not.

    Programs of an earlier, stopped command are taken from there. say: shows the progress.
    """
    say("tracing the config's programs")
    lowered, programs, workers = lowered_programs(built), {}, os.cpu_count()
    say(f"{len(lowered)} programs to compile, {workers} at once; the update takes longest")
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        longest_first = sorted(lowered, key=lambda name: not name.startswith("update"))
        jobs = {pool.submit(kept, name, lowered[name], built): name for name in longest_first}
        for done, job in enumerate(concurrent.futures.as_completed(jobs), start=1):
            name = jobs[job]
            programs[name], was_kept = job.result()
            mean = statistics.mean(it.compile_seconds for it in programs.values())
            how = "kept from an earlier command"
            if not was_kept:
                left = mean * (len(jobs) - done) / workers
                how = f"compiled in {programs[name].compile_seconds:.0f} s, about {left:.0f} s left"
            say(f"program {done} of {len(jobs)}: {name} {how}")
    return {name: programs[name] for name in lowered}


def kept(
    name: str, lowered: jax.stages.Lowered, built: components.Programs
) -> tuple[Program, bool]:
    """Returns a program, and whether an earlier command has compiled it. Raises DoesNotFit.

    JAX's own cache cannot give it back: it loads programs onto their devices, and none is there.
    """
    path = None
    with contextlib.suppress(OSError, ValueError, TypeError):  # none, or broken
        path = compile_cache.default_folder().parents[1] / "preflight" / digest(lowered, built)
        return Program(**json.loads(path.read_bytes())), True
    program = compiled(name, lowered)
    with contextlib.suppress(OSError, AttributeError):  # a full disk, or no folder at all
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with files.atomic_file(path) as file:
            file.write(json.dumps(dataclasses.asdict(program)).encode())
        for old in sorted(path.parent.iterdir(), key=lambda it: it.stat().st_mtime)[:-KEPT]:
            old.unlink()
    return program, False


def digest(lowered: jax.stages.Lowered, built: components.Programs) -> str:
    """Returns the SHA-256 of all that decides a compiled program; this code has the options."""
    root, parts = pathlib.Path(__file__).parents[2], ("dapo_jax", "models", "sharding")
    code = sorted(path for part in parts for path in (root / part).rglob("*.py"))
    environment = (i for i in os.environ.items() if i[0].startswith(("JAX_", "TPU_", "XLA_")))
    found = [jax.__version__, lowered.as_text(), *map(str, built.mesh.devices.flat)]
    found += [*map(str, sorted(environment)), *(path.read_text() for path in code)]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


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
        compile_seconds=seconds,
    )
