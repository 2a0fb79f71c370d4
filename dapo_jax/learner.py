"""Updates the policy: gradients summed over micro-batches, clipped, and one AdamW step.

Calls from `update` to Eq. 8: micro_batch_loss -> logprobs.head_loss (where the logits are) ->
losses.token_loss -> losses.clip -> algorithm.token_policy_loss. Axis letters: those of
models.transformer and dapo_jax.types, M micro-batches and B packed rows (dapo_jax.packing) among
them.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct

from dapo_jax.algorithm import importance_ratio, token_weights
from dapo_jax.logprobs import HeadLoss, Softmax, chosen_logprobs, head_loss, head_loss_of_rows
from dapo_jax.losses import token_loss
from dapo_jax.packing import into_micro_batches, pack, plan_update
from dapo_jax.process import hosts
from dapo_jax.types import Batch, Group, Rollouts
from models.kernels import Kernels
from models.lora import Lora, factored, merged
from models.parameters import param_axes
from models.precision import Weights, products_in
from models.transformer import Execution
from sharding import rules

ROW_MULTIPLE, LONG_ROW = 64, 1_024  # chosen lengths of rows are multiples of 64, long ones of 1,024
jax.tree_util.register_dataclass(Batch)


@struct.dataclass
class TrainState:
    """Holds what is trained in float32, all weights or LoRA's factors, and AdamW's moments."""

    params: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
    """The constants of an update, under the names of the config's keys (configs/base.py).

    temperature: the sampler's. vocab_size: the tokenizer's. update_responses: of a mini-batch.
    routes: the model's, ModelConfig.routes.
    """

    # Of algo:
    ratio: str
    policy_loss: str
    eps_low: float
    eps_high: float
    dual_clip: float
    loss_aggregation: str
    overlong_filtering: bool
    old_logprobs: str
    tis_cap: float
    kl_coef: float
    entropy_coef: float
    replay_routes: bool
    args: dict = dataclasses.field(hash=False)
    # Of learner:
    learning_rate: float
    warmup_steps: int
    decay: str
    adam_b1: float
    adam_b2: float
    adam_eps: float
    weight_decay: float
    max_grad_norm: float
    row_tokens: int
    row_lengths: int
    micro_batch_rows: int
    remat: str
    # Of the model, the rollout and the devices:
    compute_dtype: str
    temperature: float
    vocab_size: int
    max_response_tokens: int
    update_responses: int
    lora: Lora | None
    routes: tuple[int, ...]
    kernels: Kernels


def optimizer(settings: UpdateSettings) -> optax.GradientTransformation:
    """Clips by the global norm, then AdamW (arXiv 1711.05101) for a learning rate of 1."""
    s = settings
    return optax.chain(
        optax.clip_by_global_norm(s.max_grad_norm),
        optax.adamw(1.0, b1=s.adam_b1, b2=s.adam_b2, eps=s.adam_eps, weight_decay=s.weight_decay),
    )


DECAYS = {  # of the learning rate, from 1 to 0: the number of steps -> optax's schedule
    "none": lambda steps: lambda step: 1.0,
    "cosine": lambda steps: optax.cosine_decay_schedule(1.0, steps),
    "linear": lambda steps: optax.linear_schedule(1.0, 0.0, steps),
}


def scheduled_rate(step: int, settings: UpdateSettings, *, num_steps: int) -> float:
    """Warms up linearly over rollout steps, then decays; the last step is the last above 0.

    Step 0 trains at learning_rate / warmup_steps.
    """
    s = settings
    rate = s.learning_rate * min(1.0, (step + 1) / max(s.warmup_steps, 1))
    decayed = DECAYS[s.decay](max(1, num_steps - s.warmup_steps))
    return rate * float(decayed(max(0, step - s.warmup_steps)))


def init_state(params, settings: UpdateSettings) -> TrainState:
    """Makes the state before the first update."""
    return TrainState(params, optimizer(settings).init(params))


def spread(w, key):
    """Moves each weight to a random float32 that rounds to the same number of bfloat16.

    The policy in bfloat16 stays as it is. A weight that is a number of bfloat16, as those of a
    published model are, would not move there before it has gone half a unit of the last place; and
    equal weights of a quantised one would jump together (experiments/rounded_weights).
    """
    nearest = jax.lax.reduce_precision(w, 8, 7)
    last_bits = jax.random.bits(key, w.shape, jnp.uint16).astype(jnp.int32) - 2**15
    last_bits = jnp.maximum(last_bits, 1 - 2**15)  # -2**15 is a tie, rounded to even
    moved = jax.lax.bitcast_convert_type(nearest, jnp.int32) + last_bits
    able = jnp.isfinite(nearest) & (nearest != 0)
    return jnp.where(able, jax.lax.bitcast_convert_type(moved, jnp.float32), w)


def policy_weights(params, start_weights, settings: UpdateSettings):
    """Makes all of the policy's weights: what is trained, in the compute dtype.

    With LoRA the start's, of which the adapted ones are float32 sums.
    """
    if settings.lora is None:
        return optax.tree.cast(params, settings.compute_dtype)
    with products_in("float32"):
        layers = merged(start_weights["layers"], params["layers"], scale=settings.lora.scale)
    return start_weights | {"layers": layers}


def sampled_weights(params, start_weights, settings: UpdateSettings):
    """Makes the weights that the sampler computes with: the policy's, or LoRA's factors beside."""
    if settings.lora is None or settings.compute_dtype == "float32":
        return policy_weights(params, start_weights, settings)
    layers = factored(start_weights["layers"], params["layers"], scale=settings.lora.scale)
    return start_weights | {"layers": optax.tree.cast(layers, settings.compute_dtype)}


def row_lengths(settings: UpdateSettings) -> tuple[int, ...]:
    """Returns the lengths that an update's rows may have: row_tokens, then an eighth more each.

    The eighth is rounded up to a whole `row_multiple`, as the TPU's attention has whole blocks.
    """
    row_tokens, multiple = settings.row_tokens, row_multiple(settings.row_tokens)
    more = -(-row_tokens // (8 * multiple)) * multiple
    return tuple(row_tokens + i * more for i in range(settings.row_lengths))


def row_multiple(tokens: int) -> int:
    """Returns the number of which a chosen length, or difference of lengths, is a multiple."""
    return ROW_MULTIPLE if tokens < LONG_ROW else LONG_ROW


def most_micro(settings: UpdateSettings) -> int:
    """Returns as many micro-batches as the responses of an update can ever need."""
    return -(-settings.update_responses // settings.micro_batch_rows)


def make_batch(groups: Sequence[Group], advantage_PG, settings: UpdateSettings) -> Batch:
    """Packs one mini-batch of groups into host arrays [M, B, T], each token's weight included.

    The weights (Eq. 12) are those of the whole mini-batch, before any split; overlong filtering
    gives responses that were cut off weight 0.
    """
    s = settings
    longest = max(group.length_G.max() for group in groups)
    mask_PGT = np.zeros((*advantage_PG.shape, longest), bool)
    for p, g in np.ndindex(advantage_PG.shape):
        response = groups[p].responses[g]
        if response.stopped or not s.overlong_filtering:
            mask_PGT[p, g, : len(response.tokens_T)] = response.sampled_T
    weight_PGT = token_weights(mask_PGT, mode=s.loss_aggregation, max_tokens=s.max_response_tokens)
    plan = plan_update(
        [len(group.prompt.token_ids) for group in groups],
        [group.length_G.tolist() for group in groups],
        row_lengths=row_lengths(s),
        micro_batch_rows=s.micro_batch_rows,
        share_prompts=s.kernels.shares_prompts,
        part_multiple=s.kernels.part_multiple,
    )
    packed = pack(
        groups,
        advantage_PG,
        weight_PGT.astype(np.float32),
        *plan,
        routes=s.routes,
        part_multiple=s.kernels.part_multiple,
    )
    return into_micro_batches(packed, most_micro=most_micro(s), rows=s.micro_batch_rows)


def batch_shardings(batch: Batch, mesh) -> Batch:
    """Shards a batch [M, B, T] by rows."""
    rows, whole = rules.micro_batches(mesh), rules.replicated(mesh)
    return jax.tree.map(lambda array: rows if array.ndim else whole, batch)


def minibatch(groups, advantage_PG, settings: UpdateSettings, mesh) -> Batch:
    """Makes one update's batch on the mesh."""
    batch = make_batch(groups, advantage_PG, settings)
    return hosts.place(batch, batch_shardings(batch, mesh))


