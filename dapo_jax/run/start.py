"""The start of a run: from its newest checkpoint, from another run's (a fork), or from the model.

A fork continues its parent's policy, optimizer moments, place in the prompt stream and randomness,
under another recipe: forks of one checkpoint share prompts and sampling noise until their weights
differ. The parent is read and never written to.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from absl import logging
from etils import epath
from ml_collections import ConfigDict

from configs.base import leaves
from dapo_jax import carry_over
from dapo_jax.learner import TrainState
from dapo_jax.run import build, checks, fit, identity, writers
from dapo_jax.run.checkpoint import Checkpoints, DamagedError
from dapo_jax.run.files import locked, read_json, read_starts, remove_leftovers
from dapo_jax.run.provenance import NAME as STARTS
from dapo_jax.sampler.session import Session
from dapo_jax.tasks.tokenizer import Tokenizer
from dapo_jax.types import Carried
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


@dataclasses.dataclass(frozen=True)
class Progress:
    """The state of a run between two steps, beside the training state; saved with a checkpoint.

    cursor: of the next unseen prompt. row: that of the last step; None before the first. carried:
    the unfinished groups that the next step continues. retired: solved prompts, by their place in
    the data, with the first epoch without them. session: has the carried groups' keys and values;
    None, and not saved, where the next step computes them again.
    """

    cursor: int = 0
    sampled_tokens_total: int = 0
    row: dict | None = None
    carried: Sequence[Carried] = ()
    retired: Mapping[int, int] = dataclasses.field(default_factory=dict)
    session: Session | None = None

    def to_json(self) -> dict:
        """Describes it for a checkpoint, bit by bit."""
        return {
            "cursor": self.cursor,
            "sampled_tokens_total": self.sampled_tokens_total,
            "row": self.row,
            "carried": carry_over.to_json(self.carried),
            "retired": sorted(self.retired.items()),
        }

    @classmethod
    def from_json(cls, described: Mapping) -> "Progress":
        """Undoes `to_json`."""
        carried = carry_over.from_json(described.get("carried", ()))
        retired = dict(described.get("retired", ()))
        return cls(**{**described, "carried": carried, "retired": retired})


class Start(NamedTuple):
    """The beginning of a process's work.

    step: finished steps, those before a fork included; the first to do. directory: the checkpoints
    that state and progress were read from; None for the start policy. origin: of a fork.
    """

    step: int
    state: TrainState
    progress: Progress
    directory: epath.Path | None
    origin: Origin | None

    @property
    def begin_step(self) -> int:
        """The run's own first step."""
        return self.origin.step if self.origin else 0

    @property
    def is_new(self) -> bool:
        """Returns whether the run has no finished step of its own."""
        return self.step == self.begin_step


def claim(
    config: ConfigDict, workdir: pathlib.Path, stack: contextlib.ExitStack, origin: Origin | None
) -> Origin | None:
    """Makes the folders this run's until the stack is closed, before anything is written to them.

    They are locked, and half-written files of dead processes are removed. origin: that of --start.
    Returns the run's own origin where there is a run, else that. Raises ValueError on all processes
    where a live run has the folders, or the two contradict each other.
    """

    def take():
        stack.enter_context(locked(workdir))
        elsewhere = config.checkpoint.directory
        if (
            elsewhere
            and "://" not in elsewhere
            and pathlib.Path(elsewhere).resolve() != workdir.resolve()
        ):
            stack.enter_context(locked(elsewhere))
        remove_leftovers(workdir)
        return origin_of(workdir, origin)

    return hosts.on_main(take)


def origin_of(workdir: pathlib.Path, given: Origin | None) -> Origin | None:
    """Returns what the run in `workdir` began from; `given` where there is none yet.

    Raises ValueError where --start (`given`) is another one.
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


def check(config: ConfigDict) -> None:
    """Refuses a recipe that no run can have (ValueError), before anything is written."""
    looks = [lambda: checks.check(config), lambda: writers.check(config.log.writers)]
    if config.model.family and pathlib.Path(config.model.path or "/nowhere").is_dir():
        looks.append(lambda: build.model_sizes(config))
    checks.together(*looks)


class Parts(NamedTuple):
    """The parts of a run that are made before its weights are loaded.

    chosen: lines that name what the recipe left open.
    """

    tokenizer: Tokenizer
    programs: build.Programs
    data: build.Data
    chosen: list[str]


def prepare(config: ConfigDict, workdir: pathlib.Path) -> Parts:
    """Makes a run's parts, and refuses what does not fit (ValueError, OSError).

    Nothing is written, loaded to the devices or compiled.
    """
    given = dict(leaves(config))
    fit.fit_model(config, training=True)

    def read():
        tokenizer = build.tokenizer(config)
        return tokenizer, build.load_data(config, tokenizer, training=True)

    _, (tokenizer, data) = checks.together(lambda: build.model_sizes(config), read)
    fit.fit_data(config, data, given=given)
    data = build.with_samplings(config, tokenizer, data)
    fit.fit_training(config)
    checks.check(config)
    programs = build.programs(config, tokenizer.vocab_size)
    checks.check_divides(config, programs.mesh)
    hosts.on_main(lambda: checks.check_same_recipe(config, workdir))
    found = [f"{key} = {value!r}" for key, value in leaves(config) if value != given[key]]
    chosen = [f"chosen by the model, the data and the devices: {', '.join(found)}"] if found else []
    return Parts(tokenizer, programs, data, chosen)


def check_parent(config: ConfigDict, latest_step: int | None, origin: Origin | None) -> None:
    """Refuses, before anything is loaded, a fork of a checkpoint that is not there.

    latest_step: of the fork's own checkpoints; None without any.

    Where the fork has checkpoints of its own its parent is not needed any more, and may be gone.
    """

    def check():
        if origin and latest_step is None:
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
    parts: Parts,
    checkpoints: Checkpoints,
    origin: Origin | None,
) -> Start:
    """Reads the checkpoint that the run continues, and gives `checkpoints` its identity.

    Raises ValueError or OSError as `Checkpoints.restore_latest` does, and for a parent with another
    policy, seed or training data.
    """
    programs = parts.programs
    ours = identity.of_run(config, parts.data) | {"origin": origin and str(origin)}
    checkpoints.identity = ours
    directory = checkpoints.directory
    if restored := checkpoints.restore_latest(programs.state, report=logging.warning):
        # A new --workdir does not know it: its checkpoint.directory does.
        theirs = (checkpoints.identity_of(restored[0]) or {}).get("origin")
        ours["origin"] = theirs
        origin = theirs and Origin.parse(theirs)
        checks.check_steps_left(config, restored[0], directory)
        step, state, progress = restored
        return Start(step, state, Progress.from_json(progress), directory, origin)
    begin_step = origin.step if origin else 0
    hosts.on_main(
        lambda: identity.check_checkpoint_is_there(
            config, workdir, directory, begin_step=begin_step
        )
    )
    if origin:
        return forked(programs, ours, origin)
    return Start(0, programs.start_state(), Progress(), None, None)


def forked(programs: build.Programs, ours: dict, origin: Origin) -> Start:
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
    progress = Progress.from_json(progress)
    return Start(origin.step, state, progress, epath.Path(directory), origin)


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
