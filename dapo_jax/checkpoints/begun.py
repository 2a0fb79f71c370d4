"""A run's beginning: the config that its folder has, and of a fork a checkpoint of its parent.

Names for checkpoints are here too: run:DIR@STEP, and "best" in the place of a step.
"""

import dataclasses
import datetime
import pathlib
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from configs.base import OF_POLICY, leaves
from configs.compare import current
from dapo_jax.checkpoints.progress import best_of
from dapo_jax.logs.files import read_json, read_rows, read_starts
from dapo_jax.logs.provenance import NAME as STARTS

BEST = "best"  # in the place of a step, of --step and --start
# Steps without a checkpoint, in units of checkpoint.every_steps, that a run can have finished when
# it is killed: one is being saved, one is pending, and the step of the next waits for the first.
UNSAVED = 3


@dataclasses.dataclass(frozen=True)
class Parent:
    """The checkpoint that a fork begins from: a run's workdir, and its finished steps."""

    workdir: pathlib.Path
    step: int

    @classmethod
    def parse(cls, text: str, fork: pathlib.Path | None = None) -> "Parent":
        """Reads run:DIR@STEP, or run:DIR@best; ValueError for anything else.

        fork: the workdir, where a fork that has begun keeps the step that was best then.
        """
        kind, _, place = text.partition(":")
        folder, _, step = place.rpartition("@")
        if kind != "run" or not folder or not (step.isdecimal() or step == BEST):
            raise ValueError(f"--start is {text!r}, but must be run:DIR@STEP, a run's checkpoint")
        workdir = pathlib.Path(folder).resolve()
        origin = _origin(fork) if fork and step == BEST else None
        if origin and origin.startswith(f"run:{workdir}@"):
            return cls.parse(origin)
        if step == BEST:
            step = best_step(current(read_json(workdir / "config.json")), workdir)
        return cls(workdir, int(step))

    def __str__(self) -> str:
        return f"run:{self.workdir}@{self.step}"

    def checkpoints(self, num_steps: int) -> epath.Path:
        """Returns the directory of the run's checkpoints, for a fork of so many steps.

        Raises FileNotFoundError where the run or the step is not there, ValueError for too few.
        """
        file = self.workdir / "config.json"
        config = read_json(file) if file.is_file() else {}
        if "checkpoint" not in config:  # a model's directory has a config.json too
            raise FileNotFoundError(f"--start={self}: {file} is missing, or no run's config")
        directory = directory_of(current(config), self.workdir)
        steps = sorted(int(it.name) for it in directory.glob("*") if it.name.isdecimal())
        if self.step not in steps:
            raise FileNotFoundError(
                f"--start={self}: {directory} has no checkpoint {self.step}, only {steps}"
            )
        if num_steps <= self.step:
            raise ValueError(
                f"num_steps = {num_steps}, but --start={self} begins after {self.step} steps, "
                "which count too"
            )
        return directory


def directory_of(config: ConfigDict, workdir: pathlib.Path) -> epath.Path:
    """Returns the directory of a run's checkpoints."""
    return epath.Path(config.checkpoint.directory or workdir / "checkpoints")


def best_step(config: ConfigDict, workdir: pathlib.Path) -> int:
    """Returns which checkpoint is the best by the run's evaluations of the set checkpoint.best.

    Those with other settings than the last do not count. ValueError where there is none.
    """
    name, directory = config.checkpoint.best, directory_of(config, workdir)
    files = [it for it in (workdir / "eval").glob("*.json") if it.stem.isdecimal()]
    results = [it for it in map(read_json, files) if name in it["sets"]]
    last = max(results, key=lambda it: it["step"])["settings"][name] if results else {}
    alike = [it for it in results if it["settings"][name] == last]
    scores = {str(it["step"]): it["sets"][name][f"mean@{last['k']}"] for it in alike}
    steps = sorted(int(it.name) for it in directory.glob("*") if it.name.isdecimal())
    if (best := best_of({name: scores}, steps)) is None:
        raise ValueError(
            f"none of the checkpoints {steps} in {directory} was evaluated on checkpoint.best = "
            f"{name!r}; give the number of one"
        )
    return best


def config_of(workdir: pathlib.Path) -> dict:
    """Returns the config of the run in a folder, {} without any; ValueError where it is cut."""
    file = workdir / "config.json"
    try:
        return read_json(file) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{error}; or remove it: checkpoints have the config too") from error


def chosen_before(workdir: pathlib.Path | None, parent: Parent | None = None) -> dict[str, Any]:
    """Returns what was chosen, by dotted key, when the run in a folder began: its whole config.

    Of a fork that has not begun: the keys of its parent's policy. Of a new run: the day, which a
    chat template may write.
    """
    for folder, among in ((workdir, ("",)), (parent and parent.workdir, OF_POLICY)):
        if config := config_of(folder) if folder else {}:
            values = leaves(ConfigDict(config, type_safe=False))
            return {key: value for key, value in values if key.startswith(among)}
    return {"tokenizer.date": datetime.date.today().isoformat()}


def parent_of(workdir: pathlib.Path, given: Parent | None) -> Parent | None:
    """Returns what the run in `workdir` began from, else `given`; ValueError where they differ."""
    if not any((workdir / name).exists() for name in ("config.json", "metrics.jsonl")):
        return given
    origin = _origin(workdir)
    if given and str(given) != origin:
        began = f"with {origin}" if origin else "without a --start"
        raise ValueError(
            f"--start={given}, but {workdir} holds a run that began {began}; leave --start out to "
            "resume it, or give another --workdir"
        )
    return Parent.parse(origin) if origin else None


def _origin(workdir: pathlib.Path) -> str | None:
    starts = read_starts(workdir / STARTS)
    return starts[-1].get("origin") if starts else None


def require_steps_left(config: ConfigDict, finished_steps: int, directory) -> None:
    """Refuses fewer steps than the run has done (ValueError)."""
    if finished_steps > config.num_steps:
        raise ValueError(
            f"num_steps = {config.num_steps}, but the run in {directory} has finished "
            f"{finished_steps} steps"
        )


def require_unsaved(config: ConfigDict, workdir: pathlib.Path, directory, begin_step: int) -> None:
    """Refuses to begin a run anew whose rows say that it has saved checkpoints (ValueError)."""
    file, every = workdir / "metrics.jsonl", config.checkpoint.every_steps
    finished = max((row["step"] + 1 for row in read_rows(file)), default=0) if file.exists() else 0
    if finished - begin_step >= UNSAVED * every:
        raise ValueError(
            f"{file} has {finished} finished steps, but {directory} has no "
            f"checkpoint, though checkpoint.every_steps is {every}; give the run's "
            "checkpoint.directory, or another --workdir to start a new run"
        )
