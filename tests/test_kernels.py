"""The table of kernels: what each platform gets, and that each equals its definition."""

import functools
import os
import re
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import compiled_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_kernels import GPUS, HALF, HEADS, WHOLE, an_h100, of_an_h100
from engines import PROMPTS, TWO, by_request, programs, step
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from processes import ROOT, ran
from quick import jit

from dapo_jax.preflight.compile import CUDA, LIBTPU
from models.kernels import (
    KERNELS,
    OPTIONS,
    flash_gpu,
    flash_tpu,
    kernels_for,
    packed,
    paged_gpu,
    paged_tpu,
    triton,
)
from models.kernels.xla import PageTable, attention, near_attention, page_order
from models.precision import Weights
from models.qwen2 import PRESETS, Qwen2Config
from models.transformer import REMAT, Execution, abstract_params, segment_positions
from sharding.mesh import make_mesh


def rows(*tokens):
    """Segments [B, T] of rows that hold segments of so many tokens; the last is padding."""
    return np.stack([np.repeat([*range(1, len(row)), 0], row) for row in tokens]).astype(np.int32)


def positions(segment_BT, branch_BT):
    """Each token's place in its sequence: how many it sees before itself."""
    return np.maximum(seen(segment_BT, branch_BT).sum(axis=2, dtype=np.int32) - 1, 0)


def branches(segment_BT):
    """In every segment a quarter of the tokens is the prompt of three branches."""
    length_BT = np.sum(segment_BT[:, :, None] == segment_BT[:, None], axis=2)
    place_BT = segment_positions(segment_BT)
    branch_BT = np.where(segment_BT > 0, 4 * place_BT // length_BT, 0).astype(np.int32)
    return branch_BT + np.where(branch_BT > 0, 4 * segment_BT, 0)


def numbered(*rows):
    """(segment_BT, branch_BT) of rows of pieces (prompt entries, [entries of each response])."""
    segment_BT, branch_BT = np.zeros((2, len(rows), 46), np.int32)
    for b, row in enumerate(rows):
        end = branch = 0
        for segment, (prompt, responses) in enumerate(row, start=1):
            start, end = end, end + prompt
            for response in responses:
                branch += 1
                branch_BT[b, end : end + response] = branch
                end += response
            segment_BT[b, start:end] = segment
    return segment_BT, branch_BT


ODD = rows([100, 33, 50, 17], [1, 199, 0])  # no whole number of blocks
MANY = rows([256, 128, 256, 0], [640, 0], [130, 300, 210], [3, 120, 5, 400, 112], [640])
SHORT = numbered(
    *([], [(5, [14])]),  # padding alone, and one sequence
    *([(9, []), (1, []), (12, [])], [(3, []), (7, [])]),  # plain segments
    *([(6, [5, 1, 9]), (0, [2, 2])], [(17, [1, 1, 3])], [(1, [8]), (3, [4, 13])]),
    *([(3, [2] * 20)], [(13, [1])]),
)


def seen(segment_BT, branch_BT, position_BT=None, window=None):
    """Which tokens each token looks at, [B, T, T]: of its segment, of its branch or the prompt."""
    seen_BTT = np.tril(segment_BT[:, :, None] == segment_BT[:, None])
    seen_BTT &= (branch_BT[:, None] == 0) | (branch_BT[:, :, None] == branch_BT[:, None])
    seen_BTT &= segment_BT[:, None] > 0
    if window is not None:
        seen_BTT &= position_BT[:, :, None] - position_BT[:, None] < window
    return seen_BTT


def by_definition(q_BTNH, k_BTKH, v_BTKH, *numbers):
    """One softmax over all that a token looks at."""
    return attention(q_BTNH, k_BTKH, v_BTKH, seen(*numbers))


def arrays(segment_BT, *, heads=(4, 2, 2), head_dim=16):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(*segment_BT.shape, n, head_dim)).astype(np.float32) for n in heads]


