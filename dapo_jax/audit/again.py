"""Does steps of a run again, from its checkpoints, by `train.rl_step`, and compares every bit.

The run's directory is only read: what a step writes goes to a temporary one.
"""

import contextlib
import dataclasses
import functools
import io
import logging
import pathlib
import random
import tempfile
from collections.abc import Collection, Iterator

from ml_collections import ConfigDict

from configs.base import eval_settings, mixture_settings
from dapo_jax import lifetime, train
from dapo_jax.audit.findings import NOT_AS_WRITTEN, REFUSED, SAME, UNCHECKED, WRONG, Finding, listed
from dapo_jax.audit.written import Written, saved_steps
from dapo_jax.run import chain, checks, hub, identity, policy, provenance, start
from dapo_jax.run.checkpoint import Checkpoints, DamagedError
from dapo_jax.run.files import read_rows
from dapo_jax.run.record import Record
from dapo_jax.tasks.base import BUILT_IN
from models import families

NAMES = {
    chain.TOKENS: "samples",
    chain.LOGP: "log-probabilities",
    chain.VERDICTS: "verdicts",
    chain.STATE: "weights",
}
OF_BITS = ("jax", "jaxlib")  # packages whose version decides them


class Unsaved:
    """Stands where a run has its snapshots: nothing is saved."""

    def take(self, step, state, progress, arrays, *, force=False) -> None:
        """Leaves the checkpoint out."""


def check(run: Written, *, steps: int, seed: int, trust_code: bool) -> Iterator[Finding]:
    """Restores every checkpoint, and does so many random steps again.

    trust_code: whether modules that the run's recipe names may be imported.
    """
    if not steps:
        yield Finding(UNCHECKED, "--steps=0: no step was done again, no checkpoint's arrays read")
        return
    try:
        if not trust_code:
            _require_built_in(run)
        yield from _check(run, steps, random.Random(seed), f"--seed={seed}")
    except DamagedError as error:
        yield Finding(WRONG, str(error))
    except (OSError, *NOT_AS_WRITTEN) as error:
        # The latter of a config.json that is no recipe.
        yield Finding(REFUSED, f"no step can be done again: {error or type(error).__name__}")


def _require_built_in(run: Written) -> None:
    """Refuses a recipe that names modules to import (ValueError)."""
    config, file = ConfigDict(run.config), run.workdir / "config.json"
    policy.require_built_in({"model.family": config.model.family}, families.BUILT_IN, file)
    sets = mixture_settings(config).items()
    tasks = {f"{key}.task": settings["task"] for key, settings in sets}
    tasks |= {f"eval.sets.{name}.task": it["task"] for name, it in eval_settings(config).items()}
    policy.require_built_in(tasks, BUILT_IN, file)


def _check(run: Written, steps: int, chance: random.Random, seed: str) -> Iterator[Finding]:
    config = ConfigDict(run.config)
    checks.check(config)
    hub.fetch(hub.paths(config), run.workdir)
    here = provenance.this_start(config)
    refusals = {}
    for index, row in enumerate(run.rows):
        if why := other_bits(run.start_of(index), here):
            refusals.setdefault(why, []).append(row["step"])
    for why, of in refusals.items():
        yield Finding(REFUSED, f"step {spans(of)}: {why}")
    commits = {run.start_of(index).get("commit") for index in range(len(run.rows))}
    if others := sorted(str(commit)[:9] for commit in commits - {here["commit"]}):
        code = f"commit {listed(others)}, and here is {str(here['commit'])[:9]}"
        yield Finding(UNCHECKED, f"steps were done by {code}: other code may give other bits")
    can = {row["step"] for row in run.rows} - {step for of in refusals.values() for step in of}

    saved = saved_steps(run)
    origin = start.Origin.parse(run.origin) if run.origin else None
    begins = origin is None or start.is_there(origin)
    bases = sorted({*saved, *([run.begin_step] if begins else [])})
    # With carry-over a resumed process computes keys and values again, one that runs on does not.
    starts = {start["first_step"] for start in run.starts if config.rollout.carry_over_steps}
    reach = reached(bases, can, run_on=config.checkpoint.every_steps, not_over=starts)
    if not reach:
        yield Finding(REFUSED, f"of the checkpoints {bases} none has a step that can be done again")
        return
    chosen = sorted(chance.sample(sorted(reach), min(steps, len(reach))))
    last = {reach[step]: step for step in chosen}  # of each base, the farthest
    every = spans([row["step"] for row in run.rows])
    said = f"of the steps {every} can be done again {spans(sorted(reach))}"
    why = f"from checkpoints {bases} (checkpoint.keep = {config.checkpoint.keep} decides)"
    yield Finding(SAME, f"{said}, {why}; chosen with {seed}: {listed(chosen)}")
    if len(chosen) < steps:
        yield Finding(REFUSED, f"--steps={steps}, but only {len(chosen)} can be done again")
    yield from _again(run, config, origin, saved, last)


