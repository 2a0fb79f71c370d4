"""Samples one token a row: truncation, the inverse CDF, and random keys that name the request."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dapo_jax.logprobs import SUM_BLOCK, block_sums, total
from models.kernels.xla import MASKED

RANGE_NATS = 32.0  # tokens this far below the best one have no mass that any top-p looks at
BISECTIONS = 26  # finds the threshold to 5e-7 nats or better
UNIFORM_GRID = 2.0**-23  # uniform numbers are multiples of it
WHOLE = 2.0**31  # what a row's weights add up to as integers
FEW_TRUNCATED = 128  # rows that a step looks at, at least, where any is truncated: a TPU's lanes


def request_keys(run_key_B, cursor_B, sample_B):
    """Makes the random key of every (prompt cursor, sample index) request.

    A sample's randomness is fold_in(fold_in(fold_in(run_key, cursor), sample), position): it
    depends on nothing else, neither the slot, nor the device, nor a restart.
    """
    fold = jax.vmap(jax.random.fold_in)
    return fold(fold(run_key_B, cursor_B), sample_B)


def uniform_at(key_B, position_B):
    """Samples one uniform number in [0, 1) a request, for a position of its response."""
    key_B = jax.vmap(jax.random.fold_in)(key_B, position_B)
    return jax.vmap(jax.random.uniform)(key_B)


def of_rows(values: Sequence, stream_R):
    """Gives each row its stream's value, [R, 1]; one number where all streams have the same."""
    return values[0] if len(set(values)) == 1 else jnp.asarray(values)[stream_R][:, None]


def truncate(
    logits_RV,
    *,
    top_p: Sequence[float],
    top_k: Sequence[int],
    axis: str | None,
    stream_R=None,
    live_R=None,
):
    """Masks what top-k (0: off), then top-p (1.0: off), leave out (Holtzman et al. 2020).

    Top-p keeps the smallest set of most probable tokens whose mass reaches `top_p`; tokens that tie
    with the last one kept stay too. The threshold is bisected, since sorting a 152k vocabulary
    costs more than the model's head.

    top_p, top_k: of every stream. stream_R: each row's stream; live_R: the rows that count. Both
    are looked at only where streams differ: then thresholds are searched for in the first rows
    alone, as far as live ones need any (`truncated_sizes`). What no stream needs is not in the
    program. axis: as of `sample_token`. Chips exchange their top k, and a sum a bisection.
    """

    def masked(logits_RV, limits, off, threshold):
        """Masks what is below `threshold(logits_RV, limit)`, in rows whose limit is not `off`."""
        limit = of_rows(limits, stream_R)
        if set(limits) == {off}:
            return logits_RV
        if len(set(limits)) == 1:
            least_R1 = threshold(logits_RV, limit)
        else:
            least_R1 = _of_first_rows(logits_RV, limit, limit != off, live_R, threshold)
        # Not what is at least the threshold: a logit that is not finite has to stay one.
        return jnp.where(logits_RV < least_R1, MASKED, logits_RV)

    kth_best = functools.partial(_kth_best, most=max(top_k), axis=axis)
    of_mass = functools.partial(_of_mass, axis=axis)
    return masked(masked(logits_RV, top_k, 0, kth_best), top_p, 1.0, of_mass)


def truncated_sizes(rows: int) -> list[int]:
    """Lists how many of the first rows are looked at where streams differ: none up to all."""
    powers = [FEW_TRUNCATED * 2**i for i in range(rows.bit_length())]
    return [0, *(size for size in powers if size < rows), rows]


def _of_first_rows(logits_RV, limit_R1, needs_R1, live_R, threshold):
    """Finds the thresholds of rows that need one, up to the last live one; -inf for all others."""
    R = len(logits_RV)
    sizes = truncated_sizes(R)

    def of_first(size: int):
        if not size:
            return jnp.full((R, 1), -jnp.inf, logits_RV.dtype)
        least_R1 = threshold(logits_RV[:size], limit_R1[:size])
        least_R1 = jnp.where(needs_R1[:size], least_R1, -jnp.inf)
        return jnp.pad(least_R1, ((0, R - size), (0, 0)), constant_values=-jnp.inf)

    last = jnp.max(jnp.where(needs_R1[:, 0] & live_R, jnp.arange(1, R + 1), 0))
    which = jnp.sum(last > jnp.asarray(sizes))
    return jax.lax.switch(which, [functools.partial(of_first, size) for size in sizes])


def _kth_best(logits_RV, k, *, most: int, axis: str | None):
    """Finds the k-th best logit of each row [R, 1]; k: a number, or [R, 1], at most `most`."""
    best_RK = jax.lax.top_k(logits_RV, min(most, logits_RV.shape[1]))[0]
    if axis is not None:
        best_RK = jax.lax.all_gather(best_RK, axis, axis=1, tiled=True)
        best_RK = jax.lax.top_k(best_RK, min(most, best_RK.shape[1]))[0]
    place_R1 = jnp.broadcast_to(jnp.clip(k, 1, best_RK.shape[1]) - 1, (len(best_RK), 1))
    return jnp.take_along_axis(best_RK, place_R1, axis=1)


