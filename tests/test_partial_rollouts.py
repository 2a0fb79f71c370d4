"""Partial rollouts go on as if nothing had been, nothing is lost, and runs resume bitwise."""

import dataclasses
import itertools
import json
import types

import jax
import numpy as np
import pytest
import test_engine
from runs import Killed, digests, responses, rows_without_timings
from test_engine import RUN_KEY, SAMPLING, SMALL, build, by_request, drain, random_params
from test_rollout import G, ScriptedSession, long_tailed_script, prompt_at, scripted_grade
from test_train import programs_compiled_once, small_config  # noqa: F401  a fixture

from dapo_jax import train
from dapo_jax.rollout import StepPlan, collect, continued
from dapo_jax.sampler.engine import Engine
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.types import PartialGroup, Prompt, Response
from models.gemma3 import Gemma3Config
from models.kernels import KERNELS, paged_tpu

ROOMY = dataclasses.replace(test_engine.ROOMY, slots=9, pages=60, partial_rollouts=True)
# Pages for a part of what the slots may hold: samples are preempted.
TIGHT = dataclasses.replace(ROOMY, pages=13)
# A layer with a window below one without: keys that are computed again depend on what it sees.
WINDOWS = Gemma3Config(64, 32, 48, 2, 4, 2, 8, True, windows=(6, None), query_scalar=8)
PROMPTS = {7: np.array([5]), 100: np.arange(10, 18), 0: np.arange(20, 29), 12: np.arange(40, 58)}
GROUP_SIZE = 5
CPU, TPU = KERNELS["cpu"], KERNELS["tpu_interpret"]


@pytest.fixture(scope="module")
def small():
    return random_params(SMALL)[1]


def interrupted(engine, params, *, blocks, later=None, keeps=False):
    """Samples PROMPTS, a step ending after so many blocks: (responses, what was partial).

    keeps: whether the session goes on, with its keys and values.
    """
    session = Session(engine, params, Stream(RUN_KEY, SAMPLING))
    for cursor, prompt in PROMPTS.items():
        session.submit(cursor, Prompt(prompt), group_size=GROUP_SIZE, keeps=True)
    responses = {}
    for _ in range(blocks):
        responses |= by_request(session.step())
    partial, params = session.pause(), params if later is None else later
    if keeps:
        session.resume(params)
    else:
        session.close()
        session = Session(engine, params, Stream(RUN_KEY, SAMPLING))
        for it in partial:
            prompt = Prompt(PROMPTS[it.cursor])
            session.submit(it.cursor, prompt, group_size=GROUP_SIZE, partial=it, keeps=True)
    return responses | drain(session), partial


def whole(engine, params):
    session = Session(engine, params, Stream(RUN_KEY, SAMPLING))
    for cursor, prompt in PROMPTS.items():
        session.submit(cursor, Prompt(prompt), group_size=GROUP_SIZE)
    return drain(session)


@pytest.mark.parametrize(
    ("config", "cache", "kernels", "shards", "blocks"),
    [
        (SMALL, ROOMY, CPU, 1, (1, 2, 5)),
        (WINDOWS, TIGHT, CPU, 1, (3, 6)),
        (SMALL, dataclasses.replace(TIGHT, slots=5), CPU, 2, (2, 4)),
        pytest.param(WINDOWS, ROOMY, TPU, 1, (3,), marks=pytest.mark.slow),
    ],
    ids=["roomy", "tight, windows", "two shards", "tpu_interpret"],
)
def test_a_response_goes_on_as_if_it_had_never_stopped(
    monkeypatch, config, cache, kernels, shards, blocks
):
    """With the same weights its tokens are those of an uninterrupted session."""
    monkeypatch.setattr(paged_tpu, "pages_per_block", lambda v_PKCH: 2)
    params = random_params(config)[1]
    engine, params = build(config, cache, params, shards=shards, kernels=kernels)
    expected = whole(engine, params)
    for after, keeps in itertools.product(blocks, (False, True)):
        responses, partial = interrupted(engine, params, blocks=after, keeps=keeps)
        assert any(len(r.tokens_T) > 0 for it in partial for r in it.responses)
        assert responses.keys() == expected.keys()
        for request, response in responses.items():
            there = expected[request]
            np.testing.assert_array_equal(response.tokens_T, there.tokens_T)
            assert response.stopped == there.stopped
            np.testing.assert_allclose(
                response.behavior_logp_T, there.behavior_logp_T, rtol=0, atol=2e-5
            )


