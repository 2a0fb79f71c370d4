"""Dynamic sampling (Eq. 11) with scripted generation: which groups a step trains on, and when."""

import golden
import numpy as np
import pytest

from dapo_jax.data import Example, Prompt
from dapo_jax.rollout import Group, collect, rollout_rows
from dapo_jax.verifier import Verdict

G = 4


def group(cursor: int, correct_G, *, length_tokens: int = 3) -> Group:
    """The group of the prompt at `cursor`; every response has `length_tokens` tokens."""
    return Group(
        cursor=cursor,
        prompt=Prompt(np.array([cursor + 1], np.int32), Example((), "7", "script", cursor)),
        responses=[np.full(length_tokens, 5, np.int32) for _ in correct_G],
        behavior_logp=[np.zeros(length_tokens, np.float32) for _ in correct_G],
        stopped_G=np.ones(len(correct_G), bool),
        texts=["Answer: 7" if correct else "7" for correct in correct_G],
        verdicts=[
            Verdict(True, "7", "correct") if correct else Verdict(False, None, "no_answer")
            for correct in correct_G
        ],
    )


class Script:
    """Scripted generation: `num_correct_P[cursor]` of the G responses to a prompt are correct."""

    def __init__(self, num_correct_P, *, length_tokens_P=None):
        self.num_correct_P = num_correct_P
        self.length_tokens_P = length_tokens_P
        self.calls: list[range] = []

    def __call__(self, cursors: range) -> list[Group]:
        self.calls.append(cursors)
        return [
            group(
                cursor,
                np.arange(G) < self.num_correct_P[cursor],
                length_tokens=3 if self.length_tokens_P is None else self.length_tokens_P[cursor],
            )
            for cursor in cursors
        ]


def run(
    script, cursor=0, *, num_prompts, generation_prompts, batches=10, dynamic=True, report=None
):
    return collect(
        script,
        cursor,
        num_prompts=num_prompts,
        generation_prompts=generation_prompts,
        max_generation_batches=batches,
        dynamic_sampling=dynamic,
        report=(lambda message: None) if report is None else report,
    )


def test_the_first_informative_groups_are_kept_in_prompt_order():
    script = Script([0, 4, 2, 0, 1, 4, 3, 3, 0, 1, 2, 2])
    rollouts = run(script, num_prompts=3, generation_prompts=4)
    assert rollouts.kept.tolist() == [2, 4, 6]
    assert script.calls == [range(0, 4), range(4, 8)]
    assert [g.cursor for g in rollouts.sampled] == list(range(8))
    assert rollouts.generation_batches == 2
    # Group 7 is informative too: a surplus, discarded but counted among what was sampled.
    assert rollouts.correct_PG.sum(axis=1).tolist() == [0, 4, 2, 0, 1, 4, 3, 3]


def test_a_full_batch_stops_at_once_and_the_cursor_moves_by_whole_batches():
    script = Script([2] * 40)
    rollouts = run(script, 7, num_prompts=3, generation_prompts=5)
    assert script.calls == [range(7, 12)]
    assert rollouts.kept.tolist() == [0, 1, 2]
    assert rollouts.cursor == 12  # the surplus prompts 10 and 11 are not sampled again
    following = run(script, rollouts.cursor, num_prompts=3, generation_prompts=5)
    assert [g.cursor for g in following.sampled] == list(range(12, 17))


def test_kept_indices_count_from_the_steps_first_prompt_not_from_the_streams():
    rollouts = run(Script([4] * 20 + [0, 2, 2]), 20, num_prompts=2, generation_prompts=3)
    assert rollouts.kept.tolist() == [1, 2]
    assert [rollouts.sampled[p].cursor for p in rollouts.kept] == [21, 22]


@pytest.mark.parametrize(("num_correct_P", "kept"), [([0, 2, 4, 1, 0, 4], [1, 3]), ([4] * 6, [])])
def test_at_the_cap_there_are_fewer_groups_or_none(num_correct_P, kept):
    script = Script(num_correct_P)
    rollouts = run(script, num_prompts=3, generation_prompts=2, batches=3)
    assert rollouts.kept.tolist() == kept
    assert rollouts.generation_batches == len(script.calls) == 3
    assert rollouts.cursor == 6
    assert len(rollouts.sampled) == 6


