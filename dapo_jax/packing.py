"""Packs groups of responses into rows of a fixed number of tokens, on the host.

A row is made of pieces: a prompt once, then responses to it. Row arrays are aligned with what the
model predicts: entry t holds what belongs to the target, the token that comes next. A prompt of p
tokens fills p - 1 entries; a response of n tokens fills n more, the first of which is fed the
prompt's last token again, as in decoding, so that every response has it for itself. All n carry a
loss, the stop token's too. Masks come from lengths, never from token ids: the stop token may have
the padding's id.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax.types import Batch, Group


class Piece(NamedTuple):
    """Holds a group's prompt in a row and the sample indices of the responses behind it."""

    group: int
    samples: list[int]


def pack(
    groups: Sequence[Group],
    advantage_PG: np.ndarray,
    weight_PGT: np.ndarray,
    rows: Sequence[Sequence[Piece]],
    row_tokens: int,
    *,
    routes: tuple[int, ...] = (),
    part_multiple: int = 1,
) -> Batch:
    """Packs the responses of all groups into the rows of a plan: a [B, T] batch.

    weight_PGT: each token's weight in the loss, from algorithm.token_weights. rows, row_tokens
    and part_multiple: of `plan_update`. routes: (L, A) where the responses have routes. What no
    piece covers stays zero.
    """
    shape = (len(rows), row_tokens)
    fields = {name: np.zeros(shape, dtype) for name, dtype in Batch.row_fields(routes).items()}
    batch = Batch(**fields, num_micro=None)
    for b, pieces in enumerate(rows):
        end = branch = 0
        for segment, (p, samples) in enumerate(pieces, start=1):
            prompt = groups[p].prompt.token_ids
            question = _part(end, len(prompt) - 1, part_multiple)
            end = question.stop
            batch.segment_BT[b, question] = segment
            batch.tokens_BT[b, question] = prompt[:-1]
            batch.target_BT[b, question] = prompt[1:]
            batch.position_BT[b, question] = np.arange(len(prompt) - 1)
            for g in samples:
                branch += 1
                response = groups[p].responses[g]
                length = len(response.tokens_T)
                answer = _part(end, length, part_multiple)
                batch.segment_BT[b, answer] = segment
                batch.tokens_BT[b, answer] = np.append(prompt[-1:], response.tokens_T[:-1])
                batch.target_BT[b, answer] = response.tokens_T
                batch.position_BT[b, answer] = len(prompt) - 1 + np.arange(length)
                batch.branch_BT[b, answer] = branch
                batch.behavior_logp_BT[b, answer] = response.behavior_logp_T
                batch.old_logp_BT[b, answer] = response.behavior_logp_T
                batch.advantage_BT[b, answer] = advantage_PG[p, g]
                batch.weight_BT[b, answer] = weight_PGT[p, g, :length]
                batch.is_response_BT[b, answer] = response.sampled_T
                batch.is_on_policy_BT[b, answer] = not response.ends
                if routes:
                    batch.route_BTLA[b, question] = response.route_TLA[: len(prompt) - 1]
                    batch.route_BTLA[b, answer] = response.route_TLA[len(prompt) - 1 :]
                end = answer.stop
    return batch


def _part(end: int, tokens: int, multiple: int) -> slice:
    """Places so many tokens in a row, at the next multiple from `end` on."""
    begin = end + -end % multiple
    return slice(begin, begin + tokens)


def plan_rows(
    prompt_tokens_P: Sequence[int],
    length_PG: Sequence[Sequence[int]],
    *,
    row_tokens: int,
    share_prompts: bool,
    part_multiple: int = 1,
) -> list[list[Piece]]:
    """Assigns responses to rows by their lengths: large groups first, in each the longest first.

    A response goes behind its prompt in the first row that has both the prompt and room, else with
    its prompt into the first row with room for the two. share_prompts False: every response has
    its prompt to itself, which makes this first-fit decreasing. Prompts and responses begin at
    multiples of part_multiple. A row holds the longest response with its prompt
    (dapo_jax/setup/checks.py).
    """

    def entries(piece: Piece) -> int:
        lengths = [length_PG[piece.group][g] for g in piece.samples]
        return prompt_tokens_P[piece.group] - 1 + sum(lengths)

    whole = [Piece(p, list(range(len(lengths)))) for p, lengths in enumerate(length_PG)]
    if not share_prompts:
        whole = [Piece(p, [g]) for p, samples in whole for g in samples]
    rows: list[list[Piece]] = []
    end: list[int] = []

    def behind(end: int, *parts: int) -> int:
        for tokens in parts:
            end = _part(end, tokens, part_multiple).stop
        return end

    for p, together in sorted(whole, key=entries, reverse=True):
        pieces: dict[int, Piece] = {}  # by row
        for g in sorted(together, key=lambda g: -length_PG[p][g]):
            parts = (length_PG[p][g],)
            row = next((r for r in pieces if behind(end[r], *parts) <= row_tokens), None)
            if row is None:
                parts = (prompt_tokens_P[p] - 1, *parts)
                fits = (r for r in range(len(rows)) if behind(end[r], *parts) <= row_tokens)
                row = next(fits, len(rows))
                if row == len(rows):
                    rows.append([])
                    end.append(0)
                pieces[row] = Piece(p, [])
                rows[row].append(pieces[row])
            pieces[row].samples.append(g)
            end[row] = behind(end[row], *parts)
    return rows


def plan_update(
    prompt_tokens_P: Sequence[int],
    length_PG: Sequence[Sequence[int]],
    *,
    row_lengths: Sequence[int],
    micro_batch_rows: int,
    share_prompts: bool,
    part_multiple: int = 1,
) -> tuple[list[list[Piece]], int]:
    """Plans rows of the length whose micro-batches have the fewest entries: (rows, row_tokens).

    Slightly longer rows may save a last micro-batch that is nearly empty.
    """

    def entries(planned: tuple[list[list[Piece]], int]) -> int:
        rows, row_tokens = planned
        return -(-len(rows) // micro_batch_rows) * micro_batch_rows * row_tokens

    plan = functools.partial(
        plan_rows,
        prompt_tokens_P,
        length_PG,
        share_prompts=share_prompts,
        part_multiple=part_multiple,
    )
    return min(((plan(row_tokens=n), n) for n in row_lengths), key=entries)


def into_micro_batches(batch: Batch, *, most_micro: int, rows: int) -> Batch:
    """Splits the rows of a [B, T] batch into `most_micro` micro-batches: [M, rows, T].

    Rows are sorted by attention's work, the most first, so that those of a micro-batch, which
    devices compute side by side, have about as much to do.
    """
    used = len(batch.tokens_BT)
    keys_seen_B = np.sum((batch.position_BT + 1.0) * (batch.segment_BT > 0), axis=1)
    by_work = np.argsort(-keys_seen_B, kind="stable")

    def spread(array):
        full = np.zeros((most_micro * rows, *array.shape[1:]), array.dtype)
        full[:used] = array[by_work]
        return full.reshape(most_micro, rows, *array.shape[1:])

    fields = {name: spread(array) for name, array in vars(batch).items() if array is not None}
    return dataclasses.replace(batch, **fields, num_micro=np.int32(-(-used // rows)))
