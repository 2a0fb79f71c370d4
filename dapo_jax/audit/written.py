"""Checks what a run wrote against its chain: rows, starts, recipe, files, checkpoints' manifests.

Reads only; host only. Each check yields findings.
"""

import contextlib
import dataclasses
import functools
import hashlib
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
from dapo_jax.run import chain, ending
from dapo_jax.run.files import json_line, read_json, read_rows

LOCK = "run.lock"
DRAWN, PAGE = "curves.png", "report.html"


@dataclasses.dataclass(frozen=True)
class Written:
    """What is in a run's directory.

    lines, rows: of metrics.jsonl. starts: starts.jsonl's bytes. config: the recipe; {} where it
    cannot be read. end: seal.json; None without. files: all others, by their path.
    """

    workdir: pathlib.Path
    lines: list[bytes]
    rows: list[dict]
    starts: bytes
    config: dict
    end: dict | None
    files: dict[str, pathlib.Path]

    @functools.cached_property
    def known(self) -> dict[str, str]:
        """Files that rows have digests of, each as it was written last."""
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
    def begin_step(self) -> int:
        """The run's own first step; a fork's is not 0."""
        origin = self.start_of(-1).get("origin")
        return int(origin.rpartition("@")[2]) if origin else 0

    @property
    def starts_bytes(self) -> list[tuple[bytes, bytes]]:
        """(what is before it, the line) of each line of starts.jsonl."""
        lines = self.starts.splitlines(keepends=True)
        return [(b"".join(lines[:i]), line) for i, line in enumerate(lines)]

    def start_of(self, row: int) -> dict:
        """Returns the start that wrote a row; {} where it cannot be told."""
        digest = self.rows[row].get(chain.STARTS)
        for before, line in self.starts_bytes:
            if hashlib.sha256(before + line).hexdigest() == digest:
                return json.loads(line)
        return {}


def read(workdir: pathlib.Path) -> Written:
    """Reads a run's directory; raises where its rows cannot be read."""
    path, starts = workdir / "metrics.jsonl", workdir / "starts.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: --workdir={workdir} holds no training run")
    rows, config, end = read_rows(path), {}, None
    with contextlib.suppress(ValueError, OSError, RecursionError):  # `config_file` says it
        config = read_json(workdir / "config.json")
    if (workdir / ending.NAME).is_file():
        end = {}
        with contextlib.suppress(ValueError, RecursionError):  # `end` says it
            end = read_json(workdir / ending.NAME)
    return Written(
        workdir=workdir,
        lines=path.read_bytes().splitlines(keepends=True),
        rows=rows,
        starts=starts.read_bytes() if starts.is_file() else b"",
        config=config,
        end=end,
        files=ending.files_in(workdir),
    )


def check(run: Written, digest: str | None) -> Iterator[Finding]:
    """Checks all that the chain says of the directory, and names what nothing says anything of."""
    if (run.workdir / LOCK).exists():
        yield Finding(
            UNCHECKED, f"{LOCK}: the run is going on, or was killed: audited as far as it is"
        )
    if not any(chain.CHAIN in row for row in run.rows):
        yield Finding(
            WRONG, "metrics.jsonl: no row has a chain: an earlier version's, or it was taken out"
        )
        return
    yield from guarded("metrics.jsonl", rows(run))
    yield from guarded("starts.jsonl", starts(run))
    yield from guarded("config.json", config_file(run))
    yield from guarded("metrics.jsonl's digests of files", files(run))
    yield from guarded(ending.NAME, end(run))
    yield from guarded("checkpoints", checkpoints(run))
    yield from guarded("the directory", others(run))
    if digest is not None:
        yield published(run, digest)


def rows(run: Written) -> Iterator[Finding]:
    """Checks metrics.jsonl: complete, byte for byte as written, each row linked to the one before.

    A fork's first row, or one whose file was deleted before it, says what it is linked to.
    """
    steps = [row["step"] for row in run.rows]
    if steps != [*range(run.begin_step, run.begin_step + len(steps))]:
        yield Finding(WRONG, f"metrics.jsonl: its rows are of the steps {listed(steps, limit=20)}")
    lines = run.lines
    if run.end is None and not lines[-1].endswith(b"\n"):  # being written, or cut by a kill
        yield Finding(UNCHECKED, "metrics.jsonl: its last line has no end yet")
        lines = [*lines[:-1], lines[-1] + b"\n"][: len(run.rows)]
    if [json_line(row) for row in run.rows] != lines:
        yield Finding(WRONG, "metrics.jsonl: a row is not written as the run writes it")
    before, sealed, chained = run.rows[0].get(chain.BEFORE, ""), "", False
    wrong = []
    for row in run.rows:
        here = chain.CHAIN in row
        good = not chained
        if here:
            good = row[chain.CHAIN] == chain.link(before, row)
            good = good and row.get(chain.SEAL) == chain.seal(sealed, row)
        if not good:
            wrong.append(row["step"])
        before, sealed = row.get(chain.CHAIN, ""), row.get(chain.SEAL, "")
        chained = chained or here
    if wrong:
        yield Finding(WRONG, f"metrics.jsonl: the chain does not hold at step {listed(wrong)}")
    old = [row["step"] for row in run.rows if chain.CHAIN not in row]
    if old and not wrong:
        yield Finding(UNCHECKED, f"metrics.jsonl: steps {listed(old)} are of an earlier version")
    if not wrong:
        yield Finding(SAME, f"metrics.jsonl: {len(run.rows) - len(old)} rows, chained")
    if parent := run.start_of(-1).get("origin"):
        yield _parent(run, parent)


