"""Packing: every token once, aligned with its target and behind its prompt, in a row's budget."""

import dataclasses

import numpy as np
import pytest

from dapo_jax.packing import into_micro_batches, pack, plan_rows
from dapo_jax.types import Batch, Group, Prompt, Response


def group(prompt, *responses) -> Group:
    """Makes responses to a prompt, whose behaviour log-probabilities tell tokens apart."""
    rng = np.random.default_rng(len(prompt))
    made = [
        Response(np.int32(r), -rng.exponential(1.0, len(r)).astype(np.float32), stopped=True)
        for r in responses
    ]
    return Group(cursor=0, prompt=Prompt(np.int32(prompt), None), responses=tuple(made))


def random_groups(seed: int, *, count: int, size: int) -> list[Group]:
    """Makes groups with prompts of their own; some prompts and responses have one token."""
    rng = np.random.default_rng(seed)
    return [
        group(
            np.append(rng.integers(0, 9, rng.integers(0, 6)), 10 + p),
            *(rng.integers(0, 9, rng.integers(1, 12)) for _ in range(size)),
        )
        for p in range(count)
    ]


def values_of(groups):
    """Makes (advantage_PG, weight_PGT): the response's number from 1, and random weights."""
    P, G = len(groups), max(len(group.responses) for group in groups)
    T = max(group.length_G.max() for group in groups)
    weight_PGT = np.random.default_rng(0).uniform(0.1, 1.0, (P, G, T)).astype(np.float32)
    return np.arange(1.0, P * G + 1).reshape(P, G), weight_PGT


def packed(groups, *, row_tokens: int, share_prompts: bool) -> Batch:
    how = {"row_lengths": (row_tokens,), "micro_batch_rows": 1, "share_prompts": share_prompts}
    return pack(groups, *values_of(groups), **how)


def branches(batch: Batch):
    """Yields each response's arrays, with those of its prompt before it, as a dict."""
    for b in range(len(batch.tokens_BT)):
        for number in range(1, batch.branch_BT[b].max() + 1):
            member_T = batch.branch_BT[b] == number
            (segment,) = set(batch.segment_BT[b][member_T])
            member_T |= (batch.segment_BT[b] == segment) & (batch.branch_BT[b] == 0)
            yield {name: getattr(batch, name)[b][member_T] for name in Batch.row_fields()}


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("row_tokens", [16, 40, 1000])
def test_every_token_is_packed_once_and_stays_aligned(row_tokens, share_prompts):
    groups = random_groups(0, count=5, size=5)
    _, weight_PGT = values_of(groups)
    batch = packed(groups, row_tokens=row_tokens, share_prompts=share_prompts)
    assert batch.tokens_BT.shape[1] == row_tokens
    missing = {(p, g) for p in range(5) for g in range(5)}
    for got in branches(batch):
        answer = got["is_response_BT"]
        advantage = got["advantage_BT"][answer][0]
        p, g = divmod(int(advantage) - 1, 5)
        missing.remove((p, g))
        prompt, response = groups[p].prompt.token_ids, groups[p].responses[g]
        n = len(response.tokens_T)
        ids = [*prompt, *response.tokens_T]
        assert got["tokens_BT"].tolist() == ids[:-1]
        assert got["target_BT"].tolist() == ids[1:]
        assert got["position_BT"].tolist() == list(range(len(ids) - 1))
        assert answer.tolist() == [False] * (len(prompt) - 1) + [True] * n
        assert got["advantage_BT"][answer].tolist() == [advantage] * n
        np.testing.assert_array_equal(got["behavior_logp_BT"][answer], response.behavior_logp_T)
        np.testing.assert_array_equal(got["weight_BT"][answer], weight_PGT[p, g, :n])
        for name in ("behavior_logp_BT", "advantage_BT", "weight_BT"):
            assert not got[name][~answer].any(), name
    assert not missing
    assert batch.is_response_BT.sum() == sum(group.length_G.sum() for group in groups)
    padding = batch.segment_BT == 0
    for name in Batch.row_fields():
        assert not getattr(batch, name)[padding].any(), name
    # Segments are contiguous, numbered from 1, and the padding is at the end of a row.
    for segment_T in batch.segment_BT:
        used = segment_T[segment_T > 0]
        assert not segment_T[len(used) :].any()
        assert np.isin(np.diff(used), (0, 1)).all()
        assert used[0] == 1


def test_only_groups_that_began_in_this_step_are_on_policy():
    """The newest policy sampled some tokens of others, but behind earlier keys and values."""
    fresh = group([1, 2, 3], [4] * 3, [5] * 3)
    later = dataclasses.replace(fresh.responses[1], ends=(2,))
    fresh = dataclasses.replace(fresh, responses=(fresh.responses[0], later))
    batch = packed([fresh], row_tokens=8, share_prompts=True)
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


def test_micro_batches_keep_the_rows_and_fill_up_with_padding():
    groups = [group([1, 2], [3, i]) for i in range(5)]
    batch = packed(groups, row_tokens=3, share_prompts=True)
    dealt = into_micro_batches(batch, num_micro=4, rows=2)
    assert dealt.num_micro == 3
    for name, dtype in Batch.row_fields().items():
        before, after = getattr(batch, name), getattr(dealt, name)
        assert after.shape == (4, 2, 3)
        assert after.dtype == dtype
        np.testing.assert_array_equal(after.reshape(8, 3)[:5], before)
        assert not after.reshape(8, 3)[5:].any()
