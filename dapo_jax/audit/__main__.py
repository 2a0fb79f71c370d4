"""Audits a run: whether its directory holds what the run did, bit by bit.

    python -m dapo_jax.audit --workdir=DIR [--steps=3] [--seed=N] [--digest=SHA256]

compares every file with the digests in the rows and the seal, the rows with their chain, and does
--steps random steps again from checkpoints: samples, log-probabilities, verdicts,
weights and metrics have to be the same bits. One line a thing, then the verdict. The directory is
only read, and the run may be going on. A step whose recipe names a task or a model family that is
no part of this project is done again with --trust_code alone, which imports it. Exit status: 0, all
that was asked for is as the run wrote it; 1, it is not, or could not be checked.

What it proves: nothing was changed by somebody who left the chain as it is. The chain has no
secret: who computes it anew from the changed row on is found by --digest, the one printed at the
run's end and kept elsewhere, or by a step done again, if that step was changed and is among those
chosen. What it does not prove: that the code is this one's, or the data good.
"""

import contextlib
import pathlib
import random
from collections.abc import Iterator

from absl import flags

from dapo_jax.audit import again, written
from dapo_jax.audit.findings import NOT_AS_WRITTEN, REFUSED, UNCHECKED, WRONG, Finding
from dapo_jax.run import command, compile_cache
from dapo_jax.run.files import read_json
from sharding import hosts

SEEDS = 2**32


def audit(
    workdir: pathlib.Path,
    *,
    steps: int,
    seed: int,
    digest: str | None = None,
    trust_code: bool = False,
) -> Iterator[Finding]:
    """Checks a run's directory; see above.

    Raises FileNotFoundError where there is no run, ValueError where it has no row yet.
    """
    try:
        run = written.read(workdir)
    except ValueError as error:
        yield Finding(WRONG, str(error))
        return
    except RecursionError:
        yield Finding(WRONG, "metrics.jsonl: a row is nested too deeply to be read")
        return
    if not run.rows:
        raise ValueError(f"{workdir}/metrics.jsonl has no rows yet: there is nothing to audit")
    yield from written.check(run, digest)
    yield from again.check(run, steps=steps, seed=seed, trust_code=trust_code)


def verdict(findings: list[Finding]) -> tuple[str, int]:
    """Sums up in a line: (the verdict, the exit status)."""
    counts = {kind: sum(f.kind == kind for f in findings) for kind in (WRONG, REFUSED, UNCHECKED)}
    if counts[WRONG]:
        return f"NOT what the run wrote: {counts[WRONG]} of {len(findings)} lines", 1
    if counts[REFUSED]:
        return f"nothing wrong was found, but {counts[REFUSED]} checks could not be made", 1
    more = f"; {counts[UNCHECKED]} lines say what is not checked" if counts[UNCHECKED] else ""
    return f"OK: as the run wrote it{more}", 0


def cpu_devices(workdir: pathlib.Path) -> int:
    """Into how many devices the run's recipe splits the CPUs."""
    with contextlib.suppress(OSError, *NOT_AS_WRITTEN):  # the audit will say it
        return int(read_json(workdir / "config.json").get("mesh", {}).get("cpu_devices", 0))
    return 0


def main(_):
    workdir = pathlib.Path(WORKDIR.value)
    if STEPS.value:
        hosts.start(several=False, cpu_devices=cpu_devices(workdir))
        compile_cache.enable(several=False)
    seed = random.randrange(SEEDS) if SEED.value is None else SEED.value
    findings = []
    how = {"steps": STEPS.value, "digest": DIGEST.value, "trust_code": TRUST_CODE.value}
    for finding in audit(workdir, seed=seed, **how):
        findings.append(finding)
        print(finding, flush=True)
    line, status = verdict(findings)
    print(line)
    raise SystemExit(status)


if __name__ == "__main__":
    WORKDIR = command.define_workdir()
    STEPS = flags.DEFINE_integer("steps", 3, "Random steps to do again; 0: none.", lower_bound=0)
    SEED = flags.DEFINE_integer("seed", None, "Chooses the steps; a random one is said.")
    DIGEST = flags.DEFINE_string("digest", None, "What the run printed at its end.")
    TRUST_CODE = command.define_trust_code()
    command.run(main)
