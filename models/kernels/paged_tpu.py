"""Decode attention over pools of key/value pages, and their writes: Pallas kernels for TPU.

Axis letters: B slots, N query heads, K key/value heads, G = N / K, H head size, C tokens of a
page, X pages of a slot, P and U pages of the pools of responses and prompts; S slots of a grid
step, M pages of a block, T = M * C.

A slot's live pages, its prompt's and then its response's, are read in blocks of M, and the reads
run ahead of the arithmetic across slots: while one block is computed the next ones are under way,
whichever slot they belong to. Nothing else is read, so time follows the tokens that are there and
not the longest slot. The softmax is the running one (Milakov & Gimelshein 2018, arXiv 1805.02867;
Dao et al. 2022, arXiv 2205.14135, Algorithm 1). It begins with the block that is still being
decoded, which is attended to elsewhere.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.kernels.xla import MASKED

LANES = 128
BLOCK_BYTES = 256 * 1024  # of the keys of a block, and as much of its values
BUFFERS = 3  # blocks in VMEM: one being computed, two being read
SLOTS = 32  # of a grid step; reads start afresh in each, so it has to be long


def paged_attention(
    q_BNH, recent, prompt_pool, pool, page_BX, prompt_tokens_B, tokens_B, *, interpret: bool
):
    """Attends with one token a slot to the slot's closed pages and to what is given of others.

    q_BNH and the pools (k_UKHC, v_UKCH) of prompts, (k_PKHC, v_PKCH) of responses: one dtype,
    bfloat16 or float32; query head n reads key/value head n // (N / K).
    recent: float32 (out_BKGH, max_BKG, sum_BKG) of other tokens of the slot: with their scores
    x = q·k / sqrt(H), max = max(x), sum = sum(exp(x - max)), out = sum(exp(x - max) v).
    page_BX: int32, of `xla.page_order`: the pages that `prompt_tokens_B` tokens fill from the
    front in the prompts' pool, then those that `tokens_B` fill in the responses'; the rest is
    never read.
    Returns out_BNH in q's dtype. A slot's numbers do not depend on other slots, on X or on which
    pages it has. The page ids of live pages have to be valid: on TPU they are not checked.
    Inside shard_map the result varies over the mesh axes that q_BNH varies over.
    Raises ValueError for dtypes or shapes that differ, and (unless interpreted) where neither H
    nor C is a multiple of 128: XLA would copy such a pool into another layout at every call.
    """
    B, N, H = q_BNH.shape
    _, K, C, _ = pool[1].shape
    G, S = N // K, min(B, SLOTS)
    if not all(a.dtype == q_BNH.dtype for a in (*prompt_pool, *pool)):
        raise ValueError(
            f"q, k and v must have one dtype, not {q_BNH.dtype}, "
            + ", ".join(str(a.dtype) for a in (*prompt_pool, *pool))
        )
    for k_PKHC, v_PKCH in (prompt_pool, pool):
        P = len(k_PKHC)
        if (k_PKHC.shape, v_PKCH.shape) != ((P, K, H, C), (P, K, C, H)):
            raise ValueError(
                f"pages of keys {k_PKHC.shape} and of values {v_PKCH.shape} do not go together "
                f"with a head size of {H}, {K} key/value heads and {C} tokens"
            )
    if H % LANES and C % LANES and not interpret:
        raise ValueError(
            f"head size {H} with pages of {C} tokens: set the tokens of a page to a multiple of "
            f"{LANES}, which a head size below {LANES} needs"
        )
    k_token_axis, v_token_axis = axes = token_axes(C, H)
    pools = (*as_stored(*prompt_pool, axes), *as_stored(*pool, axes))
    live_B = jnp.where(prompt_tokens_B + tokens_B > 0, jnp.arange(B), B)
    next_live_B = lax.cummin(live_B, reverse=True)  # the slot itself, if it has pages

    def of_slots(*shape, **kwargs):
        return pl.BlockSpec((S, *shape), lambda step, *_: (step,) + (0,) * len(shape), **kwargs)

    out_BKGH, max_BKG, sum_BKG = recent
    pages = pages_per_block(pool[1])
    out_BKGH = pl.pallas_call(
        functools.partial(_kernel, k_token_axis=k_token_axis, v_token_axis=v_token_axis),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(B, S),),
            in_specs=[
                of_slots(page_BX.shape[1], memory_space=pltpu.SMEM),
                of_slots(K, G, H),
                of_slots(K, G, H),
                of_slots(K, G, 2),
                # Not ANY: the compiler would take a small pool into VMEM and copy by vectors.
                *[pl.BlockSpec(memory_space=pltpu.HBM)] * len(pools),
            ],
            out_specs=of_slots(K, G, H),
            scratch_shapes=[
                pltpu.VMEM((BUFFERS, pages, *pools[0].shape[1:]), q_BNH.dtype),
                pltpu.VMEM((BUFFERS, pages, *pools[1].shape[1:]), q_BNH.dtype),
                pltpu.SemaphoreType.DMA((2, BUFFERS)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(
            (B, K, G, H), q_BNH.dtype, manual_axis_type=jax.typeof(q_BNH).manual_axis_type
        ),
        # Checks would make starting the reads slower than the arithmetic.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="paged_attention",
    )(
        prompt_tokens_B,
        tokens_B,
        next_live_B,
        page_BX,
        q_BNH.reshape(B, K, G, H),
        out_BKGH,
        jnp.stack([max_BKG, sum_BKG], axis=-1),
        *pools,
    )
    return out_BKGH.reshape(B, N, H)


def token_axes(page_tokens: int, head_size: int) -> tuple[int, int]:
    """The axis (0, 1) along which a stored page of one head has its tokens: keys', values'.

    XLA stores a page the other way round where that alone fills the lanes.
    """
    C, H = page_tokens, head_size
    return (
        0 if C % LANES and H % LANES == 0 else 1,
        1 if H % LANES and C % LANES == 0 else 0,
    )


def as_stored(k_PKHC, v_PKCH, axes: tuple[int, int]):
    """Transposes pools from one layout to the other and back; of the whole pools nothing moves.

    axes: `token_axes`. New tokens for the pools are transposed in the same way.
    """
    k_token_axis, v_token_axis = axes
    return (
        k_PKHC if k_token_axis == 1 else k_PKHC.swapaxes(2, 3),
        v_PKCH if v_token_axis == 0 else v_PKCH.swapaxes(2, 3),
    )


def pages_per_block(v_PKCH):
    """Counts the pages read and computed together; depends on the size of a page alone."""
    _, K, C, H = v_PKCH.shape
    return max(1, BLOCK_BYTES // (K * C * H * v_PKCH.dtype.itemsize))


def _kernel(
    prompt_tokens_ref,
    tokens_ref,
    next_live_ref,
    page_ref,
    q_ref,
    recent_ref,
    recent_state_ref,
    k_prompts_ref,
    v_prompts_ref,
    k_responses_ref,
    v_responses_ref,
    out_ref,
    k_ref,
    v_ref,
    semaphore_ref,
    *,
    k_token_axis: int,
    v_token_axis: int,
):
    """Computes the slots [first, end). An item (slot, block, buffer) is a block to read."""
    S, K, _, H = q_ref.shape
    M, C = v_ref.shape[1], v_ref.shape[3 + v_token_axis]
    first = pl.program_id(0) * S
    end = jnp.minimum(first + S, tokens_ref.shape[0])
    pools = ((k_prompts_ref, v_prompts_ref), (k_responses_ref, v_responses_ref))

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
        """The reads of page m of an item from a pool."""
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

            token_1T = lax.rem(lax.broadcasted_iota(jnp.int32, (1, M * C), 1), C)
            live_1T = token_1T < jnp.concatenate([jnp.full((1, C), n) for n in live_M], axis=1)
            new_state = []
            for h in range(K):
                k, v = (
                    jnp.concatenate([ref[buffer, m, h] for m in range(M)], axis=token_axis)
                    for ref, token_axis in ((k_ref, k_token_axis), (v_ref, v_token_axis))
                )
                x_GT = _dot(q_ref[slot - first, h], k, axis=1 - k_token_axis) * H**-0.5
                x_GT = jnp.where(live_1T, x_GT, MASKED)
                new_state.append(_accumulate(state[h], x_GT, v, token_axis=v_token_axis))
            return item, lax.rem(buffer + 1, BUFFERS), new_state

        def recent(h):
            state_G2 = recent_state_ref[slot - first, h]
            return state_G2[:, 0:1], state_G2[:, 1:2], recent_ref[slot - first, h]

        num_blocks = pl.cdiv(pages_left(slot, 0), M)
        carry = (*carry, [recent(h) for h in range(K)])
        item, buffer, state = lax.fori_loop(0, num_blocks, attend_block, carry)
        for h, (_, sum_G1, out_GH) in enumerate(state):
            out_ref[slot - first, h] = (out_GH / sum_G1).astype(out_ref.dtype)
        return item, buffer

    item = (next_live(first), jnp.int32(0), jnp.int32(0))
    for _ in range(BUFFERS - 1):
        item = start(item)
    lax.fori_loop(first, end, attend_slot, (item, jnp.int32(0)))


def _accumulate(state, x_GT, v, *, token_axis: int):
    """Adds T more scores and values to the running softmax (max_G1, sum_G1, out_GH)."""
    max_G1, sum_G1, out_GH = state
    new_max_G1 = jnp.maximum(max_G1, x_GT.max(axis=1, keepdims=True))
    p_GT = jnp.exp(x_GT - new_max_G1)
    decay_G1 = jnp.exp(max_G1 - new_max_G1)
    sum_G1 = sum_G1 * decay_G1 + p_GT.sum(axis=1, keepdims=True)
    return new_max_G1, sum_G1, out_GH * decay_G1 + _dot(p_GT.astype(v.dtype), v, axis=token_axis)


def _dot(a, b, *, axis: int):
    """Multiplies matrices in float32, summing over the columns of `a` and the given axis of `b`."""
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def write_pages(k_PKHC, v_PKCH, k_BKHS, v_BKSH, page_B, offset_B, *, interpret: bool):
    """Writes the S tokens of each slot's block into its page, from its offset on.

    S divides C and the offsets. Pages that several slots name get the tokens of any of them.
    Returns the pools, which take the place of those given. A loop of slice updates in XLA takes 2
    microseconds a slot and pool; here the next slot's page is read while one is written.
    """
    axes = token_axes(*v_PKCH.shape[2:])
    pools, new = as_stored(k_PKHC, v_PKCH, axes), as_stored(k_BKHS, v_BKSH, axes)

    def of_slot(a):
        return pl.BlockSpec((1, *a.shape[1:]), lambda b, *_: (b, 0, 0, 0))

    def of_page(a):
        return pl.BlockSpec((1, *a.shape[1:]), lambda b, page_ref, _: (page_ref[b], 0, 0, 0))

    written = pl.pallas_call(
        functools.partial(_write_kernel, token_axes=axes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(len(page_B),),
            in_specs=[*map(of_slot, new), *map(of_page, pools)],
            out_specs=[*map(of_page, pools)],
        ),
        out_shape=[*map(_like, pools)],
        input_output_aliases={4: 0, 5: 1},
        interpret=interpret,
        name="write_pages",
    )(page_B, offset_B, *new, *pools)
    return as_stored(*written, axes)


def _write_kernel(
    _, offset_ref, k_new_ref, v_new_ref, k_in_ref, v_in_ref, k_out_ref, v_out_ref, *, token_axes
):
    """Copies a page, with the new tokens in place of those from the offset on."""
    offset = offset_ref[pl.program_id(0)]
    for new_ref, in_ref, out_ref, token_axis in (
        (k_new_ref, k_in_ref, k_out_ref, token_axes[0]),
        (v_new_ref, v_in_ref, v_out_ref, token_axes[1]),
    ):
        new, old = new_ref[...], in_ref[...]
        axis, tokens = 2 + token_axis, new.shape[2 + token_axis]
        everywhere = jnp.concatenate([new] * (old.shape[axis] // tokens), axis=axis)
        token = lax.broadcasted_iota(jnp.int32, old.shape, axis)
        is_new = (token >= offset) & (token < offset + tokens)
        out_ref[...] = jnp.where(is_new, everywhere, old)


def copy_pages(pool, source_pool, page_M, source_page_M, *, interpret: bool):
    """Copies M pages of one pool of keys and values into another one's place; returns the latter.

    No page may be both read and written. Pages that are written more than once get any of what is
    written. A loop of slice updates in XLA takes 3 microseconds a page and array.
    """
    axes = token_axes(*pool[1].shape[2:])
    pools, sources = as_stored(*pool, axes), as_stored(*source_pool, axes)

    def of_page(a, number):
        return pl.BlockSpec((1, *a.shape[1:]), lambda m, *pages: (pages[number][m], 0, 0, 0))

    copied = pl.pallas_call(
        _copy_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(len(page_M),),
            in_specs=[
                *[of_page(a, 1) for a in sources],
                *[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
            ],
            out_specs=[of_page(a, 0) for a in pools],
        ),
        out_shape=[*map(_like, pools)],
        input_output_aliases={4: 0, 5: 1},
        interpret=interpret,
        name="copy_pages",
    )(page_M, source_page_M, *sources, *pools)
    return as_stored(*copied, axes)


def _copy_kernel(_page, _source_page, k_in_ref, v_in_ref, _k, _v, k_out_ref, v_out_ref):
    k_out_ref[...], v_out_ref[...] = k_in_ref[...], v_in_ref[...]


def _like(a):
    """Describes an array like `a`, which varies over the same axes of a mesh inside shard_map."""
    return jax.ShapeDtypeStruct(a.shape, a.dtype, manual_axis_type=jax.typeof(a).manual_axis_type)