def value_and_gradient(attend, arrays, segment_BT, branch_BT=None, window=None, counts_BT=None):
    """(loss, gradients, outputs), the loss over the tokens that count: those that are no padding.

    No two of them have the same part in it.
    """
    branch_BT = np.zeros_like(segment_BT) if branch_BT is None else branch_BT
    numbers = segment_BT, branch_BT, positions(segment_BT, branch_BT), window
    counts_BT = segment_BT > 0 if counts_BT is None else counts_BT

    def loss(*arrays):
        out_BTNH = attend(*arrays, *numbers)
        wave_BTNH = jnp.cos(jnp.arange(out_BTNH.size).reshape(out_BTNH.shape))
        terms_BTNH = jnp.sin(out_BTNH.astype(jnp.float32)) * wave_BTNH
        return jnp.sum(jnp.where(counts_BT[..., None, None], terms_BTNH, 0)), out_BTNH

    run = jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (value, out_BTNH), gradients = jax.device_get(run(*arrays))
    return value, gradients, out_BTNH


# Tokens of responses, then rounded to whole blocks of 8, and of prompts in pages of C: neither,
# either, one token, part of a page, whole pages, and more blocks than are read ahead.
LENGTHS_IN_PAGES = (1.3, 6.2, 0.0, 7.0, 0.1, 11.6, 0.0, 1.0, 0.0, 3.4, 1.5)
PROMPTS_IN_PAGES = (0.5, 1.2, 1.2, 2.0, 0.0, 0.7, 0.0, 3.1, 0.1, 0.0, 1.0)


class Pages(NamedTuple):
    """A kernel, its arguments by name, and each slot's prompt and response, (k, v)_2KSH.

    Whatever no slot looks at is NaN in the pages.
    """

    attend: Callable
    given: dict[str, Any]
    parts_B: list[tuple[np.ndarray, np.ndarray]]

    def __call__(self, **changes):
        return np.asarray(self.attend(*(self.given | changes).values()))


