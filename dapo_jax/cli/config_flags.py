"""Configs on the command line: --config=FILE[:PRESET], its keys as flags, and their help."""

import json
import pathlib
import re
import sys
import traceback
from collections.abc import Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_dict import placeholder
from ml_collections.config_flags import register_flag_parser_for_type, tuple_parser
from ml_collections.config_flags.config_flags import ConfigFileFlagParser

from configs import base
from configs.compare import SET_KEY, complete, current, found, hint, on_defaults

KEY_FLAG = re.compile(r"--?(?:no)?config\.([^=\[]+)")
ARGUMENT = re.compile(r"(.+args)\.(\w+)")  # of a task or a chat template
NEEDED = ("path", "kind", "task")  # what a new set has one of
HELP = ("--help", "-help", "-h", "--helpfull", "--helpshort")


class TupleParser(tuple_parser.TupleParser):
    """Reads a,b,c as texts, beside what Python writes."""

    def parse(self, argument):
        is_python = not isinstance(argument, str) or re.match(r"$|[\d(\['\"]", argument)
        return super().parse(argument) if is_python else tuple(argument.split(","))


register_flag_parser_for_type(tuple, TupleParser())


def define_config(
    *, flag_values: flags.FlagValues = flags.FLAGS, argv: Sequence[str] | None = None
) -> None:
    """Defines --config=FILE[:PRESET], which is required, and --config.KEY=VALUE for every key.

    argv: the command line that they are on; None: that of the process.
    """
    config_flags.DEFINE_config_file(
        "config", None, "The run's config.", flag_values=flag_values, sys_argv=argv
    )
    flag_values["config"].parser = ConfigParser(argv or sys.argv)
    flags.mark_flag_as_required("config", flag_values=flag_values)


def read_config(arguments: Sequence[str]) -> ConfigDict:
    """Returns the config of a command line's --config flags, whatever others are there.

    Raises ValueError, in one line.
    """
    argv, flag_values = ["", *arguments], flags.FlagValues()
    define_config(flag_values=flag_values, argv=argv)
    flag_values.set_gnu_getopt()  # to go on behind another flag's value
    try:
        flag_values(argv, known_only=True)
    except (flags.Error, AttributeError, KeyError, OSError) as error:
        raise ValueError(error_line(error)) from None
    return flag_values["config"].value


class ConfigParser(ConfigFileFlagParser):
    """Loads a config, adds the data sets that flags name, and refuses flags of keys it lacks."""

    def __init__(self, argv: Sequence[str]):
        super().__init__("config")
        self._argv = argv

    def parse(self, path: str):
        path = found(path)
        file = path.partition(":")[0]
        if not pathlib.Path(file).is_file():
            raise ValueError(f"there is no config {file!r}")
        try:
            if file.endswith(".json"):  # a run's, with all that it chose
                config = current(json.loads(pathlib.Path(file).read_text()))
            else:
                config = super().parse(path)
        except (Exception, SystemExit) as error:
            raise ValueError(f"{_place(error, file)}: {error_line(error)}") from None
        if config is None:
            raise ValueError(f"{file}: get_config returns nothing; end it with `return config`")
        config, wrong = on_defaults(config)
        refuse(wrong, f"{file}: ")
        given = {match[1]: match.string for match in map(KEY_FLAG.match, self._argv) if match}
        for key in dict.fromkeys(match[1] for match in map(SET_KEY.match, given) if match):
            sets = config.eval.sets if key.startswith("eval.") else config.data.mixture
            name = key.rpartition(".")[2]
            if name in sets:
                continue
            if not name.isidentifier() or not any(f"{key}.{it}" in given for it in NEEDED):
                raise ValueError(
                    f"{key}: the config has no such set{hint(name, sets)}; a new one has a path or "
                    "a task, and a name of letters, digits and _"
                )
            sets[name] = base.dataset()
        known = [name for name, _ in base.leaves(config)]
        wrong = []
        for key in (key for key in given if key not in known):
            if (match := ARGUMENT.fullmatch(key)) and match[1] in known:
                config.update_from_flattened_dict({key: placeholder(object)})
            else:
                near = hint(key, known, "--config.")
                wrong.append(f"the config has no key {key!r} ({given[key]}){near}")
        refuse(wrong)
        complete(config)
        return config.lock()


def refuse(refusals: Sequence[str], where: str = "") -> None:
    """Raises ValueError with all refusals in one line, numbered where there are several."""
    if len(refusals) > 1:
        refusals = ["; ".join(f"({i}) {text}" for i, text in enumerate(refusals, start=1))]
    if refusals:
        raise ValueError(where + refusals[0])


def _place(error: BaseException, file: str) -> str:
    """Returns the file, and the last line of it that an error of reading it came through."""
    frames, name = traceback.extract_tb(error.__traceback__), pathlib.Path(file).resolve()
    lines = [it.lineno for it in frames if pathlib.Path(it.filename).resolve() == name]
    lines += [error.lineno] if isinstance(error, SyntaxError) else []
    return f"{file}, line {lines[-1]}" if lines else file


def error_line(error: BaseException) -> str:
    """Returns an exception of the flag libraries in one line."""
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]
    text = str(error.args[0] if isinstance(error, KeyError) else error).strip()
    if "Traceback" in text:  # ml_collections puts one into its message
        text = text.splitlines()[-1]
    if missing := re.search(r"Flag --(\w+) must have a value other than None", text):
        example = {"config": "configs/tiny.py", "workdir": "runs/mine"}.get(missing[1], "VALUE")
        return f"--{missing[1]} is missing: --{missing[1]}={example}"
    return " ".join(re.sub(r"^flag --config=\S+: ", "", text).split())


def help_text(arguments: Sequence[str]) -> str:
    """Returns what `--help` prints of every key of a command's config, or of the defaults."""
    is_named = any(re.match("--?config(=|$)", argument) for argument in arguments)
    config = read_config([*["--config=configs/base.py"] * (not is_named), *arguments])
    lines = [
        "Keys of the config, with their values; --config.KEY=VALUE sets one.",
        "*: not the default, which then follows in parentheses.",
        "",
    ]
    for name, value in base.leaves(config):
        key = base.key_of(name)
        changed = value != key.default
        meaning = f"{key.meaning} ({key.default!r})" if changed else key.meaning
        lines.append(f"{'*' if changed else ' '} {name} = {value!r}".ljust(46) + f"  {meaning}")
    return "\n".join(lines)
