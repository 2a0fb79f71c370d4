"""The update against a plain one: one response a row, the whole mini-batch at once, jax.grad."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from quick import COMPILER_OPTIONS, jit, random_params
from updates import (
    SETTINGS,
    SMALL,
    VOCAB,
    batch_of,
    distance,
    first_moment,
    flat,
    gradient,
    graph,
    groups_of,
    long_tailed,
    next_update,
    plain,
    plain_dapo,
    plain_gspo,
    plain_logp,
    random_weights,
    run_update,
    small_config,
)

from dapo_jax import learner
from dapo_jax.learner import init_state, scheduled_rate
from dapo_jax.losses import OWN
from dapo_jax.setup import components
from models.kernels import KERNELS
from models.qwen2 import PRESETS
from sharding.mesh import make_mesh

ALONE = dataclasses.replace(KERNELS["cpu"], shares_prompts=False)
KEEPING = dataclasses.replace(SETTINGS, remat="none")
# Of the largest entry of a gradient; what is left is the rounding of float32 sums.
TOLERANCE = 1e-5


@pytest.fixture
def params():
    return random_weights()


@pytest.fixture
def data():
    return long_tailed()


@pytest.fixture(scope="module")
def expected():
    return plain(random_weights(), long_tailed())


def assert_bitwise_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_the_packed_update_has_the_plain_gradient_and_loss(params, data, expected):
    batch = batch_of(data, group_size=4)
    assert batch.num_micro == 2  # 8 responses in 3 rows: packed, and accumulated
    loss, grads = expected
    assert distance(gradient(params, batch), grads) < TOLERANCE
    _, metrics = run_update(params, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(flat(grads)), rtol=1e-5)


@pytest.mark.parametrize(
    ("order", "layout", "settings"),
    [
        ([6, 5, 7, 4, 2, 0, 3, 1], {"group_size": 4, "kernels": ALONE}, SETTINGS),
        ([3, 6, 0, 5, 1, 7, 4, 2], {"row_tokens": 96, "update_responses": 2}, KEEPING),
    ],
    ids=["a prompt for each", "rows of padding, all kept"],
)
def test_neither_layout_nor_order_matters(params, data, expected, order, layout, settings):
    batch = batch_of(data.take(order), **layout)
    assert distance(gradient(params, batch, settings), expected[1]) < TOLERANCE


def test_filtered_responses_add_nothing_and_do_not_count(params, data, expected):
    """Overlong filtering leaves the update as if the mini-batch had never had the responses."""
    stopped_R = np.array([True, True, True, False, True, True, False, True])
    cut = data.replace(stopped_R=stopped_R)
    filtered = gradient(params, batch_of(cut, group_size=4))
    assert distance(filtered, plain(params, cut)[1]) < TOLERANCE
    assert distance(filtered, expected[1]) > 0.01
    left = data.take(np.flatnonzero(stopped_R))
    assert distance(filtered, gradient(params, batch_of(left))) < TOLERANCE
    assert_bitwise_equal(batch_of(cut, overlong_filtering=False), batch_of(data))


@pytest.mark.parametrize("loss", [plain_dapo, plain_gspo])
def test_an_environments_tokens_are_read_and_never_trained_on(params, data, loss):
    rng = np.random.default_rng(5)
    given = [(rng.random(n) < 0.4) & (np.arange(n) > 0) for n in data.length_R]
    expected = plain(params, data.replace(given=given), token_loss=loss)
    pairs = zip(given, data.behavior_logp, strict=True)
    unknown = [np.where(g, -60.0, b).astype(np.float32) for g, b in pairs]
    data = data.replace(given=given, behavior_logp=unknown)
    how = {} if loss is plain_dapo else {"ratio": "sequence", "old_logprobs": "sampler"}
    settings = dataclasses.replace(SETTINGS, **how)
    batch = batch_of(data, group_size=4)
    assert batch.is_response_BT.sum() == sum(np.sum(~given_T) for given_T in given)
    assert distance(gradient(params, batch, settings), expected[1]) < TOLERANCE
    metrics = run_update(params, batch, settings)[1]
    np.testing.assert_allclose(metrics["loss"], expected[0], rtol=1e-5)
    assert all(np.isfinite(metrics[name]) for name in ("ratio_gap", "entropy", "mean_prob"))
    others = [np.where(g, (r + 1) % VOCAB, r) for g, r in zip(given, data.responses, strict=True)]
    changed = batch_of(data.replace(responses=others), group_size=4)
    assert distance(gradient(params, changed, settings), expected[1]) > 0.01


def test_the_metrics_are_means_over_the_response_tokens(params, data):
    metrics = run_update(params, batch_of(data))[1]
    assert {"tokens"} | {name for name in metrics if "/" not in name} == OWN
    logp, logp_NV = plain_logp(params, data)
    ratio = np.exp(logp - np.concatenate(data.behavior_logp))
    advantage = np.repeat(data.advantage_R, data.length_R)
    by_hand = {
        "entropy": -(np.exp(logp_NV) * logp_NV).sum(axis=-1),
        "mean_prob": np.exp(logp),
        "ratio_gap": np.abs(ratio - 1),
        "clip_fraction/high": (advantage > 0) & (ratio > 1.28),
        "clip_fraction/low": (advantage < 0) & (ratio < 0.8),
        "clip_fraction/dual": (advantage < 0) & (ratio > 10),
        "kl": np.zeros(1),
    }
    for name, value in by_hand.items():
        assert name == "kl" or value.sum() > 0, name
        np.testing.assert_allclose(metrics[name], value.mean(), rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("mesh", "rows", "row_tokens"), [((1, 2, 2), 2, 46), ((2, 2, 1), 4, 38)], ids=str
)
def test_four_devices_take_the_update_of_one(monkeypatch, params, data, mesh, rows, row_tokens):
    """An update takes the length of rows that wastes less: two of 46 hold all."""
    quick = functools.partialmethod(jax.stages.Lowered.compile, compiler_options=COMPILER_OPTIONS)
    monkeypatch.setattr(jax.stages.Lowered, "compile", quick)
    monkeypatch.setitem(PRESETS, "small", SMALL)
    monkeypatch.setattr(learner, "ROW_MULTIPLE", 8)
    changes = dict(zip(("mesh.slices", "mesh.data", "mesh.model"), mesh, strict=True))
    changes |= {"learner.row_tokens": 38, "learner.row_lengths": 2}
    config = small_config(**changes | {"learner.micro_batch_rows": rows})
    programs = components.programs(config, VOCAB)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, programs.state)
    state = jax.device_put(init_state(params, programs.settings), shardings)
    groups, advantage_PG = groups_of(data, group_size=4), data.advantage_R.reshape(2, 4)
    batch = learner.minibatch(groups, advantage_PG, programs.settings, programs.mesh)
    assert (int(batch.num_micro), *batch.tokens_BT.shape[1:]) == (1, rows, row_tokens)
    state, metrics = programs.compile_learner()["update"](state, None, batch, np.float32(0.1))
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
    q_DNH = state.params["layers"]["q_DNH"]
    # Split over all devices of a slice.
    assert q_DNH.addressable_shards[0].data.size * mesh[1] * mesh[2] == q_DNH.size
    one = batch_of(data, group_size=4)
    expected_state, expected_metrics = run_update(params, one, learning_rate=0.1)
    state, metrics = jax.device_get((state, metrics))
    assert distance(first_moment(state), first_moment(expected_state)) < TOLERANCE
    steps = [flat(it.params) - flat(params) for it in (state, expected_state)]
    assert distance(*steps) < TOLERANCE
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def adamw_by_hand(p, gradients, learning_rates):
    """Computes Adam with decoupled decay; one gradient and rate an update."""
    s, m, v = SETTINGS, 0.0, 0.0
    for t, (g, rate) in enumerate(zip(gradients, learning_rates, strict=True), start=1):
        g = g * min(1.0, s.max_grad_norm / np.linalg.norm(g))
        m = s.adam_b1 * m + (1 - s.adam_b1) * g
        v = s.adam_b2 * v + (1 - s.adam_b2) * g**2
        unbiased_m, unbiased_v = m / (1 - s.adam_b1**t), v / (1 - s.adam_b2**t)
        step = unbiased_m / (np.sqrt(unbiased_v) + s.adam_eps)
        p = p - rate * (step + s.weight_decay * p)
    return p, m, v


def test_two_updates_are_adamw_by_hand(params, data):
    """The first gradient is longer than the bound of its norm, the second is not."""
    bound, rates = SETTINGS.max_grad_norm, [2e-3, 5e-3]
    batches = [batch_of(data.replace(advantage_R=k * data.advantage_R)) for k in (50, -1)]
    # The loss is homogeneous in the advantages: this is what is clipped to 10.
    grads = [50 * flat(gradient(params, batch_of(data)))]
    state, metrics = run_update(params, batches[0], learning_rate=rates[0])
    assert metrics["grad_norm"] > 2 * bound
    grads.append(flat(gradient(state.params, batches[1])))
    state, metrics = next_update(state, batches[1], learning_rate=rates[1])
    assert 0.1 * bound < metrics["grad_norm"] < bound
    expected = adamw_by_hand(flat(params), grads, rates)
    assert distance(first_moment(state), expected[1]) < TOLERANCE
    assert distance(state.opt_state[1][0].nu, expected[2]) < TOLERANCE
    # The difference of two float32 weights.
    assert distance(flat(state.params) - flat(params), expected[0] - flat(params)) < 1e-4


def test_an_update_without_a_weighted_token_is_said_and_decays_the_weights(params, data):
    """All responses were cut off and filtered. The decay is decoupled from Adam's moments."""
    cut = data.replace(stopped_R=np.zeros_like(data.stopped_R))
    state, metrics = run_update(params, batch_of(cut), learning_rate=0.5)
    assert metrics["empty"]
    assert metrics["grad_norm"] == 0
    assert distance(state.params, flat(params) * (1 - 0.5 * SETTINGS.weight_decay)) < 1e-6
    assert not run_update(params, batch_of(data))[1]["empty"]


