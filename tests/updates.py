"""Updates of a small model: some responses, the packed update, and a plain one from the equations.

The plain losses are written from the papers' equations alone. They share nothing with the learner
but the model's forward pass, which test_parity.py compares with transformers. Tests share settings
and shapes, and hand over host arrays: one that lies on a mesh asks for a program of its own.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from quick import jit, random_params

from configs import base
from dapo_jax import learner
from dapo_jax.learner import init_state, make_batch
from dapo_jax.setup import components
from dapo_jax.types import Batch, Group, Prompt, Response, Status
from models.kernels import KERNELS
from models.qwen2 import Qwen2Config
from models.transformer import abstract_params
from sharding.mesh import make_mesh

SMALL = Qwen2Config(64, 32, 64, 2, 4, 2, 8, True)
VOCAB = 60  # the tokenizer's; the model has 4 embedding rows more


def small_config(**changes):
    config = base.get_config()
    settings = {
        "model.preset": "small",
        "model.compute_dtype": "float32",
        "updates_per_step": 2,
        "rollout.num_prompts": 4,
        "rollout.group_size": 4,
        "rollout.max_prompt_tokens": 8,
        "rollout.max_response_tokens": 30,
        "rollout.temperature": 0.7,
        "algo.overlong_filtering": True,
        # Adam's first step is sign(g) where eps is small: it makes a whole step of a gradient's
        # rounding near 0. With eps 1 the step is smooth in g.
        "learner.adam_eps": 1.0,
        "learner.max_grad_norm": 10.0,  # more than the gradients have, but where one is clipped
        "learner.row_tokens": 40,
        "learner.micro_batch_rows": 2,
    }
    config.update_from_flattened_dict(settings | changes)
    return config


SETTINGS = components.update_settings(small_config(), VOCAB, KERNELS["cpu"])


@dataclasses.dataclass(frozen=True)
class Responses:
    """Holds R responses with what an update knows about them."""

    prompts: list[np.ndarray]
    responses: list[np.ndarray]
    behavior_logp: list[np.ndarray]
    given: list[np.ndarray]  # whose tokens are an environment's
    advantage_R: np.ndarray
    stopped_R: np.ndarray

    def take(self, indices) -> "Responses":
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]
        lists = [[field[r] for r in indices] for field in fields[:4]]
        return Responses(*lists, *(field[list(indices)] for field in fields[4:]))

    def replace(self, **changes) -> "Responses":
        return dataclasses.replace(self, **changes)

    @property
    def length_R(self) -> np.ndarray:
        return np.array([len(response) for response in self.responses])


@functools.cache
def graph(sizes=SMALL):
    return abstract_params(sizes)[0]


@functools.cache
def random_weights():
    """Weights large enough for probabilities far from uniform."""
    return random_params(SMALL, spread=0.5)[1]


@functools.cache
def long_tailed() -> Responses:
    """Makes two groups of four with a long tail, and behaviour far enough off for every bound."""
    rng = np.random.default_rng(1)
    lengths = [1, 2, 3, 30, 4, 28, 9, 5]
    prompts = [rng.integers(0, VOCAB, n).astype(np.int32) for n in (3, 5)]
    made = Responses(
        prompts=[prompts[0]] * 4 + [prompts[1]] * 4,
        responses=[rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths],
        behavior_logp=[np.zeros(n, np.float32) for n in lengths],
        given=[np.zeros(n, bool) for n in lengths],
        advantage_R=np.array([1.5, -0.5, -0.5, -0.5, 0.9, -0.9, 0.9, -0.9], np.float32),
        stopped_R=np.ones(8, bool),
    )
    log_ratio = [rng.normal(0, 0.3, n) + 3.0 * (rng.random(n) < 0.1) for n in lengths]
    logp = np.split(plain_logp(random_weights(), made)[0], np.cumsum(lengths)[:-1])
    behavior = [(a - b).astype(np.float32) for a, b in zip(logp, log_ratio, strict=True)]
    return made.replace(behavior_logp=behavior)


def groups_of(data: Responses, *, group_size: int) -> list[Group]:
    """Puts the responses into groups, each with the prompt of its first."""
    status = [Status.STOPPED if stopped else Status.CUT for stopped in data.stopped_R]
    fields = zip(data.responses, data.behavior_logp, status, data.given, strict=True)
    responses = [Response(*arrays, given_T=given_T) for *arrays, given_T in fields]
    return [
        Group(i, Prompt(data.prompts[i], None), tuple(responses[i : i + group_size]))
        for i in range(0, len(responses), group_size)
    ]


def batch_of(data: Responses, *, group_size=1, **changes) -> Batch:
    """Packs a mini-batch, by SETTINGS with changes; responses that did not stop are masked."""
    groups = groups_of(data, group_size=group_size)
    advantage_PG = data.advantage_R.reshape(-1, group_size)
    return make_batch(groups, advantage_PG, dataclasses.replace(SETTINGS, **changes))


@functools.cache
def jitted_update(settings: learner.UpdateSettings, sizes):
    mesh = make_mesh(data=1, model=1, devices=jax.devices()[:1])
    return jit(functools.partial(learner.update, graph=graph(sizes), mesh=mesh, settings=settings))


def next_update(
    state, batch, settings=SETTINGS, *, start_weights=None, learning_rate=1e-3, sizes=SMALL
):
    """Takes an update of a model of these sizes: (state, metrics), host arrays."""
    update = jitted_update(settings, sizes)
    return jax.device_get(update(jax.device_get(state), start_weights, batch, learning_rate))


def run_update(params, batch, settings=SETTINGS, **options):
    """Takes the first update: (state, metrics)."""
    return next_update(init_state(params, settings), batch, settings, **options)


def first_moment(state: learner.TrainState):
    return state.opt_state[1][0].mu


def gradient(params, batch, settings=SETTINGS, **options):
    """Computes the first update's gradient: Adam's first moment is (1 - b1) times it."""
    state, metrics = run_update(params, batch, settings, **options)
    assert metrics["taken"]
    assert metrics["grad_norm"] < settings.max_grad_norm
    return jax.tree.map(lambda m: m / (1 - settings.adam_b1), first_moment(state))


def padded(rows) -> np.ndarray:
    return np.stack([np.pad(row, (0, max(map(len, rows)) - len(row))) for row in rows])


def plain_rows(data: Responses) -> dict[str, np.ndarray]:
    """Makes arrays of one response a row; what belongs to a token stands where it is predicted."""

    def predicted(values):
        pairs = zip(data.prompts, values, strict=True)
        return padded([np.append(np.zeros(len(prompt) - 1), value) for prompt, value in pairs])

    is_response_RT = predicted([~given_T for given_T in data.given]) > 0
    trained_RT = is_response_RT & data.stopped_R[:, None]
    return {
        "ids_RT": padded(list(map(np.append, data.prompts, data.responses))),
        "is_response_RT": is_response_RT,
        "behavior_logp_RT": predicted(data.behavior_logp).astype(np.float32),
        "advantage_R1": data.advantage_R[:, None],
        "weight_RT": trained_RT / trained_RT.sum(),  # Eq. 12
    }


def row_logp(params, rows):
    """Computes (logp_RT of each next token, logp_RTV)."""
    ids_RT = rows["ids_RT"]
    logits_RTV = nnx.merge(graph(), params)(ids_RT)[:, :-1, :VOCAB] / SETTINGS.temperature
    logp_RTV = jax.nn.log_softmax(logits_RTV, axis=-1)
    return jnp.take_along_axis(logp_RTV, ids_RT[:, 1:, None], axis=-1)[..., 0], logp_RTV


jitted_row_logp = jit(row_logp)


def plain_logp(params, data: Responses):
    """Computes the (logp_N, logp_NV) of all response tokens, one response after the other."""
    rows = plain_rows(data)
    outputs = jax.device_get(jitted_row_logp(params, rows))
    return [array[rows["is_response_RT"]] for array in outputs]


def plain_dapo(log_ratio_RT, rows):
    """Computes the negative of J of Eq. 8, with the dual clip for A < 0."""
    ratio_RT, A_R1 = jnp.exp(log_ratio_RT), rows["advantage_R1"]
    objective_RT = jnp.minimum(ratio_RT * A_R1, jnp.clip(ratio_RT, 0.8, 1.28) * A_R1)
    return -jnp.where(A_R1 < 0, jnp.maximum(objective_RT, 10 * A_R1), objective_RT)


def plain_gspo(log_ratio_RT, rows):
    """Computes GSPO's -J: s_i = (pi(y_i) / pi_behaviour(y_i))^(1 / |y_i|), clipped."""
    mean_R1 = log_ratio_RT.mean(axis=1, keepdims=True, where=rows["is_response_RT"])
    s_R1, A_R1 = jnp.exp(mean_R1), rows["advantage_R1"]
    objective_R1 = jnp.minimum(s_R1 * A_R1, jnp.clip(s_R1, 0.8, 1.28) * A_R1)
    return jnp.broadcast_to(-objective_R1, log_ratio_RT.shape)


