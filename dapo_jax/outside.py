"""Code from outside the packages: "module:name", on PYTHONPATH or in the working directory."""

import contextlib
import importlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from dapo_jax.process.failures import MEND, brief


def imported(setting: str, name: str, methods: Sequence[str] = ()) -> Any:
    """Imports what a setting names, and looks for the methods that it must have.

    setting: the key and its value, for messages. Raises ValueError where there is no such thing.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f'{setting}, which is no "module:name"')
    try:
        value = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        absent = getattr(error, "name", None) or module
        if isinstance(error, ImportError) and not f"{module}.".startswith(f"{absent}."):
            raise  # the module is there, and imports one that is not
        where = "in the working directory or on PYTHONPATH"
        raise ValueError(f"{setting}, which cannot be imported ({where}): {error}") from error
    if not methods and not callable(value):
        raise ValueError(f"{setting}, which is no function or class")
    if missing := [method for method in methods if not callable(getattr(value, method, None))]:
        raise ValueError(f"{setting}, which has no method {', '.join(missing)}")
    return value


@contextlib.contextmanager
def running(setting: str, name: str) -> Iterator[None]:
    """Makes an error inside a ValueError that says where in the file of a "module:name" it was."""
    try:
        yield
    except Exception as error:
        module = name.partition(":")[0]
        file = getattr(sys.modules[module], "__file__", None) or module  # a notebook has none
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        place = f"line {lines[-1]} of {file}" if lines else file
        raise ValueError(f"{setting} failed in {place} ({brief(error)}); {MEND}") from error
