"""Configs on the command line: --config=FILE[:PRESET], its keys as flags, help, and differences.

A key that the config lacks is refused with the nearest name, or the one that it has now.
"""

import difflib
import json
import pathlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_dict import placeholder
from ml_collections.config_flags.config_flags import ConfigFileFlagParser

from configs import base

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEY_FLAG = re.compile(r"--?(?:no)?config\.([^=\[]+)")
ARGUMENT = re.compile(r"(.+args)\.(\w+)")  # of a task or a chat template
SET_KEY = re.compile(r"((?:eval\.sets|data\.mixture)\.[^.]+)\.")
NEEDED = ("path", "kind", "task")  # what a new set has one of
HELP = ("--help", "-help", "-h", "--helpfull", "--helpshort")
# A name on the hub, of which the revision does not count: a fingerprint has its files' digests.
HUB_NAME = re.compile(
    r"(?:hf://)?((?:datasets/)?[\w.-]+/[\w.-]+)(?:@(?:refs/\w+/)?[^/]+)?(/.+)?", re.ASCII
)


def found(path: str) -> str:
    """Returns the path as it is, or that below the project where only there is something.

    A part behind a colon (a config's preset) counts as no part of the path.
    """
    name, colon, rest = path.partition(":")
    if not name or rest.startswith("//") or pathlib.Path(name).exists():
        return path
    return f"{ROOT / name}{colon}{rest}" if (ROOT / name).exists() else path


def complete(config: ConfigDict) -> None:
    """Completes, in an unlocked config, every path that exists beside the code alone."""
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            complete(value)
        elif name == "path" and isinstance(value, str):
            config[name] = found(value)


def current(config: Mapping) -> ConfigDict:
    """Returns a run's config as it is now: without keys that are gone, newer ones by default."""
    return _on_defaults(ConfigDict(config, type_safe=False))[0]


def as_json(config: ConfigDict) -> dict:
    """Returns a config as JSON has it."""
    return json.loads(config.to_json_best_effort())


def fill_open(config: ConfigDict, chosen: Mapping) -> None:
    """Takes what a config leaves open from the one that a run has in its config.json."""
    for name, value in base.leaves(config):
        if (key := base.KEYS.get(name)) and key.open is not None and value == key.open:
            section, _, last = name.partition(".")
            config[section][last] = chosen[section].get(last, value)


def config_differences(
    old: dict, new: dict, *, among=("",), but=(), before: str = "was {}"
) -> list[str]:
    """Lists, key by key, where two configs differ; a path may be written in another way.

    among, but: the beginnings of the keys that count, and of those that do not. before: the words
    for an old value.
    """
    old, new = (dict(base.leaves(current(it))) for it in (old, new))
    pairs = [(name, old.get(name), new.get(name)) for name in sorted(old.keys() | new.keys())]
    return [
        f"{name} is {b!r}, but {before.format(repr(a))}"
        for name, a, b in pairs
        if a != b and name.startswith(among) and not name.startswith(but)
        if not _same_place(name, a, b)
    ]


def _same_place(key: str, one, other) -> bool:
    """True if two values of a path mean one folder, or one repository on the hub."""

    def places(path: str) -> set:
        name = HUB_NAME.fullmatch(path)
        folder = path if "://" in path else pathlib.Path(found(path)).resolve()
        return {name.groups() if name else path, folder}

    return bool(key.endswith(".path") and one and other and places(one) & places(other))


def define_config(
    *, flag_values: flags.FlagValues = flags.FLAGS, argv: Sequence[str] | None = None
) -> flags.FlagHolder:
    """Defines --config=FILE[:PRESET], which is required, and --config.KEY=VALUE for every key.

    argv: the command line that they are on; None: that of the process.
    """
    holder = config_flags.DEFINE_config_file(
        "config", None, "The run's config.", flag_values=flag_values, sys_argv=argv
    )
    flag_values["config"].parser = ConfigParser(argv)
    flags.mark_flag_as_required("config", flag_values=flag_values)
    return holder


def read_config(arguments: Sequence[str]) -> ConfigDict:
    """Returns the config of a command line's --config flags; ValueError, in one line."""
    argv, flag_values = ["", *arguments], flags.FlagValues()
    holder = define_config(flag_values=flag_values, argv=argv)
    try:
        flag_values(argv)
    except (flags.Error, AttributeError, KeyError, OSError) as error:
        raise ValueError(error_line(error)) from None
    return holder.value


