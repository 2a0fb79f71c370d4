"""Session and engine sample what they document, and nothing else changes a bit of it."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import (
    GROUP_SIZE,
    GROUPS,
    PROMPTS,
    ROOMY,
    RUN_KEY,
    SAMPLING,
    SMALL,
    TIGHT,
    TO_THE_LIMIT,
    WIDE,
    Asked,
    build,
    by_request,
    chosen,
    finished,
    same_bits,
    sample_groups,
    sample_prompts,
    seen_plans,
    submit,
    teacher_forced,
)
from quick import jit, random_params

from dapo_jax.sampler import cache as cache_module
from dapo_jax.sampler.sampling import request_keys, truncate, uniform_at
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.types import Prompt
from models.kernels.xla import MASKED
from models.qwen2 import Qwen2Config

AS_TRAINED = {"options": {}}


@pytest.fixture(scope="module")
def small():
    return random_params(SMALL)


@pytest.fixture(scope="module")
def roomy(small):
    """(engine, params) of the small model; every request's pages fit at once."""
    return build(SMALL, ROOMY, small[1])


@pytest.fixture(scope="module")
def sampled(roomy):
    """{(cursor, sample): response} of all prompts at once."""
    return sample_prompts(*roomy)[0]


def test_behavior_logp_equals_teacher_forcing_around_page_boundaries(small, sampled):
    """Prompts have 1, C, C + 1, C + 2 and the most tokens; responses one to three pages."""
    assert len(sampled) == len(PROMPTS) * GROUP_SIZE
    logits = teacher_forced(small, sampled)
    for request, response in sampled.items():
        expected_T = chosen(logits[request] / SAMPLING.temperature, response.tokens_T)
        assert np.abs(response.behavior_logp_T - expected_T).max() <= 1e-5, request
    assert np.std(np.concatenate([r.behavior_logp_T for r in sampled.values()])) > 0.5
    assert len({len(r.tokens_T) for r in sampled.values()}) > 6


def test_tokens_are_the_documented_function_of_seed_cursor_sample_and_position(small, sampled):
    """Every token is the inverse CDF, in float64, of the teacher-forced distribution."""
    logits, uniform = teacher_forced(small, sampled), jit(uniform_at)
    run_key_R = jnp.broadcast_to(RUN_KEY, len(sampled))
    key_R = jit(request_keys)(run_key_R, *np.array(list(sampled)).T)
    uniform_RT = np.stack([uniform(key_R, np.full(len(key_R), t)) for t in range(20)], axis=1)
    for (request, response), uniform_T in zip(sampled.items(), uniform_RT, strict=True):
        logits_TV = logits[request].astype(np.float64) / SAMPLING.temperature
        prob_TV = np.exp(logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True))
        uniform_T1 = uniform_T[: len(prob_TV), None]
        expected_T = np.sum(np.cumsum(prob_TV, axis=-1) <= uniform_T1, axis=-1)
        assert np.array_equal(response.tokens_T, expected_T), request


def test_the_stop_token_counts_and_ends_the_response(sampled):
    """The padding's id is a stop id: padding is never taken for a stop."""
    for response in sampled.values():
        is_stop_T = np.isin(response.tokens_T, SAMPLING.stop_ids)
        assert not is_stop_T[:-1].any()
        assert is_stop_T[-1] == response.stopped
        assert response.stopped or len(response.tokens_T) == SAMPLING.max_response_tokens
        assert len(response.tokens_T) == len(response.behavior_logp_T)
        assert np.all(response.behavior_logp_T < 0)
        assert response.tokens_T.max() < SAMPLING.vocab_size
    last = {int(response.tokens_T[-1]) for response in sampled.values() if response.stopped}
    assert last == set(SAMPLING.stop_ids)
    assert 0 < np.mean([response.stopped for response in sampled.values()]) < 1


