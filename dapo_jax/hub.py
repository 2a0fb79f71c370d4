"""Names on the Hugging Face hub, and where this host's cache has what they name.

A model is ORG/NAME, where nothing of that name is here, or hf://ORG/NAME@REVISION; a file of a data
set is hf://datasets/ORG/NAME@REVISION/FILE, and a "*" in FILE stands for shards. A command calls
`fetch` once, before it reads anything; what reads asks `local`. A config keeps the names.
"""

import contextlib
import functools
import glob
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping

from ml_collections import ConfigDict

from configs.base import eval_settings, mixture_settings
from dapo_jax.process import hosts
from dapo_jax.process.failures import brief
from dapo_jax.tasks import tokenizer

_REPO = r"(?P<repo>[a-zA-Z0-9][\w.-]*/[a-zA-Z0-9][\w.-]*)"
MODEL = re.compile(rf"(?:hf://)?{_REPO}(?:@(?P<revision>.+))?(?P<file>)", re.ASCII)
FILE = re.compile(rf"hf://datasets/{_REPO}(?:@(?P<revision>refs/\w+/[^/]+|[^/]+))?/(?P<file>.+)")
WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
OF_TOKENIZER = (*tokenizer.FILES, f"{tokenizer.MORE_TEMPLATES}/*")
ADVICE = (
    "mend the name or the revision, set HF_TOKEN to a token that may read what is private or "
    "gated, unset HF_HUB_OFFLINE to download, or give the path of what `hf download` wrote (a "
    "model's may be gs://...)"
)

_fetched: dict[str, tuple[str, str]] = {}  # of the last fetch: name -> where it is, its commit


def paths(config: ConfigDict, *unread: str) -> dict[str, str]:
    """Lists a config's paths by key; unread: how keys begin that the command does not read."""
    sets = {"model": config.model, "tokenizer": config.tokenizer, **mixture_settings(config)}
    sets |= {f"eval.sets.{name}": of_set for name, of_set in eval_settings(config).items()}
    return {f"{key}.path": it["path"] for key, it in sets.items() if not key.startswith(unread)}


def fetch(paths: Mapping[str, str], *, weights: bool = True) -> None:
    """Downloads what the names among the paths (key -> path) stand for and the cache lacks.

    weights: whether a model's are wanted too. All processes call it; process 0 finds the commits.
    Raises ValueError and OSError, with the key and the setting to change.
    """
    _fetched.clear()
    for key, name, commit in hosts.on_main(lambda: [*_at_commits(paths)]):
        _fetched[name] = _downloaded(key, name, commit, weights=weights)


def local(path: str) -> str:
    """Returns where a fetched name is; any other path as it is."""
    return _fetched.get(path, (path,))[0]


def named(path: str) -> tuple[str, str | None]:
    """Returns (ORG/NAME, revision) of a fetched model's name, (path, None) of a folder."""
    return MODEL.fullmatch(path).group("repo", "revision") if path in _fetched else (path, None)


def record() -> dict[str, dict[str, str]]:
    """Returns {"hub": {name: commit}} of the fetched names; {} without any."""
    return {"hub": {name: at[1] for name, at in sorted(_fetched.items())}} if _fetched else {}


def _at_commits(paths: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yields (key, name, commit) of the names among the paths."""
    for key, path in paths.items():
        of_data, explicit = key.startswith(("data.", "eval.")), path.startswith("hf://")
        match = (FILE if of_data else MODEL).fullmatch(path)
        if explicit and not match:
            form = "datasets/ORG/NAME[@REVISION]/FILE" if of_data else "ORG/NAME[@REVISION]"
            raise ValueError(f"{key} = {path!r}: must be hf://{form}")
        if match and (explicit or not pathlib.Path(path).exists()):
            yield key, path, _downloaded(key, path, match["revision"], weights=False)[1]


def _downloaded(key: str, name: str, revision: str | None, *, weights=True) -> tuple[str, str]:
    """Returns (place, commit) of a name; says first how much is to be downloaded."""
    import huggingface_hub as library  # takes a second, which few starts need

    repo, file = (FILE.fullmatch(name) or MODEL.fullmatch(name)).group("repo", "file")
    weights = weights and not file and key != "tokenizer.path"
    needed = "model*.safetensors" if weights else file if "*" in file else glob.escape(file)
    files = [needed] if file else [*OF_TOKENIZER, *(WEIGHTS if weights else ())]
    kind = "dataset" if file else "model"
    call = functools.partial(
        library.snapshot_download, repo, repo_type=kind, revision=revision, allow_patterns=files
    )
    url = f"{library.constants.ENDPOINT}/{'datasets/' if file else ''}{repo}"
    what = f"{key} = {name!r}"
    library.utils.logging.set_verbosity_error()  # what it warns of is in our line
    if not sys.stderr.isatty():
        library.utils.disable_progress_bars()  # they go into logs too
    try:
        with contextlib.suppress(OSError):  # the next call says it, unless the cache will do
            todo = [it.file_size or 0 for it in call(dry_run=True) if it.will_download]
            if todo and hosts.is_main_host():
                print(f"{what}: downloading {sum(todo) / 2**20:,.1f} MiB", file=sys.stderr)
        place = pathlib.Path(call())
    except Exception as error:
        if getattr(error, "errno", None) is not None:  # the disk's
            raise
        local = isinstance(error, library.errors.LocalEntryNotFoundError)  # why not from the hub?
        cause = (local and error.__cause__) or error
        told = f"there is no such path here, and {url} (HF_ENDPOINT) failed: {brief(cause)}"
        offline = library.constants.HF_HUB_OFFLINE  # else it may be a hub that is down for a while
        raise OSError(f"{what}: {told}; {ADVICE}") from (None if offline else error)
    if needed and not any(place.glob(needed)):
        raise FileNotFoundError(f"{what}: {url}, or offline the cache, has no {file or needed}")
    return str(place / file), place.name
