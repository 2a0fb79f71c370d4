"""The start of a run: from its newest checkpoint, from another run's (a fork), or from the model.

A fork continues its parent's policy, optimizer moments, place in the prompt stream and randomness,
under another config: forks of one checkpoint share prompts and sampling noise until their weights
differ. The parent is read and never written to.
"""

import contextlib
import dataclasses
import functools
import pathlib
from typing import NamedTuple

import jax
from absl import logging
from clu import parameter_overview
from etils import epath
from ml_collections import ConfigDict

from configs.base import leaves
from dapo_jax.checkpoints import fingerprint
from dapo_jax.checkpoints.progress import Progress
from dapo_jax.checkpoints.store import Checkpoints, DamagedError
from dapo_jax.learner import TrainState
from dapo_jax.logs import writers
from dapo_jax.logs.files import locked, read_json, read_starts
from dapo_jax.logs.provenance import NAME as STARTS
from dapo_jax.setup import auto_sizes, checks, components
from dapo_jax.tasks.tokenizer import Tokenizer
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

    They are locked. origin: that of --start.
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
    """Refuses a config that no run can have (ValueError), before anything is written."""
    looks = [lambda: checks.check(config), lambda: writers.check(config.log.writers)]
    if config.model.family and pathlib.Path(config.model.path or "/nowhere").is_dir():
        looks.append(lambda: components.model_sizes(config))
    checks.together(*looks)


class Parts(NamedTuple):
    """The parts of a run that are made before its weights are loaded.

    chosen: lines that name what the config left open.
    """

    tokenizer: Tokenizer
    programs: components.Programs
    data: components.Data
    chosen: list[str]


def prepare(config: ConfigDict, workdir: pathlib.Path) -> Parts:
    """Makes a run's parts, and refuses what does not fit (ValueError, OSError).

    Nothing is written, loaded to the devices or compiled.
    """
    given = dict(leaves(config))
    auto_sizes.fit_model(config, training=True)

    def read():
        tokenizer = components.tokenizer(config)
        return tokenizer, components.load_data(config, tokenizer, training=True)

    _, (tokenizer, data) = checks.together(lambda: components.model_sizes(config), read)
    auto_sizes.fit_data(config, data, given=given)
    data = components.with_samplings(config, tokenizer, data)
    auto_sizes.fit_training(config)
    checks.check(config)
    programs = components.programs(config, tokenizer.vocab_size)
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
    """Reads the checkpoint that the run continues, and gives `checkpoints` its fingerprint.

    Raises ValueError or OSError as `Checkpoints.restore_latest` does, and for a parent with another
    policy, seed or training data.
    """
    programs = parts.programs
    ours = fingerprint.of_run(config, parts.data) | {"origin": origin and str(origin)}
    checkpoints.fingerprint = ours
    directory = checkpoints.directory
    if restored := checkpoints.restore_latest(programs.state, report=logging.warning):
        # A new --workdir does not know it: its checkpoint.directory does.
        theirs = (checkpoints.fingerprint_of(restored[0]) or {}).get("origin")
        ours["origin"] = theirs
        origin = theirs and Origin.parse(theirs)
        checks.check_steps_left(config, restored[0], directory)
        step, state, progress = restored
        return Start(step, state, Progress.from_json(progress), directory, origin)
    begin_step = origin.step if origin else 0
    hosts.on_main(
        lambda: fingerprint.check_checkpoint_is_there(
            config, workdir, directory, begin_step=begin_step
        )
    )
    if origin:
        return forked(programs, ours, origin)
    return Start(0, programs.start_state(), Progress(), None, None)


def forked(programs: components.Programs, ours: dict, origin: Origin) -> Start:
    """Reads the parent's checkpoint, with which a fork begins."""
    directory, recipe = hosts.on_main(lambda: _parent(origin))
    parent = Checkpoints(directory, keep=None)
    same = functools.partial(fingerprint.require_parent, ours=ours)
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
    """Finds the directory of a run's checkpoints: (directory, the run's config)."""
    file = origin.workdir / "config.json"
    recipe = read_json(file) if file.is_file() else {}
    if "checkpoint" not in recipe:  # a model's directory has a config.json too
        raise FileNotFoundError(
            f"--start={origin}: {file} is missing, or no run's config; give the --workdir of a "
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


def banner(config: ConfigDict, parts: Parts, where: pathlib.Path, first: Start) -> str:
    """Says what is about to run: parameters, mesh, data, where it goes, and where it began."""
    device, r = jax.devices()[0], config.rollout
    resuming = "" if first.is_new else f", resuming after {first.step} steps"
    lines = [
        parameter_overview.get_parameter_overview(first.state.params, include_stats=False),
        f"devices: {jax.device_count()} x {device.device_kind}, mesh "
        + ", ".join(f"{axis} {size}" for axis, size in parts.programs.mesh.shape.items()),
        *parts.data.report_lines(),
        f"a step: {r.num_prompts} prompts x {r.group_size} responses of at most "
        f"{r.max_response_tokens} tokens, {config.updates_per_step} updates",
        auto_sizes.padding_line(config, parts.programs, parts.data),
        f"workdir: {where}{resuming}",
    ]
    if first.origin:
        lines.append(f"a fork of checkpoint {first.origin.step} in {first.origin.workdir}")
    if r.top_p < 1 or r.top_k > 0:
        lines.append(
            "note: rollout.top_p or top_k cuts the sampler's distribution, but not the update's: "
            "their ratio is below 1 from the start"
        )
    return "\n".join(lines)
