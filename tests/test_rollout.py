"""Dynamic sampling (Eq. 11) runs as a stream over scripted responses.

`ScriptedSession` stands in for the sampler's `Session`: the real scheduler, and responses of
scripted lengths and correctness in place of a model.
"""

import dataclasses
import functools
import threading
import time

import golden
import numpy as np
import pytest

from configs import tiny
from dapo_jax.logs.record import rollout_rows
from dapo_jax.rollout import collect
from dapo_jax.sampler.cache import Cache
from dapo_jax.sampler.scheduler import Scheduler
from dapo_jax.setup import components
from dapo_jax.tasks.base import graded
from dapo_jax.tasks.math_problems import MathTask
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

    def submit(self, cursor: int, prompt: Prompt, *, group_size: int) -> None:
        assert prompt.token_ids.tolist() == [cursor + 1]
        self.calls.append(("submit", cursor))
        lengths = self._script.length_PG[cursor, :group_size].tolist()
        self._scheduler.submit(len(self._names), 2, lengths)
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
        record = BlockRecord(
            0.0, 0.0, steps, stream_B, *[useful_B] * 3, plan.waiting, plan.cache_use
        )
        self.blocks.append(record)
        return [self._group(*name) for name in finished]

    def _group(self, stream: int, cursor: int) -> Group:
        lengths = self._script.length_PG[cursor]
        responses = (Response(np.full(n, cursor), np.zeros(n), True) for n in lengths)
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
    **rules,
) -> Rollouts:
    """Runs `collect` over a script; the cap, unless given, is the script's end."""
    session = session or ScriptedSession(script, slots=slots, block_tokens=block_tokens)
    return collect(
        session,
        prompt_at,
        grade or scripted_grade(script),
        cursor,
        group_size=script.correct_PG.shape[1],
        num_prompts=num_prompts,
        max_prompts=max_prompts or len(script.correct_PG) - cursor,
        expected_rate=expected_rate,
        dynamic_sampling=dynamic,
        report=report or (lambda message: None),
        **rules,
    )


def cursors(rollouts: Rollouts) -> list[int]:
    """Lists the sampled groups' places in the stream."""
    return [group.cursor for group in rollouts.sampled]


def kept_cursors(rollouts: Rollouts) -> list[int]:
    return [rollouts.sampled[p].cursor for p in rollouts.kept]


def steps(session: ScriptedSession) -> list[tuple]:
    return [call for call in session.calls if call[0] == "step"]


# Which groups


def batchwise(script: Script, *, num_prompts, generation_prompts) -> list[int]:
    """Filters as the reference does: whole batches, until enough groups are mixed."""
    kept, cursor = [], 0
    while len(kept) < num_prompts and cursor < len(script.correct_PG):
        for p in range(cursor, min(cursor + generation_prompts, len(script.correct_PG))):
            if 0 < np.count_nonzero(script.correct_PG[p]) < G:
                kept.append(p)
        cursor += generation_prompts
    return kept[:num_prompts]


def first_finished(script: Script, *, num_prompts, slots, block_tokens) -> list[int]:
    """Filters without waiting for anyone: keeps the informative groups that finish first."""
    session = ScriptedSession(script, slots=slots, block_tokens=block_tokens)
    for cursor in range(len(script.correct_PG)):
        session.submit(cursor, prompt_at(cursor), group_size=G)
    kept = []
    while len(kept) < num_prompts and session.unfinished:
        kept += [f.cursor for f in session.step() if f.cursor in script.informative]
    return kept[:num_prompts]


