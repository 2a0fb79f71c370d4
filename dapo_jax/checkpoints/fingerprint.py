"""Is it the same run? Its config, and digests of its data, tokenizer, weights and own code say it.

A run is compared with what is in its folder, with the fingerprint of each checkpoint, and with
other processes; what differs is refused by the names of the keys. The code of a fork may be
another; `evaluate`, `sample` and `convert` take what is there.
"""

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from configs.base import MAY_CHANGE, OF_POLICY, eval_settings, mixture_settings
from configs.compare import as_json, config_differences, current
from dapo_jax import hub
from dapo_jax.checkpoints.progress import best_of
from dapo_jax.logs.files import read_json, read_rows, read_starts
from dapo_jax.logs.provenance import NAME as STARTS
from dapo_jax.process import hosts
from dapo_jax.tasks import tokenizer
from dapo_jax.types import Prompt
from models import families

SHOWN_DIFFERENCES = 5
BEST = "best"  # in the place of a step, of --step and --start
WEIGHTS = ".safetensors"
LIBRARY = "math_verify"  # rules whose code is no file of this project
# Steps without a checkpoint, in units of checkpoint.every_steps, that a run can have finished when
# it is killed: one is being saved, one is pending, and the step of the next waits for the first.
UNSAVED = 3


@dataclasses.dataclass(frozen=True)
class Parent:
    """The checkpoint that a fork begins from: a run's workdir, and its finished steps."""

    workdir: pathlib.Path
    step: int

    @classmethod
    def parse(cls, text: str, fork: pathlib.Path | None = None) -> "Parent":
        """Reads run:DIR@STEP, or run:DIR@best; ValueError for anything else.

        fork: the workdir, where a fork that has begun keeps the step that was best then.
        """
        kind, _, place = text.partition(":")
        folder, _, step = place.rpartition("@")
        if kind != "run" or not folder or not (step.isdecimal() or step == BEST):
            raise ValueError(f"--start is {text!r}, but must be run:DIR@STEP, a run's checkpoint")
        workdir = pathlib.Path(folder).resolve()
        begun = _origin(fork) if fork and step == BEST else None
        if begun and begun.startswith(f"run:{workdir}@"):
            return cls.parse(begun)
        if step == BEST:
            of = current(read_json(workdir / "config.json")).checkpoint
            step = best_step(workdir, of.directory or workdir / "checkpoints", of.best)
        return cls(workdir, int(step))

    def __str__(self) -> str:
        return f"run:{self.workdir}@{self.step}"

    def checkpoints(self, num_steps: int) -> epath.Path:
        """Finds the run's checkpoints for a fork of so many steps, its parent's among them.

        Raises FileNotFoundError where the run or the step is not there, ValueError for too few.
        """
        file = self.workdir / "config.json"
        theirs = read_json(file) if file.is_file() else {}
        if "checkpoint" not in theirs:  # a model's directory has a config.json too
            raise FileNotFoundError(f"--start={self}: {file} is missing, or no run's config")
        directory = epath.Path(theirs["checkpoint"]["directory"] or self.workdir / "checkpoints")
        steps = sorted(int(it.name) for it in directory.glob("*") if it.name.isdecimal())
        if self.step not in steps:
            raise FileNotFoundError(
                f"--start={self}: {directory} has no checkpoint {self.step}, only {steps}"
            )
        if num_steps <= self.step:
            raise ValueError(
                f"num_steps = {num_steps}, but --start={self} begins after {self.step} steps, "
                "which count too"
            )
        return directory


def best_step(workdir: pathlib.Path, directory, name: str) -> int:
    """Returns which checkpoint in `directory` is the best by the run's evaluations of a set.

    Those with other settings than the last do not count. ValueError where there is none.
    """
    files = [it for it in (workdir / "eval").glob("*.json") if it.stem.isdecimal()]
    found = [it for it in map(read_json, files) if name in it["sets"]]
    last = max(found, key=lambda it: it["step"])["settings"][name] if found else {}
    same = [it for it in found if it["settings"][name] == last]
    scores = {str(it["step"]): it["sets"][name][f"mean@{last['k']}"] for it in same}
    steps = [int(it.name) for it in epath.Path(directory).glob("*") if it.name.isdecimal()]
    if (best := best_of({name: scores}, steps)) is None:
        of = f"none of the checkpoints {sorted(steps)} in {directory} was evaluated"
        raise ValueError(f"{of} on checkpoint.best = {name!r}; give the number of one")
    return best


