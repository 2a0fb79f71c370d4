"""The sampler against teacher forcing, sort-based truncation, exact draws and scripted stops."""

import dataclasses
import functools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dapo_jax.sampler.decode import Sampling, generate
from dapo_jax.sampler.host import Sampler, bucket_tokens
from dapo_jax.sampler.sampling import draw, request_keys, truncate, uniform_at
from models.attention import MASKED
from models.qwen2 import Qwen2Config, abstract_params
from sharding.mesh import make_mesh

SMALL = Qwen2Config(64, 32, 48, 2, 4, 2, 8, True)
# The padding has a stop token's id, and the tokenizer has fewer ids than the model has rows.
SAMPLING = Sampling(
    max_response_tokens=12,
    temperature=0.7,
    top_p=1.0,
    top_k=0,
    stop_ids=(3, 17, 40),
    pad_id=3,
    vocab_size=61,
)
PROMPTS = [np.array([5, 6, 7]), np.arange(10, 30), np.array([60]), np.arange(20, 27)]
CURSORS = (7, 100, 0, 1_000_000)
GROUP_SIZE = 8
RUN_KEY = jax.random.key(11)


def random_params(config, seed=0):
    """(graph, params) large enough for clearly uneven token probabilities."""
    graph, abstract = abstract_params(config)
    rng = np.random.default_rng(seed)
    return graph, jax.tree.map(lambda a: rng.normal(0, 0.3, a.shape).astype(a.dtype), abstract)


@pytest.fixture(scope="module")
def small():
    return random_params(SMALL)


@pytest.fixture(scope="module")
def sampler(small):
    """The host's sampler on one device: what every sharded one must agree with."""
    mesh = make_mesh(data=1, model=1, devices=jax.devices()[:1])
    return Sampler(small[0], mesh, max_prompt_tokens=64)


@pytest.fixture(scope="module")
def samples(sampler, small):
    return sampler(small[1], RUN_KEY, PROMPTS, CURSORS, group_size=GROUP_SIZE, sampling=SAMPLING)


def groups(array_R):
    """[P, G, ...] of an array with R = P * G rows."""
    return array_R.reshape(-1, GROUP_SIZE, *array_R.shape[1:])


def forward(graph, params, tokens_BT):
    return nnx.merge(graph, params)(tokens_BT)


jit_forward = jax.jit(forward, static_argnums=0)


