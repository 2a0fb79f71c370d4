"""dapo_jax.losses: each choice by cases computed by hand, each preset by its paper's equation.

Whole mini-batches go through `make_batch` and `token_loss` without a model: the slope of the loss
in each token's log-probability is all that a preset changes of the gradient.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import ROOT
from quick import jit

from configs import base
from dapo_jax import learner, losses
from dapo_jax.setup import checks, components
from dapo_jax.types import Batch, Group, Prompt, Response, Status
from models.kernels import KERNELS

MAX_TOKENS = 50


def config_of(preset: str = "", **changes):
    config = base.apply_preset(base.get_config(), preset)
    config.rollout.max_response_tokens = MAX_TOKENS
    config.algo.update({"overlong_cache_tokens": 0} | changes)
    return config


def settings_of(preset: str = "", **changes) -> learner.UpdateSettings:
    config = config_of(preset, **changes)
    checks.check(config)
    return components.update_settings(config, 60, KERNELS["cpu"])


def token_of(ratio, advantage):
    """(logp, tokens): [1, T] of them, each a response and sampled with probability 1/e."""
    shape = (1, len(ratio))
    zeros = {name: np.zeros(shape, dtype) for name, dtype in Batch.row_fields().items()}
    given = {
        "behavior_logp_BT": np.full(shape, -1.0, np.float32),
        "old_logp_BT": np.full(shape, -1.0, np.float32),
        "advantage_BT": np.array([advantage], np.float32),
        "weight_BT": np.ones(shape, np.float32),
        "is_response_BT": np.ones(shape, bool),
        "branch_BT": np.arange(1, len(ratio) + 1)[None],
        "is_on_policy_BT": np.ones(shape, bool),
    }
    tokens = Batch(**zeros | given, num_micro=None)
    return np.log(np.array([ratio], np.float32)) - 1, tokens


def loss_and_slope(logp, tokens, settings):
    """Each token's loss, the slope of their sum in each log-probability, and the indicators."""

    @jit
    def run(logp, tokens):
        of = lambda logp: losses.token_loss(logp, 0.0, tokens, settings)  # noqa: E731
        loss, pull, held = jax.vjp(of, logp, has_aux=True)
        return loss, pull(jnp.ones_like(loss))[0], held

    loss_BT, slope_BT, held = jax.device_get(run(logp, tokens))
    return loss_BT[0], slope_BT[0], {name: value[0] for name, value in held.items()}


def places(held) -> dict[str, list[int]]:
    """The tokens at which each bound holds."""
    start = "clip_fraction/"
    names = [name for name in held if name.startswith(start)]
    return {name.removeprefix(start): np.flatnonzero(held[name]).tolist() for name in names}


# A ratio below, inside, on and above every bound, first with A = 2 and then with A = -2.
RATIOS = (0.5, 0.9, 1.25, 1.5, 8.0, 11.0)
PLUS_AND_MINUS = (RATIOS * 2, (2.0,) * 6 + (-2.0,) * 6)