def other_bits(there: dict, here: dict) -> str:
    """Says why a start's steps have other bits here; "" where they have the same."""
    if not there:
        return "starts.jsonl does not tell where it was done"
    theirs, ours = there["devices"], here["devices"]
    if (theirs["kind"], theirs["count"]) != (ours["kind"], ours["count"]):
        return (
            f"was done on {theirs['count']} x {theirs['kind']}, and here are {ours['count']} x "
            f"{ours['kind']}: other devices give other bits"
        )
    for name in OF_BITS:
        if (was := there["versions"].get(name)) != (its := here["versions"][name]):
            return f"was done with {name} {was}, and here is {its}: it gives other bits"
    if there["steps_sha256"] != here["steps_sha256"]:
        return "was done under another recipe than config.json's, which a resumed run may change"
    return ""


def reached(
    bases: list[int], can: set[int], *, run_on: int, not_over: Collection[int] = ()
) -> dict[int, int]:
    """Step -> the checkpoint from which it is done again, by running on for so many steps.

    not_over: steps at which it cannot run on.
    """
    found = {}
    for base in bases:
        for step in range(base, base + run_on):
            if step not in can or (step > base and step in not_over):
                break
            found[step] = base  # a later checkpoint is nearer
    return found


def _again(
    run: Written,
    config: ConfigDict,
    origin: start.Origin | None,
    saved: list[int],
    last: dict[int, int],
) -> Iterator[Finding]:
    parts = start.prepare(config, run.workdir)
    ours = identity.of_run(config, parts.data) | {"origin": None}
    same = functools.partial(identity.require_same, ours=ours, report=logging.warning)
    shared, config.log.writers = None, ()  # it tells nobody else
    first = state = progress = None
    for base in sorted({*saved, *last}):
        del first, state, progress  # the devices have room for one training state
        if base in saved:
            checkpoints = Checkpoints(run.checkpoints, keep=None)
            try:
                state, progress = checkpoints.restore(base, parts.programs.state, require=same)
            finally:
                checkpoints.close()
            progress = start.Progress.from_json(progress)
            yield Finding(SAME, f"checkpoint {base}: its arrays, bit by bit, and its identity")
        elif origin:
            _, state, progress, *_ = start.forked(parts.programs, ours, origin)
        else:
            state, progress = parts.programs.start_state(), start.Progress()
        first = None
        if base not in last:
            continue
        first = start.Start(base, state, progress, run.checkpoints, None)
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            workdir = pathlib.Path(folder)
            if shared is None:
                shared = lifetime.ready(config, workdir, stack, parts, first, Unsaved())
                again = shared
            else:
                record = stack.enter_context(Record(config, workdir, first))
                again = dataclasses.replace(shared, record=record)
            for step in range(base, last[base] + 1):
                state, progress, _ = train.rl_step(again, step, state, progress)
            rows = read_rows(workdir / "metrics.jsonl")
        found = {row["step"]: row for row in rows}
        for step in range(base, last[base] + 1):
            yield compared(run, step, found.get(step, {}))


def compared(run: Written, step: int, again: dict) -> Finding:
    """Compares a row of the run with that of the step done again, but for times."""
    row = next(row for row in run.rows if row["step"] == step)
    wanted, found = chain.untimed(row), chain.untimed(again)
    keys = [key for key in {**wanted, **found} if wanted.get(key) != found.get(key)]
    if not keys:
        return Finding(
            SAME, f"step {step} done again: {', '.join(NAMES.values())} and metrics, bit by bit"
        )
    names = [NAMES[key] for key in NAMES if key in keys]
    names += [key for key in keys if key not in NAMES and key != chain.CHAIN]
    return Finding(WRONG, f"step {step} done again has other {listed(names or [chain.CHAIN])}")


def spans(steps: list[int]) -> str:
    """Formats steps as ranges: [3, 4, 5, 9] is "3-5, 9"."""
    ends: list[list[int]] = []
    for step in steps:
        if ends and step == ends[-1][1] + 1:
            ends[-1][1] = step
        else:
            ends.append([step, step])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ends)
