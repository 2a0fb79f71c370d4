"""Code from outside the packages: "module:name", on PYTHONPATH or in the working directory."""

import importlib
from collections.abc import Sequence
from typing import Any


def imported(setting: str, name: str, methods: Sequence[str] = ()) -> Any:
    """Imports what a setting names, and looks for the methods that it must have.

    setting: the key and its value, for messages. Raises ValueError where there is no such thing.
    """
    module, _, attribute = name.partition(":")
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
