"""Flash attention inside packed rows: Pallas kernels for TPU, forward and backward, with segments.

A row's tiles of keys (`tiles`) begin at multiples of a tile's tokens; their sums are of the rounded
weights. A grid step computes a block of queries with a block of keys (Dao et al. 2022, arXiv
2205.14135), and is told at run time which blocks hold two tokens of one segment. No branches are
known: every response needs its prompt to itself.

Axis letters beside the model's: S keys and Q queries of a block, C keys of a tile, I blocks of
queries, J blocks of keys, G = N / K. Scores have keys first: so a power of each query takes few
registers, and is the maximum over rows.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.kernels.pages_tpu import LANES
from models.kernels.tiles import LEAST, MASKED, added
from models.kernels.xla import ATTENTION, like, padded

# Smaller blocks hold fewer pairs of different segments, but the kernels have a step for each block,
# visited or not. Blocks of 2,048 do not fit the 16 MiB of VMEM that a kernel may have on v5e.
BLOCK_TOKENS = 1024
ONES = 16  # rows of a register of bfloat16


def visited_blocks(segment_BT, block: int, window: int | None = None):
    """Says which blocks [B, queries, keys] of rows the kernels visit: bool.

    Those that may hold a pair of one segment whose key is not behind its query, nor `window` places
    before it, and all on the diagonal. T must be a multiple of block; the numbers of segments rise
    along a row.
    """
    segment_BIS = segment_BT.reshape(len(segment_BT), -1, block)
    least_BI = jnp.where(segment_BIS > 0, segment_BIS, jnp.iinfo(jnp.int32).max).min(axis=2)
    visited_BIJ = least_BI[:, :, None] <= segment_BIS.max(axis=2)[:, None]
    visited_BIJ = jnp.tril(visited_BIJ | jnp.eye(visited_BIJ.shape[1], dtype=bool))
    if window is None:
        return visited_BIJ
    begin_I = block * jnp.arange(visited_BIJ.shape[1])
    return visited_BIJ & (begin_I[:, None] - (begin_I + block - 1) < window)


def fetched_blocks(visited_IJ):
    """Says which keys (forward), queries (backward) lie in memory at each step: [I, J] x 2.

    At a step that visits nothing it is those that are visited next, which arrive meanwhile, or
    still the last ones.
    """
    i_I1, j_J = jnp.arange(len(visited_IJ))[:, None], jnp.arange(len(visited_IJ))
    first_I1 = i_I1 + 1 - jnp.sum(visited_IJ, axis=1, keepdims=True)
    last_J = j_J - 1 + jnp.sum(visited_IJ, axis=0)
    keys_IJ = jnp.where(j_J > i_I1, jnp.roll(first_I1, -1), jnp.maximum(j_J, first_I1))
    return keys_IJ, jnp.clip(i_I1, j_J, last_J)


class _How(NamedTuple):
    block: int
    tile_tokens: int
    window: int | None
    interpret: bool


def flash_attention(
    q_BTNH,
    k_BTKH,
    v_BTKH,
    segment_BT,
    branch_BT,
    position_BT=None,
    window: int | None = None,
    *,
    tile_tokens: int = LANES,
    interpret: bool = False,
):
    """Attends inside whole rows: out_BTNH in the queries' dtype, zero for padding.

    Token t looks at the tokens s <= t of its segment; with a window at those alone whose position
    is less than `window` before its own. Positions, by default places, rise along a segment, which
    holds less than a tile of padding between its tokens. `branch_BT` is not read: no segment may
    have more than one branch beside its prompt.
    """
    tokens = q_BTNH.shape[1]
    block = min(BLOCK_TOKENS // tile_tokens or 1, pl.cdiv(tokens, tile_tokens)) * tile_tokens
    pad = functools.partial(padded, multiple=block)
    if position_BT is None:
        position_BT = jnp.broadcast_to(jnp.arange(tokens), segment_BT.shape)
    segment_BT, position_BT = pad(segment_BT), pad(position_BT)
    places = None if window is None else window + tile_tokens - 1
    row_B = (
        *(pad(a).swapaxes(1, 2) for a in (q_BTNH, k_BTKH, v_BTKH)),
        jnp.stack([segment_BT, position_BT], axis=1),
        jnp.stack([jnp.where(segment_BT > 0, segment_BT, -1), position_BT], axis=2),
        visited_blocks(segment_BT, block, places),
    )
    attend = functools.partial(_attention, _How(block, tile_tokens, window, interpret))
    return jax.lax.map(lambda row: attend(*row), row_B).swapaxes(1, 2)[:, :tokens]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(how: _How, *row):
    return _forward(how, *row)[0]


def _specs(how: _How, group: int, query, key):
    """Says which blocks a step has: of queries, of keys, of their numbers, and a row of numbers.

    query, key: the place of either by a step's indices.
    """
    one = how.block

    def of(index, *shape, head=lambda n: (n,)):
        return pl.BlockSpec(shape, lambda n, *step: (*head(n), *index(*step)))

    of_query, of_key = (lambda *step: (query(*step), 0)), (lambda *step: (key(*step), 0))
    return (
        lambda H: of(of_query, None, one, H),
        lambda H: of(of_key, None, one, H, head=lambda n: (n // group,)),
        of(lambda *step: (0, query(*step)), 2, one, head=lambda n: ()),
        of(of_key, one, 2, head=lambda n: ()),
        of(lambda *step: (0, query(*step)), None, 1, one),
    )


def _call(kernel, how: _How, grid, ins, outs, out_shape, scratch, arrays):
    return pl.pallas_call(
        functools.partial(kernel, how=how),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=grid, in_specs=ins, out_specs=outs, scratch_shapes=scratch
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        interpret=how.interpret,
        name=kernel.__name__.strip("_"),
    )(*arrays)


def _forward(how: _How, q_NTH, k_KTH, v_KTH, number_2T, number_T2, visited_IJ):
    (N, T, H), I = q_NTH.shape, len(visited_IJ)
    keys_IJ, _ = fetched_blocks(visited_IJ)
    of_q, of_k, of_2T, of_T2, of_1T = _specs(
        how, N // len(k_KTH), lambda i, j, *_: i, lambda i, j, keys_ref, _: keys_ref[i, j]
    )
    out_NTH, norm_N1T = _call(
        _flash_forward,
        how,
        (N, I, I),
        [of_q(H), of_k(H), of_k(H), of_2T, of_T2],
        [of_q(H), of_1T],
        [like(q_NTH), like(q_NTH, (N, 1, T), jnp.float32)],
        [pltpu.VMEM((n, how.block), jnp.float32) for n in (1, H + ONES)],
        (keys_IJ, visited_IJ.astype(jnp.int32), q_NTH, k_KTH, v_KTH, number_2T, number_T2),
    )
    out_NTH, norm_N1T = (checkpoint_name(a, ATTENTION) for a in (out_NTH, norm_N1T))
    return out_NTH, (q_NTH, k_KTH, v_KTH, number_2T, number_T2, visited_IJ, out_NTH, norm_N1T)


def _flash_forward(
    _,
    visited_ref,
    q_ref,
    k_ref,
    v_ref,
    number_2Q_ref,
    number_S2_ref,
    out_ref,
    norm_ref,
    power_ref,
    sums_ref,
    *,
    how: _How,
):
    """Adds a block of keys, tile by tile; the last rows of the sums are those of the weights."""
    i, j, H = pl.program_id(1), pl.program_id(2), q_ref.shape[1]

    @pl.when(j == 0)
    def _():
        power_ref[...] = jnp.full_like(power_ref, LEAST)
        sums_ref[...] = jnp.zeros_like(sums_ref)

    @pl.when(visited_ref[i, j] > 0)
    def _():
        x_SQ = _scores(q_ref, k_ref)
        for start in range(0, how.block, how.tile_tokens):
            tile = slice(start, start + how.tile_tokens)
            # The first maximum keeps a compiler from fusing product and difference: it rounds less.
            seen_CQ = _seen(how, number_2Q_ref, number_S2_ref[tile])
            x_CQ = jnp.where(seen_CQ, jnp.maximum(x_SQ[tile], MASKED), MASKED)
            power_1Q = jnp.maximum(jnp.ceil(x_CQ.max(axis=0, keepdims=True)), LEAST)
            weight_CQ = jnp.exp2(x_CQ - power_1Q).astype(v_ref.dtype)
            ones = jnp.ones((ONES, how.tile_tokens), v_ref.dtype)
            v_LC = jnp.concatenate([v_ref[tile].T, ones])
            sums_LQ = _dot(v_LC, weight_CQ, (1, 0))
            power_ref[...], sums_ref[...] = added(
                (power_ref[...], sums_ref[...]), (power_1Q, sums_LQ)
            )

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        sum_1Q = sums_ref[H : H + 1]
        sum_1Q = jnp.where(sum_1Q > 0, sum_1Q, 1.0)
        out_ref[...] = (sums_ref[:H] / sum_1Q).T.astype(out_ref.dtype)
        norm_ref[...] = power_ref[...] + jnp.log2(sum_1Q)


def _backward(how: _How, residuals, d_out_NTH):
    q_NTH, k_KTH, v_KTH, number_2T, number_T2, visited_IJ, out_NTH, norm_N1T = residuals
    (N, T, H), I = q_NTH.shape, len(visited_IJ)
    dot_N1T = jnp.sum(d_out_NTH.astype(jnp.float32) * out_NTH.astype(jnp.float32), axis=-1)[:, None]
    _, queries_IJ = fetched_blocks(visited_IJ)
    of_q, of_k, of_2T, of_T2, of_1T = _specs(
        how, N // len(k_KTH), lambda j, i, queries_ref, _: queries_ref[i, j], lambda j, i, *_: j
    )
    of_part = pl.BlockSpec((None, None, how.block, H), lambda n, j, i, *_: (j, n, i, 0))
    of_head = pl.BlockSpec((None, how.block, H), lambda n, j, i, *_: (n, j, 0))
    d_q_JNTH, *d_keys = _call(
        _flash_backward,
        how,
        (N, I, I),
        [of_q(H), of_q(H), of_1T, of_1T, of_k(H), of_k(H), of_2T, of_T2],
        [of_part, of_head, of_head],
        [like(q_NTH, (I, N, T, H)), like(q_NTH), like(q_NTH)],
        [pltpu.VMEM((how.block, H), jnp.float32)] * 2,
        (
            *(queries_IJ, visited_IJ.astype(jnp.int32), q_NTH, d_out_NTH, norm_N1T, dot_N1T),
            *(k_KTH, v_KTH, number_2T, number_T2),
        ),
    )
    # Each head writes its own, as those of a chip with two cores are split over them.
    d_k_KTH, d_v_KTH = (a.reshape(len(k_KTH), -1, T, H).sum(axis=1) for a in d_keys)
    return d_q_JNTH.sum(axis=0), d_k_KTH, d_v_KTH, None, None, None


def _flash_backward(
    _,
    visited_ref,
    q_ref,
    d_out_ref,
    norm_ref,
    dot_ref,
    k_ref,
    v_ref,
    number_2Q_ref,
    number_S2_ref,
    d_q_ref,
    d_k_ref,
    d_v_ref,
    d_k_sum_ref,
    d_v_sum_ref,
    *,
    how: _How,
):
    """Computes a block's weights again, and from them a part of each gradient."""
    j, i, scale = pl.program_id(1), pl.program_id(2), q_ref.shape[1] ** -0.5

    @pl.when(i == 0)
    def _():
        d_k_sum_ref[...] = jnp.zeros_like(d_k_sum_ref)
        d_v_sum_ref[...] = jnp.zeros_like(d_v_sum_ref)

    d_q_ref[...] = jnp.zeros_like(d_q_ref)

    @pl.when(visited_ref[i, j] > 0)
    def _():
        weight_SQ = jnp.exp2(_scores(q_ref, k_ref) - norm_ref[...])
        weight_SQ = jnp.where(_seen(how, number_2Q_ref, number_S2_ref[...]), weight_SQ, 0.0)
        d_v_sum_ref[...] += _dot(weight_SQ.astype(q_ref.dtype), d_out_ref[...], (1, 0))
        d_weight_SQ = _dot(v_ref[...], d_out_ref[...], (1, 1))
        d_score_SQ = (weight_SQ * (d_weight_SQ - dot_ref[...])).astype(q_ref.dtype)
        d_k_sum_ref[...] += _dot(d_score_SQ, q_ref[...], (1, 0))
        d_q_HQ = _dot(k_ref[...], d_score_SQ, (0, 0)) * scale
        d_q_ref[...] = d_q_HQ.T.astype(d_q_ref.dtype)

    @pl.when(i == pl.num_programs(2) - 1)
    def _():
        d_k_ref[...] = (d_k_sum_ref[...] * scale).astype(d_k_ref.dtype)
        d_v_ref[...] = d_v_sum_ref[...].astype(d_v_ref.dtype)


def _scores(q_ref, k_ref):
    """Computes x_SQ, of which 2^x is a weight."""
    scale = math.log2(math.e) * q_ref.shape[1] ** -0.5
    return _dot(k_ref[...], q_ref[...], (1, 1)) * scale


def _seen(how: _How, number_2Q_ref, number_S2):
    """Says what queries see, by segments and positions: seen_SQ."""
    distance_SQ = number_2Q_ref[1:] - number_S2[:, 1:]
    seen_SQ = (number_2Q_ref[:1] == number_S2[:, :1]) & (distance_SQ >= 0)
    return seen_SQ if how.window is None else seen_SQ & (distance_SQ < how.window)


def _dot(a, b, axes: tuple[int, int]):
    """Multiplies matrices in float32, summing over an axis of each."""
    return lax.dot_general(
        a, b, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.float32
    )


_attention.defvjp(_forward, _backward)
