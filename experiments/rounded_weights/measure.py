"""Measures what rounding the weights adds to log r in the updates of one step.

Axis letters beside the learner's: U mini-batches of a step, N their trained tokens.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from configs import smollm2_135m, tiny
from dapo_jax import algorithm, learner, losses, train
from dapo_jax.checkpoints.progress import Progress
from dapo_jax.logs.metrics import Stopwatch
from dapo_jax.process import hosts
from dapo_jax.setup import start
from dapo_jax.types import Batch
from experiments.bfloat16.places import PLACES, nearest
from models import transformer
from models.transformer import abstract_params

FIVE = (5e-7, 1e-6, 2e-6, 5e-6, 1e-5)
MORE = (*FIVE, 5e-5, 2e-4)  # the 1 M model's config has 5e-5
SPLIT_RATE = 5e-6  # at which also one kind of weight alone has two terms
# bfloat16's grid: there start weights of a model that is published so are; later they are not.
ON, OFF = "on", "off"
AS_IT_IS = "as it is"  # SmolLM2's file has 16 values in a block of 32 weights
RATES = {"135M": {OFF: FIVE, ON: (1e-6, 5e-6), AS_IT_IS: (5e-6,)}, "1M": {OFF: MORE, ON: MORE}}
CONFIGS = {"135M": smollm2_135m.get_config, "1M": tiny.get_config}
EXPLICIT_BITS = {"bfloat16": 7, "float16": 10}  # of the significand
KINDS = {  # of weights, by the first letters of their names
    "embedding": ("embed",),
    "attention": ("q", "k", "v", "o"),
    "feed-forward": ("gate", "up", "down"),
}


def spacing(w, dtype: str):
    """Computes how far apart the numbers of a dtype are at w."""
    _, exponent = np.frexp(w)
    lowest = -24 if dtype == "float16" else -133
    return np.exp2(np.maximum(exponent - 1 - EXPLICIT_BITS[dtype], lowest)).astype(np.float32)


def cast(w, dtype: str):
    """Rounds to the nearest number of a dtype."""
    return w.astype(jnp.dtype(dtype)).astype(np.float32)


def offset(w, seed: int):
    """Makes a part of up to half of bfloat16's spacing for each weight, the same at every call."""
    part = np.random.default_rng(seed).uniform(-0.5, 0.5, w.shape).astype(np.float32)
    return part * spacing(w, "bfloat16")


def dithered(w):
    """Rounds to bfloat16 behind an offset."""
    return cast(w + offset(w, w.size), "bfloat16")


def two_terms(w):
    """Rounds to the sum of two bfloat16 numbers."""
    high = cast(w, "bfloat16")
    return high + cast(w - high, "bfloat16")


WEIGHTS: dict[str, Callable] = {
    "float32": lambda w: w,
    "bfloat16": functools.partial(cast, dtype="bfloat16"),
    "dithered": dithered,
    "two terms": two_terms,
    "float16": functools.partial(cast, dtype="float16"),
}


def rounded(params: Any, weights: str) -> Any:
    """Rounds all weights as an arm does; "two terms: KIND" has bfloat16 elsewhere."""
    rule, _, kind = weights.partition(": ")

    def one(path, w):
        name = path[-1].key.partition("_")[0]
        own = not kind or name in KINDS[kind]
        return WEIGHTS[rule if own else "bfloat16"](w)

    return jax.tree.map_with_path(one, params)


@contextlib.contextmanager
def rounding_activations() -> Iterator[None]:
    """Rounds to bfloat16 what products and the head read in a float32 program traced inside."""

    def product(project, spec, x, w, weights):
        out = of_models(project, spec, nearest(x), w, weights)
        return nearest(out) if PLACES.get(spec) == "input of the feed-forward" else out

    def chosen_logprobs(x_BTD, *arguments):
        return of_learner(nearest(x_BTD), *arguments)

    of_models, of_learner = transformer.product, learner.chosen_logprobs
    with (
        mock.patch.object(transformer, "product", product),
        mock.patch.object(learner, "chosen_logprobs", chosen_logprobs),
    ):
        yield


