"""The fingerprint of a run: its config, and digests of its data, tokenizer, weights and own code.

`same_run.py` compares the fingerprints of runs, checkpoints and processes.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from configs.base import eval_settings, mixture_settings
from configs.compare import as_json
from dapo_jax import hub
from dapo_jax.checkpoints.same_run import WEIGHTS, require_together
from dapo_jax.process import hosts
from dapo_jax.tasks import tokenizer
from dapo_jax.types import Prompt
from models import families

LIBRARY = "math_verify"  # rules whose code is no file of this project


def of_run(config: ConfigDict, data, parent=None) -> dict:
    """Returns this run's fingerprint, JSON-able; ValueError where the processes' differ.

    data: a `components.Data`. parent: a fork's. All processes call it. Of weight files, which are
    large, they compare the sizes, and divide the digests.
    """
    train, settings = data.train, mixture_settings(config)
    own = of_policy(config, weights=False) | {
        "data": {
            _key(key, settings[key]): of_prompts(dataset.prompts)
            | ({"share": round(train.shares[key], 6)} if len(train.sets) > 1 else {})
            for key, dataset in train.sets.items()
        },
        "eval": {
            _key(f"eval.sets.{name}", config.eval.sets[name]): of_prompts(dataset.prompts)
            for name, dataset in data.eval_sets.items()
        },
        "modules": of_code(config),
    }
    sizes = {file.name: file.stat().length for file in _weight_files(config)}
    require_together(own | {"files": own["files"] | {"model.path, bytes": sizes}})
    return own | of_policy(config, weights=True) | {"origin": parent and str(parent)}


def of_policy(config: ConfigDict, *, weights: bool) -> dict:
    """Returns what makes a policy beside a checkpoint: the config, digests of tokenizer and model.

    weights: whether the start model's count too; all processes call it then, and divide them.
    """
    files, large = _of_small_files(config), _weight_files(config) if weights else []
    mine = {file.name: of_file(file) for i, file in enumerate(large) if hosts.is_mine(i)}
    for digests in hosts.gather(mine) if weights else ():
        files.get("model.path", {}).update(digests)
    return {"recipe": as_json(config), "files": files}


def of_code(config: ConfigDict) -> dict[str, dict[str, str]]:
    """Digests the files of custom modules, by key and name; what they import is not looked at.

    Of the library that the rules "math_verify" are it has the version.
    """
    sets = {f"eval.sets.{name}": settings for name, settings in eval_settings(config).items()}
    sets |= mixture_settings(config)
    kinds = ("task", "environment")
    named = [(f"{key}.{kind}", it[kind]) for key, it in sets.items() for kind in kinds]
    named += [(f"log.{key}", name) for key in ("writers", "metrics") for name in config.log[key]]
    named += [(f"algo.{key}", config.algo[key]) for key in ("policy_loss", "advantage_scale")]
    custom = [(key, name.partition(":")[0]) for key, name in named if ":" in name]
    if config.model.family not in families.BUILT_IN:
        custom.append(("model.family", config.model.family))
    digests: dict[str, dict[str, str]] = {}
    if LIBRARY in {config.verifier.rules, *(it["rules"] for it in sets.values())}:
        digests["verifier.rules"] = {LIBRARY: importlib.metadata.version("math-verify")}
    for key, module in custom:
        spec = importlib.util.find_spec(module)
        code = pathlib.Path(spec.origin).read_bytes() if spec and spec.has_location else b""
        digests.setdefault(key, {})[module] = hashlib.sha256(code).hexdigest()[:32]
    return digests


def _of_small_files(config: ConfigDict) -> dict[str, dict[str, str]]:
    """Digests the tokenizer's files and the model's config.json, by key and name."""
    folder = epath.Path(hub.local(config.tokenizer.path or config.model.path))
    merged = tokenizer.IN_TOKENIZER_JSON if (folder / "tokenizer.json").exists() else ()
    names = [name for name in tokenizer.FILES if name not in merged]
    files = [folder / name for name in names] if folder.is_dir() else [folder]
    key = "tokenizer.path" if config.tokenizer.path else "model.path"
    digests = {key: {file.name: of_file(file) for file in files if file.is_file()}}
    if config.model.path:
        file = epath.Path(hub.local(config.model.path)) / "config.json"
        digests.setdefault("model.path", {})["config.json"] = of_file(file)
    return digests


def _weight_files(config: ConfigDict) -> list[epath.Path]:
    path = hub.local(config.model.path)
    return sorted(epath.Path(path).glob(f"*{WEIGHTS}")) if path else []


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
