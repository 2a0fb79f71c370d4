"""Decode attention over pools of key/value pages: a Pallas kernel for TPU.

Axis letters: B slots, N query heads, K key/value heads, Q = N / K, H head size, R recent tokens of
a slot that are in no page yet, C tokens of a page, X pages of a slot, P and U pages of the pools of
responses and prompts; S slots of a grid step, M pages of a block, W = M * C.

A slot's live pages, its prompt's and then its response's, are read in blocks of M, and the reads
run ahead of the arithmetic across slots: while one block is computed the next ones are under way,
whichever slot they belong to. Nothing else is read, so time follows the tokens that are there and
not the longest slot. The softmax is the running one (Milakov & Gimelshein 2018, arXiv 1805.02867;
Dao et al. 2022, arXiv 2205.14135, Algorithm 1). It begins with the tokens that are in no page yet,
for all slots of a grid step together: 11 bundles a slot by the compiler's schedule, where XLA took
15 microseconds a layer.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.kernels.pages_tpu import as_stored, token_axes
from models.kernels.xla import MASKED, accumulate, like, window_pages

BLOCK_BYTES = 256 * 1024  # of the keys of a block, and as much of its values
BUFFERS = 3  # blocks in VMEM: one being computed, two being read
SLOTS = 32  # of a grid step; reads start afresh in each, so it has to be long


def paged_attention(
    q_BNH,
    recent,
    recent_tokens_B,
    prompt_pool,
    pool,
    page_BX,
    prompt_tokens_B,
    tokens_B,
    *,
    window: int | None = None,
    interpret: bool,
):
    """Attends with a token a slot to the slot's closed pages and to its most recent tokens.

    q_BNH and the pools (k_UKHC, v_UKCH) of prompts, (k_PKHC, v_PKCH) of responses: one dtype,
    bfloat16 or float32; query head n reads key/value head n // (N / K).
    recent: (k_BKHR, v_BKRH) in the same dtype, finite, of which the first `recent_tokens_B` live.
    page_BX: int32, of `xla.page_order`: the pages that `prompt_tokens_B` tokens fill from the
    front in the prompts' pool, then those that `tokens_B` fill in the responses'; the rest is
    never read. window: a query sees itself and the window - 1 tokens before it, and no page before
    them is read; None: it sees all.
    Returns out_BNH in q's dtype. A slot's numbers do not depend on other slots, on X or on which
    pages it has. The page ids of live pages have to be valid: on TPU they are not checked.
    Inside shard_map the result varies over the mesh axes that q_BNH varies over.
    Where neither H nor C is a multiple of 128 XLA would copy the pools into another layout at every
    call: `Kernels.page_tokens` makes C one.
    """
    B, N, H = q_BNH.shape
    _, K, C, _ = pool[1].shape
    Q, S = N // K, min(B, SLOTS)
    hidden = []
    if window is not None:
        page_BX, prompt_tokens_B, tokens_B, *hidden = window_pages(
            page_BX, prompt_tokens_B, tokens_B, recent_tokens_B, window=window, page_tokens=C
        )
    k_token_axis, v_token_axis = axes = token_axes(C, H)
    pools = (*as_stored(*prompt_pool, axes), *as_stored(*pool, axes))
    live_B = jnp.where(prompt_tokens_B + tokens_B > 0, jnp.arange(B), B)
    next_live_B = lax.cummin(live_B, reverse=True)  # the slot itself, if it has pages

    def of_slots(*shape, **kwargs):
        return pl.BlockSpec((S, *shape), lambda step, *_: (step,) + (0,) * len(shape), **kwargs)

    k_BKHR, v_BKRH = recent
    recent = (k_BKHR.swapaxes(2, 3), v_BKRH)
    pages = pages_per_block(pool[1])
    q_BKQH = q_BNH.reshape(B, K, Q, H)
    kernel = functools.partial(
        _kernel, k_token_axis=k_token_axis, v_token_axis=v_token_axis, window=window
    )
    out_BKQH = pl.pallas_call(
        kernel if window is not None else functools.partial(kernel, None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3 + len(hidden),
            grid=(pl.cdiv(B, S),),
            in_specs=[
                of_slots(page_BX.shape[1], memory_space=pltpu.SMEM),
                of_slots(1, 1),
                of_slots(K, Q, H),
                *[of_slots(*a.shape[1:]) for a in recent],
                # Not ANY: the compiler would take a small pool into VMEM and copy by vectors.
                *[pl.BlockSpec(memory_space=pltpu.HBM)] * len(pools),
            ],
            out_specs=of_slots(K, Q, H),
            scratch_shapes=[
                pltpu.VMEM((BUFFERS, pages, *pools[0].shape[1:]), q_BNH.dtype),
                pltpu.VMEM((BUFFERS, pages, *pools[1].shape[1:]), q_BNH.dtype),
                pltpu.SemaphoreType.DMA((2, BUFFERS)),
                pltpu.VMEM((S, K, Q, H), jnp.float32),
                pltpu.VMEM((S, K, Q, 2), jnp.float32),
            ],
        ),
        out_shape=like(q_BKQH),
        # Checks would make starting the reads slower than the arithmetic.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="paged_attention",
    )(
        *hidden,
        prompt_tokens_B,
        tokens_B,
        next_live_B,
        page_BX,
        recent_tokens_B[:, None, None],
        q_BKQH,
        *recent,
        *pools,
    )
    return out_BKQH.reshape(B, N, H)


def pages_per_block(v_PKCH):
    """Counts the pages read and computed together; depends on the size of a page alone."""
    _, K, C, H = v_PKCH.shape
    return max(1, BLOCK_BYTES // (K * C * H * v_PKCH.dtype.itemsize))


def _kernel(
    hidden_ref,
    prompt_tokens_ref,
    tokens_ref,
    next_live_ref,
    page_ref,
    recent_tokens_ref,
    q_ref,
    k_recent_ref,
    v_recent_ref,
    k_prompts_ref,
    v_prompts_ref,
    k_responses_ref,
    v_responses_ref,
    out_ref,
    k_ref,
    v_ref,
    semaphore_ref,
    recent_out_ref,
    recent_state_ref,
    *,
    k_token_axis: int,
    v_token_axis: int,
    window: int | None,
):
    """Computes the slots [first, end). An item (slot, block, buffer) is a block to read."""
    S, K, _, H = q_ref.shape
    M, C = v_ref.shape[1], v_ref.shape[3 + v_token_axis]
    first = pl.program_id(0) * S
    end = jnp.minimum(first + S, tokens_ref.shape[0])
    pools = ((k_prompts_ref, v_prompts_ref), (k_responses_ref, v_responses_ref))
    times_values = functools.partial(_dot, axis=v_token_axis)

    def next_live(slot):
        return jnp.where(slot < end, next_live_ref[jnp.minimum(slot, end - 1)], end)

    def prompt_pages(slot):
        return pl.cdiv(prompt_tokens_ref[jnp.minimum(slot, end - 1)], C)

    def pages_left(slot, block):
        of_response = pl.cdiv(tokens_ref[jnp.minimum(slot, end - 1)], C)
        return prompt_pages(slot) + of_response - block * M

    def after(item):
        slot, block, buffer = item
        is_last = pages_left(slot, block) <= M
        slot = jnp.where(is_last, next_live(slot + 1), slot)
        return slot, jnp.where(is_last, 0, block + 1), lax.rem(buffer + 1, BUFFERS)

    def live_pages(item):
        """Counts an item's pages; slots from `end` on have none."""
        slot, block, _ = item
        return jnp.where(slot < end, jnp.minimum(pages_left(slot, block), M), 0)

    def copies(item, m, pool):
        slot, block, buffer = item
        page = page_ref[slot - first, block * M + m]
        for i, (hbm_ref, ref) in enumerate(zip(pool, (k_ref, v_ref), strict=True)):
            semaphore = semaphore_ref.at[i, buffer]
            yield pltpu.make_async_copy(hbm_ref.at[page], ref.at[buffer, m], semaphore)

    def start(item):
        prompts, responses = pools
        slot, block, _ = item
        count = live_pages(item)
        of_prompt = jnp.clip(prompt_pages(slot) - block * M, 0, count)

        def start_page(m, pool):
            for copy in copies(item, m, pool):
                copy.start()

        @pl.when(count - of_prompt == M)
        def _():
            for m in range(M):  # unrolled: half the cycles of the loop
                start_page(m, responses)

        @pl.when(count - of_prompt < M)
        def _():
            pl.loop(0, of_prompt)(lambda m: start_page(m, prompts))
            pl.loop(of_prompt, count)(lambda m: start_page(m, responses))

        return after(item)

    def wait(item):
        """Waits for an item's pages; all copies are of one size, whatever they come from."""

        def wait_for_page(m):
            for copy in copies(item, m, pools[1]):
                copy.wait()

        count = live_pages(item)

        @pl.when(count == M)
        def _():
            for m in range(M):
                wait_for_page(m)

        @pl.when(count < M)
        def _():
            pl.loop(0, count)(wait_for_page)

    def attend_slot(slot, carry):
        of_prompt = prompt_pages(slot)

        def live_tokens(page):
            """Counts the tokens of the slot's page that live: the first ones."""
            prompt_left = prompt_tokens_ref[slot] - page * C
            left = jnp.where(
                page < of_prompt, prompt_left, tokens_ref[slot] - (page - of_prompt) * C
            )
            return jnp.clip(left, 0, C)

        def attend_block(block, carry):
            item, buffer, state = carry
            item = start(item)
            wait((slot, block, buffer))
            live_M = [live_tokens(block * M + m) for m in range(M)]

            # What does not live may be anything, NaN included, and 0 * NaN is NaN.
            @pl.when(sum(live_M) < M * C)
            def _():
                for m, live in enumerate(live_M):
                    v = v_ref[buffer, m]
                    token = lax.broadcasted_iota(jnp.int32, v.shape, 1 + v_token_axis)
                    v_ref[buffer, m] = jnp.where(token < live, v, jnp.zeros_like(v))

            token_1W = lax.rem(lax.broadcasted_iota(jnp.int32, (1, M * C), 1), C)
            live_1W = token_1W < jnp.concatenate([jnp.full((1, C), n) for n in live_M], axis=1)
            if window is not None:  # of the slot's first page
                place_1W = lax.broadcasted_iota(jnp.int32, (1, M * C), 1)
                live_1W &= (block > 0) | (place_1W >= hidden_ref[slot])
            new_state = []
            for h in range(K):
                k, v = (
                    jnp.concatenate([ref[buffer, m, h] for m in range(M)], axis=token_axis)
                    for ref, token_axis in ((k_ref, k_token_axis), (v_ref, v_token_axis))
                )
                x_QW = _dot(q_ref[slot - first, h], k, axis=1 - k_token_axis) * H**-0.5
                x_QW = jnp.where(live_1W, x_QW, MASKED)
                new_state.append(accumulate(state[h], x_QW, v, times_values))
            return item, lax.rem(buffer + 1, BUFFERS), new_state

        def recent(h):
            state_Q2 = recent_state_ref[slot - first, h]
            return state_Q2[:, 0:1], state_Q2[:, 1:2], recent_out_ref[slot - first, h]

        num_blocks = pl.cdiv(pages_left(slot, 0), M)
        carry = (*carry, [recent(h) for h in range(K)])
        item, buffer, state = lax.fori_loop(0, num_blocks, attend_block, carry)
        for h, (_, sum_Q1, out_QH) in enumerate(state):
            out_ref[slot - first, h] = (out_QH / sum_Q1).astype(out_ref.dtype)
        return item, buffer

    item = (next_live(first), jnp.int32(0), jnp.int32(0))
    for _ in range(BUFFERS - 1):
        item = start(item)
    live_S11 = recent_tokens_ref[...]
    for h in range(K):
        x_SQR = _dots(q_ref[:, h], k_recent_ref[:, h], axis=2) * H**-0.5
        token_SQR = lax.broadcasted_iota(jnp.int32, x_SQR.shape, 2)
        is_live = token_SQR < live_S11
        if window is not None:
            is_live &= token_SQR >= live_S11 - window
        x_SQR = jnp.where(is_live, x_SQR, MASKED)
        max_SQ1 = x_SQR.max(axis=2, keepdims=True)
        p_SQR = jnp.exp(x_SQR - max_SQ1)
        recent_out_ref[:, h] = _dots(p_SQR.astype(v_recent_ref.dtype), v_recent_ref[:, h], axis=1)
        recent_state_ref[:, h, :, 0:1] = max_SQ1
        recent_state_ref[:, h, :, 1:2] = p_SQR.sum(axis=2, keepdims=True)

    lax.fori_loop(first, end, attend_slot, (item, jnp.int32(0)))


def _dot(a, b, *, axis: int):
    """Multiplies matrices in float32, summing over the columns of `a` and the given axis of `b`."""
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _dots(a_S, b_S, *, axis: int):
    """Multiplies the matrices of S slots, each as `_dot` does."""
    dimensions = (((2,), (axis,)), ((0,), (0,)))
    return lax.dot_general(a_S, b_S, dimensions, preferred_element_type=jnp.float32)
