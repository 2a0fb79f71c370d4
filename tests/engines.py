"""Small engines and what they sample: alone, beside others, over a step's end, and in a config."""

import contextlib
import dataclasses
import json
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from flax import nnx

from configs import base
from dapo_jax import learner
from dapo_jax.checkpoints.progress import Progress
from dapo_jax.episodes import End
from dapo_jax.sampler import cache as cache_module
from dapo_jax.sampler.cache import Cache
from dapo_jax.sampler.decode import Sampling
from dapo_jax.sampler.engine import Engine
from dapo_jax.sampler.scheduler import Scheduler
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.setup import components
from dapo_jax.types import Batch, Group, Prompt, Status
from models.kernels import KERNELS, OPTIONS
from models.parameters import param_axes
from models.qwen2 import Qwen2Config
from models.qwen3_moe import Qwen3MoeConfig
from models.transformer import unstack
from sharding import rules
from sharding.mesh import make_mesh

RUN_KEY = jax.random.key(11)

# What is sampled, on a small model: pages of 8 tokens, prompts that fill them in every way.
SMALL = Qwen2Config(64, 32, 48, 2, 4, 2, 8, True)
EXPERTS = Qwen3MoeConfig(
    *(64, 32, 48, 2, 4, 2, 8, True),
    **{"num_experts": 6, "experts_per_token": 2, "expert_width": 24, "norm_topk": True},
)
# The tokenizer has fewer ids than the model has rows.
SAMPLING = Sampling(
    max_response_tokens=20, temperature=0.7, top_p=1.0, top_k=0, stop_ids=(3, 17, 40), vocab_size=61
)
ROOMY = Cache(
    slots=7,
    pages=22,
    prompt_pages=20,
    readers=4,
    page_tokens=8,
    block_tokens=4,
    max_prompt_tokens=18,
    max_response_tokens=20,
)
PROMPTS = {
    7: np.array([5]),
    100: np.arange(10, 18),
    0: np.arange(20, 29),
    1_000_000: np.arange(30, 40),
    12: np.arange(40, 58),
}
GROUP_SIZE = 8  # twice ROOMY.readers: half of a group has pages of its own
FEW = {cursor: PROMPTS[cursor] for cursor in (7, 100, 0, 12)}
TWO = {cursor: PROMPTS[cursor][:17] for cursor in (7, 12)}

# Who samples beside whom: widths at which the order of additions shows, and a tight cache.
WIDE = Qwen2Config(512, 64, 768, 2, 8, 2, 32, True)
TO_THE_LIMIT = dataclasses.replace(
    SAMPLING, max_response_tokens=48, temperature=0.8, stop_ids=(), vocab_size=500
)
TIGHT = dataclasses.replace(
    ROOMY, slots=24, pages=73, prompt_pages=30, max_prompt_tokens=17, max_response_tokens=48
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """One group to submit; its samples end at `max_tokens`, or a stop token before."""

    cursor: int
    prompt: np.ndarray
    max_tokens: tuple[int, ...]


_RNG = np.random.default_rng(0)
GROUPS = [  # some responses of one token, many of the greatest length
    Asked(
        cursor=int(cursor),
        prompt=_RNG.integers(0, 500, _RNG.choice([1, 2, 8, 9, 10, 17])),
        max_tokens=tuple(np.minimum(48, _RNG.integers(1, 90, 4)).tolist()),
    )
    for cursor in _RNG.permutation(1000)[:16]
]


def build(
    config,
    cache,
    params,
    *,
    parts=((1, 1),),
    options=quick.COMPILER_OPTIONS,
    shards=1,
    kernels=KERNELS["cpu"],
):
    """Builds (engine, its parameters) on a device a shard; parts: cache.PARTS, one program.

    options: of the compiler, beside those of a training run.
    """
    mesh = make_mesh(data=shards, model=1, devices=jax.devices()[:shards])
    params = unstack(jax.tree.map(jnp.asarray, params))
    shardings = rules.param_shardings(mesh, param_axes(params), params, rules.SAMPLER)
    params = jax.device_put(params, shardings)
    abstract = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding), params
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIONS, "cpu", OPTIONS["cpu"] | options)
        patch.setattr(cache_module, "PARTS", parts)
        return Engine(config, mesh, cache, params=abstract, kernels=kernels), params


def by_request(groups):
    """Maps finished groups to {(cursor, sample): response}."""
    return {(it.cursor, i): response for it in groups for i, response in enumerate(it.responses)}


def finished(session):
    """Samples what is unfinished to its end: its groups."""
    groups = []
    while session.unfinished:
        groups += session.step()
    return groups


def drain(session):
    """Samples what is unfinished to its end: {(cursor, sample): response}."""
    return by_request(finished(session))


def sample_prompts(
    engine, params, sampling=SAMPLING, *, prompts=PROMPTS, group_size=GROUP_SIZE, **how
):
    """Samples all prompts: ({(cursor, sample): response}, session). how: of a session."""
    session = Session(engine, params, Stream(RUN_KEY, sampling), **how)
    for cursor, prompt in prompts.items():
        session.submit(cursor, Prompt(prompt), group_size=group_size)
    return drain(session), session


