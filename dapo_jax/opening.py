"""What a command shows before its own imports, which take seconds: a first line, or all there is.

`--help` of a command with a recipe, and a finished run, need nothing of JAX.
"""

import ast
import importlib.util
import os
import pathlib
import sys
from collections.abc import Sequence

from absl import flags


def begin(command: str, arguments: Sequence[str]) -> None:
    """Says what is being read. Ends the process where that is all: help, or a finished run.

    command: dapo_jax.train, say. Whatever is wrong is left to the command, which says it.
    """
    if wants_help(arguments):
        if text := help_of(command, arguments):
            print(text)
            sys.exit(0)
        return
    if recipe := _value(arguments, "config"):
        _say(f"{command}: reading {recipe} ...")


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for help."""
    return any(word in ("--help", "-h", "--helpfull", "--helpshort") for word in arguments)


def help_of(command: str, arguments: Sequence[str]) -> str | None:
    """Returns the help of a command with a recipe; None for others, and where it is not so easy.

    The command's flags are defined by the lines under its `if __name__ == "__main__"`, without the
    imports above.
    """
    from dapo_jax.run import recipe_flags, recipe_help

    found = importlib.util.find_spec(command)
    if found is not None and found.submodule_search_locations:
        found = importlib.util.find_spec(f"{command}.__main__")
    if found is None:
        return None
    source = pathlib.Path(found.origin).read_text()
    module = ast.parse(source)
    last = module.body[-1]
    if not isinstance(last, ast.If) or "command.define_config" not in ast.unparse(last):
        return None
    before = set(flags.FLAGS)
    definitions = ast.Module(
        [line for line in last.body if "command.run(" not in ast.unparse(line)], []
    )
    try:
        recipe_flags.define_debug()
        exec(compile(definitions, found.origin, "exec"), {"flags": flags, "command": recipe_flags})
        return recipe_help.text(arguments, flags.FLAGS, ast.get_docstring(module))
    except (ValueError, NameError, AttributeError):  # the command, with its imports, says it
        return None
    finally:
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """The value of a flag, behind = or as the next argument; of several the last."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        name, equals, text = argument.partition("=")
        if name in (f"--{flag}", f"-{flag}"):
            value = text if equals else following
    return value


def _say(line: str) -> None:
    """Shows a line on stderr, apart from results; of several processes only the first does."""
    if os.environ.get("DAPO_PROCESS", "0") == "0":
        print(line, file=sys.stderr, flush=True)
