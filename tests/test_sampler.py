"""Keys name a request, truncation equals sorting, and sampling is exact, split and whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dapo_jax.sampler.sampling import (
    request_keys,
    sample_token,
    truncate,
    truncated_sizes,
    uniform_at,
)
from models.kernels.xla import MASKED
from sharding.mesh import make_mesh
from tests.quick import jit

RUN_KEY = jax.random.key(11)


def test_request_keys_are_the_documented_folds():
    cursor_R, sample_R, position_R = np.array([(4, 0, 9), (4, 2, 9), (0, 1, 3)]).T
    key_R = jit(request_keys)(jnp.broadcast_to(RUN_KEY, 3), cursor_R, sample_R)
    uniform_R, fold = jit(uniform_at)(key_R, position_R), jax.random.fold_in
    for r, key in enumerate(key_R):
        by_hand = fold(fold(RUN_KEY, cursor_R[r]), sample_R[r])
        assert np.array_equal(jax.random.key_data(key), jax.random.key_data(by_hand))
        assert uniform_R[r] == jax.random.uniform(fold(by_hand, position_R[r]))


def sorted_top_p(logits_RV, top_p):
    """Puts -inf outside the smallest top set, with ties, whose mass reaches `top_p`."""
    logits = logits_RV.astype(np.float64)
    prob_RV = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    order_RV = np.argsort(-prob_RV, axis=-1, kind="stable")
    cdf_RV = np.cumsum(np.take_along_axis(prob_RV, order_RV, axis=-1), axis=-1)
    last_R1 = np.minimum(np.sum(cdf_RV < top_p, axis=-1, keepdims=True), prob_RV.shape[1] - 1)
    cut_R1 = np.take_along_axis(logits_RV, np.take_along_axis(order_RV, last_R1, axis=-1), axis=-1)
    return np.where(logits_RV >= cut_R1, logits_RV, -np.inf)


PARTS, WHOLE = PartitionSpec(None, "model"), PartitionSpec()


def split(function, ways, *, others=0, gives=PARTS):
    """function(logits_RV, *others, axis=), with the vocabulary over so many devices."""
    return jax.shard_map(
        functools.partial(function, axis="model" if ways > 1 else None),
        mesh=make_mesh(data=1, model=ways, devices=jax.devices()[:ways]),
        in_specs=(PARTS, *[WHOLE] * others),
        out_specs=gives,
        check_vma=False,
    )


@functools.cache
def truncation(top_p, top_k, ways=1):
    return jit(split(functools.partial(truncate, top_p=[top_p], top_k=[top_k]), ways))


@pytest.fixture(params=[1, 2], ids=["whole", "in two parts"])
def kept(request):
    """kept(logits_RV, top_p, top_k): what truncation leaves, on one chip or split over two."""
    return lambda logits_RV, *limits: (
        np.asarray(truncation(*limits, request.param)(logits_RV)) > MASKED
    )


@pytest.mark.parametrize("top_p", [0.7, 0.999])
def test_top_p_keeps_what_sorting_a_whole_vocabulary_keeps(kept, top_p):
    """Rows are nearly flat to peaked; the float32 mass decides to 2e-6."""
    rng = np.random.default_rng(0)
    scale_R1 = np.array([[1e-3], [1.0], [3.0], [10.0]])
    logits_RV = rng.normal(0, scale_R1, (4, 151_936)).astype(np.float32)
    kept_RV = kept(logits_RV, top_p, 0)
    least_RV = np.isfinite(sorted_top_p(logits_RV, top_p - 2e-6))
    most_RV = np.isfinite(sorted_top_p(logits_RV, top_p + 2e-6))
    assert np.all(kept_RV >= least_RV)
    assert np.all(kept_RV <= most_RV)
    assert kept_RV[0].sum() == pytest.approx(top_p * 151_936, rel=1e-2)
    assert kept_RV[3].sum() < 100


FOUR = [[40.0, 30.0, 20.0, 10.0]]
TIES = [[4, 2, 2, 2, 1, 1], [1, 1, 1, 1, 1, 1]]
# As the padding of the last chip's part of the vocabulary: no best token and no mass.
PADDED = [[0.6, 0.4, 0, 0], [0, 0, 0.5, 0.5]]


@pytest.mark.parametrize(
    ("weight_RV", "top_p", "top_k", "expected"),
    [
        (TIES, 0.5, 0, [[1, 1, 1, 1, 0, 0], [1] * 6]),
        (TIES, 0.9, 0, [[1] * 6, [1] * 6]),
        (TIES, 1e-9, 0, [[1, 0, 0, 0, 0, 0], [1] * 6]),
        (TIES, 1.0, 2, [[1, 1, 1, 1, 0, 0], [1] * 6]),
        (TIES, 1.0, 500, [[1] * 6, [1] * 6]),
        (FOUR, 0.75, 0, [[1, 1, 1, 0]]),  # top-p takes its mass from what top-k left
        (FOUR, 0.75, 3, [[1, 1, 0, 0]]),
        (PADDED, 0.9, 0, [[1, 1, 0, 0], [0, 0, 1, 1]]),
        (PADDED, 0.5, 1, [[1, 0, 0, 0], [0, 0, 1, 1]]),
    ],
)
def test_truncation_by_hand(kept, weight_RV, top_p, top_k, expected):
    """Ties with the last token kept stay, and at least the best token does."""
    with np.errstate(divide="ignore"):
        logits_RV = np.maximum(np.log(np.array(weight_RV, np.float32)), MASKED)
    assert kept(logits_RV, top_p, top_k).tolist() == expected


def test_logits_that_are_not_finite_give_no_probability_and_no_token_beyond_the_vocabulary():
    """The padding of a vocabulary of 300 to whole blocks is never sampled."""
    logits_RV = np.full((4, 300), -np.inf, np.float32)
    logits_RV[1, 3] = -2e30
    logits_RV[2] = -3e38
    logits_RV[3, 7] = np.nan
    sample = jit(functools.partial(sample_token, axis=None))
    token_R, logp_R = map(np.asarray, sample(logits_RV, np.full(4, 0.7, np.float32)))
    assert all(0 <= token < 300 for token in token_R.tolist())
    assert np.isnan(logp_R).tolist() == [True, False, False, True]
    assert token_R[1] == 3
    assert logp_R[2] == pytest.approx(-np.log(300))


TOP_P, TOP_K = (1.0, 0.7, 0.2, 1.0), (0, 0, 30, 20)


def truncate_streams(logits_RV, stream_R, live_R, axis=None):
    limits = {"top_p": TOP_P, "top_k": TOP_K, "axis": axis}
    return truncate(logits_RV, **limits, stream_R=stream_R, live_R=live_R)


@pytest.mark.parametrize("ways", [1, 2])
def test_each_row_is_truncated_as_its_stream_says(ways):
    """As if alone, bit for bit; rows of other streams, live or not, make no difference."""
    rng = np.random.default_rng(0)
    logits_RV = rng.normal(0, 3, (16, 300)).astype(np.float32)
    stream_R, live_R = np.arange(16) % 4, np.arange(16) < 8
    run = jit(split(truncate_streams, ways, others=2))
    truncated_RV = np.asarray(run(logits_RV, stream_R, live_R))
    for row_V, logits_V, stream in zip(truncated_RV, logits_RV, stream_R.tolist(), strict=True):
        alone_RV = truncation(TOP_P[stream], TOP_K[stream])(logits_V[None])
        assert np.array_equal(row_V, alone_RV[0])
    assert np.array_equal(truncated_RV[::4], logits_RV[::4])


def test_of_many_rows_the_first_are_looked_at_as_far_as_live_ones_need_it():
    """The sizes are 128, 256 and all 300; rows behind the last live one stay as they are."""
    logits_RV = np.random.default_rng(0).normal(0, 3, (300, 300)).astype(np.float32)
    alone_RV = np.asarray(truncation(0.7, 0)(logits_RV))
    run = jit(truncate_streams)
    for last, size in ((1, 128), (127, 128), (128, 256), (256, 300), (299, 300)):
        truncated_RV = np.asarray(run(logits_RV, np.ones(300, int), np.arange(300) == last))
        assert np.array_equal(truncated_RV[:size], alone_RV[:size]), last
        assert np.array_equal(truncated_RV[size:], logits_RV[size:]), last
    assert truncated_sizes(300) == [0, 128, 256, 300]
    assert truncated_sizes(128) == [0, 128]


def test_a_logit_that_is_not_finite_is_not_hidden():
    """A run whose policy has broken has to see it."""
    logits_RV = np.random.default_rng(0).normal(0, 3, (4, 300)).astype(np.float32)
    logits_RV[:, 7] = np.nan
    truncated_RV = jit(truncate_streams)(logits_RV, np.arange(4), np.ones(4, bool))
    assert np.isnan(np.asarray(truncated_RV)[:, 7]).all()


# Qwen2.5: more rows than the tokenizer has ids; the others are masked.
ROWS, IDS = 151_936, 151_665
FULL, NUCLEUS, TOP_50 = (1.0, 0), (0.7, 0), (1.0, 50)  # top_p, top_k
ENDS = np.float32([0, 2**-24, 2**-23, 0.5, 1 - 2**-22, 1 - 2**-23, 1 - 2**-24])


def qwen_logits(seed):
    logits_V = np.random.default_rng(seed).normal(0, 5, ROWS).astype(np.float32)
    logits_V[IDS:] = MASKED
    return logits_V


def probabilities(logits_V):
    weight_V = np.exp(logits_V.astype(np.float64) - logits_V.max())
    return weight_V / weight_V.sum()


@functools.cache
def sampler_of(ways: int):
    """Makes (logits_V, uniform_N) -> (token_N, logp_N), the vocabulary split over devices."""
    one = split(sample_token, ways, others=1, gives=WHOLE)

    def many(logits_V, uniform_N):
        token_N1, logp_N1 = jax.vmap(lambda u: one(logits_V[None], u[None]))(uniform_N)
        return token_N1[:, 0], logp_N1[:, 0]

    return jit(many)


def sample_many(logits_V, uniform_N, *, ways=1):
    return [np.asarray(array) for array in sampler_of(ways)(logits_V, uniform_N)]


def borders(prob_V, count=57):
    """Lists uniform numbers on both sides of where possible tokens meet, and the ends."""
    cdf = np.cumsum(prob_V)[prob_V > 0]
    cdf = cdf[np.linspace(0, len(cdf) - 1, count).astype(int)]
    near = np.round(cdf[:, None] * 2**23 + np.arange(-2, 2)).ravel() / 2**23
    return np.concatenate([ENDS, np.clip(near, 0, 1 - 2**-24).astype(np.float32)])


@pytest.mark.parametrize(("ways", "limits"), [(1, FULL), (1, TOP_50), (4, NUCLEUS)], ids=str)
def test_no_uniform_number_gives_an_impossible_token_of_a_real_vocabulary(ways, limits):
    """The running sum over 1,187 blocks rounds up and down by 1e-7, behind the last token too."""
    for seed in (5, 20, 28, 32, 43):
        logits_V = np.asarray(truncation(*limits)(qwen_logits(seed)[None]))[0]
        prob_V = probabilities(logits_V)
        uniform_N = borders(prob_V)
        token_N, logp_N = sample_many(logits_V, uniform_N, ways=ways)
        impossible = prob_V[token_N] == 0
        assert not impossible.any(), (seed, token_N[impossible], uniform_N[impossible])
        np.testing.assert_allclose(logp_N, np.log(prob_V[token_N]), rtol=1e-6, atol=2e-6)
        # The token is the one whose share of the distribution the number lies in, to its grid.
        cdf_V = np.cumsum(prob_V)
        below_N, above_N = cdf_V[token_N] - prob_V[token_N], cdf_V[token_N]
        assert np.all(below_N - 4e-7 <= uniform_N)
        assert np.all(uniform_N <= above_N + 4e-7)


def test_zero_is_a_number_like_others():
    """It does not give the first token whatever that one's share is."""
    logits_V = qwen_logits(0)
    logits_V[0] = logits_V.max() - 40
    token_N, _ = sample_many(logits_V, np.zeros(1, np.float32))
    assert token_N[0] > 0
    middle_V = np.cumsum(probabilities(logits_V))
    assert token_N[0] == np.searchsorted(middle_V, 2**-24)