def of_run(config: ConfigDict, data, parent=None) -> dict:
    """Returns this run's fingerprint, JSON-able; ValueError where the processes' differ.

    data: a `components.Data`. parent: a fork's. All processes call it. Weight files, which are
    large, are divided among the processes, each of which compares their sizes alone with the
    others'.
    """
    train, settings = data.train, mixture_settings(config)
    own = {
        "recipe": as_json(config),
        "data": {
            _key(key, settings[key]): of_prompts(dataset.prompts)
            | ({"share": round(train.shares[key], 6)} if len(train.sets) > 1 else {})
            for key, dataset in train.sets.items()
        },
        "eval": {
            _key(f"eval.sets.{name}", config.eval.sets[name]): of_prompts(dataset.prompts)
            for name, dataset in data.eval_sets.items()
        },
        "files": _of_small_files(config),
        "modules": of_code(config),
    }
    weights = _weight_files(config)
    files = own["files"].get("model.path", {})
    files |= {file.name: file.stat().length for file in weights}
    everyone = hosts.gather((own, _of_mine(weights)))
    require_alike([theirs for theirs, _ in everyone], all_differences)
    for _, of_weights in everyone:
        files |= of_weights
    return own | {"origin": parent and str(parent)}


def of_code(config: ConfigDict) -> dict[str, dict[str, str]]:
    """Digests the files of custom modules, by key and name; what they import is not looked at.

    Of the library that the rules "math_verify" are it has the version.
    """
    sets = {f"eval.sets.{name}": of for name, of in eval_settings(config).items()}
    sets |= mixture_settings(config)
    of_sets = ("task", "environment")
    named = [(f"{key}.{name}", it[name]) for key, it in sets.items() for name in of_sets]
    named += [(f"log.{key}", name) for key in ("writers", "metrics") for name in config.log[key]]
    named += [(f"algo.{key}", config.algo[key]) for key in ("policy_loss", "advantage_scale")]
    custom = [(key, name.partition(":")[0]) for key, name in named if ":" in name]
    if config.model.family not in families.BUILT_IN:
        custom.append(("model.family", config.model.family))
    found: dict[str, dict[str, str]] = {}
    if LIBRARY in {config.verifier.rules, *(it["rules"] for it in sets.values())}:
        found["verifier.rules"] = {LIBRARY: importlib.metadata.version("math-verify")}
    for key, module in custom:
        spec = importlib.util.find_spec(module)
        code = pathlib.Path(spec.origin).read_bytes() if spec and spec.has_location else b""
        found.setdefault(key, {})[module] = hashlib.sha256(code).hexdigest()[:32]
    return found


def require_start_model(config: ConfigDict, theirs: dict, where: str, *, weights: bool) -> None:
    """Refuses a model or tokenizer directory that has changed since a run began (ValueError).

    theirs: the fingerprint of a checkpoint of the run. weights: whether the start model's weights
    count too. All processes call it, and divide the weight files among them.
    """
    ours = _of_small_files(config)
    for of_process in hosts.gather(_of_mine(_weight_files(config) if weights else [])):
        ours.get("model.path", {}).update(of_process)
    found = _file_differences(theirs["files"], ours)
    if found := [text for text in found if weights or WEIGHTS not in text]:
        raise ValueError(
            f"{where} began with another model: {listed(found)}. Put back the files that the run "
            "was started with"
        )


def _of_small_files(config: ConfigDict) -> dict[str, dict[str, str]]:
    """Digests the tokenizer's files and the model's config.json, by key and name."""
    folder = epath.Path(hub.local(config.tokenizer.path or config.model.path))
    merged = tokenizer.IN_TOKENIZER_JSON if (folder / "tokenizer.json").exists() else ()
    names = [name for name in tokenizer.FILES if name not in merged]
    files = [folder / name for name in names] if folder.is_dir() else [folder]
    digests = {file.name: of_file(file) for file in files if file.is_file()}
    found = {"tokenizer.path" if config.tokenizer.path else "model.path": digests}
    if config.model.path:
        file = epath.Path(hub.local(config.model.path)) / "config.json"
        found.setdefault("model.path", {})["config.json"] = of_file(file)
    return found


def _weight_files(config: ConfigDict) -> list[epath.Path]:
    path = hub.local(config.model.path)
    return sorted(epath.Path(path).glob(f"*{WEIGHTS}")) if path else []


def _of_mine(files: Sequence[epath.Path]) -> dict[str, str]:
    """Digests this process's part of the files, by name."""
    return {file.name: of_file(file) for i, file in enumerate(files) if hosts.is_mine(i)}


