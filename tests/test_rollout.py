"""Dynamic sampling (Eq. 11) runs as a stream over scripted responses.

`ScriptedSession` stands in for the sampler's `Session`: the real scheduler, and responses of
scripted lengths and correctness in place of a model.
"""

import dataclasses
import functools
import itertools
import threading
import time

import golden
import numpy as np
import pytest

from dapo_jax.grading import _GRADER, Grading
from dapo_jax.rollout import StepPlan, collect
from dapo_jax.sampler.cache import Cache
from dapo_jax.sampler.scheduler import Scheduler
from dapo_jax.types import BlockRecord, Example, Group, Prompt, Response, Rollouts, Verdict

G = 4


@dataclasses.dataclass(frozen=True)
class Script:
    """A script fixes the responses to come: correct_PG, and length_PG in tokens."""

    correct_PG: np.ndarray
    length_PG: np.ndarray

    @functools.cached_property
    def informative(self) -> list[int]:
        """Lists the cursors of the groups of which some, but not all, are correct."""
        return [p for p, correct_G in enumerate(self.correct_PG) if len(set(correct_G)) == 2]


def script(num_correct_P, *, length_tokens=3) -> Script:
    """Scripts so many correct ones of each prompt's G responses, of one length or of P."""
    correct_PG = np.arange(G) < np.asarray(num_correct_P)[:, None]
    length_P1 = np.broadcast_to(length_tokens, len(correct_PG))[:, None]
    return Script(correct_PG, np.broadcast_to(length_P1, correct_PG.shape))


def long_tailed_script(seed: int, *, prompts: int) -> Script:
    """Scripts log-normal lengths: wrong responses are longer, those of medium prompts longest."""
    rng = np.random.default_rng(seed)
    chance_P1 = rng.beta(0.5, 0.5, (prompts, 1))  # of a correct response
    correct_PG = rng.random((prompts, G)) < chance_P1
    medium_P1 = 4 * chance_P1 * (1 - chance_P1)
    log_length_PG = rng.normal(1.5 + 1.5 * medium_P1 + 0.7 * ~correct_PG, 0.8)
    return Script(correct_PG, 1 + np.exp(log_length_PG).astype(int))


def prompt_at(cursor: int) -> Prompt:
    return Prompt(np.array([cursor + 1], np.int32), Example((), "7", "script", cursor))