@pytest.mark.parametrize("keeps", [False, True])
def test_what_an_earlier_policy_sampled_stays_and_the_rest_is_the_new_ones(small, keeps):
    """Tokens and log-probabilities of the first part bit by bit; `ends` says where it ends."""
    engine, params = build(SMALL, ROOMY, small)
    later = jax.tree.map(lambda p: 0.9 * p, params)
    expected = whole(engine, params)
    responses, partial = interrupted(engine, params, blocks=3, later=later, keeps=keeps)
    begun = {(it.cursor, i): r for it in partial for i, r in enumerate(it.responses)}
    unfinished = {
        (it.cursor, i) for it in partial for i, more in enumerate(it.unfinished_G) if more
    }
    assert unfinished and begun.keys() - unfinished
    for request, before in begun.items():
        after, n = responses[request], len(before.tokens_T)
        assert after.ends == before.ends == (n,)
        assert after.stale_tokens == n
        np.testing.assert_array_equal(after.tokens_T[:n], before.tokens_T)
        np.testing.assert_array_equal(after.behavior_logp_T[:n], before.behavior_logp_T)
        assert (len(after.tokens_T) > n) == (request in unfinished)
    changed = [
        not np.array_equal(responses[name].behavior_logp_T, expected[name].behavior_logp_T)
        for name in unfinished
    ]
    assert all(changed)


def test_a_response_that_loses_its_slot_keeps_its_tokens_and_those_of_others_start_again(
    small, monkeypatch
):
    """Under newer weights too: what the older ones sampled stays, and so do its ends."""
    engine, params = build(SMALL, TIGHT, small)
    endless = dataclasses.replace(SAMPLING, stop_ids=())
    session = Session(engine, params, *[Stream(RUN_KEY, endless)] * 2)
    session.submit(7, Prompt(PROMPTS[7]), group_size=GROUP_SIZE, stream=1)
    for cursor, prompt in PROMPTS.items():
        session.submit(cursor, Prompt(prompt), group_size=GROUP_SIZE, keeps=True)
    set_aside, lost = session._set_aside, {}

    def noted(preempted):
        set_aside(preempted)
        for it in preempted:
            group = session._groups[it.group]
            assert group.stream == 0
            lost.setdefault((group.cursor, it.sample), group.partial[it.sample])

    monkeypatch.setattr(session, "_set_aside", noted)
    for _ in range(3):
        session.step()
    session.pause()
    session.resume(jax.tree.map(lambda p: 0.9 * p, params))
    assert session.blocks == [] and session.prefilled_prompts == 0
    before = dict(lost)
    responses = {}
    while session.unfinished:
        responses |= by_request([group for group in session.step() if not group.stream])
    kept = {name: it for name, it in lost.items() if it.ends and len(it.tokens_T)}
    assert any(it.ends[0] for name, it in kept.items() if name not in before)
    for name, it in kept.items():
        n = len(it.tokens_T)
        np.testing.assert_array_equal(responses[name].tokens_T[:n], it.tokens_T)
        np.testing.assert_array_equal(responses[name].behavior_logp_T[:n], it.behavior_logp_T)
        assert responses[name].ends == it.ends


@pytest.mark.parametrize(("tokens", "limit", "kept"), [(0, 9, 0), (7, 9, 4), (8, 9, 8), (8, 8, 4)])
def test_whole_blocks_of_a_partial_response_are_kept(tokens, limit, kept):
    """Parts of a block would be decoded at other places than in an uninterrupted run."""
    session = object.__new__(Session)
    cache = types.SimpleNamespace(block_tokens=4)
    session._engine = types.SimpleNamespace(cache=cache)
    response = Response(np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), stopped=False)
    assert session._whole_blocks(response, limit) == kept