def make_pages(attend, N, K, H, C, dtype, window) -> Pages:
    """A case; the prompts of the second and the third slot are one, in the same pages."""
    rng = np.random.default_rng(0)
    tokens_B, prompt_tokens_B = (
        np.round(np.array(lengths) * C / whole).astype(np.int32) * whole
        for lengths, whole in ((LENGTHS_IN_PAGES, 8), (PROMPTS_IN_PAGES, 1))
    )
    B = len(tokens_B)
    # With pages of 16 tokens a window of 33 of the sixth slot begins with the last of a page.
    recent_tokens_B = 1 + np.arange(2, B + 2, dtype=np.int32) % 8
    end_B = prompt_tokens_B + tokens_B + recent_tokens_B
    unseen_B = end_B - (end_B if window is None else window)

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    def pool(tokens_B, unseen_B, recent_B):
        """(pages, page_BJ, of_B) of so many tokens a slot; entries without any name any page."""
        pages_B = -(-tokens_B // C)
        P = pages_B.sum() + 5
        free = iter(rng.permutation(P))
        pages_2PKCH = np.full((2, P, K, C, H), np.nan, dtype)
        page_BJ = rng.integers(0, P, (B, pages_B.max() + 1), np.int32)
        of_B = [normal(2, K, count, H) for count in tokens_B]
        for b, of_2KSH in enumerate(of_B):
            for j, start in enumerate(range(0, tokens_B[b], C)):
                page_BJ[b, j] = next(free)
                end = min(start + C, tokens_B[b])
                if min(start + C, tokens_B[b] + recent_B[b]) > unseen_B[b]:
                    pages_2PKCH[:, page_BJ[b, j], :, : end - start] = of_2KSH[:, :, start:end]
        return (pages_2PKCH[0].swapaxes(2, 3), pages_2PKCH[1]), page_BJ, of_B

    prompt_pool, prompt_BI, prompt_of_B = pool(prompt_tokens_B, unseen_B, 0 * tokens_B)
    prompt_BI[1], prompt_of_B[1] = prompt_BI[2], prompt_of_B[2]
    response_pool, response_BJ, response_of_B = pool(
        tokens_B, unseen_B - prompt_tokens_B, recent_tokens_B
    )
    table = PageTable(prompt_BI, response_BJ, prompt_tokens_B, tokens_B, np.arange(B))
    recent_2BKSH = normal(2, B, K, 8, H)
    given = {
        "q_BNH": (3 * rng.normal(size=(B, N, H))).astype(dtype),
        "recent": (recent_2BKSH[0].swapaxes(2, 3), recent_2BKSH[1]),
        "recent_tokens_B": recent_tokens_B,
        "prompt_pool": prompt_pool,
        "pool": response_pool,
        "page_BX": np.asarray(page_order(table, page_tokens=C)),
        "prompt_tokens_B": prompt_tokens_B,
        "tokens_B": tokens_B,
    }
    recent_of_B = [recent_2BKSH[:, b, :, :count] for b, count in enumerate(recent_tokens_B)]
    responses = zip(response_of_B, recent_of_B, strict=True)
    response_of_B = [np.concatenate(parts, axis=2) for parts in responses]
    return Pages(attend, given, list(zip(prompt_of_B, response_of_B, strict=True)))


BLOCK = 128  # of the TPU's attention in rows
ROWS = {
    "packed": packed.packed_attention,
    "flash": functools.partial(flash_gpu.flash_attention, interpret=True),
    "flash_tpu": functools.partial(flash_tpu.flash_attention, interpret=True),
}


@pytest.fixture
def small(monkeypatch):
    """Small blocks, splits, tiles and grid steps, so that small cases have several of each."""
    monkeypatch.setattr(packed, "BLOCK_TOKENS", 4)
    monkeypatch.setattr(packed, "BLOCKS", 5)  # computed together, at last fewer
    monkeypatch.setattr(flash_tpu, "BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr(triton, "split_tokens", lambda page_tokens: 2 * page_tokens)
    monkeypatch.setattr(paged_tpu, "pages_per_block", lambda v_PKCH: 2)
    monkeypatch.setattr(paged_tpu, "SLOTS", 8)


def test_a_name_is_taken_where_the_platform_can_run_it():
    for platform in ("cpu", "gpu", "tpu"):
        assert kernels_for("auto", platform) is KERNELS[platform]
    assert kernels_for("auto", "another") is kernels_for("xla", "gpu") is KERNELS["xla"]
    assert kernels_for("tpu_interpret", "cpu") is KERNELS["tpu_interpret"]
    with pytest.raises(ValueError, match="'tpuv5' is unknown; choose one of auto, cpu, gpu, gpu_i"):
        kernels_for("tpuv5", "cpu")
    able = "only, .* are cpu; .* auto, cpu, gpu_interpret, tpu_interpret, xla$"
    with pytest.raises(ValueError, match=able):
        kernels_for("tpu", "cpu")


@pytest.mark.parametrize(
    ("name", "head_size", "pages"),
    [
        ("gpu", 64, {8: 16, 32: 32, 48: 64, 96: 128}),
        *(("tpu", 64, {8: 128, 128: 128, 129: 256}), ("tpu", 128, {32: 32, 48: 48})),
        *((name, 64, {8: 8, 48: 48}) for name in ("cpu", "gpu_interpret", "tpu_interpret")),
        *((name, 64, {512: 512, 1_024: 512, 520: 260}) for name in ("cpu", "xla")),
    ],
)
def test_pages_are_as_large_as_the_kernels_need(name, head_size, pages):
    """A config's pages of 48 tokens run on a GPU, those of 32 beside heads of 64 on a TPU.

    On a CPU SmolLM2 was not exact with pages of 1,024 tokens.
    """
    assert {C: KERNELS[name].page_tokens(C, head_size) for C in pages} == pages


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("kernel", "segment_BT", "branch_BT", "head_dim", "window"),
    [
        *(("packed", *SHORT, 8, window) for window in (None, 1, 6)),
        *(("flash", it, branches(it), dim, None) for it, dim in ((ODD, 128), (MANY, 64))),
        *(("flash", it, branches(it), dim, w) for it, dim, w in ((ODD, 16, 1), (MANY, 64, 70))),
        *(("flash_tpu", it, None, dim, w) for it, dim, w in ((ODD, 64, None), (MANY, 128, 129))),
        ("flash_tpu", MANY, None, 128, None),
    ],
)
def test_attention_in_rows_equals_the_definition(kernel, segment_BT, branch_BT, head_dim, window):
    """Segments end on borders of blocks and elsewhere; padding fills whole rows, too.

    A window is counted by position: a response of a prompt stands behind others of it.
    """
    given = arrays(segment_BT, head_dim=head_dim), segment_BT, branch_BT, window
    value, gradients, out_BTNH = value_and_gradient(ROWS[kernel], *given)
    expected, expected_gradients, expected_BTNH = value_and_gradient(by_definition, *given)
    used_BT = segment_BT > 0
    exact = 1e-5 if kernel == "packed" else 5e-5
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out_BTNH[used_BT], expected_BTNH[used_BT], atol=exact / 5)
    assert not out_BTNH[~used_BT].any()
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert np.abs(want).max() > 0.01 or window == 1  # where the weight of a key is 1
        np.testing.assert_allclose(got, want, atol=exact)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kernel", ["flash", "flash_tpu"])
