"""Gradients in bfloat16 against float32, parameter by parameter, at as many tokens as a row has.

A sum in bfloat16, with 8 bits, stops growing once it is 256 times its terms; a row of the embedding
is the sum of what thousands of tokens say.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from engines import SAMPLING, programs
from quick import equations, jit
from updates import SETTINGS, gradient

from dapo_jax import learner
from dapo_jax.learner import make_batch
from dapo_jax.sampler import engine
from dapo_jax.setup import components
from dapo_jax.types import Batch, Group, Prompt, Response, Status
from models.lora import MATRICES, Lora, init_adapters
from models.precision import rounded
from models.qwen2 import PRESETS, Qwen2Config
from models.transformer import abstract_params
from sharding.mesh import make_mesh

# Without clips, where a ratio near a bound rounds to either side of it, and in float32 too.
SMOOTH = dataclasses.replace(
    SETTINGS, remat="none", eps_low=1e6, eps_high=1e6, dual_clip=1e6, max_grad_norm=1e6
)
ROUNDING = 0.025  # of a parameter's gradient; measured 0.003 to 0.016


def model(*, vocabulary: int, width: int, layers: int, tied: bool) -> Qwen2Config:
    return Qwen2Config(vocabulary, width, 3 * width, layers, 4, 2, width // 4, tied)


def random_weights(sizes: Qwen2Config):
    """Makes random weights of a size that training leaves, scales around 1."""
    rng = np.random.default_rng(0)

    def one(path, abstract):
        middle = 1.0 if "norm" in path[-1].key else 0.0
        return rng.normal(middle, 0.05, abstract.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(one, abstract_params(sizes)[1])


def zipf_batch(sizes: Qwen2Config) -> Batch:
    """Packs responses of 256 tokens that follow Zipf's law; most of them are better than others.

    Two micro-batches of eight rows.
    """
    rng = np.random.default_rng(1)
    share_V = 1 / np.arange(1, sizes.vocab_size + 1)
    R = 64
    ids_RT = rng.permutation(sizes.vocab_size)[
        rng.choice(sizes.vocab_size, (R, 256), p=share_V / share_V.sum())
    ].astype(np.int32)
    behavior = np.full(248, -0.95 * np.log(sizes.vocab_size), np.float32)
    groups = [
        Group(i, Prompt(ids_T[:8], None), (Response(ids_T[8:], behavior, Status.STOPPED),))
        for i, ids_T in enumerate(ids_RT)
    ]
    rows = {"row_tokens": 1_024, "row_lengths": 1, "micro_batch_rows": 8, "update_responses": 16}
    how = dataclasses.replace(SMOOTH, overlong_filtering=False, **rows)
    batch = make_batch(groups, rng.normal(1, 0.5, (R, 1)).astype(np.float32), how)
    assert batch.num_micro == 2
    return batch


def errors(actual, expected) -> dict[str, float]:
    """Measures each parameter's |difference| / |expected|, in Euclidean norms."""

    def relative(a, b):
        return float(np.linalg.norm(np.float64(a) - b) / np.linalg.norm(np.float64(b)))

    tree = jax.tree_util.tree_leaves_with_path(jax.tree.map(relative, actual, expected))
    return {jax.tree_util.keystr(path): error for path, error in tree}


def check(sizes, *, lora=None) -> None:
    batch, weights = zipf_batch(sizes), random_weights(sizes)
    params = weights
    if lora:
        rng = np.random.default_rng(2)
        fresh = init_adapters(sizes, lora, key=jax.random.key(0))
        params = jax.tree.map(lambda a: rng.normal(0, 0.1, a.shape).astype(a.dtype), fresh)
        # Those of the compute dtype, in both.
        weights = jax.device_get(optax.tree.cast(weights, jnp.bfloat16))
    start = weights if lora else None
    single = dataclasses.replace(SMOOTH, lora=lora)
    half = dataclasses.replace(single, compute_dtype="bfloat16")
    widened = optax.tree.cast(start, jnp.float32) if lora else None
    expected = gradient(params, batch, single, start_weights=widened, sizes=sizes)
    found = gradient(params, batch, half, start_weights=start, sizes=sizes)
    wrong = {name: e for name, e in errors(found, expected).items() if not e < ROUNDING}
    assert not wrong, wrong
    if not lora:
        often = np.bincount(batch.tokens_BT.ravel()).argmax()
        row = errors(found["embed_VD"][often], expected["embed_VD"][often])
        assert max(row.values()) < ROUNDING, row


