"""The shared part of the benchmarks: the peers' model sizes, a config's programs, a table."""

import csv
import json
import os
import pathlib
import subprocess
import time
import types
from collections.abc import Sequence
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from configs import base
from dapo_jax.logs.provenance import code_version
from dapo_jax.preflight.chips import Chip
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.setup import auto_sizes, components
from dapo_jax.types import Group, Prompt
from models.qwen2 import PRESETS, Qwen2Config
from sharding import rules
from sharding.mesh import make_mesh

# By millions of parameters; the sizes at which the peers are timed.
SIZES = {
    "1.25": Qwen2Config(2_048, 128, 512, 4, 4, 2, 32, True),
    "11.8": Qwen2Config(2_048, 384, 1_536, 5, 4, 2, 96, True),
    "135": Qwen2Config(49_152, 576, 1_536, 30, 9, 3, 64, True),  # SmolLM2's
}
NO_STOP = 1 << 30
FLAGS = flags.FLAGS


def commit() -> str:
    """The commit that is measured, with a mark where files were changed since."""
    version = code_version(pathlib.Path(__file__).parents[2])
    if version["commit"] is None:
        return "a copy without git"
    return version["commit"][:7] + ("-dirty" if version["changed"] else "")


def machine() -> str:
    """Devices and versions, for the record."""
    device = jax.devices()[0]
    return (
        f"{jax.device_count()} x {device.device_kind} ({os.uname().machine}), jax {jax.__version__}"
    )


def programs(preset: str, *, requests: int = 0, devices=None, **keys) -> components.Programs:
    """Makes the programs of a config: float32, the defaults but for `keys` (a__b is key a.b).

    requests: how many responses of rollout.slot_tokens the cache has slots for.
    """
    config = base.get_config()
    config.model.preset, config.model.compute_dtype = preset, "float32"
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in keys.items()})
    with mock.patch.dict(PRESETS, SIZES):
        if requests:
            config.rollout.cache_mib = 0
            auto_sizes.fit_cache(config, requests, training=True)
        ids = components.model_sizes(config).vocab_size
        return components.programs(config, ids, devices=devices)


def stream(built: components.Programs) -> Stream:
    """Makes a stream of plain samples that no token ends."""
    vocab_size = built.sizes.vocab_size
    ids = types.SimpleNamespace(stop_ids=(NO_STOP,), vocab_size=vocab_size)
    return Stream(jax.random.key(1), components.sampling(built.config, ids))


def random_prompts(built: components.Programs, count: int, tokens: int) -> np.ndarray:
    """Draws token ids [P, T], the same ones each time."""
    rng = np.random.default_rng(0)
    return rng.integers(1, built.sizes.vocab_size, (count, tokens)).astype(np.int32)


def sample(
    built: components.Programs, params, prompts: Sequence, limits: Sequence[Sequence[int]]
) -> tuple[list[Group], Session, float]:
    """Samples responses of exactly these tokens to the end: (groups, session, wall seconds)."""
    start, groups = time.perf_counter(), {}
    session = Session(built.engine, params, stream(built))
    for cursor, (prompt, tokens) in enumerate(zip(prompts, limits, strict=True)):
        session.submit(cursor, Prompt(prompt), group_size=len(tokens), max_tokens=[*tokens])
    while session.unfinished:
        groups |= {group.cursor: group for group in session.step()}
    return [groups[i] for i in range(len(prompts))], session, time.perf_counter() - start


def best_seconds(run, *, repeats: int) -> float:
    """The least time of a call, after one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times)


def measured_chip(*, copy_mib: int, product: int, dtype, devices=None) -> Chip:
    """Returns a device with the rates of a large copy (read and written) and a large product."""
    mesh = make_mesh(data=-1, model=1, devices=devices)
    ways, rows = rules.row_degree(mesh), rules.rows(mesh)
    values = copy_mib * 2**20 // jnp.dtype(dtype).itemsize
    shapes = (ways, values // 1_024, 1_024), (ways, product, product)  # whole tiles of a TPU
    make = jax.jit(lambda: [jnp.ones(shape, dtype) for shape in shapes], out_shardings=rows)
    array, square = make()
    copy = jax.jit(lambda a: a + 1)
    multiply = jax.jit(lambda a: jnp.einsum("dij,djk->dik", a, a))
    seconds = best_seconds(lambda: copy(array), repeats=10)
    flop_rate = 2 * product**3 / best_seconds(lambda: multiply(square), repeats=10)
    return Chip("measured", 0.0, 2 * array.nbytes / ways / seconds, flop_rate)


def real_lengths(path: str, count: int, longest: int) -> np.ndarray:
    """Lengths of real responses, a quarter of each, cut at `longest` as training cuts them."""
    with pathlib.Path(path).open() as file:
        lengths = np.array([int(row["length_tokens"]) for row in csv.DictReader(file)])
    chosen = np.random.default_rng(0).choice(lengths, count, replace=False)
    return np.clip(np.round(chosen / 4), 1, longest).astype(int)


def define_peer_flags(*, required: bool) -> None:
    """Defines the flags of a comparison with the script of a peer, bench_torch.py."""
    flags.DEFINE_string("peers", None, "Folder of the peer's script.", required=required)
    torch = "Python of an environment with torch and transformers."
    flags.DEFINE_string("torch_python", None, torch, required=required)
    flags.DEFINE_list("sizes", ["1.25", "11.8"], "Millions of parameters; 135 is SmolLM2's size.")


def run_peer(script: pathlib.Path, sizes: Qwen2Config, **work: int) -> dict:
    """Runs a peer's script by the Python of its own environment: its last line of JSON.

    It has the model's sizes and the work's (with _ for -) as flags.
    """
    work |= {"layers": sizes.num_layers, "width": sizes.width, "heads": sizes.num_heads}
    work |= {"kv": sizes.num_kv_heads, "mlp": sizes.mlp_width, "vocab": sizes.vocab_size}
    command = [FLAGS.torch_python, str(script)]
    command += [word for k, v in work.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads([line for line in run.stdout.splitlines() if line.startswith("{")][-1])


def table(header, rows) -> str:
    """A Markdown table; a row may lack its last cells."""
    full = [[*row, *[""] * (len(header) - len(row))] for row in rows]
    lines = [header, ["---"] * len(header), *full]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
