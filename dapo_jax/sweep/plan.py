"""The plan of a sweep: arms, seeds and the command of each point, from flags; kept in sweep.json.

An arm is what runs have in common that differ in their seed alone: values of keys of the recipe,
`preset` (of configs.base) among them. A point is an arm and a seed.
"""

import dataclasses
import itertools
import json
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from dapo_jax.report.runs import sweep_label
from dapo_jax.run import checks
from dapo_jax.run.files import atomic_file, read_json
from dapo_jax.run.recipe import MAY_CHANGE, differences, read_recipe

PRESET = "preset"
SEEDS_BELOW = 2**32  # dapo_jax.run.checks has it too
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,99}")  # of an arm, which names a folder
OPENING, CLOSING, QUOTES = "([{", ")]}", "'\""
Settings = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep.

    flags: all that follows `python -m dapo_jax.train`, but for --workdir. num_steps: the recipe's.
    """

    arm: str
    seed: int
    workdir: pathlib.Path
    flags: tuple[str, ...]
    num_steps: int

    @property
    def label(self) -> str:
        """The point's name: its folder inside the sweep's."""
        return sweep_label(self.arm, self.seed)

    @property
    def arguments(self) -> list[str]:
        """What follows `python -m dapo_jax.train`."""
        return [*self.flags, f"--workdir={self.workdir}"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a sweep runs.

    config: FILE[:PRESET]. flags: --config.KEY=V of every arm. start: what --start says, in which
    {seed} is replaced. recipes: arm -> its config, with any seed; `check` made them.
    """

    config: str
    flags: tuple[str, ...]
    start: str
    arms: dict[str, Settings]
    seeds: tuple[int, ...]
    recipes: dict[str, ConfigDict] = dataclasses.field(default_factory=dict)

    def point(self, folder: pathlib.Path, arm: str, seed: int, *extra: str) -> Point:
        """Returns the run of an arm and a seed; extra: more flags."""
        chosen = [*arm_flags(self, arm), f"--config.seed={seed}", *extra]
        if self.start:
            chosen.append(f"--start={self.start.replace('{seed}', str(seed))}")
        return Point(
            arm=arm,
            seed=seed,
            workdir=folder / arm / f"seed_{seed}",
            flags=tuple(chosen),
            num_steps=self.recipes[arm].num_steps,
        )

    def points(self, folder: pathlib.Path, *, single_device: bool = False) -> list[Point]:
        """Returns all runs: every arm with the first seed, then with the next one.

        So comparisons on the same seed exist early. single_device: on a CPU each run counts as one
        device, unless the sweep's flags say how many.
        """
        key = "--config.mesh.cpu_devices="
        return [
            self.point(folder, arm, seed, *self._devices(arm, key) * single_device)
            for seed in self.seeds
            for arm in self.arms
        ]

    def _devices(self, arm: str, key: str) -> tuple[str, ...]:
        given = any(flag.startswith(key) for flag in arm_flags(self, arm))
        return () if given else (f"{key}1",)


def make(
    *,
    config: str,
    flags: Sequence[str],
    grid: Sequence[str],
    named: Sequence[str],
    seeds: str,
    start: str = "",
) -> Plan:
    """Returns the plan of a command line; every arm's recipe has passed dapo_jax.run.checks.

    grid: KEY=V1,V2,... each. named: "NAME: KEY=V KEY=V" each. Raises ValueError, in one line, for
    what is wrong in them: keys get the nearest name.
    """
    axes = dict(_axis(text) for text in grid)
    if len(axes) < len(grid):
        raise ValueError(f"--set has a key twice: {', '.join(text.split('=')[0] for text in grid)}")
    plan = Plan(config, tuple(flags), start, _arms(config, axes, named), _seeds(seeds))
    for arm, settings in plan.arms.items():
        _check_keys(plan, arm, settings)
    recipes = {arm: _checked_recipe(plan, arm) for arm in plan.arms}
    seen: dict[str, str] = {}
    for arm, recipe in recipes.items():
        other = seen.setdefault(recipe.to_json_best_effort(sort_keys=True), arm)
        if other != arm:
            raise ValueError(f"arms {other!r} and {arm!r} are the same recipe: leave one out")
    return dataclasses.replace(plan, recipes=recipes)


def arm_flags(plan: Plan, arm: str) -> list[str]:
    """Returns --config and --config.KEY=V of an arm, which its runs' commands begin with."""
    settings = plan.arms[arm]
    preset = f":{settings[PRESET]}" if PRESET in settings else ""
    own = [f"--config.{key}={value}" for key, value in settings.items() if key != PRESET]
    return [f"--config={plan.config}{preset}", *plan.flags, *own]


