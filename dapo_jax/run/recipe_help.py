"""`--help` of a command with a recipe: its flags, and every key with its value and its comment.

The comments are those of configs/base.py, read from its source: one behind a key's line, or else
the lines above it. A data set's keys have theirs in the docstring of `dataset`.
"""

import ast
import functools
import inspect
import io
import pathlib
import re
import shutil
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence

from absl import flags
from ml_collections import ConfigDict

from configs import base
from dapo_jax.run.recipe_flags import config_flags_of, read_recipe
from dapo_jax.run.words import understood

ASKED = {"--help", "-help", "-h", "--helpfull", "--helpshort"}
HIDDEN = ("absl.", "etils.")  # modules whose flags are not the commands'
MOST_COLUMNS = 120
DATA_SETS = re.compile(r"(?:data\.train|data\.mixture\.\w+|eval\.sets\.\w+)\.(\w+)")


def is_asked_for(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for help."""
    return not ASKED.isdisjoint(arguments)


def text(arguments: Sequence[str], known_flags: flags.FlagValues, about: str | None) -> str:
    """Returns what `--help` prints for a command line; ValueError where its recipe is wrong.

    known_flags: the command's. about: its module's docstring. Without --config the keys have the
    values of configs/base.py.
    """
    given = [argument for argument in arguments if argument not in ASKED]
    name, files = "configs/base.py", [flag for flag in config_flags_of(given) if _is_file(flag)]
    if files:
        name = files[-1].partition("=")[2]
    else:
        files = [f"--config={base.__file__}"]
        given = [*files, *given]
    words = understood(given, known_flags, read_recipe(files))
    recipe = read_recipe(config_flags_of(words))
    lines = [
        inspect.cleandoc(about or "").rstrip(),
        "",
        "Flags:",
        *_of_flags(known_flags),
        "",
        f"Keys of the recipe with their values in {name}. KEY=VALUE or --config.KEY=VALUE sets",
        "one; * is another value than that of configs/base.py, which stands behind the comment.",
        *_of_keys(recipe),
    ]
    return "\n".join(lines)


def _is_file(flag: str) -> bool:
    return flag.startswith(("--config=", "-config="))


@functools.cache
def comments() -> dict[str, str]:
    """Reads configs/base.py: key or section -> its comment, "" without one, in their order.

    The keys of data sets are dataset.KEY, with what the docstring of `dataset` says of them.
    """
    source = pathlib.Path(base.__file__).read_text()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    marks = [token for token in tokens if token.type == tokenize.COMMENT]
    behind = {mark.start[0]: mark.string for mark in marks if mark.line[: mark.start[1]].strip()}
    alone = {mark.start[0]: mark.string for mark in marks if mark.start[0] not in behind}
    functions = {node.name: node for node in ast.parse(source).body if hasattr(node, "name")}
    found = dict(_arguments(ast.get_docstring(functions["dataset"])))
    for node in functions["get_config"].body:
        key = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        if not key.startswith("config."):
            continue
        lines, line = [], node.lineno - 1
        while line in alone:
            lines, line = [alone[line], *lines], line - 1
        said = [behind[node.end_lineno]] if node.end_lineno in behind else lines
        found[key.removeprefix("config.")] = " ".join(text.lstrip("# ") for text in said)
    return found


def comment_of(key: str) -> str:
    """The comment of a key; "" where it has none."""
    match = DATA_SETS.fullmatch(key)
    return comments().get(f"dataset.{match[1]}" if match else key, "")


def _arguments(docstring: str) -> Iterator[tuple[str, str]]:
    """Reads a docstring's lines `names: what they mean`, as (dataset.name, what it means)."""
    blocks = re.split(r"\n(?=\w+(?:, \w+)*: )", docstring)
    for block in blocks[1:]:
        names, _, meaning = block.partition(": ")
        for name in names.split(", "):
            yield f"dataset.{name}", " ".join(meaning.split())


def _of_flags(known_flags: flags.FlagValues) -> Iterator[str]:
    by_module = known_flags.flags_by_module_dict()
    hidden = {f.name for module, of in by_module.items() if module.startswith(HIDDEN) for f in of}
    for name, flag in sorted(known_flags._flags().items()):
        if flag.name in hidden or name.startswith("config."):
            continue
        value = "" if isinstance(flag, flags.BooleanFlag) else "=FILE[:PRESET]" * (name == "config")
        if not value and not isinstance(flag, flags.BooleanFlag):
            value = f"={flag.default}" if flag.default not in (None, "", []) else "=..."
        yield from _row(f"  --{name}{value}", flag.help or "", 26)


def _of_keys(recipe: ConfigDict) -> Iterator[str]:
    defaults = base.get_config()
    width = max(len(f"{name} = {value!r}") for name, value in _leaves(defaults)) + 4
    section = None
    for key, value in sorted(_leaves(recipe), key=_place):
        if key.rpartition(".")[0] != section:
            section = key.rpartition(".")[0]
            yield ""
            if said := comments().get(section):
                yield from textwrap.wrap(f"{section}: {said}", _columns())
        usual = _default(defaults, key)
        changed = value != usual
        behind = f"{comment_of(key)} ({usual!r})" if changed else comment_of(key)
        yield from _row(f"{'*' if changed else ' '} {key} = {value!r}", behind, min(width, 46))


def _leaves(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields (dotted key, value); a task's arguments are one value."""
    for name, value in config.items():
        if isinstance(value, ConfigDict) and name != "args":
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value.to_dict() if name == "args" else value


def _place(leaf: tuple[str, object]) -> tuple:
    """Sorts keys as configs/base.py has them, sets of one section by name."""
    key, order = leaf[0], list(comments())
    if match := DATA_SETS.fullmatch(key):
        parts = key.split(".")
        section = key if key in order else ".".join(parts[:2])
        return order.index(section), parts[:-1], order.index(f"dataset.{match[1]}")
    return (order.index(key) if key in order else len(order), [key], 0)


def _default(defaults: ConfigDict, key: str) -> object:
    """The value of a key in configs/base.py; of a data set that it lacks `dataset`'s."""
    match = DATA_SETS.fullmatch(key)
    value = base.dataset()[match[1]] if match else functools.reduce(_item, key.split("."), defaults)
    return value.to_dict() if isinstance(value, ConfigDict) else value


def _item(config: Mapping, name: str) -> object:
    return config.get(name)


def _row(left: str, right: str, width: int) -> Iterator[str]:
    """Two columns; a comment begins on a line of its own where the left one is too long."""
    lines = textwrap.wrap(right, max(30, _columns() - width)) or [""]
    if len(left) > width - 2:
        yield left
    else:
        yield f"{left:<{width}}{lines.pop(0)}".rstrip()
    yield from (f"{'':{width}}{line}" for line in lines)


def _columns() -> int:
    return min(MOST_COLUMNS, shutil.get_terminal_size((100, 24)).columns)