def test_streaming_keeps_what_the_batchwise_filter_keeps_whatever_the_lengths():
    """Informative groups are the long ones here, and some scripts run into the cap.

    The filter that takes what finishes first keeps others, and shorter ones: the bias that would
    teach a policy to be brief.
    """
    rng = np.random.default_rng(0)
    streamed_lengths, hasty_lengths, differing, capped = [], [], 0, 0
    for seed in range(100):
        num_prompts = int(rng.integers(4, 13))
        engine = {"slots": int(rng.integers(4, 65)), "block_tokens": int(rng.integers(1, 9))}
        script = long_tailed_script(seed, prompts=3 * num_prompts)
        rollouts = run(script, num_prompts=num_prompts, **engine)
        kept = kept_cursors(rollouts)
        for generation_prompts in (num_prompts, 3 * num_prompts):
            sizes = {"num_prompts": num_prompts, "generation_prompts": generation_prompts}
            assert kept == batchwise(script, **sizes), seed
        capped += len(kept) < num_prompts
        for p in rollouts.kept:
            assert rollouts.sampled[p].length_G.tolist() == script.length_PG[p].tolist()
        hasty = first_finished(script, num_prompts=num_prompts, **engine)
        differing += sorted(hasty) != kept
        streamed_lengths.append(script.length_PG[kept].mean())
        hasty_lengths.append(script.length_PG[hasty].mean())
    assert 0 < capped < 50
    assert differing > 60
    assert np.mean(hasty_lengths) < 0.9 * np.mean(streamed_lengths)


def test_groups_of_other_streams_do_not_change_which_are_kept():
    """They are there first, and what is unfinished of them in the end goes on.

    What is drawn and cancelled does depend on them: prompts are issued as slots fall idle.
    """
    issued, left = 0, 0
    for seed in range(40):
        script = long_tailed_script(seed, prompts=24)
        how = {"slots": 24, "block_tokens": 4}
        others = long_tailed_script(seed + 1_000, prompts=6).length_PG * 3
        session, finished = ScriptedSession(script, others=others, **how), []
        one = run(script, num_prompts=6, session=session, on_other_groups=finished.extend)
        other = run(script, num_prompts=6, **how)
        assert kept_cursors(one) == kept_cursors(other)
        assert cursors(one) == cursors(other)
        assert one.cursor == other.cursor
        issued += one.issued != other.issued
        assert {stream for stream, _ in session.unfinished} <= {1}
        left += len(session.unfinished)
        while session.unfinished:
            finished += session.step()
        assert sorted(group.cursor for group in finished) == list(range(18, 24))
        tokens = sum(int(b.useful_B[b.stream_B == 0].sum()) for b in session.blocks)
        assert one.stats.sampled_tokens == tokens
        assert one.stats.busy_slot_steps > tokens
    assert issued > 0
    assert left > 10


