"""Provenance of a run: a line of starts.jsonl for each start, with code, versions and devices."""

import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping

import jax
from ml_collections import ConfigDict

from dapo_jax.logs.files import append_line
from sharding import hosts

NAME = "starts.jsonl"
ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def add_start(workdir: pathlib.Path, config: ConfigDict, about: Mapping) -> None:
    """Appends this start, and what else is known of it, to the run's starts.jsonl.

    To be called by the main process alone.
    """
    path = workdir / NAME
    path.touch()
    append_line(path, {**this_start(config), **about})


def this_start(config: ConfigDict) -> dict:
    """Describes this start: time, place, command, code, versions, devices, the config's digest."""
    device = jax.devices()[0]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": shlex.join(sys.orig_argv),
        "folder": str(pathlib.Path.cwd()),
        **code_version(ROOT),
        "versions": {"python": sys.version.partition(" ")[0], **package_versions()},
        "devices": {
            "kind": device.device_kind,
            "count": jax.device_count(),
            "processes": hosts.count(),
        },
        "config_sha256": config_digest(config),
    }


def config_digest(config: ConfigDict) -> str:
    """SHA-256 of the config: equal recipes have equal ones, in whatever order of the keys."""
    recipe = json.loads(config.to_json_best_effort())
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def package_versions() -> dict[str, str]:
    """The installed versions of what computes."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def code_version(root: pathlib.Path) -> dict:
    """The commit of the code, and whether files differ from it; None each without git's say."""
    if not (root / ".git").exists():
        return {"commit": None, "changed": None}
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changed is None else bool(changed)}


def _git(root: pathlib.Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, another user's files, a slow disk
        return None
    return done.stdout.strip()
