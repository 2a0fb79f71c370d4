"""Settings as other programs have them, `algo.eps_high=0.3`: understood or refused, never ignored.

A word is understood where it can mean one thing only: KEY=VALUE, config.KEY=VALUE, ++KEY=VALUE and
--KEY=VALUE of a key that the recipe has are --config.KEY=VALUE. Hydra's words that add or remove a
key, or choose a group, are refused with what to write instead.
"""

import re
from collections.abc import Mapping, Sequence

from absl import flags
from ml_collections import ConfigDict

from dapo_jax.run.arguments import SET_FLAG, keys, nearest_key

WORD = re.compile(
    r"(?P<sign>\+\+|\+|~|--?|)(?P<prefix>config\.)?(?P<key>[a-z_][\w.]*)(?P<value>=.*)?", re.DOTALL
)
# What Hydra has flags of its own for -> what to write here.
ELSEWHERE = {
    "hydra.run.dir": "--workdir=DIR",
    "hydra.sweep.dir": "--workdir=DIR",
    "config-name": "--config=FILE",
    "config-path": "--config=FILE",
    "multirun": "python -m dapo_jax.sweep ... --set KEY=V1,V2",
    "preset": "--config=FILE:PRESET",
    "cfg": "--help, which shows every key with its value",
}


class RefusedError(ValueError):
    """A word of another program's that means nothing here, or more than one thing."""


def understood(
    arguments: Sequence[str], known_flags: Mapping, recipe: ConfigDict | None
) -> list[str]:
    """Returns the arguments with each word that is understood as the flag that it means.

    known_flags: the command's. recipe: whose keys count; None: nothing is understood. Raises
    RefusedError, in one line, for a word of Hydra's. All else is left to the flags.
    """
    known = set(keys(recipe)) if recipe is not None else set()
    found, is_value = [], False
    for i, argument in enumerate(arguments):
        if argument == "--":
            return [*found, *arguments[i:]]
        takes_next = not is_value and _takes_next(argument, known_flags, recipe)
        is_word = not (is_value or takes_next)
        found.append(_flag(argument, known, known_flags, recipe) if is_word else argument)
        is_value = takes_next
    return found


def _flag(argument: str, known: set[str], known_flags: Mapping, recipe: ConfigDict | None) -> str:
    match = WORD.fullmatch(argument)
    if match is None:
        return _other(argument)
    sign, key, value = match["sign"], match["key"], match["value"] or ""
    if key in known_flags or (sign in ("-", "--") and match["prefix"]):
        return argument
    if recipe is None or (sign in ("-", "--") and not value):
        return _other(argument)
    is_key = key in known or SET_FLAG.fullmatch(f"--config.{key}")
    if is_key and _is_section(recipe, key):
        raise RefusedError(
            f"{argument!r}: {key} is a section of the recipe; set its keys, as {key}.KEY=VALUE, or "
            "choose a preset by --config=FILE:PRESET"
        )
    if sign == "~":
        raise RefusedError(f"{argument!r}: a recipe's keys cannot be removed; set {key}=VALUE")
    if sign == "+":
        if is_key:
            raise RefusedError(f"{argument!r}: the recipe has this key already; write {key}{value}")
        near = nearest_key(key, sorted(name for name in known if not _is_section(recipe, name)))
        hint = f"did you mean {near}{value}?" if near else "--help lists all of them"
        raise RefusedError(f"{argument!r}: a recipe's keys cannot be added to; {hint}")
    if not is_key:
        return _other(argument)
    if not value:
        raise RefusedError(f"{argument!r} has no value; write {key}=VALUE")
    return f"--config.{key}{value}"


def _other(argument: str) -> str:
    """Refuses what Hydra has a flag for; returns anything else."""
    name = argument.lstrip("-+~").partition("=")[0]
    if argument == "-m":
        name = "multirun"
    if name in ELSEWHERE:
        raise RefusedError(f"{argument!r} is no flag here; write {ELSEWHERE[name]}")
    return argument


def _is_section(recipe: ConfigDict, key: str) -> bool:
    return isinstance(_value(recipe, key), ConfigDict)


def _value(recipe: ConfigDict, key: str):
    """The recipe's value of a key; None where it has none."""
    for part in key.split("."):
        if not isinstance(recipe, ConfigDict) or part not in recipe:
            return None
        recipe = recipe[part]
    return recipe


def _takes_next(argument: str, known_flags: Mapping, recipe: ConfigDict | None) -> bool:
    """Whether the next argument is this one's value: `--workdir DIR`, `--config.seed 3`."""
    name = re.fullmatch(r"--?([\w.]+)", argument)
    if name is None:
        return False
    if name[1] in known_flags:
        return not isinstance(known_flags[name[1]], flags.BooleanFlag)
    key = name[1].removeprefix("config.")
    return key != name[1] and not (recipe is not None and isinstance(_value(recipe, key), bool))
