"""The plan of a sweep: arms, seeds and each run's command, from flags; recorded in sweep.json.

An arm is a set of values for keys of the config, `preset` (of configs.base) among them; its runs
differ in their seed alone. A point is one run: an arm and a seed.
"""

import dataclasses
import itertools
import json
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from configs.base import KEYS, MAY_CHANGE
from dapo_jax.cli.config_flags import KEY_FLAG, read_recipe, recipe_differences
from dapo_jax.logs.files import atomic_file, read_json
from dapo_jax.report.runs import sweep_label
from dapo_jax.setup import checks

PRESET = "preset"
SEEDS_BELOW = KEYS["seed"].at_most + 1
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,99}")  # of an arm, which names a folder
VALUE = r"""(?:'[^']*'|"[^"]*"|\([^()]*\)|\[[^][]*\]|\{[^{}]*\}|[^][(){}'",])+"""
QUOTED = re.compile(r"^(['\"])(.*)\1$")
Settings = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep.

    flags: everything after `python -m dapo_jax.train` but --workdir. num_steps: the config's.
    """

    arm: str
    seed: int
    workdir: pathlib.Path
    flags: tuple[str, ...]
    num_steps: int

    @property
    def label(self) -> str:
        """The point's name, which is its folder inside the sweep's."""
        return sweep_label(self.arm, self.seed)

    @property
    def arguments(self) -> list[str]:
        """Everything after `python -m dapo_jax.train`."""
        return [*self.flags, f"--workdir={self.workdir}"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The arms and seeds of a sweep.

    config: FILE[:PRESET]. flags: --config.KEY=V of every arm. start: the value of --start, with
    {seed} in it. arms: name -> settings. recipes: arm -> its config, with any seed.
    """

    config: str
    flags: tuple[str, ...]
    start: str
    arms: dict[str, Settings]
    seeds: tuple[int, ...]
    recipes: dict[str, ConfigDict] = dataclasses.field(default_factory=dict)

    def arm_flags(self, arm: str) -> list[str]:
        """Returns --config and --config.KEY=V of an arm, with which its runs' commands begin."""
        settings = self.arms[arm]
        preset = f":{settings[PRESET]}" if PRESET in settings else ""
        own = [f"--config.{key}={value}" for key, value in settings.items() if key != PRESET]
        return [f"--config={self.config}{preset}", *self.flags, *own]

    def points(self, folder: pathlib.Path, *, single_device: bool = False) -> list[Point]:
        """Returns all runs: every arm with the first seed, then every arm with the next one.

        Comparisons on one seed exist early in this order. single_device: a run counts as one device
        of a CPU, unless the arm's flags have mesh.cpu_devices.
        """
        return [
            self._point(folder, arm, seed, single_device)
            for seed in self.seeds
            for arm in self.arms
        ]

    def _point(self, folder: pathlib.Path, arm: str, seed: int, single_device: bool) -> Point:
        flags, devices = self.arm_flags(arm), "--config.mesh.cpu_devices="
        flags.append(f"--config.seed={seed}")
        if single_device and not any(flag.startswith(devices) for flag in flags):
            flags.append(f"{devices}1")
        if self.start:
            flags.append(f"--start={self.start.replace('{seed}', str(seed))}")
        workdir = folder / sweep_label(arm, seed)
        return Point(arm, seed, workdir, tuple(flags), self.recipes[arm].num_steps)


def make(
    *,
    config: str,
    flags: Sequence[str],
    grid: Sequence[str],
    named: Sequence[str],
    seeds: str,
    start: str = "",
) -> Plan:
    """Returns the plan of a command line; every arm's config has passed dapo_jax.setup.checks.

    grid: KEY=V1,V2,... each. named: "NAME: KEY=V KEY=V" each. Raises ValueError, in one line, for a
    wrong one; a wrong key gets the nearest name.
    """
    axes = dict(_axis(text) for text in grid)
    if len(axes) < len(grid):
        raise ValueError(f"--set has a key twice: {', '.join(text.split('=')[0] for text in grid)}")
    plan = Plan(config, tuple(flags), start, _arms(config, axes, named), _seeds(seeds))
    keys = {match[1] for match in map(KEY_FLAG.match, flags) if match}.union(*plan.arms.values())
    if "seed" in keys:
        raise ValueError("the config's seed is the sweep's: give --seeds=5, or --seeds=0,3,7")
    of_recipe: dict[str, str] = {}
    for arm in plan.arms:
        recipe = plan.recipes[arm] = _checked_recipe(plan, arm)
        other = of_recipe.setdefault(recipe.to_json_best_effort(sort_keys=True), arm)
        if other != arm:
            raise ValueError(f"arms {other!r} and {arm!r} are the same config: leave one out")
    return plan


def split_values(text: str) -> list[str]:
    """Splits at commas outside brackets and quotes; quotes around a whole value are removed.

    Raises ValueError for a bracket or quote without its partner, and for an empty value.
    """
    values = [value.strip() for value in re.findall(VALUE, text)]
    if "" in values or not re.fullmatch(f"{VALUE}(?:,{VALUE})*", text):
        raise ValueError(
            f"{text!r}: a bracket or quote has no partner, or a value is empty: '' is an empty text"
        )
    return [QUOTED.sub(r"\2", value) for value in values]