def test_blocks_without_its_segment_are_not_even_read(kernel):
    """NaNs of other segments reach no block that does not visit them, masked or not."""
    segment_1T = MANY[:1]
    its_1T = segment_1T == 2
    given = arrays(segment_1T)
    broken = [np.where(its_1T[..., None, None], array, np.nan) for array in given]
    (_, found, out), (_, expected, expected_out) = (
        value_and_gradient(ROWS[kernel], it, segment_1T, counts_BT=its_1T) for it in (broken, given)
    )
    for got, want in zip((out, *found), (expected_out, *expected), strict=True):
        np.testing.assert_array_equal(got[its_1T], want[its_1T])


@pytest.mark.parametrize("window", [None, 1, 129, 130])
def test_a_tpu_visits_the_blocks_with_pairs_of_a_segment(window):
    """By the pairs themselves, and the diagonal. Not each number of a segment is there."""
    ends_BS = np.sort(np.random.default_rng(0).integers(1, 1024, (8, 4)), axis=1)
    segment_BT = (np.sum(np.arange(1024) >= ends_BS[..., None], axis=1) + 1) % 5  # 0: padding
    place_BT = np.tile(np.arange(1024), (8, 1))
    pairs_BTT = seen(segment_BT, 0 * segment_BT, place_BT, window) | np.eye(1024, dtype=bool)
    expected_BIJ = pairs_BTT.reshape(8, 8, BLOCK, 8, BLOCK).any(axis=(2, 4))
    for numbers in ([0, 1, 2, 3, 4], [0, 2, 5, 6, 9]):
        first_BI, last_BJ = flash_tpu.visited_blocks(np.array(numbers)[segment_BT], BLOCK, window)
        i_I1, j_J = np.arange(8)[:, None], np.arange(8)
        by_queries = (first_BI[..., None] <= j_J) & (j_J <= i_I1)
        np.testing.assert_array_equal(by_queries, expected_BIJ)
        by_keys = (j_J <= i_I1) & (i_I1 <= last_BJ[:, None])
        np.testing.assert_array_equal(by_keys, expected_BIJ)


@pytest.mark.parametrize(
    ("segment_1T", "window", "visited"),
    [
        (np.arange(1, 9).repeat(8)[None], None, [1] * 8),
        (np.ones((1, 64), int), None, [1, 2, 3, 4, 5, 6, 7, 8]),
        (np.ones((1, 64), int), 16, [1, 2, 3, 3, 3, 3, 3, 3]),
    ],
)
def test_a_cpu_visits_no_block_of_which_nothing_is_seen(monkeypatch, segment_1T, window, visited):
    monkeypatch.setattr(packed, "BLOCK_TOKENS", 8)
    numbers = segment_1T, segment_1T, positions(segment_1T, segment_1T)
    visits = jit(functools.partial(packed._visits, window=window, tile_tokens=8))
    assert visits(*numbers).count_Q.tolist() == visited


@pytest.mark.parametrize("few", [0, flash_gpu.FEW])
def test_bfloat16_is_as_near_to_float32_on_a_gpu_as_plain_attention_is(few, monkeypatch):
    """Gradients of a key are summed over its query heads in float32, in a program or behind it."""
    monkeypatch.setattr(flash_gpu, "FEW", few)
    given = arrays(ODD, heads=(14, 2, 2), head_dim=64)
    rounded = [jnp.asarray(array, jnp.bfloat16) for array in given]
    exact = value_and_gradient(ROWS["packed"], given, ODD)[1]
    ours, plain = (
        [
            np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want)
            for got, want in zip(value_and_gradient(attend, rounded, ODD)[1], exact, strict=True)
        ]
        for attend in (ROWS["flash"], ROWS["packed"])
    )
    assert np.all(np.array(ours) < 1.2 * np.array(plain))