@contextlib.contextmanager
def seen_plans():
    """Lists the plans of the blocks that sessions decode meanwhile."""
    plans, next_block = [], Scheduler.next_block

    def seen(*arguments, **more):
        plans.append(next_block(*arguments, **more))
        return plans[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "next_block", seen)
        yield plans


def submit(session, group):
    prompt, size = Prompt(group.prompt), len(group.max_tokens)
    session.submit(group.cursor, prompt, group_size=size, max_tokens=group.max_tokens)


def sample_groups(engine, params, groups):
    """Samples groups that are submitted at once, in order: ({request: response}, session)."""
    session = Session(engine, params, Stream(RUN_KEY, TO_THE_LIMIT))
    for group in groups:
        submit(session, group)
    return drain(session), session


def same_bits(responses, expected, *, atol=0.0):
    """Asserts equal responses and routes, log-probabilities bit for bit or to `atol`."""
    assert responses
    for request, response in responses.items():
        wanted = expected[request]
        assert np.array_equal(response.tokens_T, wanted.tokens_T), request
        assert np.array_equal(response.sampled_T, wanted.sampled_T), request
        assert (response.status, response.measures) == (wanted.status, wanted.measures), request
        assert np.array_equal(response.route_TLA, wanted.route_TLA), request
        gap = np.abs(response.behavior_logp_T - wanted.behavior_logp_T).max()
        assert gap <= atol, f"log-probs of {request} differ by up to {gap}"


forward = quick.jit(lambda graph, params, ids: nnx.merge(graph, params)(ids), static_argnums=0)


def teacher_forced(model, responses):
    """Computes logits [T, vocab_size] at every response's tokens in one forward pass."""
    tokens_RT = np.zeros((40, 60), np.int32)  # one program for all calls
    for row_T, ((cursor, _), response) in zip(tokens_RT, responses.items(), strict=False):
        ids = np.append(PROMPTS[cursor], response.tokens_T)
        row_T[: len(ids)] = ids
    logits_RTV = np.asarray(forward(*model, tokens_RT))[..., : SAMPLING.vocab_size]
    return {
        request: row_TV[len(PROMPTS[request[0]]) - 1 :][: len(response.tokens_T)]
        for (request, response), row_TV in zip(responses.items(), logits_RTV, strict=False)
    }


def chosen(logits_TV, tokens_T):
    """Computes log softmax(logits) at the tokens, in float64."""
    logits_TV = logits_TV.astype(np.float64)
    logp_TV = logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True)
    return np.take_along_axis(logp_TV, tokens_T[:, None], axis=-1)[:, 0]


class Scripted:
    """Environments that answer after a random time, and end an episode after three turns.

    more: tokens that each answer to a sample of an odd number has beside.
    """

    def __init__(self, delay=lambda: 0.0, *, more=0):
        self.delay, self.more, self.ready = delay, more, []

    def is_episode(self, prompt):
        return True

    def close(self, number=None):
        pass

    def ask(self, where, prompt, response, room):
        _, cursor, sample = where
        turns = int(np.sum(np.diff(response.sampled_T.astype(int)) < 0)) + 1
        tokens = [3, 50 + cursor % 7, 51, 52, 53][: 1 + turns + cursor % 3]  # 3 is a stop token
        tokens += [54] * (self.more * (sample % 2))
        waits = response.status is Status.WAITING
        more = waits and turns < 3 and len(tokens) < room
        end = End(Status.STOPPED if waits else Status.CUT, {"turns": turns})
        answer = tokens if more else end
        self.ready.append((time.monotonic() + self.delay(), (where, answer)))

    def answers(self, *, wait):
        while True:
            now = time.monotonic()
            found = sorted((it for at, it in self.ready if at <= now), key=lambda it: it[0])
            self.ready = [it for it in self.ready if it[0] > now]
            if found or not wait or not self.ready:
                return found
            time.sleep(0.001)


SPARE = dataclasses.replace(ROOMY, slots=9, pages=60, partial_rollouts=True)
# Pages for a part of what the slots may hold: samples are preempted.
SCARCE = dataclasses.replace(SPARE, pages=13)
OF_FEW = {"prompts": FEW, "group_size": 5}


def interrupted(
    engine, params, *, blocks, sampling=SAMPLING, later=None, keeps=False, environments=lambda: None
):
    """Samples FEW; a step ends after so many blocks, or several do: (responses, what was partial).

    keeps: whether the session goes on, with its keys and values; else another does with what a
    checkpoint has. later: the weights then. environments: makes those of a session.
    """
    responses, partial, session, begun = {}, [], None, dict.fromkeys(FEW, ())
    for steps in (*np.atleast_1d(blocks), 0):
        if session and keeps:
            session.resume(params)
        else:
            if session:
                session.close()
            stream = Stream(RUN_KEY, sampling)
            session = Session(engine, params, stream, environments=environments())
            for cursor, before in begun.items():
                session.submit(cursor, Prompt(FEW[cursor]), group_size=5, begun=before)
        if steps:
            responses |= by_request(group for _ in range(steps) for group in session.step())
            saved = json.dumps(Progress(partial=session.pause()).to_json())
            left = Progress.from_json(json.loads(saved)).partial
            begun, params = {it.cursor: it.responses for it in left}, later or params
            partial += left
    return responses | drain(session), partial