def teacher_forced(small, prompts, samples, forward=jit_forward):
    """Logits [R, T, vocab_size] of every response position, from one forward pass a batch."""
    group_size = len(samples.length_R) // len(prompts)
    rows = [
        np.concatenate([prompts[r // group_size], tokens_T])
        for r, tokens_T in enumerate(samples.tokens_RT)
    ]
    tokens_RT = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, ids in zip(tokens_RT, rows, strict=True):
        row[: len(ids)] = ids
    logits_RTV = np.asarray(forward(*small, tokens_RT))[..., : SAMPLING.vocab_size]
    T = samples.tokens_RT.shape[1]
    return np.stack(
        [
            row_TV[start : start + T]
            for r, row_TV in enumerate(logits_RTV)
            for start in [len(prompts[r // group_size]) - 1]
        ]
    )


def chosen(logits_RTV, tokens_RT):
    """log softmax(logits) at the tokens, in float64."""
    logits_RTV = logits_RTV.astype(np.float64)
    logp_RTV = logits_RTV - np.logaddexp.reduce(logits_RTV, axis=-1, keepdims=True)
    return np.take_along_axis(logp_RTV, tokens_RT[..., None], axis=-1)[..., 0]


def live(samples):
    """mask_RT of the tokens that belong to the responses."""
    return np.arange(samples.tokens_RT.shape[1]) < samples.length_R[:, None]


# Step-by-step decoding against teacher forcing.


def test_behavior_logp_equals_teacher_forcing_on_ragged_prompts(small, samples):
    mask_RT = live(samples)
    expected_RT = chosen(
        teacher_forced(small, PROMPTS, samples) / SAMPLING.temperature, samples.tokens_RT
    )
    assert len(set(samples.length_R.tolist())) > 3
    assert np.std(expected_RT[mask_RT]) > 0.5
    assert np.abs(samples.behavior_logp_RT - expected_RT)[mask_RT].max() <= 1e-5


def test_sampler_and_learner_round_at_the_same_points_in_bfloat16(small):
    """As written, both round alike: no gap where XLA keeps every rounding that is written.

    With its default XLA may leave roundings out inside a fusion, other ones in other programs:
    then the gap of this model is 2.5e-3 on average and 1.1e-2 at most, on a CPU.
    """
    exact = {"compiler_options": {"xla_allow_excess_precision": False}}
    model = small[0], jax.tree.map(lambda p: p.astype(jnp.bfloat16), small[1])
    run = jax.jit(
        functools.partial(generate, small[0]), static_argnames=("group_size", "sampling"), **exact
    )
    prompt_PT = np.stack([np.append(0, PROMPTS[0]), np.arange(50, 54)])
    samples = jax.device_get(
        run(
            model[1],
            RUN_KEY,
            prompt_PT,
            np.array([3, 4]),
            np.array([1, 2]),
            group_size=GROUP_SIZE,
            sampling=SAMPLING,
        )
    )
    logits_RTV = teacher_forced(
        model, [PROMPTS[0], prompt_PT[1]], samples, jax.jit(forward, static_argnums=0, **exact)
    )
    expected_RT = chosen(logits_RTV / SAMPLING.temperature, samples.tokens_RT)
    assert np.abs(samples.behavior_logp_RT - expected_RT)[live(samples)].max() <= 1e-5


def test_low_temperature_is_greedy_and_no_stop_id_runs_to_the_limit(small, sampler):
    greedy = dataclasses.replace(SAMPLING, temperature=1e-5, stop_ids=(), pad_id=0)
    samples = sampler(small[1], RUN_KEY, PROMPTS, CURSORS, group_size=GROUP_SIZE, sampling=greedy)
    logits_RTV = teacher_forced(small, PROMPTS, samples)
    assert np.array_equal(samples.tokens_RT, logits_RTV.argmax(axis=-1))
    assert np.abs(samples.behavior_logp_RT).max() <= 1e-5
    assert samples.length_R.tolist() == [SAMPLING.max_response_tokens] * len(PROMPTS) * GROUP_SIZE
    assert not samples.stopped_R.any()


def test_truncated_sampling_records_the_truncated_distribution(small, sampler):
    """Temperature, then top-k, then top-p; log-probs are renormalised over what is left."""
    sampling = dataclasses.replace(SAMPLING, temperature=1.5, top_p=0.8, top_k=20)
    samples = sampler(small[1], RUN_KEY, PROMPTS, CURSORS, group_size=GROUP_SIZE, sampling=sampling)
    mask_RT = live(samples)
    logits_NV = teacher_forced(small, PROMPTS, samples)[mask_RT] / sampling.temperature
    kept_NV = sorted_top_p(sorted_top_k(logits_NV, 20), 0.8)
    expected_N = chosen(kept_NV, samples.tokens_RT[mask_RT])
    assert np.isfinite(kept_NV).sum(axis=-1).max() < 20
    assert np.abs(samples.behavior_logp_RT[mask_RT] - expected_N).max() <= 1e-5


# Where a response ends.


def scripted_samples(is_stop_RT):
    """What the sampler returns where the model can say one thing only in row r.

    The model is a real one without attention: every (row, position) is a token of its own, whose
    embedding is a unit vector that the head maps to the next position's token. The tokens of the
    positions in `is_stop_RT` are the stop tokens.
    """
    R, T = is_stop_RT.shape
    name_RT = np.arange(1, R * (T + 1) + 1).reshape(R, T + 1)  # column 0: the prompts
    V = R * (T + 1) + 1
    graph, abstract = abstract_params(Qwen2Config(V, V, 8, 1, 2, 1, 4, False))
    params = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), abstract)
    params["embed_VD"] = np.eye(V, dtype=np.float32)
    params["final_norm_D"] = np.ones(V, np.float32)
    params["head_DV"][name_RT[:, :-1].ravel(), name_RT[:, 1:].ravel()] = 1.0
    sampling = Sampling(
        max_response_tokens=T,
        temperature=1e-3,
        top_p=1.0,
        top_k=0,
        stop_ids=tuple(name_RT[:, 1:][is_stop_RT].tolist()),
        pad_id=0,
        vocab_size=V,
    )
    samples = jax.jit(
        functools.partial(generate, graph), static_argnames=("group_size", "sampling")
    )(
        params,
        RUN_KEY,
        name_RT[:, :1],
        np.ones(R, np.int32),
        np.arange(R),
        group_size=1,
        sampling=sampling,
    )
    mask_RT = live(samples)
    assert np.array_equal(np.where(mask_RT, name_RT[:, 1:], 0), samples.tokens_RT)
    return samples


def test_responses_end_where_the_golden_masks_do(shared):
    """One stop id in the first half of the rows, two in the other."""
    stored = golden.arrays(shared, "respmask")
    ids_RT = stored["in/ids"]
    is_stop_RT = np.concatenate([ids_RT == 3, (ids_RT == 3) | (ids_RT == 5)])
    mask_RT = np.concatenate([stored["eos3"], stored["eos[3,5]"]])
    samples = scripted_samples(is_stop_RT)
    assert np.array_equal(live(samples), mask_RT)


def test_a_stop_at_the_first_at_the_last_and_at_no_position():
    is_stop_RT = np.array([[1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]], bool)
    samples = scripted_samples(is_stop_RT)
    assert samples.length_R.tolist() == [1, 4, 4, 2]
    assert samples.stopped_R.tolist() == [True, True, False, True]


def test_the_stop_token_counts_and_padding_follows_it(samples):
    """The padding's id is a stop id: only the lengths tell a stop token from padding."""
    mask_RT = live(samples)
    is_stop_RT = np.isin(samples.tokens_RT, SAMPLING.stop_ids)
    first_stop_R = np.where(is_stop_RT.any(axis=1), is_stop_RT.argmax(axis=1), mask_RT.shape[1] - 1)
    assert np.array_equal(samples.length_R, first_stop_R + 1)
    assert np.array_equal(samples.stopped_R, (is_stop_RT & mask_RT).any(axis=1))
    last_R = samples.tokens_RT[np.arange(len(mask_RT)), samples.length_R - 1]
    assert set(last_R[samples.stopped_R]) == set(SAMPLING.stop_ids)
    assert np.all(samples.length_R[~samples.stopped_R] == SAMPLING.max_response_tokens)
    assert 0 < samples.stopped_R.mean() < 1
    assert np.all(samples.tokens_RT[~mask_RT] == SAMPLING.pad_id)
    assert np.all(samples.behavior_logp_RT[~mask_RT] == 0)
    assert np.all(samples.behavior_logp_RT[mask_RT] < 0)
    assert samples.tokens_RT.max() < SAMPLING.vocab_size


# Randomness: a request is (cursor, sample index), and nothing else matters.


def test_request_keys_are_the_documented_folds():
    keys = request_keys(RUN_KEY, jnp.array([4, 0]), group_size=3)
    by_hand = [
        jax.random.fold_in(jax.random.fold_in(RUN_KEY, cursor), i)
        for cursor in (4, 0)
        for i in range(3)
    ]
    assert np.array_equal(jax.random.key_data(keys), [jax.random.key_data(k) for k in by_hand])
    expected_R = [jax.random.uniform(jax.random.fold_in(k, 9)) for k in by_hand]
    assert np.array_equal(uniform_at(keys, 9), expected_R)


def test_seeds_cursors_samples_and_positions_all_draw_different_numbers():
    uniforms = set()
    for seed in (0, 1):
        key_R = request_keys(jax.random.key(seed), jnp.arange(5), group_size=6)
        for position in range(4):
            uniforms |= set(np.asarray(uniform_at(key_R, position)).tolist())
    assert len(uniforms) == 2 * 4 * 5 * 6
    assert min(uniforms) >= 0
    assert max(uniforms) < 1


def test_tokens_are_the_documented_function_of_seed_cursor_sample_and_position(small, samples):
    """Every token is the inverse CDF, in float64, of the teacher-forced distribution.

    Only a uniform number within float32 rounding of a boundary could give a neighbouring token.
    """
    logits_RTV = teacher_forced(small, PROMPTS, samples).astype(np.float64) / SAMPLING.temperature
    prob_RTV = np.exp(logits_RTV - np.logaddexp.reduce(logits_RTV, axis=-1, keepdims=True))
    key_R = request_keys(RUN_KEY, jnp.array(CURSORS), group_size=GROUP_SIZE)
    uniform_RT = np.stack(
        [uniform_at(key_R, t) for t in range(SAMPLING.max_response_tokens)], axis=1
    )
    expected_RT = np.sum(np.cumsum(prob_RTV, axis=-1) <= uniform_RT[..., None], axis=-1)
    mask_RT = live(samples)
    assert mask_RT.sum() > 100
    assert np.array_equal(expected_RT[mask_RT], samples.tokens_RT[mask_RT])


def test_a_request_does_not_depend_on_the_batch_beside_it(small, sampler, samples):
    """Other order, other neighbours, a longer bucket, a smaller group: equal tokens.

    Log-probs are equal to rounding: the bucket and the batch change the shapes of the matrix
    products, hence the last bits of the logits. So a token would differ only where its uniform
    number falls within those bits of a boundary.
    """
    stranger = np.arange(45) % 60
    again = sampler(
        small[1],
        RUN_KEY,
        [PROMPTS[2], stranger, PROMPTS[0], PROMPTS[1]],
        [CURSORS[2], 5, CURSORS[0], CURSORS[1]],
        group_size=2,
        sampling=SAMPLING,
    )
    for now, before in ((0, 2), (2, 0), (3, 1)):
        now_R = np.array([0, 1]) + now * 2
        before_R = np.array([0, 1]) + before * GROUP_SIZE
        for field in ("tokens_RT", "length_R", "stopped_R"):
            assert np.array_equal(getattr(again, field)[now_R], getattr(samples, field)[before_R])
        gap = again.behavior_logp_RT[now_R] - samples.behavior_logp_RT[before_R]
        assert np.abs(gap).max() <= 1e-5


def test_a_group_prefilled_once_equals_prompts_prefilled_apart(small, sampler, samples):
    """The same request thrice, each with a prefill of its own, against the group's one."""
    again = sampler(
        small[1],
        RUN_KEY,
        [PROMPTS[1]] * 3 + [PROMPTS[0]],
        [CURSORS[1]] * 3 + [CURSORS[0]],
        group_size=GROUP_SIZE,
        sampling=SAMPLING,
    )
    for p, before in ((0, 1), (1, 1), (2, 1), (3, 0)):
        assert np.array_equal(groups(again.tokens_RT)[p], groups(samples.tokens_RT)[before])


def test_samples_of_a_group_differ_and_so_do_cursors_and_seeds(small, sampler, samples):
    rows_P = [len({tuple(row) for row in group}) for group in groups(samples.tokens_RT)]
    assert min(rows_P) > 1

    def tokens(run_key, cursors):
        kwargs = {"group_size": GROUP_SIZE, "sampling": SAMPLING}
        return sampler(small[1], run_key, PROMPTS, cursors, **kwargs).tokens_RT

    assert np.array_equal(tokens(RUN_KEY, CURSORS), samples.tokens_RT)
    assert not np.array_equal(tokens(jax.random.key(12), CURSORS), samples.tokens_RT)
    moved = groups(tokens(RUN_KEY, (8, *CURSORS[1:])))
    assert not np.array_equal(moved[0], groups(samples.tokens_RT)[0])
    assert np.array_equal(moved[1:], groups(samples.tokens_RT)[1:])


# The host's side.


@pytest.mark.parametrize(
    ("length", "max_tokens", "bucket"),
    [(1, 64, 32), (32, 64, 32), (33, 64, 64), (65, 96, 96), (96, 96, 96), (5, 8, 8)],
)
def test_buckets_are_powers_of_two_up_to_the_limit(length, max_tokens, bucket):
    assert bucket_tokens(length, max_tokens=max_tokens) == bucket


@pytest.mark.parametrize("length", [0, 65])
def test_an_impossible_prompt_is_named(small, sampler, length):
    prompts = [PROMPTS[0], np.ones(length, np.int32)]
    message = f"cursor 8 has {length} tokens.*at least 1.*rollout.max_prompt_tokens = 64"
    with pytest.raises(ValueError, match=message):
        sampler(small[1], RUN_KEY, prompts, (7, 8), group_size=1, sampling=SAMPLING)


# Truncation against sorting.


def sorted_top_k(logits_RV, k):
    """Logits with -inf below the k-th largest of each row."""
    kth_R1 = np.sort(logits_RV, axis=-1)[:, -k][:, None]
    return np.where(logits_RV >= kth_R1, logits_RV, -np.inf)


def sorted_top_p(logits_RV, top_p):
    """Logits with -inf outside the smallest top set, with ties, whose mass reaches `top_p`."""
    logits = logits_RV.astype(np.float64)
    prob_RV = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    order_RV = np.argsort(-prob_RV, axis=-1, kind="stable")
    cdf_RV = np.cumsum(np.take_along_axis(prob_RV, order_RV, axis=-1), axis=-1)
    last_R1 = np.minimum(np.sum(cdf_RV < top_p, axis=-1, keepdims=True), prob_RV.shape[1] - 1)
    cut_R1 = np.take_along_axis(logits_RV, np.take_along_axis(order_RV, last_R1, axis=-1), axis=-1)
    return np.where(logits_RV >= cut_R1, logits_RV, -np.inf)


jit_truncate = jax.jit(truncate, static_argnames=("top_p", "top_k"))


def kept(logits_RV, **limits):
    return np.asarray(jit_truncate(logits_RV, **limits)) > MASKED


@pytest.mark.parametrize("top_p", [0.1, 0.7, 0.999])
def test_top_p_keeps_what_sorting_a_whole_vocabulary_keeps(top_p):
    """Nearly flat to peaked rows of 151,936 logits; the float32 mass decides to 2e-6."""
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


# The draw.


def awkward_logits(V, scale, seed=0):
    """Random logits whose first 5 and last 9 tokens, and a block in between, are masked."""
    logits_V = np.random.default_rng(seed).normal(0, scale, V).astype(np.float32)
    logits_V[:5] = logits_V[-9:] = logits_V[128:256] = MASKED
    return logits_V


@jax.jit
def draw_many(logits_V, uniform_N):
    return jax.lax.map(
        lambda u: jax.tree.map(lambda a: a[0], draw(logits_V[None], u[None])),
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


def test_a_whole_vocabulary_is_drawn_as_in_float64():
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
    """u = 0 and the largest float32 below 1, with masked ends, for any remainder modulo 128."""
    last = np.float32(1 - 2**-24)
    for scale in (0.0, 1.0, 30.0):
        logits_V = awkward_logits(max(V, 300), scale)[:V]
        token_N, logp_N = map(np.asarray, draw_many(logits_V, np.array([0.0, last, 0.5, 2**-24])))
        assert np.all(logits_V[token_N] > MASKED)
        assert np.all(token_N < V)
        assert np.all(np.isfinite(logp_N))
        assert np.all(logp_N <= 1e-6)


def test_a_lone_token_is_always_drawn_with_probability_one():
    for V, only in ((300, 299), (300, 0), (256, 128), (256, 127)):
        logits_V = np.where(np.arange(V) == only, 5.0, MASKED).astype(np.float32)
        token_N, logp_N = draw_many(logits_V, np.linspace(0, 1 - 2**-24, 64, dtype=np.float32))
        assert np.all(np.asarray(token_N) == only)
        assert np.all(np.asarray(logp_N) == 0)


def test_truncation_and_draw_agree_on_the_distribution():
    logits_RV = np.random.default_rng(2).normal(0, 2, (64, 300)).astype(np.float32)
    uniform_R = np.linspace(0, 1 - 2**-24, 64, dtype=np.float32)
    token_R, logp_R = jax.jit(draw)(jit_truncate(logits_RV, top_p=0.6, top_k=50), uniform_R)
    expected_RV = sorted_top_p(sorted_top_k(logits_RV, 50), 0.6).astype(np.float64)
    expected_RV -= np.logaddexp.reduce(expected_RV, axis=-1, keepdims=True)
    np.testing.assert_allclose(logp_R, expected_RV[np.arange(64), token_R], atol=1e-5)
