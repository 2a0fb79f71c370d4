"""DAPO training in JAX; see README.md."""

import importlib.util
import pathlib
import sys


def _hidden() -> str:
    """Says which of the packages beside this one another folder's hides; "" where none does."""
    root = pathlib.Path(__file__).resolve().parents[1]
    for name in ("configs", "models", "sharding"):
        if (spec := importlib.util.find_spec(name)) is None:
            continue  # its import will say so
        found = pathlib.Path(spec.origin or next(iter(spec.submodule_search_locations)))
        if not found.resolve().is_relative_to(root / name):
            return f"{found} hides {root / name}: rename it, or give the command in another folder"
    return ""


if message := _hidden():
    sys.exit(f"error: {message}")
