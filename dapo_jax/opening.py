"""What a command shows before its own imports, which take seconds: a first line, or all there is.

`--help` of a command with a recipe, and a finished run, need nothing of JAX.
"""

import ast
import importlib.util
import json
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
            _end_with(text)
        return
    if recipe := _value(arguments, "config"):
        _say(f"{command}: reading {recipe} ...")
    if command == "dapo_jax.train" and (lines := finished_lines(arguments)):
        _end_with("\n".join(lines))


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


def finished_lines(arguments: Sequence[str]) -> list[str] | None:
    """Says that the run of a training command is finished, where nothing is left to do or refuse.

    None where it is not, or where the command has to find out: its recipe is another, the run is
    another's fork, is going on, or lacks what a finished one has.
    """
    from dapo_jax.run import recipe_flags, recipes, words
    from dapo_jax.run.files import read_json, read_rows

    known = dict.fromkeys(("config", "workdir", "start"))
    try:
        given = words.understood(arguments, known, recipe_flags.own_keys(arguments))
        of_recipe = recipe_flags.config_flags_of(given)
        workdir, start = (_value(given, flag) for flag in ("workdir", "start"))
        apart = {workdir, start, *(flag.partition("=")[2] for flag in of_recipe)}
        if not workdir or any(not _is_known(word) and word not in apart for word in given):
            return None
        config, workdir = recipe_flags.read_recipe(of_recipe), pathlib.Path(workdir)
        directory = pathlib.Path(config.checkpoint.directory or workdir / "checkpoints")
        steps = [int(path.name) for path in directory.iterdir() if path.name.isdecimal()]
        needed = [workdir / name for name in ("config.json", "metrics.jsonl", "curves.png")]
        if config.eval.every_steps > 0 and config.eval.sets:
            needed.append(workdir / "eval" / f"{config.num_steps}.json")
        ours, theirs = json.loads(config.to_json_best_effort()), read_json(needed[0])
        if (
            max(steps, default=0) != config.num_steps
            or (workdir / "run.lock").exists()
            or not all(file.is_file() for file in needed)
            or recipes.recipe_differences(theirs, ours, but=recipes.MAY_CHANGE)
            or (start and not _began_with(workdir, start))
            or read_rows(needed[1])[-1]["step"] + 1 != config.num_steps
        ):
            return None
    except Exception:  # whatever it is, the command says it in its own words
        return None

    from dapo_jax.report.runs import load_run, summary_lines

    done = config.num_steps
    return [
        f"finished: {done} of {done} steps in {workdir}; raise num_steps to go on, as "
        f"--config.num_steps={2 * done}",
        *summary_lines(load_run(workdir)),
        f"curves: {workdir / 'curves.png'}",
    ]


def _is_known(word: str) -> bool:
    return word.startswith(("--config", "-config", "--noconfig", "--workdir", "--start"))


def _began_with(workdir: pathlib.Path, start: str) -> bool:
    """Whether the run began with the checkpoint run:DIR@STEP, as --start has it."""
    from dapo_jax.run.files import read_starts

    folder, _, step = start.removeprefix("run:").rpartition("@")
    begun = f"run:{pathlib.Path(folder).resolve()}@{step}"
    return read_starts(workdir / "starts.jsonl")[-1].get("origin") == begun


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """The value of a flag, behind = or as the next argument; of several the last."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        name, equals, text = argument.partition("=")
        if name in (f"--{flag}", f"-{flag}"):
            value = text if equals else following
    return value


def _end_with(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` has read enough; Python would print a traceback at its end
        os._exit(0)
    sys.exit(0)


def _say(line: str) -> None:
    """Shows a line on stderr, apart from results; of several processes only the first does."""
    if os.environ.get("DAPO_PROCESS", "0") == "0":
        print(line, file=sys.stderr, flush=True)
