"""Log-probabilities under the sampling distribution: the same head for sampler and learner."""

import jax
import jax.numpy as jnp

from models.attention import MASKED
from models.qwen2 import logits

CHUNK_TOKENS = 512  # tokens whose logits exist at a time


def sampling_logits(x_BD, head_DV, *, temperature, vocab_size):
    """Logits of pi(. | prefix) at a sampling temperature, float32.

    Embedding rows from `vocab_size` (the tokenizer's) up are padding: their probability is 0.
    """
    logits_BV = logits(x_BD, head_DV) / temperature
    return jnp.where(jnp.arange(logits_BV.shape[-1]) < vocab_size, logits_BV, MASKED)


def chosen_logprobs(x_BTD, head_DV, target_BT, *, temperature, vocab_size):
    """log pi(target) and the entropy of pi (a metric, no gradient), both float32 [B, T].

    Only `CHUNK_TOKENS` tokens' logits exist at a time, in the backward pass too: they are
    computed again there (Chen et al. 2016, arXiv 1604.06174, applied to the head).
    """
    B, T, D = x_BTD.shape
    pad = -(B * T) % CHUNK_TOKENS
    x_ND = jnp.pad(x_BTD.reshape(B * T, D), ((0, pad), (0, 0)))
    target_N = jnp.pad(target_BT.reshape(B * T), (0, pad))

    @jax.checkpoint
    def chunk(x_CD, target_C):
        logits_CV = sampling_logits(x_CD, head_DV, temperature=temperature, vocab_size=vocab_size)
        logp_CV = jax.nn.log_softmax(logits_CV, axis=-1)
        logp_C = jnp.take_along_axis(logp_CV, target_C[:, None], axis=-1)[:, 0]
        entropy_C = -jnp.sum(jnp.exp(logp_CV) * logp_CV, axis=-1)
        return logp_C, jax.lax.stop_gradient(entropy_C)

    chunked = (x_ND.reshape(-1, CHUNK_TOKENS, D), target_N.reshape(-1, CHUNK_TOKENS))
    logp_N, entropy_N = jax.lax.map(lambda args: chunk(*args), chunked)
    logp_N, entropy_N = logp_N.reshape(-1)[: B * T], entropy_N.reshape(-1)[: B * T]
    return logp_N.reshape(B, T), entropy_N.reshape(B, T)
