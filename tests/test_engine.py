"""Session and engine sample what they document, and nothing else changes a bit of it."""

import contextlib
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dapo_jax.sampler import cache as cache_module
from dapo_jax.sampler import plan
from dapo_jax.sampler.cache import Cache
from dapo_jax.sampler.decode import Sampling
from dapo_jax.sampler.engine import Engine
from dapo_jax.sampler.sampling import request_keys, uniform_at
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.types import Prompt, Response
from models.kernels import KERNELS
from models.parameters import param_axes
from models.qwen2 import Qwen2Config
from models.transformer import unstack
from sharding import rules
from sharding.mesh import make_mesh
from tests import quick
from tests.quick import random_params

RUN_KEY = jax.random.key(11)

# What is sampled, on a small model: pages of 8 tokens, prompts that fill them in every way.
SMALL = Qwen2Config(64, 32, 48, 2, 4, 2, 8, True)
# The padding has a stop token's id, and the tokenizer has fewer ids than the model has rows.
SAMPLING = Sampling(
    max_response_tokens=20,
    temperature=0.7,
    top_p=1.0,
    top_k=0,
    stop_ids=(3, 17, 40),
    pad_id=3,
    vocab_size=61,
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

# Who samples beside whom: widths at which the order of additions shows, and a tight cache.
WIDE = Qwen2Config(512, 64, 768, 2, 8, 2, 32, True)
TO_THE_LIMIT = dataclasses.replace(
    SAMPLING, max_response_tokens=48, temperature=0.8, stop_ids=(), pad_id=0, vocab_size=500
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


def random_groups(count, seed):
    """Groups of 4, some responses of one token, many of the greatest length."""
    rng = np.random.default_rng(seed)
    return [
        Asked(
            cursor=int(cursor),
            prompt=rng.integers(0, 500, rng.choice([1, 2, 8, 9, 10, 17])),
            max_tokens=tuple(np.minimum(48, rng.integers(1, 90, 4)).tolist()),
        )
        for cursor in rng.permutation(1000)[:count]
    ]


GROUPS = random_groups(16, seed=0)


def build(
    config,
    cache,
    params,
    *,
    parts=((1, 1),),
    decode_options=quick.COMPILER_OPTIONS,
    shards=1,
    kernels=KERNELS["cpu"],
):
    """Builds (engine, its parameters) on a device a shard; parts: cache.PARTS, one program."""
    mesh = make_mesh(data=shards, model=1, devices=jax.devices()[:shards])
    params = unstack(jax.tree.map(jnp.asarray, params))
    shardings = rules.param_shardings(mesh, param_axes(params), params, rules.SAMPLER)
    params = jax.device_put(params, shardings)
    abstract = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding), params
    )
    kernels = dataclasses.replace(kernels, decode_options=decode_options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "PARTS", parts)
        return Engine(config, mesh, cache, params=abstract, kernels=kernels), params


def by_request(finished):
    """Maps finished groups to {(cursor, sample): response}."""
    return {(f.cursor, i): response for f in finished for i, response in enumerate(f.responses)}


def drain(session):
    """Samples what is unfinished to its end: {(cursor, sample): response}."""
    responses = {}
    while session.unfinished:
        responses |= by_request(session.step())
    return responses


def sample_prompts(engine, params, sampling, *, run_key=RUN_KEY, prompts=PROMPTS):
    """Samples all prompts: ({(cursor, sample): response}, session)."""
    session = Session(engine, params, Stream(run_key, sampling))
    for cursor, prompt in prompts.items():
        session.submit(cursor, Prompt(prompt), group_size=GROUP_SIZE)
    return drain(session), session


@pytest.fixture(scope="module")
def small():
    return random_params(SMALL)


@pytest.fixture(scope="module")
def roomy(small):
    """(engine, params) of the small model; every request's pages fit at once."""
    return build(SMALL, ROOMY, small[1])


@pytest.fixture(scope="module")
def sampled(roomy):
    """({(cursor, sample): response}, session) of all prompts at once."""
    return sample_prompts(*roomy, SAMPLING)


def forward(graph, params, tokens_BT):
    return nnx.merge(graph, params)(tokens_BT)


jit_forward = quick.jit(forward, static_argnums=0)
jit_request_keys = quick.jit(request_keys)
jit_uniform_at = quick.jit(uniform_at)


