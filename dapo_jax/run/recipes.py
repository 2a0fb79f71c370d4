"""In what two recipes differ, key by key, and what a resumed run may change."""

import pathlib
import re
from collections.abc import Iterator

from dapo_jax.run import places

# A name on the hub without its revision: an identity has digests of what it stands for.
_NAME = re.compile(
    r"(?:hf://)?((?:datasets/)?[\w.-]+/[\w.-]+)(?:@(?:refs/\w+/)?[^/]+)?(/.+)?", re.ASCII
)
# A resumed run may change these; anything else would make it another run. Where it runs on other
# devices, the work has to be divided in another way.
MAY_CHANGE = (
    "num_steps",
    "rollout.max_generation_batches",
    "rollout.on_generation_cap",
    "rollout.cache_mib",
    "rollout.slot_tokens",
    "rollout.draft_tokens",
    "learner.micro_batch_rows",
    "learner.row_tokens",
    "learner.remat",
    "learner.max_skipped_updates",
    "alarms.",
    "eval.",
    "checkpoint.",
    "log.",
    "mesh.",
    "model.kernels",
)


def recipe_differences(
    old: dict, new: dict, *, among=("",), but=(), before: str = "was {}"
) -> list[str]:
    """Says, key by key, in what two recipes differ; a path may be written in another way.

    among, but: the beginnings of the keys that count, and of those that do not. before: how an old
    value is told of.
    """
    return [
        f"{name} is {b!r}, but {before.format(repr(a))}"
        for name, a, b in differences(old, new)
        if name.startswith(among) and not name.startswith(but) and not _same_place(name, a, b)
    ]


def _same_place(key: str, one, other) -> bool:
    """Whether two values of a path mean the same folder, or repository on the hub."""
    if not key.endswith(".path") or not one or not other:
        return False
    a, b = _NAME.fullmatch(one), _NAME.fullmatch(other)
    if a and b and a.groups() == b.groups():
        return True
    if "://" in f"{one}{other}":
        return False
    return pathlib.Path(places.found(one)).resolve() == pathlib.Path(places.found(other)).resolve()


def differences(old: dict, new: dict, prefix: str = "") -> Iterator[tuple[str, object, object]]:
    """(dotted name, old value, new value) of every leaf that differs; None where it is missing."""
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if {type(a), type(b)} <= {dict, type(None)}:  # a section may be new
            yield from differences(a or {}, b or {}, f"{prefix}{name}.")
        elif a != b:
            yield prefix + name, a, b
