"""Checks a run's files against its chain of rows and its seal.

Reads only; host only. Each check yields findings.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator

from etils import epath

from dapo_jax.audit.findings import (
    NOT_AS_WRITTEN,
    SAME,
    UNCHECKED,
    WRONG,
    Finding,
    guarded,
    listed,
    said,
)
from dapo_jax.run import chain
from dapo_jax.run.files import json_line, read_json, read_rows, read_starts

DRAWN, PAGE = "curves.png", "report.html"


@dataclasses.dataclass(frozen=True)
class Written:
    """The content of a run's directory.

    lines, rows: of metrics.jsonl. starts: of starts.jsonl. config: the recipe; {} where it cannot
    be read. is_sealed: whether seal.json is there. files: all others, by their path.
    """

    workdir: pathlib.Path
    lines: list[bytes]
    rows: list[dict]
    starts: list[dict]
    config: dict
    is_sealed: bool
    files: dict[str, pathlib.Path]

    @functools.cached_property
    def known(self) -> dict[str, str]:
        """The files that rows have digests of, each as it was written last."""
        found = {}
        for row in self.rows:
            found |= chain.files_of(row)
        return found

    @property
    def checkpoints(self) -> epath.Path:
        """The directory of the run's checkpoints, which may be a bucket's."""
        given = self.config.get("checkpoint", {}).get("directory")
        return epath.Path(given or self.workdir / "checkpoints")

    @property
    def origin(self) -> str | None:
        """The checkpoint of another run that the run began from."""
        return self.starts[-1].get("origin") if self.starts else None

    @property
    def begin_step(self) -> int:
        """The run's own first step; a fork's is not 0."""
        return int(self.origin.rpartition("@")[2]) if self.origin else 0

    @functools.cached_property
    def chain_before(self) -> str | None:
        """The chain of the row before the first one, a fork's parent's; None where that is gone."""
        if self.begin_step == 0:
            return ""
        folder, _, step = self.origin.removeprefix("run:").rpartition("@")
        with contextlib.suppress(OSError, ValueError):
            theirs = {row["step"]: row for row in read_rows(pathlib.Path(folder, "metrics.jsonl"))}
            return theirs.get(int(step) - 1, {}).get(chain.CHAIN)
        return None

    @property
    def linked(self) -> list[dict]:
        """The rows whose link can be checked: without the parent's row not the first one."""
        return self.rows if self.chain_before is not None else self.rows[1:]

    def start_of(self, row: int) -> dict:
        """Returns the start that wrote a row; {} where there is none."""
        step = self.rows[row]["step"]
        wrote = [start for start in self.starts if start["first_step"] <= step]
        return wrote[-1] if wrote else {}


def read(workdir: pathlib.Path) -> Written:
    """Reads a run's directory; raises where its rows cannot be read."""
    path, config = workdir / "metrics.jsonl", {}
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: --workdir={workdir} holds no training run")
    with contextlib.suppress(ValueError, OSError, RecursionError):  # `config_file` says it
        config = read_json(workdir / "config.json")
    return Written(
        workdir=workdir,
        lines=path.read_bytes().splitlines(keepends=True),
        rows=read_rows(path),
        starts=read_starts(workdir / "starts.jsonl"),
        config=config,
        is_sealed=(workdir / chain.SEAL).is_file(),
        files=chain.files_in(workdir),
    )


def check(run: Written, digest: str | None) -> Iterator[Finding]:
    """Checks the directory against chain and seal, and names the files that neither covers."""
    if not all(chain.CHAIN in row for row in run.rows):
        yield Finding(WRONG, "metrics.jsonl: a row has no chain")
        return
    yield from guarded("metrics.jsonl", rows(run))
    yield from guarded("starts.jsonl and config.json", starts(run))
    yield from guarded("metrics.jsonl's digests of files", files(run))
    yield from guarded(chain.SEAL, sealed(run))
    yield from guarded("checkpoints", checkpoints(run))
    yield from guarded("the directory", others(run))
    if digest is not None:
        yield published(run, digest)