@dataclasses.dataclass
class Step:
    """One step of a run: its mini-batches, and programs of them.

    log_p[rounds](params, batch): a batch's log-probabilities [N] of its trained tokens, with or
    without rounded activations.
    """

    run: start.Run
    batches: list[Batch]

    @functools.cached_property
    def log_p(self) -> dict[bool, Callable]:
        return {rounds: self._log_p(rounds) for rounds in (False, True)}

    def _log_p(self, rounds: bool) -> Callable:
        how = dataclasses.replace(self.run.programs.settings, old_logprobs="learner")
        if rounds:
            attend = how.kernels.attend_rows

            def attend_rows(q_BTNH, k_BTKH, v_BTKH, *numbers):
                return attend(*map(nearest, (q_BTNH, k_BTKH, v_BTKH)), *numbers)

            kernels = dataclasses.replace(how.kernels, attend_rows=attend_rows)
            how = dataclasses.replace(how, kernels=kernels)
        graph, _ = abstract_params(self.run.programs.sizes)
        constants = {"graph": graph, "mesh": self.run.programs.mesh, "settings": how}
        program = jax.jit(functools.partial(learner.recompute_old_logp, **constants))

        def log_p(params, batch):
            with rounding_activations() if rounds else contextlib.nullcontext():
                logp_MBT = program(params, None, batch)
            return np.asarray(logp_MBT)[trained(batch)]

        return log_p

    def squared_gradients(self, params, batch: Batch, seed: int) -> Any:
        """Estimates the sum over the trained tokens of the squares of their log p's gradients.

        It is the square of the gradient of their sum with random signs (Hutchinson's estimate).
        """
        signs_MBT = np.random.default_rng(seed).choice(np.float32([-1, 1]), batch.weight_BT.shape)
        signs_MBT = jnp.asarray(np.where(trained(batch), signs_MBT, 0))
        batch = dataclasses.replace(batch, weight_BT=signs_MBT)
        return jax.tree.map(np.square, jax.device_get(self._gradient(params, batch)))

    @functools.cached_property
    def _gradient(self) -> Callable:
        programs = self.run.programs
        settings = dataclasses.replace(programs.settings, policy_loss=f"{__name__}:own_log_p")
        graph, _ = abstract_params(programs.sizes)
        constants = {"graph": graph, "mesh": programs.mesh, "settings": settings}
        of_micro = jax.grad(functools.partial(learner.micro_batch_loss, **constants), has_aux=True)

        def whole(params, batch):
            def add(i, total):
                gradient, _ = of_micro(params, None, learner.micro_batch(batch, i))
                return jax.tree.map(jnp.add, total, gradient)

            zero = jax.tree.map(jnp.zeros_like, params)
            return jax.lax.fori_loop(0, batch.num_micro, add, zero)

        return jax.jit(whole)


def own_log_p(logp_pair, logp, tokens: Batch, settings):
    """Makes a token's log p its loss, as algo.policy_loss takes one."""
    return logp, {}


def trained(batch: Batch) -> np.ndarray:
    """Marks the tokens with a weight, [M, B, T]."""
    return np.asarray(batch.weight_BT) != 0


def of_seed(model: str, seed: int, workdir: pathlib.Path) -> list[dict]:
    """Samples a config's first step in float32, and measures all arms of it.

    A row is an arm at a learning rate.
    """
    config = CONFIGS[model]()
    config.seed, config.eval.every_steps, config.mesh.cpu_devices = seed, 0, 1
    with contextlib.ExitStack() as stack:
        run, state, _ = start.open_run(config, workdir / f"{model}_{seed}", None, stack)
        config = run.config
        rollouts, _, _ = train.sample(run, 0, state, Progress(), None, Stopwatch())
        reward_PG = train.reward(config, rollouts)
        scale = config.algo.advantage_scale
        advantage_PG = losses.advantages(reward_PG, rollouts.kept, rollouts.length_PG, scale=scale)
        programs = run.programs
        batches = learner.minibatches(rollouts, advantage_PG, programs.settings, programs.mesh)
        step, published = Step(run, [*batches]), jax.device_get(state.params)
        return [
            {"model": model, "seed": seed, "start": grid, **row}
            for grid, rates in RATES[model].items()
            for row in of_start(step, started(published, grid), grid, rates)
        ]


