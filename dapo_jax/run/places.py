"""Where the relative paths of a recipe lie: in the current folder, else beside the code.

So a command that is given in another folder finds `configs/tiny.py`, and what that recipe names.
"""

import pathlib

from ml_collections import ConfigDict

ROOT = pathlib.Path(__file__).resolve().parents[2]


def found(path: str, root: pathlib.Path = ROOT) -> str:
    """Returns the path as it is, or that below `root` where only there is something.

    A part behind a colon (a recipe's preset) counts as no part of the path.
    """
    name, colon, rest = path.partition(":")
    if not name or rest.startswith("//") or pathlib.Path(name).exists():
        return path
    return f"{root / name}{colon}{rest}" if (root / name).exists() else path


def complete(config: ConfigDict) -> None:
    """Completes, in an unlocked recipe, every path that is there beside the code alone."""
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            complete(value)
        elif name == "path" and isinstance(value, str):
            config[name] = found(value)