def _parent(run: Written, origin: str) -> Finding:
    folder, _, step = origin.removeprefix("run:").rpartition("@")
    file, first = pathlib.Path(folder) / "metrics.jsonl", run.rows[0].get(chain.BEFORE, "")
    try:
        theirs = {row["step"]: row.get(chain.CHAIN, "") for row in read_rows(file)}
    except (OSError, ValueError) as error:
        return Finding(UNCHECKED, f"the chain before step {step} is the parent's: {error}")
    same = theirs.get(int(step) - 1) == first
    return Finding(SAME if same else WRONG, f"the chain goes on from row {int(step) - 1} of {file}")


def starts(run: Written) -> Iterator[Finding]:
    """Checks starts.jsonl: each line sealed with those before, and known to the rows after it."""
    from dapo_jax.run import provenance  # it imports jax

    wrong, old, known, torn = [], 0, False, []
    for number, (before, line) in enumerate(run.starts_bytes, start=1):
        if _torn(line):
            torn.append(number)  # a kill in a line; the seal of a line after it has its bytes too
            continue
        try:
            start = json.loads(line)
            known = known or "seal" in start
            if not known:  # the seal of a later line has it too
                old += 1
                continue
            good = start["seal"] == provenance.seal(before, start) and json_line(start) == line
        except NOT_AS_WRITTEN:
            good = False
        if not good:
            wrong.append(number)
    sealed = [row[chain.STARTS] for row in run.rows if chain.STARTS in row]
    ends = {hashlib.sha256(a + b).hexdigest() for a, b in run.starts_bytes}
    if lost := set(sealed) - ends:
        yield Finding(WRONG, f"starts.jsonl: {len(lost)} of its states that rows tell of are gone")
    if wrong:
        yield Finding(WRONG, f"starts.jsonl: line {listed(wrong)} is not what the run wrote")
    if old:
        yield Finding(UNCHECKED, f"starts.jsonl: {old} starts are of an earlier version")
    if torn:
        yield Finding(UNCHECKED, f"starts.jsonl: line {listed(torn)} was cut short by a kill")
    if not (lost or wrong):
        yield Finding(SAME, f"starts.jsonl: {len(run.starts_bytes) - old - len(torn)} starts")


def _torn(line: bytes) -> bool:
    """Whether a line is the beginning of one: a start whose write was cut."""
    try:
        json.loads(line)
    except ValueError:
        beginning = b'{"time": "'[: len(line.rstrip(b"\n"))]
        return bool(beginning) and line.startswith(beginning)
    return False


def config_file(run: Written) -> Iterator[Finding]:
    """Checks config.json: the recipe of the start that wrote the last row, or of a later one."""
    from dapo_jax.run import provenance

    path, allowed, seen = run.workdir / "config.json", set(), False
    for before, line in run.starts_bytes:
        whole = hashlib.sha256(before + line).hexdigest()
        seen = seen or whole == run.rows[-1].get(chain.STARTS)
        try:
            allowed |= {json.loads(line)["config_sha256"]} if seen else set()
        except NOT_AS_WRITTEN:
            continue  # `starts` says it
    content = (json.dumps(run.config, indent=1) + "\n").encode()
    good = path.is_file() and path.read_bytes() == content
    good = good and provenance.recipe_digest(run.config) in allowed
    what = "the recipe of the last start" if good else "not what the run was started with"
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


