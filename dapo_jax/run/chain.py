"""The chain of a run's rows and the seal of its end: SHA-256 of what was sampled and written.

A row of metrics.jsonl has `digest/<what>` of what its step computed and of each file that the step
wrote, and a link to the row before:

    chain(s) = sha256(chain(s - 1), row s without its times)

A run that is killed and resumed has the chain of one that was not; a fork's continues its parent's.
At its end a run writes seal.json: the digest of every other file. Host only: no jax.
"""

import hashlib
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from dapo_jax.types import Group

CHAIN, DIGEST = "chain", "digest/"
STATE, TOKENS, LOGP, VERDICTS = (DIGEST + name for name in ("state", "tokens", "logp", "verdicts"))
CLOCKED = ("seconds/", "seconds_in_rollout/", "tokens_per_second/")  # no two runs have these alike
# The keys of a row that are no metrics: text each, in no curve.
KEYS = {
    STATE: "Of the digests of all weights and moments after the step, a checkpoint's `arrays`.",
    TOKENS: "Of all sampled tokens.",
    LOGP: "Of the bits of their log-probabilities.",
    VERDICTS: "Of all verdicts and rewards.",
    f"{DIGEST}<file>": "Of a file that the step wrote.",
    CHAIN: "Of the chain of the row before and of this row without times.",
}
SEAL = "seal.json"
LOCK = "run.lock"
FOLDERS = ("checkpoints", "eval", "rollouts", "tensorboard")  # which may lie on another disk
# A checkpoint's larger files are its arrays, whose digests the rows have.
CHECKPOINT_BYTES = 2**26
# The files that a run itself writes. Other commands' may change after its end, as TensorBoard's.
OWN = re.compile(
    r"rollouts/(?P<rollout>\d+)\.jsonl\.gz|eval/(?P<eval>\d+)(\.\w+)?\.(json|jsonl\.gz)"
    r"|checkpoints/(?P<checkpoint>\d+)/.*|metrics(\.cut-\d+)?\.jsonl"
    r"|config\.json|starts\.jsonl|log\.txt|curves\.png|timeline\.png"
)


def is_text(key: str) -> bool:
    """Returns whether a key of a row is one of KEYS."""
    return key.startswith(DIGEST) or key == CHAIN


def numbers(row: Mapping) -> dict:
    """Returns a row's metrics: all but what the chain adds."""
    return {key: value for key, value in row.items() if not is_text(key)}


def untimed(row: Mapping) -> dict:
    """Returns the part of a row that two runs of one recipe have alike."""
    return {key: value for key, value in row.items() if not key.startswith(CLOCKED)}


def link(before: str, row: Mapping) -> str:
    """Returns the row's `chain`; before: that of the row before, "" where there is none."""
    chained = {key: value for key, value in untimed(row).items() if key != CHAIN}
    plain = json.dumps(plain_value(chained), sort_keys=True, allow_nan=False)
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


def files_of(row: Mapping) -> dict[str, str]:
    """Lists the files that a row has digests of, by their path in the run's directory."""
    others = {STATE, TOKENS, LOGP, VERDICTS}
    return {
        key.removeprefix(DIGEST): value
        for key, value in row.items()
        if key.startswith(DIGEST) and key not in others
    }


def seal(workdir: pathlib.Path, rows: Sequence[Mapping]) -> dict:
    """Returns the seal of a run's directory as it is.

    It has the number of rows, the last one's chain, and the digests of the run's files that no row
    has a digest of.
    """
    known = set().union(*map(files_of, rows))
    files = {
        name: of_file(path)
        for name, path in files_in(workdir).items()
        if OWN.fullmatch(name) and name not in known and not is_arrays(name, path)
    }
    return {"rows": len(rows), CHAIN: rows[-1].get(CHAIN, ""), "files": files}


def as_written(content: Mapping) -> bytes:
    """Returns the bytes of a run's JSON file: seal.json, config.json."""
    return (json.dumps(content, indent=1) + "\n").encode()


def files_in(workdir: pathlib.Path) -> dict[str, pathlib.Path]:
    """Lists all files of a run's directory but the seal and the lock, by their path in it."""
    paths = {name: path for name, path in _paths(workdir).items() if path.is_file()}
    return {name: path for name, path in paths.items() if name not in (SEAL, LOCK)}


def no_files_in(workdir: pathlib.Path) -> list[str]:
    """Lists what is neither a file nor a folder: links that lead elsewhere or nowhere, pipes."""
    return [name for name, path in _paths(workdir).items() if not path.is_file()]


def _paths(workdir: pathlib.Path) -> dict[str, pathlib.Path]:
    """Lists all but folders; links are followed where they stand for a folder of the run's."""
    found = []
    for top in (workdir, *(workdir / name for name in FOLDERS if (workdir / name).is_symlink())):
        for folder, folders, names in os.walk(top):
            found += [pathlib.Path(folder, name) for name in names]
            found += [path for name in folders if (path := pathlib.Path(folder, name)).is_symlink()]
    named = {path.relative_to(workdir).as_posix(): path for path in sorted(found)}
    return {name: p for name, p in named.items() if not (name in FOLDERS and p.is_dir())}


def is_arrays(name: str, path: pathlib.Path) -> bool:
    """Returns whether a file is a large one of a checkpoint."""
    return name.startswith("checkpoints/") and path.stat().st_size > CHECKPOINT_BYTES