def test_each_stream_is_sampled_as_it_says_beside_the_other(small, roomy, sampled):
    """Temperature, then top-k, then top-p; log-probs are renormalised over what is left."""
    sampling = dataclasses.replace(SAMPLING, temperature=1.5, top_p=0.8, top_k=20)
    session = Session(*roomy, Stream(RUN_KEY, SAMPLING), Stream(RUN_KEY, sampling))
    for (cursor, prompt), stream in itertools.product(PROMPTS.items(), (0, 1)):
        session.submit(cursor, Prompt(prompt), group_size=GROUP_SIZE, stream=stream)
    groups = finished(session)
    plain, truncated = (by_request(it for it in groups if it.stream == i) for i in (0, 1))
    for request, response in plain.items():
        assert np.array_equal(response.tokens_T, sampled[request].tokens_T)
    logits_TV = np.concatenate([*teacher_forced(small, truncated).values()]) / sampling.temperature
    limits = {"top_p": [sampling.top_p], "top_k": [sampling.top_k], "axis": None}
    is_left_TV = np.asarray(truncate(logits_TV, **limits)) > MASKED
    assert np.mean(is_left_TV) < 0.5
    token_T, logp_T = (
        np.concatenate([getattr(it, name) for it in truncated.values()])
        for name in ("tokens_T", "behavior_logp_T")
    )
    expected_T = chosen(np.where(is_left_TV, logits_TV, -np.inf), token_T)
    assert np.abs(logp_T - expected_T).max() <= 1e-5


@pytest.fixture(scope="module")
def runs():
    """GROUPS were sampled each in a session of its own, then all in one: {request: response}.

    The cache holds half of what its slots may need. compiled: the seconds of each compilation in
    making the programs, and later.
    """
    how = {"parts": ((1 / 2, 1 / 4), (1, 1)), **AS_TRAINED}
    engine, params = build(WIDE, TIGHT, random_params(WIDE)[1], **how)
    compiled, alone = ([], []), {}

    def listen(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled[bool(engine._programs)].append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    engine.compile(TO_THE_LIMIT)
    for group in GROUPS:
        alone |= sample_groups(engine, params, [group])[0]
    together, session = sample_groups(engine, params, GROUPS)
    jax.monitoring.unregister_event_duration_listener(listen)
    names = {"engine": engine, "params": params, "session": session, "compiled": compiled}
    return types.SimpleNamespace(**names, alone=alone, together=together)


def test_programs_of_other_sizes_change_no_bit():
    """On a CPU eight rows have other products than 128, of more terms than 512 above all."""
    config = Qwen2Config(512, 64, 640, 1, 4, 2, 16, True)
    sizes = {"slots": 128, "pages": 400, "prompt_pages": 40, "readers": 8, "block_tokens": 8}
    sizes |= {"max_response_tokens": 48, "rows": cache_module.XLA_ROWS}
    cache, parts = dataclasses.replace(ROOMY, **sizes), ((1 / 16, 1), (1, 1))
    engine, params = build(config, cache, random_params(config)[1], parts=parts, **AS_TRAINED)
    groups = [Asked(cursor, np.arange(3 + cursor % 5), (16,) * 8) for cursor in range(16)]
    alone, _ = sample_groups(engine, params, groups[:1])
    with seen_plans() as plans:
        together, _ = sample_groups(engine, params, groups)
    assert max(len(plan.shard_N) for plan in plans) == 128
    same_bits(alone, together)


def test_neighbours_full_slots_and_restarts_change_no_bit_and_compile_nothing(runs):
    assert runs.together.keys() == runs.alone.keys()
    used = sum(len(response.tokens_T) for response in runs.together.values())
    assert runs.session.stats.busy_slot_steps > used  # preempted
    same_bits(runs.together, runs.alone)
    programs = runs.engine._programs
    assert {name for name, *_ in programs} == {"prefill", "decode"}
    assert [*map(len, runs.compiled)] == [len(programs) + 1, 0]  # one makes the pages


def test_whatever_is_submitted_and_cancelled_no_bit_changes(runs):
    """Submissions, steps and cancellations are random, and the tight cache preempts."""
    rng = np.random.default_rng(0)
    session = Session(runs.engine, runs.params, Stream(RUN_KEY, TO_THE_LIMIT))
    queue = [GROUPS[i] for i in rng.permutation(len(GROUPS))]
    ended, lost = {}, set()
    while queue or session.unfinished:
        for _ in range(min(len(queue), rng.integers(0, 5))):
            submit(session, queue.pop())
        if session.unfinished and rng.random() < 0.3:
            _, cursor = rng.choice(session.unfinished).tolist()
            lost.add(cursor)
            session.cancel(cursor)
        ended |= by_request(session.step())
    assert {cursor for cursor, _ in ended} == {g.cursor for g in GROUPS} - lost
    assert len(lost) > 2
    assert session.idle_slots == TIGHT.slots
    same_bits(ended, runs.alone)
