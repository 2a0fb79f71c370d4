"""Static-batch generation on the device: prefill once a prompt group, then a decode loop.

Prompts are padded on the left, so that every row writes the same cache slot at the same time and
the write is one in-place slice. The decode loop unrolls the layers, which measured faster than
scanning them with the cache; the block function is the learner's.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct

from dapo_jax.logprobs import sampling_logits
from dapo_jax.sampler.sampling import draw, request_keys, truncate, uniform_at
from models.attention import attention, cache_attention
from models.qwen2 import Qwen2, causal_mask


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a response is drawn and when it ends. `vocab_size` and the ids are the tokenizer's."""

    max_response_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int


@struct.dataclass
class Samples:
    """R = P * G responses, prompt-major. `length_R` counts tokens, the stop token included."""

    tokens_RT: Any
    behavior_logp_RT: Any
    length_R: Any
    stopped_R: Any  # False: cut off at max_response_tokens


def generate(graph, params, run_key, prompt_PT, prompt_length_P, cursor_P, *, group_size, sampling):
    """Sample `group_size` responses to each left-padded prompt; pure, to be jitted.

    graph, params: of models.qwen2.split; the parameters' dtype is the compute dtype.
    prompt_PT: int32, a prompt's `prompt_length_P` tokens at the row's right end.
    cursor_P: the prompts' places in the stream, which key their randomness.
    """
    s: Sampling = sampling
    model = nnx.merge(graph, params)
    blocks = list(model.blocks())
    head_DV = model.head()
    P, T = prompt_PT.shape
    x_PD, cache = prefill(model, blocks, prompt_PT, prompt_length_P, s.max_response_tokens)
    x_RD = jnp.repeat(x_PD, group_size, axis=0)
    cache = jax.tree.map(lambda c: jnp.repeat(c, group_size, axis=0), cache)
    prompt_length_R = jnp.repeat(prompt_length_P, group_size)
    key_R = request_keys(run_key, cursor_P, group_size=group_size)
    stop_ids = jnp.asarray(s.stop_ids, jnp.int32)
    R = P * group_size
    slot_S = jnp.arange(T + s.max_response_tokens)
    is_prompt_or_later_RS = slot_S >= (T - prompt_length_R)[:, None]

    def unfinished(carry):
        t, done_R = carry[0], carry[1]
        return (t < s.max_response_tokens) & ~jnp.all(done_R)

    def step(carry):
        t, done_R, x_RD, cache, tokens_TR, logp_TR, length_R = carry
        logits_RV = sampling_logits(
            x_RD, head_DV, temperature=s.temperature, vocab_size=s.vocab_size
        )
        logits_RV = truncate(logits_RV, top_p=s.top_p, top_k=s.top_k)
        token_R, logp_R = draw(logits_RV, uniform_at(key_R, t))
        token_R = jnp.where(done_R, s.pad_id, token_R)
        tokens_TR = tokens_TR.at[t].set(token_R)
        logp_TR = logp_TR.at[t].set(jnp.where(done_R, 0.0, logp_R))
        length_R = length_R + ~done_R
        done_R = done_R | jnp.isin(token_R, stop_ids)
        x_RD, cache = decode_token(
            model,
            blocks,
            token_R,
            position_R=prompt_length_R + t,
            cache=cache,
            slot=T + t,
            mask_RS=is_prompt_or_later_RS & (slot_S <= T + t),
        )
        return t + 1, done_R, x_RD, cache, tokens_TR, logp_TR, length_R

    buffer = (s.max_response_tokens, R)
    carry = (
        jnp.int32(0),
        jnp.zeros(R, bool),
        x_RD,
        cache,
        jnp.full(buffer, s.pad_id, jnp.int32),
        jnp.zeros(buffer, jnp.float32),
        jnp.zeros(R, jnp.int32),
    )
    _, done_R, _, _, tokens_TR, logp_TR, length_R = jax.lax.while_loop(unfinished, step, carry)
    return Samples(tokens_TR.T, logp_TR.T, length_R, done_R)


def prefill(model: Qwen2, blocks, prompt_PT, prompt_length_P, num_new_tokens: int):
    """(x_PD of the last prompt token, cache): one (k_PKHS, v_PKSH) a layer with room to decode."""
    T = prompt_PT.shape[1]
    pad_P1 = T - prompt_length_P[:, None]
    index_T = jnp.arange(T)
    segment_PT = (index_T >= pad_P1).astype(jnp.int32)
    position_PT = jnp.maximum(index_T - pad_P1, 0)
    mask_PTS = causal_mask(segment_PT)

    def attend(q, k, v):
        return attention(q, k, v, mask_PTS), (k, v)

    x_PTD, cache = model.embed(prompt_PT), []
    for block in blocks:
        x_PTD, (k_PTKH, v_PTKH) = block(x_PTD, position_PT, attend)
        room = ((0, 0), (0, 0), (0, 0), (0, num_new_tokens))
        k_PKHS = jnp.pad(k_PTKH.transpose(0, 2, 3, 1), room)
        v_PKSH = jnp.pad(v_PTKH.transpose(0, 2, 1, 3), (*room[:2], room[3], room[2]))
        cache.append((k_PKHS, v_PKSH))
    return model.final_norm(x_PTD[:, -1]), cache


def decode_token(model: Qwen2, blocks, token_R, *, position_R, cache, slot, mask_RS):
    """(x_RD, cache) after one more token a row; only its cache slot is written, in place."""
    x_RTD, new_cache = model.embed(token_R[:, None]), []
    for block, (k_RKHS, v_RKSH) in zip(blocks, cache, strict=True):

        def attend(q_RTNH, k_RTKH, v_RTKH, k_RKHS=k_RKHS, v_RKSH=v_RKSH):
            k_RKH1, v_RK1H = k_RTKH.transpose(0, 2, 3, 1), v_RTKH.transpose(0, 2, 1, 3)
            k_RKHS = jax.lax.dynamic_update_slice_in_dim(k_RKHS, k_RKH1, slot, axis=3)
            v_RKSH = jax.lax.dynamic_update_slice_in_dim(v_RKSH, v_RK1H, slot, axis=2)
            out_RNH = cache_attention(q_RTNH[:, 0], k_RKHS, v_RKSH, mask_RS)
            return out_RNH[:, None], (k_RKHS, v_RKSH)

        x_RTD, kept = block(x_RTD, position_R[:, None], attend)
        new_cache.append(kept)
    return model.final_norm(x_RTD[:, 0]), new_cache