class ScriptedSession:
    """A real Scheduler behind a Session's methods, with scripted lengths and a roomy cache.

    `calls` is all that was asked of it, in order; a step also has what each slot sampled and which
    groups it finished. others: lengths of groups of stream 1, which are there from the beginning;
    they have the script's last cursors.
    """

    def __init__(self, script: Script, *, slots: int, block_tokens: int, others=()):
        self.blocks: list[BlockRecord] = []
        self.seconds = {"prefill": 1.0, "decode": 2.0, "host": 3.0}
        self.prefilled_prompts = 0
        self.calls: list[tuple] = []
        self._script = script
        longest = int(script.length_PG.max())
        cache = Cache(
            slots=slots,
            pages=3 * slots + 2,
            prompt_pages=len(script.length_PG) + len(others) + 1,
            readers=G,
            page_tokens=-(-longest // block_tokens) * block_tokens,
            block_tokens=block_tokens,
            max_prompt_tokens=2,
            max_response_tokens=longest,
            partial_rollouts=True,
        )
        self._scheduler = Scheduler(cache, shards=1)
        self._names: list[tuple[int, int]] = []
        for cursor, lengths in enumerate(others, start=len(script.length_PG) - len(others)):
            self._scheduler.submit(len(self._names), 2, np.minimum(lengths, longest).tolist())
            self._names.append((1, cursor))

    def submit(self, cursor, prompt, *, group_size, keeps=False, first_tokens=()) -> None:
        """first_tokens: of samples that began before, as the scheduler takes them."""
        assert prompt.token_ids.tolist() == [cursor + 1]
        self.calls.append(("submit", cursor))
        lengths = self._script.length_PG[cursor, :group_size].tolist()
        how = {"first_tokens": first_tokens, "keeps": keeps}
        self._scheduler.submit(len(self._names), 2, lengths, **how)
        self._names.append((0, cursor))

    def cancel(self, cursor: int) -> None:
        self.calls.append(("cancel", cursor))
        self._scheduler.cancel(self._names.index((0, cursor)))

    @property
    def unfinished(self) -> list[tuple[int, int]]:
        return [self._names[number] for number in self._scheduler.unfinished]

    @property
    def slots(self) -> int:
        return self._scheduler.cache.slots

    @property
    def idle_slots(self) -> int:
        return self._scheduler.idle_slots

    def step(self, *, more: bool = False) -> list[Group]:
        plan = self._scheduler.next_block(more=more)
        self.prefilled_prompts += sum(np.sum(call.group_R >= 0) for call in plan.prefills)
        used_N = np.minimum(plan.left_N, self._scheduler.cache.block_tokens)
        useful_B, stream_B = np.zeros((2, self._scheduler.cache.slots), int)
        useful_B[plan.slot_N] = used_N
        stream_B[plan.slot_N] = [self._names[number][0] for number in plan.group_N]
        before = set(self.unfinished)
        self._scheduler.complete(used_N, np.zeros(len(used_N), bool))
        finished = sorted(before - set(self.unfinished))
        self.calls.append(("step", *useful_B.tolist(), *(cursor for _, cursor in finished)))
        steps = int(useful_B.max())
        columns = (stream_B, *[useful_B] * 3)
        self.blocks.append(BlockRecord(steps, *columns, plan.waiting, plan.cache_use))
        return [self._group(*name) for name in finished]

    def _group(self, stream: int, cursor: int) -> Group:
        length_G = self._script.length_PG[cursor]
        responses = (Response(np.full(n, cursor), np.zeros(n), True) for n in length_G)
        return Group(cursor, prompt_at(cursor), tuple(responses), stream)


def scripted_grade(script: Script):
    """A grader that knows the script: responses have the answer 7 where they are correct."""

    def grade(group: Group) -> Group:
        assert group.prompt.example.row == group.cursor
        correct_G = script.correct_PG[group.cursor]
        right, wrong = Verdict(True, "7", "correct"), Verdict(False, None, "no_answer")
        return group.graded(
            ["Answer: 7" if correct else "7" for correct in correct_G],
            [right if correct else wrong for correct in correct_G],
        )

    return grade


def run(
    script: Script,
    cursor=0,
    *,
    num_prompts,
    max_prompts=None,
    slots=8,
    block_tokens=4,
    expected_rate=0.5,
    dynamic=True,
    session=None,
    grade=None,
    report=None,
    on_other_groups=lambda finished: None,
    **rules,
) -> Rollouts:
    """Runs `collect` over a script; the cap, unless given, is the script's end."""
    session = session or ScriptedSession(script, slots=slots, block_tokens=block_tokens)
    plan = StepPlan(
        prompt_at,
        grade or scripted_grade(script),
        group_size=script.correct_PG.shape[1],
        num_prompts=num_prompts,
        max_prompts=max_prompts or len(script.correct_PG) - cursor,
        max_tokens=int(script.length_PG.max()),
        dynamic_sampling=dynamic,
        **rules,
    )
    return collect(
        session,
        plan,
        cursor,
        expected_rate=expected_rate,
        report=report or (lambda message: None),
        on_other_groups=on_other_groups,
    )


def cursors(rollouts: Rollouts) -> list[int]:
    """Lists the sampled groups' places in the stream."""
    return [group.cursor for group in rollouts.sampled]


def kept_cursors(rollouts: Rollouts) -> list[int]:
    return [rollouts.sampled[p].cursor for p in rollouts.kept]


def steps(session: ScriptedSession) -> list[tuple]:
    return [call for call in session.calls if call[0] == "step"]


# Which groups


def test_streaming_keeps_what_the_batchwise_filter_keeps_whatever_the_lengths():
    """Informative groups are the long ones here, and some scripts run into the cap.

    The informative groups that finish first are others, and shorter ones: the bias that would teach
    a policy to be brief.
    """
    rng = np.random.default_rng(0)
    streamed_lengths, hasty_lengths, differing, capped = [], [], 0, 0
    for seed in range(100):
        num_prompts = int(rng.integers(4, 13))
        engine = {"slots": int(rng.integers(4, 65)), "block_tokens": int(rng.integers(1, 9))}
        script = long_tailed_script(seed, prompts=3 * num_prompts)
        session = ScriptedSession(script, **engine)
        rollouts = run(script, num_prompts=num_prompts, session=session)
        kept = kept_cursors(rollouts)
        # Whole batches of any size, until enough groups are mixed, have these.
        assert kept == script.informative[:num_prompts], seed
        capped += len(kept) < num_prompts
        for p in rollouts.kept:
            assert rollouts.sampled[p].length_G.tolist() == script.length_PG[p].tolist()
        finished = itertools.chain(*(call[1 + session.slots :] for call in steps(session)))
        hasty = [p for p in finished if p in script.informative][:num_prompts]
        differing += sorted(hasty) != kept
        streamed_lengths.append(script.length_PG[kept].mean())
        hasty_lengths.append(script.length_PG[hasty].mean())
    assert 0 < capped < 50
    assert differing > 60
    assert np.mean(hasty_lengths) < 0.9 * np.mean(streamed_lengths)


def test_groups_of_other_streams_change_neither_what_is_kept_nor_what_is_counted():
    """They are there first, and what is unfinished of them in the end goes on."""
    left = 0
    for seed in range(20):
        script, finished = long_tailed_script(seed, prompts=24), []
        others = long_tailed_script(seed + 1_000, prompts=6).length_PG * 3
        session = ScriptedSession(script, slots=24, block_tokens=4, others=others)
        one = run(script, num_prompts=6, session=session, on_other_groups=finished.extend)
        assert kept_cursors(one) == kept_cursors(run(script, num_prompts=6, slots=24))
        left += len(session.unfinished)
        tokens = sum(int(b.useful_B[b.stream_B == 0].sum()) for b in session.blocks)
        assert one.stats.sampled_tokens == tokens < one.stats.busy_slot_steps
        while session.unfinished:
            finished += session.step()
        assert sorted(group.cursor for group in finished) == list(range(18, 24))
    assert left > 5


def test_golden_dynamic_sampling(shared):
    """Ours keeps the reference's choice; where that raises at the cap, ours returns the rest."""
    # By the shaped reward: see test_algorithm.py.
    cases = [c for c in golden.dynamic_sampling_cases(shared) if c.filtered_by != "score"]
    assert {case.error for case in cases} == {None, "ValueError"}
    for case in cases:
        batches, generation_prompts, group_size = case.correct_NPG.shape
        correct_PG = case.correct_NPG.reshape(-1, group_size) > 0
        length_PG = long_tailed_script(0, prompts=len(correct_PG)).length_PG[:, :1]
        rollouts = run(
            Script(correct_PG, np.broadcast_to(length_PG, correct_PG.shape)),
            num_prompts=case.num_prompts,
            max_prompts=generation_prompts * min(batches, case.max_generation_batches),
        )
        used_batches = -(-len(rollouts.sampled) // generation_prompts)
        assert used_batches == (case.generation_batches or case.max_generation_batches), case.name
        if case.error is None:
            responses = rollouts.kept[:, None] * group_size + np.arange(group_size)
            assert responses.ravel().tolist() == case.kept_responses, case.name
        else:
            assert len(rollouts.kept) < case.num_prompts, case.name


def test_a_step_waits_for_the_groups_before_the_last_one_kept_and_cancels_those_behind():
    """Group 0 is slow and not informative; group 3 is slower still, and not needed.

    Groups behind the last one, finished or not, are counted as issued and are sampled again.
    """
    slow = script([0, 2, 2, 2, 2], length_tokens=np.array([40, 2, 2, 99, 2]))
    session = ScriptedSession(slow, slots=5 * G, block_tokens=4)
    rollouts = run(slow, num_prompts=2, expected_rate=0.1, session=session)
    assert rollouts.kept.tolist() == [1, 2]
    assert cursors(rollouts) == [0, 1, 2]
    assert (rollouts.cursor, rollouts.issued) == (3, 5)
    assert [call for call in session.calls if call[0] == "cancel"] == [("cancel", 3)]
    assert session.calls.index(("cancel", 3)) < session.calls.index(steps(session)[2])
    assert len(steps(session)) == 10  # the 40 tokens of group 0
    assert session.unfinished == []
    following = run(slow, rollouts.cursor, num_prompts=2)
    assert cursors(following) == [3, 4]


@pytest.mark.parametrize(
    ("num_correct_P", "kept"),
    [([0, 2, 4, 1, 0, 4], [1, 3]), ([4] * 6, []), ([0, 2, 4, 1, 0, 3], [1, 3, 5])],
    ids=["fewer", "none", "the last prompt completes the step"],
)
def test_at_the_cap_there_are_fewer_groups_or_none(num_correct_P, kept):
    rollouts = run(script([2] * 20 + num_correct_P), 20, num_prompts=3, max_prompts=6)
    assert rollouts.kept.tolist() == kept
    assert cursors(rollouts) == list(range(20, 26))
    assert (rollouts.cursor, rollouts.issued) == (26, 6)


def test_without_dynamic_sampling_the_first_prompts_are_all_kept():
    """All are issued at once, and nothing else is, whatever the rate was: no verdict matters."""
    scripted = script([0, 4, 2, 0, 1], length_tokens=np.array([3, 30, 3, 9, 3]))
    session = ScriptedSession(scripted, slots=6, block_tokens=4)
    how = {"num_prompts": 4, "max_prompts": 99, "expected_rate": 0.1, "dynamic": False}
    rollouts = run(scripted, 1, session=session, **how)
    assert rollouts.kept.tolist() == [0, 1, 2, 3]
    assert cursors(rollouts) == [1, 2, 3, 4]
    assert (rollouts.cursor, rollouts.issued) == (5, 4)
    assert session.calls[:4] == [("submit", cursor) for cursor in range(1, 5)]


# When


def test_the_schedule_does_not_depend_on_the_graders_speed():
    """The same groups are issued, cancelled and sampled at every step."""
    script = long_tailed_script(3, prompts=60)
    schedules = []
    for seed, most in ((0, 0.0), (1, 0.004), (2, 0.004)):
        session = ScriptedSession(script, slots=24, block_tokens=8)
        rng, right = np.random.default_rng(seed), scripted_grade(script)

        def grade(group, rng=rng, right=right, most=most):
            time.sleep(rng.uniform(0, most))
            return right(group)

        rollouts = run(script, num_prompts=8, session=session, grade=grade)
        schedules.append((session.calls, rollouts.issued, rollouts.stats.sampled_tokens))
        seconds = rollouts.stats.seconds
        assert seconds["verify"] > 0
        assert seconds["verify_wait"] > 0
        assert (seconds["prefill"], seconds["decode"], seconds["host"]) == (1.0, 2.0, 3.0)
    assert schedules[0] == schedules[1] == schedules[2]
    assert {call[0] for call in schedules[0][0]} == {"submit", "cancel", "step"}


def test_grading_runs_in_the_background_and_what_is_pending_can_be_given_up():
    scripted, begun, may_go_on, graded = script([2] * 4), threading.Event(), threading.Event(), []
    session = ScriptedSession(scripted, slots=G, block_tokens=4)
    groups = [session._group(0, cursor) for cursor in range(4)]

    def grade(group):
        begun.set()
        assert may_go_on.wait(10)
        graded.append(group.cursor)
        return scripted_grade(scripted)(group)

    with Grading(grade) as grading:
        assert grading.exchange(groups[:1]) == []
        may_go_on.set()
        assert [group.cursor for group in grading.exchange([])] == [0]
        begun.clear()
        may_go_on.clear()
        assert grading.exchange(groups[1:]) == []
        assert begun.wait(10)
        threading.Timer(0.1, may_go_on.set).start()
    _GRADER.submit(int).result()
    assert graded == [0, 1]  # and not those behind it


def test_an_error_in_the_grader_surfaces_at_once():
    scripted = script([2] * 40)
    session = ScriptedSession(scripted, slots=8, block_tokens=4)

    def grade(group):
        if group.cursor == 4:
            raise ValueError("no rule for 4")
        return scripted_grade(scripted)(group)

    with pytest.raises(ValueError, match="no rule for 4"):
        run(scripted, num_prompts=10, session=session, grade=grade)
    assert len(steps(session)) <= 4


def counts(seeds: int, rate: float, *, slots: int, **how):
    """Counts of scripts of a rate of informative groups, arrays: (issued, sampled, blocks)."""
    found = []
    for seed in range(seeds):
        scripted = script(2 * (np.random.default_rng(seed).random(400) < rate))
        session = ScriptedSession(scripted, slots=slots * G, block_tokens=4)
        rollouts = run(scripted, session=session, **how)
        found.append((rollouts.issued, len(rollouts.sampled), len(session.blocks)))
    return np.array(found).T


@pytest.mark.parametrize("rate", [0.2, 0.9])
def test_little_more_is_issued_than_needed(rate):
    """The slots hold the whole step at once, so that the first guess precedes all verdicts.

    The mean need is N / rate prompts. A standard deviation more is aimed at, so that the guess is
    mostly enough; with the further guesses where it is not, the bound is 1.5 of them and a prompt.
    """
    issued, sampled, blocks = counts(60, rate, num_prompts=16, slots=400, expected_rate=rate)
    assert sampled.mean() == pytest.approx(16 / rate, rel=0.1)
    assert issued.mean() < 16 / rate + 1.5 * np.sqrt(16 * (1 - rate)) / rate + 1
    assert np.mean(blocks == 1) > 0.7


@pytest.mark.parametrize("expected_rate", [0.1, 1.0])
def test_a_wrong_expectation_is_soon_corrected(expected_rate):
    """Slots hold two thirds of what is needed, and less than half as much again is issued.

    By the expectation alone twice as much would be, or prompts one by one in eight blocks.
    """
    how = {"num_prompts": 24, "slots": 40, "expected_rate": expected_rate}
    issued, sampled, blocks = counts(20, 0.4, **how)
    assert issued.mean() < 1.5 * sampled.mean()
    assert blocks.mean() < 4


# Accounts


def test_the_stats_add_up():
    """Two groups run on six slots, in blocks of four steps, and are counted by hand."""
    lengths = np.array([[2, 4, 6, 9], [1, 5, 5, 5]])
    scripted = Script(np.array([[True, True, False, False]] * 2), lengths)
    session, reports = ScriptedSession(scripted, slots=6, block_tokens=4), []
    how = {"dynamic": False, "session": session, "report": reports.append}
    rollouts = run(scripted, num_prompts=2, **how)
    assert reports[0] == "rollout: 0 informative of 0 groups, 2 wanted"
    stats = rollouts.stats
    assert steps(session) == [
        ("step", 2, 4, 4, 4, 1, 4),
        ("step", 4, 4, 2, 4, 0, 1),
        ("step", 1, 1, 0, 1, 0, 0, 0, 1),
    ]
    assert stats.sampled_tokens == stats.busy_slot_steps == lengths.sum() == 37
    assert stats.slot_steps == 6 * (4 + 4 + 1)
    assert (stats.waiting_slot_steps, stats.busy_waiting_slot_steps) == (6 * 4, 19)
    assert (stats.requests, stats.prefilled_prompts) == (8, 2)
    assert stats.cache_use == pytest.approx(6 / 19)  # a page a slot, of three and one
    assert rollouts.kept_tokens == 37
    assert set(stats.seconds) == {"prefill", "decode", "host", "verify", "verify_wait"}
