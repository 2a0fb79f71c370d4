"""Drafts change no bit of what is sampled, whatever they are; right ones save decode steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_engine import (
    ROOMY,
    RUN_KEY,
    SAMPLING,
    SMALL,
    WIDE,
    build,
    by_request,
    random_params,
)

from dapo_jax.sampler import decode
from dapo_jax.sampler.cache import DRAFT_TOKENS, decode_sizes
from dapo_jax.sampler.drafts import NONE, propose, source
from dapo_jax.sampler.session import Session, Stream
from dapo_jax.types import Prompt
from models.kernels import KERNELS, paged_gpu
from models.kernels.cpu import DECODE_OPTIONS
from tests.quick import jit

jit_propose = jit(propose, static_argnames="count")

# Cold enough that responses repeat themselves and each other; stop tokens come now and then.
COLD = dataclasses.replace(SAMPLING, max_response_tokens=40, temperature=0.05, stop_ids=(3, 17))
FEW = dataclasses.replace(ROOMY, slots=4, pages=40, block_tokens=8, max_response_tokens=40)
PROMPTS = {7: np.array([5]), 100: np.arange(10, 18), 0: np.arange(20, 37)}
GROUP_SIZE = 4


@pytest.fixture(scope="module")
def small():
    return random_params(SMALL)[1]


def sample(engine, params, *samplings):
    """Samples all prompts in each stream: ({request: response}, session)."""
    streams = [Stream(jax.random.fold_in(RUN_KEY, i), how) for i, how in enumerate(samplings)]
    session = Session(engine, params, *streams)
    for stream in range(len(streams)):
        for cursor, prompt in PROMPTS.items():
            session.submit(cursor, Prompt(prompt), group_size=GROUP_SIZE, stream=stream)
    responses = {}
    while session.unfinished:
        for group in session.step():
            responses |= {(group.stream, *k): v for k, v in by_request([group]).items()}
    return responses, session


def of_engine(draft_tokens, params, *samplings, config=SMALL, cache=FEW, **how):
    cache = dataclasses.replace(cache, draft_tokens=draft_tokens)
    return sample(*build(config, cache, params, **how), *samplings)


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for request, response in left.items():
        assert response.stopped == right[request].stopped
        np.testing.assert_array_equal(response.tokens_T, right[request].tokens_T)
        np.testing.assert_array_equal(response.behavior_logp_T, right[request].behavior_logp_T)


def steps(session):
    return sum(block.decode_steps for block in session.blocks)


def test_what_followed_the_most_tokens_that_agree_is_proposed():
    """Then the latest place counts; what is behind the end, or nothing, is never proposed."""
    text_BX = np.array(
        [
            # 7 8 9 agree before the first place, 9 before the second.
            [7, 8, 9, 1, 2, 9, 5, 6, 7, 8, 9, 0, 0],
            # As many agree twice: the later place.
            [4, 9, 1, 4, 9, 2, 4, 9, 0, 0, 0, 0, 0],
            # No token came before.
            [1, 2, 3, 4, 5, 0, 0, 0, 0, 0, 0, 0, 0],
            # Of what is nothing, none agrees.
            [NONE, 5, NONE, 6, NONE, 0, 0, 0, 0, 0, 0, 0, 0],
            # A token that repeats itself: all that is known, and then nothing.
            [2, 3, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ]
    )
    end_B = np.array([11, 8, 5, 5, 4])
    found_BT = np.asarray(jit_propose(text_BX, end_B, count=3))
    np.testing.assert_array_equal(found_BT[0], [1, 2, 9])
    np.testing.assert_array_equal(found_BT[1], [2, 4, 9])
    np.testing.assert_array_equal(found_BT[4], [3, NONE, NONE])
    for row, text in zip(found_BT[2:4], text_BX[2:4], strict=True):
        assert set(row.tolist()) <= {NONE, *text.tolist()}


def test_a_source_ends_in_the_slots_own_tokens():
    """The others' ends are before them, as far as there is room."""
    own, others = np.arange(3), [np.arange(10, 15), np.arange(20, 25)]
    row_W = [NONE, 23, 24, NONE, 10, 11, 12, 13, 14, NONE, 0, 1, 2]
    np.testing.assert_array_equal(source(own, others, 13)[1:], row_W[1:])
    np.testing.assert_array_equal(source(own, others, 2), [1, 2])
    np.testing.assert_array_equal(source(own, [], 4), [NONE, 0, 1, 2])


