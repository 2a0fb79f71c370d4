"""Log-probabilities under the sampling distribution: the same head for sampler and learner."""

import jax
import jax.numpy as jnp

from models.attention import MASKED
from models.qwen2 import logits

CHUNK_TOKENS = 256  # tokens of each row whose logits exist at a time


def sampling_logits(logits_BV, *, temperature, vocab_size, first_id):
    """Logits of pi(. | prefix) at a sampling temperature, float32, from the model's.

    Embedding rows from `vocab_size` (the tokenizer's) up are padding: their probability is 0.
    `first_id`: the vocabulary id of the first column, where these are a part of all.
    """
    logits_BV = logits_BV / temperature
    id_V = first_id + jnp.arange(logits_BV.shape[-1])
    return jnp.where(id_V < vocab_size, logits_BV, MASKED)


def chosen_logprobs(x_BTD, head_DV, target_BT, *, temperature, vocab_size):
    """log pi(target) and the entropy of pi (a metric, no gradient), both float32 [B, T].

    The logits of at most `CHUNK_TOKENS` tokens of each row exist at a time, in the backward pass
    too: they are computed again there (Chen et al. 2016, arXiv 1604.06174, applied to the head).
    Chunks are cut along T only: rows that lie on different devices stay there.
    """
    B, T = target_BT.shape
    num_chunks = -(-T // CHUNK_TOKENS)
    chunk_tokens = -(-T // num_chunks)

    def chunked(array):
        pad = ((0, 0), (0, num_chunks * chunk_tokens - T)) + ((0, 0),) * (array.ndim - 2)
        array = jnp.pad(array, pad).reshape(B, num_chunks, chunk_tokens, *array.shape[2:])
        return array.swapaxes(0, 1)

    @jax.checkpoint
    def chunk(x_BCD, target_BC):
        x_ND, target_N = x_BCD.reshape(-1, x_BCD.shape[-1]), target_BC.reshape(-1)
        logits_NV = sampling_logits(
            logits(x_ND, head_DV), temperature=temperature, vocab_size=vocab_size, first_id=0
        )
        logp_NV = jax.nn.log_softmax(logits_NV, axis=-1)
        logp_N = jnp.take_along_axis(logp_NV, target_N[:, None], axis=-1)[:, 0]
        entropy_N = -jnp.sum(jnp.exp(logp_NV) * logp_NV, axis=-1)
        entropy_N = jax.lax.stop_gradient(entropy_N)
        return logp_N.reshape(target_BC.shape), entropy_N.reshape(target_BC.shape)

    chunks = jax.lax.map(lambda args: chunk(*args), (chunked(x_BTD), chunked(target_BT)))
    logp_BT, entropy_BT = (a.swapaxes(0, 1).reshape(B, -1)[:, :T] for a in chunks)
    return logp_BT, entropy_BT