@functools.partial(jit, static_argnames="token_loss")
def plain_loss_and_gradient(params, rows, start_weights, kl_coef, *, token_loss):
    reference_RT, _ = row_logp(start_weights, rows)

    def loss(params):
        logp_RT, _ = row_logp(params, rows)
        gap_RT, weight_RT = reference_RT - logp_RT, rows["weight_RT"]
        loss_RT = token_loss(logp_RT - rows["behavior_logp_RT"], rows)
        loss_RT += kl_coef * (jnp.exp(gap_RT) - gap_RT - 1)
        return jnp.sum(jnp.where(weight_RT > 0, loss_RT, 0.0) * weight_RT)

    return jax.value_and_grad(loss)(params)


def plain(params, data, *, kl_coef=0.0, start=None, token_loss=plain_dapo):
    """Computes (loss, gradient); start: the weights that the KL term is measured against."""
    arguments = (params, plain_rows(data), start or params, kl_coef)
    return jax.device_get(plain_loss_and_gradient(*arguments, token_loss=token_loss))


def flat(tree) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def distance(actual, expected) -> float:
    """Measures the largest difference of two trees, in units of the second's largest entry."""
    actual, expected = flat(actual), flat(expected)
    return np.abs(actual - expected).max() / np.abs(expected).max()
