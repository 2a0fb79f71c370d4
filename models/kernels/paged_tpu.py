"""Decode attention over pools of key/value pages: a Pallas kernel for TPU.

Axis letters: B slots, N query heads, K key/value heads, Q = N / K, padded to 8, H head size, R
tokens of a slot's running block, C tokens of a page, X pages of a slot, P and U pages of the pools
of responses and prompts; S slots of a grid step, M pages of a block, Z = K * M * Q.

A slot's live pages, its prompt's and then its response's, are read in blocks of M, and the reads
run ahead of the arithmetic across slots: while one block is computed the next ones are under way,
whichever slot they belong to. Nothing else is read, so time follows the tokens that are there and
not the longest slot. A page is a tile (`tiles`), whose sums are of the rounded weights: `flash_tpu`
gives the same bits. The running block's tokens are put into the last page, where they will be.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.kernels.flash_tpu import dot
from models.kernels.pages_tpu import LANES, as_stored, token_axes
from models.kernels.tiles import LEAST, MASKED, power_of_two, scale
from models.kernels.xla import like, window_pages

BLOCK_BYTES = 256 * 1024  # of the keys of a block, and as much of its values
BUFFERS = 3  # blocks in VMEM: one being computed, two being read
SLOTS = 32  # of a grid step; reads start afresh in each, so it has to be long
ROWS = 8  # of a register


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
    """Attends with a token a slot to the slot's pages and to its most recent tokens.

    q_BNH and the pools (k_UKHC, v_UKCH) of prompts, (k_PKHC, v_PKCH) of responses: one dtype,
    bfloat16 or float32; query head n reads key/value head n // (N / K).
    recent: (k_BKHR, v_BKRH) in the same dtype, finite, of which the first `recent_tokens_B` live,
    one at least. R divides C and tokens_B.
    page_BX: int32, of `xla.page_order`: the pages that `prompt_tokens_B` tokens fill from the
    front in the prompts' pool, then those that `tokens_B` and the recent ones fill in the
    responses'; the rest is never read. window: a query sees itself and the window - 1 tokens before
    it, and no page before them is read; None: it sees all.
    Returns out_BNH in q's dtype. A slot's numbers do not depend on other slots, on X or on which
    pages it has. The page ids of live pages have to be valid: on TPU they are not checked.
    Inside shard_map the result varies over the mesh axes that q_BNH varies over.
    Where neither H nor C is a multiple of 128 XLA would copy the pools into another layout at every
    call: `Kernels.page_tokens` makes C one.
    """
    B, N, H = q_BNH.shape
    _, K, C, _ = pool[1].shape
    Q, S = N // K, min(B, SLOTS)
    tokens_B, hidden = tokens_B + recent_tokens_B, []
    if window is not None:
        page_BX, prompt_tokens_B, tokens_B, *hidden = window_pages(
            page_BX, prompt_tokens_B, tokens_B, 0, window=window, page_tokens=C
        )
    axes = token_axes(C, H)
    pools = (*as_stored(*prompt_pool, axes), *as_stored(*pool, axes))
    recent = recent[0].swapaxes(2, 3), recent[1]

    def of_slots(*shape, **kwargs):
        return pl.BlockSpec((S, *shape), lambda step, *_: (step,) + (0,) * len(shape), **kwargs)

    pages = min(pages_per_block(pool[1]), page_BX.shape[1])
    q_BKQH = jnp.pad(q_BNH.reshape(B, K, Q, H), ((0, 0), (0, 0), (0, -Q % ROWS), (0, 0)))
    kernel = functools.partial(_kernel, token_axes=axes, window=window)
    out_BKQH = pl.pallas_call(
        kernel if window is not None else functools.partial(kernel, None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2 + len(hidden),
            grid=(pl.cdiv(B, S),),
            in_specs=[
                of_slots(page_BX.shape[1], memory_space=pltpu.SMEM),
                of_slots(*q_BKQH.shape[1:]),
                *[of_slots(*a.shape[1:]) for a in recent],
                # Not ANY: the compiler would take a small pool into VMEM and copy by vectors.
                *[pl.BlockSpec(memory_space=pltpu.HBM)] * len(pools),
            ],
            out_specs=of_slots(*q_BKQH.shape[1:]),
            scratch_shapes=[
                pltpu.VMEM((BUFFERS, pages, *pools[0].shape[1:]), q_BNH.dtype),
                pltpu.VMEM((BUFFERS, pages, *pools[1].shape[1:]), q_BNH.dtype),
                pltpu.SemaphoreType.DMA((2, BUFFERS)),
            ],
        ),
        out_shape=like(q_BKQH),
        # Checks would make starting the reads slower than the arithmetic.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="paged_attention",
    )(*hidden, prompt_tokens_B, tokens_B, page_BX, q_BKQH, *recent, *pools)
    return out_BKQH[:, :, :Q].reshape(B, N, H)


def pages_per_block(v_PKCH):
    """Counts the pages read and computed together."""
    _, K, C, H = v_PKCH.shape
    return max(1, BLOCK_BYTES // (K * C * H * v_PKCH.dtype.itemsize))


def _kernel(hidden_ref, prompt_tokens_ref, tokens_ref, page_ref, q_ref, *refs, token_axes, window):
    """Computes the slots [first, end). An item (slot, block, buffer) is a block to read."""
    recents, pools, (out_ref, *buffers, semaphore_ref) = refs[:2], (refs[2:4], refs[4:6]), refs[6:]
    (k_ref, v_ref), (k_token_axis, v_token_axis) = buffers, token_axes
    S, K, Q, H = q_ref.shape
    R, M, C = recents[1].shape[2], v_ref.shape[1], v_ref.shape[3 + v_token_axis]
    first = pl.program_id(0) * S
    end = jnp.minimum(first + S, tokens_ref.shape[0])

    def prompt_pages(slot):
        return pl.cdiv(prompt_tokens_ref[jnp.minimum(slot, end - 1)], C)

    def pages_left(slot, block):
        of_response = pl.cdiv(tokens_ref[jnp.minimum(slot, end - 1)], C)
        return prompt_pages(slot) + of_response - block * M

    def after(item):
        slot, block, buffer = item
        is_last = pages_left(slot, block) <= M
        slot, block = jnp.where(is_last, slot + 1, slot), jnp.where(is_last, 0, block + 1)
        return slot, block, lax.rem(buffer + 1, BUFFERS)

    def live_pages(item):
        """Counts an item's pages; slots from `end` on have none."""
        slot, block, _ = item
        return jnp.where(slot < end, jnp.minimum(pages_left(slot, block), M), 0)

    def copies(item, m, pool):
        slot, block, buffer = item
        page = page_ref[slot - first, block * M + m]
        for i, (hbm_ref, ref) in enumerate(zip(pool, buffers, strict=True)):
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
        of_prompt, pages = prompt_pages(slot), pages_left(slot, 0)

        def live_tokens(page):
            """Counts the tokens of the slot's page that live: the first ones."""
            prompt_left = prompt_tokens_ref[slot] - page * C
            left = jnp.where(
                page < of_prompt, prompt_left, tokens_ref[slot] - (page - of_prompt) * C
            )
            return jnp.clip(left, 0, C)

        last_prompt, last = of_prompt - 1, pages - 1
        of_last_prompt, closed = live_tokens(last_prompt), lax.div(live_tokens(last) - 1, R) * R
        prompt_block, last_block = pl.cdiv(of_prompt, M) - 1, pl.cdiv(pages, M) - 1

        def attend_block(block, carry):
            item, buffer, state = carry
            item = start(item)
            wait((slot, block, buffer))

            def put(ref, page, token_axis, begin, new_KCH):
                """Replaces the tokens of a page from its `begin` on."""
                old = ref[buffer, page - block * M]
                token = lax.broadcasted_iota(jnp.int32, old.shape, 1 + token_axis)
                new = new_KCH if token_axis == 0 else new_KCH.swapaxes(1, 2)
                ref[buffer, page - block * M] = jnp.where(token < begin, old, new)

            # What does not live may be anything, NaN included, and 0 * NaN is NaN.
            @pl.when(block == prompt_block)
            def _():
                zeros_KCH = jnp.zeros((K, C, H), v_ref.dtype)
                put(v_ref, last_prompt, v_token_axis, of_last_prompt, zeros_KCH)

            @pl.when(block == last_block)
            def _():
                for ref, token_axis, recent_ref in zip(buffers, token_axes, recents, strict=True):
                    everywhere = jnp.concatenate([recent_ref[slot - first]] * (C // R), axis=1)
                    put(ref, last, token_axis, closed, everywhere)

            live_M = [live_tokens(block * M + m) for m in range(M)]
            x_ZC = []
            for h in range(K):
                k = jnp.concatenate([k_ref[buffer, m, h] for m in range(M)], axis=k_token_axis)
                x_QW = dot(q_ref[slot - first, h], k, (1, 1 - k_token_axis))
                for m, live in enumerate(live_M):
                    x_QC = x_QW[:, m * C : (m + 1) * C]
                    token_QC = lax.broadcasted_iota(jnp.int32, x_QC.shape, 1)
                    seen_QC = token_QC < live
                    if window is not None and not m:  # of the slot's first page
                        seen_QC &= (block > 0) | (token_QC >= hidden_ref[slot])
                    # The maximum is there as in `flash_tpu`.
                    x_ZC.append(jnp.where(seen_QC, jnp.maximum(x_QC * scale(H), MASKED), MASKED))
            x_ZC = jnp.concatenate(x_ZC)
            power_Z1 = jnp.maximum(jnp.ceil(x_ZC.max(axis=1, keepdims=True)), LEAST)
            power_K = [
                functools.reduce(jnp.maximum, jnp.split(powers, M), state[h][0])
                for h, powers in enumerate(jnp.split(power_Z1, K))
            ]
            largest_Z1 = jnp.concatenate([power for power in power_K for _ in range(M)])
            scale_Z1 = power_of_two(power_Z1 - largest_Z1)
            weight_ZC = jnp.exp2(x_ZC - power_Z1)
            sum_ZL = dot(weight_ZC.astype(v_ref.dtype), jnp.ones((C, LANES), v_ref.dtype), (1, 0))
            new_state = []
            for h, (power_Q1, sum_QL, out_QH) in enumerate(state):
                scale_Q1 = power_of_two(power_Q1 - power_K[h])
                sum_QL, out_QH = sum_QL * scale_Q1, out_QH * scale_Q1
                for m, live in enumerate(live_M):
                    z = slice((h * M + m) * Q, (h * M + m + 1) * Q)
                    weight_QC = weight_ZC[z].astype(v_ref.dtype)
                    part_QH = dot(weight_QC, v_ref[buffer, m, h], (1, v_token_axis))
                    sum_QL += sum_ZL[z] * scale_Z1[z]
                    out_QH += jnp.where(live > 0, part_QH * scale_Z1[z], 0.0)
                new_state.append((power_K[h], sum_QL, out_QH))
            return item, lax.rem(buffer + 1, BUFFERS), new_state

        nothing = jnp.full((Q, 1), LEAST), jnp.zeros((Q, LANES)), jnp.zeros((Q, H))
        carry = (*carry, [nothing] * K)
        item, buffer, state = lax.fori_loop(0, last_block + 1, attend_block, carry)
        for h, (_, sum_QL, out_QH) in enumerate(state):
            out_ref[slot - first, h] = (out_QH / sum_QL[:, :1]).astype(out_ref.dtype)
        return item, buffer

    item = (first, jnp.int32(0), jnp.int32(0))
    for _ in range(BUFFERS - 1):
        item = start(item)
    lax.fori_loop(first, end, attend_slot, (item, jnp.int32(0)))