@pytest.mark.parametrize(
    ("changes", "slope", "held_at"),
    [
        (  # DAPO: no gradient above 1.28 for A > 0; below 0.8 and above 10 for A < 0
            {},
            [-1.0, -1.8, -2.5, 0.0, 0.0, 0.0, 0.0, 1.8, 2.5, 3.0, 16.0, 0.0],
            {"high": [3, 4, 5], "low": [6], "dual": [11]},
        ),
        (  # CISPO without a lower bound: the weight is the ratio, 5 at most, for both signs
            {"policy_loss": "cispo", "eps_low": 1.0, "eps_high": 4.0},
            [-1.0, -1.8, -2.5, -3.0, -10.0, -10.0, 1.0, 1.8, 2.5, 3.0, 10.0, 10.0],
            {"high": [4, 5, 10, 11], "low": []},
        ),
        (  # and with both bounds of Eq. 5
            {"policy_loss": "cispo"},
            [-1.6, -1.8, -2.5, -2.56, -2.56, -2.56, 1.6, 1.8, 2.5, 2.56, 2.56, 2.56],
            {"high": [3, 4, 5, 9, 10, 11], "low": [0, 6]},
        ),
        (
            {"policy_loss": "none"},
            [-1.0, -1.8, -2.5, -3.0, -16.0, -22.0, 1.0, 1.8, 2.5, 3.0, 16.0, 22.0],
            {},
        ),
    ],
    ids=["clip", "cispo", "cispo, both bounds", "none"],
)
def test_each_policy_loss_by_hand(changes, slope, held_at):
    logp, tokens = token_of(*PLUS_AND_MINUS)
    loss_T, slope_T, held = loss_and_slope(logp, tokens, settings_of(**changes))
    np.testing.assert_allclose(slope_T, slope, rtol=1e-5)
    np.testing.assert_array_equal(slope_T == 0, np.array(slope) == 0)
    assert places(held) == held_at
    # -r A is its own slope in log r, and that of -weight A log pi is what weighs log pi.
    expected_T = slope_T * logp[0] if "cispo" in changes.values() else slope_T
    np.testing.assert_allclose(loss_T[slope_T != 0], expected_T[slope_T != 0], rtol=1e-5)


def test_by_the_learners_old_logprobs_a_token_weighs_learner_over_sampler():
    """Hand-computed: r = 1.1 to the learner, which has e^0.5 and e of the sampler's probability."""
    logp, tokens = token_of([1.1, 1.1, 1.1], [1.0, -2.0, 1.0])
    behavior_BT = tokens.old_logp_BT - np.array([[0.5, 0.5, 1.0]], np.float32)
    tokens = dataclasses.replace(tokens, behavior_logp_BT=behavior_BT)
    settings = settings_of("tis")
    loss_T, slope_T, held = loss_and_slope(logp, tokens, settings)
    weight_T = np.array([np.exp(0.5), np.exp(0.5), 2.0])
    np.testing.assert_allclose(loss_T, -weight_T * 1.1 * np.array([1, -2, 1]), rtol=1e-5)
    np.testing.assert_allclose(slope_T, loss_T, rtol=1e-5)
    assert places(held) == {"tis": [2], "high": [], "low": [], "dual": []}
    plain_T, *_ = loss_and_slope(logp, tokens, settings_of(old_logprobs="learner"))
    np.testing.assert_allclose(plain_T, -1.1 * np.array([1, -2, 1]), rtol=1e-5)


def test_each_advantage_scale_by_hand(monkeypatch):
    """The first group is not among those that a step trains on."""
    reward_PG = np.array([[9, 0, 0, 0], [1, -1, -1, -1], [1, 1, 1, -1]], np.float32)
    length_PG, kept = np.array([[7, 7, 7, 7], [1, 1, 1, 1], [1, 1, 1, 5]]), np.array([1, 2])
    centred = np.array([[1.5, -0.5, -0.5, -0.5], [0.5, 0.5, 0.5, -1.5]])
    by_hand = {
        "group_std": centred,  # the deviation of each of these groups is 1
        "batch_std": centred / math.sqrt(6 / 7),
        # Over 12 tokens the mean is -6/12, and the sum of squares around it 12.
        "token_whiten": np.array([[2, 0, 0, 0], [1, 1, 1, -1]]) / math.sqrt(12 / 11),
        "none": centred,
    }
    assert by_hand.keys() == losses.ADVANTAGES.keys()
    monkeypatch.setitem(losses.ADVANTAGES, "of groups", lambda reward_PG, _: reward_PG.mean(axis=1))
    with pytest.raises(ValueError, match=r"scale = 'of groups' gives an array \[2\]: .* \[2, 4\]"):
        losses.advantages(reward_PG, kept, length_PG, scale="of groups")
    for name, expected in by_hand.items():
        advantage_PG = losses.advantages(reward_PG, kept, length_PG, scale=name)
        assert advantage_PG.dtype == np.float32
        assert not advantage_PG[0].any()
        np.testing.assert_allclose(advantage_PG[1:], expected, rtol=1e-5, atol=1e-7, err_msg=name)
        # A mean of so many of these rounds.
        equal_PG, one_PG = np.full((3, 7), -1.3, np.float32), np.ones((3, 7), int)
        for some in (kept, kept[:0]):
            assert not losses.advantages(equal_PG, some, one_PG, scale=name).any()