def programs(family: str, folder, *, lora_rank: int = 0, cache=None, parts=((1, 1),), **changes):
    """The programs of a config (changes: keys by section), heads split over two devices.

    There is one for decoding, or those of `parts`, as of `build`. cache: other sizes of its cache
    than those that it plans.
    """
    config = base.get_config()
    settings = {
        **{"model.family": family, "model.path": str(folder), "model.compute_dtype": "float32"},
        **{"rollout.max_prompt_tokens": 17, "rollout.max_response_tokens": 20},
        **{"rollout.num_prompts": 2, "rollout.group_size": 4, "rollout.temperature": 0.7},
        **{"rollout.cache_mib": 1, "rollout.slot_tokens": 20},
        **{"rollout.page_tokens": 8, "rollout.block_tokens": 4, "updates_per_step": 1},
        **{"learner.row_tokens": 48, "learner.micro_batch_rows": 2, "learner.remat": "none"},
        **{"learner.lora_rank": lora_rank, "mesh.data": 1, "mesh.model": 2},
    }
    config.update_from_flattened_dict(settings)
    config.update(changes)
    m = config.mesh
    devices = jax.devices()[: m.slices * m.data * m.model]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "PARTS", parts)
        built = components.programs(config, SAMPLING.vocab_size, devices=devices)
        if cache is None:
            return built
        of, how = built.engine, {"kernels": built.settings.kernels, "params": built.engine.params}
        engine = Engine(of.config, of.mesh, dataclasses.replace(of.cache, **cache), **how)
        return dataclasses.replace(built, engine=engine)


class Step(NamedTuple):
    """A step's results; before: the trained arrays before it, on the host."""

    before: dict
    groups: list[Group]
    batch: Batch
    state: learner.TrainState
    metrics: dict


def begin(built):
    """Makes (state, start weights). No factor of LoRA is 0, as B is before the first update."""
    state = built.start_state()
    if built.settings.lora:
        leaves, tree = jax.tree.flatten(state.params)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        pairs = zip(keys, leaves, strict=True)
        leaves = [leaf + 0.3 * jax.random.normal(key, leaf.shape) for key, leaf in pairs]
        state = dataclasses.replace(state, params=jax.tree.unflatten(tree, leaves))
    return state, built.load_start_weights()


def step(
    built, *, prompts=TWO, group_size=4, sampling=SAMPLING, beside=None, environments=None
) -> Step:
    """Samples a group a prompt and takes an update on them.

    beside: how the same prompts are sampled beside, for another stream; None: they are not.
    """
    state, start = begin(built)
    before = jax.tree.map(np.asarray, state.params)
    params = built.reshard(state.params, start)
    streams = [Stream(RUN_KEY, it) for it in (sampling, beside) if it]
    session = Session(built.engine, params, *streams, environments=environments)
    for cursor, prompt in prompts.items():
        for stream in range(len(streams)):
            session.submit(cursor, Prompt(prompt), group_size=group_size, stream=stream)
    groups = [group for group in finished(session) if not group.stream]
    batch = batch_of(built, groups)
    state, metrics = built.update(state, start, batch, 1e-3)
    return Step(before, groups, batch, state, metrics)


def batch_of(built, groups) -> Batch:
    """Packs groups of which every other response is right."""
    sizes = len(groups), len(groups[0].responses)
    advantage_PG = np.broadcast_to((-1.0) ** np.arange(sizes[1]), sizes).astype(np.float32)
    return learner.minibatch(groups, advantage_PG, built.settings, built.mesh)


def check_step(built, logits_of):
    """Takes a step: its log-probabilities are those of logits_TV = logits_of(tokens_T).

    The update sees the same, and changes every parameter. Returns (before, state after).
    """
    before, groups, _, state, metrics = step(built)
    assert sum(len(group.responses) for group in groups) == 8
    for group in groups:
        for response in group.responses:
            tokens_T = np.concatenate([group.prompt.token_ids, response.tokens_T])
            logits_TV = logits_of(tokens_T)[:-1, : SAMPLING.vocab_size] / SAMPLING.temperature
            expected_T = chosen(logits_TV, tokens_T[1:])[-len(response.tokens_T) :]
            np.testing.assert_allclose(response.behavior_logp_T, expected_T, atol=1e-4)
    assert metrics["ratio_gap"] == 0
    assert metrics["taken"]
    changed = jax.tree.map(lambda a, b: (np.asarray(a) != b).any(), state.params, before)
    assert all(jax.tree.leaves(changed)), changed
    return before, state
