"""Four fake devices give one device's samples; wrong sizes are named."""

import dataclasses
import functools
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import RUN_KEY, SAMPLING, SMALL, drain, programs, same_bits, seen_plans
from jax.sharding import PartitionSpec
from quick import jit, random_params

from dapo_jax.logprobs import Softmax, chosen_logprobs
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.types import Prompt
from models import qwen2
from models.parameters import param_axes
from models.transformer import abstract_params
from sharding import rules
from sharding.collectives import exchanged
from sharding.mesh import AXES, make_mesh

MESHES = [(2, 2, 1), (1, 2, 2)]  # (slices, data, model)
PROMPTS = {7: np.array([5, 6, 7]), 100: np.arange(10, 27), 0: np.array([60]), 12: np.arange(20, 27)}
GROUP_SIZE = 8
# Two of the prompts are sampled in another way, with thresholds that devices find together.
STREAMS = (
    Stream(RUN_KEY, SAMPLING),
    Stream(jax.random.key(12), dataclasses.replace(SAMPLING, temperature=1.0, top_p=0.7, top_k=8)),
)


ASYNCHRONOUS = """HloModule step

%turn (p: (bf16[64], f32[8])) -> (bf16[64], f32[8]) {
  %s = ((f32[16,8]{1,0}, f32[16]{0}), (f32[8,8]{1,0}, f32[8]{0})) reduce-scatter-start(%a, %b)
  %d = (f32[8,8]{1,0}, f32[8]{0}) reduce-scatter-done(%s)
}

ENTRY %main (p: bf16[64]) -> bf16[64] {
  %g = (bf16[64]{0}, bf16[128]{0}) all-gather-start(%p), dimensions={0}
  %w = (bf16[64], f32[8]) while(%t), body=%turn, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %r = pred[10]{0} all-reduce-start(%q), to_apply=%or
}

%or (x: pred[], y: pred[]) -> pred[] {
}
"""


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", jit)
        yield


@pytest.fixture(scope="module")
def params():
    return random_params(SMALL)[1]


def build_policy(slices, data, model):
    """Builds what the commands build, for the small model on the first devices as such a mesh.

    Its engine has one decode program, for whatever there is to do.
    """
    sizes = {"max_response_tokens": 128, "slot_tokens": 128, "page_tokens": 16}
    mesh = {"slices": slices, "data": data, "model": model}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(qwen2.PRESETS, "small", SMALL)
        return programs("qwen2", "", rollout=sizes, mesh=mesh, model={"preset": "small"})


def sample(policy, params, prompts):
    """Samples groups in this order: {(cursor, sample): response}."""
    params = policy.reshard(jax.device_put(params, policy.weight_shardings), None)
    session = Session(policy.engine, params, *STREAMS)
    for cursor, prompt in prompts:
        how = {"group_size": GROUP_SIZE, "stream": int(cursor in (7, 12))}
        session.submit(cursor, Prompt(prompt), **how)
    return drain(session)


@pytest.fixture(scope="module")
def one_device_samples(params):
    return sample(build_policy(1, 1, 1), params, PROMPTS.items())


@pytest.fixture(scope="module", params=MESHES, ids=str)
def policy(request):
    return build_policy(*request.param)


def test_every_mesh_samples_what_one_device_samples(policy, params, one_device_samples):
    """Every shard of the data takes part, and in which one a group lands changes no bit."""
    with seen_plans() as plans:
        responses = sample(policy, params, PROMPTS.items())
    assert responses.keys() == one_device_samples.keys()
    same_bits(responses, one_device_samples, atol=1e-5)
    assert len({len(response.tokens_T) for response in responses.values()}) > 5
    assert {*plans[0].shard_N.tolist()} == {*range(rules.row_degree(policy.mesh))}

    with seen_plans() as again:
        moved = sample(policy, params, reversed(PROMPTS.items()))
    assert plans[0].group_N.tolist() != again[0].group_N.tolist()
    same_bits(moved, responses)


def collectives(compiled):
    """Finds names and result shapes of the collective operations of a compiled program."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return re.findall(rf"= (\S+?)(?:\{{\S*)? ({names})(?:-start)?\(", compiled.as_text())


def test_sampling_exchanges_nothing_over_data_and_no_cache_over_model(policy):
    """Over "model" go activations, the vocabulary's partial sums and the sampled token."""
    policy.engine.compile(SAMPLING)
    programs = policy.engine._programs.values()
    exchanged = [exchange for program in programs for exchange in collectives(program)]
    if policy.mesh.shape["model"] == 1:
        assert not exchanged
        return
    assert {name for _, name in exchanged} == {"all-reduce", "all-gather"}
    tokens = 16 + policy.engine.cache.padded(policy.engine.cache.slots)
    largest = max(math.prod(map(int, re.findall(r"\d+", shape)[1:])) for shape, _ in exchanged)
    assert largest <= tokens * SMALL.width