def test_what_is_kept_for_the_backward_pass_is_not_computed_a_second_time():
    """Six of a layer's 7 products are needed again; in bfloat16 each has a gradient of its own.

    Attention has three more.
    """
    segment_BT, branch_BT = SHORT
    graph, params = abstract_params(Qwen2Config(16, 32, 16, 1, 4, 2, 8, True))

    def computed(remat):
        def scalar(params):
            attend = lambda *qkv, window: packed.packed_attention(*qkv, segment_BT, branch_BT)  # noqa: E731
            execution = Execution(remat=remat, weights=Weights(dtype="bfloat16"))
            x_BTD, _ = nnx.merge(graph, params).hidden(segment_BT, branch_BT, attend, execution)
            return jnp.sum(jnp.sin(x_BTD))

        text = str(jax.make_jaxpr(jax.grad(scalar))(params))
        return np.array([text.count(f" {name}[") for name in ("dot_general", "while")])

    again = {remat: tuple((computed(remat) - computed("none")).tolist()) for remat in REMAT}
    kept = {"none": (0, 0), "keep_products": (0, 0), "keep_attention": (6, 0)}
    assert again == kept | {"full": (9, 1), "offload": (9, 1)}


def near_pages(q_BNH, recent, recent_tokens_B, *given, window):
    """Attends as the kernels do, by plain XLA; what is dead in its pages has to be finite."""
    prompt_pool, pool, page_BX, prompt_tokens_B, tokens_B = given
    filled_B1 = -(-prompt_tokens_B // pool[1].shape[2])[:, None]
    place_BX = jnp.minimum(filled_B1 + jnp.arange(page_BX.shape[1]), page_BX.shape[1] - 1)
    response_BX = jnp.take_along_axis(page_BX, place_BX, axis=1)
    table = PageTable(page_BX, response_BX, prompt_tokens_B, tokens_B, None)
    C, B = pool[1].shape[2], len(q_BNH)
    pools = [[jnp.nan_to_num(a, nan=9.0) for a in pool] for pool in (prompt_pool, pool)]
    current_B = response_BX[jnp.arange(B), jnp.minimum(tokens_B // C, response_BX.shape[1] - 1)]
    page = [
        jnp.concatenate([array_P[current_B], block], axis=axis)
        for array_P, block, axis in zip(pools[1], recent, (3, 2), strict=True)
    ]
    attend = near_attention(*pools, table, block_tokens=recent[1].shape[2], window=window)
    return attend(q_BNH, page, recent_tokens_B)


PAGES = {  # heads, key heads, head size, tokens of a page, dtype
    "xla": (near_pages, (6, 2, 16, 16, WHOLE)),
    "gpu, groups of 5": (paged_gpu, (10, 2, 16, 16, WHOLE)),
    "gpu, more heads than rows": (paged_gpu, (20, 1, 16, 16, WHOLE)),
    "gpu, the same in bfloat16": (paged_gpu, (20, 1, 16, 16, HALF)),
    "gpu, pages of two tiles": (paged_gpu, (14, 2, 16, 64, HALF)),
    "gpu, the same in float32": (paged_gpu, (14, 2, 16, 64, WHOLE)),
    "tpu, grouped": (paged_tpu, (6, 2, 16, 16, WHOLE)),
    "tpu, one key head": (paged_tpu, (5, 1, 128, 64, HALF)),
    "tpu, heads of their own": (paged_tpu, (3, 3, 64, 48, WHOLE)),
    # The head is small and the page is not: on TPU its tokens are stored last.
    "tpu, tokens last": (paged_tpu, (14, 2, 64, 128, HALF)),
}


def case(name, *, window=None, jit=jit, **how):
    kernel, sizes = PAGES[name]
    if name != "xla":
        kernel = functools.partial(kernel.paged_attention, **{"interpret": True} | how)
    return make_pages(jit(functools.partial(kernel, window=window)), *sizes, window)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "window"),
    [
        *((name, None) for name in [*PAGES][1:]),
        *((name, 33) for name in ("gpu, pages of two tiles", "tpu, tokens last")),
        *((name, w) for name in ("xla", "gpu, groups of 5", "tpu, grouped") for w in (33, 16, 1)),
    ],
)
def test_attention_over_pages_equals_the_definition(name, window):
    """One softmax over all that a slot sees; pages that lie before a window hold NaN."""
    pages = case(name, window=window)
    q_BNH, out_BNH = pages.given["q_BNH"], pages()
    assert out_BNH.dtype == q_BNH.dtype
    # In bfloat16 the weights are rounded once more than in the reference, and the result is.
    rounding = 1e-5 if q_BNH.dtype == jnp.float32 else 1e-2
    _, N, H = q_BNH.shape
    for q_NH, out_NH, parts in zip(q_BNH, out_BNH, pages.parts_B, strict=True):
        seen_2KSH = np.concatenate(parts, axis=2)[:, :, -(window or 0) :]
        k_NSH, v_NSH = np.repeat(seen_2KSH.astype(np.float32), N // seen_2KSH.shape[1], axis=1)
        score_NS = np.einsum("NH,NSH->NS", q_NH.astype(np.float32), k_NSH) / np.sqrt(H)
        weight_NS = np.exp(score_NS) / np.exp(score_NS).sum(axis=1, keepdims=True)
        expected_NH = np.einsum("NS,NSH->NH", weight_NS, v_NSH)
        np.testing.assert_allclose(
            out_NH.astype(np.float32), expected_NH, rtol=rounding, atol=rounding
        )


as_run = functools.partial(jax.jit, compiler_options=OPTIONS["cpu"])


def same_in_rows(pages: Pages, attend, multiple: int):
    """Attends in rows to what the slots of pages see: out_BNH of their queries.

    Prompts and responses begin at multiples of so many tokens, with anything between them. Where
    they begin anywhere, responses of one prompt stand behind it side by side.
    """
    rng, q_BNH = np.random.default_rng(2), pages.given["q_BNH"]
    T = 16 * pages.given["pool"][1].shape[2]
    K, H = pages.parts_B[0][0].shape[1:4:2]
    q, *kv = (rng.normal(size=(5, T, n, H)).astype(q_BNH.dtype) for n in (q_BNH.shape[1], K, K))
    segment_BT, branch_BT, position_BT = np.zeros((3, 5, T), np.int32)
    row = end = segment = 0
    at_B = []
    for b, parts in enumerate(pages.parts_B):
        lengths = [part.shape[2] for part in parts]
        again = multiple == 1 and parts[0] is pages.parts_B[b - 1][0]
        segment += not again
        end = -(-end // multiple) * multiple
        starts = end, end + (not again) * -(-lengths[0] // multiple) * multiple
        if starts[1] + lengths[1] > T:
            row, starts = row + 1, (0, starts[1] - end)
        for branch in range(again, 2):
            part, start = parts[branch], starts[branch]
            end = start + lengths[branch]
            segment_BT[row, start:end], branch_BT[row, start:end] = segment, branch * (b + 1)
            position_BT[row, start:end] = branch * lengths[0] + np.arange(end - start)
            for array, part_KSH in zip(kv, part, strict=True):
                array[row, start:end] = part_KSH.swapaxes(0, 1)
        q[row, end - 1] = q_BNH[b]
        at_B.append((row, end - 1))
    out_BTNH = np.asarray(as_run(attend)(q, *kv, segment_BT, branch_BT, position_BT))
    return np.stack([out_BTNH[at] for at in at_B])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "window"),
    [
        *(("tpu, grouped", window) for window in (None, 33, 1)),
        *(("tpu, one key head", 33), ("tpu, heads of their own", None)),
        *(("gpu, the same in bfloat16", window) for window in (None, 33)),
        *(("gpu, the same in float32", window) for window in (None, 70)),
    ],
)
def test_rows_and_pages_give_the_same_bits(name, window):
    """The learner's attention and the sampler's, in tiles of a page."""
    pages = case(name, window=window, jit=as_run)
    C = pages.given["pool"][1].shape[2]
    kernel, multiple = ("flash", 1) if name.startswith("gpu") else ("flash_tpu", C)
    attend = functools.partial(ROWS[kernel], window=window, tile_tokens=C)
    np.testing.assert_array_equal(same_in_rows(pages, attend, multiple), pages())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["gpu, pages of two tiles", "tpu, grouped"])
def test_a_slot_depends_on_itself_alone(name):
    """Bitwise: not on its place in the batch, other slots or the table's width."""
    pages, same_bits = case(name), np.testing.assert_array_equal
    given, expected = pages.given, pages()
    B = len(expected)
    slot_B = np.random.default_rng(1).permutation(B)
    names = ("q_BNH", "recent_tokens_B", "page_BX", "prompt_tokens_B", "tokens_B")
    others = {name: given[name][slot_B] for name in names}
    same_bits(pages(**others, recent=tuple(x[slot_B] for x in given["recent"])), expected[slot_B])

    alone = np.arange(B) == 5
    idle = {name: given[name] * alone for name in ("tokens_B", "prompt_tokens_B")}
    same_bits(pages(**idle)[5], expected[5])
    nan = np.where(alone[:, None, None], given["q_BNH"], given["q_BNH"].dtype.type(np.nan))
    same_bits(pages(q_BNH=nan)[5], expected[5])
    wide = np.concatenate([given["page_BX"], np.zeros((B, 9), np.int32)], axis=1)
    same_bits(pages(page_BX=wide), expected)


@pytest.mark.usefixtures("small")
def test_a_tpus_reads_are_waited_for_and_in_bounds(capfd):
    """The simulated TPU raises on reads past an array and reports races with arithmetic."""
    simulated = case("tpu, grouped", interpret=pltpu.InterpretParams(detect_races=True))()
    np.testing.assert_array_equal(simulated, case("tpu, grouped")())
    assert "RACE" not in capfd.readouterr().out


def pool(pages, H, C):
    rng = np.random.default_rng(pages)
    shapes = ((pages, 2, H, C), (pages, 2, C, H))
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


@pytest.mark.parametrize("kernels", ["gpu", "tpu_interpret"])
@pytest.mark.parametrize("S", [4, 32])
def test_a_block_is_written_to_its_page_and_nowhere_else(kernels, S):
    page_B, offset_B = np.array([3, 0, 8, 0]), np.random.default_rng(0).integers(0, 32 // S, 4) * S
    before, new = pool(9, 64, 32), pool(4, 64, S)
    expected = [np.array(a) for a in before]
    for b, (page, offset) in enumerate(zip(page_B, offset_B, strict=True)):
        expected[0][page, :, :, offset : offset + S] = new[0][b]
        expected[1][page, :, offset : offset + S] = new[1][b]
    found = KERNELS[kernels].write_pages(*before, *new, page_B, offset_B)
    for ours, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours[1:], wanted[1:])  # page 0 is nobody's


@pytest.mark.parametrize(("H", "C"), [(64, 128), (128, 16)])
def test_a_tpu_copies_pages_as_plain_xla_does(H, C):
    """Pages of a small pool go to places of a large one, in every layout; the rest stays."""
    large, few = pool(9, H, C), pool(4, H, C)
    where = jnp.array([7, 0, 2, 0]), jnp.array([3, 1, 0, 2])
    found, wanted = (
        KERNELS[name].copy_pages(large, few, *where) for name in ("tpu_interpret", "xla")
    )
    for ours, theirs, before, new in zip(found, wanted, large, few, strict=True):
        np.testing.assert_array_equal(ours[1:], theirs[1:])  # page 0 gets one of two
        np.testing.assert_array_equal(ours[jnp.array([7, 2])], new[jnp.array([3, 0])])
        np.testing.assert_array_equal(ours[1], before[1])


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("make", [compiled_kernels.rows, compiled_kernels.pages])
def test_what_only_a_gpu_would_round_or_overflow(make, monkeypatch, capsys):
    """Read from the programs, as no interpreter shows it: no TF32, and offsets of 64 bits."""
    pallas = paged_gpu.triton.pl
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, debug=True))
    mesh = of_an_h100(make_mesh(data=1, model=1, devices=jax.devices()[:1]))
    (heads,) = (it for it in HEADS[make.__name__, "gpu"] if it[0] == 40)
    run, arguments = make(KERNELS["gpu"], heads, mesh)
    with an_h100():
        text = run.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.split("\n") if "xla.gpu.triton" in line]
    programs = capsys.readouterr().out.split("The Triton module for pallas_call ")[1:]
    dots = [program.count("tt.dot") for program in programs]
    assert not any("tf32" in program for program in programs)
    if make is compiled_kernels.rows:
        assert dots == [4, 6, 8]
        return
    (k_PKHC, _), _ = arguments[1]
    assert k_PKHC.dtype == jnp.float32 and k_PKHC.size * k_PKHC.dtype.itemsize > 2**32
    assert len(programs) == len(calls) == 2 * 2 and all(dots)
    assert all("xi64>" in program for program in programs)


