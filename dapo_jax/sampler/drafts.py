"""Drafts: tokens that a slot may sample next, tried several at a step while slots are idle.

One uniform number a (request, position) decides a token, so a draft is right exactly if it equals
what is sampled in its place, and then the next position of the same step counts too (greedy
speculative decoding is the case of temperature 0: Leviathan et al. 2023, arXiv 2211.17192). On a
CPU drafts change no token and no bit, only how many steps a response takes; elsewhere they may
change the rounding (not tried). They are what followed the same tokens in the response itself or in
its group's others (prompt lookup: Saxena 2023).

Axis letters: B slots, W tokens of a slot's source, X = W + S with those of the block, T positions
of a step.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from dapo_jax.sampler.cache import Cache

SOURCE_TOKENS = 2048  # of a slot, at most: its own and its group's latest tokens
ORDER = 4  # tokens that are compared, at most; where more of them agree is looked at first
NONE = -1  # no token


def propose(text_BX, end_B, *, count: int):
    """Finds what followed earlier where the text was as it is before `end`: int32 [B, count].

    text_BX: what is before `end` counts; `NONE` is like nothing. Later places come first among
    those where as many tokens agree. Where none agrees, or the place is too near the end, some of
    the proposals are `NONE` or tokens without meaning.
    """
    X = text_BX.shape[1]
    at_1X = jnp.arange(X)[None]
    agree_BX, length_BX = jnp.ones(text_BX.shape, bool), jnp.zeros(text_BX.shape, jnp.int32)
    for back in range(1, ORDER + 1):  # of the place that a proposal would begin at
        last_B1 = jnp.take_along_axis(text_BX, (end_B - back)[:, None], axis=1)
        before_BX = jnp.pad(text_BX, ((0, 0), (back, 0)), constant_values=NONE)[:, :X]
        agree_BX &= (before_BX == last_B1) & (last_B1 != NONE)
        length_BX += agree_BX
    score_BX = jnp.where((at_1X < end_B[:, None]) & (length_BX > 0), length_BX * X + at_1X, -1)
    place_BT = jnp.argmax(score_BX, axis=1)[:, None] + jnp.arange(count)
    found_BT = jnp.take_along_axis(text_BX, jnp.minimum(place_BT, X - 1), axis=1)
    return jnp.where(place_BT < end_B[:, None], found_BT, NONE)


def source_tokens(cache: Cache, rows: int) -> int:
    """Counts the tokens (W) that a program of so many slots is given of each; 0: no drafts."""
    longest = cache.readers * cache.max_response_tokens
    return min(SOURCE_TOKENS, longest) if cache.positions(rows) > 1 else 0


def source(own: np.ndarray, others: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Joins the tokens to look in, int32 [width]: its own last, and the others' before them.

    All have as much room as there is, from their ends on; between two is `NONE`.
    """
    row_W, end = np.full(width, NONE, np.int32), width
    for tokens in (own, *others):
        taken = tokens[len(tokens) - min(len(tokens), end) :]
        row_W[end - len(taken) : end] = taken
        end -= len(taken) + 1
        if end <= 0:
            break
    return row_W
