"""The plan of a sweep: arms, seeds and each run's command, from flags; recorded in sweep.json.

An arm is a set of values for keys of the config, `preset` (of configs.base) among them; its runs
differ in their seed alone. A point is one run: an arm and a seed.
"""

import dataclasses
import itertools
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from configs.base import MAY_CHANGE
from configs.compare import as_json, config_differences, require_unlike
from dapo_jax.cli.config_flags import read_config
from dapo_jax.logs.files import read_json, write_json
from dapo_jax.report.runs import sweep_label
from dapo_jax.setup import checks

PRESET, DEVICES = "preset", "mesh.cpu_devices"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,99}")  # of an arm, which names a folder


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep, of so many steps; arguments: what follows `python -m dapo_jax.train`."""

    arm: str
    seed: int
    workdir: pathlib.Path
    arguments: tuple[str, ...]
    num_steps: int

    @property
    def label(self) -> str:
        """The point's name, which is its folder inside the sweep's."""
        return sweep_label(self.arm, self.seed)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The arms and seeds of a sweep.

    config: FILE[:PRESET]. settings: key -> value, of every arm. start: the value of --start, with
    {seed} in it. arms: name -> settings. configs: arm -> its own, with any seed.
    """

    config: str
    settings: Mapping[str, Any]
    start: str
    arms: dict[str, dict[str, str]]
    seeds: tuple[int, ...]
    configs: dict[str, ConfigDict] = dataclasses.field(default_factory=dict)

    def flags(self, own: Mapping[str, Any]) -> list[str]:
        """Returns --config and --config.KEY=V of all settings, those of an arm or a run too."""
        settings = {**self.settings, **own}
        preset = f":{settings.pop(PRESET)}" if PRESET in settings else ""
        plain = {k: v.to_dict() if isinstance(v, ConfigDict) else v for k, v in settings.items()}
        keys = [f"--config.{key}={value}" for key, value in plain.items()]
        return [f"--config={self.config}{preset}", *keys]

    def points(self, folder: pathlib.Path, *, single_device: bool = False) -> list[Point]:
        """Returns all runs: every arm with the first seed, then every arm with the next one.

        Comparisons on one seed exist early in this order. single_device: a run counts as one device
        of a CPU, unless the settings have mesh.cpu_devices.
        """
        points, shared = [], {DEVICES: 1} if single_device and DEVICES not in self.settings else {}
        for seed, arm in itertools.product(self.seeds, self.arms):
            workdir, steps = folder / sweep_label(arm, seed), self.configs[arm].num_steps
            flags = self.flags(shared | self.arms[arm] | {"seed": seed})
            start = [f"--start={self.start.replace('{seed}', str(seed))}"] * bool(self.start)
            arguments = (*flags, *start, f"--workdir={workdir}")
            points.append(Point(arm, seed, workdir, arguments, steps))
        return points


def make(
    *,
    config: str,
    settings: Mapping[str, Any],
    grid: Sequence[str],
    named: Sequence[str],
    seeds: str,
    start: str = "",
) -> Plan:
    """Returns the plan of a command line; every arm's config has passed dapo_jax.setup.checks.

    settings: of every arm. grid: KEY=V1,V2,... each. named: "NAME: KEY=V KEY=V" each. seeds: how
    many, or a list. Raises ValueError, in one line, for a wrong one; a wrong key gets the nearest
    name.
    """
    parts = seeds.removesuffix(",").split(",")
    are_numbers = all(part.strip().isdecimal() for part in parts)
    numbers = are_numbers and dict.fromkeys(map(int, parts) if "," in seeds else range(int(seeds)))
    if not numbers:
        raise ValueError(f"--seeds={seeds}: give how many, as 5, or a list, as 0,3,7 or 0,")
    plan = Plan(config, settings, start, _arms(config, grid, named), tuple(numbers))
    if any("seed" in it for it in (settings, *plan.arms.values())):
        raise ValueError("the config's seed is the sweep's: give --seeds=5, or --seeds=0,3,7")
    for arm, own in plan.arms.items():
        try:
            plan.configs[arm] = read_config(plan.flags(own))
            checks.check(plan.configs[arm])
        except ValueError as error:
            raise ValueError(f"arm {arm!r}: {' '.join(str(error).split())}") from None
    require_unlike(plan.configs, plan.arms)
    return plan


def _arms(config: str, grid: Sequence[str], named: Sequence[str]) -> dict[str, dict[str, str]]:
    """Combines every named arm with every point of the grid, or names the config alone."""
    file, _, preset = config.partition(":")
    keys = (text.partition("=") for text in grid)
    axes = [[(key, value) for value in values.split(",")] for key, _, values in keys]
    arms: dict[str, dict[str, str]] = {}
    of_name = [_named_arm(text) for text in named] or [("", {})]
    for (name, settings), *values in itertools.product(of_name, *axes):
        chosen, parts = dict(settings), [name] * bool(name)
        for key, value in values:
            if key in chosen:
                raise ValueError(f"--set and --arm have {key} twice")
            chosen[key] = value
            short = "" if key == PRESET else f"{key.rpartition('.')[2]}="
            parts.append(short + re.sub("[^A-Za-z0-9_.+=-]+", "_", value).strip("_"))
        arm = "+".join(parts) or preset or pathlib.Path(file).stem
        if not NAME.fullmatch(arm) or arm in arms:
            raise ValueError(
                f"{arm!r} cannot name an arm's folder, or two arms are called so: give letters,"
                ' digits and _.=+- by --arm="NAME: KEY=V KEY=V"'
            )
        arms[arm] = chosen
    return arms


def _named_arm(text: str) -> tuple[str, dict[str, str]]:
    name, _, rest = text.partition(":")
    words = [word.partition("=") for word in shlex.split(rest)]
    if ":" not in text or not all(equals for _, equals, _ in words):
        raise ValueError(f'--arm={text}: write "NAME: KEY=V KEY=V"')
    return name.strip(), {key: value for key, _, value in words}


def record(plan: Plan, folder: pathlib.Path) -> None:
    """Adds the plan to the folder's sweep.json, which keeps the arms and seeds that it has.

    Refuses a folder of another sweep (ValueError). More arms, seeds or steps are no contradiction,
    nor is a key that a resumed run may change; another evaluation is one.
    """
    path = folder / "sweep.json"
    of_all = read_config(plan.flags({}))  # without any arm's settings
    new = {"start": plan.start, "recipe": as_json(of_all)}
    old = read_json(path) if path.is_file() else new | {"arms": {}, "seeds": []}
    may_change = tuple(key for key in MAY_CHANGE if not key.startswith("eval."))
    differences = config_differences(old["recipe"], new["recipe"], but=may_change)
    for arm, settings in plan.arms.items():
        if (was := old["arms"].get(arm, settings)) != settings:
            differences.append(f"arm {arm!r} is {settings}, but was {was}")
    if plan.start != old["start"]:
        differences.append(f"--start is {plan.start!r}, but was {old['start']!r}")
    if differences:
        raise ValueError(
            f"{folder} holds another sweep: {'; '.join(differences)}. Give the old values to go "
            "on, or another --workdir"
        )
    arms, seeds = old["arms"] | plan.arms, dict.fromkeys([*old["seeds"], *plan.seeds])
    write_json(path, new | {"arms": arms, "seeds": list(seeds)})