def teacher_forced(model, responses, *, prompts=PROMPTS):
    """Computes logits [T, vocab_size] at every response's tokens in one forward pass."""
    rows = [np.concatenate([prompts[c], r.tokens_T]) for (c, _), r in responses.items()]
    tokens_RT = np.zeros((len(PROMPTS) * GROUP_SIZE, 40), np.int32)  # one program for all calls
    for row_T, ids in zip(tokens_RT, rows, strict=False):
        row_T[: len(ids)] = ids
    logits_RTV = np.asarray(jit_forward(*model, tokens_RT))[: len(rows), :, : SAMPLING.vocab_size]
    return {
        request: row_TV[len(prompts[request[0]]) - 1 :][: len(response.tokens_T)]
        for (request, response), row_TV in zip(responses.items(), logits_RTV, strict=True)
    }


def chosen(logits_TV, tokens_T):
    """Computes log softmax(logits) at the tokens, in float64."""
    logits_TV = logits_TV.astype(np.float64)
    logp_TV = logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True)
    return np.take_along_axis(logp_TV, tokens_T[:, None], axis=-1)[:, 0]


def expected_logp(model, responses):
    """Computes the log-probabilities of responses to SAMPLING under teacher forcing, by request."""
    logits = teacher_forced(model, responses)
    return {
        request: chosen(logits[request] / SAMPLING.temperature, response.tokens_T)
        for request, response in responses.items()
    }


# What is sampled.


def test_behavior_logp_equals_teacher_forcing_around_page_boundaries(small, sampled):
    """Prompts have 1, C, C + 1, C + 2 and the most tokens; responses one to three pages."""
    responses, _ = sampled
    assert len(responses) == len(PROMPTS) * GROUP_SIZE
    expected = expected_logp(small, responses)
    for request, response in responses.items():
        assert np.abs(response.behavior_logp_T - expected[request]).max() <= 1e-5, request
    assert np.std(np.concatenate([r.behavior_logp_T for r in responses.values()])) > 0.5
    assert len({len(r.tokens_T) for r in responses.values()}) > 6


def test_tokens_are_the_documented_function_of_seed_cursor_sample_and_position(small, sampled):
    """Every token is the inverse CDF, in float64, of the teacher-forced distribution.

    Only a uniform number within float32 rounding of a boundary could give a neighbouring token.
    """
    responses, _ = sampled
    logits = teacher_forced(small, responses)
    cursor_R, sample_R = np.array(list(responses)).T
    key_R = jit_request_keys(RUN_KEY, cursor_R, sample_R)
    uniform_TR = [jit_uniform_at(key_R, np.full(len(key_R), t)) for t in range(20)]
    uniform_RT = np.stack(uniform_TR, axis=1)
    for (request, response), uniform_T in zip(responses.items(), uniform_RT, strict=True):
        logits_TV = logits[request].astype(np.float64) / SAMPLING.temperature
        prob_TV = np.exp(logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True))
        uniform_T1 = uniform_T[: len(prob_TV), None]
        expected_T = np.sum(np.cumsum(prob_TV, axis=-1) <= uniform_T1, axis=-1)
        assert np.array_equal(response.tokens_T, expected_T), request


def test_the_stop_token_counts_and_ends_the_response(sampled):
    """The padding's id is a stop id: padding is never taken for a stop."""
    responses = list(sampled[0].values())
    for response in responses:
        is_stop_T = np.isin(response.tokens_T, SAMPLING.stop_ids)
        assert not is_stop_T[:-1].any()
        assert is_stop_T[-1] == response.stopped
        assert response.stopped or len(response.tokens_T) == SAMPLING.max_response_tokens
        assert len(response.tokens_T) == len(response.behavior_logp_T)
        assert np.all(response.behavior_logp_T < 0)
        assert response.tokens_T.max() < SAMPLING.vocab_size
    last = {int(response.tokens_T[-1]) for response in responses if response.stopped}
    assert last == set(SAMPLING.stop_ids)
    assert 0 < np.mean([response.stopped for response in responses]) < 1


