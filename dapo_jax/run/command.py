"""Starts a command: flags are parsed, and a wrong setting ends it with one line.

absl and ml_collections would show their own traceback for a misspelt key or preset; the line says
the same. `--debug` shows the traceback.
"""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable

from absl import app, flags, logging

from dapo_jax.run import failures, recipe_help, stops, words
from dapo_jax.run.arguments import leftover
from dapo_jax.run.recipe_flags import (
    define_config,
    define_debug,
    define_distributed,
    define_short,
    define_start,
    define_trust_code,
    define_workdir,
    flag_error_line,
    own_keys,
    read_recipe,
)
from sharding import hosts

__all__ = [  # those of recipe_flags are the commands' too
    "define_config",
    "define_distributed",
    "define_short",
    "define_start",
    "define_trust_code",
    "define_workdir",
    "end_all",
    "flag_error_line",
    "leave",
    "parse_flags",
    "read_recipe",
    "run",
]


def run(main: Callable[[list[str]], None]) -> None:
    """Parses the command line and runs `main`; errors in settings or files exit with one line."""
    define_debug()

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


def _has_several(message: str) -> bool:
    """Whether the value that "flag --KEY=VALUE: what is wrong" refuses has a comma."""
    return "," in message.partition(": ")[0]


def parse_flags(argv: list[str]) -> list[str]:
    """absl's flags parser, with one line for a bad flag, key, value, preset or recipe file.

    Arguments that no flag takes are refused: absl would leave them to the command.
    """
    recipe = None
    try:
        if "config" in flags.FLAGS:
            if recipe_help.is_asked_for(argv[1:]):
                print(recipe_help.text(argv[1:], flags.FLAGS, sys.modules["__main__"].__doc__))
                sys.exit(0)
            recipe = own_keys(argv[1:])
            argv[1:] = words.understood(argv[1:], flags.FLAGS, recipe)
        left = flags.FLAGS(argv)
    except (flags.Error, AttributeError, KeyError, OSError, ValueError) as error:
        if "--debug" in argv:
            raise
        message = flag_error_line(error)
        if isinstance(error, words.RefusedError):
            sys.exit(f"error: {message}")
        # One of these may be the flag that is missing.
        if bare := [text for text in argv[1:] if re.match(r"[a-z_.]+=", text)]:
            message += f" ({leftover(bare, flags.FLAGS, recipe)})"
        elif isinstance(error, flags.UnrecognizedFlagError):
            given = [text for text in argv[1:] if text.lstrip("-").startswith(error.flagname)]
            message = leftover(given, flags.FLAGS, recipe)
        elif isinstance(error, flags.IllegalFlagValueError) and _has_several(message):
            message += ". (Several values: python -m dapo_jax.sweep --set KEY=V1,V2)"
        sys.exit(f"error: {message}")
    if left[1:]:
        config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
        sys.exit(f"error: {leftover(left[1:], flags.FLAGS, config)}")
    return left