def _of_mass(logits_RV, mass, *, axis: str | None):
    """Bisects the logit [R, 1] down to which the best tokens have this share of the mass."""

    def over(collective, x_R1):
        return x_R1 if axis is None else collective(x_R1, axis)

    high_R1 = over(jax.lax.pmax, jnp.max(logits_RV, axis=-1, keepdims=True))

    def mass_above(low_R1):
        weight_RV = jnp.where(logits_RV >= low_R1, jnp.exp(logits_RV - high_R1), 0.0)
        return over(jax.lax.psum, jnp.sum(weight_RV, axis=-1, keepdims=True))

    wanted_R1 = mass * mass_above(-jnp.inf)

    def halve(_, bounds):
        low_R1, high_R1 = bounds  # the mass above `low` reaches what is wanted, above `high` not
        mid_R1 = (low_R1 + high_R1) / 2
        enough_R1 = mass_above(mid_R1) >= wanted_R1
        return jnp.where(enough_R1, mid_R1, low_R1), jnp.where(enough_R1, high_R1, mid_R1)

    # From the least logit where the row is flat: the steps are as fine as the row needs.
    least_R1 = jnp.min(jnp.where(logits_RV > MASKED, logits_RV, jnp.inf), axis=-1, keepdims=True)
    low_R1 = jnp.maximum(over(jax.lax.pmin, least_R1), high_R1 - RANGE_NATS)
    return jax.lax.fori_loop(0, BISECTIONS, halve, (low_R1, high_R1))[0]


def sample_token(logits_RV, uniform_R, *, axis: str | None):
    """Samples (token_R, logp_R) from softmax(logits) by inverting its distribution function.

    One uniform number in [0, 1) a row. It picks a block of the vocabulary, and what is left of it a
    token inside: a 152k-long float32 sum would lose the tail. `logp_R` is the log-probability
    under exactly this (temperature-scaled, truncated) distribution.

    axis: the mesh axis over which the vocabulary is split in equal parts, None where it is whole.
    Chips exchange their block sums and the sampled token's logit, never the logits.
    """
    R, V = logits_RV.shape
    logits_RV = jnp.pad(logits_RV, ((0, 0), (0, -V % SUM_BLOCK)), constant_values=-jnp.inf)
    logits_RNC = logits_RV.reshape(R, -1, SUM_BLOCK)
    max_R = jnp.max(logits_RV, axis=-1)
    max_R = max_R if axis is None else jax.lax.pmax(max_R, axis)
    sum_RN = block_sums(jnp.exp(logits_RV - max_R[:, None]))
    N = sum_RN.shape[1]
    rank = 0 if axis is None else jax.lax.axis_index(axis)
    sum_RN = sum_RN if axis is None else jax.lax.all_gather(sum_RN, axis, axis=1, tiled=True)
    # The middle of the numbers that a uniform one stands for: 0 would be the first token's always.
    block_R, rest_R = pick(sum_RN, uniform_R + UNIFORM_GRID / 2)
    here_R = block_R // N == rank
    local_R = block_R % N
    # By a mask, which reads all logits once: for a gather they would be laid out anew.
    is_picked_RN1 = (jnp.arange(N) == local_R[:, None])[:, :, None]
    logits_RC = jnp.sum(jnp.where(is_picked_RN1, logits_RNC, 0.0), axis=1)
    inner_R, _ = pick(jnp.exp(logits_RC - max_R[:, None]), rest_R)
    logit_R = jnp.take_along_axis(logits_RC, inner_R[:, None], axis=1)[:, 0]
    token_R = (local_R * SUM_BLOCK + inner_R + rank * V).astype(jnp.int32)
    if axis is not None:
        token_R = jax.lax.psum(jnp.where(here_R, token_R, 0), axis)
        logit_R = jax.lax.psum(jnp.where(here_R, logit_R, 0.0), axis)
    return token_R, logit_R - max_R - jnp.log(total(sum_RN))


def pick(weight_RN, uniform_R):
    """Picks one of N entries a row with a probability in proportion to its weight.

    Returns (index_R, rest_R): where in its entry the uniform number lies, as one in (0, 1).
    Running sums are integers. They are exact in whatever order they are added, so they never fall
    and an entry of weight 0 is never picked; those of float32 rise and fall by their rounding, and
    entries of weight 0 beside a possible one were picked.
    """
    scale_R = WHOLE / total(weight_RN)
    cdf_RN = jnp.cumsum(jnp.round(weight_RN * scale_R[:, None]).astype(jnp.uint32), axis=-1)
    end_R = cdf_RN[:, -1]
    target_R = (uniform_R * end_R.astype(jnp.float32)).astype(jnp.uint32)
    target_R = jnp.minimum(target_R, end_R - 1)  # the product may be rounded up
    index_R = jnp.argmax(cdf_RN > target_R[:, None], axis=-1)
    after_R = jnp.take_along_axis(cdf_RN, index_R[:, None], axis=1)[:, 0]
    before_R = jnp.take_along_axis(cdf_RN, jnp.maximum(index_R - 1, 0)[:, None], axis=1)[:, 0]
    before_R = jnp.where(index_R > 0, before_R, 0)
    rest_R = ((target_R - before_R).astype(jnp.float32) + 0.5) / (after_R - before_R)
    return index_R, rest_R