def trajectory(step: Step, params, rate: float) -> list:
    """Takes the step's updates in float32: the weights before each, on the host."""
    state, found = step.run.programs.start_state(), []
    shardings = jax.tree.map(lambda array: array.sharding, state.params)
    state = dataclasses.replace(state, params=hosts.place(params, shardings))
    for batch in step.batches[:-1]:
        found.append(jax.device_get(state.params))
        state, _ = step.run.update(state, None, batch, rate)
    return [*found, jax.device_get(state.params)]


def arms(rate: float, grid: str) -> list[tuple[str, bool]]:
    """Lists (weights, whether activations are rounded)."""
    if grid != OFF:
        return [("float32", False), ("bfloat16", False), ("dithered", False)]
    more = [("float32", True), ("bfloat16", True)]
    more += [(f"two terms: {kind}", False) for kind in KINDS]
    return [(weights, False) for weights in WEIGHTS] + (more if rate == SPLIT_RATE else [])


def started(params, grid: str):
    """Puts start weights on bfloat16's grid, or by chance between its points, or nowhere else."""
    if grid == OFF:
        return jax.tree.map(lambda w: cast(w, "bfloat16") + offset(w, w.size + 1), params)
    return rounded(params, "bfloat16") if grid == ON else params


def of_start(step: Step, params, grid: str, rates: Sequence[float]) -> Iterator[dict]:
    """Yields the rows of one start."""
    advantage_N = np.concatenate(
        [np.asarray(batch.advantage_BT)[trained(batch)] for batch in step.batches]
    )
    count_U = [int(trained(batch).sum()) for batch in step.batches]
    later = list(enumerate(step.batches))[1:]  # at the first every ratio is 1
    squares = {u: step.squared_gradients(params, batch, seed=u) for u, batch in later}
    old = {}
    for arm in arms(SPLIT_RATE, grid):
        weights = rounded(params, arm[0])
        old[arm] = {u: step.log_p[arm[1]](weights, batch) for u, batch in later}
    for rate in rates:
        path, log_r = trajectory(step, params, rate), {}
        for arm in arms(rate, grid):
            parts = [np.zeros(count_U[0], np.float32)]
            for u, batch in later:
                weights = rounded(path[u], arm[0])
                parts.append(step.log_p[arm[1]](weights, batch) - old[arm][u])
            log_r[arm] = np.concatenate(parts)
            exact_N = log_r["float32", False]
            moved = changed(weights, rounded(params, arm[0]))  # behind the last update
            row = {"rate": rate, "weights": arm[0], "moved": moved}
            row |= {"activations": "bfloat16" if arm[1] else "float32"}
            row |= described(log_r[arm], exact_N, advantage_N)
            if arm[0] in EXPLICIT_BITS and not arm[1]:
                total = sum(variance(params, path[u], squares[u], arm[0]) for u, _ in later)
                row |= {"formula_std": float(np.sqrt(total / sum(count_U)))}
            print(row, flush=True)
            yield row


def variance(start_params, params, squares, dtype: str) -> float:
    """Adds up, over all weights, squares * d (u - d): the formula, of all tokens together."""

    def one(w, later, square):
        u = spacing(w, dtype)
        share = np.abs(later - w) / u % 1
        return float(np.sum(square * u**2 * share * (1 - share), dtype=np.float64))

    return sum(jax.tree.leaves(jax.tree.map(one, start_params, params, squares)))


def changed(one, other) -> float:
    """Returns the share of weights that differ."""
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    return float(sum(np.sum(a != b) for a, b in pairs) / sum(a.size for a, _ in pairs))


def described(log_r_N, exact_N, advantage_N) -> dict[str, float]:
    """Describes log r: its size, how it scatters about float32's, and what Eq. 8 clips of it."""
    bounds = {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 10.0}
    zero_N = np.zeros_like(log_r_N)
    _, held = algorithm.token_policy_loss(log_r_N, zero_N, advantage_N, **bounds)
    return {
        "mean": float(np.abs(log_r_N).mean()),
        "extra_std": float((log_r_N - exact_N).std()),
        **{bound: float(np.mean(np.asarray(held[bound]))) for bound in ("low", "high")},
    }


def measure(workdir: pathlib.Path, seeds: Sequence[int]) -> list[dict]:
    """Measures both models."""
    hosts.start(several=False, cpu_devices=1)
    return [row for model in CONFIGS for seed in seeds for row in of_seed(model, seed, workdir)]
