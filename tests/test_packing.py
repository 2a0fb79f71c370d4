"""Packing: every token once, aligned with its target and behind its prompt, in a row's budget."""

import dataclasses

import numpy as np
import pytest

from dapo_jax.packing import PackedRows, TrainSequence, micro_batches, pack


def sequence(prompt, response, *, advantage=1.0, seed=0) -> TrainSequence:
    rng = np.random.default_rng(seed)
    return TrainSequence(
        prompt=np.asarray(prompt, np.int32),
        response=np.asarray(response, np.int32),
        behavior_logp=-rng.exponential(1.0, len(response)).astype(np.float32),
        advantage=advantage,
        weight=rng.uniform(0.1, 1.0, len(response)).astype(np.float32),
    )


def random_sequences(seed: int, *, count: int) -> list[TrainSequence]:
    """Sequences that carry their number as the advantage; some responses have one token."""
    rng = np.random.default_rng(seed)
    return [
        sequence(
            rng.integers(0, 9, rng.integers(1, 6)),
            rng.integers(0, 9, rng.integers(1, 12)),
            advantage=i + 1.0,
            seed=i,
        )
        for i in range(count)
    ]


def grouped_sequences(seed: int, *, groups: int, size: int) -> list[TrainSequence]:
    """Groups of responses to prompts of their own, numbered by the advantage, in any order."""
    rng = np.random.default_rng(seed)
    prompts = [np.append(rng.integers(0, 9, rng.integers(0, 6)), 10 + g) for g in range(groups)]
    made = [
        sequence(prompts[i % groups], rng.integers(0, 9, rng.integers(1, 12)), advantage=i + 1.0)
        for i in range(groups * size)
    ]
    return [made[i] for i in rng.permutation(len(made))]


def branches(packed: PackedRows):
    """The arrays of each response with those of its prompt before it, as dicts."""
    fields = [field.name for field in dataclasses.fields(packed)]
    for b in range(len(packed.tokens)):
        for number in range(1, packed.branch[b].max() + 1):
            member_T = packed.branch[b] == number
            (segment,) = set(packed.segment[b][member_T])
            member_T |= (packed.segment[b] == segment) & (packed.branch[b] == 0)
            yield {name: getattr(packed, name)[b][member_T] for name in fields}


def test_a_row_by_hand():
    """A target is the token after; a response begins with the prompt's last token, fed again."""
    a = sequence([5, 6, 7], [8, 9], advantage=2.0)
    b = sequence([5, 6, 7], [4], advantage=1.0)
    c = sequence([3], [4], advantage=-1.0)
    packed = pack([c, b, a], row_tokens=7, share_prompts=True)
    assert packed.tokens.tolist() == [[5, 6, 7, 8, 7, 3, 0]]
    assert packed.target.tolist() == [[6, 7, 8, 9, 4, 4, 0]]
    assert packed.position.tolist() == [[0, 1, 2, 3, 2, 0, 0]]
    assert packed.segment.tolist() == [[1, 1, 1, 1, 1, 2, 0]]
    assert packed.branch.tolist() == [[0, 0, 1, 1, 2, 3, 0]]
    assert packed.is_response.tolist() == [[False, False, True, True, True, True, False]]
    assert packed.advantage.tolist() == [[0, 0, 2, 2, 1, -1, 0]]
    np.testing.assert_array_equal(
        packed.behavior_logp, [[0, 0, *a.behavior_logp, *b.behavior_logp, *c.behavior_logp, 0]]
    )
    np.testing.assert_array_equal(packed.weight, [[0, 0, *a.weight, *b.weight, *c.weight, 0]])
    apart = pack([c, b, a], row_tokens=8, share_prompts=False)
    assert apart.tokens.tolist() == [[5, 6, 7, 8, 5, 6, 7, 3]]
    assert apart.position.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert apart.segment.tolist() == [[1, 1, 1, 1, 2, 2, 2, 3]]


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("row_tokens", [16, 17, 40, 1000])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_token_is_packed_once_and_stays_aligned(seed, row_tokens, share_prompts):
    sequences = grouped_sequences(seed, groups=5, size=5)
    packed = pack(sequences, row_tokens=row_tokens, share_prompts=share_prompts)
    assert packed.tokens.shape[1] == row_tokens
    numbered = {int(s.advantage): s for s in sequences}
    for got in branches(packed):
        answer = got["is_response"]
        s = numbered.pop(int(got["advantage"][answer][0]))
        ids = [*s.prompt, *s.response]
        assert got["tokens"].tolist() == ids[:-1]
        assert got["target"].tolist() == ids[1:]
        assert got["position"].tolist() == list(range(len(ids) - 1))
        assert answer.tolist() == [False] * (len(s.prompt) - 1) + [True] * len(s.response)
        assert got["advantage"][answer].tolist() == [s.advantage] * len(s.response)
        np.testing.assert_array_equal(got["behavior_logp"][answer], s.behavior_logp)
        np.testing.assert_array_equal(got["weight"][answer], s.weight)
        for name in ("behavior_logp", "advantage", "weight"):
            assert not got[name][~answer].any(), name
    assert not numbered
    assert packed.is_response.sum() == sum(len(s.response) for s in sequences)
    padding = packed.segment == 0
    for field in dataclasses.fields(packed):
        assert not getattr(packed, field.name)[padding].any(), field.name


