"""The shared part of the benchmarks: the peers' model sizes, an engine, a table."""

import csv
import functools
import json
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.logs.provenance import code_version
from dapo_jax.sampler.cache import Cache
from dapo_jax.sampler.decode import Sampling
from dapo_jax.sampler.engine import Engine
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.types import Prompt
from models.kernels import kernels_for, platform_of
from models.parameters import normal, ones, param_axes
from models.qwen2 import Qwen2Config
from models.transformer import abstract_params, unstack
from sharding import rules
from sharding.mesh import make_mesh

# By millions of parameters; the sizes at which the peers are timed.
SIZES = {
    "1.25": Qwen2Config(2_048, 128, 512, 4, 4, 2, 32, True),
    "11.8": Qwen2Config(2_048, 384, 1_536, 5, 4, 2, 96, True),
    "135": Qwen2Config(49_152, 576, 1_536, 30, 9, 3, 64, True),  # SmolLM2's
}
NO_STOP = 1 << 30


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


def engine_params(config: Qwen2Config, mesh, dtype):
    """(abstract parameters with shardings, a function that makes random ones on the mesh)."""
    abstract = jax.eval_shape(
        lambda p: unstack(jax.tree.map(lambda a: a.astype(dtype), p)), abstract_params(config)[1]
    )
    shardings = rules.param_shardings(mesh, param_axes(abstract), abstract, rules.SAMPLER)
    abstract = rules.abstract(abstract, shardings)
    return abstract, functools.partial(jax.tree.map, lambda a: _maker(a)(), abstract)


@functools.cache
def _maker(like):
    """A program for each kind of array: one for all of them took a GPU's compiler minutes."""
    make = functools.partial(normal if like.ndim > 1 else ones, jax.random.key(0), like.shape)
    return jax.jit(lambda: make().astype(like.dtype), out_shardings=like.sharding)


def make_engine(config: Qwen2Config, *, slots: int, prompt: int, response: int, **cache):
    """(engine on all devices, parameters) with so many slots in all; float32, plain XLA."""
    mesh = make_mesh(data=-1, model=1)
    abstract, make = engine_params(config, mesh, jnp.float32)
    ways = rules.row_degree(mesh)
    engine = Engine(
        config,
        mesh,
        Cache(
            slots=slots // ways,
            max_prompt_tokens=prompt,
            max_response_tokens=response,
            **cache,
        ),
        params=abstract,
        kernels=kernels_for("auto", platform_of(mesh)),
    )
    return engine, make()


def sampling(config: Qwen2Config, response: int) -> Sampling:
    """Plain sampling at temperature 1 that no token ends."""
    return Sampling(
        max_response_tokens=response,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        stop_ids=(NO_STOP,),
        pad_id=0,
        vocab_size=config.vocab_size,
    )


def run_session(engine: Engine, params, groups, how: Sampling) -> tuple[Session, float]:
    """Sample (prompt, tokens of each response) groups to the end: the session and wall seconds."""
    start = time.perf_counter()
    session = Session(engine, params, Stream(jax.random.key(1), how))
    for cursor, (prompt, tokens) in enumerate(groups):
        session.submit(cursor, Prompt(prompt), group_size=len(tokens), max_tokens=tokens)
    while session.unfinished:
        session.step()
    return session, time.perf_counter() - start


def best_seconds(run, *, repeats: int) -> float:
    """The least time of a call, after one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times)


def update_flops(config: Qwen2Config, prompt: int, length_PG: np.ndarray) -> float:
    """Counts an update's products, forward and backward, the prompts computed once a group."""
    _, params = abstract_params(config)
    if not config.tie_embeddings:
        del params["embed_VD"]  # the tied one is the head's, too
    weights = sum(p.size for p in jax.tree.leaves(params))
    tokens = len(length_PG) * (prompt - 1) + length_PG.sum()
    seen = len(length_PG) * prompt * (prompt - 1) / 2
    seen += np.sum(length_PG * (prompt + (length_PG - 1) / 2))
    return 6 * weights * tokens + 12 * config.num_layers * config.num_heads * config.head_dim * seen


def measured_rates(mesh) -> tuple[float, float]:
    """(bytes a second read and written by a copy, FLOP a second of a product), all devices."""
    ways, rows = rules.row_degree(mesh), rules.rows(mesh)
    array = jax.device_put(jnp.zeros((ways, 2**25)), rows)
    copy = jax.jit(lambda a: a + 1, out_shardings=rows)
    bandwidth = 2 * array.nbytes / best_seconds(lambda: copy(array), repeats=10)
    n = 1_024
    a = jax.device_put(jnp.ones((ways, n, n)), rows)
    product = jax.jit(lambda a: jnp.einsum("dij,djk->dik", a, a), out_shardings=rows)
    return bandwidth, ways * 2 * n**3 / best_seconds(lambda: product(a), repeats=10)


def real_lengths(path: pathlib.Path, count: int, longest: int) -> np.ndarray:
    """Lengths of real responses, a quarter of each, cut at `longest` as training cuts them."""
    with path.open() as file:
        lengths = np.array([int(row["length_tokens"]) for row in csv.DictReader(file)])
    chosen = np.random.default_rng(0).choice(lengths, count, replace=False)
    return np.clip(np.round(chosen / 4), 1, longest).astype(int)


def peer_arguments(size: str, **work: int) -> list[str]:
    """The model's sizes and the work's (with _ for -) as flags of the peers' scripts."""
    c = SIZES[size]
    sizes = {
        "layers": c.num_layers,
        "width": c.width,
        "heads": c.num_heads,
        "kv": c.num_kv_heads,
        "mlp": c.mlp_width,
        "vocab": c.vocab_size,
        **{name.replace("_", "-"): value for name, value in work.items()},
    }
    return [item for name, value in sizes.items() for item in (f"--{name}", str(value))]


def last_json(text: str) -> dict:
    """The last line of a peer's output that is a JSON object."""
    return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])


def table(header, rows) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