def test_biases_and_scales_are_rounded_once_and_their_gradients_are_not():
    value = jnp.float32(1 + 2**-7 + 2**-9)
    assert rounded(value, jnp.bfloat16) == jnp.float32(1 + 2**-7)
    assert rounded(value, jnp.float32) == value
    assert jax.grad(lambda v: 3.001 * rounded(v, jnp.bfloat16))(value) == jnp.float32(3.001)


def test_every_gradient_in_bfloat16_is_float32s_to_rounding():
    check(model(vocabulary=1_024, width=16, layers=1, tied=False))


@pytest.mark.slow
def test_every_gradient_of_factors_is_float32s_to_rounding():
    lora = Lora(rank=4, alpha=8.0, targets=tuple(MATRICES))
    check(model(vocabulary=1_024, width=16, layers=1, tied=True), lora=lora)


SUMS = ("dot_general", "reduce_sum", "scatter-add", "psum", "reduce_scatter", "add_any")


def sums_of_shapes(jaxpr, shapes):
    """Yields (primitive, shape, dtype) of each sum in a jaxpr of such a shape."""
    for eqn in equations(jaxpr):
        for out in eqn.outvars:
            shape = tuple(sorted(n for n in out.aval.shape if n > 1))
            if eqn.primitive.name in SUMS and shape in shapes:
                yield eqn.primitive.name, shape, out.aval.dtype


@pytest.mark.parametrize("tied", [True, False])
def test_what_devices_add_up_is_float32(tied):
    """CPUs add bfloat16 in float32 whatever the program says, so this reads the program."""
    sizes = Qwen2Config(211, 24, 104, 2, 3, 1, 10, tied)  # no two axes alike
    graph, params = abstract_params(sizes)
    mesh = make_mesh(data=2, model=1, devices=jax.devices()[:2])
    half = dataclasses.replace(SMOOTH, compute_dtype="bfloat16")
    loss = functools.partial(learner.micro_batch_loss, graph=graph, mesh=mesh, settings=half)
    fields = Batch.row_fields().items()
    arrays = {name: jax.ShapeDtypeStruct((4, 128), dtype) for name, dtype in fields}
    batch = Batch(**arrays, num_micro=None)
    jaxpr = jax.make_jaxpr(jax.grad(loss, has_aux=True))(params, None, batch)
    shapes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        of_layer = leaf.shape[1:] if "layers" in name else leaf.shape
        # Products are made of matrices, too, with the parameter's other axes as one.
        flat = [(int(np.prod(of_layer[:i])), int(np.prod(of_layer[i:]))) for i in (1, -1)]
        shapes[name] = {tuple(sorted(n for n in one if n > 1)) for one in (of_layer, *flat)}
    found = list(sums_of_shapes(jaxpr.jaxpr, set.union(*shapes.values())))
    seen = {shape for _, shape, _ in found}
    assert all(seen & ways for ways in shapes.values())
    narrow = [(kind, shape) for kind, shape, dtype in found if dtype != jnp.float32]
    assert not narrow, narrow