def test_drafts_change_no_bit_and_save_steps(small):
    """Responses of a group that repeat each other; two ways of sampling in one session."""
    truncated = dataclasses.replace(COLD, temperature=0.8, top_p=0.9)
    plain, without = of_engine(0, small, COLD, truncated)
    drafted, session = of_engine(3, small, COLD, truncated)
    assert_same_bits(plain, drafted)
    assert [b.useful_B.tolist() for b in without.blocks] == [
        b.useful_B.tolist() for b in session.blocks
    ]
    assert len({len(r.tokens_T) for r in plain.values()}) > 4
    assert any(r.stopped for r in plain.values()) and not all(r.stopped for r in plain.values())
    assert steps(without) == sum(block.steps for block in without.blocks)
    assert steps(session) < steps(without)


@pytest.mark.slow
def test_drafts_change_no_bit_at_a_width_and_compiled_as_a_run_is():
    """At this width a sum's order shows, and whole programs are compiled as for a run."""
    params = random_params(WIDE)[1]
    sampling = dataclasses.replace(SAMPLING, temperature=0.4, max_response_tokens=40)
    options = DECODE_OPTIONS
    plain, _ = of_engine(0, params, sampling, config=WIDE, decode_options=options)
    drafted, _ = of_engine(3, params, sampling, config=WIDE, decode_options=options)
    assert_same_bits(plain, drafted)


@pytest.mark.slow
def test_drafts_save_steps_on_every_shard(small):
    plain, without = of_engine(0, small, COLD, shards=2)
    drafted, session = of_engine(3, small, COLD, shards=2)
    assert_same_bits(plain, drafted)
    assert steps(session) < 0.9 * steps(without)


def test_no_draft_can_do_harm(small, monkeypatch):
    """Numbers of no token are proposed: wrong drafts, as all others, change nothing."""
    plain, without = of_engine(0, small, COLD)

    def wrong_drafts(text_BX, end_B, *, count):
        return jnp.full((len(text_BX), count), 10**6)

    monkeypatch.setattr(decode, "propose", wrong_drafts)
    drafted, session = of_engine(3, small, COLD)
    assert_same_bits(plain, drafted)
    assert steps(session) == steps(without)


@pytest.mark.slow
def test_drafts_by_the_kernels_of_a_gpu(small, monkeypatch):
    """A position is a row of its own there, so the bits are the same."""
    monkeypatch.setattr(paged_gpu, "pages_per_split", lambda page_tokens: 2)
    short, kernels = dataclasses.replace(COLD, max_response_tokens=16), KERNELS["gpu_interpret"]
    plain, without = of_engine(0, small, short, kernels=kernels)
    drafted, session = of_engine(3, small, short, kernels=kernels)
    assert_same_bits(plain, drafted)
    assert steps(session) < steps(without)


def test_programs_with_drafts_have_as_many_rows_as_the_smallest_without():
    for kernel in (False, True):
        plain = decode_sizes(FEW, kernel=kernel)
        for draft_tokens in DRAFT_TOKENS[1:]:
            cache = dataclasses.replace(FEW, draft_tokens=draft_tokens)
            more = set(decode_sizes(cache, kernel=kernel)) - set(plain)
            assert {rows * cache.positions(rows) for rows, _ in more} == {cache.rows}
            assert max(cache.positions(rows) for rows, _ in more) == 1 + draft_tokens
            assert all(cache.positions(rows) == 1 for rows, _ in plain)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_cache_of_few_slots_tries_no_more_positions_than_it_has_rows(slots):
    """A program of no rows was compiled for one slot and a draft."""
    rows = dataclasses.replace(FEW, slots=slots, rows=slots, draft_tokens=7)
    assert {size for size, _ in decode_sizes(rows, kernel=False)} == {
        slots // positions for positions in (1, 2, 4, 8) if positions <= slots
    }


def test_drafts_in_blocks_of_one_token_are_refused(small):
    """There is nothing to try, and XLA adds up one key in an order of its own."""
    cache = dataclasses.replace(FEW, block_tokens=1, draft_tokens=3)
    with pytest.raises(ValueError, match=r"draft_tokens = 3 with rollout\.block_tokens = 1"):
        build(SMALL, cache, small)
