"""Dynamic sampling (Eq. 11) and partial rollouts run as a stream over scripted responses."""

import dataclasses
import functools
import itertools
import threading
import time
from types import SimpleNamespace

import golden
import jax
import numpy as np
import pytest
from engines import RUN_KEY, SAMPLING

from dapo_jax.grading import Grading
from dapo_jax.logs import metrics
from dapo_jax.rollout import StepPlan, collect, taken_up
from dapo_jax.sampler.cache import Cache, decode_sizes
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.types import Example, Group, Prompt, Response, Rollouts, Status, Verdict
from sharding.mesh import make_mesh

(UNUSED,) = (it for it in metrics.METRICS if it.key == "engine/unused_tokens_fraction")
G = 4
PARTS = {"prefill", "decode", "host", "verify", "verify_wait"}  # of a step's seconds


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
    return Prompt(np.array([0, cursor + 1], np.int32), Example((), "7", "script", cursor))


class Blank:
    """An engine without devices, which samples the same token at all places."""

    shards, config = 1, SimpleNamespace(routes=None)
    mesh = make_mesh(data=1, model=1, devices=jax.devices()[:1])

    def __init__(self, cache: Cache):
        self.cache, self.sizes = cache, decode_sizes(cache, kernel=True)

    def compile(self, *samplings):
        pass

    def new_pages(self):
        return None, None

    def prefill(self, *arguments):
        return None, None, None

    def copy(self, pages, copy_M4):
        return pages

    def decode(self, params, prompt_pages, pages, run_key_Z, rows, *more):
        shape = self.cache.block_tokens, len(rows)
        return None, np.ones(shape, int), np.zeros(shape), None


class ScriptedSession(Session):
    """A session whose responses have scripted lengths, with a roomy cache and no devices.

    `calls` is all that was asked of it, in order; a step also has what each slot sampled and which
    groups it finished. others: lengths of groups of stream 1, which are there from the beginning;
    they have the script's last cursors.
    """

    def __init__(self, script: Script, *, slots: int, block_tokens: int, others=()):
        self._script, longest = script, int(script.length_PG.max())
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
        sampling = dataclasses.replace(SAMPLING, stop_ids=(), max_response_tokens=longest)
        super().__init__(Blank(cache), None, *[Stream(RUN_KEY, sampling)] * 2)
        for cursor, lengths in enumerate(others, start=len(script.length_PG) - len(others)):
            limits = np.minimum(lengths, longest).tolist()
            super().submit(cursor, prompt_at(cursor), group_size=G, max_tokens=limits, stream=1)

    def submit(self, cursor, prompt, *, group_size, begun=()) -> None:
        assert prompt.token_ids.tolist() == [0, cursor + 1]
        self.calls.append(("submit", cursor))
        limits = self._script.length_PG[cursor, :group_size].tolist()
        super().submit(cursor, prompt, group_size=group_size, max_tokens=limits, begun=begun)

    def cancel(self, cursor: int) -> None:
        self.calls.append(("cancel", cursor))
        super().cancel(cursor)

    def step(self, *, more: bool = False) -> list[Group]:
        finished = super().step(more=more)
        self.calls.append(("step", *self._useful_B.tolist(), *(it.cursor for it in finished)))
        return finished

    def _keep(self, plan, *block):
        used_N, stopped_N = super()._keep(plan, *block)
        self._useful_B = np.zeros(self.slots, int)
        self._useful_B[self._scheduler._slots.active_DB[0]] = used_N
        return used_N, stopped_N

    def resume(self, params=None) -> None:
        super().resume(params)
        self.calls: list[tuple] = []


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


def plan_of(script: Script, *, num_prompts, max_prompts, grade=None, **rules) -> StepPlan:
    return StepPlan(
        prompt_at,
        grade or scripted_grade(script),
        group_size=script.correct_PG.shape[1],
        num_prompts=num_prompts,
        max_prompts=max_prompts,
        max_tokens=int(script.length_PG.max()),
        **rules,
    )


def run(
    script: Script,
    cursor=0,
    *,
    slots=8,
    block_tokens=4,
    informative_share=0.5,
    max_prompts=None,
    session=None,
    report=lambda message: None,
    on_other_groups=lambda finished: None,
    **rules,
) -> Rollouts:
    """Runs `collect` over a script; the cap, unless given, is the script's end."""
    session = session or ScriptedSession(script, slots=slots, block_tokens=block_tokens)
    plan = plan_of(script, max_prompts=max_prompts or len(script.correct_PG) - cursor, **rules)
    how = {"report": report, "on_other_groups": on_other_groups}
    return collect(session, plan, cursor, informative_share=informative_share, **how)


def cursors(rollouts: Rollouts) -> list[int]:
    """Lists the sampled groups' places in the stream."""
    return [group.cursor for group in rollouts.sampled]


