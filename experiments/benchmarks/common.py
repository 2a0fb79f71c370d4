"""The shared part of the benchmarks: models' sizes, a config's programs, work to sample."""

import csv
import os
import pathlib
import time
import types
from collections.abc import Sequence
from unittest import mock

import jax
import numpy as np

from configs import base
from dapo_jax.logs.provenance import code_version
from dapo_jax.report.runs import commit_text
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.setup import auto_sizes, components
from dapo_jax.types import Group, Prompt
from models.qwen2 import PRESETS, Qwen2Config

# By millions of parameters; the sizes at which the peers are timed.
SIZES = {
    "1.25": Qwen2Config(2_048, 128, 512, 4, 4, 2, 32, True),
    "11.8": Qwen2Config(2_048, 384, 1_536, 5, 4, 2, 96, True),
    "135": Qwen2Config(49_152, 576, 1_536, 30, 9, 3, 64, True),  # SmolLM2's
}
NO_STOP = 1 << 30
MEDIAN, SPREAD = 142, 1.0  # of the CSV's quarters, and of their logarithms


def origin() -> str:
    """Names devices, JAX's version and the commit that is measured, for the record."""
    device, commit = jax.devices()[0], commit_text(code_version(pathlib.Path(__file__).parents[2]))
    where = f"{jax.device_count()} x {device.device_kind} ({os.uname().machine})"
    return f"{where}, jax {jax.__version__}, commit {commit}"


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
    built: components.Programs,
    params,
    prompts: Sequence,
    limits: Sequence[Sequence[int]],
    *,
    of: Stream | None = None,
    environments=None,
) -> tuple[list[Group], Session, float]:
    """Samples responses of at most these tokens to the end: (groups, session, wall seconds).

    of: None: `stream`'s, whose responses have exactly so many.
    """
    start, groups = time.perf_counter(), {}
    session = Session(built.engine, params, of or stream(built), environments=environments)
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


def real_lengths(path: str, count: int, longest: int) -> np.ndarray:
    """Lengths of real responses, a quarter of each, cut at `longest` as training cuts them.

    path: a CSV with the column length_tokens; "": log-normal ones of its median and spread.
    """
    if not path:
        drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SPREAD, count)
        return np.clip(np.round(drawn), 1, longest).astype(int)
    with pathlib.Path(path).open() as file:
        lengths = np.array([int(row["length_tokens"]) for row in csv.DictReader(file)])
    chosen = np.random.default_rng(0).choice(lengths, count, replace=False)
    return np.clip(np.round(chosen / 4), 1, longest).astype(int)