def test_each_stream_is_sampled_as_it_says_beside_the_other(small, roomy, sampled):
    """Temperature, then top-k, then top-p; log-probs are renormalised over what is left.

    The other's tokens are those of it alone; its logits are scaled in another loop.
    """
    sampling = dataclasses.replace(SAMPLING, temperature=1.5, top_p=0.8, top_k=20)
    session = Session(*roomy, Stream(RUN_KEY, SAMPLING), Stream(RUN_KEY, sampling))
    for (cursor, prompt), stream in itertools.product(PROMPTS.items(), (0, 1)):
        session.submit(cursor, Prompt(prompt), group_size=GROUP_SIZE, stream=stream)
    finished = []
    while session.unfinished:
        finished += session.step()
    plain, responses = (by_request(f for f in finished if f.stream == i) for i in (0, 1))
    for request, response in plain.items():
        assert np.array_equal(response.tokens_T, sampled[0][request].tokens_T)
    logits = teacher_forced(small, responses)
    left_out = []
    for request, response in responses.items():
        logits_TV = logits[request].astype(np.float64) / sampling.temperature
        descending_TV = -np.sort(-logits_TV, axis=-1)
        logits_TV = np.where(logits_TV >= descending_TV[:, 19:20], logits_TV, -np.inf)
        prob_TV = np.exp(logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True))
        # The least logit kept: the first, from the best, at which the mass reaches top_p.
        cdf_TV = np.cumsum(-np.sort(-prob_TV, axis=-1), axis=-1)
        last_T1 = np.argmax(cdf_TV >= sampling.top_p, axis=-1)[:, None]
        least_T1 = np.take_along_axis(descending_TV, last_T1, axis=-1)
        expected_T = chosen(np.where(logits_TV >= least_T1, logits_TV, -np.inf), response.tokens_T)
        assert np.all(np.isfinite(expected_T)), request
        assert np.abs(response.behavior_logp_T - expected_T).max() <= 1e-5, request
        left_out.append(np.mean(logits_TV < least_T1))
    assert np.mean(left_out) > 0.5


# A request is (seed, cursor, sample): nothing else changes a bit of what it gives.