def end(run: Written) -> Iterator[Finding]:
    """Checks seal.json, and the files that it alone has digests of."""
    if run.end is None:
        done = run.rows[-1]["step"] + 1 >= run.config.get("num_steps", 0)
        text = "not there, though all steps are done" if done else "none, the run has not ended"
        yield Finding(WRONG if done else UNCHECKED, f"{ending.NAME}: {text}")
        return
    path = run.workdir / ending.NAME
    sealed = sealed_files(run)
    ours = {"rows": len(run.rows), "seal": run.rows[-1].get(chain.SEAL), "files": sealed}
    if path.read_bytes() != (json.dumps(ours, indent=1) + "\n").encode():
        yield Finding(WRONG, f"{ending.NAME}: not of these rows")
    wrong = [
        name
        for name, digest in sealed.items()
        if name not in run.files or chain.of_file(run.files[name]) != digest
    ]
    if DRAWN in wrong and {DRAWN, PAGE} <= run.files.keys():
        wrong.remove(DRAWN)
        yield Finding(UNCHECKED, f"{DRAWN}: another one, which `report` draws beside {PAGE}")
    for name in wrong:
        what = "not what was there at the run's end" if name in run.files else "gone"
        yield Finding(WRONG, f"{name}: {what}")
    if not wrong:
        yield Finding(SAME, f"the other files, {len(sealed)} in {ending.NAME}")


def sealed_files(run: Written) -> dict[str, str]:
    """Returns the digests that seal.json has; {} where it is not what a run writes."""
    found = (run.end or {}).get("files")
    return found if isinstance(found, dict) else {}


def checkpoints(run: Written) -> Iterator[Finding]:
    """Checks what a checkpoint says of itself against the row of its last step."""
    from dapo_jax.run import digests

    steps = saved_steps(run)
    if not steps:
        yield Finding(UNCHECKED, f"no checkpoint is in {run.checkpoints}")
    by_step = {row["step"] + 1: row for row in run.rows}
    for step in steps:
        name, row = f"checkpoint {step}", by_step.get(step)
        if row is None or chain.CHAIN not in row:
            last = run.rows[-1]["step"] + 1
            late = step > last and run.end is None
            yield Finding(UNCHECKED if late or row else WRONG, f"{name}: there is no row of it")
            continue
        try:
            manifest = json.loads(
                (run.checkpoints / str(step) / "manifest" / "metadata").read_text()
            )
            progress = json.loads(
                (run.checkpoints / str(step) / "progress" / "metadata").read_text()
            )
            digest = manifest.pop("digest")
            faults = {
                "its manifest": digest != digests.of_json(manifest),
                "its arrays' digests": digests.of_json(manifest["arrays"]) != row[chain.STATE],
                "its progress": digests.of_json(progress) != manifest["progress"],
                "its row": chain.plain_value(chain.untimed(progress["row"])) != chain.untimed(row),
            }
            wrong = [what for what, is_wrong in faults.items() if is_wrong]
        except (OSError, *NOT_AS_WRITTEN) as error:
            wrong = [f"its files ({said(error)})"]
        if wrong:
            yield Finding(WRONG, f"{name}: {listed(wrong)}: not what the rows say")
        else:
            yield Finding(SAME, f"{name}: manifest and progress")


def saved_steps(run: Written) -> list[int]:
    """Lists the steps of which there are checkpoints."""
    there = run.checkpoints.iterdir() if run.checkpoints.is_dir() else ()
    return sorted(int(path.name) for path in there if path.name.isdecimal())


def others(run: Written) -> Iterator[Finding]:
    """Names the files that nothing has a digest of; the run's own names were added."""
    checked = {*run.known, *sealed_files(run), "config.json", "metrics.jsonl"}
    left = [name for name in run.files if name not in checked]
    left += ending.no_files_in(run.workdir)
    last, unchecked = run.rows[-1]["step"], []
    for name in left:
        match = ending.OWN.fullmatch(name)
        step = match and next((int(n) for n in match.groupdict().values() if n), None)
        going_on = run.end is None and (step is None or step > last)
        of_checkpoint = match and match["checkpoint"]
        arrays = name in run.files and ending.is_arrays(name, run.files[name])
        earlier = any(chain.CHAIN not in row for row in run.rows)
        if not match or going_on or arrays or earlier or (of_checkpoint and run.end is None):
            unchecked.append(name)
        else:
            yield Finding(WRONG, f"{name}: no row has it, the run did not write it")
    of_saves = [name for name in unchecked if ending.OF_CHECKPOINT.match(name)]
    if of_saves:
        text = "by what they restore to alone, in a re-execution"
        yield Finding(UNCHECKED, f"{len(of_saves)} files of checkpoints: {text}")
    if rest := [name for name in unchecked if name not in of_saves]:
        yield Finding(UNCHECKED, f"no digest of: {listed(rest, limit=20)}")


def published(run: Written, digest: str) -> Finding:
    """Compares with the digest that the run printed at its end, or with a row's seal."""
    file = run.workdir / ending.NAME
    if file.is_file() and chain.of_file(file) == digest:
        return Finding(SAME, f"{ending.NAME} is the one of --digest")
    for row in run.rows:
        if row.get(chain.SEAL) == digest:
            return Finding(SAME, f"the rows up to step {row['step']} are those of --digest")
    return Finding(WRONG, f"--digest={digest} is neither {ending.NAME}'s nor a row's seal")