def compiled(target, *kinds, **environment):
    """(bytes of queries or of a pool, the program's own, TPU kernels, split ones) of each heads."""
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = ran(ROOT / "tests" / "compiled_kernels.py", target, *kinds, **environment)
    return [tuple(map(int, line.split()[-4:])) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not LIBTPU.exists(), reason="needs the TPU's compiler: `make preflight`")
@pytest.mark.parametrize("tpu", ["v5p:2x2x1", pytest.param("v5e:2x2", marks=pytest.mark.slow)])
def test_a_tpus_kernels_compile(tpu):
    """VMEM holds blocks of their real size, and the program's own memory holds no pool's copy."""
    (*_, calls, split), *pages = compiled(tpu, "rows", "pages")
    assert (calls, split) == (2, 2)
    assert len(pages) == len(HEADS["pages", "tpu"])
    assert all(own < size / 8 and calls >= 6 for size, own, calls, _ in pages), pages


@pytest.mark.slow
@pytest.mark.skipif(
    not CUDA.is_dir() or jax.__version_info__ >= (0, 11),
    reason="needs the GPU's compiler, `make preflight TOPOLOGY=h100:1`, and JAX 0.10, which does "
    "not look for a GPU",
)
@pytest.mark.parametrize(("what", "most"), [("rows", 12), ("pages", 1 / 4)])
def test_a_gpus_kernels_compile(what, most, tmp_path):
    """Tiles fit on the chip and in registers; memory is linear in the row and holds no pool.

    Sums of a split, at most 256 bytes a thread, may wait in memory with what is beside them; the
    values of a loop over tiles are more.
    """
    lines = compiled("gpu", what, XLA_FLAGS=f"--xla_dump_to={tmp_path}")
    assert len(lines) == len(GPUS) * len(HEADS[what, "gpu"])
    assert all(own < most * size for size, own, *_ in lines), lines
    spilled = []
    for ptx in tmp_path.glob("*.ptx") if what == "rows" else ():
        (gpu,) = re.findall(r"\.target (\w+)", ptx.read_text())
        command = [CUDA / "nvidia/cu13/bin/ptxas", "-v", f"-arch={gpu}", "-o", os.devnull, ptx]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        spilled += map(int, re.findall(r"(\d+) bytes spill stores", said))
    assert what == "pages" or max(spilled) <= 512, spilled