def test_a_fork_takes_over_only_what_its_own_config_could_have_sampled():
    """Responses above its limit were trained on, and a group of another size was an odd error."""

    def response(tokens, *, stopped):
        return Response(np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), stopped)

    cut, ended, begun = (
        response(n, stopped=stopped) for n, stopped in ((9, False), (4, True), (6, False))
    )
    partial = [PartialGroup(3, (cut, ended, begun), (False, False, True))]
    sizes = {"group_size": 3, "num_prompts": 1, "max_prompts": 1, "max_tokens": 9}
    plan = StepPlan(prompt_at, None, **sizes, partial_rollout_steps=1)
    assert continued(plan, 7, partial) == (7, partial)
    others = [{"group_size": 2}, {"group_size": 4}, {"max_tokens": 8}, {"max_tokens": 10}]
    for other in (*others, {"partial_rollout_steps": 0}):
        assert continued(dataclasses.replace(plan, **other), 7, partial) == (3, ())


class PartialSession(ScriptedSession):
    """A scripted session whose groups may have begun before."""

    def submit(self, cursor, prompt, *, group_size, partial=None, keeps=False):
        tokens = ()
        if partial:
            pairs = zip(partial.responses, partial.unfinished_G, strict=True)
            tokens = [len(r.tokens_T) if more else None for r, more in pairs]
            self._begun[cursor] = partial
        how = {"group_size": group_size, "keeps": keeps, "first_tokens": tokens}
        super().submit(cursor, prompt, **how)

    @property
    def _begun(self):
        return self.__dict__.setdefault("begun", {})

    def pause(self, stream):
        taken, slots = [], self._scheduler.occupied
        for number in self._scheduler.unfinished:
            cursor = self._names[number][1]
            begun, responses, unfinished_G = self._begun.get(cursor), [], []
            for g in range(G):
                was = begun.responses[g] if begun else Response(np.zeros(0), np.zeros(0), False)
                more = (number, g) in slots or self._waits(number, g)
                n = slots[number, g][2] if (number, g) in slots else len(was.tokens_T)
                n = n if more else int(self._script.length_PG[cursor, g])
                response = Response(np.full(n, cursor), np.zeros(n), not more, ends=was.ends)
                responses.append(response.continued())
                unfinished_G.append(more)
            taken.append(PartialGroup(cursor, tuple(responses), tuple(unfinished_G)))
        self._begun.update((it.cursor, it) for it in taken)
        return taken

    def resume(self):
        self.calls, self.blocks, self.prefilled_prompts = [], [], 0

    def _waits(self, number, g):
        ready = [r for shard in self._scheduler._ready for r in shard]
        queued = [(prefix, s) for prefix in self._scheduler._queue for s in prefix.samples]
        return any(p.group == number and s == g for p, s in [*ready, *queued])

    def _group(self, stream, cursor):
        group = super()._group(stream, cursor)
        begun = self._begun.get(cursor)
        if begun:
            pairs = zip(group.responses, begun.responses, strict=True)
            responses = tuple(dataclasses.replace(r, ends=was.ends) for r, was in pairs)
            group = dataclasses.replace(group, responses=responses)
        return group


def steps_of(
    script, *, steps, slots, partial_rollout_steps, num_prompts=4, every_steps=1, max_prompts=400
):
    """Runs steps one after the other: [(calls of a session, what was partial before, rollouts)].

    every_steps: as many share a session.
    """
    cursor, partial, found, session = 0, [], [], None
    plan = StepPlan(
        prompt_at,
        scripted_grade(script),
        group_size=G,
        num_prompts=num_prompts,
        max_prompts=max_prompts,
        max_tokens=int(script.length_PG.max()),
        partial_rollout_steps=partial_rollout_steps,
    )
    for step in range(steps):
        if step % every_steps:
            session.resume()
        else:
            session = PartialSession(script, slots=slots, block_tokens=2)
        how = {"expected_rate": 0.5, "report": lambda text: None}
        rollouts = collect(session, plan, cursor, partial, **how)
        found.append((session.calls, partial, rollouts))
        cursor, partial = rollouts.cursor, rollouts.partial
    return found