def test_the_chunked_head_leaves_rows_on_their_devices():
    """Over data alone only the head's parameters are gathered, never logits or log-probs."""
    mesh = make_mesh(data=4, model=1)
    B, T, D, V = 8, 600, 16, 512
    by_rows = rules.rows(mesh)
    head = rules.named_sharding(mesh, ("width", "vocab"), (D, V), rules.LEARNER)
    arguments = (
        jax.ShapeDtypeStruct((B, T, D), jnp.float32, sharding=by_rows),
        jax.ShapeDtypeStruct((D, V), jnp.float32, sharding=head),
        jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=by_rows),
    )
    function = functools.partial(chosen_logprobs, softmax=Softmax(1.0, V, mesh))
    compiled = jit(function, out_shardings=by_rows).lower(*arguments).compile()
    assert collectives(compiled) == [(f"f32[{D},{V}]", "all-gather")]


@pytest.mark.parametrize(
    ("slices", "data", "model", "shape"),
    [(1, -1, 2, (1, 2, 2)), (2, -1, 1, (2, 2, 1)), (1, 1, 4, (1, 1, 4))],
)
def test_a_mesh_takes_all_devices_and_names_its_axes(slices, data, model, shape):
    mesh = make_mesh(data=data, model=model, slices=slices)
    assert tuple(mesh.shape.items()) == tuple(zip(AXES, shape, strict=True))
    # Slices are outermost, and the first one is the first devices'.
    assert mesh.devices.ravel().tolist() == jax.devices()
    assert rules.rows(mesh).shard_shape((8, 5)) == (8 // (shape[0] * shape[1]), 5)


@pytest.mark.parametrize(
    ("slices", "data", "model", "there", "message"),
    [
        (1, -1, 1, 2, "mesh.slices = 1, but the devices are 2 slices"),
        (2, -1, 1, 1, "mesh.slices = 2, but all devices are of one slice"),
        (3, -1, 1, 0, "mesh.slices = 3 does not divide the 4 devices"),
        (1, -1, 3, 0, r"mesh.model = 3 does not .* the 4 devices.*nearest .* 2, of \[1, 2, 4\]"),
        (1, 2, 1, 0, r"2 \* 1 = 2, but there are 4 devices.*mesh.data to -1"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_explained(slices, data, model, there, message):
    """There: slices of a TPU's devices, or 0, that CPUs stand for any."""
    chips = [types.SimpleNamespace(platform="tpu", slice_index=i // 4) for i in range(4 * there)]
    with pytest.raises(ValueError, match=message):
        make_mesh(data=data, model=model, slices=slices, devices=chips or None)


def shardings(mesh, table=rules.LEARNER):
    _, params = abstract_params(SMALL)
    return rules.param_shardings(mesh, param_axes(params), params, table)


def test_learner_shards_over_both_axes_and_sampler_over_model_only():
    mesh = make_mesh(data=2, model=2)
    learner, sampler = shardings(mesh), shardings(mesh, rules.SAMPLER)
    assert learner["embed_VD"].spec == PartitionSpec("model", "data")
    assert sampler["embed_VD"].spec == PartitionSpec("model", None)
    assert learner["layers"]["q_DNH"].spec == PartitionSpec(None, "data", "model", None)
    assert sampler["layers"]["q_DNH"].spec == PartitionSpec(None, None, "model", None)
    assert learner["layers"]["down_FD"].spec == PartitionSpec(None, "model", "data")


def test_kv_heads_replicate_where_the_model_degree_exceeds_them_and_other_axes_must_divide():
    by_model, by_data = make_mesh(data=1, model=4), make_mesh(data=4, model=1)
    layers = shardings(by_model)["layers"]
    for name in ("k_DKH", "v_DKH", "k_bias_KH", "v_bias_KH"):
        assert layers[name].spec[-2] is None
    assert layers["q_DNH"].spec[-2] == "model"
    with pytest.raises(ValueError, match=r"heads axis of 14 .*mesh.model = 4; .* 14, as 2 does"):
        rules.named_sharding(by_model, ("heads",), (14,), rules.LEARNER)
    with pytest.raises(ValueError, match=r"width axis of 30 .*mesh.data = 4; .* that divides 30"):
        rules.named_sharding(by_data, ("width",), (30,), rules.LEARNER)


def test_bytes_of_collectives_are_those_of_whole_arrays_in_each_turn_of_a_loop():
    """Two devices: 24 numbers are gathered, and in each of 5 turns 12 are added up everywhere.

    As a GPU's text has it: 128 of 2 bytes are gathered, 3 times sums of 16 x 8 and 16 numbers of 4
    bytes are scattered, and 10 of a byte go to all.
    """

    def run(x_N):
        whole_N = jax.lax.all_gather(x_N, "data", tiled=True)
        step = lambda _, y_N: jax.lax.psum(jnp.sin(y_N), "data")  # noqa: E731
        return whole_N, jax.lax.fori_loop(0, 5, step, x_N)

    mesh, parts = make_mesh(data=2, model=1, devices=jax.devices()[:2]), PartitionSpec("data")
    mapped = jax.shard_map(run, mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False)
    compiled = jax.jit(mapped).lower(jnp.zeros(24)).compile()
    assert exchanged(compiled.as_text()) == (1 + 5, 24 * 4 + 5 * 2 * 12 * 4)
    assert exchanged(ASYNCHRONOUS) == (1 + 3 + 1, 256 + 3 * 4 * (16 * 8 + 16) + 2 * 10)