def of_prompts(prompts: Sequence[Prompt]) -> dict:
    """Digests a data set's texts and answers in order, and its token ids: a library makes those."""
    digest, ids = hashlib.sha256(), hashlib.sha256()
    for prompt in prompts:
        example = prompt.example
        content = [[dict(it) for it in example.prompt], example.answer, _plain(example.extra)]
        digest.update(json.dumps(content, sort_keys=True).encode())
        ids.update(prompt.token_ids.astype(np.int32).tobytes())
    texts, ids = digest.hexdigest()[:32], ids.hexdigest()[:32]
    return {"prompts": len(prompts), "digest": texts, "ids": ids}


def of_file(file: epath.Path) -> str:
    """Returns the digest of a file's bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:32]


def _key(name: str, settings: Mapping) -> str:
    return f"{name}.path" if settings["path"] else name


def _plain(value) -> object:
    """Makes JSON of a value: of arrays and objects what they hold, sets in order, keys as texts."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else repr(k): _plain(it) for k, it in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(it) for it in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(it) for it in value), key=repr)
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__dict__"):
        return [type(value).__name__, _plain(vars(value))]
    # Python's own text of an object has its address.
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else repr(value)


def _origin(workdir: pathlib.Path) -> str | None:
    starts = read_starts(workdir / STARTS)
    return starts[-1].get("origin") if starts else None


def parent_of(workdir: pathlib.Path, given: Parent | None) -> Parent | None:
    """Returns what the run in `workdir` began from, else `given`; ValueError where they differ."""
    if not any((workdir / name).exists() for name in ("config.json", "metrics.jsonl")):
        return given
    begun = _origin(workdir)
    if given and str(given) != begun:
        began = f"with {begun}" if begun else "without a --start"
        raise ValueError(
            f"--start={given}, but {workdir} holds a run that began {began}; leave --start out to "
            "resume it, or give another --workdir"
        )
    return Parent.parse(begun) if begun else None


def config_of(workdir: pathlib.Path) -> dict:
    """Returns the config of the run in a folder; ValueError where its config.json is cut short."""
    try:
        return read_json(workdir / "config.json")
    except ValueError as error:
        raise ValueError(f"{error}; or remove it: checkpoints have the config too") from error


def require_same_config(config: ConfigDict, workdir: pathlib.Path) -> None:
    """Refuses a directory whose config.json is another config's, or cut short (ValueError)."""
    if not (workdir / "config.json").exists():
        return
    theirs = config_of(workdir)
    differing = config_differences(theirs, as_json(config), but=MAY_CHANGE)
    steps = theirs["num_steps"]
    if config.learner.decay != "none" and config.num_steps != steps:  # the rate's last step
        differing.append(f"num_steps is {config.num_steps}, but was {steps} (learner.decay)")
    if differing:
        raise ValueError(
            f"{workdir} holds a run of another config: {'; '.join(differing)}. Give the old values "
            "to resume it, or another --workdir"
        )


def require_steps_left(config: ConfigDict, finished_steps: int, directory) -> None:
    """Refuses fewer steps than the run has done (ValueError)."""
    if finished_steps > config.num_steps:
        raise ValueError(
            f"num_steps = {config.num_steps}, but the run in {directory} has finished "
            f"{finished_steps} steps"
        )


def require_unsaved(config: ConfigDict, workdir: pathlib.Path, directory, begin_step: int) -> None:
    """Refuses to begin a run anew whose rows say that it has saved checkpoints (ValueError)."""
    file, every = workdir / "metrics.jsonl", config.checkpoint.every_steps
    finished = max((row["step"] + 1 for row in read_rows(file)), default=0) if file.exists() else 0
    if finished - begin_step >= UNSAVED * every:
        raise ValueError(
            f"{file} has {finished} finished steps, but {directory} has no "
            f"checkpoint, though checkpoint.every_steps is {every}; give the run's "
            "checkpoint.directory, or another --workdir to start a new run"
        )


def require_alike(everyone: Sequence, compare: Callable) -> None:
    """Refuses processes that differ (ValueError), of which one would wait for ever.

    compare(one, other, before=words for one's value) -> what differs.
    """
    first, *others = everyone
    for process, theirs in enumerate(others, start=1):
        if found := list(compare(first, theirs, before="{} on process 0")):
            raise ValueError(f"process {process} differs from process 0: {listed(found)}")