def test_a_constant_is_declared_for_the_losses_that_read_it():
    """A sweep over a constant of another loss had equal arms, and nobody said so."""
    constants = {"eps_low", "eps_high", "dual_clip"}
    logp, tokens = token_of([1.0], [1.0])
    for loss in losses.POLICY_LOSSES:
        settings, read = settings_of(policy_loss=loss), set()

        class Seen:
            def __getattr__(self, name, settings=settings, read=read):
                read.add(name)
                return getattr(settings, name)

        losses.token_loss(logp, 0.0, tokens, Seen())
        declared = {name for name in constants if loss in base.KEYS[f"algo.{name}"].only}
        assert read & constants == declared, loss


def test_an_advantage_from_outside_is_that_of_the_trained_groups():
    """One that a config file put into the table trained, and no other command knew it."""
    reward_PG = np.array([[9, 0, 0, 0], [1, -1, -1, -1]], np.float32)
    found = losses.advantages(reward_PG, np.array([1]), np.ones((2, 4)), scale="rloo:rloo")
    np.testing.assert_allclose(found, [[0] * 4, [2, -2 / 3, -2 / 3, -2 / 3]], rtol=1e-6)
    _, _, code = (ROOT / "tests" / "rloo.py").read_text().partition("\n\n\n")
    assert code in (ROOT / "configs" / "README.md").read_text()


LENGTHS = (1, 2, 3, 30, 4, 28, 9, 5)
CUTS = np.cumsum(LENGTHS)[:-1]
ADVANTAGE_PG = np.array([[1.5, -0.5, -0.5, -0.5], [0.9, -0.9, 0.9, -0.9]], np.float32)
ALONE = dataclasses.replace(KERNELS["cpu"], shares_prompts=False)
LAYOUTS = {
    "packed": {"row_tokens": 40, "micro_batch_rows": 2},
    "one long row": {"row_tokens": 120, "micro_batch_rows": 1},
    "a prompt for each": {"row_tokens": 40, "micro_batch_rows": 4, "kernels": ALONE},
}


