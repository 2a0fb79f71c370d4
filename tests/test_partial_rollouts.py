"""Partial rollouts go on as if nothing had been, and nothing is lost.

That runs resume bitwise is in test_episodes.py.
"""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from engines import (
    EXPERTS,
    FEW,
    OF_FEW,
    RUN_KEY,
    SAMPLING,
    SCARCE,
    SMALL,
    SPARE,
    build,
    by_request,
    interrupted,
    same_bits,
    sample_prompts,
    seen_plans,
)
from quick import random_params

from dapo_jax.checkpoints.progress import Progress
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.types import Group, Prompt, Response, Status, Verdict
from models.gemma3 import Gemma3Config
from models.kernels import KERNELS, paged_tpu

# A layer with a window below one without: keys that are computed again depend on what it sees.
WINDOWS = Gemma3Config(64, 32, 48, 2, 4, 2, 8, True, windows=(6, None), query_scalar=8)
CPU, TPU = KERNELS["cpu"], KERNELS["tpu_interpret"]


def test_what_is_between_two_steps_comes_back_from_a_checkpoint_as_it_was():
    rng = np.random.default_rng(0)
    responses = tuple(
        Response(
            *(rng.integers(0, 9, 6, np.int32), rng.normal(size=6).astype(np.float32)),
            *(status, None, None, (2, 6)),
            route_TLA=rng.integers(0, 9, (8, 2, 3), np.uint8) if status is Status.STOPPED else None,
        )
        for status in Status
    )
    played = dataclasses.replace(
        responses[0],
        given_T=np.array([False, False, True, True, False, False]),
        turns=[{"role": "assistant", "content": "5"}, {"role": "environment", "content": "no"}],
        verdict=Verdict(True, "1", "correct", 0.5, {"tries": 2.0}),
        measures={"turns": 2.0},
    )
    assert played.continued().verdict == played.verdict  # its environment gave it
    responses += (played,)
    partial, row = [Group(7, None, responses)], {"step": 3, "reward/mean": 0.1}
    progress = Progress(11, 99, row, partial, {"aime": {"2": 0.25}})
    saved = json.loads(json.dumps(progress.to_json())) | {"of an older version": 1}
    found = Progress.from_json(saved)
    fork = dataclasses.replace(found, cursor=7, partial=())  # without the episodes
    assert found.of_fork() == fork and fork.of_fork() == fork
    assert dataclasses.replace(found, partial=partial) == progress
    (group,) = found.partial
    assert (group.cursor, group.prompt) == (7, None)
    for pair in zip(group.responses, responses, strict=True):
        for ours, theirs in zip(*(vars(it).values() for it in pair), strict=True):
            np.testing.assert_array_equal(ours, theirs)
            assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None)


@pytest.mark.parametrize(
    ("config", "cache", "kernels", "shards", "blocks"),
    [
        (SMALL, SPARE, CPU, 1, (1, 2, 5)),
        (WINDOWS, SCARCE, CPU, 1, (3, 6)),
        (SMALL, dataclasses.replace(SCARCE, slots=5), CPU, 2, (2, 4)),
        pytest.param(WINDOWS, SPARE, TPU, 1, (3,), marks=pytest.mark.slow),
    ],
    ids=["spare", "scarce, windows", "two shards", "tpu_interpret"],
)
def test_a_response_goes_on_as_if_it_had_never_stopped(
    monkeypatch, config, cache, kernels, shards, blocks
):
    """With the same weights its tokens are those of an uninterrupted session."""
    monkeypatch.setattr(paged_tpu, "pages_per_block", lambda v_PKCH: 2)
    params = random_params(config)[1]
    engine, params = build(config, cache, params, shards=shards, kernels=kernels)
    expected, _ = sample_prompts(engine, params, **OF_FEW)
    for after, keeps in itertools.product(blocks, (False, True)):
        responses, partial = interrupted(engine, params, blocks=after, keeps=keeps)
        assert any(len(r.tokens_T) > 0 for it in partial for r in it.responses)
        assert responses.keys() == expected.keys()
        same_bits(responses, expected)


@pytest.mark.parametrize("keeps", [False, True])
def test_what_an_earlier_policy_sampled_stays_and_the_rest_is_the_new_ones(keeps):
    """Tokens, log-probabilities and experts of the first part bit by bit; `ends` says its end.

    The new one computes its keys and values again, by other experts.
    """
    engine, params = build(EXPERTS, SPARE, random_params(EXPERTS)[1])
    later = jax.tree.map(lambda p: 0.9 * p, params)
    later["layers"] = tuple(it | {"router_XD": -it["router_XD"]} for it in later["layers"])
    expected, _ = sample_prompts(engine, params, **OF_FEW)
    responses, partial = interrupted(engine, params, blocks=3, later=later, keeps=keeps)
    same, unfinished, changed = np.testing.assert_array_equal, 0, 0
    for it in partial:
        of_prompt = len(FEW[it.cursor]) - 1
        for i, before in enumerate(it.responses):
            after, n, more = responses[it.cursor, i], len(before.tokens_T), before.is_unfinished
            assert after.ends == before.ends == (n,)
            assert after.stale_tokens == n
            same(after.tokens_T[:n], before.tokens_T)
            same(after.behavior_logp_T[:n], before.behavior_logp_T)
            if n:
                same(after.route_TLA[of_prompt:][:n], before.route_TLA[of_prompt:])
            assert (len(after.tokens_T) > n) == more
            unfinished += more
            uninterrupted = expected[it.cursor, i].behavior_logp_T
            changed += not np.array_equal(after.behavior_logp_T, uninterrupted)
    assert 0 < unfinished == changed < 5 * len(partial)


def test_a_response_that_loses_its_slot_keeps_its_tokens(monkeypatch):
    """Under newer weights too: what the older ones sampled stays, and so do its ends."""
    engine, params = build(SMALL, SCARCE, random_params(SMALL)[1])
    endless = dataclasses.replace(SAMPLING, stop_ids=())
    session = Session(engine, params, *[Stream(RUN_KEY, endless)] * 2)
    session.submit(7, Prompt(FEW[7]), group_size=5, stream=1)
    for cursor, prompt in FEW.items():
        session.submit(cursor, Prompt(prompt), group_size=5)
    lost, responses, prefill = {}, {}, session._prefill

    def noted(prefills):
        for sample in plans[-1].preempted:
            group = sample.prefix.group
            if group.stream == 0:
                lost.setdefault((group.cursor, sample.index), group.responses[sample.index])
        prefill(prefills)

    monkeypatch.setattr(session, "_prefill", noted)
    with seen_plans() as plans:
        for _ in range(3):
            session.step()
        session.pause()
        session.resume(jax.tree.map(lambda p: 0.9 * p, params))
        assert session.stats.decode_steps == session.stats.prefilled_prompts == 0
        before = dict(lost)
        while session.unfinished:
            responses |= by_request([group for group in session.step() if not group.stream])
    kept = {name: it for name, it in lost.items() if it.ends and len(it.tokens_T)}
    assert any(it.ends[0] for name, it in kept.items() if name not in before)
    for name, it in kept.items():
        n = len(it.tokens_T)
        np.testing.assert_array_equal(responses[name].tokens_T[:n], it.tokens_T)
        np.testing.assert_array_equal(responses[name].behavior_logp_T[:n], it.behavior_logp_T)
        assert responses[name].ends == it.ends
