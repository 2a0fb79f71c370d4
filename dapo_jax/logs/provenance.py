"""Provenance of a run: a line of starts.jsonl for each start, with code, versions and devices."""

import datetime
import importlib.metadata
import os
import pathlib
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping

import jax

from configs.compare import ROOT
from dapo_jax.logs.files import json_line, read_starts, write_file
from dapo_jax.process import hosts

NAME = "starts.jsonl"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def add_start(workdir: pathlib.Path, about: Mapping) -> None:
    """Adds this start to the run's starts.jsonl, with `about`, what else is known of it.

    The main process alone calls it.
    """
    path, kind = workdir / NAME, jax.devices()[0].device_kind
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    start = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": shlex.join(sys.orig_argv),
        "folder": str(pathlib.Path.cwd()),
        **code_version(ROOT),
        "versions": {"python": sys.version.partition(" ")[0], **versions},
        "devices": {"kind": kind, "count": jax.device_count(), "processes": hosts.count()},
    }
    write_file(path, b"".join(map(json_line, [*read_starts(path), start | about])))


def code_version(root: pathlib.Path) -> dict:
    """The commit of the code, and whether files differ from it; None each without git's say."""
    # By name: a folder around it may have one too.
    git = ["git", "--no-optional-locks", f"--git-dir={root / '.git'}", f"--work-tree={root}"]
    describe = ["describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    about = {"capture_output": True, "text": True, "timeout": 10, "check": True}
    try:
        done = subprocess.run([*git, *describe], **about)
        commit, dirty, _ = done.stdout.partition("-dirty")
        return {"commit": commit.strip(), "changed": bool(dirty)}
    except (OSError, subprocess.SubprocessError):  # no git, another user's files, a slow disk
        return {"commit": None, "changed": None}
