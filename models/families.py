"""The registry of model families: a module each, which registers its family when it is imported.

config.json's model_type finds a family here, and model.family names the module to import.
"""

import dataclasses
import importlib
from collections.abc import Mapping

from models.parameters import ModelConfig

BUILT_IN = {name: f"models.{name}" for name in ("qwen2", "qwen3", "qwen3_moe", "llama")} | {
    "gemma3_text": "models.gemma3"
}


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: the class of its configs, its published sizes by name, where it is from."""

    config: type[ModelConfig]
    presets: Mapping[str, ModelConfig]
    module: str


_FAMILIES: dict[str, Family] = {}  # by model_type


def register(config: type[ModelConfig], presets: Mapping[str, ModelConfig]) -> None:
    """Makes a family known by its config's model_type.

    Raises ValueError where another module has registered that model_type.
    """
    family = Family(config, presets, config.__module__)
    first = _FAMILIES.get(config.model_type, family)
    if first.module != family.module:
        raise ValueError(
            f"{family.module} registers model_type {config.model_type!r}, which {first.module} has "
            "registered; give the family another model_type"
        )
    _FAMILIES[config.model_type] = family


def load(name: str) -> Family:
    """Imports the family that model.family names: a built-in one, or a module "package.module".

    Raises ValueError where there is no such module, or where it does not register one family.
    """
    module_name = BUILT_IN.get(name, name)
    try:
        importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
    families = [family for family in _FAMILIES.values() if family.module == module_name]
    if len(families) != 1:
        raise ValueError(
            f"model.family = {name!r}: built in are {', '.join(BUILT_IN)}; one of your own is a "
            f"module in the working directory or on PYTHONPATH, but {module_name} registers "
            f"{len(families)} families (models.families.register) and must register one"
        )
    return families[0]


def known() -> dict[str, Family]:
    """The families by model_type: built-in ones, and those whose modules were imported."""
    for name in BUILT_IN:
        load(name)
    return dict(_FAMILIES)
