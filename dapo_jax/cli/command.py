"""Starts a command: flags are parsed, and a wrong setting ends it with one line.

absl and ml_collections would show their own traceback for a misspelt key or preset; the line says
the same. `--debug` shows the traceback.
"""

import inspect
import sys
import traceback
from collections.abc import Callable

from absl import app, flags, logging

from dapo_jax.cli import config_flags
from dapo_jax.process import failures, hosts, signals


def run(main: Callable[[list[str]], None]) -> None:
    """Parses the command line and runs `main`; errors in settings or files exit with one line."""
    flags.DEFINE_bool("debug", False, "Show the traceback of an error in the settings.")

    def guarded(argv):
        logging.set_verbosity(logging.WARNING)  # Orbax logs each save in dozens of lines
        failures.quiet_threads()
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal's encoding may be ASCII
        try:
            with signals.Signals(signals.end_command), hosts.ending_when_a_peer_is_lost():
                main(argv)
        except Exception as error:
            if flags.FLAGS.debug or not failures.is_explained(error):
                hosts.fail(traceback.format_exc())
                raise
            line, status = failures.explain(error)
            hosts.fail(f"error: {line}", code=status)
            # At once: what could not be written would fail again at the regular end, in tracebacks.
            hosts.leave(f"error: {line}\n(--debug shows where)", status)

    try:
        app.run(guarded, flags_parser=parse_flags)
    except BaseException as ended:
        hosts.leave_threads(ended.code if isinstance(ended, SystemExit) else 1)
        raise


def parse_flags(argv: list[str]) -> list[str]:
    """Parses flags for absl; what is wrong, or no flag, ends the command with one line."""
    known = flags.FLAGS
    try:
        if not set(config_flags.HELP).isdisjoint(argv):
            print(inspect.cleandoc(sys.modules["__main__"].__doc__ or ""))
            own = (argv[0], "dapo_jax.", "experiments.")
            for module in known.flags_by_module_dict():
                if module.startswith(own):
                    print(known.module_help(module))
            if "config" in known:
                print(config_flags.help_text(argv[1:]))
            sys.exit(0)
        left = known(argv)
        if left[1:]:
            raise ValueError(f"{left[1]!r} is no flag: flags begin with --; --help lists all")
    except (flags.Error, AttributeError, KeyError, OSError, ValueError) as error:
        if "--debug" in argv:
            raise
        sys.exit(f"error: {config_flags.error_line(error)}")
    return left


def define_workdir() -> None:
    """Defines the flag of the run's directory, which is required."""
    flags.DEFINE_string("workdir", None, "The run's directory.", required=True)
    flags.register_validator(
        "workdir",
        lambda path: path is None or "://" not in path,
        "it has to be a folder of this machine; --config.checkpoint.directory may be a bucket's",
    )


def define_distributed() -> None:
    """Defines the flag of the commands that run on several hosts."""
    flags.DEFINE_bool(
        "distributed",
        False,
        "The command was given on several hosts, which are to run it together: those of a TPU pod, "
        "or of DAPO_COORDINATOR, DAPO_PROCESSES and DAPO_PROCESS in the environment.",
    )


def define_trust_code() -> None:
    """Defines the flag of the commands that open a run which may be a stranger's."""
    flags.DEFINE_bool("trust_code", False, "Import the modules that the run's config.json names.")