@pytest.mark.parametrize("every_steps", [1, 4])
@pytest.mark.parametrize("partial_rollout_steps", [1, 3])
def test_no_slot_waits_and_no_group_is_lost(partial_rollout_steps, every_steps):
    """Many steps of long-tailed lengths: each group is sampled once, whole, and in the end used.

    Slots stay full to a step's end, but where as many are under way as later steps can train on.
    """
    script, seen, idle, ages = long_tailed_script(0, prompts=600), [], [], []
    how = {"partial_rollout_steps": partial_rollout_steps, "every_steps": every_steps}
    for calls, before, rollouts in steps_of(script, steps=25, slots=16, **how):
        kept = [rollouts.sampled[p].cursor for p in rollouts.kept]
        seen += [group.cursor for group in rollouts.sampled]
        informative = [g.cursor for g in rollouts.sampled if g.cursor in script.informative]
        assert kept == informative[:4] and len(kept) == 4
        for group in rollouts.sampled:
            lengths = [len(r.tokens_T) for r in group.responses]
            assert lengths == script.length_PG[group.cursor].tolist()
        ages += [it.age_steps for it in rollouts.partial]
        waits = any(it.age_steps == partial_rollout_steps and any(it.unfinished_G) for it in before)
        if before and not waits:
            steps = [call for call in calls if call[0] == "step"]
            idle += [sum(used == 0 for used in call[1:17]) for call in steps]
        partial = [it.cursor for it in rollouts.partial]
        assert sorted([*seen, *partial]) == list(range(rollouts.cursor))
        spent = rollouts.stats.sampled_tokens + rollouts.continued_tokens
        used = sum(group.length_G.sum() for group in rollouts.sampled)
        assert spent == used + sum(it.tokens for it in rollouts.partial)
        # The first step trained on the groups that were complete first: the short ones.
        assert len(seen) > len(rollouts.sampled) or kept == script.informative[:4]
    assert max(ages) == partial_rollout_steps
    assert sum(idle) == 0


def test_at_the_cap_a_step_ends_with_what_there_is():
    """None of the prompts is informative, and only so many may begin."""
    script = long_tailed_script(0, prompts=100)
    script = dataclasses.replace(script, correct_PG=np.zeros_like(script.correct_PG))
    ((_, _, rollouts),) = steps_of(
        script, steps=1, slots=16, partial_rollout_steps=2, max_prompts=10
    )
    assert (len(rollouts.sampled), len(rollouts.kept), rollouts.partial) == (10, 0, [])


def partial_config():
    config = small_config()
    config.num_steps = 4
    config.rollout.partial_rollout_steps = 1
    config.checkpoint.every_steps = 2
    config.checkpoint.keep = 9
    return config


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """An uninterrupted run."""
    workdir = tmp_path_factory.mktemp("runs") / "uninterrupted"
    workdir.mkdir()
    recomputes, engine_recompute = [], Engine.recompute

    def recompute(*arguments):
        recomputes.append(len(rows_without_timings(workdir)))
        return engine_recompute(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "recompute", recompute)
        train.train(partial_config(), workdir)
    (workdir / "recomputes.json").write_text(json.dumps(recomputes))
    return workdir


@pytest.mark.slow
def test_a_killed_run_resumes_bitwise(uninterrupted, tmp_path, monkeypatch):
    """Partial groups are in the checkpoint; rows, rollouts and weights are what they would be.

    The step before had keys and values of its own: the run resumes where they are computed again.
    """
    run = tmp_path / "run"

    def killed(*args):
        if rows_without_timings(run)[2:]:
            raise Killed
        return update(*args)

    update = train.update
    run.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(train, "update", killed)
        with pytest.raises(Killed):
            train.train(partial_config(), run)
    assert len(rows_without_timings(run)) == 3
    assert not (run / "checkpoints" / "3").exists()
    train.train(partial_config(), run)
    rows = rows_without_timings(uninterrupted)
    assert rows_without_timings(run) == rows
    assert digests(run, 4) == digests(uninterrupted, 4)
    assert responses(run, 3) == responses(uninterrupted, 3)
    # No response loses its pages here, and the run without a kill has the same checkpoints.
    assert set(json.loads((uninterrupted / "recomputes.json").read_text())) == {2}
    # The first step has no stale tokens; the gap to the sampler is that of fresh ones, if any.
    assert rows[0]["staleness/tokens_fraction"] == rows[0]["staleness/max_steps"] == 0
    assert "ratio_gap" in rows[0]
    assert any(row["staleness/tokens_fraction"] > 0 for row in rows)
    for row in rows:
        assert row["partial_rollouts/groups"] > 0 and row["partial_rollouts/tokens"] > 0
        assert row["staleness/mean_steps"] >= row["staleness/tokens_fraction"]
        assert row.get("ratio_gap", 0) < 1e-5
        assert row["groups/cancelled"] == 0