def test_the_last_batch_before_the_cap_may_complete_the_step():
    rollouts = run(Script([0, 0, 0, 2]), num_prompts=1, generation_prompts=2, batches=2)
    assert rollouts.kept.tolist() == [3]


def test_without_dynamic_sampling_one_batch_is_kept_whole():
    script = Script([0, 4, 2, 0, 1])
    rollouts = run(script, 1, num_prompts=4, generation_prompts=99, dynamic=False)
    assert script.calls == [range(1, 5)]
    assert rollouts.kept.tolist() == [0, 1, 2, 3]
    assert (rollouts.cursor, rollouts.generation_batches) == (5, 1)


def test_the_choice_does_not_look_at_the_lengths():
    """Long and short responses, all informative: the order of prompts alone decides."""
    rng = np.random.default_rng(0)
    num_correct_P = rng.integers(0, G + 1, 60)
    kept = [
        run(
            Script(num_correct_P, length_tokens_P=lengths),
            num_prompts=8,
            generation_prompts=12,
        ).kept.tolist()
        for lengths in (rng.integers(1, 9, 60), np.full(60, 9), np.arange(60)[::-1] + 1)
    ]
    assert kept[0] == kept[1] == kept[2]
    assert len(kept[0]) == 8


def test_shaped_rewards_do_not_make_a_group_informative():
    """All wrong, with lengths that Eq. 13 would punish differently: not informative."""
    all_wrong = group(0, [False] * G)
    for g in range(G):
        all_wrong.responses[g] = np.zeros(10 * g + 1, np.int32)
    rollouts = run(lambda cursors: [all_wrong], num_prompts=1, generation_prompts=1, batches=1)
    assert rollouts.kept.tolist() == []
    assert rollouts.length_PG.tolist() == [[1, 11, 21, 31]]


def test_progress_names_the_groups_found_and_the_batch():
    reports = []
    run(
        Script([2, 0, 0, 2]),
        num_prompts=2,
        generation_prompts=2,
        batches=5,
        report=reports.append,
    )
    assert reports == [
        "rollout: 0/2 informative groups, generation batch 1/5",
        "rollout: 1/2 informative groups, generation batch 2/5",
    ]


def test_golden_dynamic_sampling(shared):
    """The reference's choice; where it raises at the cap, ours returns what there is."""
    compared = 0
    for case in golden.dynamic_sampling_cases(shared):
        if case.filtered_by == "score":  # the shaped reward; see test_algorithm.py
            continue
        _, generation_prompts, group_size = case.correct_NPG.shape
        correct_PG = case.correct_NPG.reshape(-1, group_size) > 0

        def generate_groups(cursors, correct_PG=correct_PG):
            return [group(cursor, correct_PG[cursor]) for cursor in cursors]

        rollouts = run(
            generate_groups,
            num_prompts=case.num_prompts,
            generation_prompts=generation_prompts,
            batches=case.max_generation_batches,
        )
        if case.error is None:
            responses = rollouts.kept[:, None] * group_size + np.arange(group_size)
            assert responses.ravel().tolist() == case.kept_responses, case.name
            assert rollouts.generation_batches == case.generation_batches, case.name
            compared += 1
        else:
            assert len(rollouts.kept) < case.num_prompts, case.name
            assert rollouts.generation_batches == case.max_generation_batches, case.name
    assert compared > 0


def test_rollout_rows_say_what_was_trained_on():
    groups = run(Script([0, 2]), num_prompts=1, generation_prompts=2).sampled
    groups[1].stopped_G[3] = False
    reward_PG = np.array([[-1.0] * G, [1.0, 1.0, -1.0, -1.5]], np.float32)
    rows = list(rollout_rows(groups, reward_PG, np.array([1])))
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
