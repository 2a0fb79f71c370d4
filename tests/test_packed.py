"""Attention of packed rows against the definition: one softmax over what a token may look at."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import gemma3
from models.kernels import packed
from models.kernels.packed import packed_attention
from models.kernels.xla import attention
from models.precision import Weights
from models.qwen2 import Qwen2Config
from models.transformer import REMAT, abstract_params
from tests.packed_rows import positions
from tests.quick import jit, random_params

N, K, H = 4, 2, 8
B, T = 3, 46  # of all rows, so that they share their programs


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that small rows have many, and several are computed together, at last fewer."""
    monkeypatch.setattr(packed, "BLOCK_TOKENS", 4)
    monkeypatch.setattr(packed, "BLOCKS", 5)


def numbered(*rows):
    """(segment_BT, branch_BT) of rows of pieces (prompt entries, [entries of each response])."""
    segment_BT, branch_BT = np.zeros((2, B, T), np.int32)
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


ROWS = {
    "one sequence": numbered([(5, [14])]),
    "plain segments": numbered([(9, []), (1, []), (12, [])], [(3, []), (7, [])]),
    "shared prompts": numbered(
        [(6, [5, 1, 9]), (0, [2, 2])], [(17, [1, 1, 3])], [(1, [8]), (3, [4, 13])]
    ),
    "many branches": numbered([(3, [2] * 20)], [(13, [1])]),
}


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(B, T, heads, H)).astype(dtype) for heads in (N, K, K)]


def definition(q_BTNH, k_BTKH, v_BTKH, segment_BT, branch_BT, position_BT, window):
    index_T = np.arange(segment_BT.shape[1])
    same_BTS = segment_BT[:, :, None] == segment_BT[:, None, :]
    prompt_BTS = (branch_BT == 0)[:, None, :]
    own_BTS = branch_BT[:, :, None] == branch_BT[:, None, :]
    seen_BTS = same_BTS & (prompt_BTS | own_BTS) & (index_T[:, None] >= index_T)
    if window is not None:
        seen_BTS &= position_BT[:, :, None] - position_BT[:, None] < window
    return attention(q_BTNH, k_BTKH, v_BTKH, jnp.asarray(seen_BTS))


@functools.cache
def value_and_gradient(function, window=None):
    """A compiled function of q, k, v and the rows.

    It gives a scalar that depends on every entry in use, out_BTNH, and the scalar's gradient.
    """

    def scalar(q_BTNH, k_BTKH, v_BTKH, *rows):
        out_BTNH = function(q_BTNH, k_BTKH, v_BTKH, *rows, window)
        used_BT11 = (rows[0] > 0)[..., None, None]
        wave_BTNH = jnp.cos(jnp.arange(out_BTNH.size).reshape(out_BTNH.shape))
        return jnp.sum(jnp.sin(out_BTNH.astype(jnp.float32)) * wave_BTNH * used_BT11), out_BTNH

    return jit(jax.value_and_grad(scalar, argnums=(0, 1, 2), has_aux=True))


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients_are_the_definitions(name, window):
    """A window is counted by position: a response of a prompt stands behind others of it."""
    rows = *ROWS[name], positions(*ROWS[name])
    ours, defined = (value_and_gradient(f, window) for f in (packed_attention, definition))
    (value, out_BTNH), gradient = jax.device_get(ours(*inputs(), *rows))
    (expected, expected_BTNH), expected_gradient = jax.device_get(defined(*inputs(), *rows))
    used_BT = rows[0] > 0
    np.testing.assert_allclose(out_BTNH[used_BT], expected_BTNH[used_BT], atol=2e-6)
    assert not out_BTNH[~used_BT].any()
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for got, want in zip(gradient, expected_gradient, strict=True):
        assert np.abs(want).max() > 0.01 or window == 1  # where the weight of a key is 1
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_window_wider_than_the_row_gives_the_bits_of_none():
    rows = *ROWS["shared prompts"], positions(*ROWS["shared prompts"])
    wide, none = (value_and_gradient(packed_attention, w)(*inputs(), *rows) for w in (T, None))
    jax.tree.map(np.testing.assert_array_equal, wide, none)