def stepped(kernels):
    """A step of plain XLA's programs or an accelerator's: (programs, samples, changes, metrics)."""
    sizes = {"max_prompt_tokens": 17, "max_response_tokens": 20, "page_tokens": 16}
    how = {"model": {"preset": "small", "kernels": kernels}, "mesh": {"data": 2, "model": 2}}
    built = programs("qwen2", "", **how, rollout=sizes, learner={"row_tokens": 160})
    before, groups, _, state, metrics = step(
        built, prompts={0: PROMPTS[0], 100: PROMPTS[100]} | TWO
    )
    changes = jax.tree.map(lambda after, before: np.asarray(after) - before, state.params, before)
    return built, by_request(groups), jax.tree_util.tree_leaves_with_path(changes), metrics


def test_a_gpus_kernels_sample_and_train_as_plain_xla_does(monkeypatch):
    """A whole step with its programs, interpreted: the same tokens, the rest to rounding.

    That a TPU's learner computes what its sampler recorded is in test_exact.py.
    """
    traced = []
    monkeypatch.setattr(triton, "split_tokens", lambda tokens: traced.append(tokens) or tokens)
    monkeypatch.setitem(PRESETS, "small", Qwen2Config(64, 64, 128, 2, 4, 2, 16, True))
    monkeypatch.setattr(jax, "jit", jit)
    _, expected, expected_changes, expected_metrics = stepped("xla")
    assert not traced
    built, responses, changes, metrics = stepped("gpu_interpret")
    attend = built.settings.kernels.attend_pages
    assert traced and attend is KERNELS["gpu_interpret"].attend_pages
    assert responses.keys() == expected.keys() and len(responses) == 16
    for request, response in responses.items():
        wanted, close = expected[request], {"rtol": 1e-5, "atol": 1e-5}
        np.testing.assert_array_equal(response.tokens_T, wanted.tokens_T)
        np.testing.assert_allclose(response.behavior_logp_T, wanted.behavior_logp_T, **close)
    assert metrics["grad_norm"] > 0.01
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for (path, found), (_, wanted) in zip(changes, expected_changes, strict=True):
        # Softmax does not see a key's bias: Adam makes its step of a gradient that is rounding.
        rounding = 1e-2 if "k_bias" in str(path) else 1e-4
        error = np.linalg.norm(found - wanted)
        assert error < rounding * np.linalg.norm(found) + 1e-9, path