def test_a_prompt_is_there_once_for_all_responses_that_fit_behind_it():
    sequences = grouped_sequences(0, groups=5, size=5)
    shared = pack(sequences, row_tokens=1_000, share_prompts=True)
    apart = pack(sequences, row_tokens=1_000, share_prompts=False)
    prompts = {s.prompt.tobytes(): len(s.prompt) - 1 for s in sequences}
    assert (~shared.is_response & (shared.segment > 0)).sum() == sum(prompts.values())
    assert (~apart.is_response & (apart.segment > 0)).sum() == 5 * sum(prompts.values())


def test_rows_of_real_lengths_are_full():
    """Log-normal lengths like DAPO's, 32 groups of 16: at least 95 % of the entries are used."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.round(rng.lognormal(7.5, 1.3, (32, 16))), 1, 20_480).astype(int)
    assert lengths.max() > 100 * lengths.min()
    sequences = [
        TrainSequence(np.full(145, g), np.zeros(n), np.zeros(n), 1.0, np.zeros(n))
        for g, group in enumerate(lengths)
        for n in group
    ]
    for share_prompts in (True, False):
        packed = pack(sequences, row_tokens=22_528, share_prompts=share_prompts)
        assert (packed.segment > 0).mean() > 0.95


def test_the_segments_of_a_row_are_contiguous_and_padding_is_at_its_end():
    packed = pack(random_sequences(3, count=23), row_tokens=24, share_prompts=True)
    for segment_T in packed.segment:
        used = segment_T[segment_T > 0]
        assert not segment_T[len(used) :].any()
        assert np.isin(np.diff(used), (0, 1)).all()
        assert used[0] == 1


def test_the_stop_token_is_trained_also_where_its_id_is_the_padding_id():
    """Id 0 fills the padding; here it is in the prompt, inside a response and its stop token."""
    packed = pack([sequence([0, 4], [5, 0, 6, 0])], row_tokens=8, share_prompts=False)
    assert packed.tokens.tolist() == [[0, 4, 5, 0, 6, 0, 0, 0]]
    assert packed.target.tolist() == [[4, 5, 0, 6, 0, 0, 0, 0]]
    assert packed.is_response.tolist() == [[False, True, True, True, True, False, False, False]]
    assert (packed.weight > 0).tolist() == packed.is_response.tolist()


def test_sequences_of_the_same_length_share_rows_without_waste():
    packed = pack([sequence([1, 2], [3, 4, 5])] * 6, row_tokens=8, share_prompts=False)
    assert packed.tokens.shape == (3, 8)
    assert (packed.segment > 0).all()


def test_short_sequences_fill_the_room_that_long_ones_leave():
    lengths = [9, 2, 7, 3, 5, 1, 4, 6, 8]  # entries, of a budget of 10 a row: 45 in 5 rows
    packed = pack([sequence([1], [2] * n) for n in lengths], row_tokens=10, share_prompts=False)
    assert len(packed.tokens) == 5


def test_a_sequence_that_fits_no_row_is_refused_with_the_setting():
    fits = sequence([1, 2, 3], [4, 5])
    assert pack([fits], row_tokens=4, share_prompts=False).tokens.shape == (1, 4)
    with pytest.raises(ValueError, match=r"4 tokens .* learner\.row_tokens = 3"):
        pack([sequence([1], [2]), fits], row_tokens=3, share_prompts=False)


def test_micro_batches_keep_the_rows_and_fill_up_with_padding():
    packed = pack(
        [sequence([1, 2], [3, i]) for i in range(4, 9)], row_tokens=3, share_prompts=False
    )
    arrays, used = micro_batches(packed, num_micro=4, rows=2)
    assert used == 3
    for field in dataclasses.fields(packed):
        before, after = getattr(packed, field.name), getattr(arrays, field.name)
        assert after.shape == (4, 2, 3)
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(after.reshape(8, 3)[:5], before)
        assert not after.reshape(8, 3)[5:].any()


def test_micro_batches_count_only_those_in_use():
    packed = pack(
        [sequence([1, 2], [3, i]) for i in range(4, 8)], row_tokens=3, share_prompts=False
    )
    assert micro_batches(packed, num_micro=4, rows=2)[1] == 2
    assert micro_batches(packed, num_micro=1, rows=4)[1] == 1
    with pytest.raises(ValueError, match="4 packed rows do not fit 1 micro-batches of 2"):
        micro_batches(packed, num_micro=1, rows=2)


def test_rows_with_much_to_attend_to_come_first():
    """Devices compute the rows of a micro-batch side by side: they should have as much to do."""
    lengths = [9] * 3 + [3] * 9  # a long response attends to 45 entries, three short ones to 18
    order = np.random.default_rng(0).permutation(len(lengths))
    sequences = [sequence([1], [2] * lengths[i]) for i in order]
    packed = pack(sequences, row_tokens=9, share_prompts=False)
    packed = dataclasses.replace(packed, **{k: v[::-1] for k, v in vars(packed).items()})
    arrays, used = micro_batches(packed, num_micro=3, rows=2)
    assert used == 3
    assert arrays.segment.max(axis=2).tolist() == [[1, 1], [1, 3], [3, 3]]
