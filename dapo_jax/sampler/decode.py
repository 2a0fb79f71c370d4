"""Device programs of the engine: prefill into pages, blocks of decode steps, copies of pages.

All run under shard_map on the mesh. A data shard has its own pages and slots and but for copies
exchanges nothing with the others, so that each may leave its loop when its own slots are done;
heads, feed-forward and vocabulary are split over "model", summed by hand.

Axis letters: B slots of a shard, S tokens of a block, Z streams of requests, and those of
models.kernels.xla.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dapo_jax.logprobs import sampling_logits
from dapo_jax.sampler import sampling
from dapo_jax.sampler.cache import NULL_PAGE, Cache
from models.kernels import Kernels, tiles, xla
from models.parameters import ModelConfig
from models.transformer import hidden_layer_by_layer
from sharding import rules


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Says how responses are sampled and when they end. `vocab_size` and ids: the tokenizer's."""

    max_response_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_ids: tuple[int, ...]
    vocab_size: int


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Says how the sampler computes: the model's sizes, the cache's, and by which kernels.

    axis: the mesh axis over which heads, feed-forward and vocabulary are split, or None.
    """

    config: ModelConfig
    cache: Cache
    kernels: Kernels
    axis: str | None


def prefill(params, prompt_pages, pages, tokens_RT, tokens_R, begin_R, page_R2I, *, layout: Layout):
    """Writes the keys and values of R rows to their pages: (prompt_pages, pages, route_RTLA).

    route_RTLA: the experts of each token, None without any. prompt_pages, pages: a (k_UKHC, v_UKCH)
    and a (k_PKHC, v_PKCH) a layer. tokens_RT: from the left tokens_R of a prompt and of what is fed
    of its response, T = I * C. begin_R: where the prompt's last token is, the first whose keys and
    values lie in the response's pages. page_R2I: pages of the prompt and of the response; those
    that a row does not have, or that have its keys and values already, are cache.NULL_PAGE.
    """
    T, begin_R1, multiple = tokens_RT.shape[1], begin_R[:, None], layout.kernels.part_multiple
    gap_R1 = -begin_R1 % multiple  # between a prompt and its response
    place_1A = jnp.arange(T + multiple - 1)[None]
    is_response_RA = place_1A >= begin_R1 + gap_R1
    position_RA = jnp.where(is_response_RA, place_1A - gap_R1, place_1A)
    is_there_RA = (is_response_RA | (place_1A < begin_R1)) & (position_RA < tokens_R[:, None])
    tokens_RA = jnp.take_along_axis(tokens_RT, jnp.minimum(position_RA, T - 1), axis=1)
    rows = tokens_RA, is_there_RA, is_there_RA & is_response_RA, position_RA
    kept, route_RALA = _keys_and_values(params, *rows, layout=layout)
    index_RT = jnp.minimum(begin_R1 + gap_R1 + jnp.arange(T), place_1A.size - 1)
    index_RT11 = index_RT[..., None, None]
    of_responses = [[jnp.take_along_axis(a, index_RT11, axis=1) for a in layer] for layer in kept]
    of_prompts = [[a[:, :T] for a in layer] for layer in kept]
    prompt_pages = _write_rows(prompt_pages, of_prompts, page_R2I[:, 0])
    if route_RALA is not None:
        index_RT = jnp.arange(T) + jnp.where(jnp.arange(T) < begin_R1, 0, gap_R1)
        route_RALA = jnp.take_along_axis(route_RALA, index_RT[..., None, None], axis=1)
    return prompt_pages, _write_rows(pages, of_responses, page_R2I[:, 1]), route_RALA


def _keys_and_values(params, tokens_RT, segment_RT, branch_RT, position_RT, *, layout: Layout):
    """Runs rows of tokens: (each layer's (k_RTKH, v_RTKH), route_RTLA or None)."""
    numbers_RT = (*(jnp.asarray(a, jnp.int32) for a in (segment_RT, branch_RT)), position_RT)

    config, kernels = layout.config, layout.kernels

    def attend_and_keep(q, k, v, *, window):
        return kernels.attend_rows(q, k, v, *numbers_RT, window), (k, v)

    attends = [functools.partial(attend_and_keep, window=kind.window) for kind in config.kinds]
    _, *kept = hidden_layer_by_layer(
        params,
        config,
        tokens_RT,
        position_RT,
        attends,
        project=kernels.sample_product,
        axis=layout.axis,
    )
    return kept


def _write_rows(pages, kept, page_RI):
    page_N = page_RI.reshape(-1)

    def of_pages(array_RTKH):
        return array_RTKH.reshape(len(page_N), -1, *array_RTKH.shape[2:])

    new = [
        (of_pages(k_RTKH).transpose(0, 2, 3, 1), of_pages(v_RTKH).swapaxes(1, 2))
        for k_RTKH, v_RTKH in kept
    ]
    return write(pages, new, page_N, jnp.zeros_like(page_N))


def decode_block(
    params,
    prompt_pages,
    pages,
    run_key_Z,
    row_BX,
    page_P,
    *,
    layout: Layout,
    samplings: Sequence[Sampling],
):
    """Samples up to `cache.block_tokens` more tokens for every active slot.

    Returns (pages, token_SB, logp_SB, route_SBLA). The last has the experts that gave each token:
    those of the one before it, which was fed; None without any.

    A slot that stops, or reaches its limit, is idle for the rest of the block: what it samples
    then means nothing. The loop ends early when all have.

    run_key_Z, samplings: of the streams; keys as their data, uint32 [Z, 2]. Samplings differ in
    temperature, top-p and top-k alone. prompt_pages, pages: a (k_UKHC, v_UKCH) and a (k_PKHC,
    v_PKCH) a layer; tokens of this block are kept apart and written to `pages` at the end, once a
    block. row_BX: `Cache.row_dtype`, as int32. page_P: the pages that the rows number; fewer than
    all are gathered, so that no step attends to the others. A token that is given (turns of an
    episode) is fed like a sampled one and ends nothing; its logp means nothing.
    """
    config, cache, kernels, axis = layout.config, layout.cache, layout.kernels, layout.axis
    S, B = cache.block_tokens, len(row_BX)
    row = _columns(row_BX, cache)
    stream_B, sampled_B = row["stream"], row["sampled"]
    table = xla.PageTable(
        prompt_BI=row["prompt_pages"],
        response_BJ=row["response_pages"],
        prompt_tokens_B=row["prompt_tokens"],
        response_tokens_B=sampled_B,
        reader_B=row["reader"],
    )
    page_B, offset_B = row["page"], sampled_B % cache.page_tokens
    stop_ids = jnp.asarray(samplings[0].stop_ids, jnp.int32)
    vocab_size = samplings[0].vocab_size
    temperature = sampling.of_rows([s.temperature for s in samplings], stream_B)
    _, K, _, H = pages[0][1].shape
    head_VD = params["head_VD"]
    first_id = 0 if axis is None else jax.lax.axis_index(axis) * head_VD.shape[0]
    run_key_B = jax.random.wrap_key_data(run_key_Z)[stream_B]
    key_B = sampling.request_keys(run_key_B, row["cursor"], row["sample"])
    uniform_SB = jax.vmap(lambda i: sampling.uniform_at(key_B, sampled_B + i))(jnp.arange(S))
    windows = [kind.window for kind in config.kinds]
    opened = 0  # places of tokens before the block, in the page that a slot fills
    if kernels.attend_pages is None:
        opened = cache.page_tokens - S  # enough: it begins at a multiple of S
        attend_slots = _by_pieces(prompt_pages, pages, table, page_P, cache=cache, windows=windows)
    else:
        attend_slots = _by_kernel(kernels.attend_pages, prompt_pages, pages, table, windows)

    def unfinished(carry):
        i, active_B, *_ = carry
        return (i < S) & jnp.any(active_B)

    def step(carry):
        i, active_B, token_B, block_kv, token_SB, logp_SB, route_SBLA = carry

        def attend(q_B1NH, k_B1KH, v_B1KH, *, layer):
            k_BKHS, v_BKSH = block_kv[layer]
            put = jax.lax.dynamic_update_slice_in_dim
            block = (
                put(k_BKHS, k_B1KH.transpose(0, 2, 3, 1), opened + i, axis=3),
                put(v_BKSH, v_B1KH.swapaxes(1, 2), opened + i, axis=2),
            )
            out_BNH = attend_slots(q_B1NH[:, 0], block, jnp.full(B, i + 1), layer=layer)
            return out_BNH[:, None], block

        # In the loop, or XLA would transpose before it.
        x_B1D, new_kv, route_B1LA = hidden_layer_by_layer(
            params,
            config,
            token_B[:, None],
            (row["prompt_tokens"] + sampled_B + i)[:, None],
            [functools.partial(attend, layer=layer) for layer in range(config.num_layers)],
            project=kernels.sample_product,
            axis=axis,
        )
        logits_BV = kernels.sample_product(
            "BD,VD->BV", x_B1D[:, 0], head_VD, preferred_element_type=jnp.float32
        )
        logits_BV = sampling_logits(
            logits_BV, temperature=temperature, vocab_size=vocab_size, first_id=first_id
        )
        logits_BV = sampling.truncate(
            logits_BV,
            top_p=[s.top_p for s in samplings],
            top_k=[s.top_k for s in samplings],
            axis=axis,
            stream_R=stream_B,
            live_R=active_B,
        )
        new_B, logp_B = sampling.sample_token(logits_BV, uniform_SB[i], axis=axis)
        if cache.turns:
            given_B = row["given"][:, i]
            new_B = jnp.where(given_B > 0, given_B - 1, new_B)
        token_B = jnp.where(active_B, new_B, token_B)
        token_SB = token_SB.at[i].set(jnp.where(active_B, new_B, token_SB[i]))
        logp_SB = logp_SB.at[i].set(jnp.where(active_B, logp_B, logp_SB[i]))
        if config.routes:
            route_SBLA = route_SBLA.at[i].set(route_B1LA[:, 0])
        is_stop_B = jnp.isin(token_B, stop_ids)
        if cache.turns:
            is_stop_B &= given_B == 0
        ended_B = is_stop_B | (sampled_B + i + 1 >= row["limit"])
        return i + 1, active_B & ~ended_B, token_B, new_kv, token_SB, logp_SB, route_SBLA

    if opened:
        block_kv = [(k_PKHC[page_B], v_PKCH[page_B]) for k_PKHC, v_PKCH in pages]
    else:
        empty = (B, K, H, S), (B, K, S, H)
        block_kv = [tuple(jnp.zeros(shape, pages[0][1].dtype) for shape in empty) for _ in pages]
    carry = (
        jnp.int32(0),
        row["active"] > 0,
        row["token"],
        block_kv,
        jnp.zeros((S, B), jnp.int32),
        jnp.zeros((S, B), jnp.float32),
        jnp.zeros((S, B, *config.routes), jnp.uint8) if config.routes else None,
    )
    *_, block_kv, token_SB, logp_SB, route_SBLA = jax.lax.while_loop(unfinished, step, carry)
    block_kv = [(k_BKHS[..., opened:], v_BKSH[:, :, opened:]) for k_BKHS, v_BKSH in block_kv]
    if kernels.write_pages is None:
        pages = write(pages, block_kv, page_B, offset_B)
    else:
        pages = tuple(
            tuple(kernels.write_pages(*pool, *new, page_B, offset_B))
            for pool, new in zip(pages, block_kv, strict=True)
        )
    return pages, token_SB, logp_SB, route_SBLA


def _columns(row_BX, cache: Cache) -> dict[str, jax.Array]:
    """Takes the rows that travel to the device apart: each column of `Cache.row_dtype` by name."""
    columns, item_bytes = {}, row_BX.dtype.itemsize
    for name, (dtype, offset) in cache.row_dtype.fields.items():
        first, width = offset // item_bytes, dtype.itemsize // item_bytes
        columns[name] = row_BX[:, first : first + width] if dtype.shape else row_BX[:, first]
    return columns


def _by_pieces(prompt_pages, pages, table: xla.PageTable, page_P, *, cache: Cache, windows):
    """Attention by plain XLA, page by page: attend(q_BNH, block, live_B, layer=) -> out_BNH.

    block: keys and values of the page that a slot fills, this block's last, of which a query sees
    the first live_B (`xla.open_attention`). A layer with a window has those pages apart that its
    slots see.
    """
    C, S = cache.page_tokens, cache.block_tokens
    offset_B = table.response_tokens_B % C
    reader_URB, live_U, reader_P1B, live_P, entry_BX = xla.pieces(
        table,
        prompt_pages=len(prompt_pages[0][0]),
        readers=cache.readers,
        pages=len(page_P),
        page_tokens=C,
    )
    seen_UC, seen_PC = (jnp.arange(C) < live_N[:, None] for live_N in (live_U, live_P))
    whole = len(page_P) == len(pages[0][0])
    closed = pages if whole else [(k_PKHC[page_P], v_PKCH[page_P]) for k_PKHC, v_PKCH in pages]

    near = {
        i: xla.near_attention(prompt_pages[i], closed[i], table, block_tokens=S, window=window)
        for i, window in enumerate(windows)
        if window is not None
    }

    def attend(q_BNH, block, live_B, *, layer):
        if layer in near:
            return near[layer](q_BNH, block, live_B)
        q = tiles.scaled(q_BNH)
        recent = xla.open_attention(q, block, offset_B, live_B, block_tokens=S)
        prompt = xla.page_attention(xla.of_readers(q, reader_URB), *prompt_pages[layer], seen_UC)
        response = xla.page_attention(xla.of_readers(q, reader_P1B), *closed[layer], seen_PC)
        return xla.combine([prompt, response, recent], entry_BX, dtype=q_BNH.dtype)

    return attend


def _by_kernel(attend_pages, prompt_pages, pages, table: xla.PageTable, windows):
    """As `_by_pieces`, by a kernel that reads just the live pages."""
    page_BX = xla.page_order(table, page_tokens=pages[0][1].shape[2])
    tokens = (table.prompt_tokens_B, table.response_tokens_B)

    def attend(q_BNH, block, live_B, *, layer):
        pools = (prompt_pages[layer], pages[layer])
        window = windows[layer]
        return attend_pages(q_BNH, block, live_B, *pools, page_BX, *tokens, window=window)

    return attend


def copy_pages(pages, copy_M4, *, kernels: Kernels):
    """Copies whole pages between shards, all bits of them; returns the pages.

    copy_M4: from shard and page to shard and page, the same on every shard; a shard that there is
    not, such as -1, stands for no copy.
    """
    here = jax.lax.axis_index(rules.ROW_AXES)
    source_M, page_M, target_M, to_page_M = copy_M4.T
    page_M = jnp.where(source_M == here, page_M, NULL_PAGE)
    to_page_M = jnp.where(target_M == here, to_page_M, NULL_PAGE)
    m_M = jnp.arange(len(copy_M4))

    def exchanged(taken_M):
        """Gathers the rows that copies come from, of all shards."""
        bits = jax.lax.bitcast_convert_type(taken_M, f"uint{8 * taken_M.dtype.itemsize}")
        is_mine = (source_M == here).reshape(-1, 1, 1, 1)
        bits = jax.lax.psum(jnp.where(is_mine, bits, 0), rules.ROW_AXES)
        return jax.lax.bitcast_convert_type(bits, taken_M.dtype)

    def copied(pool):
        empty = [jnp.empty((len(m_M), *array_P.shape[1:]), array_P.dtype) for array_P in pool]
        taken = kernels.copy_pages(empty, pool, m_M, page_M)
        return kernels.copy_pages(pool, tuple(map(exchanged, taken)), to_page_M, m_M)

    return tuple(map(copied, pages))


def write(pages, new, page_N, offset_N):
    """Writes S tokens (k_NKHS, v_NKSH) into pages of all layers, each from its offset on.

    A loop of slice updates works in place; a scatter makes XLA lay the whole pool out anew.
    """

    def one(n, pages):
        page, offset = page_N[n], offset_N[n]
        written = []
        for (k_PKHC, v_PKCH), layer in zip(pages, new, strict=True):
            k_1KHS, v_1KSH = (jax.lax.dynamic_slice_in_dim(a, n, 1) for a in layer)
            written.append(
                (
                    jax.lax.dynamic_update_slice(k_PKHC, k_1KHS, (page, 0, 0, offset)),
                    jax.lax.dynamic_update_slice(v_PKCH, v_1KSH, (page, 0, offset, 0)),
                )
            )
        return tuple(written)

    return jax.lax.fori_loop(0, len(page_N), one, tuple(pages))
