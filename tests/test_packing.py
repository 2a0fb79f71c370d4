"""Packing: every token once, aligned with its target, inside the budget of a row."""

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


def segments(packed: PackedRows):
    """The arrays of each packed sequence, as dicts."""
    fields = [field.name for field in dataclasses.fields(packed)]
    for b in range(len(packed.tokens)):
        for number in range(1, packed.segment[b].max() + 1):
            member_T = packed.segment[b] == number
            yield {name: getattr(packed, name)[b][member_T] for name in fields}


def test_a_row_by_hand():
    """A target is the token after; the response's entries start at the prompt's last token."""
    a = sequence([5, 6, 7], [8, 9], advantage=2.0)
    b = sequence([3], [4], advantage=-1.0)
    packed = pack([b, a], row_tokens=7)
    assert packed.tokens.tolist() == [[5, 6, 7, 8, 3, 0, 0]]
    assert packed.target.tolist() == [[6, 7, 8, 9, 4, 0, 0]]
    assert packed.segment.tolist() == [[1, 1, 1, 1, 2, 0, 0]]
    assert packed.is_response.tolist() == [[False, False, True, True, True, False, False]]
    assert packed.advantage.tolist() == [[0, 0, 2, 2, -1, 0, 0]]
    np.testing.assert_array_equal(
        packed.behavior_logp, [[0, 0, *a.behavior_logp, *b.behavior_logp, 0, 0]]
    )
    np.testing.assert_array_equal(packed.weight, [[0, 0, *a.weight, *b.weight, 0, 0]])


@pytest.mark.parametrize("row_tokens", [16, 17, 40, 1000])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_token_is_packed_once_and_stays_aligned(seed, row_tokens):
    sequences = random_sequences(seed, count=23)
    packed = pack(sequences, row_tokens=row_tokens)
    assert packed.tokens.shape[1] == row_tokens
    found = set()
    for got in segments(packed):
        answer = got["is_response"]
        number = int(got["advantage"][answer][0])
        assert number not in found
        found.add(number)
        s = sequences[number - 1]
        ids = [*s.prompt, *s.response]
        assert got["tokens"].tolist() == ids[:-1]
        assert got["target"].tolist() == ids[1:]
        assert answer.tolist() == [False] * (len(s.prompt) - 1) + [True] * len(s.response)
        assert got["advantage"][answer].tolist() == [number] * len(s.response)
        np.testing.assert_array_equal(got["behavior_logp"][answer], s.behavior_logp)
        np.testing.assert_array_equal(got["weight"][answer], s.weight)
        for name in ("behavior_logp", "advantage", "weight"):
            assert not got[name][~answer].any(), name
    assert found == set(range(1, len(sequences) + 1))
    padding = packed.segment == 0
    assert padding.sum() == packed.tokens.size - sum(
        len(s.prompt) + len(s.response) - 1 for s in sequences
    )
    for field in dataclasses.fields(packed):
        assert not getattr(packed, field.name)[padding].any(), field.name


def test_the_segments_of_a_row_are_contiguous_and_padding_is_at_its_end():
    packed = pack(random_sequences(3, count=23), row_tokens=24)
    for segment_T in packed.segment:
        used = segment_T[segment_T > 0]
        assert not segment_T[len(used) :].any()
        assert np.isin(np.diff(used), (0, 1)).all()
        assert used[0] == 1


def test_the_stop_token_is_trained_also_where_its_id_is_the_padding_id():
    """Id 0 fills the padding; here it is in the prompt, inside a response and its stop token."""
    packed = pack([sequence([0, 4], [5, 0, 6, 0])], row_tokens=8)
    assert packed.tokens.tolist() == [[0, 4, 5, 0, 6, 0, 0, 0]]
    assert packed.target.tolist() == [[4, 5, 0, 6, 0, 0, 0, 0]]
    assert packed.is_response.tolist() == [[False, True, True, True, True, False, False, False]]
    assert (packed.weight > 0).tolist() == packed.is_response.tolist()


def test_sequences_of_the_same_length_share_rows_without_waste():
    packed = pack([sequence([1, 2], [3, 4, 5])] * 6, row_tokens=8)
    assert packed.tokens.shape == (3, 8)
    assert (packed.segment > 0).all()


def test_short_sequences_fill_the_room_that_long_ones_leave():
    lengths = [9, 2, 7, 3, 5, 1, 4, 6, 8]  # entries, of a budget of 10 a row: 45 in 5 rows
    packed = pack([sequence([1], [2] * n) for n in lengths], row_tokens=10)
    assert len(packed.tokens) == 5


def test_a_sequence_that_fits_no_row_is_refused_with_the_setting():
    fits = sequence([1, 2, 3], [4, 5])
    assert pack([fits], row_tokens=4).tokens.shape == (1, 4)
    with pytest.raises(ValueError, match=r"4 tokens .* learner\.row_tokens = 3"):
        pack([sequence([1], [2]), fits], row_tokens=3)


def test_micro_batches_keep_the_rows_and_fill_up_with_padding():
    packed = pack([sequence([1, 2], [3, i]) for i in range(4, 9)], row_tokens=3)
    arrays, used = micro_batches(packed, num_micro=4, rows=2)
    assert used == 3
    for field in dataclasses.fields(packed):
        before, after = getattr(packed, field.name), getattr(arrays, field.name)
        assert after.shape == (4, 2, 3)
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(after.reshape(8, 3)[:5], before)
        assert not after.reshape(8, 3)[5:].any()


def test_micro_batches_count_only_those_in_use():
    packed = pack([sequence([1, 2], [3, i]) for i in range(4, 8)], row_tokens=3)
    assert micro_batches(packed, num_micro=4, rows=2)[1] == 2
    assert micro_batches(packed, num_micro=1, rows=4)[1] == 1
    with pytest.raises(ValueError, match="4 packed rows do not fit 1 micro-batches of 2"):
        micro_batches(packed, num_micro=1, rows=2)