def kept_cursors(rollouts: Rollouts) -> list[int]:
    return [rollouts.sampled[p].cursor for p in rollouts.kept]


def steps(session: ScriptedSession) -> list[tuple]:
    return [call for call in session.calls if call[0] == "step"]


def test_streaming_keeps_what_the_batchwise_filter_keeps_whatever_the_lengths():
    """Those that finish first are shorter: they would teach a policy to be brief."""
    rng = np.random.default_rng(0)
    differing = capped = 0
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
    assert 0 < capped < 50
    assert differing > 60


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
        assert one.length_PG.sum() <= one.stats.sampled_tokens < one.stats.busy_slot_steps
        while session.unfinished:
            finished += session.step()
        assert sorted(group.cursor for group in finished) == list(range(18, 24))
    assert left > 5


def test_golden_dynamic_sampling(shared):
    """Ours keeps the reference's choice; where that raises at the cap, ours returns the rest."""
    # By the shaped reward: see test_algorithm.py.
    rows = [row for row in golden.dynamic_sampling(shared) if row["metric"] != "score"]
    assert {row["error"] for row in rows} == {None, "ValueError"}
    for row in rows:
        correct_NPG = np.array([batch["acc"] for batch in row["gen_batches"]]) > 0
        most = row["max_num_gen_batches"]
        batches, generation_prompts, group_size = correct_NPG.shape
        correct_PG = correct_NPG.reshape(-1, group_size)
        length_PG = long_tailed_script(0, prompts=len(correct_PG)).length_PG[:, :1]
        rollouts = run(
            Script(correct_PG, np.broadcast_to(length_PG, correct_PG.shape)),
            num_prompts=row["train_batch_size"],
            max_prompts=generation_prompts * min(batches, most),
        )
        used_batches = -(-len(rollouts.sampled) // generation_prompts)
        assert used_batches == (row["num_gen_batches"] or most), row["id"]
        if row["error"] is None:
            responses = rollouts.kept[:, None] * group_size + np.arange(group_size)
            assert responses.ravel().tolist() == row["kept_trajectories"], row["id"]
        else:
            assert len(rollouts.kept) < row["train_batch_size"], row["id"]


def test_a_step_waits_for_the_groups_before_the_last_one_kept_and_cancels_those_behind():
    """Group 0 is slow and not informative; group 3 is slower still, and not needed."""
    slow = script([0, 2, 2, 2, 2], length_tokens=np.array([40, 2, 2, 99, 2]))
    session = ScriptedSession(slow, slots=5 * G, block_tokens=4)
    rollouts = run(slow, num_prompts=2, informative_share=0.1, session=session)
    assert rollouts.kept.tolist() == [1, 2]
    assert cursors(rollouts) == [0, 1, 2]
    assert (rollouts.cursor, rollouts.issued) == (3, 5)
    assert [call for call in session.calls if call[0] == "cancel"] == [("cancel", 3)]
    assert session.calls.index(("cancel", 3)) < session.calls.index(steps(session)[2])
    assert len(steps(session)) == 10  # the 40 tokens of group 0
    assert session.unfinished == []
    following = run(slow, rollouts.cursor, num_prompts=2)
    assert cursors(following) == [3, 4]


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
        assert min(seconds[part] for part in PARTS) > 0
    assert schedules[0] == schedules[1] == schedules[2]
    assert {call[0] for call in schedules[0][0]} == {"submit", "cancel", "step"}


def test_a_verdict_comes_with_the_next_exchange():
    scripted, may_go_on = script([2]), threading.Event()
    session = ScriptedSession(scripted, slots=G, block_tokens=4)
    session.submit(0, prompt_at(0), group_size=G)
    (group,) = session.step()

    def grade(group):
        assert may_go_on.wait(10)
        return scripted_grade(scripted)(group)

    with Grading(grade) as grading:
        assert grading.exchange([group]) == []
        may_go_on.set()
        assert [group.cursor for group in grading.exchange([])] == [0]


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


@pytest.mark.parametrize("informative_share", [0.1, 0.4, 1.0])
def test_little_more_is_issued_than_needed_whatever_was_expected(informative_share):
    """A share of 0.4 is informative. Slots hold two thirds of what is needed."""
    issued, sampled, blocks = [], [], []
    for seed in range(20):
        scripted = script(2 * (np.random.default_rng(seed).random(400) < 0.4))
        session = ScriptedSession(scripted, slots=40 * G, block_tokens=4)
        how = {"num_prompts": 24, "informative_share": informative_share}
        rollouts = run(scripted, session=session, **how)
        issued.append(rollouts.issued)
        sampled.append(len(rollouts.sampled))
        blocks.append(len(steps(session)))
    assert np.mean(issued) < 1.5 * np.mean(sampled)
    assert np.mean(blocks) < 4


def test_the_stats_add_up():
    """Without dynamic sampling two groups run on six slots, in blocks of four steps, by hand."""
    lengths = np.array([[2, 4, 6, 9], [1, 5, 5, 5]])
    scripted = Script(np.array([[True] * G, [True, True, False, False]]), lengths)
    session, reports = ScriptedSession(scripted, slots=6, block_tokens=4), []
    how = {"dynamic_sampling": False, "session": session, "report": reports.append}
    rollouts = run(scripted, num_prompts=2, **how)
    assert (rollouts.kept.tolist(), rollouts.cursor, rollouts.issued) == ([0, 1], 2, 2)
    assert reports[0] == "rollout: 0 of 2 groups, 0 graded"
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
    assert set(stats.seconds) == PARTS


def steps_of(script, *, count, every_steps=1, num_prompts=4, max_prompts=400, **rules):
    """Runs steps one after the other: [(calls of a session, what was partial before, rollouts)].

    every_steps: as many share a session.
    """
    cursor, partial, found, session = 0, [], [], None
    plan = plan_of(script, num_prompts=num_prompts, max_prompts=max_prompts, **rules)
    for step in range(count):
        if step % every_steps:
            session.resume()
        else:
            session = ScriptedSession(script, slots=16, block_tokens=2)
        how = {"informative_share": 0.5, "report": lambda text: None}
        rollouts = collect(session, plan, cursor, partial, **how)
        found.append((session.calls, partial, rollouts))
        cursor, partial = rollouts.cursor, rollouts.partial
    return found


@pytest.mark.parametrize("every_steps", [1, 4])
@pytest.mark.parametrize("partial_rollout_steps", [1, 3])
def test_no_slot_waits_and_no_group_is_lost(partial_rollout_steps, every_steps):
    """Each group is sampled once, whole, and slots stay full while later steps can use more."""
    script, seen, idle, ages = long_tailed_script(0, prompts=600), [], [], []
    how = {"partial_rollout_steps": partial_rollout_steps, "every_steps": every_steps}
    for calls, before, rollouts in steps_of(script, count=25, **how):
        kept = kept_cursors(rollouts)
        seen += [group.cursor for group in rollouts.sampled]
        informative = [g.cursor for g in rollouts.sampled if g.cursor in script.informative]
        assert kept == informative[:4] and len(kept) == 4
        for group in rollouts.sampled:
            lengths = [len(r.tokens_T) for r in group.responses]
            assert lengths == script.length_PG[group.cursor].tolist()
        ages += [len(it.responses[0].ends) for it in rollouts.partial]
        old = [it for it in before if len(it.responses[0].ends) == partial_rollout_steps]
        waits = any(group.is_unfinished for group in old)
        if before and not waits:
            idle += [call[1:17].count(0) for call in calls if call[0] == "step"]
        partial = [it.cursor for it in rollouts.partial]
        assert sorted([*seen, *partial]) == list(range(rollouts.cursor))
        ended = sum(group.length_G.sum() for group in rollouts.sampled)
        unused = UNUSED.value(metrics.Step(None, 0, rollouts, None, (), 0.0, {}))
        assert unused == pytest.approx(1 - rollouts.kept_tokens / ended)
        # The first step trained on the groups that were complete first: the short ones.
        assert len(seen) > len(rollouts.sampled) or kept == script.informative[:4]
    assert max(ages) == partial_rollout_steps
    assert sum(idle) == 0


def test_at_the_cap_a_step_ends_with_what_there_is():
    """None of the prompts is informative, and only so many may begin."""
    script = long_tailed_script(0, prompts=100)
    script = dataclasses.replace(script, correct_PG=np.zeros_like(script.correct_PG))
    ((*_, rollouts),) = steps_of(script, count=1, partial_rollout_steps=2, max_prompts=10)
    assert (len(rollouts.sampled), len(rollouts.kept), rollouts.partial) == (10, 0, [])


def test_a_fork_takes_over_only_what_its_own_config_could_have_sampled():
    cut, ended, begun, no_room = (
        Response(np.zeros(n, np.int32), np.zeros(n, np.float32), Status[status])
        for n, status in ((9, "CUT"), (4, "STOPPED"), (6, "RUNNING"), (5, "CUT"))
    )
    no_room = dataclasses.replace(no_room, turns=[])  # for an answer
    partial = [Group(3, None, (cut, ended, begun, no_room))]
    sizes = {"group_size": 4, "num_prompts": 1, "max_prompts": 1, "max_tokens": 9}
    plan = StepPlan(prompt_at, None, **sizes, partial_rollout_steps=1)
    assert taken_up(plan, 7, partial) == (7, partial)
    others = [{"group_size": 3}, {"group_size": 5}, {"max_tokens": 8}, {"max_tokens": 10}]
    for other in (*others, {"partial_rollout_steps": 0}):
        assert taken_up(dataclasses.replace(plan, **other), 7, partial) == (3, ())
