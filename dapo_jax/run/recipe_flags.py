"""The flags of the commands: the recipe, its keys, and those that several commands share.

It imports nothing that takes time: what a command shows before its own imports reads them too.
"""

import re
import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags

from dapo_jax.run.arguments import KEY_FLAG, RecipeParser, expanded
from dapo_jax.run.places import ROOT

# The recipe of a model that comes without one.
ANY_MODEL = str(ROOT / "configs" / "any_model.py")


def define_config(
    flag_values: flags.FlagValues = flags.FLAGS, argv: Sequence[str] | None = None
) -> flags.FlagHolder:
    """Defines --config=FILE[:PRESET], which is required, and --config.KEY=VALUE for every key.

    argv: the command line that they are on; None: that of the process.
    """
    holder = config_flags.DEFINE_config_file(
        "config", None, "The run's recipe.", flag_values=flag_values, sys_argv=argv
    )
    flag_values["config"].parser = RecipeParser("config", argv)
    flags.mark_flag_as_required("config", flag_values=flag_values)
    return holder


def read_recipe(arguments: Sequence[str]) -> ConfigDict:
    """Returns the recipe that a command with these --config flags has; ValueError, in one line."""
    argv, flag_values = ["", *arguments], flags.FlagValues()
    holder = define_config(flag_values, argv)
    try:
        flag_values(argv)
    except (flags.Error, AttributeError, KeyError, OSError) as error:
        raise ValueError(flag_error_line(error)) from None
    return holder.value


def config_flags_of(arguments: Sequence[str]) -> list[str]:
    """Returns --config and every --config.KEY of a command line, each with its value."""
    found, takes_next = [], False
    for argument in arguments:
        if takes_next and not argument.startswith("-"):
            found[-1] += f"={argument}"
        takes_next = False
        if re.match(r"--?(no)?config(\.|=|$)", argument):
            found.append(argument)
            takes_next = "=" not in argument
    return found


def own_keys(arguments: Sequence[str]) -> ConfigDict | None:
    """Returns the recipe of a command line as its file has it; None where it cannot be read."""
    file = [flag for flag in config_flags_of(arguments) if not KEY_FLAG.match(flag)]
    try:
        return read_recipe(file)
    except Exception:  # a recipe is a program; the command's own parsing says what is wrong
        return None


def define_short(**flags_: tuple[str, str]) -> None:
    """Defines short flags, name=(key of the recipe, help), and writes out those of this command.

    The process's command line holds the keys' own flags from then on.
    """
    for name, (key, help_) in flags_.items():
        flags.DEFINE_string(name, None, f"{help_} Sets --config.{key}.")
    short = {name: key for name, (key, _) in flags_.items()}
    try:
        sys.argv[1:] = expanded(sys.argv[1:], short, recipe=ANY_MODEL)
    except ValueError as error:
        sys.exit(f"error: {error}")


def define_workdir(flag_values: flags.FlagValues = flags.FLAGS) -> flags.FlagHolder:
    """Defines the flag of the run's directory, which is required."""
    holder = flags.DEFINE_string(
        "workdir", None, "The run's directory.", required=True, flag_values=flag_values
    )
    flags.register_validator(
        "workdir",
        lambda path: path is None or "://" not in path,
        "it has to be a folder of this machine; --config.checkpoint.directory may be a bucket's",
        flag_values=flag_values,
    )
    return holder


def define_start() -> flags.FlagHolder:
    """Defines the flag of forks: the checkpoint of another run to begin from."""
    return flags.DEFINE_string(
        "start",
        None,
        "run:DIR@STEP: begins with the checkpoint after STEP steps of the run in DIR, its workdir. "
        "Policy, moments, place in the prompt stream and randomness go on, under this recipe.",
    )


def define_distributed() -> flags.FlagHolder:
    """Defines the flag of the commands that run on several hosts."""
    return flags.DEFINE_bool(
        "distributed",
        False,
        "The command was given on several hosts, which are to run it together: those of a TPU pod, "
        "or of DAPO_COORDINATOR, DAPO_PROCESSES and DAPO_PROCESS in the environment.",
    )


def define_trust_code() -> flags.FlagHolder:
    """Defines the flag of the commands that open a run which may be a stranger's."""
    return flags.DEFINE_bool(
        "trust_code", False, "Import the modules that the run's config.json names."
    )


def define_debug() -> None:
    """Defines the flag that every command has."""
    flags.DEFINE_bool("debug", False, "Show the traceback of an error in the settings.")


def flag_error_line(error: Exception) -> str:
    """Says in one line what went wrong, from an exception of the libraries."""
    if isinstance(error, AttributeError | KeyError):  # "'key'\nDid you mean ...", maybe nested
        while isinstance(error.args[0], Exception):
            error = error.args[0]
        return f"the recipe has no key {'; '.join(str(error.args[0]).splitlines())}"
    if missing := re.fullmatch(r"flag --(\w+)=None: .* other than None\.", str(error)):
        example = {"config": "configs/tiny.py", "workdir": "runs/mine"}.get(missing[1], "VALUE")
        return f"--{missing[1]} is missing: --{missing[1]}={example}"
    missing_file = r"Failed loading config file.*No such file.*: '(.+\.py)'$"
    if file := re.search(missing_file, str(error), re.DOTALL):
        return f"--config: there is no recipe {file[1]!r}"
    first, *traceback = str(error).splitlines()
    if not (isinstance(error, flags.Error) and traceback):
        return str(error)
    root = error
    while root.__cause__ or root.__context__:
        root = root.__cause__ or root.__context__
    return f"{first} {root}"
