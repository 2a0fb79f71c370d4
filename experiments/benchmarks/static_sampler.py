"""The sampler that the engine replaced, as a baseline: a static batch with a contiguous cache.

Prompts are padded on the left, so that every row writes the same cache column at the same time; a
batch runs until its last row has ended, and every step reads the whole cache. Layers are unrolled
and keys are stored transposed, as in the engine.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.logprobs import sampling_logits
from dapo_jax.process import hosts
from dapo_jax.sampler.sampling import request_keys, sample_token, uniform_at
from models.kernels.xla import MASKED, attention
from models.transformer import causal_mask, hidden_layer_by_layer, logits
from sharding import rules


def cache_attention(q_BNH, k_BKHS, v_BKSH, mask_BS):
    """Attention of one new token a row over a contiguous cache."""
    B, N, H = q_BNH.shape
    K = k_BKHS.shape[1]
    q_BKGH = q_BNH.reshape(B, K, N // K, H)
    score_BKGS = jnp.einsum("BKGH,BKHS->BKGS", q_BKGH, k_BKHS, preferred_element_type=jnp.float32)
    score_BKGS = jnp.where(mask_BS[:, None, None], score_BKGS * H**-0.5, MASKED)
    prob_BKGS = jax.nn.softmax(score_BKGS, axis=-1).astype(v_BKSH.dtype)
    return jnp.einsum("BKGS,BKSH->BKGH", prob_BKGS, v_BKSH).reshape(B, N, H)


@functools.partial(jax.jit, static_argnames=("config", "max_tokens"))
def generate(params, run_key, prompt_RT, cursor_R, limit_R, *, config, max_tokens: int):
    """(tokens_TR, logp_TR) of one batch of prompts of equal length; row r has limit_R[r] tokens."""
    R, T = prompt_RT.shape
    mask_RTS = causal_mask(jnp.ones((R, T), jnp.int32))

    def attend_prompt(q, k, v):
        return attention(q, k, v, mask_RTS), (k, v)

    layers = config.num_layers
    x_RTD, kept, _ = hidden_layer_by_layer(
        params, config, prompt_RT, jnp.arange(T)[None], [attend_prompt] * layers, axis=None
    )
    room = ((0, 0), (0, 0), (0, 0), (0, max_tokens))
    cache = [
        (
            jnp.pad(k_RTKH.transpose(0, 2, 3, 1), room),
            jnp.pad(v_RTKH.transpose(0, 2, 1, 3), (*room[:2], room[3], room[2])),
        )
        for k_RTKH, v_RTKH in kept
    ]
    x_RD = x_RTD[:, -1]
    key_R = request_keys(run_key, cursor_R, jnp.zeros_like(cursor_R))
    slot_S = jnp.arange(T + max_tokens)

    def step(carry):
        t, x_RD, cache, tokens_TR, logp_TR = carry
        logits_RV = sampling_logits(
            logits(x_RD, params["head_VD"].T),
            temperature=1.0,
            vocab_size=config.vocab_size,
            first_id=0,
        )
        token_R, logp_R = sample_token(logits_RV, uniform_at(key_R, jnp.full(R, t)), axis=None)
        mask_RS = jnp.broadcast_to(slot_S <= T + t, (R, len(slot_S)))

        def attend(q, k, v, *, layer):
            k_RKHS, v_RKSH = cache[layer]
            k_RKH1, v_RK1H = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)
            k_RKHS = jax.lax.dynamic_update_slice_in_dim(k_RKHS, k_RKH1, T + t, axis=3)
            v_RKSH = jax.lax.dynamic_update_slice_in_dim(v_RKSH, v_RK1H, T + t, axis=2)
            return cache_attention(q[:, 0], k_RKHS, v_RKSH, mask_RS)[:, None], (k_RKHS, v_RKSH)

        attends = [functools.partial(attend, layer=layer) for layer in range(layers)]
        position_11 = jnp.full((1, 1), T + t)
        x_RTD, new_cache, _ = hidden_layer_by_layer(
            params, config, token_R[:, None], position_11, attends, axis=None
        )
        x_RD = x_RTD[:, 0]
        return t + 1, x_RD, new_cache, tokens_TR.at[t].set(token_R), logp_TR.at[t].set(logp_R)

    buffer = (max_tokens, R)
    carry = (jnp.int32(0), x_RD, cache, jnp.zeros(buffer, jnp.int32), jnp.zeros(buffer))
    end = jnp.minimum(jnp.max(limit_R), max_tokens)
    *_, tokens_TR, logp_TR = jax.lax.while_loop(lambda carry: carry[0] < end, step, carry)
    return tokens_TR, logp_TR


def sample(params, run_key, prompts, limits, *, config, rows: int, max_tokens: int, mesh):
    """All requests in batches of `rows`, in order; returns how many tokens they have.

    mesh: a batch's rows are divided among its devices.
    """
    place = functools.partial(hosts.place, shardings=rules.rows(mesh))
    for first in range(0, len(prompts), rows):
        batch = np.arange(first, first + rows) % len(prompts)
        limit_R = np.where(np.arange(first, first + rows) < len(prompts), limits[batch], 0)
        jax.block_until_ready(
            generate(
                params,
                run_key,
                place(prompts[batch]),
                place(batch),
                place(limit_R),
                config=config,
                max_tokens=max_tokens,
            )
        )
    return int(np.sum(limits))