@pytest.mark.parametrize(
    ("decay", "at_half", "last"),
    [("none", 1, 1), ("linear", 1 / 2, 1 / 8), ("cosine", 1 / 2, (1 + np.cos(np.pi * 7 / 8)) / 2)],
)
def test_the_rate_warms_up_from_a_fraction_and_decays_to_the_last_step(decay, at_half, last):
    def rates(warmup_steps):
        how = {"learning_rate": 2.0, "warmup_steps": warmup_steps, "decay": decay}
        settings = dataclasses.replace(SETTINGS, **how)
        return [scheduled_rate(step, settings, num_steps=12) / 2 for step in range(12)]

    np.testing.assert_allclose(rates(4)[:5], [0.25, 0.5, 0.75, 1, 1])
    np.testing.assert_allclose(rates(4)[8:12:3], [at_half, last], rtol=1e-5)
    assert rates(0)[0] == rates(1)[0] == 1
    assert rates(12)[0] == 1 / 12, "a warm-up that fills the run"


@pytest.mark.parametrize("where", ["behavior", "params"])
def test_a_gradient_that_is_not_finite_changes_nothing(params, data, where):
    """A value that is not finite is named, and the state is bitwise the one before."""
    start, _ = run_update(params, batch_of(data))  # moments that are not zero
    behavior = [logp.copy() for logp in data.behavior_logp]
    if where == "behavior":
        behavior[3][7] = np.nan
    else:
        norm_D = start.params["final_norm_D"].copy()
        norm_D[0] = np.inf
        start = start.replace(params=start.params | {"final_norm_D": norm_D})
    batch = batch_of(data.replace(behavior_logp=behavior))
    state, metrics = next_update(start, batch)
    assert not metrics["taken"]
    assert learner.checked_names(start)[metrics["bad"]] == "the loss or a metric of it"
    assert not np.isfinite(metrics["grad_norm"])
    assert_bitwise_equal(state, start)
    if where != "params":
        assert next_update(state, batch_of(data))[1]["bad"] == -1