def require_policy(
    config: ConfigDict, theirs: dict, where: str, *, may_differ: tuple[str, ...] = ()
) -> None:
    """Refuses a config of another policy (ValueError); a seed counts if it makes the weights."""
    compared = OF_POLICY + (() if config.model.path else ("seed",))
    differing = config_differences(theirs, as_json(config), among=compared, but=may_differ)
    if differing:
        raise ValueError(
            f"{where} is of another policy: {'; '.join(differing)}. Give the run's own config"
        )


def require_same(theirs: dict, ours: dict, where: str, report: Callable[[str], None]) -> None:
    """Refuses to go on with a checkpoint of another run (ValueError), by the keys that differ.

    theirs: the checkpoint's fingerprint. Evaluation sets may change, and the code of keys that may
    (`MAY_CHANGE`): that is reported.
    """
    found = list(differences(theirs, ours, but=MAY_CHANGE))
    was, now = theirs.get("origin"), ours.get("origin")
    if now not in (None, was):
        found.append(f"--start is {now!r}, but it began {'from ' + was if was else 'without one'}")
    code = list(_file_differences(theirs.get("modules", {}), ours["modules"]))
    if "verifier.rules" in ours["modules"].keys() - theirs.get("modules", {}).keys():
        found.append(
            f"verifier.rules {LIBRARY!r} is the published library, but was the project's own "
            "equality, of which the name is 'symbolic'"
        )
    edited = [text for text in code if not text.startswith(MAY_CHANGE)]
    if found or edited:
        fork = "; with --start=run:WORKDIR@STEP that is a fork, which goes on with the edited code"
        raise ValueError(
            f"{where} is of another run: {listed(found + edited)}. Give what it had to resume it, "
            "or another --workdir (and checkpoint.directory) to start a new run"
            + (fork if edited else "")
        )
    if changed := [*_data_differences(theirs["eval"], ours["eval"]), *code]:
        report(f"{listed(changed)}: numbers from here on are not comparable with those before")


def require_parent(theirs: dict, ours: dict, where: str) -> None:
    """Refuses to fork a run of another policy, seed or training data (ValueError), by key.

    Its place in the prompt stream means something in the same stream alone. theirs: the fingerprint
    of the checkpoint that the fork goes on with. Of the data the digests count, not how it is named
    or graded.
    """
    if found := list(differences(theirs, ours, among=(*OF_POLICY, "seed"))):
        raise ValueError(
            f"{where} cannot be forked: {listed(found)}. A fork goes on with the run's model, "
            "tokenizer, LoRA shape, seed and training data; all else may be another"
        )


def differences(old: dict, new: dict, **keys) -> Iterator[str]:
    """Says, key by key, in what two fingerprints differ; evaluation sets and code are left out.

    keys: as of `config_differences`, which the configs' part is.
    """
    yield from config_differences(old["recipe"], new["recipe"], **keys)
    before, now = old["data"], new["data"]
    if len(before) != len(now):
        yield f"there are {len(now)} training sets (data.train, data.mixture), not {len(before)}"
    else:  # in the stream's order: a set may have been generated, and be read from a file now
        yield from _data_differences(dict(zip(now, before.values(), strict=True)), now)
    yield from _file_differences(old["files"], new["files"])


def all_differences(old: dict, new: dict, **keys) -> Iterator[str]:
    """Says in what two fingerprints differ, evaluation sets and code included."""
    yield from differences(old, new, **keys)
    yield from _data_differences(old["eval"], new["eval"])
    yield from _file_differences(old["modules"], new["modules"])


def _data_differences(old: dict, new: dict) -> Iterator[str]:
    for key in sorted(old.keys() & new.keys()):
        a, b = old[key], new[key]
        if a["prompts"] != b["prompts"]:
            yield f"{key} has {b['prompts']} prompts, not {a['prompts']}"
        elif a["digest"] != b["digest"]:
            yield f"{key}: its prompts differ"
        elif a.get("ids", b["ids"]) != b["ids"]:  # checkpoints of before have none
            yield f"{key}: its prompts are the same, but not their tokens (transformers' version)"
        if a.get("share") != b.get("share"):
            yield f"{key}: its share of the prompts is {b['share']}, not {a['share']}"


def _file_differences(old: dict, new: dict) -> Iterator[str]:
    for key in sorted(old.keys() & new.keys()):
        for name in sorted(old[key].keys() | new[key].keys()):
            if old[key].get(name) != new[key].get(name):
                yield f"{key}: {name} differs"


def listed(found: Sequence[str]) -> str:
    """Lists the first differences, and says how many more there are."""
    more = len(found) - SHOWN_DIFFERENCES
    return "; ".join(found[:SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
