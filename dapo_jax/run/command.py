"""Starts a command: flags are parsed, and a wrong setting ends it with one line.

absl and ml_collections would show their own traceback for a misspelt key or preset; the line says
the same. `--debug` shows the traceback.
"""

import difflib
import pathlib
import re
import sys
import traceback
from collections.abc import Callable

from absl import app, flags, logging
from ml_collections import config_flags
from ml_collections.config_flags.config_flags import ConfigFileFlagParser

from configs.base import dataset
from dapo_jax.run import stops
from sharding import hosts

ROOT = pathlib.Path(__file__).resolve().parents[2]
SET_FLAG = re.compile(r"--?config\.eval\.sets\.([^=]+)")
NEEDED = ("path", "kind", "task")  # what a new set has one of


class RecipeParser(ConfigFileFlagParser):
    """Loads a recipe and adds the evaluation sets that flags name and the recipe does not have.

    What the flags say of such a set is then checked and set as in any other.
    """

    def parse(self, path: str):
        """Returns the recipe's config, locked."""
        config = super().parse(path)
        keys: dict[str, set[str]] = {}
        for argument in sys.argv:
            if (match := SET_FLAG.match(argument)) and "." in match[1]:
                name, key = _name_and_key(match[1].split("."))
                keys.setdefault(name, set()).add(key)
        with config.unlocked():
            for name in keys.keys() - config.eval.sets.keys():
                if not name.isidentifier():
                    message = "the name of a set has letters, digits and _ and begins with no digit"
                    raise ValueError(f"eval.sets.{name}: {message}")
                if keys[name].isdisjoint(NEEDED):
                    near = difflib.get_close_matches(name, config.eval.sets, n=1)
                    hint = f" (did you mean {near[0]!r}?)" if near else ""
                    message = f"the recipe has no such set{hint}; a new one needs a path or a task"
                    raise ValueError(f"eval.sets.{name}: {message}")
                config.eval.sets[name] = dataset()
        return config


def _name_and_key(parts: list[str]) -> tuple[str, str]:
    """Splits what a flag says after eval.sets: NAME.KEY, or NAME.args.KEY."""
    if len(parts) > 2 and parts[1] in dataset():
        return parts[0], parts[1]
    return ".".join(parts[:-1]), parts[-1]


def define_config(flag_values: flags.FlagValues = flags.FLAGS) -> flags.FlagHolder:
    """Defines --config=FILE[:PRESET], which is required, and --config.KEY=VALUE for every key."""
    holder = config_flags.DEFINE_config_file(
        "config", None, "The run's recipe.", flag_values=flag_values, lock_config=True
    )
    flag_values["config"].parser = RecipeParser("config", lock_config=True)
    flags.mark_flag_as_required("config", flag_values=flag_values)
    return holder


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
        try:
            with stops.Stops(stops.end_command), hosts.ending_when_a_peer_is_lost():
                main(argv)
        except (ValueError, OSError) as error:
            if flags.FLAGS.debug or not raised_by_us(error):
                end_all(traceback.format_exc())
                raise
            end_all(f"error: {error}")
            sys.exit(f"error: {error}\n(--debug shows where)")
        except Exception:
            end_all(traceback.format_exc())
            raise

    app.run(guarded, flags_parser=parse_flags)


def end_all(message: str) -> None:
    """Ends all processes of a run with this one, which the others would wait for."""
    if hosts.started() and hosts.count() > 1:
        hosts.fail(message, code=1)


def raised_by_us(error: Exception) -> bool:
    """Says whether our own check refused something: a library's error needs its traceback."""
    innermost = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return innermost.is_relative_to(ROOT) and "site-packages" not in innermost.parts


def parse_flags(argv: list[str]) -> list[str]:
    """absl's flags parser, with one line for a bad flag, key, value, preset or recipe file."""
    try:
        return flags.FLAGS(argv)
    except (flags.Error, AttributeError, KeyError, OSError) as error:
        if "--debug" in argv:
            raise
        sys.exit(f"error: {flag_error_line(error)}")


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
