"""What a run begins with: its own newest checkpoint, another run's (a fork), or the start policy.

A fork goes on with its parent's policy, the optimizer's moments, the place in the prompt stream
and the randomness, under another recipe: forks of one checkpoint share prompts and sampling noise
until their weights differ. The parent is read and never written to.
"""

import dataclasses
import functools
import pathlib
from typing import NamedTuple

from absl import logging
from etils import epath
from ml_collections import ConfigDict

from dapo_jax.learner import TrainState
from dapo_jax.run import build, checks, identity
from dapo_jax.run.checkpoint import Checkpoints, DamagedError
from dapo_jax.run.files import read_json, read_starts
from dapo_jax.run.provenance import NAME as STARTS
from sharding import hosts


@dataclasses.dataclass(frozen=True)
class Origin:
    """The checkpoint that a fork begins from: a run's workdir, and its finished steps."""

    workdir: pathlib.Path
    step: int

    @classmethod
    def parse(cls, text: str) -> "Origin":
        """Reads run:DIR@STEP; ValueError for anything else."""
        kind, _, place = text.partition(":")
        folder, _, step = place.rpartition("@")
        if kind != "run" or not folder or not step.isdecimal():
            raise ValueError(
                f"--start is {text!r}, but must be run:DIR@STEP: the workdir of a run, and the "
                "finished steps of one of its checkpoints"
            )
        return cls(pathlib.Path(folder).resolve(), int(step))

    def __str__(self) -> str:
        return f"run:{self.workdir}@{self.step}"


class Begun(NamedTuple):
    """What a process goes on with.

    step: finished steps, those before a fork included; the first to do. directory: where state and
    progress were read; None for the start policy. origin: of the run, where it is a fork.
    """

    step: int
    state: TrainState
    progress: dict
    directory: epath.Path | None
    origin: Origin | None

    @property
    def begin_step(self) -> int:
        """The run's own first step."""
        return self.origin.step if self.origin else 0

    @property
    def is_new(self) -> bool:
        """Whether the run has no finished step of its own."""
        return self.step == self.begin_step


def origin_of(workdir: pathlib.Path, given: Origin | None) -> Origin | None:
    """Returns what the run in `workdir` began from; `given` where there is none yet.

    A start that was refused leaves a line in starts.jsonl too, but no recipe: from the one that
    wrote config.json on, all lines have the run's origin. Raises ValueError where --start (`given`)
    is another one.
    """
    if given and given.workdir == workdir.resolve():
        raise ValueError(f"--start={given} is the run in --workdir itself; give a new --workdir")
    if not any((workdir / name).exists() for name in ("config.json", "metrics.jsonl")):
        return given
    starts = read_starts(workdir / STARTS)
    begun = starts[-1].get("origin") if starts else None
    if given and str(given) != begun:
        raise ValueError(
            f"--start={given}, but {workdir} holds a run that began "
            f"{f'with {begun}' if begun else 'without a --start'}; leave --start out to resume "
            "it, or give another --workdir"
        )
    return Origin.parse(begun) if begun else None


def check_parent(config: ConfigDict, checkpoints: Checkpoints, origin: Origin | None) -> None:
    """Refuses, before anything is loaded, a fork of a checkpoint that is not there.

    Where the fork has checkpoints of its own its parent is not needed any more, and may be gone.
    """

    def check():
        if origin and checkpoints.latest_step() is None:
            directory, recipe = _parent(origin)
            steps = sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())
            if origin.step not in steps:
                raise FileNotFoundError(
                    f"--start={origin}: {directory} has no checkpoint {origin.step}, only {steps}. "
                    f"{_kept(recipe)}"
                )
            if config.num_steps <= origin.step:
                raise ValueError(
                    f"num_steps = {config.num_steps}, but --start={origin} begins after "
                    f"{origin.step} steps: there is none to do; num_steps counts those too"
                )

    hosts.on_main(check)


def restore(
    config: ConfigDict,
    workdir: pathlib.Path,
    programs: build.Programs,
    data: build.Data,
    checkpoints: Checkpoints,
    origin: Origin | None,
) -> Begun:
    """Reads what the run goes on with, and tells `checkpoints` whose run it is.

    Raises ValueError or OSError as `Checkpoints.restore_latest` does, and for a parent with another
    policy, seed or training data.
    """
    ours = identity.of_run(config, data) | {"origin": origin and str(origin)}
    checkpoints.identity = ours
    directory = checkpoints.directory
    if restored := checkpoints.restore_latest(programs.state, report=logging.warning):
        # A new --workdir does not know it: its checkpoint.directory does.
        theirs = (checkpoints.identity_of(restored[0]) or {}).get("origin")
        ours["origin"] = theirs
        origin = theirs and Origin.parse(theirs)
        checks.check_steps_left(config, restored[0], directory)
        return Begun(*restored, directory, origin)
    begin_step = origin.step if origin else 0
    hosts.on_main(
        lambda: identity.check_checkpoint_is_there(
            config, workdir, directory, begin_step=begin_step
        )
    )
    if origin:
        return forked(programs, ours, origin)
    return Begun(0, programs.start_state(), new_progress(), None, None)


def new_progress() -> dict:
    """The progress of a run that has done nothing yet."""
    return {"cursor": 0, "sampled_tokens_total": 0, "row": None}


def forked(programs: build.Programs, ours: dict, origin: Origin) -> Begun:
    """Reads the parent's checkpoint, with which a fork begins."""
    directory, recipe = hosts.on_main(lambda: _parent(origin))
    parent = Checkpoints(directory, keep=None)
    same = functools.partial(identity.require_parent, ours=ours)
    try:
        state, progress = parent.restore(
            origin.step, programs.state, require=same, report=logging.warning
        )
    except (FileNotFoundError, DamagedError) as error:
        raise type(error)(f"--start={origin}: {error}. {_kept(recipe)}") from error
    finally:
        parent.close()
    return Begun(origin.step, state, progress, epath.Path(directory), origin)


def is_there(origin: Origin) -> bool:
    """Whether the parent still has the checkpoint."""
    try:
        return (_parent(origin)[0] / str(origin.step)).is_dir()
    except (ValueError, OSError):
        return False


def _parent(origin: Origin) -> tuple[epath.Path, dict]:
    """Finds the directory of a run's checkpoints: (directory, the run's recipe)."""
    file = origin.workdir / "config.json"
    recipe = read_json(file) if file.is_file() else {}
    if "checkpoint" not in recipe:  # a model's directory has a config.json too
        raise FileNotFoundError(
            f"--start={origin}: {file} is missing, or no run's recipe; give the --workdir of a "
            "training run"
        )
    directory = epath.Path(recipe["checkpoint"]["directory"] or origin.workdir / "checkpoints")
    if not directory.is_dir():
        raise FileNotFoundError(
            f"--start={origin}: {directory}, where its run had its checkpoints, is not there"
        )
    return directory, recipe


def _kept(recipe: dict) -> str:
    keep = recipe["checkpoint"]["keep"]
    return (
        f"Its run keeps its newest {keep} (checkpoint.keep = {keep}): resume it with a larger "
        "checkpoint.keep to have those to come, or fork another step"
    )
