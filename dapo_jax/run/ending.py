"""The record of a run's end: digests of what no row can have, and of the last row's seal.

seal.json has the number of rows, the last one's seal, and the SHA-256 of every file of the run's
own that no row has, at its end, metrics.jsonl among them. Its own SHA-256 is printed: whoever has
it can tell that nothing of the run was changed since. Host only: no jax.
"""

import json
import os
import pathlib
import re

from dapo_jax.run import chain
from dapo_jax.run.files import atomic_file, read_rows

NAME = "seal.json"
# Larger files of a checkpoint are its arrays, whose digests the rows have.
CHECKPOINT_BYTES = 2**26
LEFT_OUT = (NAME, "starts.jsonl", "run.lock")  # a start that is refused writes to the latter two
# What a run itself writes: one of these names that no row and no seal knows was added. Other
# commands' files, and people's own, may change after its end.
OWN = re.compile(
    r"rollouts/(?P<rollout>\d+)\.jsonl\.gz|eval/(?P<eval>\d+)(\.\w+)?\.(json|jsonl\.gz)"
    r"|checkpoints/(?P<checkpoint>\d+)/.*|metrics(\.cut-\d+)?\.jsonl|tensorboard/.*"
    r"|config\.json|log\.txt|curves\.png|timeline\.png"
)
OF_CHECKPOINT = re.compile(r"checkpoints/\d+/")
FOLDERS = ("checkpoints", "eval", "rollouts", "tensorboard")  # which may lie on another disk


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
        if OWN.fullmatch(name) and name not in known and not is_arrays(name, path)
    }
    content = {"rows": len(rows), "seal": rows[-1].get(chain.SEAL, ""), "files": files}
    with atomic_file(workdir / NAME) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())
    return chain.of_file(workdir / NAME)


def files_in(workdir: pathlib.Path) -> dict[str, pathlib.Path]:
    """Lists all files of a run's directory that are not of `LEFT_OUT`, by their path in it."""
    paths = {name: path for name, path in _paths(workdir).items() if path.is_file()}
    return {name: path for name, path in paths.items() if name not in LEFT_OUT}


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
    """Whether a file is a large one of a checkpoint."""
    return name.startswith("checkpoints/") and path.stat().st_size > CHECKPOINT_BYTES