@pytest.mark.parametrize(
    ("platform", "kernels"), [("gpu", "auto"), ("gpu", "xla"), ("tpu", "auto")]
)
def test_float32_is_float32_and_a_gpu_adds_up_in_one_order(monkeypatch, platform, kernels):
    """Read from all programs of a step: a GPU could round float32 to TF32, a TPU to bfloat16."""

    def jit(jit, function, *, compiler_options=None, **how):
        def lower(*arguments):
            traced = jit(function, **how).trace(*arguments)
            # A GPU's own kernels JAX 0.11 lowers for one that is there.
            if (platform, kernels) != ("gpu", "auto"):
                platforms = ("cuda" if platform == "gpu" else platform,)
                text = traced.lower(lowering_platforms=platforms).as_text()
                dots = [line for line in text.split("\n") if " stablehlo.dot_general " in line]
                assert dots and all("[HIGHEST, HIGHEST]" in dot for dot in dots)
            made.append((traced.jaxpr.jaxpr, compiler_options))

        return types.SimpleNamespace(lower=lower)

    made = []
    monkeypatch.setitem(PRESETS, "tiny", model(vocabulary=98, width=128, layers=1, tied=True))
    for module in (components, engine):
        monkeypatch.setattr(module, "platform_of", lambda mesh: platform)
    monkeypatch.setattr(jax, "jit", functools.partial(jit, jax.jit))
    changes = {"model": {"preset": "tiny", "compute_dtype": "float32", "kernels": kernels}}
    changes |= {"rollout": {"cache_mib": 8, "partial_rollout_steps": 1}, "algo": {"kl_coef": 0.1}}
    changes |= {"learner": {"row_tokens": 160}}
    built = programs("qwen2", "", lora_rank=4, **changes)
    sampler, weights = built.engine.lower(SAMPLING), (built.state.params, built.start_weights)
    batch = learner.abstract_batch(built.settings, 160, built.mesh)
    built.reshard.lower(*weights)
    built.lower_learner(160)
    built.recompute_old_logp.lower(*weights, batch)
    assert {name for name, *_ in sampler} == {"prefill", "decode"}
    assert len(made) == len(sampler) + 3
    for jaxpr, options in made:
        dots = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
        assert {dot.params["precision"] for dot in dots} == {(jax.lax.Precision.HIGHEST,) * 2}
        assert options.get("xla_gpu_deterministic_ops", False) == (platform == "gpu")


def test_a_spread_weight_rounds_as_it_did_and_lies_anywhere_between():
    """On bfloat16's grid a published model's weights hardly follow their updates."""
    w = np.random.default_rng(0).normal(0, 0.05, 50_000)
    w = jnp.asarray(np.append(w, [0.0, -0.0, 1.0, -(2.0**-7), 3e38, 1e-38]), jnp.bfloat16)
    for start in (w.astype(jnp.float32), w.astype(jnp.float32) * (1 + 2**-12)):
        moved = learner.spread(start, jax.random.key(1))
        assert np.array_equal(moved.astype(jnp.bfloat16), start.astype(jnp.bfloat16))
        unit = np.abs(np.exp2(np.floor(np.log2(np.abs(w[:50_000].astype(np.float32)))) - 7))
        part = (moved - w.astype(jnp.float32))[:50_000] / unit
        assert np.histogram(part, 10, (-0.5, 0.5))[0] == pytest.approx(5_000, rel=0.06)
    # The start is refused for what is not finite: none may become a number, nor a large one none.
    bits = np.array([0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x7F800001, 0x7F7FFFFF], np.uint32)
    odd = jnp.tile(jnp.asarray(bits.view(np.float32)), 100)
    np.testing.assert_array_equal(learner.spread(odd, jax.random.key(1)), odd)


@pytest.mark.parametrize(("dtype", "rank"), [("float32", 0), ("bfloat16", 4), ("bfloat16", 0)])
def test_a_start_is_spread_in_bfloat16_alone(monkeypatch, dtype, rank):
    monkeypatch.setattr(jax, "jit", jit)
    monkeypatch.setitem(PRESETS, "tiny", model(vocabulary=98, width=32, layers=1, tied=True))
    changes = {"model": {"preset": "tiny", "compute_dtype": dtype}}
    built = programs("qwen2", "", lora_rank=rank, **changes)

    def start(is_spread):
        built.config.learner.spread_start = is_spread
        params = built.start_params()
        return params, built.reshard(params, built.load_start_weights())

    (plain, plain_policy), (moved, moved_policy) = start(False), start(True)
    jax.tree.map(np.testing.assert_array_equal, plain_policy, moved_policy)
    for a, b in zip(*map(jax.tree.leaves, (plain, moved)), strict=True):
        is_left = (dtype, rank) != ("bfloat16", 0) or not a.any()
        assert np.array_equal(a, b) == is_left
