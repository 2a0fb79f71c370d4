"""Is it the same config? One that was written down, on the keys of today, and beside another.

A key that is gone is refused with the nearest name, or the one that it has now.
"""

import difflib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from configs import base

ROOT = pathlib.Path(__file__).resolve().parents[1]
SET_KEY = re.compile(r"((?:eval\.sets|data\.mixture)\.[^.]+)\.")
# A name on the hub, of which the revision does not count: a fingerprint has its files' digests.
HUB_NAME = re.compile(
    r"(?:hf://)?((?:datasets/)?[\w.-]+/[\w.-]+)(?:@(?:refs/\w+/)?[^/]+)?(/.+)?", re.ASCII
)


def found(path: str) -> str:
    """Returns the path as it is, or that below the project where only there is something.

    A part behind a colon (a config's preset) counts as no part of the path.
    """
    name, colon, rest = path.partition(":")
    if not name or rest.startswith("//") or pathlib.Path(name).exists():
        return path
    return f"{ROOT / name}{colon}{rest}" if (ROOT / name).exists() else path


def complete(config: ConfigDict) -> None:
    """Completes, in an unlocked config, every path that exists beside the code alone."""
    for name, value in base.leaves(config):
        if name.endswith(".path"):
            config.update_from_flattened_dict({name: found(value)})


def on_defaults(given: ConfigDict) -> tuple[ConfigDict, list[str]]:
    """Sets the values of a config on the defaults: (config, refusals of keys and of types).

    A data set may leave keys out.
    """
    config, wrong, values = base.get_config(), [], dict(base.leaves(given))
    for of_set in filter(None, map(SET_KEY.match, values)):
        config.update_from_flattened_dict({of_set[1]: base.dataset()})
    known = [name for name, _ in base.leaves(config)]
    for name, value in values.items():
        try:
            if name in known:
                config.update_from_flattened_dict({name: base.key_of(name).cast(value)})
            else:
                wrong.append(f"the config has no key {name!r}{hint(name, known)}")
        except TypeError as error:
            wrong.append(f"{name} = {error}")
    return config, wrong


def current(config: Mapping) -> ConfigDict:
    """Returns a run's config as it is now: without keys that are gone, newer ones by default."""
    return on_defaults(ConfigDict(config, type_safe=False))[0]


def as_json(config: ConfigDict) -> dict:
    """Returns a config as JSON has it."""
    return json.loads(config.to_json_best_effort())


def filled(config: ConfigDict, chosen: Mapping[str, Any]) -> ConfigDict:
    """Returns a new config: what this one leaves open is as it was chosen, by dotted key."""
    new = config.copy_and_resolve_references()
    opened = (key for key, it in base.leaves(config) if base.key_of(key).open == it is not None)
    new.update_from_flattened_dict({key: chosen[key] for key in opened if key in chosen})
    return new


def config_differences(
    old: Mapping, new: Mapping, *, among=("",), but=(), before: str = "was {}"
) -> list[str]:
    """Lists, key by key, where two configs differ; a path may be written in another way.

    among, but: the beginnings of the keys that count, and of those that do not. before: the words
    for an old value.
    """
    old, new = (dict(base.leaves(current(it))) for it in (old, new))
    pairs = [(name, old.get(name), new.get(name)) for name in sorted(old.keys() | new.keys())]
    return [
        f"{name} is {b!r}, but {before.format(repr(a))}"
        for name, a, b in pairs
        if a != b and name.startswith(among) and not name.startswith(but)
        if not _same_place(name, a, b)
    ]


def require_unlike(configs: Mapping[str, ConfigDict], changed: Mapping) -> None:
    """Refuses configs that differ in keys without effect alone (ValueError), all by names.

    changed: the keys that make each one of them.
    """
    known: dict[str, str] = {}
    for name, config in configs.items():
        unread = base.without_effect(config, changed[name])
        effective = repr([it for it in base.leaves(config) if it[0] not in unread])
        if (twin := known.setdefault(effective, name)) != name and unread:
            raise ValueError(f"arms {twin!r} and {name!r} are equal: {'; '.join(unread.values())}")


def _same_place(key: str, one, other) -> bool:
    """True if two values of a path mean one folder, or one repository on the hub."""

    def places(path: str) -> set:
        name = HUB_NAME.fullmatch(path)
        folder = path if "://" in path else pathlib.Path(found(path)).resolve()
        return {name.groups() if name else path, folder}

    return bool(key.endswith(".path") and one and other and places(one) & places(other))


def hint(name: str, known: Sequence[str], prefix: str = "") -> str:
    """Returns the question for the key that a wrong one is likely to mean; "" if none is near."""
    if new := base.RENAMED.get(name):
        return f" (its name is {prefix}{new} now)"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if not near:  # the section was left out
        ends = {it.rpartition(".")[2]: it for it in known}
        near = [ends[it] for it in difflib.get_close_matches(name, ends, n=1, cutoff=0.7)]
    return f" (Did you mean {prefix}{near[0]}?)" if near else ""
