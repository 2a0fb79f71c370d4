"""Whole (prompt, response) sequences packed into rows of a fixed number of tokens, on the host.

Row arrays are aligned with what the model predicts: entry t holds what belongs to the target, the
token after t. So a response of n tokens after a prompt of p fills p + n - 1 entries, of which the
last n carry a loss; its stop token is one of the n targets. Masks come from lengths, never from
token ids: the stop token may have the padding's id.
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
    """[rows, T] arrays. `segment` numbers a row's sequences from 1; 0 is padding."""

    tokens: np.ndarray
    target: np.ndarray
    segment: np.ndarray
    behavior_logp: np.ndarray
    advantage: np.ndarray
    weight: np.ndarray
    is_response: np.ndarray  # bool: the target is a response token


def pack(sequences: Sequence[TrainSequence], *, row_tokens: int) -> PackedRows:
    """First-fit decreasing: the longest sequences first, each into the first row with room.

    Raises ValueError for a sequence that no row can hold.
    """
    entries = [len(s.prompt) + len(s.response) - 1 for s in sequences]
    if max(entries) > row_tokens:
        raise ValueError(
            f"a sequence of {max(entries)} tokens does not fit a row: learner.row_tokens = "
            f"{row_tokens} must hold the longest prompt and response"
        )
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sequences)), key=lambda i: -entries[i]):
        row = next((r for r in range(len(rows)) if room[r] >= entries[i]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[row].append(i)
        room[row] -= entries[i]
    shape = (len(rows), row_tokens)
    packed = PackedRows(
        tokens=np.zeros(shape, np.int32),
        target=np.zeros(shape, np.int32),
        segment=np.zeros(shape, np.int32),
        behavior_logp=np.zeros(shape, np.float32),
        advantage=np.zeros(shape, np.float32),
        weight=np.zeros(shape, np.float32),
        is_response=np.zeros(shape, bool),
    )
    for b, members in enumerate(rows):
        start = 0
        for number, i in enumerate(members, start=1):
            s = sequences[i]
            end = start + entries[i]
            ids = np.concatenate([s.prompt, s.response])
            packed.tokens[b, start:end] = ids[:-1]
            packed.target[b, start:end] = ids[1:]
            packed.segment[b, start:end] = number
            answer = slice(end - len(s.response), end)
            packed.behavior_logp[b, answer] = s.behavior_logp
            packed.advantage[b, answer] = s.advantage
            packed.weight[b, answer] = s.weight
            packed.is_response[b, answer] = True
            start = end
    return packed


def micro_batches(packed: PackedRows, *, num_micro: int, rows: int) -> tuple[PackedRows, int]:
    """([num_micro, rows, T] arrays, number of micro-batches in use); rows of padding fill up."""
    used, row_tokens = packed.tokens.shape
    if used > num_micro * rows:
        raise ValueError(f"{used} packed rows do not fit {num_micro} micro-batches of {rows}")

    def spread(array):
        full = np.zeros((num_micro * rows, row_tokens), array.dtype)
        full[:used] = array
        return full.reshape(num_micro, rows, row_tokens)

    fields = {f.name: spread(getattr(packed, f.name)) for f in dataclasses.fields(packed)}
    return PackedRows(**fields), -(-used // rows)
