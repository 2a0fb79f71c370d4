"""Packing: which tokens are on policy, full rows, micro-batches; test_learner.py has the rest."""

import dataclasses

import numpy as np

from dapo_jax.packing import into_micro_batches, pack, plan_rows
from dapo_jax.types import Batch, Group, Prompt, Response, Status


def group(prompt, *responses) -> Group:
    made = [Response(np.int32(r), np.zeros(len(r)), status=Status.STOPPED) for r in responses]
    return Group(cursor=0, prompt=Prompt(np.int32(prompt), None), responses=tuple(made))


def packed(groups, *, row_tokens: int) -> Batch:
    shape = (len(groups), len(groups[0].responses))
    lengths = [len(it.prompt.token_ids) for it in groups], [it.length_G for it in groups]
    rows = plan_rows(*lengths, row_tokens=row_tokens, share_prompts=True)
    return pack(groups, np.ones(shape), np.ones((*shape, row_tokens)), rows, row_tokens)


def test_only_groups_that_began_in_this_step_are_on_policy():
    """The newest policy sampled some tokens of others, but behind earlier keys and values."""
    fresh = group([1, 2, 3], [4] * 3, [5] * 3)
    later = dataclasses.replace(fresh.responses[1], ends=(2,))
    fresh = dataclasses.replace(fresh, responses=(fresh.responses[0], later))
    batch = packed([fresh], row_tokens=8)
    on_policy = [batch.is_on_policy_BT[batch.branch_BT == n].tolist() for n in range(3)]
    assert on_policy == [[False] * 2, [True] * 3, [False] * 3]


def test_rows_of_real_lengths_are_full():
    """Lengths spread like DAPO's, log-normal, 32 groups of 16, use 95 % of the entries."""
    rng = np.random.default_rng(0)
    length_PG = np.clip(np.round(rng.lognormal(7.5, 1.3, (32, 16))), 1, 20_480).astype(int)
    assert length_PG.max() > 100 * length_PG.min()
    for share_prompts in (True, False):
        rows = plan_rows([145] * 32, length_PG, row_tokens=22_528, share_prompts=share_prompts)
        pieces = [piece for row in rows for piece in row]
        used = 144 * len(pieces) + length_PG.sum()
        assert used / (len(rows) * 22_528) > 0.95


def test_prompts_and_responses_begin_at_multiples():
    """As a TPU's tiles need. The longer response is first; a row may end with its last token."""
    groups, how = [group([1, 2, 3, 4], [5] * 2, [6] * 5)], {"part_multiple": 4}
    of_group = [4], [[2, 5]]
    rows = {n: plan_rows(*of_group, row_tokens=n, share_prompts=False, **how) for n in (17, 18)}
    assert [len(it) for it in rows.values()] == [2, 1]
    batch = pack(groups, np.ones((1, 2)), np.ones((1, 2, 5)), rows[18], 18, **how)
    for name, expected in (
        ("segment", [1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 2, 2, 2, 0, 2, 2]),
        ("branch", [0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 2]),
        ("position", [0, 1, 2, 0, 3, 4, 5, 6, 7, 0, 0, 0, 0, 1, 2, 0, 3, 4]),
        ("target", [2, 3, 4, 0, 6, 6, 6, 6, 6, 0, 0, 0, 2, 3, 4, 0, 5, 5]),
    ):
        assert getattr(batch, f"{name}_BT").tolist() == [expected]


def test_micro_batches_keep_the_rows_and_fill_up_with_padding():
    groups = [group([1, 2], [3, i]) for i in range(5)]
    batch = packed(groups, row_tokens=3)
    dealt = into_micro_batches(batch, most_micro=4, rows=2)
    assert dealt.num_micro == 3
    for name, dtype in Batch.row_fields().items():
        before, after = getattr(batch, name), getattr(dealt, name)
        assert after.shape == (4, 2, 3)
        assert after.dtype == dtype
        np.testing.assert_array_equal(after.reshape(8, 3)[:5], before)
        assert not after.reshape(8, 3)[5:].any()
