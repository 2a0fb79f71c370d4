"""The fingerprint of a run: its config, and digests of its data, tokenizer, weights and own code.

It is saved with every checkpoint. A resumed run with another config, training data, tokenizer,
start model or custom module is refused by the names of the keys, and so are processes that differ.
A fork (setup/start.py) has its parent's model, seed and training data; its code may be another, and
that of `evaluate`, `sample` and `convert` is what is there when they are given.
"""

import hashlib
import importlib.util
import inspect
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from configs.base import MAY_CHANGE, OF_POLICY, eval_settings, mixture_settings
from dapo_jax import hub, losses
from dapo_jax.cli.config_flags import config_differences
from dapo_jax.tasks import tokenizer
from dapo_jax.types import Prompt
from models import families
from sharding import hosts

SHOWN_DIFFERENCES = 5
WEIGHTS = ".safetensors"
CONFIG_MODULES = ("config_config", "__main__")  # what a config's file is, by ml_collections too


def of_run(config: ConfigDict, data) -> dict:
    """Returns this run's fingerprint, JSON-able; ValueError where the processes' differ.

    data: a `components.Data`. All processes call it. Weight files, which are large, are divided
    among the processes, each of which compares their sizes alone with the others'.
    """
    own = {
        "recipe": json.loads(config.to_json_best_effort()),
        "data": _of_training(config, data.train),
        "eval": {
            _key(f"eval.sets.{name}", config.eval.sets[name]): of_prompts(chosen.dataset.prompts)
            for name, chosen in data.eval_sets.items()
        },
        "files": _of_small_files(config),
        "modules": of_code(config),
        **hub.record(),
    }
    if weights := _weight_files(config):
        own["files"]["model.path"] |= {file.name: file.stat().length for file in weights}
    everyone = hosts.gather((own, _of_mine(weights)))
    first = everyone[0][0]
    for process, (theirs, of_weights) in enumerate(everyone):
        found = list(differences(first, theirs, before="{} on process 0"))
        found += _data_differences(first["eval"], theirs["eval"])
        found += _file_differences(first["modules"], theirs["modules"])
        if found:
            raise ValueError(f"process {process} differs from process 0: {listed(found)}")
        if weights:
            own["files"]["model.path"] |= of_weights
    return own


def of_code(config: ConfigDict) -> dict[str, dict[str, str]]:
    """Digests the files of custom modules, by key and name; what they import is not looked at.

    Of the config's own file the functions that it names count.
    """
    found: dict[str, dict[str, str]] = {}
    for key, module, function in _custom(config):
        if module in CONFIG_MODULES:
            function = inspect.unwrap(function)
            of = function if hasattr(function, "__code__") else type(function)
            name, code = of.__name__, inspect.getsource(of).encode()
        else:
            name, spec = module, importlib.util.find_spec(module)
            code = pathlib.Path(spec.origin).read_bytes() if spec and spec.has_location else b""
        found.setdefault(key, {})[name] = hashlib.sha256(code).hexdigest()[:32]
    return found


def _custom(config: ConfigDict) -> Iterator[tuple[str, str, Any]]:
    """Yields (key, module, function or None) of what a config names and is not this project's."""
    sets = {f"eval.sets.{name}": of for name, of in eval_settings(config).items()}
    sets |= mixture_settings(config)
    of_sets = ("task", "environment")
    named = [(f"{key}.{name}", it[name]) for key, it in sets.items() for name in of_sets]
    named += [("log.writers", name) for name in config.log.writers]
    yield from ((key, name.partition(":")[0], None) for key, name in named if ":" in name)
    if config.model.family not in families.BUILT_IN:
        yield "model.family", config.model.family, None
    chosen = {
        "policy_loss": losses.policy_loss(config.algo.policy_loss),
        "ratio": losses.RATIOS[config.algo.ratio],
        "advantage_scale": losses.ADVANTAGES[config.algo.advantage_scale],
    }
    for name, function in chosen.items():
        function = getattr(function, "func", function)  # of a partial
        module = getattr(function, "__module__", None) or ""
        if not module.startswith(("dapo_jax.", "models.")):
            yield f"algo.{name}", module, function


def require_start_model(config: ConfigDict, theirs: dict, where: str, *, weights: bool) -> None:
    """Refuses a model or tokenizer directory that has changed since a run began (ValueError).

    theirs: the fingerprint of a checkpoint of the run. weights: whether the start model's weights
    count too. All processes call it, and divide the weight files among them.
    """
    ours = _of_small_files(config)
    for of_process in hosts.gather(_of_mine(_weight_files(config) if weights else [])):
        ours.get("model.path", {}).update(of_process)
    found = [
        text for text in _file_differences(theirs["files"], ours) if weights or WEIGHTS not in text
    ]
    if found:
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


def _of_training(config: ConfigDict, train) -> dict:
    """Digests each training set, with its share where there are several."""
    settings, several = mixture_settings(config), len(train.sets) > 1
    return {
        _key(key, settings[key]): of_prompts(dataset.prompts)
        | ({"share": round(train.shares[key], 6)} if several else {})
        for key, dataset in train.sets.items()
    }


def of_prompts(prompts: Sequence[Prompt]) -> dict:
    """Digests a data set's texts and answers in their order, and their token ids.

    The ids depend on the tokenizer's library too.
    """
    digest, ids = hashlib.sha256(), hashlib.sha256()
    for prompt in prompts:
        example = prompt.example
        messages = [dict(message) for message in example.prompt]
        content = [messages, example.answer, example.extra]
        digest.update(json.dumps(content, sort_keys=True, default=_plain).encode())
        ids.update(prompt.token_ids.astype(np.int32).tobytes())
    digests = {"digest": digest.hexdigest()[:32], "ids": ids.hexdigest()[:32]}
    return {"prompts": len(prompts), **digests}


def of_file(file: epath.Path) -> str:
    """Returns the digest of a file's bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:32]


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
    edited = [text for text in code if not text.startswith(MAY_CHANGE)]
    if found or edited:
        here = ours.get("hub", {})
        for name, commit in theirs.get("hub", {}).items():
            if name in here and here[name] != commit:
                where += f" ({name} was at commit {commit}, which @ can name)"
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
    before, now = list(old["data"].items()), list(new["data"].items())
    if len(before) != len(now):
        yield f"there are {len(now)} training sets (data.train, data.mixture), not {len(before)}"
    else:  # in the stream's order: a set may have been generated, and be read from a file now
        for (_, theirs), (key, ours) in zip(before, now, strict=True):
            yield from _data_differences({key: theirs}, {key: ours})
    yield from _file_differences(old["files"], new["files"])


def _key(name: str, settings: Mapping) -> str:
    return f"{name}.path" if settings["path"] else name


def _plain(value) -> object:
    """Stands for what JSON does not have: arrays' values, the type of anything else."""
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


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