def rows(run: Written) -> Iterator[Finding]:
    """Checks metrics.jsonl: complete, byte for byte as written, each row linked to the one before.

    The row before a fork's first one is its parent's.
    """
    steps = [row["step"] for row in run.rows]
    if steps != [*range(run.begin_step, run.begin_step + len(steps))]:
        yield Finding(WRONG, f"metrics.jsonl: its rows are of the steps {listed(steps, limit=20)}")
    lines = run.lines
    if not run.is_sealed and not lines[-1].endswith(b"\n"):  # being written, or cut by a kill
        yield Finding(UNCHECKED, "metrics.jsonl: its last line has no end yet")
        lines = [*lines[:-1], lines[-1] + b"\n"][: len(run.rows)]
    if [json_line(row) for row in run.rows] != lines:
        yield Finding(WRONG, "metrics.jsonl: a row is not written as the run writes it")
    before = run.chain_before
    if before is None:
        yield Finding(UNCHECKED, f"metrics.jsonl: the row before the first is of {run.origin}")
        before = run.rows[0][chain.CHAIN]
    wrong = []
    for row in run.linked:
        if row[chain.CHAIN] != chain.link(before, row):
            wrong.append(row["step"])
        before = row[chain.CHAIN]
    if wrong:
        yield Finding(WRONG, f"metrics.jsonl: the chain does not hold at step {listed(wrong)}")
    else:
        yield Finding(SAME, f"metrics.jsonl: {len(run.rows)} rows, chained")


def starts(run: Written) -> Iterator[Finding]:
    """Checks that config.json is the recipe of the last start."""
    from dapo_jax.run import provenance  # it imports jax

    path = run.workdir / "config.json"
    good = run.starts and provenance.recipe_digest(run.config) == run.starts[-1]["config_sha256"]
    good = good and path.is_file() and path.read_bytes() == chain.as_written(run.config)
    what = "the recipe of the last start" if good else "not the recipe of the last start"
    yield Finding(SAME if good else WRONG, f"config.json: {what}")


def files(run: Written) -> Iterator[Finding]:
    """Checks the files that rows have digests of."""
    gone = [name for name in run.known if name not in run.files]
    other = [
        name
        for name, digest in run.known.items()
        if name in run.files and chain.of_file(run.files[name]) != digest
    ]
    for name in other:
        yield Finding(WRONG, f"{name}: not what the run wrote")
    for name in gone:
        yield Finding(WRONG, f"{name}: gone")
    if not (gone or other):
        yield Finding(SAME, f"{len(run.known)} files that rows have digests of")


def sealed(run: Written) -> Iterator[Finding]:
    """Checks seal.json, and the files that it alone has digests of."""
    if not run.is_sealed:
        done = run.rows[-1]["step"] + 1 >= run.config.get("num_steps", 0)
        text = "none, the run has not ended"
        if done:  # a kill in the last moment leaves the same
            text = "not there, though all steps are done; the run's command, given again, writes it"
        yield Finding(WRONG if done else UNCHECKED, f"{chain.SEAL}: {text}")
        return
    path = run.workdir / chain.SEAL
    theirs, ours = read_json(path), chain.seal(run.workdir, run.rows)
    names = theirs["files"].keys() | ours["files"].keys()
    wrong = [name for name in sorted(names) if theirs["files"].get(name) != ours["files"].get(name)]
    if DRAWN in wrong and {DRAWN, PAGE} <= run.files.keys():
        wrong.remove(DRAWN)
        ours["files"][DRAWN] = theirs["files"].get(DRAWN)
        yield Finding(UNCHECKED, f"{DRAWN}: another one, which `report` draws beside {PAGE}")
    expected = {**ours, "files": theirs["files"]} if wrong else ours
    is_ours = path.read_bytes() == chain.as_written(expected)
    if not is_ours:
        yield Finding(WRONG, f"{chain.SEAL}: not what the run wrote of these rows and files")
    for name in wrong:
        what = "not what was there at the run's end" if name in theirs["files"] else "added"
        yield Finding(WRONG, f"{name}: {what if name in run.files else 'gone'}")
    if is_ours and not wrong:
        yield Finding(SAME, f"the other files, {len(names)} in {chain.SEAL}")


