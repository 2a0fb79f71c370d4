"""Whole (prompt, response) sequences packed into rows of a fixed number of tokens, on the host.

A row is made of pieces: a prompt once, then responses to it. Row arrays are aligned with what the
model predicts: entry t holds what belongs to the target, the token that comes next. A prompt of p
tokens fills p - 1 entries; a response of n tokens fills n more, the first of which is fed the
prompt's last token again, as in decoding, so that every response has it for itself. All n carry a
loss, the stop token's too. Masks come from lengths, never from token ids: the stop token may have
the padding's id.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class TrainSequence:
    """One response to train on. Arrays have the response's length; `prompt` has the prompt's."""

    prompt: np.ndarray
    response: np.ndarray
    behavior_logp: np.ndarray
    advantage: float
    weight: np.ndarray  # of each token's loss in the update, from algorithm.token_weights


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """[rows, T] arrays.

    `segment` numbers a row's pieces from 1; 0 is padding. `branch` numbers a row's responses from
    1; 0 is a prompt, which all responses of its piece follow. `position` counts from 0 along a
    prompt and each of its responses.
    """

    tokens: np.ndarray
    target: np.ndarray
    position: np.ndarray
    segment: np.ndarray
    branch: np.ndarray
    behavior_logp: np.ndarray
    advantage: np.ndarray
    weight: np.ndarray
    is_response: np.ndarray  # bool: the target is a response token


def pack(sequences: Sequence[TrainSequence], *, row_tokens: int, share_prompts: bool) -> PackedRows:
    """Rows of pieces, large groups first and in each the longest responses first.

    A response goes behind its prompt in the first row that has both the prompt and room, else with
    its prompt into the first row with room for the two. share_prompts False: every response has
    its prompt to itself, which makes this first-fit decreasing. Raises ValueError for a sequence
    that no row can hold.
    """
    longest = max(len(s.prompt) + len(s.response) - 1 for s in sequences)
    if longest > row_tokens:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit a row: learner.row_tokens = "
            f"{row_tokens} must hold the longest prompt and response"
        )
    rows: list[list[list[TrainSequence]]] = []
    room: list[int] = []
    by_prompt = groups(sequences, share_prompts=share_prompts)
    for group in sorted(by_prompt, key=group_entries, reverse=True):
        pieces: dict[int, list[TrainSequence]] = {}  # by row
        for s in sorted(group, key=lambda s: -len(s.response)):
            entries = len(s.response)
            row = next((r for r in pieces if room[r] >= entries), None)
            if row is None:
                entries += len(s.prompt) - 1
                row = next((r for r in range(len(rows)) if room[r] >= entries), len(rows))
                if row == len(rows):
                    rows.append([])
                    room.append(row_tokens)
                pieces[row] = []
                rows[row].append(pieces[row])
            pieces[row].append(s)
            room[row] -= entries
    return fill(rows, row_tokens=row_tokens)


def groups(sequences: Sequence[TrainSequence], *, share_prompts: bool) -> list[list[TrainSequence]]:
    """The sequences with the same prompt together, or each by itself."""
    found: dict[object, list[TrainSequence]] = {}
    for i, s in enumerate(sequences):
        found.setdefault(s.prompt.tobytes() if share_prompts else i, []).append(s)
    return list(found.values())


def group_entries(group: Sequence[TrainSequence]) -> int:
    """The entries of a group in one row, its prompt once."""
    return len(group[0].prompt) - 1 + sum(len(s.response) for s in group)


def fill(rows: Sequence[Sequence[Sequence[TrainSequence]]], *, row_tokens: int) -> PackedRows:
    """The arrays of rows of pieces; the sequences of a piece have one prompt."""
    shape = (len(rows), row_tokens)
    packed = PackedRows(
        tokens=np.zeros(shape, np.int32),
        target=np.zeros(shape, np.int32),
        position=np.zeros(shape, np.int32),
        segment=np.zeros(shape, np.int32),
        branch=np.zeros(shape, np.int32),
        behavior_logp=np.zeros(shape, np.float32),
        advantage=np.zeros(shape, np.float32),
        weight=np.zeros(shape, np.float32),
        is_response=np.zeros(shape, bool),
    )
    for b, pieces in enumerate(rows):
        end = branch = 0
        for segment, piece in enumerate(pieces, start=1):
            prompt = piece[0].prompt
            start, end = end, end + len(prompt) - 1
            packed.tokens[b, start:end] = prompt[:-1]
            packed.target[b, start:end] = prompt[1:]
            packed.position[b, start:end] = np.arange(len(prompt) - 1)
            for s in piece:
                branch += 1
                answer = slice(end, end + len(s.response))
                packed.tokens[b, answer] = np.concatenate([prompt[-1:], s.response[:-1]])
                packed.target[b, answer] = s.response
                packed.position[b, answer] = len(prompt) - 1 + np.arange(len(s.response))
                packed.branch[b, answer] = branch
                packed.behavior_logp[b, answer] = s.behavior_logp
                packed.advantage[b, answer] = s.advantage
                packed.weight[b, answer] = s.weight
                packed.is_response[b, answer] = True
                end = answer.stop
            packed.segment[b, start:end] = segment
    return packed


def keys_seen(packed: PackedRows) -> np.ndarray:
    """How many entries those of each row attend to, in all: a measure of attention's work."""
    return np.sum((packed.position + 1.0) * (packed.segment > 0), axis=1)


def micro_batches(packed: PackedRows, *, num_micro: int, rows: int) -> tuple[PackedRows, int]:
    """([num_micro, rows, T] arrays, number of micro-batches in use); rows of padding fill up.

    Rows go by attention's work, the most first: the rows of a micro-batch, which devices compute
    side by side, are as equal as can be.
    """
    used, row_tokens = packed.tokens.shape
    if used > num_micro * rows:
        raise ValueError(f"{used} packed rows do not fit {num_micro} micro-batches of {rows}")
    by_work = np.argsort(-keys_seen(packed), kind="stable")

    def spread(array):
        full = np.zeros((num_micro * rows, row_tokens), array.dtype)
        full[:used] = array[by_work]
        return full.reshape(num_micro, rows, row_tokens)

    fields = {f.name: spread(getattr(packed, f.name)) for f in dataclasses.fields(packed)}
    return PackedRows(**fields), -(-used // rows)