def sampled():
    """Two groups of four with a long tail; (groups, log ratio of each token by log-probability).

    Half of the tokens of long responses are an earlier policy's. No two tokens have the same
    log-probability, so that it says which token an entry of a packed row is.
    """
    rng = np.random.default_rng(0)
    behavior = np.split(-rng.permutation(np.arange(1, 83)).astype(np.float32) / 32, CUTS)
    log_ratio = np.split(rng.normal(0, 0.3, 82) + 2.0 * (rng.random(82) < 0.2), CUTS)
    responses = [
        Response(
            np.arange(n, dtype=np.int32),
            logp,
            status=Status.STOPPED,
            ends=(n // 2,) if n > 9 else (),
        )
        for n, logp in zip(LENGTHS, behavior, strict=True)
    ]
    prompts = [Prompt(np.arange(n, dtype=np.int32)) for n in (3, 5)]
    groups = [Group(i, p, tuple(responses[4 * i : 4 * i + 4])) for i, p in enumerate(prompts)]
    return groups, log_ratio, np.concatenate(behavior)


def slopes(settings: learner.UpdateSettings) -> list[np.ndarray]:
    """The slope of the mini-batch's loss in each response's log-probabilities, micro by micro."""
    groups, log_ratio, behavior = sampled()
    batch = learner.make_batch(groups, ADVANTAGE_PG, settings)
    order = np.argsort(behavior)

    @jit
    def slope(logp_BT, tokens):
        total = lambda logp_BT: jnp.sum(losses.token_loss(logp_BT, 0.0, tokens, settings)[0])  # noqa: E731
        return jax.grad(total)(logp_BT)

    found = np.full(len(behavior), np.nan)
    for m in range(int(batch.num_micro)):
        tokens = learner.micro_batch(batch, m)
        place_BT = order[np.searchsorted(behavior[order], tokens.behavior_logp_BT).clip(max=81)]
        logp_BT = tokens.behavior_logp_BT + np.concatenate(log_ratio)[place_BT]
        slope_BT = np.asarray(slope(logp_BT.astype(np.float32), tokens))
        assert not slope_BT[~tokens.is_response_BT].any()
        found[place_BT[tokens.is_response_BT]] = slope_BT[tokens.is_response_BT]
    return np.split(found, CUTS)


def slopes_by_hand(preset: str) -> list[np.ndarray]:
    """The same from the paper's equation, response by response."""
    _, log_ratio, _ = sampled()
    R, N = len(LENGTHS), sum(LENGTHS)

    def clipped(r, A, low, high, dual=np.inf):
        held = (r > high) if A > 0 else (r < low) | (r > dual)
        return np.where(held, 0.0, -r * A)

    def of_response(i):
        n, A, r = LENGTHS[i], ADVANTAGE_PG.flat[i], np.exp(log_ratio[i])
        in_prompt = sum(LENGTHS[4 * (i // 4) : 4 * (i // 4) + 4])
        s = np.exp(log_ratio[i].mean())
        return {
            "dr_grpo": lambda: clipped(r, A, 0.8, 1.2) / (R * MAX_TOKENS),
            "gspo": lambda: np.full(n, clipped(s, A, 1 - 3e-4, 1 + 4e-4) / (R * n)),
            "cispo": lambda: -np.minimum(r, 5) * A / N,
            "reinforce_pp": lambda: clipped(r, A, 0.8, 1.2) / (R * n),
            "scalerl": lambda: -np.minimum(r, 5) * A / (2 * in_prompt),
            "tis": lambda: clipped(r, A, 0.8, 1.28, 10) / N,  # pi_old is the sampler's here
        }[preset]()

    return [of_response(i) for i in range(R)]


@pytest.mark.parametrize(
    ("preset", "layout", "changes"),
    [
        *((preset, "packed", {}) for preset in base.LOSS_PRESETS),
        ("gspo", "packed", {"policy_loss": "gspo:gspo"}),
        # Those whose loss of a token depends on others.
        *((preset, other, {}) for preset in ("gspo", "scalerl") for other in [*LAYOUTS][1:]),
    ],
)
def test_a_preset_has_its_papers_gradient_in_every_layout(preset, layout, changes):
    """So has gspo.py, a loss from outside."""
    settings = settings_of(preset, **changes)
    settings = dataclasses.replace(settings, update_responses=8, **LAYOUTS[layout])
    found, by_hand = slopes(settings), slopes_by_hand(preset)
    largest = max(np.abs(slope).max() for slope in by_hand)
    assert largest > 0
    for ours, theirs in zip(found, by_hand, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize(
    ("returned", "refusal"),
    [
        (lambda logp: logp, r"has to return \(the tokens' loss, a dict of indicators\)"),
        (lambda logp: (logp[:, None], {}), r"the loss is an array \[3, 1\]: .* each token, \[3\]"),
        (lambda logp: (logp.mean(), {}), r"the loss is an array \[\]"),
        (lambda logp: (logp, {"cut": 0.5}), r"cut is an array \[\]"),
        (lambda logp: (logp, {"entropy": logp}), "rename the indicators entropy"),
        (lambda logp: logp.nothing, r"failed in \S*gspo.py \(AttributeError.*nothing"),
    ],
)
def test_a_loss_from_outside_that_is_none_is_refused_by_name(returned, refusal, monkeypatch):
    """One of [C, 1], or its mean, was trained on; others were tracebacks, or had no name."""

    def mine(logp_pair, logp, tokens, settings):
        return returned(logp)

    monkeypatch.setattr("gspo.mine", mine, raising=False)
    with pytest.raises(ValueError, match=f"algo.policy_loss = 'gspo:mine'.*{refusal}"):
        losses.function_of("policy_loss", "gspo:mine")(None, jnp.zeros(3), None, None)