def minibatches(
    rollouts: Rollouts, advantage_PG: np.ndarray, settings: UpdateSettings, mesh
) -> Iterator[Batch]:
    """Makes the batches of a step's updates, one after the other, of its kept groups evenly.

    Adam takes a full step whatever the mini-batch's size: one left-over group must not make one.
    """
    updates = -(-len(rollouts.kept) * advantage_PG.shape[1] // settings.update_responses)
    for chosen in np.array_split(rollouts.kept, updates) if updates else ():
        groups = [rollouts.sampled[p] for p in chosen]
        yield minibatch(groups, advantage_PG[chosen], settings, mesh)


def abstract_batch(settings: UpdateSettings, row_tokens: int, mesh) -> Batch:
    """Stands for a batch on the mesh, with rows of one length, where an update is lowered."""
    shape = (most_micro(settings), settings.micro_batch_rows, row_tokens)
    rows = {
        name: jax.ShapeDtypeStruct((*shape, *d.shape), d.base)
        for name, d in Batch.row_fields(settings.routes).items()
    }
    batch = Batch(**rows, num_micro=jax.ShapeDtypeStruct((), jnp.int32))
    return rules.abstract(batch, batch_shardings(batch, mesh))


def execution_of(settings: UpdateSettings, mesh, tokens: int) -> Execution:
    """Returns how the learner computes the model on rows of so many tokens."""
    dtype, kernels, lora = settings.compute_dtype, settings.kernels, settings.lora
    adapt = merged if dtype == "float32" else factored
    return Execution(
        project=kernels.learn_product,
        weights=Weights(
            functools.partial(rules.whole_width, mesh=mesh),
            functools.partial(rules.split_width, mesh=mesh),
            dtype,
        ),
        axis="model" if mesh.shape["model"] > 1 else None,
        gather=functools.partial(rules.whole_rows, mesh=mesh, tokens=tokens),
        reduce=functools.partial(rules.split_sum, mesh=mesh, tokens=tokens, dtype=dtype),
        remat=settings.remat,
        # Unrolled, XLA for CPUs would keep what is to be recomputed.
        unroll=kernels.unrolls_layers and settings.remat == "none",
        adapt=lora and functools.partial(adapt, scale=lora.scale),
    )


def forward(weights, adapters, micro: Batch, *, graph, mesh, settings: UpdateSettings):
    """Runs the model on a micro-batch: (x_BTD of the last layer, head_DV, differ_BT).

    The first two make the logits. adapters: LoRA's or None, taken layer by layer: the adapted
    weights never exist all at once. differ_BT: the share of layers that would have chosen other
    experts than the sampler did; None for a model without. Where algo.replay_routes says so, tokens
    go to the sampler's experts (R3, arXiv 2510.11370), weighed by this policy's router.
    """
    kernels, tokens = settings.kernels, micro.tokens_BT.shape[1]
    execution = execution_of(settings, mesh, tokens)

    def hidden(weights, adapters, tokens_BT, position_BT, segment_BT, branch_BT, *routes):
        def attend(*qkv, window):
            return kernels.attend_rows(*qkv, segment_BT, branch_BT, position_BT, window)

        model = nnx.merge(graph, weights)
        rows = (tokens_BT, position_BT, attend, execution)
        if not routes:
            return model.hidden(*rows, adapters=adapters)
        sampled_LBTA = jnp.moveaxis(routes[0], 2, 0)
        given_LBTA = sampled_LBTA if settings.replay_routes else None
        x_BTD, chosen_LBTA = model.hidden(*rows, adapters=adapters, routes_LBTA=given_LBTA)
        shared_LBTA = (chosen_LBTA[..., None] == sampled_LBTA[..., None, :]).any(axis=-1)
        return x_BTD, jnp.mean(~shared_LBTA.all(axis=-1), axis=0, dtype=jnp.float32)

    parameters = (weights, adapters or ())
    shardings = [
        rules.param_shardings(mesh, param_axes(tree), tree, rules.LEARNER) for tree in parameters
    ]
    rows_BT = (micro.tokens_BT, micro.position_BT, micro.segment_BT, micro.branch_BT)
    rows_BT += () if micro.route_BTLA is None else (micro.route_BTLA,)
    run = rules.by_parts(hidden, mesh, params=shardings, rows=len(rows_BT), tokens=tokens)
    x_BTD, differ_BT = run(*parameters, *rows_BT)
    return x_BTD, nnx.merge(graph, weights).head(), differ_BT


def weights_and_adapters(params, start_weights, settings: UpdateSettings):
    """Gives `forward` what is trained: (all weights, None), or with LoRA (the start's, factors)."""
    return (params, None) if settings.lora is None else (start_weights, params["layers"])


def micro_batch(batch: Batch, i) -> Batch:
    """Takes micro-batch i [B, T] out of a mini-batch [M, B, T]."""
    return jax.tree.map(lambda rows: rows[i], dataclasses.replace(batch, num_micro=None))


def micro_batch_loss(params, start_weights, micro: Batch, *, graph, mesh, settings: UpdateSettings):
    """Computes a micro-batch's share of the loss: (loss, {metric: sum over response tokens})."""
    run = functools.partial(forward, micro=micro, graph=graph, mesh=mesh, settings=settings)
    softmax = Softmax(settings.temperature, settings.vocab_size, mesh)
    x_BTD, head_DV, differ_BT = run(*weights_and_adapters(params, start_weights, settings))
    tokens = dataclasses.replace(micro, num_micro=None, route_BTLA=None)
    if settings.kl_coef > 0:
        start_x_BTD, start_head_DV, _ = run(start_weights, None)
        reference = chosen_logprobs(start_x_BTD, start_head_DV, micro.target_BT, softmax)
        tokens = dataclasses.replace(tokens, reference_logp_BT=reference[0])
    head = (head_loss if settings.ratio == "token" else head_loss_of_rows)(
        x_BTD,
        head_DV,
        micro.target_BT,
        tokens,
        functools.partial(token_loss, settings=settings),
        softmax,
        takes_entropy=settings.entropy_coef > 0,
    )
    routes = {} if differ_BT is None else {"routes/differ": differ_BT}
    return head.loss, metric_sums(tokens, head, routes)


def recompute_old_logp(params, start_weights, batch: Batch, *, graph, mesh, settings):
    """Computes the batch's old_logp [M, B, T]: of the policy before a step's first update.

    One forward pass a micro-batch. With algo.old_logprobs = "sampler" (GSPO's ratio) tokens of
    earlier policies keep the sampler's.
    """
    policy = weights_and_adapters(params, start_weights, settings)
    softmax = Softmax(settings.temperature, settings.vocab_size, mesh)

    def of_micro_batch(i, old_logp_MBT):
        micro = micro_batch(batch, i)
        x_and_head = forward(*policy, micro, graph=graph, mesh=mesh, settings=settings)[:2]
        logp_BT, _ = chosen_logprobs(*x_and_head, micro.target_BT, softmax)
        by_learner_BT = micro.is_on_policy_BT | (settings.old_logprobs == "learner")
        old_logp_BT = jnp.where(by_learner_BT, logp_BT, micro.behavior_logp_BT)
        return old_logp_MBT.at[i].set(old_logp_BT)

    with products_in(settings.compute_dtype):
        return jax.lax.fori_loop(0, batch.num_micro, of_micro_batch, batch.behavior_logp_BT)


def metric_sums(tokens: Batch, head: HeadLoss, routes):
    """Sums each metric over the response tokens, the loss's indicators among them."""
    gap_BT = jnp.abs(importance_ratio(head.logp_BT, tokens.behavior_logp_BT) - 1.0)
    per_token = {
        **head.indicators,
        **routes,
        "tokens": jnp.ones_like(gap_BT),
        "on_policy": tokens.is_on_policy_BT,
        "entropy": head.entropy_BT,
        "mean_prob": jnp.exp(head.logp_BT),
        "ratio_gap": jnp.where(tokens.is_on_policy_BT, gap_BT, 0.0),
    }
    return jax.tree.map(lambda v: jnp.sum(jnp.where(tokens.is_response_BT, v, 0.0)), per_token)


def update(state: TrainState, start_weights, batch: Batch, learning_rate, *, graph, mesh, settings):
    """Takes one optimizer step on one mini-batch: (state, metrics); pure, to be jitted.

    The micro-batch loop has a dynamic length, so one compiled program serves every packing. An
    update of which the loss or the gradient is not finite changes nothing: metrics["taken"] is
    False, and metrics["bad"] is the index in `checked_names` of the first that is not finite, else
    -1. metrics["empty"]: no token has any weight. start_weights: what LoRA adapts and what the KL
    term is measured against, in the compute dtype; else None.
    """

    def loss_of(params, i):
        micro = micro_batch(batch, i)
        return micro_batch_loss(
            params, start_weights, micro, graph=graph, mesh=mesh, settings=settings
        )

    def accumulate(i, total):
        loss_and_gradient = jax.value_and_grad(loss_of, has_aux=True)
        return jax.tree.map(jnp.add, total, loss_and_gradient(state.params, i))

    shapes = (jax.eval_shape(loss_of, state.params, 0), state.params)
    zero = jax.tree.map(jnp.zeros_like, shapes)
    with products_in(settings.compute_dtype):
        (loss, sums), grads = jax.lax.fori_loop(0, batch.num_micro, accumulate, zero)
    grad_norm = optax.tree.norm(grads)

    finite_N = jnp.stack([*map(all_finite, ((loss, sums), *jax.tree.leaves(grads), grad_norm))])
    finite = jnp.all(finite_N)
    deltas, opt_state = optimizer(settings).update(grads, state.opt_state, state.params)
    params = jax.tree.map(lambda p, s: p + learning_rate * s, state.params, deltas)
    stepped = TrainState(params, opt_state)
    state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), stepped, state)
    tokens = sums.pop("tokens")
    metrics = {key: value / jnp.maximum(tokens, 1) for key, value in sums.items()}
    metrics["ratio_gap"] /= jnp.maximum(metrics["on_policy"], jnp.finfo(jnp.float32).tiny)
    return state, metrics | {
        "loss": loss,
        "grad_norm": grad_norm,
        "taken": finite,
        "bad": jnp.where(finite, -1, jnp.argmin(finite_N)),
        "empty": ~jnp.any(batch.weight_BT != 0),
    }


def all_finite(tree) -> jax.Array:
    """Returns whether every value of every array is finite."""
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]).all()


def checked_names(state: TrainState) -> list[str]:
    """Names what an update has to find finite, in the order in which it looks."""
    return [
        "the loss or a metric of it",
        *(f"the gradient of {name}" for name in named(state.params)),
        "the gradient's norm",
    ]


def named(tree) -> dict[str, Any]:
    """Lists the leaves by their dotted names."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
