"""Keys name a request, truncation equals sorting, and sampling is exact, split and whole."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dapo_jax.sampler.sampling import request_keys, sample_token, truncate, uniform_at
from models.kernels.xla import MASKED
from sharding.mesh import make_mesh
from tests.quick import jit

RUN_KEY = jax.random.key(11)
jit_request_keys, jit_uniform_at = jit(request_keys), jit(uniform_at)

# Randomness: a request is (cursor, sample index), and nothing else matters.


def test_request_keys_are_the_documented_folds():
    requests = [(cursor, sample) for cursor in (4, 0) for sample in range(3)]
    keys = jit_request_keys(RUN_KEY, *np.array(requests).T)
    by_hand = [
        jax.random.fold_in(jax.random.fold_in(RUN_KEY, cursor), sample)
        for cursor, sample in requests
    ]
    assert np.array_equal(jax.random.key_data(keys), [jax.random.key_data(k) for k in by_hand])
    position_R = [9, 9, 0, 1, 2, 3]
    expected_R = [
        jax.random.uniform(jax.random.fold_in(key, position))
        for key, position in zip(by_hand, position_R, strict=True)
    ]
    assert np.array_equal(jit_uniform_at(keys, np.array(position_R)), expected_R)


def test_seeds_cursors_samples_and_positions_all_give_different_numbers():
    uniforms = set()
    for seed in (0, 1):
        cursor_R, sample_R = np.divmod(np.arange(30), 6)
        key_R = jit_request_keys(jax.random.key(seed), cursor_R, sample_R)
        for position in range(4):
            uniforms |= set(np.asarray(jit_uniform_at(key_R, np.full(30, position))).tolist())
    assert len(uniforms) == 2 * 4 * 5 * 6
    assert min(uniforms) >= 0
    assert max(uniforms) < 1


# Truncation against sorting.


def sorted_top_k(logits_RV, k):
    """Puts -inf below the k-th largest logit of each row."""
    kth_R1 = np.sort(logits_RV, axis=-1)[:, -k][:, None]
    return np.where(logits_RV >= kth_R1, logits_RV, -np.inf)


def sorted_top_p(logits_RV, top_p):
    """Puts -inf outside the smallest top set, with ties, whose mass reaches `top_p`."""
    logits = logits_RV.astype(np.float64)
    prob_RV = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    order_RV = np.argsort(-prob_RV, axis=-1, kind="stable")
    cdf_RV = np.cumsum(np.take_along_axis(prob_RV, order_RV, axis=-1), axis=-1)
    last_R1 = np.minimum(np.sum(cdf_RV < top_p, axis=-1, keepdims=True), prob_RV.shape[1] - 1)
    cut_R1 = np.take_along_axis(logits_RV, np.take_along_axis(order_RV, last_R1, axis=-1), axis=-1)
    return np.where(logits_RV >= cut_R1, logits_RV, -np.inf)


jit_truncate = jit(truncate, static_argnames=("top_p", "top_k"))


def kept(logits_RV, **limits):
    return np.asarray(jit_truncate(logits_RV, **limits)) > MASKED


@pytest.mark.parametrize("top_p", [0.1, 0.7, 0.999])
def test_top_p_keeps_what_sorting_a_whole_vocabulary_keeps(top_p):
    """Rows are nearly flat to peaked; the float32 mass decides to 2e-6."""
    rng = np.random.default_rng(0)
    scale_R1 = np.array([[1e-3], [1.0], [3.0], [10.0]])
    logits_RV = rng.normal(0, scale_R1, (4, 151_936)).astype(np.float32)
    kept_RV = kept(logits_RV, top_p=top_p, top_k=0)
    least_RV = np.isfinite(sorted_top_p(logits_RV, top_p - 2e-6))
    most_RV = np.isfinite(sorted_top_p(logits_RV, top_p + 2e-6))
    assert np.all(kept_RV >= least_RV)
    assert np.all(kept_RV <= most_RV)
    assert kept_RV[0].sum() == pytest.approx(top_p * 151_936, rel=1e-2)
    assert kept_RV[3].sum() < 100


def test_top_p_keeps_ties_and_at_least_the_best_token():
    logits_RV = np.log(np.array([[4, 2, 2, 2, 1, 1], [1, 1, 1, 1, 1, 1]], np.float32))
    assert kept(logits_RV, top_p=0.5, top_k=0).tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    assert kept(logits_RV, top_p=0.9, top_k=0).tolist() == [[1] * 6, [1] * 6]
    assert kept(logits_RV, top_p=1e-9, top_k=0).tolist() == [[1, 0, 0, 0, 0, 0], [1] * 6]
    assert kept(logits_RV, top_p=1.0, top_k=0).all()


def test_top_p_keeps_the_best_token_whatever_the_scale():
    best_R = np.array([3, 0, 5])
    logits_RV = np.where(np.arange(8) == best_R[:, None], 1.0, -1.0)
    for scale in (1.0, 1e4, 1e9):
        kept_RV = kept((scale * logits_RV).astype(np.float32), top_p=0.2, top_k=0)
        assert np.array_equal(kept_RV, logits_RV > 0)


def test_top_k_keeps_the_k_largest_and_ties():
    rng = np.random.default_rng(1)
    logits_RV = rng.permuted(np.tile(np.arange(200, dtype=np.float32), (3, 1)), axis=1)
    for k in (1, 7, 200):
        assert np.array_equal(kept(logits_RV, top_p=1.0, top_k=k), logits_RV >= 200 - k)
    assert kept(logits_RV, top_p=1.0, top_k=0).all()
    assert kept(logits_RV, top_p=1.0, top_k=500).all()
    assert kept(np.array([[2.0, 1.0, 1.0, 0.0]]), top_p=1.0, top_k=2).tolist() == [[1, 1, 1, 0]]


def test_top_p_takes_its_mass_from_what_top_k_left():
    logits_RV = np.log(np.array([[40.0, 30.0, 20.0, 10.0]], np.float32))
    assert kept(logits_RV, top_p=0.75, top_k=0).tolist() == [[1, 1, 1, 0]]
    assert kept(logits_RV, top_p=0.75, top_k=3).tolist() == [[1, 1, 0, 0]] * 1
    assert kept(logits_RV, top_p=0.55, top_k=2).tolist() == [[1, 0, 0, 0]]


# Sampling.


def awkward_logits(V, scale, seed=0):
    """Makes random logits whose first 5 and last 9 tokens, and a block in between, are masked."""
    logits_V = np.random.default_rng(seed).normal(0, scale, V).astype(np.float32)
    logits_V[:5] = logits_V[-9:] = logits_V[128:256] = MASKED
    return logits_V


jit_sample_token = jit(functools.partial(sample_token, axis=None))


@jit
def draw_many(logits_V, uniform_N):
    return jax.lax.map(
        lambda u: jax.tree.map(lambda a: a[0], sample_token(logits_V[None], u[None], axis=None)),
        uniform_N,
        batch_size=512,
    )


@pytest.mark.parametrize("scale", [0.0, 2.0, 30.0])
def test_a_grid_of_uniforms_reproduces_the_distribution(scale):
    """An inverse CDF gives each token its probability of the grid, to one grid point."""
    logits_V = awkward_logits(700, scale)
    N = 8192
    token_N, logp_N = map(np.asarray, draw_many(logits_V, np.arange(N, dtype=np.float32) / N))
    logp_V = logits_V - np.logaddexp.reduce(logits_V.astype(np.float64))
    share_V = np.bincount(token_N, minlength=700) / N
    assert np.abs(share_V - np.exp(logp_V)).max() <= 1.01 / N
    assert np.abs(np.cumsum(share_V) - np.cumsum(np.exp(logp_V))).max() <= 1.01 / N
    assert np.all(np.diff(token_N) >= 0)
    np.testing.assert_allclose(logp_N, logp_V[token_N], rtol=1e-6, atol=1e-6)


def test_a_whole_vocabulary_is_sampled_as_in_float64():
    """A float32 running sum over 151,936 tokens would be off by more than the grid."""
    logits_V = awkward_logits(151_936, 3.0)
    N = 512
    token_N, _ = draw_many(logits_V, (np.arange(N, dtype=np.float32) + 0.5) / N)
    prob_V = np.exp(logits_V - np.logaddexp.reduce(logits_V.astype(np.float64)))
    cdf_V = np.cumsum(prob_V)
    target_N = (np.arange(N) + 0.5) / N
    assert np.abs(cdf_V[token_N] - target_N).max() <= prob_V.max()
    assert np.mean(np.asarray(token_N) == np.searchsorted(cdf_V, target_N)) > 0.99


@pytest.mark.parametrize("V", [300, 384, 129, 40, 151_936])
def test_the_ends_of_the_unit_interval_give_possible_tokens(V):
    """The ends are u = 0 and the largest float32 below 1; V has any remainder modulo 128."""
    last = np.float32(1 - 2**-24)
    for scale in (0.0, 1.0, 30.0):
        logits_V = awkward_logits(max(V, 300), scale)[:V]
        token_N, logp_N = map(np.asarray, draw_many(logits_V, np.array([0.0, last, 0.5, 2**-24])))
        assert np.all(logits_V[token_N] > MASKED)
        assert np.all(token_N < V)
        assert np.all(np.isfinite(logp_N))
        assert np.all(logp_N <= 1e-6)


def test_a_lone_token_is_always_sampled_with_probability_one():
    for V, only in ((300, 299), (300, 0), (256, 128), (256, 127)):
        logits_V = np.where(np.arange(V) == only, 5.0, MASKED).astype(np.float32)
        token_N, logp_N = draw_many(logits_V, np.linspace(0, 1 - 2**-24, 64, dtype=np.float32))
        assert np.all(np.asarray(token_N) == only)
        assert np.all(np.asarray(logp_N) == 0)


def test_truncation_and_sampling_agree_on_the_distribution():
    logits_RV = np.random.default_rng(2).normal(0, 2, (64, 300)).astype(np.float32)
    uniform_R = np.linspace(0, 1 - 2**-24, 64, dtype=np.float32)
    truncated_RV = jit_truncate(logits_RV, top_p=0.6, top_k=50)
    token_R, logp_R = jit_sample_token(truncated_RV, uniform_R)
    expected_RV = sorted_top_p(sorted_top_k(logits_RV, 50), 0.6).astype(np.float64)
    expected_RV -= np.logaddexp.reduce(expected_RV, axis=-1, keepdims=True)
    np.testing.assert_allclose(logp_R, expected_RV[np.arange(64), token_R], atol=1e-5)


@pytest.mark.parametrize("V", [1024, 2048, 300])
def test_a_vocabulary_split_over_devices_gives_the_same_tokens(V):
    """Tokens are bitwise the same where every part is a multiple of the block of 128.

    Elsewhere the running sum is rounded at other places: a token may differ by one possible token.
    """
    mesh = make_mesh(data=1, model=4)
    rng = np.random.default_rng(V)
    logits_RV = np.stack([awkward_logits(V, scale, seed) for seed, scale in enumerate((0, 2, 30))])
    logits_RV = np.concatenate([logits_RV, np.where(np.arange(V) == V // 2, 5.0, MASKED)[None]])
    logits_RV = np.repeat(logits_RV, 64, axis=0).astype(np.float32)
    uniform_R = rng.random(len(logits_RV), dtype=np.float32)
    uniform_R[::64], uniform_R[1::64] = 0.0, 1 - 2**-24
    split = jit(
        jax.shard_map(
            functools.partial(sample_token, axis="model"),
            mesh=mesh,
            in_specs=(PartitionSpec(None, "model"), PartitionSpec()),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    token_R, logp_R = map(np.asarray, split(logits_RV, uniform_R))
    whole_token_R, whole_logp_R = map(np.asarray, jit_sample_token(logits_RV, uniform_R))
    if V % (4 * 128) == 0:
        np.testing.assert_array_equal(token_R, whole_token_R)
        np.testing.assert_allclose(logp_R, whole_logp_R, rtol=1e-6, atol=1e-6)
    else:
        assert np.mean(token_R == whole_token_R) > 0.99
    logit_R = np.take_along_axis(logits_RV, token_R[:, None], axis=1)[:, 0]
    assert np.all(logit_R > MASKED)
    total_R = np.logaddexp.reduce(logits_RV.astype(np.float64), axis=1)
    np.testing.assert_allclose(logp_R, logit_R - total_R, rtol=1e-6, atol=2e-6)