@contextlib.contextmanager
def compilations():
    """Lists how long each compilation by XLA took, in seconds."""
    seconds = []

    def listen(name, duration, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@dataclasses.dataclass(frozen=True)
class Runs:
    """GROUPS were sampled each in a session of its own, then all in one: {request: response}.

    compiled: compilations in making the programs, and later.
    """

    engine: Engine
    params: Any
    alone: dict
    together: dict
    session: Session
    compiled: tuple[int, int]


def submit(session, group, **stream):
    size = len(group.max_tokens)
    prompt = Prompt(group.prompt)
    session.submit(group.cursor, prompt, group_size=size, max_tokens=group.max_tokens, **stream)


def sample_groups(engine, params, groups):
    """Samples groups that are submitted at once, in order: ({request: response}, session)."""
    session = Session(engine, params, Stream(RUN_KEY, TO_THE_LIMIT))
    for group in groups:
        submit(session, group)
    return drain(session), session


@pytest.fixture(scope="module")
def runs():
    """The cache holds half of what its slots may need; half of the programs of training."""
    engine, params = build(
        WIDE,
        TIGHT,
        random_params(WIDE)[1],
        parts=cache_module.PARTS[1::2],
        decode_options=KERNELS["cpu"].decode_options,
    )
    with compilations() as first:
        engine.compile(TO_THE_LIMIT)
    alone = {}
    with compilations() as later:
        for group in GROUPS:
            alone |= sample_groups(engine, params, [group])[0]
        together, session = sample_groups(engine, params, GROUPS)
    return Runs(engine, params, alone, together, session, (len(first), len(later)))


def preempts(session, responses):
    """Tells whether tokens were sampled twice."""
    sampled = sum(int(block.useful_B.sum()) for block in session.blocks)
    return sampled > sum(len(response.tokens_T) for response in responses.values())


def first(response, shorter):
    """The first tokens of a response, as many as another one has."""
    tokens = len(shorter.tokens_T)
    return Response(response.tokens_T[:tokens], response.behavior_logp_T[:tokens], False)


def same_bits(responses, expected):
    """Asserts equal tokens and log-probabilities, bit for bit; says by how much they differ."""
    tokens, logp = [], {}
    for request, response in responses.items():
        wanted = expected[request]
        if not np.array_equal(response.tokens_T, wanted.tokens_T):
            tokens.append(request)
        elif not np.array_equal(response.behavior_logp_T, wanted.behavior_logp_T):
            logp[request] = float(np.abs(response.behavior_logp_T - wanted.behavior_logp_T).max())
    assert responses
    assert not tokens, f"the tokens of {len(tokens)} of {len(responses)} responses differ"
    assert not logp, (
        f"log-probs of {len(logp)} of {len(responses)} differ, by up to {max(logp.values())}"
    )


def test_programs_of_other_sizes_change_no_bit():
    """XLA's products of 32 and of 128 rows have other bits, and so had a request's log-probs."""
    config = Qwen2Config(512, 64, 192, 2, 4, 2, 16, True)
    cache = dataclasses.replace(
        ROOMY,
        slots=128,
        pages=400,
        prompt_pages=40,
        readers=8,
        block_tokens=8,
        max_response_tokens=48,
        rows=cache_module.XLA_ROWS,
    )
    engine, params = build(
        config,
        cache,
        random_params(config)[1],
        parts=((1 / 4, 1), (1, 1)),
        decode_options=KERNELS["cpu"].decode_options,
    )
    groups = [Asked(cursor, np.arange(3 + cursor % 5), (16,) * 8) for cursor in range(16)]
    alone, _ = sample_groups(engine, params, groups[:1])
    together, session = sample_groups(engine, params, groups)
    assert max(np.sum(block.useful_B > 0) for block in session.blocks) == 128
    same_bits(alone, together)


def test_neighbours_full_slots_and_restarts_change_no_bit(runs):
    assert runs.together.keys() == runs.alone.keys()
    assert preempts(runs.session, runs.together)
    same_bits(runs.together, runs.alone)


@pytest.mark.slow
def test_samples_that_change_shards_keep_every_bit(runs, monkeypatch):
    """Every other group ends soon, so shards run out of work and take samples of others."""
    monkeypatch.setattr(plan, "BALANCE_SLACK", -1.0)
    how = {"decode_options": KERNELS["cpu"].decode_options}
    cache = dataclasses.replace(TIGHT, slots=6, pages=40)
    engine, params = build(WIDE, cache, random_params(WIDE)[1], shards=4, **how)
    limits = [tuple(min(n, 48 if i % 2 else 3) for n in g.max_tokens) for i, g in enumerate(GROUPS)]
    groups = [dataclasses.replace(g, max_tokens=n) for g, n in zip(GROUPS, limits, strict=True)]
    responses, session = sample_groups(engine, params, groups)
    where = {}
    for block in session.blocks:
        for slot in np.flatnonzero(block.cursor_B >= 0).tolist():
            request = int(block.cursor_B[slot]), int(block.sample_B[slot])
            where.setdefault(request, set()).add(slot // cache.slots)
    assert sum(len(shards) > 1 for shards in where.values()) >= 4
    same_bits(
        responses,
        {request: first(response, responses[request]) for request, response in runs.alone.items()},
    )


def test_all_programs_are_compiled_at_first_and_none_later(runs):
    programs = runs.engine._programs
    assert {name for name, *_ in programs} == {"prefill", "decode"}
    assert runs.compiled == (len(programs) + 1, 0)  # and one that makes the pages


# Host and device.


def test_whatever_is_submitted_and_cancelled_no_bit_changes(runs):
    """Submissions, steps and cancellations are random, and the tight cache preempts."""
    rng = np.random.default_rng(0)
    session = Session(runs.engine, runs.params, Stream(RUN_KEY, TO_THE_LIMIT))
    queue = [GROUPS[i] for i in rng.permutation(len(GROUPS))]
    finished, lost = {}, set()
    while queue or session.unfinished:
        for _ in range(min(len(queue), rng.integers(0, 5))):
            submit(session, queue.pop())
        if session.unfinished and rng.random() < 0.3:
            lost.add(int(rng.choice(session.unfinished)[1]))
            session.cancel(*lost.intersection(cursor for _, cursor in session.unfinished))
        finished |= by_request(session.step())
    assert {cursor for cursor, _ in finished} == {g.cursor for g in GROUPS} - lost
    assert len(lost) > 2
    assert session.idle_slots == TIGHT.slots
    same_bits(finished, runs.alone)


# What is refused.


@pytest.mark.parametrize("length", [0, 19])
def test_an_impossible_prompt_is_named(roomy, length):
    session = Session(*roomy, Stream(RUN_KEY, SAMPLING))
    message = f"cursor 8 has {length} tokens.*at least 1.*rollout.max_prompt_tokens = 18"
    with pytest.raises(ValueError, match=message):
        session.submit(8, Prompt(np.ones(length, np.int32)), group_size=1)
    assert session.unfinished == []


def test_pages_that_do_not_divide_into_blocks_are_refused(small):
    with pytest.raises(ValueError, match=r"page_tokens = 8 .* rollout.block_tokens = 3"):
        build(SMALL, dataclasses.replace(ROOMY, block_tokens=3), small[1])


def test_programs_of_many_tokens_have_the_wide_options():
    """A TPU's larger tiles make products of few rows slower: such programs do not have them."""
    kernels = dataclasses.replace(KERNELS["cpu"], wide_options={"xla_no_such_option": True})
    long_prompts = dataclasses.replace(TIGHT, max_prompt_tokens=513, prompt_pages=300)
    few, many = (
        build(WIDE, cache, random_params(WIDE)[1], kernels=kernels)[0].lower(TO_THE_LIMIT)
        for cache in (TIGHT, long_prompts)
    )
    few["prefill", None, 1].compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        many["prefill", None, 1].compile()
