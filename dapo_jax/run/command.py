"""Starts a command: flags are parsed, and a wrong setting ends it with one line.

absl and ml_collections would show their own traceback for a misspelt key or preset; the line says
the same. `--debug` shows the traceback.
"""

import contextlib
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from dapo_jax.run import failures, stops
from dapo_jax.run.arguments import RecipeParser, expanded, leftover
from sharding import hosts

# The recipe of a model that comes without one.
ANY_MODEL = str(pathlib.Path(__file__).parents[2] / "configs" / "any_model.py")


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
        f"or of {hosts.COORDINATOR}, {hosts.PROCESSES} and {hosts.PROCESS} in the environment.",
    )


def run(main: Callable[[list[str]], None]) -> None:
    """Parses the command line and runs `main`; errors in settings or files exit with one line."""
    flags.DEFINE_bool("debug", False, "Show the traceback of an error in the settings.")

    def guarded(argv):
        logging.set_verbosity(logging.WARNING)  # Orbax logs each save in dozens of lines
        failures.quiet_threads()
        try:
            with stops.Stops(stops.end_command), hosts.ending_when_a_peer_is_lost():
                main(argv)
        except Exception as error:
            if flags.FLAGS.debug or not failures.is_explained(error):
                end_all(traceback.format_exc())
                raise
            line, status = failures.explain(error)
            end_all(f"error: {line}", code=status)
            print(f"error: {line}\n(--debug shows where)", file=sys.stderr)
            if failures.is_refusal(error):
                sys.exit(status)
            leave(status)

    app.run(guarded, flags_parser=parse_flags)


def leave(status: int) -> None:
    """Ends the process at once: what it could not write would fail again at its regular end.

    Libraries' own writers, and Python's of open files, would print a traceback each.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def end_all(message: str, *, code: int = 1) -> None:
    """Ends all processes of a run with this one, which the others would wait for.

    Asks JAX for nothing: it would start its backends, and wait there for the others.
    """
    if hosts.started():
        hosts.fail(message, code=code)


def parse_flags(argv: list[str]) -> list[str]:
    """absl's flags parser, with one line for a bad flag, key, value, preset or recipe file.

    Arguments that no flag takes are refused: absl would leave them to the command.
    """
    try:
        left = flags.FLAGS(argv)
    except (flags.Error, AttributeError, KeyError, OSError) as error:
        if "--debug" in argv:
            raise
        message = flag_error_line(error)
        # One of these may be the flag that is missing.
        if bare := [text for text in argv[1:] if re.match(r"[a-z_.]+=", text)]:
            message += f" ({leftover(bare, flags.FLAGS, None)})"
        sys.exit(f"error: {message}")
    if left[1:]:
        config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
        sys.exit(f"error: {leftover(left[1:], flags.FLAGS, config)}")
    return left


def flag_error_line(error: Exception) -> str:
    """Says in one line what went wrong, from an exception of the libraries."""
    if isinstance(error, AttributeError | KeyError):  # "'key'\nDid you mean ...", maybe nested
        while isinstance(error.args[0], Exception):
            error = error.args[0]
        return f"the recipe has no key {'; '.join(str(error.args[0]).splitlines())}"
    first, *traceback = str(error).splitlines()
    if not (isinstance(error, flags.Error) and traceback):
        return str(error)
    root = error
    while root.__cause__ or root.__context__:
        root = root.__cause__ or root.__context__
    return f"{first} {root}"