def split_values(text: str) -> list[str]:
    """Splits at commas outside of brackets and quotes; quotes around a whole value go.

    Raises ValueError for a bracket or quote that is left open, and for an empty value.
    """
    values, depth, quote = [""], [], ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in QUOTES:
            quote = char
        elif char in OPENING:
            depth.append(CLOSING[OPENING.index(char)])
        elif char in CLOSING and (not depth or depth.pop() != char):
            raise ValueError(f"{text!r}: {char!r} closes nothing")
        elif char == "," and not depth:
            values.append("")
            continue
        values[-1] += char
    if quote or depth:
        raise ValueError(f"{text!r}: {quote or depth[-1]!r} is missing at the end")
    values = [value.strip() for value in values]
    if "" in values:
        raise ValueError(f"{text!r} has an empty value; write '' for an empty text")
    return [_unquoted(value) for value in values]


def _unquoted(value: str) -> str:
    whole = len(value) > 1 and value[0] in QUOTES and value.find(value[0], 1) == len(value) - 1
    return value[1:-1] if whole else value


def _axis(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    if not (key and equals and values):
        raise ValueError(f"--set={text}: write KEY=V1,V2,..., as algo.eps_high=0.2,0.28")
    return key, split_values(values)


def _seeds(text: str) -> tuple[int, ...]:
    """5: the seeds 0 to 4. "0,3,7", or "3,": those."""
    parts = [part.strip() for part in text.removesuffix(",").split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--seeds={text}: give how many, as 5, or a list, as 0,3,7")
    seeds = tuple(map(int, parts)) if "," in text else tuple(range(int(parts[0])))
    if not seeds or len(set(seeds)) < len(seeds) or max(seeds) >= SEEDS_BELOW:
        raise ValueError(f"--seeds={text}: one seed at least, each once and below {SEEDS_BELOW}")
    return seeds


def _arms(config: str, axes: Mapping[str, list[str]], named: Sequence[str]) -> dict[str, Settings]:
    """Every named arm with every point of the grid; without either, the recipe as it is."""
    begun = [_named_arm(text) for text in named] or [("", {})]
    file, _, preset = config.partition(":")
    arms: dict[str, Settings] = {}
    for name, settings in begun:
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
    """The part of an arm's name that says one value: eps_high=0.28; of a preset its name."""
    if key == PRESET:
        return value
    last = key.rpartition(".")[2]
    ambiguous = [other.rpartition(".")[2] for other in keys].count(last) > 1
    return f"{key if ambiguous else last}={re.sub('[^A-Za-z0-9_.+=-]+', '_', value).strip('_')}"


def _check_keys(plan: Plan, arm: str, settings: Settings) -> None:
    common = {flag.lstrip("-").partition("=")[0].removeprefix("config.") for flag in plan.flags}
    common = {key.removeprefix("noconfig.") for key in common}
    if PRESET in settings and ":" in plan.config:
        raise ValueError(f"arm {arm!r} has a preset, and so has --config={plan.config}: drop one")
    if twice := settings.keys() & common:
        raise ValueError(f"arm {arm!r} and --config.{min(twice)} both set {min(twice)}: drop one")
    if "seed" in settings.keys() | common:
        raise ValueError("the recipe's seed is the sweep's: give --seeds=5, or --seeds=0,3,7")


def _checked_recipe(plan: Plan, arm: str) -> ConfigDict:
    try:
        recipe = read_recipe(arm_flags(plan, arm))
        checks.check(recipe)
    except ValueError as error:
        raise ValueError(f"arm {arm!r}: {' '.join(str(error).split())}") from None
    return recipe


def write(plan: Plan, folder: pathlib.Path) -> None:
    """Adds the plan to what the folder's sweep.json says; whatever it had stays."""
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

    More arms, seeds or steps are none, nor is what a resumed run may change; another evaluation is.
    """
    if not (old := _read(folder)):
        return
    may_change = [key for key in MAY_CHANGE if key != "eval."]
    found = [
        f"{name} is {new!r}, but was {was!r}"
        for name, was, new in differences(old["recipe"], _common_recipe(plan))
        if not name.startswith(tuple(may_change))
    ]
    for arm, settings in plan.arms.items():
        if (was := old["arms"].get(arm, settings)) != settings:
            found.append(f"arm {arm!r} is {settings}, but was {was}")
    if plan.start != old["start"]:
        found.append(f"--start is {plan.start!r}, but was {old['start']!r}")
    if (steps := old["recipe"]["num_steps"]) > (now := _common_recipe(plan)["num_steps"]):
        found.append(f"num_steps is {now}, but was {steps}: fewer steps are not undone")
    if found:
        raise ValueError(
            f"{folder} holds another sweep: {'; '.join(found)}. Give the old values to go on, or "
            "another --workdir"
        )


def _read(folder: pathlib.Path) -> dict:
    path = folder / "sweep.json"
    return read_json(path) if path.is_file() else {}


def _common_recipe(plan: Plan) -> dict:
    """The recipe without any arm's settings, as JSON has it."""
    recipe = read_recipe([f"--config={plan.config}", *plan.flags])
    return json.loads(recipe.to_json_best_effort())
