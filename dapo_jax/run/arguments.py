"""The command line: a recipe's flags, and what it has that no flag or key is called.

absl ignores arguments without dashes, and names a wrong key without its section: a sweep that says
`config.num_steps=3` would run the recipe as it is. Here both are refused, with the nearest name.
"""

import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

from ml_collections import ConfigDict
from ml_collections.config_flags.config_flags import ConfigFileFlagParser

from configs.base import dataset
from dapo_jax.run import places
from dapo_jax.tasks.base import BUILT_IN
from dapo_jax.tasks.readers import KINDS

SET_FLAG = re.compile(r"--?config\.(eval\.sets|data\.mixture)\.([^=]+)")
KEY_FLAG = re.compile(r"--?(?:no)?config\.([^=\[]+)")
NEEDED = ("path", "kind", "task")  # what a new set has one of


class RecipeParser(ConfigFileFlagParser):
    """Loads a recipe and adds the data sets that flags name and the recipe does not have.

    What the flags say of such a set is then checked and set as in any other. A flag of a key that
    the recipe lacks is refused here, where the keys of all sections are known. argv: the command
    line; None: that of the process.
    """

    def __init__(self, name: str, argv: Sequence[str] | None = None):
        super().__init__(name, lock_config=True)
        self._argv = argv

    def parse(self, path: str):
        """Returns the recipe's config, locked."""
        config = super().parse(places.found(path))
        argv = sys.argv if self._argv is None else self._argv
        keys: dict[tuple[str, str], set[str]] = {}
        for argument in argv:
            if (match := SET_FLAG.match(argument)) and "." in match[2]:
                name, key = _name_and_key(match[2].split("."))
                keys.setdefault((match[1], name), set()).add(key)
        sections = {"eval.sets": config.eval.sets, "data.mixture": config.data.mixture}
        with config.unlocked():
            for (section, name), named in keys.items():
                sets = sections[section]
                if name in sets:
                    continue
                if not name.isidentifier():
                    message = "the name of a set has letters, digits and _ and begins with no digit"
                    raise ValueError(f"{section}.{name}: {message}")
                if named.isdisjoint(NEEDED):
                    near = difflib.get_close_matches(name, sets, n=1)
                    hint = f" (did you mean {near[0]!r}?)" if near else ""
                    message = f"the recipe has no such set{hint}; a new one needs a path or a task"
                    raise ValueError(f"{section}.{name}: {message}")
                sets[name] = dataset()
            places.complete(config)
        if message := unknown_key(config, argv[1:]):
            raise ValueError(message)
        return config


def _name_and_key(parts: list[str]) -> tuple[str, str]:
    """Splits what a flag says after its section: NAME.KEY, or NAME.args.KEY."""
    if len(parts) > 2 and parts[1] in dataset():
        return parts[0], parts[1]
    return ".".join(parts[:-1]), parts[-1]


def keys(config: ConfigDict, prefix: str = "") -> Iterator[str]:
    """Yields the dotted name of every key of a recipe, sections included."""
    for name in config:
        yield prefix + name
        if isinstance(config[name], ConfigDict):
            yield from keys(config[name], f"{prefix}{name}.")


def nearest_key(name: str, known: Sequence[str]) -> str | None:
    """Returns the key that a wrong one is likely to mean, of any section; None if none is near.

    First those that have its parts in order (`data.path` is data.train.path, `eps_high` is
    algo.eps_high), then those spelt alike as a whole or in their last part.
    """
    parts = name.split(".")

    def holds(key: str) -> bool:
        rest = iter(key.split("."))
        return key.endswith(parts[-1]) and all(part in rest for part in parts)

    if held := [key for key in known if holds(key)]:
        return min(held, key=len)
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
        return near[0]
    by_last = {key.rpartition(".")[2]: key for key in reversed(known)}
    near = difflib.get_close_matches(parts[-1], by_last, n=1, cutoff=0.7)
    return by_last[near[0]] if near else None


