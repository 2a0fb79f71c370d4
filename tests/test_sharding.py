"""Four fake devices give one device's samples and log-probs; wrong sizes are named."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from configs import base
from dapo_jax.logprobs import chosen_logprobs
from dapo_jax.sampler import cache
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.setup import components
from dapo_jax.types import Prompt
from models import qwen2
from models.kernels.packed import packed_attention
from models.parameters import param_axes
from models.qwen2 import Qwen2Config
from models.transformer import abstract_params
from sharding import hosts, rules
from sharding.mesh import AXES, make_mesh
from tests.quick import jit
from tests.sampled_step import SAMPLING

SMALL = Qwen2Config(64, 32, 48, 2, 4, 2, 8, True)
# (slices, data, model); the last exceeds the 2 key/value heads
MESHES = [(2, 2, 1), (1, 2, 2), (1, 1, 4)]
PROMPTS = {7: np.array([5, 6, 7]), 100: np.arange(10, 27), 0: np.array([60]), 12: np.arange(20, 27)}
GROUP_SIZE = 8
RUN_KEY = jax.random.key(11)
# Two of the prompts are sampled in another way, with thresholds that devices find together.
STREAMS = (
    Stream(RUN_KEY, SAMPLING),
    Stream(jax.random.key(12), dataclasses.replace(SAMPLING, temperature=1.0, top_p=0.7, top_k=8)),
)


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", jit)
        yield


@pytest.fixture(scope="module")
def params():
    """Makes host arrays, large enough for clearly uneven token probabilities."""
    _, abstract = abstract_params(SMALL)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: rng.normal(0, 0.3, a.shape).astype(a.dtype), abstract)


def build_policy(slices, data, model):
    """Builds what the commands build, for the small model on the first devices as such a mesh.

    Its engine has one decode program, for whatever there is to do.
    """
    config = base.get_config()
    config.model.preset = "small"
    config.model.compute_dtype = "float32"
    config.rollout.max_prompt_tokens = 17
    config.rollout.max_response_tokens = 128
    config.rollout.group_size = 4
    config.rollout.cache_mib = 1
    config.rollout.slot_tokens = 128
    config.rollout.page_tokens = 16
    config.rollout.block_tokens = 4
    config.mesh.slices, config.mesh.data, config.mesh.model = slices, data, model
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(qwen2.PRESETS, "small", SMALL)
        patch.setattr(cache, "PARTS", ((1, 1),))
        devices = jax.devices()[: slices * data * model]
        return components.programs(config, SAMPLING.vocab_size, devices=devices)


def sample(policy, params, prompts):
    """Samples groups in this order: {(cursor, sample): response}, and the session."""
    params = policy.reshard(jax.device_put(params, policy.weight_shardings), None)
    session = Session(policy.engine, params, *STREAMS)
    for cursor, prompt in prompts:
        how = {"group_size": GROUP_SIZE, "stream": int(cursor in (7, 12))}
        session.submit(cursor, Prompt(prompt), **how)
    responses = {}
    while session.unfinished:
        for finished in session.step():
            responses |= {(finished.cursor, i): r for i, r in enumerate(finished.responses)}
    return responses, session


@pytest.fixture(scope="module")
def one_device_samples(params):
    """Samples the reference on a mesh of one device."""
    return sample(build_policy(1, 1, 1), params, PROMPTS.items())[0]


@pytest.fixture(scope="module", params=MESHES[:2], ids=str)
def policy(request):
    """Samples on four devices."""
    return build_policy(*request.param)


def test_every_mesh_samples_what_one_device_samples(policy, params, one_device_samples):
    """Every shard of the data takes part, and in which one a group lands changes no bit."""
    responses, session = sample(policy, params, PROMPTS.items())
    assert responses.keys() == one_device_samples.keys()
    for request, expected in one_device_samples.items():
        response = responses[request]
        assert np.array_equal(response.tokens_T, expected.tokens_T), request
        assert response.stopped == expected.stopped
        assert np.abs(response.behavior_logp_T - expected.behavior_logp_T).max() <= 1e-5, request
    assert len({len(response.tokens_T) for response in responses.values()}) > 5
    cursor_DB = session.blocks[0].cursor_B.reshape(rules.row_degree(policy.mesh), -1)
    assert (cursor_DB >= 0).any(axis=1).all()

    moved, again = sample(policy, params, reversed(PROMPTS.items()))
    assert not np.array_equal(again.blocks[0].cursor_B, session.blocks[0].cursor_B)
    for request, response in moved.items():
        assert np.array_equal(response.tokens_T, responses[request].tokens_T), request
        assert np.array_equal(response.behavior_logp_T, responses[request].behavior_logp_T), request


def collectives(compiled):
    """Finds names and result shapes of the collective operations of a compiled program."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return re.findall(rf"= (\S+?)(?:\{{\S*)? ({names})(?:-start)?\(", compiled.as_text())


def test_sampling_exchanges_nothing_over_data_and_no_cache_over_model(policy):
    """Prefill and decoding: each shard of the data may take as many steps as its own slots need.

    Over "model" go activations, the vocabulary's partial sums and the sampled token.
    """
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


def test_decoding_refuses_more_model_degree_than_key_value_heads():
    with pytest.raises(ValueError, match=r"mesh.model = 4 does not divide .* 2 key/value heads"):
        build_policy(1, 1, 4)


def logprobs_of(graph, mesh, params, tokens_BT, target_BT):
    model = nnx.merge(graph, params)
    position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    one_BT = jnp.ones_like(tokens_BT)
    x_BTD = model.hidden(
        tokens_BT, position_BT, lambda q, k, v: packed_attention(q, k, v, one_BT, one_BT)
    )
    how = {"temperature": 0.7, "vocab_size": 61, "mesh": mesh}
    return chosen_logprobs(x_BTD, model.head(), target_BT, **how)


@pytest.mark.parametrize(("slices", "data", "model"), MESHES[1:])
def test_every_mesh_gives_one_devices_logprobs(params, slices, data, model):
    graph, _ = abstract_params(SMALL)
    mesh = make_mesh(data=data, model=model, slices=slices)
    rng = np.random.default_rng(1)
    tokens_BT, target_BT = rng.integers(0, 61, (2, 8, 10))
    function = jit(functools.partial(logprobs_of, graph, mesh))
    one_device = make_mesh(data=1, model=1, devices=jax.devices()[:1])
    expected = jit(functools.partial(logprobs_of, graph, one_device))(params, tokens_BT, target_BT)
    sharded = jax.device_put(params, learner_shardings(mesh))
    rows = hosts.place((tokens_BT, target_BT), rules.rows(mesh))
    for got, want in zip(function(sharded, *rows), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


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
    function = functools.partial(chosen_logprobs, temperature=1.0, vocab_size=V, mesh=mesh)
    compiled = jit(function, out_shardings=by_rows).lower(*arguments).compile()
    assert collectives(compiled) == [(f"f32[{D},{V}]", "all-gather")]


# The mesh.


def test_a_mesh_takes_all_devices_and_names_its_axes():
    for data, model, shape in ((-1, 2, (2, 2)), (-1, 1, (4, 1)), (1, 4, (1, 4))):
        mesh = make_mesh(data=data, model=model)
        assert dict(mesh.shape) == dict(zip(AXES, (1, *shape), strict=True))
        assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
        assert mesh.devices.size == jax.device_count() == 4


def test_a_mesh_of_chosen_devices():
    devices = jax.devices()[2:]
    mesh = make_mesh(data=-1, model=1, devices=devices)
    assert mesh.devices.ravel().tolist() == devices


def test_slices_are_the_outermost_axis():
    mesh = make_mesh(data=-1, model=2, slices=2)
    assert dict(mesh.shape) == {"slice": 2, "data": 1, "model": 2}
    assert mesh.devices[0].ravel().tolist() == jax.devices()[:2]
    assert rules.rows(mesh).shard_shape((8, 5)) == (4, 5)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU's device, as far as the mesh looks at it."""

    slice_index: int
    platform: str = "tpu"


@pytest.mark.parametrize(
    ("there", "slices", "message"),
    [
        (2, 1, "mesh.slices = 1, but the devices are 2 slices"),
        (1, 2, "mesh.slices = 2, but all devices are of one slice"),
    ],
)
def test_the_number_of_slices_is_what_the_devices_are(there, slices, message):
    devices = [Chip(slice_index=i) for i in range(there) for _ in range(4)]
    with pytest.raises(ValueError, match=message):
        make_mesh(data=-1, model=1, slices=slices, devices=devices)


def test_slices_that_do_not_divide_the_devices_are_refused():
    with pytest.raises(ValueError, match=r"mesh.slices = 3 does not divide the 4 devices"):
        make_mesh(data=-1, model=1, slices=3)


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        (-1, 3, r"mesh.model = 3 does not divide the 4 devices.*nearest .* 2, of \[1, 2, 4\]"),
        (2, 1, r"2 \* 1 = 2, but there are 4 devices.*mesh.data to -1"),
        (0, 1, r"mesh.data = 0 and mesh.model = 1: sizes are at least 1"),
        (1, 0, r"mesh.data = 1 and mesh.model = 0: sizes are at least 1"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_explained(data, model, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(data=data, model=model)


# The rules.


def axes_and_params():
    _, params = abstract_params(SMALL)
    return param_axes(params), params


def learner_shardings(mesh):
    return rules.param_shardings(mesh, *axes_and_params(), rules.LEARNER)


def test_learner_shards_over_both_axes_and_sampler_over_model_only():
    mesh = make_mesh(data=2, model=2)
    learner = learner_shardings(mesh)
    sampler = rules.param_shardings(mesh, *axes_and_params(), rules.SAMPLER)
    assert learner["embed_VD"].spec == PartitionSpec("model", "data")
    assert sampler["embed_VD"].spec == PartitionSpec("model", None)
    assert learner["layers"]["q_DNH"].spec == PartitionSpec(None, "data", "model", None)
    assert sampler["layers"]["q_DNH"].spec == PartitionSpec(None, None, "model", None)
    assert learner["layers"]["down_FD"].spec == PartitionSpec(None, "model", "data")
    assert learner["final_norm_D"].is_fully_replicated
    for sharding in jax.tree.leaves(sampler):
        assert "data" not in jax.tree.leaves(tuple(sharding.spec))


def test_kv_heads_replicate_where_the_model_degree_exceeds_them():
    divided = learner_shardings(make_mesh(data=2, model=2))["layers"]
    replicated = learner_shardings(make_mesh(data=1, model=4))["layers"]
    for name in ("k_DKH", "v_DKH", "k_bias_KH", "v_bias_KH"):
        assert divided[name].spec[-2] == "model"
        assert replicated[name].spec[-2] is None
    assert replicated["q_DNH"].spec[-2] == "model"


@pytest.mark.parametrize(
    ("axis", "size", "message"),
    [
        ("heads", 14, "heads axis of 14 .*mesh.model = 4; choose .* divides 14, as 2 does"),
        ("vocab", 151_937, "vocab axis of 151937 .*mesh.model = 4"),
        ("mlp", 50, "mlp axis of 50 .*mesh.model = 4"),
    ],
)
def test_other_axes_must_divide(axis, size, message):
    mesh = make_mesh(data=1, model=4)
    with pytest.raises(ValueError, match=message):
        rules.named_sharding(mesh, (axis,), (size,), rules.LEARNER)


def test_a_width_that_data_does_not_divide_names_mesh_data():
    mesh = make_mesh(data=4, model=1)
    with pytest.raises(ValueError, match=r"width axis of 30 .*choose a mesh.data that divides 30"):
        rules.named_sharding(mesh, ("width",), (30,), rules.LEARNER)
    assert rules.named_sharding(mesh, ("width",), (30,), rules.SAMPLER).is_fully_replicated


def test_batches_lie_over_data():
    mesh = make_mesh(data=2, model=2)
    assert rules.rows(mesh).shard_shape((8, 5)) == (4, 5)
    assert rules.micro_batches(mesh).shard_shape((3, 8, 5)) == (3, 4, 5)
    assert rules.replicated(mesh).shard_shape((8, 5)) == (8, 5)


# The processes.


def test_place_and_fetch_return_the_same_arrays():
    mesh = make_mesh(data=4, model=1)
    tree = {"a": np.arange(8.0).reshape(8, 1), "b": [np.arange(4)]}
    placed = hosts.place(tree, rules.rows(mesh))
    assert len(placed["a"].addressable_shards) == 4
    assert placed["a"].addressable_shards[1].data.shape == (2, 1)
    jax.tree.map(np.testing.assert_array_equal, hosts.fetch(placed), tree)
