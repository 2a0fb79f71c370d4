"""The chain of a run's rows: digests of what each step sampled, trained and wrote.

A row of metrics.jsonl has `digest/<what>` of what its step computed and of the files that it wrote,
`sealed/<file>` of files that are not a step's, and two links to the row before:

    chain(s) = sha256(chain(s - 1), what row s has but for times and seals)
    seal(s)  = sha256(seal(s - 1), all that row s has but for its seal)

A run that is killed and resumed has the chain of one that was not, and another seal: times, starts
and rows that were cut are in it. A fork's chain goes on from its parent's. Host only: no jax.
"""

import hashlib
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dapo_jax.types import Group

CHAIN, SEAL = "chain", "seal"
DIGEST, SEALED = "digest/", "sealed/"
STATE, TOKENS, LOGP, VERDICTS = (DIGEST + name for name in ("state", "tokens", "logp", "verdicts"))
STARTS = f"{SEALED}starts.jsonl"  # as it was when the row was written; lines follow
BEFORE = f"{SEALED}chain_before"  # of a file's first row: the chain of a row that is elsewhere
# What a clock or a restart decides: no two runs have it alike.
CLOCKED = ("seconds/", "seconds_in_rollout/", "tokens_per_second/", SEALED, SEAL)
# Of a row's keys those that are no metrics: text each, in no curve.
KEYS = {
    STATE: "Of the digests of all weights and moments after the step, a checkpoint's `arrays`.",
    TOKENS: "Of all sampled tokens.",
    LOGP: "Of the bits of their log-probabilities.",
    VERDICTS: "Of all verdicts and rewards.",
    f"{DIGEST}<file>": "Of a file that the step wrote.",
    f"{SEALED}<file>": "Of a file of the run that is no single step's, as it was then.",
    CHAIN: "Of the row before's, and of this row without times and seals.",
    SEAL: "Of the row before's, and of all of this row.",
}


def is_text(key: str) -> bool:
    """Whether a key of a row is one of these, whose values are text."""
    return key.startswith((DIGEST, SEALED)) or key in (CHAIN, SEAL)


def numbers(row: Mapping) -> dict:
    """Returns a row's metrics: all but what the chain adds."""
    return {key: value for key, value in row.items() if not is_text(key)}


def untimed(row: Mapping) -> dict:
    """Returns what two runs of one recipe have alike in a row."""
    return {key: value for key, value in row.items() if not key.startswith(CLOCKED)}


def link(before: str, row: Mapping) -> str:
    """Returns the row's `chain`; before: the one of the row before, "" where there is none."""
    return _of(before, {k: v for k, v in untimed(row).items() if k != CHAIN})


def seal(before: str, row: Mapping) -> str:
    """Returns the row's `seal`; before: the one of the row before, "" where there is none."""
    return _of(before, {k: v for k, v in row.items() if k != SEAL})


def _of(before: str, row: Mapping) -> str:
    plain = json.dumps(plain_value(row), sort_keys=True, allow_nan=False)
    return hashlib.sha256(f"{before}\n{plain}".encode()).hexdigest()


def plain_value(value):
    """A JSON-ready copy: 0-d arrays become Python scalars, NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {key: plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if hasattr(value, "ndim"):
        value = plain_value(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def files_of(row: Mapping) -> dict[str, str]:
    """Lists the files that a row has digests of, by their path in the run's directory."""
    others = {STATE, TOKENS, LOGP, VERDICTS, STARTS, BEFORE}
    return {
        key.partition("/")[2]: value
        for key, value in row.items()
        if key.startswith((DIGEST, SEALED)) and key not in others
    }


def of_file(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_samples(groups: Sequence[Group], reward_PG: np.ndarray) -> dict[str, str]:
    """Digests all that a step sampled, bit by bit: tokens, log-probabilities and verdicts."""
    tokens, logp, verdicts = (hashlib.sha256() for _ in range(3))
    for group, reward_G in zip(groups, reward_PG, strict=True):
        for response in group.responses:
            about = [group.cursor, len(response.tokens_T), bool(response.stopped), response.ends]
            tokens.update(_line(about))
            tokens.update(np.ascontiguousarray(response.tokens_T, "<i4"))
            logp.update(np.ascontiguousarray(response.behavior_logp_T, "<f4"))
            verdict = response.verdict
            grade = [verdict.correct, verdict.prediction, verdict.status, verdict.score]
            verdicts.update(_line(plain_value([*grade, verdict.measures])))
        verdicts.update(np.ascontiguousarray(reward_G, "<f8"))
    found = zip((TOKENS, LOGP, VERDICTS), (tokens, logp, verdicts), strict=True)
    return {key: digest.hexdigest() for key, digest in found}


def _line(value) -> bytes:
    return json.dumps(value, default=str).encode() + b"\n"


class Seals:
    """Seals the rows of a run that are still to be written.

    rows: those that are kept of earlier starts. files: those of earlier starts that nobody writes
    to any more; the next row has the digests of them, and of rows that were cut, unless a row has
    them. chain_before: the chain of the row before the next.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        rows: Sequence[Mapping],
        files: Iterable[pathlib.Path],
        chain_before: str,
    ):
        self._starts = workdir / "starts.jsonl"
        self._seal = rows[-1].get(SEAL, "") if rows else ""
        known = set().union(*map(files_of, rows))
        self._evaluated: list[tuple[int, str, str]] = []
        files = [*files, *workdir.glob("metrics.cut-*.jsonl")]
        names = {path.relative_to(workdir).as_posix(): path for path in files}
        self._next = {
            SEALED + name: of_file(path) for name, path in names.items() if name not in known
        }
        if not rows and chain_before:
            self._next[BEFORE] = chain_before

    def sealed(self, row: Mapping) -> dict:
        """Returns the next row with its seal, where it has a chain."""
        if CHAIN not in row:
            return dict(row)
        if self._starts.is_file():
            self._next[STARTS] = of_file(self._starts)
        row = {**row, **self._next}
        self._seal, self._next = seal(self._seal, row), {}
        return {**row, SEAL: self._seal}

    def evaluated(self, finished_steps: int, name: str, digest: str) -> None:
        """Takes the digest of an evaluation's file, for the next row."""
        self._evaluated.append((finished_steps, name, digest))

    def linked(self, row: Mapping, before: Mapping | None) -> dict:
        """Returns a step's row with its files and its chain; before: the row before.

        Evaluations that no row has, which a run's end or a fork's begin asks for, are sealed.
        """
        rode, row = any(key.startswith("eval/") for key in row), dict(row)
        for finished_steps, name, digest in self._evaluated:
            if rode and finished_steps == row["step"]:
                row[DIGEST + name] = digest
            else:
                self._next[SEALED + name] = digest
        self._evaluated = []
        return row | {CHAIN: link((before or {}).get(CHAIN, ""), row)}