def expanded(arguments: Sequence[str], short: Mapping[str, str], *, recipe: str) -> list[str]:
    """Writes a command's short flags out: --k=8 is --config.eval.samples_per_prompt=8.

    short: flag -> key. Of the two that are more than that, --set=NAME:TASK:PATH makes an evaluation
    set, and --model=DIR stays, and takes `recipe` where no --config is given. Raises ValueError for
    a set that cannot be read, or is there twice, and for one of these where no recipe is.
    """
    result, sets, rest = [], set(), iter(arguments)
    given = {text.lstrip("-").partition("=")[0] for text in arguments if text.startswith("-")}
    has_recipe = not given.isdisjoint(("model", "config", "flagfile"))
    for argument in rest:
        name, equals, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or name not in short:
            result.append(argument)
            continue
        value = value if equals else next(rest, "")
        if not has_recipe:
            raise ValueError(f"--{name} needs --model=DIR, or the recipe of a run: --config=FILE")
        if name == "set":
            result += _set_flags(value)
            if (called := value.partition(":")[0]) in sets:
                raise ValueError(f"--set={value}: a second set {called!r}; each has its own name")
            sets.add(called)
            continue
        if name == "model":
            result.append(f"--model={value}")
            if not value:
                raise ValueError("--model has no value; give it a Hugging Face directory")
            result += [] if "config" in given else [f"--config={recipe}"]
        result.append(f"--config.{short[name]}={value}")
    return result


def _set_flags(text: str) -> list[str]:
    """The flags of NAME:TASK:PATH; TASK may be a kind of file, or module:Class; PATH be empty.

    `math` is the kind, which says the fields too: the task of that name grades all kinds.
    """
    name, _, rest = text.partition(":")
    task, colon, path = rest.partition(":")
    if colon and task not in BUILT_IN and task not in KINDS:
        class_name, _, path = path.partition(":")
        colon = class_name.isidentifier() and not path.startswith("//")  # not of gs://bucket
        task = f"{task}:{class_name}"
    if not name or not task or not colon:
        raise ValueError(
            f"--set={text}: must be NAME:TASK:PATH, for instance aime24:math:aime24.jsonl; TASK is "
            f"{', '.join(BUILT_IN)}, module:Class of one's own, or a kind of file: "
            f"{', '.join(KINDS)}"
        )
    key = "kind" if task in KINDS else "task"
    flags = [f"--config.eval.sets.{name}.{key}={task}"]
    return flags + ([f"--config.eval.sets.{name}.path={path}"] if path else [])


def unknown_key(config: ConfigDict, arguments: Sequence[str]) -> str | None:
    """Says which of the arguments names a key that the recipe lacks; None where none does."""
    known = list(keys(config))
    for argument in arguments:
        match = KEY_FLAG.match(argument)
        if match and match[1] not in known:
            section, args, name = match[1].partition(".args.")
            if args and f"{section}.args" in known:
                together = f"--config.{section}.args=\"{{'{name}': VALUE, ...}}\""
                return f"{argument}: the recipe has no such argument; give all of them: {together}"
            near = nearest_key(match[1], known)
            hint = f". Did you mean --config.{near}?" if near else ""
            return f"the recipe has no key {match[1]!r} ({argument}){hint}"
    return None


def leftover(arguments: Sequence[str], known_flags: Mapping, config: ConfigDict | None) -> str:
    """Says of arguments that no flag took what the first may have been meant to be."""
    first = arguments[0]
    name, equals, value = first.lstrip("-").partition("=")
    known = [] if config is None else list(keys(config))
    key = name.removeprefix("config.")
    if key not in known and name not in known_flags:
        key = nearest_key(key, known) or key
    if name in known_flags:
        meant = f"--{name}{equals}{value}"
    elif key in known:
        meant = f"--config.{key}{equals or '='}{value if equals else 'VALUE'}"
    elif near := difflib.get_close_matches(name, known_flags, n=1):
        meant = f"--{near[0]}{equals}{value}"
    else:
        meant = None
    if meant:
        hint = f"did you mean {meant}?"
    elif equals and known:
        hint = "it is no key of the recipe either; --help lists them all"
    else:
        hint = "flags begin with -- and have their value after ="
    return f"{first!r} is no flag and would be ignored; {hint}"