def test_the_kl_term_is_zero_at_the_start_policy_and_has_the_plain_gradient_elsewhere(params, data):
    """The layout is another one than the other tests': short rows, one by one."""
    settings = dataclasses.replace(SETTINGS, kl_coef=0.3)
    batch = batch_of(data, row_tokens=34, micro_batch_rows=1)
    # Policy and reference are two computations of the same: they may differ in the last bit.
    assert 0 <= run_update(params, batch, settings, start_weights=params)[1]["kl"] < 1e-13

    other = random_params(SMALL, spread=0.5, seed=9)[1]
    reference = jax.tree.map(lambda a, b: a + 0.1 * b, params, other)
    away = gradient(params, batch, settings, start_weights=reference)
    assert distance(away, plain(params, data, kl_coef=0.3, start=reference)[1]) < TOLERANCE
    metrics = run_update(params, batch, settings, start_weights=reference)[1]
    logp, reference_logp = (plain_logp(p, data)[0] for p in (params, reference))
    kl = np.exp(reference_logp - logp) - (reference_logp - logp) - 1
    np.testing.assert_allclose(metrics["kl"], kl.mean(), rtol=1e-4)


def test_an_entropy_bonus_is_the_mean_entropy_of_the_trained_tokens(params, data):
    batch, with_bonus = batch_of(data), dataclasses.replace(SETTINGS, entropy_coef=0.5)
    plainly, found = (run_update(params, batch, it)[1] for it in (SETTINGS, with_bonus))
    np.testing.assert_allclose(found["loss"], plainly["loss"] - 0.5 * plainly["entropy"], rtol=1e-4)
    assert distance(gradient(params, batch, with_bonus), gradient(params, batch)) > 0.01


@pytest.mark.parametrize("by", ["learner", "sampler"])
def test_old_logprobs_of_earlier_policies_tokens_are_as_chosen(params, data, by):
    settings = dataclasses.replace(SETTINGS, old_logprobs=by)
    mesh = make_mesh(data=1, model=1, devices=jax.devices()[:1])
    how = {"graph": graph(), "mesh": mesh, "settings": settings}
    old = jit(functools.partial(learner.recompute_old_logp, **how))
    batch = batch_of(data)
    stale = dataclasses.replace(batch, is_on_policy_BT=np.zeros_like(batch.is_on_policy_BT))
    fresh_MBT, stale_MBT = (np.asarray(old(params, None, it)) for it in (batch, stale))
    own = batch.is_response_BT
    np.testing.assert_allclose(
        np.sort(fresh_MBT[own]), np.sort(plain_logp(params, data)[0]), atol=1e-5
    )
    expected = fresh_MBT if by == "learner" else batch.behavior_logp_BT
    np.testing.assert_array_equal(stale_MBT[own], expected[own])
    assert np.abs(fresh_MBT - batch.behavior_logp_BT)[own].max() > 0.1