def checkpoints(run: Written) -> Iterator[Finding]:
    """Checks the manifest and progress of each checkpoint against the row of its last step."""
    from dapo_jax.run import digests  # it imports jax

    steps = saved_steps(run)
    if not steps:
        yield Finding(UNCHECKED, f"no checkpoint is in {run.checkpoints}")
    by_step = {row["step"] + 1: row for row in run.rows}
    for step in steps:
        name, row = f"checkpoint {step}", by_step.get(step)
        if row is None:
            late = step > run.rows[-1]["step"] + 1 and not run.is_sealed
            yield Finding(UNCHECKED if late else WRONG, f"{name}: there is no row of it")
            continue
        folder = run.checkpoints / str(step)
        try:
            manifest = json.loads((folder / "manifest" / "metadata").read_text())
            progress = json.loads((folder / "progress" / "metadata").read_text())
            digest = manifest.pop("digest")
            faults = {
                "its manifest": digest != digests.of_json(manifest),
                "its arrays' digests": digests.of_json(manifest["arrays"]) != row[chain.STATE],
                "its progress": digests.of_json(progress) != manifest["progress"],
                "its row": chain.plain_value(progress["row"]) != row,
            }
            wrong = [what for what, is_wrong in faults.items() if is_wrong]
        except (OSError, *NOT_AS_WRITTEN) as error:
            wrong = [f"its files ({said(error)})"]
        if wrong and not run.is_sealed and not folder.exists():
            continue  # the run goes on, and keeps only its newest ones
        if wrong:
            yield Finding(WRONG, f"{name}: {listed(wrong)}: not what the rows say")
        else:
            yield Finding(SAME, f"{name}: manifest and progress")


def saved_steps(run: Written) -> list[int]:
    """Lists the steps of which there are checkpoints."""
    there = run.checkpoints.iterdir() if run.checkpoints.is_dir() else ()
    return sorted(int(path.name) for path in there if path.name.isdecimal())


def others(run: Written) -> Iterator[Finding]:
    """Names what nothing has a digest of; the run's own names were added."""
    last, unchecked = run.rows[-1]["step"], []
    for name in chain.no_files_in(run.workdir):
        if chain.OWN.fullmatch(name):
            yield Finding(WRONG, f"{name}: no file, the run did not write it")
        else:
            unchecked.append(name)
    for name in (name for name in run.files if name not in run.known):
        match = chain.OWN.fullmatch(name)
        if match and run.is_sealed and not chain.is_arrays(name, run.files[name]):
            continue  # `sealed` has it
        step = match and match["rollout"]
        if step and int(step) <= last and not run.is_sealed:
            yield Finding(WRONG, f"{name}: no row has it, the run did not write it")
        else:
            unchecked.append(name)
    of_saves = [name for name in unchecked if name.startswith("checkpoints/")]
    if of_saves:
        text = "by what they restore to alone, in a re-execution"
        yield Finding(UNCHECKED, f"{len(of_saves)} files of checkpoints: {text}")
    if rest := [name for name in unchecked if name not in of_saves]:
        yield Finding(UNCHECKED, f"no digest of: {listed(rest, limit=20)}")


def published(run: Written, digest: str) -> Finding:
    """Compares with the digest that the run printed at its end, or with a row's chain."""
    file = run.workdir / chain.SEAL
    if file.is_file() and chain.of_file(file) == digest:
        return Finding(SAME, f"{chain.SEAL} is the one of --digest")
    for row in run.linked:
        if row[chain.CHAIN] == digest:
            return Finding(SAME, f"the rows up to step {row['step']} are those of --digest")
    return Finding(WRONG, f"--digest={digest} is neither {chain.SEAL}'s nor a row's chain")