def config_flags_of(arguments: Sequence[str]) -> list[str]:
    """Returns --config and every --config.KEY of a command line, each with its value."""
    given, takes_next = [], False
    for argument in arguments:
        if takes_next and not argument.startswith("-"):
            given[-1] += f"={argument}"
        takes_next = False
        if re.match(r"--?(no)?config(\.|=|$)", argument):
            given.append(argument)
            takes_next = "=" not in argument
    return given


class ConfigParser(ConfigFileFlagParser):
    """Loads a config and adds the data sets that flags name and the config does not have.

    A flag of a key that the config lacks is refused here, where the keys of all sections are known.
    argv: as of `define_config`.
    """

    def __init__(self, argv: Sequence[str] | None):
        super().__init__("config", lock_config=True)
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
        config, wrong = _on_defaults(config)
        if wrong:
            raise ValueError(f"{file}: {numbered(wrong)}")
        argv = (sys.argv if self._argv is None else self._argv)[1:]
        given = [match[1] for match in map(KEY_FLAG.match, argv) if match]
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
        known = set(keys(config))
        for match in filter(None, map(ARGUMENT.fullmatch, given)):
            if match[1] in known and match[0] not in known:
                config.update_from_flattened_dict({match[0]: placeholder(object)})
        complete(config)
        known = list(keys(config))
        wrong = [
            f"the config has no key {match[1]!r} ({argument}){hint(match[1], known, '--config.')}"
            for argument in argv
            if (match := KEY_FLAG.match(argument)) and match[1] not in known
        ]
        if wrong:
            raise ValueError(numbered(wrong))
        return config.lock()


def _on_defaults(given: ConfigDict):
    """Sets the values of a config on the defaults: (config, refusals of keys and of types).

    A data set may leave keys out.
    """
    config, wrong = base.get_config(), []
    for of_set in filter(None, map(SET_KEY.match, keys(given))):
        config.update_from_flattened_dict({of_set[1]: base.dataset()})
    known = list(keys(config))
    for name, value in base.leaves(given):
        key = base.key_of(name)
        try:
            if name not in known:
                wrong.append(f"the config has no key {name!r}{hint(name, known)}")
            elif key is None:
                wrong.append(f"{name} = {value!r}, but is a section with keys of its own")
            else:
                config.update_from_flattened_dict({name: key.cast(value)})
        except TypeError as error:
            wrong.append(f"{name} = {error}")
    return config, wrong


def numbered(refusals: Sequence[str]) -> str:
    """Returns refusals as one line, numbered where there are several."""
    if len(refusals) == 1:
        return refusals[0]
    return "; ".join(f"({i}) {refusal}" for i, refusal in enumerate(refusals, start=1))


def hint(name: str, known: Sequence[str], prefix: str = "") -> str:
    """Returns the question for the key that a wrong one is likely to mean; "" if none is near."""
    if new := base.RENAMED.get(name):
        return f" (its name is {prefix}{new} now)"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f" (Did you mean {prefix}{near[0]}?)" if near else ""


def keys(config: ConfigDict, prefix: str = "") -> Iterator[str]:
    """Yields the dotted name of every key of a config, sections included."""
    for name in config:
        yield prefix + name
        if isinstance(config[name], ConfigDict):
            yield from keys(config[name], f"{prefix}{name}.")


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
    """Returns what `--help` prints of every key of a command's config.

    Without --config the keys have their defaults. Raises ValueError where the config is wrong.
    """
    given = config_flags_of(arguments)
    files = [flag.partition("=")[2] for flag in given if flag.startswith(("--config=", "-config="))]
    given = given if files else [f"--config={base.__file__}", *given]
    config = read_config(given)
    lines = [
        f"Keys of the config, with their values in {files[-1] if files else 'configs/base.py'};",
        "--config.KEY=VALUE sets one. *: not the default, which then follows in parentheses.",
        "",
    ]
    for name, value in base.leaves(config):
        key = base.key_of(name)
        changed = value != key.default
        meaning = f"{key.meaning} ({key.default!r})" if changed else key.meaning
        lines.append(f"{'*' if changed else ' '} {name} = {value!r}".ljust(46) + f"  {meaning}")
    return "\n".join(lines)
