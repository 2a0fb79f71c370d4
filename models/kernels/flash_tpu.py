"""Flash attention inside packed rows: Pallas kernels for TPU, forward and backward, with segments.

Tiles of keys (`tiles`) begin at multiples of their tokens; both sums are of the rounded weights. A
grid step computes a block of queries with a block of keys (Dao et al. 2022, arXiv 2205.14135); at
run time it is told which blocks hold two tokens of one segment. No branches are known: every
response needs its prompt to itself.

Axis letters beside the model's: S keys and Q queries of a block, C keys of a tile, I blocks of
queries, J blocks of keys. Scores have keys first: a tile's powers, one a query, fill few registers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from models.kernels.pages_tpu import LANES
from models.kernels.tiles import LEAST, MASKED, padded, power_of_two, scale
from models.kernels.xla import ATTENTION, like

# Smaller blocks hold fewer pairs of different segments, but the kernels have a step for each block,
# visited or not. Blocks of 2,048 do not fit the 16 MiB of VMEM that a kernel may have on v5e.
BLOCK_TOKENS = 1024
ONES = 16  # rows of a register of bfloat16


def visited_blocks(segment_BT, block: int, window: int | None = None):
    """Says which blocks of keys [first, own] a block of queries visits: first_BI; by keys: last_BJ.

    They may hold a pair of one segment whose key is less than `window` places before its query.
    T must be a multiple of block; the numbers of segments rise along a row.
    """
    segment_BIS = segment_BT.reshape(len(segment_BT), -1, block)
    own_I = jnp.arange(segment_BIS.shape[1])
    least_BI = jnp.where(segment_BIS > 0, segment_BIS, jnp.iinfo(jnp.int32).max).min(axis=2)
    most_BJ = lax.cummax(segment_BIS.max(axis=2), axis=1)
    first_BI = jnp.minimum(jnp.sum(most_BJ[:, None] < least_BI[..., None], axis=2), own_I)
    if window is not None:
        first_BI = jnp.maximum(first_BI, (own_I * block + 1 - window) // block)
    return first_BI, jnp.sum(first_BI[..., None] <= own_I, axis=1) - 1


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
    pad = functools.partial(padded, multiple=block, axis=1)
    if position_BT is None:
        position_BT = jnp.broadcast_to(jnp.arange(tokens), segment_BT.shape)
    segment_BT, position_BT = pad(segment_BT), pad(position_BT)
    places = None if window is None else window + tile_tokens - 1
    rows = (
        *(pad(a).swapaxes(1, 2) for a in (q_BTNH, k_BTKH, v_BTKH)),
        jnp.stack([segment_BT, position_BT], axis=1),
        jnp.stack([jnp.where(segment_BT > 0, segment_BT, -1), position_BT], axis=2),
        *visited_blocks(segment_BT, block, places),
    )
    attend = functools.partial(_attention, (block, tile_tokens, window, interpret))
    return jax.lax.map(lambda row: attend(*row), rows).swapaxes(1, 2)[:, :tokens]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(how, *row):
    return _forward(how, *row)[0]


def _run(kernel, how, table, query, key, of_queries, of_keys, outs, scratch):
    """Runs a kernel for each head and pair of blocks, whose places are query and key of its step.

    of_queries, of_keys: what it reads. outs: (array like it, place). scratch: shapes of float32.
    """
    block, *_, interpret = how
    N, T, _ = of_queries[0].shape

    def spec(array, place):
        *heads, rows, columns = array.shape
        shape = (block, columns) if rows == T else (rows, block)

        def index(n, *step):
            at = (place(*step), 0) if rows == T else (0, place(*step))
            return (lax.div(n, N // heads[0]), *at) if heads else at

        return pl.BlockSpec((*[None] * len(heads), *shape), index)

    return pl.pallas_call(
        functools.partial(kernel, how=how),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(N, T // block, T // block),
            in_specs=[*[spec(a, query) for a in of_queries], *[spec(a, key) for a in of_keys]],
            out_specs=[spec(a, place) if callable(place) else place for a, place in outs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[a for a, _ in outs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        interpret=interpret,
        name=kernel.__name__.strip("_"),
    )(table, *of_queries, *of_keys)


def _forward(how, q_NTH, k_KTH, v_KTH, number_2T, number_T2, first_I, last_J):
    N, T, H = q_NTH.shape

    def query(i, j, _):
        return i

    def key(i, j, first_ref):  # where nothing is visited, what is visited next
        return jnp.where(j > i, first_ref[i + 1], jnp.maximum(j, first_ref[i]))

    out_NTH, norm_N1T = _run(
        *(_flash_forward, how, jnp.append(first_I, 0), query, key),
        *((q_NTH, number_2T), (k_KTH, v_KTH, number_T2)),
        [(like(q_NTH), query), (like(q_NTH, (N, 1, T), jnp.float32), query)],
        [(1, how[0]), (H + ONES, how[0])],
    )
    out_NTH, norm_N1T = (checkpoint_name(a, ATTENTION) for a in (out_NTH, norm_N1T))
    return out_NTH, (q_NTH, k_KTH, v_KTH, number_2T, number_T2, last_J, out_NTH, norm_N1T)


def _flash_forward(first_ref, q_ref, number_2Q_ref, k_ref, v_ref, number_S2_ref, *refs, how):
    """Adds a block of keys, tile by tile; the last rows of the sums are those of the weights."""
    out_ref, norm_ref, power_ref, sums_ref = refs
    i, j, H = pl.program_id(1), pl.program_id(2), q_ref.shape[1]
    block, tile_tokens, window, _ = how

    @pl.when(j == 0)
    def _():
        power_ref[...] = jnp.full_like(power_ref, LEAST)
        sums_ref[...] = jnp.zeros_like(sums_ref)

    @pl.when((first_ref[i] <= j) & (j <= i))
    def _():
        x_SQ = _scores(q_ref, k_ref)
        for start in range(0, block, tile_tokens):
            tile = slice(start, start + tile_tokens)
            # The first maximum keeps a compiler from fusing product and difference: it rounds less.
            x_CQ = jnp.maximum(x_SQ[tile], MASKED)
            x_CQ = jnp.where(_seen(number_2Q_ref, number_S2_ref[tile], window), x_CQ, MASKED)
            power_1Q = jnp.maximum(jnp.ceil(x_CQ.max(axis=0, keepdims=True)), LEAST)
            weight_CQ = jnp.exp2(x_CQ - power_1Q).astype(v_ref.dtype)
            v_LC = jnp.concatenate([v_ref[tile].T, jnp.ones((ONES, tile_tokens), v_ref.dtype)])
            most_1Q = jnp.maximum(power_ref[...], power_1Q)
            part_LQ = dot(v_LC, weight_CQ, (1, 0)) * power_of_two(power_1Q - most_1Q)
            sums_ref[...] *= power_of_two(power_ref[...] - most_1Q)
            sums_ref[...] += part_LQ
            power_ref[...] = most_1Q

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        sum_1Q = sums_ref[H : H + 1]
        sum_1Q = jnp.where(sum_1Q > 0, sum_1Q, 1.0)
        out_ref[...] = (sums_ref[:H] / sum_1Q).T.astype(out_ref.dtype)
        norm_ref[...] = power_ref[...] + jnp.log2(sum_1Q)


def _backward(how, residuals, d_out_NTH):
    q_NTH, k_KTH, v_KTH, number_2T, number_T2, last_J, out_NTH, norm_N1T = residuals
    N, T, H = q_NTH.shape
    dot_N1T = jnp.sum(d_out_NTH.astype(jnp.float32) * out_NTH.astype(jnp.float32), axis=-1)[:, None]

    def query(j, i, last_ref):
        return jnp.clip(i, j, last_ref[j])

    def key(j, i, _):
        return j

    of_part = pl.BlockSpec((None, None, how[0], H), lambda n, j, i, _: (j, n, i, 0))
    d_q_JNTH, *d_keys = _run(
        *(_flash_backward, how, last_J, query, key),
        *((q_NTH, d_out_NTH, norm_N1T, dot_N1T, number_2T), (k_KTH, v_KTH, number_T2)),
        [(like(q_NTH, (len(last_J), N, T, H)), of_part), *[(like(q_NTH), key)] * 2],
        [(how[0], H)] * 2,
    )
    # Each head writes its own, as those of a chip with two cores are split over them.
    d_k_KTH, d_v_KTH = (a.reshape(len(k_KTH), -1, T, H).sum(axis=1) for a in d_keys)
    return d_q_JNTH.sum(axis=0), d_k_KTH, d_v_KTH, *[None] * 4


def _flash_backward(last_ref, q_ref, d_out_ref, norm_ref, dot_ref, number_2Q_ref, *refs, how):
    """Computes a block's weights again, and from them a part of each gradient."""
    k_ref, v_ref, number_S2_ref, d_q_ref, d_k_ref, d_v_ref, d_k_sum_ref, d_v_sum_ref = refs
    j, i, of_scores = pl.program_id(1), pl.program_id(2), q_ref.shape[1] ** -0.5

    @pl.when(i == 0)
    def _():
        d_k_sum_ref[...] = jnp.zeros_like(d_k_sum_ref)
        d_v_sum_ref[...] = jnp.zeros_like(d_v_sum_ref)

    d_q_ref[...] = jnp.zeros_like(d_q_ref)

    @pl.when((j <= i) & (i <= last_ref[j]))
    def _():
        weight_SQ = jnp.exp2(_scores(q_ref, k_ref) - norm_ref[...])
        weight_SQ = jnp.where(_seen(number_2Q_ref, number_S2_ref[...], how[2]), weight_SQ, 0.0)
        d_v_sum_ref[...] += dot(weight_SQ.astype(q_ref.dtype), d_out_ref[...], (1, 0))
        d_weight_SQ = dot(v_ref[...], d_out_ref[...], (1, 1))
        d_score_SQ = (weight_SQ * (d_weight_SQ - dot_ref[...])).astype(q_ref.dtype)
        d_k_sum_ref[...] += dot(d_score_SQ, q_ref[...], (1, 0))
        d_q_ref[...] = (dot(k_ref[...], d_score_SQ, (0, 0)) * of_scores).T.astype(d_q_ref.dtype)

    @pl.when(i == pl.num_programs(2) - 1)
    def _():
        d_k_ref[...] = (d_k_sum_ref[...] * of_scores).astype(d_k_ref.dtype)
        d_v_ref[...] = d_v_sum_ref[...].astype(d_v_ref.dtype)


def _scores(q_ref, k_ref):
    """Computes x_SQ, of which 2^x is a weight."""
    return dot(k_ref[...], q_ref[...], (1, 1)) * scale(q_ref.shape[1])


def _seen(number_2Q_ref, number_S2, window: int | None):
    """Says what queries see, by segments and positions: seen_SQ."""
    distance_SQ = number_2Q_ref[1:] - number_S2[:, 1:]
    seen_SQ = (number_2Q_ref[:1] == number_S2[:, :1]) & (distance_SQ >= 0)
    return seen_SQ if window is None else seen_SQ & (distance_SQ < window)


def dot(a, b, axes: tuple[int, int]):
    """Multiplies matrices in float32, summing over an axis of each."""
    axes = [(axis,) for axis in axes]
    return lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=jnp.float32)


_attention.defvjp(_forward, _backward)
