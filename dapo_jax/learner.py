"""The DAPO update: gradients summed over micro-batches, clipped, and one AdamW step.

Axis letters: M micro-batches, B rows, T tokens. The rows are packed (dapo_jax.packing).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct

from dapo_jax.algorithm import (
    clip_indicators,
    importance_ratio,
    kl_k3,
    token_policy_loss,
    token_weights,
)
from dapo_jax.logprobs import chosen_logprobs, head_loss
from dapo_jax.packing import TrainSequence, micro_batches, pack
from models.kernels import Kernels
from models.lora import Lora, adapted
from models.qwen2 import param_axes
from sharding import rules


@struct.dataclass
class TrainState:
    """What is trained, in float32 (all weights, or LoRA's factors), and AdamW's moments."""

    params: Any
    opt_state: Any


@struct.dataclass
class Batch:
    """One mini-batch, as [M, B, T] arrays of packed rows; the first `num_micro` are in use."""

    tokens: jax.Array
    target: jax.Array
    position: jax.Array
    segment: jax.Array
    branch: jax.Array
    behavior_logp: jax.Array
    advantage: jax.Array
    weight: jax.Array
    is_response: jax.Array
    num_micro: jax.Array


@dataclasses.dataclass(frozen=True)
class Learning:
    """What fixes an update, apart from the weights. `temperature` is the sampler's."""

    eps_low: float
    eps_high: float
    dual_clip: float
    kl_coef: float
    adam_b1: float
    adam_b2: float
    adam_eps: float
    weight_decay: float
    max_grad_norm: float
    temperature: float
    vocab_size: int
    compute_dtype: str
    remat: str
    lora: Lora | None
    kernels: Kernels


def optimizer(learning: Learning) -> optax.GradientTransformation:
    """Global-norm clip, then AdamW (arXiv 1711.05101) for a learning rate of 1."""
    s = learning
    return optax.chain(
        optax.clip_by_global_norm(s.max_grad_norm),
        optax.adamw(1.0, b1=s.adam_b1, b2=s.adam_b2, eps=s.adam_eps, weight_decay=s.weight_decay),
    )


def warmup_learning_rate(step: int, *, learning_rate: float, warmup_steps: int) -> float:
    """Linear warm-up over rollout steps; step 0 trains at learning_rate / warmup_steps, not 0."""
    return learning_rate * min(1.0, (step + 1) / max(warmup_steps, 1))


def init_state(params, learning: Learning) -> TrainState:
    """The state before the first update."""
    return TrainState(params, optimizer(learning).init(params))


def shardings_like_params(state: TrainState, param_shardings, replicated) -> TrainState:
    """Shardings of a whole (abstract) state: moments lie where their parameters do."""
    structure = jax.tree.structure(state.params)

    def is_params(tree):
        return jax.tree.structure(tree) == structure

    return jax.tree.map(
        lambda tree: param_shardings if is_params(tree) else replicated, state, is_leaf=is_params
    )


def cast(params, dtype):
    """The parameters in the compute dtype; gradients flow back to the float32 masters."""
    return jax.tree.map(lambda p: p.astype(dtype), params)


def policy_weights(params, start_weights, learning: Learning):
    """All weights of the policy, in the compute dtype; with LoRA the start policy's, adapted."""
    if learning.lora is None:
        return cast(params, learning.compute_dtype)
    adapters = params["layers"]
    layers = adapted(start_weights["layers"], adapters, scale=learning.lora.scale)
    return start_weights | {"layers": layers}


def make_batch(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    behavior_logp: Sequence[np.ndarray],
    advantage_R: np.ndarray,
    trains_R: np.ndarray,
    *,
    loss_aggregation: str,
    row_tokens: int,
    micro_batch_rows: int,
    num_micro: int,
    share_prompts: bool,
) -> Batch:
    """One mini-batch of R responses as packed host arrays, each token's loss weight included.

    The weights (Eq. 12) are those of the whole mini-batch, before any split. `trains_R` is False
    for responses masked by overlong filtering. `num_micro` fixes the shape: R / micro_batch_rows
    rounded up holds any R responses.
    """
    length_R = np.array([len(response) for response in responses])
    # As wide as a row, not as the longest response: one compiled program for all mini-batches.
    mask_RT = (np.arange(row_tokens) < length_R[:, None]) & trains_R[:, None]
    weight_RT = token_weights(mask_RT, mode=loss_aggregation).astype(np.float32)
    sequences = [
        TrainSequence(
            prompts[r],
            responses[r],
            behavior_logp[r],
            float(advantage_R[r]),
            weight_RT[r, : length_R[r]],
        )
        for r in range(len(responses))
    ]
    rows = pack(sequences, row_tokens=row_tokens, share_prompts=share_prompts)
    arrays, used = micro_batches(rows, num_micro=num_micro, rows=micro_batch_rows)
    return Batch(**vars(arrays), num_micro=np.int32(used))


def abstract_batch(shape: tuple[int, int, int], mesh) -> Batch:
    """ShapeDtypeStructs, with shardings, of a batch of [M, B, T]: what an update is lowered for."""

    def rows(dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rules.micro_batches(mesh))

    ints = ("tokens", "target", "position", "segment", "branch")
    floats = ("behavior_logp", "advantage", "weight")
    return Batch(
        **{name: rows(jnp.int32) for name in ints},
        **{name: rows(jnp.float32) for name in floats},
        is_response=rows(jnp.bool_),
        num_micro=jax.ShapeDtypeStruct((), jnp.int32, sharding=rules.replicated(mesh)),
    )


def micro_batch_loss(params, start_weights, micro: Batch, *, graph, mesh, learning: Learning):
    """(loss, sums): a micro-batch's share of the mini-batch's loss (Eq. 8 and 12), and metrics.

    `micro.weight` was normalised over the whole mini-batch, so the shares of all micro-batches
    and devices add up to the true loss. `sums` are sums over the response tokens.
    """
    s = learning
    attention = rules.by_heads(s.kernels.attend_rows, mesh)
    how = {
        "remat": s.remat,
        "project": s.kernels.learn_product,
        # Unrolled, XLA for CPUs would keep what is to be recomputed.
        "unroll": s.kernels.unrolled_layers if s.remat == "none" else 1,
        "gather": functools.partial(rules.whole_rows, mesh=mesh),
        "reduce": functools.partial(rules.split_tokens, mesh=mesh),
    }

    def attend(q_BTNH, k_BTKH, v_BTKH):
        return attention(q_BTNH, k_BTKH, v_BTKH, micro.segment, micro.branch)

    head = {"temperature": s.temperature, "vocab_size": s.vocab_size, "mesh": mesh}
    clip = {"eps_low": s.eps_low, "eps_high": s.eps_high, "dual_clip": s.dual_clip}

    def as_they_lie(layer, _):
        return rules.kept_sharded(layer, param_axes(layer), mesh)

    def last_layer(weights, *, adapters=(), adapt=as_they_lie):
        model = nnx.merge(graph, weights)
        adaptation = {"adapters": adapters, "adapt": adapt}
        x_BTD = model.hidden(micro.tokens, micro.position, attend, **how, **adaptation)
        return x_BTD, model.head(), micro.target

    if s.lora is None:
        last = last_layer(cast(params, s.compute_dtype))
    else:  # Layer by layer: the adapted weights of all layers never exist at once.
        adapt = functools.partial(adapted, scale=s.lora.scale)
        last = last_layer(start_weights, adapters=params["layers"], adapt=adapt)

    reference_logp_BT = None
    if s.kl_coef > 0:
        reference_logp_BT, _ = chosen_logprobs(*last_layer(start_weights), **head)

    def policy_loss_and_kl(logp, tokens):
        token, reference_logp = tokens
        # Padding has arbitrary log-probabilities: nothing of it may reach the loss.
        logp = jnp.where(token.is_response, logp, 0.0)
        loss = token_policy_loss(logp, token.behavior_logp, token.advantage, **clip)
        if s.kl_coef == 0:
            return loss, jnp.zeros_like(loss)
        return loss, kl_k3(logp, jnp.where(token.is_response, reference_logp, 0.0))

    def token_loss(logp, tokens):
        loss, kl = policy_loss_and_kl(logp, tokens)
        return (loss + s.kl_coef * kl) * tokens[0].weight

    tokens = (micro, reference_logp_BT)
    loss, logp_BT, entropy_BT = head_loss(*last, tokens, token_loss, **head)
    _, kl_BT = policy_loss_and_kl(logp_BT, tokens)
    held = clip_indicators(logp_BT, micro.behavior_logp, micro.advantage, **clip)
    ratio_BT = importance_ratio(logp_BT, micro.behavior_logp)
    per_token = {
        "tokens": jnp.ones_like(logp_BT),
        "entropy": entropy_BT,
        "mean_prob": jnp.exp(logp_BT),
        "kl": kl_BT,
        "ratio_gap": jnp.abs(ratio_BT - 1.0),
        "clip_fraction/high": held.high,
        "clip_fraction/low": held.low,
        "clip_fraction/dual": held.dual,
    }
    live_BT = micro.is_response
    sums = {key: jnp.sum(jnp.where(live_BT, value, 0.0)) for key, value in per_token.items()}
    return loss, sums


def update(state: TrainState, start_weights, batch: Batch, learning_rate, *, graph, mesh, learning):
    """(state, metrics) after one optimizer step on one mini-batch; pure, to be jitted.

    The micro-batch loop has a dynamic length, so one compiled program serves every packing. An
    update whose gradient is not finite changes nothing, which metrics["taken"] tells.
    `start_weights`, the start policy's in the compute dtype, are what LoRA adapts and what the KL
    term is measured against; without either pass None.
    """

    def micro_batch_gradient(i):
        micro = jax.tree.map(lambda rows: rows[i], batch.replace(num_micro=None))
        gradient = jax.value_and_grad(micro_batch_loss, has_aux=True)
        return gradient(
            state.params, start_weights, micro, graph=graph, mesh=mesh, learning=learning
        )

    def accumulate(i, total):
        return jax.tree.map(jnp.add, total, micro_batch_gradient(i))

    zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(micro_batch_gradient, 0))
    (loss, sums), grads = jax.lax.fori_loop(0, batch.num_micro, accumulate, zero)
    grad_norm = optax.tree.norm(grads)
    steps, opt_state = optimizer(learning).update(grads, state.opt_state, state.params)
    params = jax.tree.map(lambda p, s: p + learning_rate * s, state.params, steps)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)

    def taken(new, old):
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    state = TrainState(taken(params, state.params), taken(opt_state, state.opt_state))
    tokens = sums.pop("tokens")
    metrics = {key: value / jnp.maximum(tokens, 1) for key, value in sums.items()}
    return state, metrics | {"loss": loss, "grad_norm": grad_norm, "taken": finite}
