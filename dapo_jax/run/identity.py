"""The fingerprint of a run: its recipe, and digests of its data, tokenizer and start weights.

It is saved with every checkpoint. A resumed run with another recipe, training data, tokenizer or
start model is refused by the names of the keys, and so are processes that differ. A fork
(run/start.py) has its parent's model, seed and training data.
"""

import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from etils import epath
from ml_collections import ConfigDict

from configs.base import mixture_settings
from dapo_jax.run import checks, hub
from dapo_jax.run.files import read_json, read_rows
from dapo_jax.run.recipe import MAY_CHANGE, recipe_differences
from dapo_jax.tasks import tokenizer
from dapo_jax.types import Prompt
from sharding import hosts

SHOWN_DIFFERENCES = 5
READ_BYTES = 2**24
WEIGHTS = ".safetensors"
# Steps without a checkpoint, in units of checkpoint.every_steps, that a run can have finished when
# it is killed: one is being saved, one is pending, and the step of the next waits for the first.
UNSAVED = 3


class OtherRunError(ValueError):
    """A checkpoint is of a run with another recipe, other data or another model."""


def of_run(config: ConfigDict, data) -> dict:
    """Returns this run's identity, JSON-able; ValueError where the processes' differ.

    data: a `build.Data`. All processes call it. Weight files, which are large, are divided among
    the processes, each of which compares their sizes alone with the others'.
    """
    own = {
        "recipe": json.loads(config.to_json_best_effort()),
        "data": _of_training(config, data.train),
        "eval": {
            _key(f"eval.sets.{name}", config.eval.sets[name]): of_prompts(chosen.dataset.prompts)
            for name, chosen in data.eval_sets.items()
        },
        "files": _of_small_files(config),
        **hub.record(),
    }
    if weights := _weight_files(config):
        own["files"]["model.path"] |= {file.name: file.stat().length for file in weights}
    everyone = hosts.gather((own, _of_mine(weights)))
    for process, (theirs, of_weights) in enumerate(everyone):
        first = everyone[0][0]
        found = list(differences(first, theirs, before="{} on process 0"))
        found += _data_differences(first["eval"], theirs["eval"])
        if found:
            raise ValueError(f"process {process} differs from process 0: {_listed(found)}")
        if weights:
            own["files"]["model.path"] |= of_weights
    return own


def require_start_model(config: ConfigDict, theirs: dict, where: str, *, weights: bool) -> None:
    """Refuses a model or tokenizer directory that has changed since a run began (OtherRunError).

    theirs: the identity of a checkpoint of the run. weights: whether the start model's weights
    count too. All processes call it, and divide the weight files among them.
    """
    ours = _of_small_files(config)
    for of_process in hosts.gather(_of_mine(_weight_files(config) if weights else [])):
        ours.get("model.path", {}).update(of_process)
    was = {
        key: {name: it for name, it in of.items() if weights or not name.endswith(WEIGHTS)}
        for key, of in theirs["files"].items()
    }
    found = [text for key in was for text in _file_differences(key, was[key], ours.get(key, {}))]
    if found:
        raise OtherRunError(
            f"{where} began with another model: {_listed(found)}. Put back the files that the run "
            "was started with"
        )


def _of_small_files(config: ConfigDict) -> dict[str, dict[str, str]]:
    """Digests the tokenizer's files and the model's config.json, by key and name."""
    folder = epath.Path(hub.local(config.tokenizer.path or config.model.path))
    names = [name for name in tokenizer.FILES if name not in tokenizer.IN_TOKENIZER_JSON]
    if not (folder / "tokenizer.json").exists():
        names = tokenizer.FILES
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
    settings = mixture_settings(config)
    digests = {
        _key(key, settings[key]): of_prompts(dataset.prompts) for key, dataset in train.sets.items()
    }
    if len(digests) == 1:
        return digests
    shares = train.shares.values()
    return {
        key: it | {"share": round(share, 6)}
        for (key, it), share in zip(digests.items(), shares, strict=True)
    }


def of_prompts(prompts: Sequence[Prompt]) -> dict:
    """Digests a data set's texts and answers in their order.

    Token ids are left out: the tokenizer's and the recipe's digests cover them.
    """
    digest = hashlib.sha256()
    for prompt in prompts:
        example = prompt.example
        messages = [dict(message) for message in example.prompt]
        content = [messages, example.answer, _with_text_keys(example.extra)]
        digest.update(json.dumps(content, sort_keys=True, default=_plain).encode())
    return {"prompts": len(prompts), "digest": digest.hexdigest()[:32]}


