"""The record of a run's end: digests of what no row can have, and of the last row's seal.

seal.json has the number of rows, the last one's seal, and the SHA-256 of every other file of the
run's directory at its end. Its own SHA-256 is printed: whoever has it can tell that nothing of the
run was changed since. Host only: no jax.
"""

import json
import pathlib

from dapo_jax.run import chain
from dapo_jax.run.files import atomic_file, read_rows

NAME = "seal.json"
# Larger files of a checkpoint are its arrays, whose digests the rows have.
CHECKPOINT_BYTES = 2**26
LEFT_OUT = (NAME, "metrics.jsonl", "starts.jsonl", "run.lock")  # chained and sealed of themselves


def remove(workdir: pathlib.Path) -> None:
    """Removes the record: the run goes on."""
    (workdir / NAME).unlink(missing_ok=True)


def write(workdir: pathlib.Path) -> str:
    """Writes the record of a run that has ended; returns its own SHA-256."""
    rows = read_rows(workdir / "metrics.jsonl")
    known = set().union(*map(chain.files_of, rows))
    files = {
        name: chain.of_file(path)
        for name, path in files_in(workdir).items()
        if name not in known and not is_arrays(name, path)
    }
    content = {"rows": len(rows), "seal": rows[-1].get(chain.SEAL, ""), "files": files}
    with atomic_file(workdir / NAME) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())
    return chain.of_file(workdir / NAME)


def files_in(workdir: pathlib.Path) -> dict[str, pathlib.Path]:
    """Lists all files of a run's directory that are not of `LEFT_OUT`, by their path in it."""
    paths = {
        path.relative_to(workdir).as_posix(): path
        for path in sorted(workdir.rglob("*"))
        if path.is_file()
    }
    return {name: path for name, path in paths.items() if name not in LEFT_OUT}


def is_arrays(name: str, path: pathlib.Path) -> bool:
    """Whether a file is a large one of a checkpoint."""
    return name.startswith("checkpoints/") and path.stat().st_size > CHECKPOINT_BYTES
