"""Log-probabilities under the sampling distribution, and losses of them, chunk by chunk.

Axis letters beside the model's: C tokens of a chunk. The logits of `CHUNK_TOKENS` tokens exist at
a time on a device, of its rows and its part of the vocabulary; no [T, V] array ever does.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models.kernels.xla import MASKED
from models.precision import unfused
from models.transformer import logits
from sharding import rules

CHUNK_TOKENS = 512
SUM_BLOCK = 128  # tokens of the vocabulary


def sampling_logits(logits_BV, *, temperature, vocab_size, first_id):
    """Makes of the model's logits those of pi(. | prefix) at a sampling temperature, float32.

    Embedding rows from `vocab_size` (the tokenizer's) up are padding: their probability is 0.
    `first_id`: the vocabulary id of the first column, where these are a part of all.
    """
    logits_BV = unfused(logits_BV / temperature)
    id_V = first_id + jnp.arange(logits_BV.shape[-1])
    return jnp.where(id_V < vocab_size, logits_BV, MASKED)


def block_sums(weight_RV):
    """Adds up the blocks of SUM_BLOCK tokens of each row, [R, N].

    The sampler and the learner add up a distribution by this function and `total`, in one order.
    """
    R, V = weight_RV.shape
    weight_RV = jnp.pad(weight_RV, ((0, 0), (0, -V % SUM_BLOCK)))
    return jnp.sum(weight_RV.reshape(R, -1, SUM_BLOCK), axis=-1)


def total(weight_RN):
    """Adds up each row, in one order: of a sum of sums XLA would make another one."""
    return jnp.cumsum(weight_RN, axis=-1)[:, -1]


class Softmax(NamedTuple):
    """Says how logits become pi; vocab_size: the tokenizer's."""

    temperature: float
    vocab_size: int
    mesh: Mesh


def chosen_logprobs(x_BTD, head_DV, target_BT, softmax: Softmax):
    """Computes log pi(target) and the entropy of pi, float32 [B, T]; not to be differentiated."""

    def local(x_BTD, head_DV, target_BT):
        def chunk(x_target):
            pi = _Chosen(*x_target, head_DV, softmax)
            return pi.logp_C, pi.entropy_C

        return _whole(jax.lax.map(chunk, _chunks((x_BTD, target_BT))), target_BT.shape)

    split = rules.by_vocabulary(local, softmax.mesh, rows=1, outputs=(rules.BATCH, rules.BATCH))
    return split(x_BTD, head_DV.astype(x_BTD.dtype), target_BT)


class HeadLoss(NamedTuple):
    """Holds the sum of the tokens' losses, and each token's log pi, entropy and indicators."""

    loss: jax.Array
    logp_BT: jax.Array
    entropy_BT: jax.Array
    indicators: Any


def head_loss(
    x_BTD, head_DV, target_BT, tokens, token_loss, softmax: Softmax, *, takes_entropy=False
) -> HeadLoss:
    """Sums the tokens' losses, of which the sum alone has a gradient.

    token_loss(logp_C, entropy_C, tokens_C) -> (loss_C, indicators: a tree of [C]), of each token by
    itself; tokens: a tree of [B, T] arrays of which it gets the chunk's. A token whose entries are
    zero must have loss zero. takes_entropy: whether the loss depends on the entropy of pi.
    Gradients are computed with the value, chunk by chunk, since the loss of a chunk is all that
    they take: three products with the head and not the four of one that is computed again (Chen et
    al. 2016, arXiv 1604.06174). They are summed in float32, over chunks and devices too.
    """
    mesh = softmax.mesh

    def local(x_BTD, head_DV, target_BT, *leaves):
        tokens_BT = jax.tree.unflatten(structure, leaves)

        def chunk(carry, xs):
            loss, d_head_DV = carry
            x_CD, target_C, tokens_C = xs
            pi = _Chosen(x_CD, target_C, head_DV, softmax)
            loss_C, pull, indicators = jax.vjp(
                lambda logp_C, entropy_C: token_loss(logp_C, entropy_C, tokens_C),
                pi.logp_C,
                pi.entropy_C,
                has_aux=True,
            )
            d_logp_C, d_entropy_C = pull(jnp.ones_like(loss_C))
            d_logits_CV = pi.d_logits_CV(d_logp_C)
            if takes_entropy:
                d_logits_CV += pi.d_logits_of_entropy_CV(d_entropy_C)
            d_logits_CV = d_logits_CV.astype(head_DV.dtype)
            d_x_CD = _product("CV,DV->CD", d_logits_CV, head_DV)
            d_x_CD = _over("model", jax.lax.psum, d_x_CD, mesh).astype(x_CD.dtype)
            d_head_DV = d_head_DV + _product("CD,CV->DV", x_CD, d_logits_CV)
            outputs = (d_x_CD, pi.logp_C, pi.entropy_C, indicators)
            return (loss + jnp.sum(loss_C), d_head_DV), outputs

        start = (jnp.float32(0), jnp.zeros(head_DV.shape, jnp.float32))
        xs = _chunks((x_BTD, target_BT, tokens_BT))
        (loss, d_head_DV), outputs = jax.lax.scan(chunk, start, xs)
        d_head_DV = rules.split_width(d_head_DV, "DV", mesh)
        d_head_DV = _over("slice", jax.lax.psum, d_head_DV, mesh)
        # The TPU's compiler fails where it tries to move this sum out of a loop over micro-batches.
        d_head_DV = jax.lax.optimization_barrier(d_head_DV)
        for axis in rules.ROW_AXES:
            loss = _over(axis, jax.lax.psum, loss, mesh)
        return loss, d_head_DV, *_whole(outputs, target_BT.shape)

    leaves, structure = jax.tree.flatten(tokens)
    outputs = (rules.EVERYWHERE, rules.HEAD, *[rules.BATCH] * 4)
    split = rules.by_vocabulary(local, mesh, rows=1 + len(leaves), outputs=outputs)

    @jax.custom_vjp
    def loss_and_chosen(x_BTD, head_DV):
        return forward(x_BTD, head_DV)[0]

    def forward(x_BTD, head_DV):
        rounded_DV = head_DV.astype(x_BTD.dtype)
        loss, d_head_DV, d_x_BTD, *chosen = split(x_BTD, rounded_DV, target_BT, *leaves)
        return (loss, *chosen), (d_x_BTD, d_head_DV.astype(head_DV.dtype))

    def backward(gradients, cotangents):
        return jax.tree.map(lambda d: (cotangents[0] * d).astype(d.dtype), gradients)

    loss_and_chosen.defvjp(forward, backward)
    loss, *chosen = loss_and_chosen(x_BTD, head_DV)
    return HeadLoss(loss, *jax.lax.stop_gradient(chosen))


def head_loss_of_rows(
    x_BTD, head_DV, target_BT, tokens, rows_loss, softmax: Softmax, *, takes_entropy=False
) -> HeadLoss:
    """Does what `head_loss` does, for a loss of a token that depends on others in its row.

    rows_loss: a token_loss of [B, T] arrays. A first pass gives all log-probabilities and
    entropies, at which the loss and its slopes are computed; the second has the gradient of slope *
    logp + slope * entropy, token by token, which is that of the loss.
    """

    def total(logp_BT, entropy_BT):
        loss_BT, indicators = rows_loss(logp_BT, entropy_BT, tokens)
        return jnp.sum(loss_BT), indicators

    def linear_loss(logp_C, entropy_C, slopes_C):
        d_logp_C, d_entropy_C = slopes_C
        return d_logp_C * logp_C + (d_entropy_C * entropy_C if takes_entropy else 0.0), {}

    values = chosen_logprobs(*jax.lax.stop_gradient((x_BTD, head_DV)), target_BT, softmax)
    slope_of = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    (loss, indicators), slopes = slope_of(*values)
    linear = head_loss(
        x_BTD, head_DV, target_BT, slopes, linear_loss, softmax, takes_entropy=takes_entropy
    )
    loss += linear.loss - jax.lax.stop_gradient(linear.loss)
    return linear._replace(loss=loss, indicators=indicators)


class _Chosen:
    """Holds what pi gives a chunk's tokens; head_DV is this device's part of the vocabulary."""

    def __init__(self, x_CD, target_C, head_DV, softmax: Softmax):
        temperature, vocab_size, mesh = softmax
        over = functools.partial(_over, "model", mesh=mesh)
        first_id = jax.lax.axis_index("model") * head_DV.shape[1]
        logits_CV = sampling_logits(
            logits(x_CD, head_DV), temperature=temperature, vocab_size=vocab_size, first_id=first_id
        )
        max_C = over(jax.lax.pmax, jnp.max(logits_CV, axis=1))
        logits_CV = logits_CV - max_C[:, None]
        self._is_target_CV = first_id + jnp.arange(head_DV.shape[1]) == target_C[:, None]
        self._exp_CV = jnp.exp(logits_CV)
        self._logits_CV, self._temperature = logits_CV, temperature

        def whole(terms_CV):
            return over(jax.lax.psum, jnp.sum(terms_CV, axis=1))

        sum_CN = block_sums(self._exp_CV)
        if mesh.shape["model"] > 1:
            sum_CN = jax.lax.all_gather(sum_CN, "model", axis=1, tiled=True)
        self._sum_C = total(sum_CN)
        target_logit_C = whole(jnp.where(self._is_target_CV, logits_CV, 0.0))
        self.logp_C = target_logit_C - jnp.log(self._sum_C)
        self.entropy_C = jnp.log(self._sum_C) - whole(self._exp_CV * logits_CV) / self._sum_C

    def d_logits_CV(self, d_logp_C):
        """Computes the gradient of the model's logits: log pi(target) has [v = target] - pi(v)."""
        d_CV = self._is_target_CV - self._exp_CV / self._sum_C[:, None]
        return d_CV * d_logp_C[:, None] / self._temperature

    def d_logits_of_entropy_CV(self, d_entropy_C):
        """Computes the gradient of the model's logits: the entropy has -pi(v) (log pi(v) + H)."""
        prob_CV = self._exp_CV / self._sum_C[:, None]
        surprise_CV = self._logits_CV + (self.entropy_C - jnp.log(self._sum_C))[:, None]
        return -prob_CV * surprise_CV * d_entropy_C[:, None] / self._temperature


def _over(axis, reduce, array, mesh):
    """Reduces an array over a mesh axis; over one of size 1 XLA would copy it all the same."""
    return array if mesh.shape[axis] == 1 else reduce(array, axis)


def _product(spec, *operands):
    return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32)


def _chunks(arrays):
    """Cuts [B, T, ...] arrays into [chunks, C, ...], with zeros at the end."""

    def one(array):
        array = array.reshape(-1, *array.shape[2:])
        chunks = -(-len(array) // CHUNK_TOKENS)
        size = -(-len(array) // chunks)
        pad = ((0, chunks * size - len(array)),) + ((0, 0),) * (array.ndim - 1)
        return jnp.pad(array, pad).reshape(chunks, size, *array.shape[1:])

    return jax.tree.map(one, arrays)


def _whole(arrays, shape):
    """Puts [chunks, C, ...] arrays together as [B, T, ...]."""
    B, T = shape
    return jax.tree.map(
        lambda a: a.reshape(-1, *a.shape[2:])[: B * T].reshape(B, T, *a.shape[2:]), arrays
    )