def of_file(file: epath.Path) -> str:
    """Returns the digest of a file's bytes."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while content := opened.read(READ_BYTES):
            digest.update(content)
    return digest.hexdigest()[:32]


def require_same(theirs: dict, ours: dict, where: str, report: Callable[[str], None]) -> None:
    """Refuses to go on with a checkpoint of another run (OtherRunError), by the keys that differ.

    theirs: the checkpoint's identity. Evaluation sets may change: that is reported.
    """
    found = list(differences(theirs, ours, but=MAY_CHANGE))
    was, now = theirs.get("origin"), ours.get("origin")
    if now not in (None, was):
        found.append(f"--start is {now!r}, but it began {'from ' + was if was else 'without one'}")
    if found:
        here = ours.get("hub", {})
        for name, commit in theirs.get("hub", {}).items():
            if name in here and here[name] != commit:
                where += f" ({name} was at commit {commit}, which @ can name)"
        raise OtherRunError(
            f"{where} is of another run: {_listed(found)}. Give what it had to resume it, or "
            "another --workdir (and checkpoint.directory) to start a new run"
        )
    if changed := list(_data_differences(theirs["eval"], ours["eval"])):
        report(f"{_listed(changed)}: scores from here on are not comparable with those before")


def require_parent(theirs: dict, ours: dict, where: str) -> None:
    """Refuses to fork a run of another policy, seed or training data (OtherRunError), by key.

    Its place in the prompt stream means something in the same stream alone. theirs: the identity of
    the checkpoint that the fork goes on with. Of the data the digests count, not how it is named or
    graded.
    """
    keys = (*checks.POLICY_KEYS, "seed")
    if found := list(differences(theirs, ours, among=keys, but=checks.FREE_KEYS)):
        raise OtherRunError(
            f"{where} cannot be forked: {_listed(found)}. A fork goes on with the run's model, "
            "tokenizer, LoRA shape, seed and training data; all else may be another"
        )


def differences(old: dict, new: dict, **keys) -> Iterator[str]:
    """Says, key by key, in what two identities differ, evaluation sets and origins aside.

    keys: as of `recipe_differences`, which the recipes' part is.
    """
    yield from recipe_differences(old["recipe"], new["recipe"], **keys)
    before, now = list(old["data"].items()), list(new["data"].items())
    if len(before) != len(now):
        yield f"there are {len(now)} training sets (data.train, data.mixture), not {len(before)}"
    else:  # in the stream's order: a set may have been generated, and be read from a file now
        for (_, theirs), (key, ours) in zip(before, now, strict=True):
            yield from _data_differences({key: theirs}, {key: ours})
            if theirs.get("share") != ours.get("share"):
                yield f"{key}: its share of the prompts is {ours['share']}, not {theirs['share']}"
    for key in old["files"].keys() & new["files"].keys():
        yield from _file_differences(key, old["files"][key], new["files"][key])


def check_checkpoint_is_there(
    config: ConfigDict, workdir: pathlib.Path, directory, *, begin_step: int = 0
) -> None:
    """Refuses to begin a run anew whose rows say that it has saved checkpoints (ValueError).

    How often it saves is what its config.json says: the command may say something else now.
    begin_step: the run's first; a fork's is not 0.
    """
    file, recipe = workdir / "metrics.jsonl", workdir / "config.json"
    finished = max((row["step"] + 1 for row in read_rows(file)), default=0) if file.exists() else 0
    every = config.checkpoint.every_steps
    if recipe.exists():
        every = read_json(recipe)["checkpoint"]["every_steps"]
    if finished - begin_step >= UNSAVED * every:
        raise ValueError(
            f"{file} has {finished} finished steps, but {directory} has no checkpoint, though "
            f"checkpoint.every_steps was {every}; give the run's checkpoint.directory, or another "
            "--workdir to start a new run"
        )


def _key(name: str, settings: Mapping) -> str:
    return f"{name}.path" if settings["path"] else name


def _with_text_keys(value) -> object:
    """Makes all keys text: JSON has few others, and does not sort those of several types."""
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(item) for item in value]
    return value


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


def _file_differences(key: str, old: dict, new: dict) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            what = "is gone" if name not in new else "differs" if name in old else "is new"
            yield f"{key}: {name} {what}"


def _listed(found: Sequence[str]) -> str:
    more = len(found) - SHOWN_DIFFERENCES
    return "; ".join(found[:SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