@functools.cache
def gradient_through_layers(remat):
    """(compiled gradient of a model's hidden states, its parameters)."""
    rows = ROWS["shared prompts"]
    config = Qwen2Config(16, N * H, 16, 2, N, K, H, True)
    graph, params = random_params(config)
    tokens_BT = np.random.default_rng(0).integers(0, 16, (B, T))

    def scalar(params):
        x_BTD, _ = nnx.merge(graph, params).hidden(
            tokens_BT, rows[1], lambda *qkv: packed_attention(*qkv, *rows), remat=remat
        )
        return jnp.sum(jnp.sin(x_BTD) * (rows[0] > 0)[..., None])

    return jit(jax.grad(scalar)).lower(params).compile(), params


@pytest.mark.parametrize("remat", [name for name in REMAT if name != "none"])
def test_what_is_kept_for_the_backward_pass_changes_no_gradient(remat):
    """And attention that is kept is not computed a second time."""
    (kept, params), (again, _) = gradient_through_layers("none"), gradient_through_layers(remat)
    for got, want in zip(*(jax.tree.leaves(run(params)) for run in (again, kept)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    loops, all_loops = (run.as_text().count(" while(") for run in (again, kept))
    assert (loops == all_loops) == (remat in ("keep_attention", "keep_products"))


@pytest.mark.parametrize(("remat", "again"), [("none", 0), ("keep_products", 0), ("full", 6)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_that_are_kept_are_not_computed_a_second_time(remat, again, dtype):
    """A layer has 7 products forward; the backward pass needs 6 of them, beside its own 14.

    In bfloat16 a product has a gradient of its own (models.precision), and a policy that looks for
    products did not see it: keep_products kept nothing.
    """
    config = Qwen2Config(16, N * H, 16, 1, N, K, H, True)
    graph, params = abstract_params(config)
    tokens_BT = np.zeros((B, T), np.int32)

    def scalar(params):
        hidden, _ = nnx.merge(graph, params).hidden(
            *(tokens_BT, tokens_BT, lambda q, k, v: q * jnp.mean(k * v)),
            remat=remat,
            weights=Weights(dtype=dtype),
        )
        return jnp.sum(jnp.sin(hidden))

    jaxpr = jax.make_jaxpr(jax.grad(scalar))(params)
    assert str(jaxpr).count(" dot_general[") == 7 + again + 14


def test_blocks_that_see_nothing_of_each_other_are_not_computed(monkeypatch):
    """A row of short sequences visits pairs of blocks in proportion to the row, not its square."""
    monkeypatch.setattr(packed, "BLOCK_TOKENS", 8)
    counts = jit(lambda *rows: packed._pairs(*rows).count_Q)
    for length in (64, 256):
        segment_BT = np.repeat(np.arange(1, length // 8 + 1), 8)[None]
        assert counts(segment_BT, np.zeros_like(segment_BT)).tolist() == [1] * (length // 8)
    one_BT = np.ones((1, 64), int)
    assert counts(one_BT, one_BT).tolist() == list(range(1, 9))


def test_with_gemmas_windows_few_blocks_are_visited(monkeypatch):
    """All layers of 1B visit 3/8 of full attention's blocks in a row of 4,096 tokens.

    A window of 512 visits 9 blocks of 64 tokens for one of queries, its own included.
    """
    monkeypatch.setattr(packed, "BLOCK_TOKENS", 64)
    one_BT = np.ones((1, 4_096), np.int32)
    rows, visits = (one_BT, one_BT, np.arange(4_096)[None]), {}
    for window in (None, 512):
        count_Q = jit(lambda *rows, w=window: packed._pairs(*rows, window=w).count_Q)(*rows)
        visits[window] = int(count_Q.sum())
    assert visits[None] == 64 * 65 // 2
    assert visits[512] == sum(min(i + 1, 9) for i in range(64))
    of_layers = [visits[kind.window] for kind in gemma3.PRESETS["1b"].kinds]
    assert sum(of_layers) <= 0.4 * len(of_layers) * visits[None]