def test_golden_dynamic_sampling(shared):
    """Ours keeps the reference's choice; where that raises at the cap, ours returns the rest."""
    compared = 0
    for case in golden.dynamic_sampling_cases(shared):
        if case.filtered_by == "score":  # the shaped reward; see test_algorithm.py
            continue
        batches, generation_prompts, group_size = case.correct_NPG.shape
        correct_PG = case.correct_NPG.reshape(-1, group_size) > 0
        length_PG = long_tailed_script(0, prompts=len(correct_PG)).length_PG[:, :1]
        rollouts = run(
            Script(correct_PG, np.broadcast_to(length_PG, correct_PG.shape)),
            num_prompts=case.num_prompts,
            max_prompts=generation_prompts * min(batches, case.max_generation_batches),
        )
        used_batches = -(-len(rollouts.sampled) // generation_prompts)
        if case.error is None:
            responses = rollouts.kept[:, None] * group_size + np.arange(group_size)
            assert responses.ravel().tolist() == case.kept_responses, case.name
            assert used_batches == case.generation_batches, case.name
            compared += 1
        else:
            assert len(rollouts.kept) < case.num_prompts, case.name
            assert used_batches == case.max_generation_batches, case.name
    assert compared > 0


def test_a_step_ends_with_the_last_group_kept_and_the_next_begins_behind_it():
    """Groups behind it, finished or not, are counted as issued and are sampled again."""
    num_correct_P = [0, 4, 2, 0, 1, 4, 3, 3, 0, 1, 2, 2]
    rollouts = run(script(num_correct_P), num_prompts=3, slots=12 * G, expected_rate=0.1)
    assert rollouts.kept.tolist() == [2, 4, 6]
    assert cursors(rollouts) == list(range(7))
    assert (rollouts.cursor, rollouts.issued) == (7, 12)
    assert rollouts.correct_PG.sum(axis=1).tolist() == num_correct_P[:7]
    following = run(script(num_correct_P), rollouts.cursor, num_prompts=2)
    assert cursors(following) == [7, 8, 9]
    assert following.kept.tolist() == [0, 2]
    assert following.cursor == 10


def test_a_step_waits_for_the_groups_before_the_last_one_kept_and_cancels_those_behind():
    """Group 0 is slow and not informative; group 3 is slower still, and not needed."""
    slow = script([0, 2, 2, 2, 2], length_tokens=np.array([40, 2, 2, 99, 2]))
    session = ScriptedSession(slow, slots=5 * G, block_tokens=4)
    rollouts = run(slow, num_prompts=2, expected_rate=0.1, session=session)
    assert rollouts.kept.tolist() == [1, 2]
    assert (rollouts.cursor, rollouts.issued) == (3, 5)
    assert [call for call in session.calls if call[0] == "cancel"] == [("cancel", 3)]
    assert session.calls.index(("cancel", 3)) < session.calls.index(steps(session)[2])
    assert len(steps(session)) == 10  # the 40 tokens of group 0
    assert session.unfinished == []


@pytest.mark.parametrize(("num_correct_P", "kept"), [([0, 2, 4, 1, 0, 4], [1, 3]), ([4] * 6, [])])
def test_at_the_cap_there_are_fewer_groups_or_none(num_correct_P, kept):
    rollouts = run(script([2] * 20 + num_correct_P), 20, num_prompts=3, max_prompts=6)
    assert rollouts.kept.tolist() == kept
    assert cursors(rollouts) == list(range(20, 26))
    assert (rollouts.cursor, rollouts.issued) == (26, 6)


def test_the_last_prompt_before_the_cap_may_complete_the_step():
    assert run(script([0, 0, 0, 2]), num_prompts=1, max_prompts=4).kept.tolist() == [3]


def test_without_dynamic_sampling_the_first_prompts_are_all_kept():
    """All are issued at once, and nothing else is, whatever the rate was: no verdict matters."""
    scripted = script([0, 4, 2, 0, 1], length_tokens=np.array([3, 30, 3, 9, 3]))
    session = ScriptedSession(scripted, slots=6, block_tokens=4)
    rollouts = run(
        scripted,
        1,
        num_prompts=4,
        max_prompts=99,
        expected_rate=0.1,
        dynamic=False,
        session=session,
    )
    assert rollouts.kept.tolist() == [0, 1, 2, 3]
    assert cursors(rollouts) == [1, 2, 3, 4]
    assert (rollouts.cursor, rollouts.issued) == (5, 4)
    assert session.calls[:4] == [("submit", cursor) for cursor in range(1, 5)]


def test_a_graded_group_has_a_text_and_a_verdict_for_each_response():
    """Token ids are decoded without control tokens; what was sampled stays as it was."""
    tokenizer = components.tokenizer(tiny.get_config())
    example = Example((), "56", "test", 0)
    texts = ["23+45=68\nAnswer: 68", "Answer: 56"]
    stop = tokenizer.stop_ids[0]
    tokens = [np.array([*tokenizer.encode(text), stop], np.int32) for text in texts]
    responses = (
        Response(tokens[0][:-1], np.full(len(tokens[0]) - 1, -0.5), stopped=False),
        Response(tokens[1], np.full(len(tokens[1]), -0.25), stopped=True),
    )
    prompt = Prompt(np.array([1], np.int32), example)
    found = graded(Group(9, prompt, responses), task=MathTask(), tokenizer=tokenizer)
    assert (found.cursor, found.prompt) == (9, prompt)
    assert [response.text for response in found.responses] == texts
    assert found.correct_G.tolist() == [False, True]
    assert found.stopped_G.tolist() == [False, True]
    assert found.length_G.tolist() == [len(tokens[0]) - 1, len(tokens[1])]
    assert [response.behavior_logp_T[0] for response in found.responses] == [-0.5, -0.25]


# When


class Delays:
    """A grader that takes a random time, up to `most` seconds."""

    def __init__(self, script: Script, *, most: float, seed: int):
        self._grade, self._most = scripted_grade(script), most
        self._rng = np.random.default_rng(seed)

    def __call__(self, group: Group) -> Group:
        time.sleep(self._rng.uniform(0, self._most))
        return self._grade(group)


def test_the_schedule_does_not_depend_on_the_graders_speed():
    """The same groups are issued, cancelled and sampled at every step."""
    script = long_tailed_script(3, prompts=60)
    schedules = []
    for seed, most in ((0, 0.0), (1, 0.004), (2, 0.004)):
        session = ScriptedSession(script, slots=24, block_tokens=8)
        grade = Delays(script, most=most, seed=seed)
        rollouts = run(script, num_prompts=8, session=session, grade=grade)
        schedules.append((session.calls, rollouts.issued, rollouts.stats.sampled_tokens))
    assert schedules[0] == schedules[1] == schedules[2]
    assert {call[0] for call in schedules[0][0]} == {"submit", "cancel", "step"}


def test_grading_runs_behind_the_next_block():
    """Each verdict here waits until the block after its group's is being decoded."""
    scripted = script([0, 2, 4, 2, 0, 2, 2, 2], length_tokens=np.arange(3, 35, 4))
    begun = threading.Condition()
    behind = []

    class Watched(ScriptedSession):
        def step(self, **how):
            with begun:
                finished = super().step(**how)
                begun.notify_all()
            return finished

    session = Watched(scripted, slots=2 * G, block_tokens=4)

    def grade(group):
        with begun:
            own = next(i for i, s in enumerate(steps(session)) if group.cursor in s[1 + 2 * G :])
            behind.append(begun.wait_for(lambda: len(steps(session)) > own + 1, timeout=10))
        return scripted_grade(scripted)(group)

    run(scripted, num_prompts=4, session=session, grade=grade)
    assert len(behind) > 4
    assert all(behind[:-2])  # behind the last ones there is no block to wait for


@pytest.mark.parametrize("cursor", [0, 4])
def test_an_error_in_the_grader_surfaces_at_once(cursor):
    scripted = script([2] * 40)
    session = ScriptedSession(scripted, slots=8, block_tokens=4)

    def grade(group):
        if group.cursor == cursor:
            raise ValueError(f"no rule for {group.cursor}")
        return scripted_grade(scripted)(group)

    reports = []

    def report(message):
        reports.append(message)
        assert len(reports) < 100, "no error, and no end"

    before = threading.active_count()
    with pytest.raises(ValueError, match=f"no rule for {cursor}"):
        run(scripted, num_prompts=10, session=session, grade=grade, report=report)
    assert len(steps(session)) <= cursor // 2 + 2
    assert threading.active_count() == before


def test_no_slot_idles_while_more_groups_are_surely_needed():
    """Groups are surely needed if they are even with all under way informative.

    Verdicts are known a block late.
    """
    idle_steps = 0
    for seed in range(20):
        script = long_tailed_script(seed, prompts=120)
        session = ScriptedSession(script, slots=24, block_tokens=4)
        run(script, num_prompts=12, session=session)
        issued, known, finished = 0, [], []
        for call in session.calls:
            issued += call[0] == "submit"
            if call[0] == "step":
                useful_B = call[1:25]
                useless = sum(cursor not in script.informative for cursor in known)
                if 0 in useful_B:
                    idle_steps += 1
                    assert issued - useless >= 12
                known, finished = known + finished, list(call[25:])
    assert idle_steps > 0


@pytest.mark.parametrize("rate", [0.2, 0.9])
def test_little_more_is_issued_than_needed(rate):
    """The slots hold the whole step at once, so that the first guess precedes all verdicts.

    The mean need is N / rate prompts. A standard deviation more is aimed at, so that the guess is
    mostly enough; with the further guesses where it is not, the bound is 1.5 of them and a prompt.
    """
    num_prompts, issued, sampled, blocks = 16, [], [], []
    for seed in range(60):
        scripted = script(2 * (np.random.default_rng(seed).random(400) < rate))
        rollouts = run(scripted, num_prompts=num_prompts, slots=400 * G, expected_rate=rate)
        issued.append(rollouts.issued)
        sampled.append(len(rollouts.sampled))
        blocks.append(len(rollouts.stats.blocks))
    spread = np.sqrt(num_prompts * (1 - rate)) / rate
    assert np.mean(sampled) == pytest.approx(num_prompts / rate, rel=0.1)
    assert np.mean(issued) < num_prompts / rate + 1.5 * spread + 1
    assert np.mean(np.array(blocks) == 1) > 0.7


@pytest.mark.parametrize("expected_rate", [0.1, 1.0])
def test_a_wrong_expectation_is_soon_corrected(expected_rate):
    """Slots hold a third of what is needed, and less than half as much again is issued."""
    issued, sampled = [], []
    for seed in range(20):
        scripted = script(2 * (np.random.default_rng(seed).random(400) < 0.4))
        rollouts = run(scripted, num_prompts=24, slots=20 * G, expected_rate=expected_rate)
        issued.append(rollouts.issued)
        sampled.append(len(rollouts.sampled))
    assert np.mean(issued) < 1.5 * np.mean(sampled)


# Accounts


def test_the_stats_add_up():
    """Two groups run on six slots, in blocks of four steps, and are counted by hand."""
    lengths = np.array([[2, 4, 6, 9], [1, 5, 5, 5]])
    scripted = Script(np.array([[True, True, False, False]] * 2), lengths)
    session = ScriptedSession(scripted, slots=6, block_tokens=4)
    rollouts = run(scripted, num_prompts=2, dynamic=False, session=session)
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
    assert stats.blocks is session.blocks


def test_the_graders_time_is_reported():
    scripted = script([2, 2])
    delays = Delays(scripted, most=0.05, seed=0)
    seconds = run(scripted, num_prompts=2, grade=delays, slots=2 * G).stats.seconds
    assert 0 < seconds["verify"] < 0.2
    assert 0 < seconds["verify_wait"] < 0.2  # nothing was left to decode meanwhile
    assert (seconds["prefill"], seconds["decode"], seconds["host"]) == (1.0, 2.0, 3.0)


def test_progress_names_the_groups_found():
    reports = []
    run(script([2, 0, 0, 2]), num_prompts=2, slots=G, block_tokens=8, report=reports.append)
    assert reports[0] == "rollout: 0 informative of 0 groups, 2 wanted"
    assert reports[-1] == "rollout: 1 informative of 3 groups, 2 wanted"
    reports.clear()
    run(script([2, 0]), num_prompts=2, dynamic=False, report=reports.append)
    assert reports[0] == "rollout: 0 groups, 2 wanted"


def test_rollout_rows_say_what_was_trained_on():
    rollouts = run(script([0, 2]), num_prompts=1)
    groups = rollouts.sampled
    responses = list(groups[1].responses)
    responses[3] = dataclasses.replace(responses[3], stopped=False)
    groups[1] = dataclasses.replace(groups[1], responses=tuple(responses))
    reward_PG = np.array([[-1.0] * G, [1.0, 1.0, -1.0, -1.5]], np.float32)
    rows = list(rollout_rows(rollouts, reward_PG))
    assert [(row["cursor"], row["sample"]) for row in rows] == [
        (cursor, sample) for cursor in (0, 1) for sample in range(G)
    ]
    assert [row["trained"] for row in rows] == [False] * G + [True] * G
    assert [row["correct"] for row in rows] == [False] * G + [True, True, False, False]
    assert [row["reward"] for row in rows] == reward_PG.ravel().tolist()
    assert [row["truncated"] for row in rows] == [False] * 7 + [True]
    assert rows[0]["response"] == "7"
    assert (rows[0]["prediction"], rows[4]["prediction"]) == (None, "7")
    assert {row["tokens"] for row in rows} == {3}
