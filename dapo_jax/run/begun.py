"""The finished groups of an evaluation, on disk until it has its result.

An evaluation that is interrupted goes on with them, bit by bit as if it had not been: what a
request samples depends on the weights, its stream and its place there alone.
"""

import base64
import contextlib
import pathlib
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dapo_jax.run.digests import of_json
from dapo_jax.run.files import append_line, atomic_file, json_line, read_starts
from dapo_jax.types import Group, Prompt, Response
from sharding import hosts


class Begun:
    """The finished groups of one set, in eval/<name>.begun.jsonl; a line each.

    how: a digest of all that samples them, the weights and their model among it. Each line has it:
    two evaluations may write to one file. Lines of another one, of another prompt and damaged ones
    are deleted. All processes make it; process 0 reads and writes.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        name: str,
        *,
        how: str,
        prompts: Sequence[Prompt],
        k: int,
        say: Callable[[str], None],
    ):
        self._path = workdir / "eval" / f"{name}.begun.jsonl"
        self._say, self._keeps, self._how = say, hosts.is_main_host(), how
        self._prompt = [of_json(list(map(int, prompt.token_ids))) for prompt in prompts]
        rows = hosts.on_main(lambda: self._read(k))
        if self._keeps:
            with atomic_file(self._path) as file:
                for row in rows.values():
                    file.write(json_line(row))
        self.responses = {cursor: _responses(row) for cursor, row in rows.items()}
        if self.responses:
            say(f"{len(self.responses)} of {len(prompts)} groups are in {self._path}")

    def _read(self, k: int) -> dict[int, dict]:
        """The rows that are of this set, by cursor."""
        return {row["cursor"]: row for row in read_starts(self._path) if self._is_one(row, k)}

    def _is_one(self, row: Mapping, k: int) -> bool:
        """Whether a row is whole, and of this set's prompt at its place."""
        cursor = row.get("cursor")
        known = type(cursor) is int and 0 <= cursor < len(self._prompt)
        if not known or (row.get("how"), row.get("prompt")) != (self._how, self._prompt[cursor]):
            return False
        try:
            return len(_responses(row)) == k
        except (KeyError, TypeError, ValueError, zlib.error):
            return False

    def add(self, group: Group) -> None:
        """Appends a finished group; where the disk takes no more, says so and keeps none."""
        if not self._keeps:
            return
        row = {
            "how": self._how,
            "cursor": group.cursor,
            "prompt": self._prompt[group.cursor],
            "stopped": [bool(response.stopped) for response in group.responses],
            "tokens": [_text(response.tokens_T) for response in group.responses],
        }
        try:
            append_line(self._path, row)
        except OSError as error:
            self._keeps = False
            self._say(
                f"{self._path}: {error.strerror}; the evaluation goes on, but would not go on with "
                "its next groups if interrupted"
            )

    def remove(self) -> None:
        """Deletes the file, once there is a result, which one that is left does no harm."""
        if hosts.is_main_host():
            with contextlib.suppress(OSError):
                self._path.unlink()


def _text(tokens_T: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(np.asarray(tokens_T, "<i4").tobytes(), 1)).decode()


def _responses(row: Mapping) -> tuple[Response, ...]:
    """A row's responses; their log-probabilities, which no score is made of, are not kept."""
    tokens = [
        np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i4").astype(np.int32)
        for text in row["tokens"]
    ]
    return tuple(
        Response(tokens_T, np.full(len(tokens_T), np.nan, np.float32), stopped)
        for tokens_T, stopped in zip(tokens, row["stopped"], strict=True)
    )