def _axis(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    if not (key and equals and values):
        raise ValueError(f"--set={text}: write KEY=V1,V2,..., as algo.eps_high=0.2,0.28")
    return key, split_values(values)


def _seeds(text: str) -> tuple[int, ...]:
    """Reads "5" as the seeds 0 to 4, and "0,3,7" or "3," as a list."""
    parts = [part.strip() for part in text.removesuffix(",").split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--seeds={text}: give how many, as 5, or a list, as 0,3,7")
    seeds = tuple(map(int, parts)) if "," in text else tuple(range(int(parts[0])))
    if not seeds or len(set(seeds)) < len(seeds) or max(seeds) >= SEEDS_BELOW:
        raise ValueError(f"--seeds={text}: one seed at least, each once and below {SEEDS_BELOW}")
    return seeds


def _arms(config: str, axes: Mapping[str, list[str]], named: Sequence[str]) -> dict[str, Settings]:
    """Combines every named arm with every point of the grid; without either, the config alone."""
    file, _, preset = config.partition(":")
    arms: dict[str, Settings] = {}
    for name, settings in [_named_arm(text) for text in named] or [("", {})]:
        if both := settings.keys() & axes.keys():
            raise ValueError(f"arm {name!r} and --set both have {min(both)}")
        for values in itertools.product(*axes.values()):
            chosen = dict(zip(axes, values, strict=True))
            parts = [name] * bool(name) + [_short(key, chosen[key], axes) for key in axes]
            arm = "+".join(parts) or preset or pathlib.Path(file).stem
            if not NAME.fullmatch(arm):
                raise ValueError(
                    f"{arm!r} cannot name an arm's folder: give a shorter one of letters, digits "
                    'and _.=+- by --arm="NAME: KEY=V KEY=V"'
                )
            if arm in arms:
                raise ValueError(f"two arms are called {arm!r}: name them by --arm")
            arms[arm] = settings | chosen
    return arms


def _named_arm(text: str) -> tuple[str, Settings]:
    name, colon, rest = text.partition(":")
    settings: Settings = {}
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise ValueError(f"--arm={text}: {error}") from None
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals) or key in settings:
            raise ValueError(f"--arm={text}: {word!r} is no KEY=V, or has a key again")
        settings[key] = value
    if not (colon and name.strip()):
        raise ValueError(f'--arm={text}: write "NAME: KEY=V KEY=V"')
    return name.strip(), settings


def _short(key: str, value: str, keys: Mapping) -> str:
    """Returns the part of an arm's name for one value: eps_high=0.28, or a preset's name."""
    if key == PRESET:
        return value
    last = key.rpartition(".")[2]
    ambiguous = [other.rpartition(".")[2] for other in keys].count(last) > 1
    return f"{key if ambiguous else last}={re.sub('[^A-Za-z0-9_.+=-]+', '_', value).strip('_')}"


def _checked_recipe(plan: Plan, arm: str) -> ConfigDict:
    try:
        recipe = read_recipe(plan.arm_flags(arm))
        checks.check(recipe)
    except ValueError as error:
        raise ValueError(f"arm {arm!r}: {' '.join(str(error).split())}") from None
    return recipe


def write(plan: Plan, folder: pathlib.Path) -> None:
    """Adds the plan to the folder's sweep.json, which keeps the arms and seeds that it has."""
    old = _read(folder)
    document = {
        "config": plan.config,
        "flags": plan.flags,
        "start": plan.start,
        "arms": old.get("arms", {}) | plan.arms,
        "seeds": list(dict.fromkeys([*old.get("seeds", []), *plan.seeds])),
        "recipe": _common_recipe(plan),
    }
    with atomic_file(folder / "sweep.json") as file:
        file.write((json.dumps(document, indent=1) + "\n").encode())


def check_same(plan: Plan, folder: pathlib.Path) -> None:
    """Refuses a folder whose sweep.json contradicts the plan (ValueError).

    More arms, seeds or steps are no contradiction, nor is a key that a resumed run may change.
    Another evaluation is one.
    """
    if not (old := _read(folder)):
        return
    new = _common_recipe(plan)
    may_change = tuple(key for key in MAY_CHANGE if not key.startswith("eval."))
    found = recipe_differences(old["recipe"], new, but=may_change)
    for arm, settings in plan.arms.items():
        if (was := old["arms"].get(arm, settings)) != settings:
            found.append(f"arm {arm!r} is {settings}, but was {was}")
    if plan.start != old["start"]:
        found.append(f"--start is {plan.start!r}, but was {old['start']!r}")
    if new["num_steps"] < (steps := old["recipe"]["num_steps"]):
        found.append(f"num_steps is {new['num_steps']}, but was {steps}: steps are not undone")
    if found:
        raise ValueError(
            f"{folder} holds another sweep: {'; '.join(found)}. Give the old values to go on, or "
            "another --workdir"
        )


def _read(folder: pathlib.Path) -> dict:
    path = folder / "sweep.json"
    return read_json(path) if path.is_file() else {}


def _common_recipe(plan: Plan) -> dict:
    """Returns the config without any arm's settings, as JSON has it."""
    recipe = read_recipe([f"--config={plan.config}", *plan.flags])
    return json.loads(recipe.to_json_best_effort())
