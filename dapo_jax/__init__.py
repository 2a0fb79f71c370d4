"""DAPO training in JAX; see README.md."""

import importlib.util
import pathlib
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[1]
for _name in ("configs", "models", "sharding"):  # another folder may have one too
    _file = getattr(importlib.util.find_spec(_name), "origin", None)
    if _file and _ROOT / _name not in pathlib.Path(_file).resolve().parents:
        _to_do = "rename it, or give the command in another folder"
        sys.exit(f"error: {_file} hides {_ROOT / _name}: {_to_do}")
