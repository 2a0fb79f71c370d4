"""A policy to sample from, with no training around it: a model's directory, or a run's checkpoint.

A run's policy has all settings in its config; those of a model alone are `run.fit`'s.
"""

import json
import pathlib
from typing import NamedTuple

from ml_collections import ConfigDict

from dapo_jax.checkpoints import fingerprint
from dapo_jax.cli.config_flags import (
    FREE_KEYS,
    POLICY_KEYS,
    complete,
    current,
    recipe_differences,
)
from dapo_jax.learner import TrainState
from dapo_jax.logs.alarms import require_finite
from dapo_jax.logs.files import read_json
from dapo_jax.setup import components
from dapo_jax.tasks.tokenizer import Tokenizer
from models import families
from sharding import hosts


class Policy(NamedTuple):
    """A policy to sample from: its config, tokenizer, programs, and weights for them."""

    config: ConfigDict
    tokenizer: Tokenizer
    programs: components.Programs
    weights: dict


def run_recipe(workdir: pathlib.Path, *, trust_code: bool) -> ConfigDict:
    """The config of the run in a directory, for these devices and not those that trained.

    trust_code: whether a module that it names as the model's family may be imported. Raises
    FileNotFoundError where there is no run, ValueError for a module that is not trusted.
    """
    file = workdir / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: {workdir} holds no training run")
    recipe = current(read_json(file))
    family = recipe.model.family
    if family and family not in families.BUILT_IN and not trust_code:
        raise ValueError(
            f"{file}: model.family = {family!r} is a module that is no part of this project; if "
            "you trust the run, --trust_code imports it"
        )
    complete(recipe)
    recipe.mesh.slices, recipe.mesh.data, recipe.mesh.model = 1, -1, 1
    recipe.model.kernels = "auto"
    return recipe


def of_run(
    config: ConfigDict, workdir: pathlib.Path, step: int | None, *, but: tuple[str, ...] = ()
) -> tuple[int, Policy]:
    """(finished steps, the policy after them) of the run in a directory; None: the newest.

    but: keys of the config that may differ from the run's. Raises FileNotFoundError where there is
    no such checkpoint, ValueError where the config, or the start model, is not the run's.
    """
    tokenizer = components.tokenizer(config)
    programs = components.programs(config, tokenizer.vocab_size)
    step, params, start_weights = restored(programs, workdir, step, but=but)
    return step, Policy(config, tokenizer, programs, programs.reshard(params, start_weights))


def restored(
    programs: components.Programs,
    workdir: pathlib.Path,
    step: int | None,
    *,
    but: tuple[str, ...] = (),
) -> tuple[int, dict, dict | None]:
    """(finished steps, what was trained, the start weights where LoRA adapts them) of a run.

    step: as of `of_run`, which says what is raised; 0: the policy before the first step.
    """
    config, lora = programs.config, programs.learning.lora
    checkpoints = components.checkpoints(config, workdir, keep=None)
    newest = hosts.on_main(checkpoints.latest_step)
    step = newest if step is None else step
    if step is None:
        raise FileNotFoundError(f"{checkpoints.directory} is empty: there is no policy in it")
    if step:
        params = checkpoints.restore(step, programs.state)[0].params
    known = step or newest  # a checkpoint that says what the run began with
    if identity_ := checkpoints.fingerprint_of(known) if known is not None else None:
        where = f"checkpoint {known} in {checkpoints.directory}"
        check_recipe(config, identity_["recipe"], where, but=but)
        begins = lora is not None or not step
        fingerprint.require_start_model(config, identity_, where, weights=begins)
    checkpoints.close()
    params = params if step else programs.start_params()
    # The KL term, which needs them too, is training's.
    start_weights = programs.load_start_weights() if lora else None
    require_finite_start(programs, checkpoints.directory, step, params, start_weights)
    return step, params, start_weights


def require_finite_start(
    programs: components.Programs, directory, first_step: int, state, start_weights: dict | None
) -> None:
    """Refuses a start model or a checkpoint with numbers that are not finite (ValueError).

    state: what is trained, with its moments or without.
    """
    path, replace = programs.config.model.path, "give another model.path"
    model = (
        f"model.path = {str(path)!r}" if path else f"random weights of seed {programs.config.seed}"
    )
    if first_step:
        require_finite(
            state,
            f"checkpoint {first_step} in {directory}",
            advice="move it away to go on with the one before, or give another --workdir",
        )
    else:
        params = state.params if isinstance(state, TrainState) else state
        require_finite(params, model, advice=replace, sizes=programs.sizes)
    if start_weights is not None:
        require_finite(start_weights, model, advice=replace, sizes=programs.sizes)


def check_same(config: ConfigDict, workdir: pathlib.Path) -> None:
    """Refuses a config that makes another policy than the run's in `workdir` (ValueError).

    Without a config.json there is nothing to compare; `check_recipe` compares the checkpoint's.
    """
    file = workdir / "config.json"
    if file.exists():
        check_recipe(config, read_json(file), f"the run in {workdir}")


def check_recipe(
    config: ConfigDict, theirs: dict, where: str, *, but: tuple[str, ...] = ()
) -> None:
    """Refuses a config that makes another policy than a run's config does (ValueError).

    That is the model, its tokenizer and LoRA's shape, and the seed where it makes the weights. A
    path may be written in another way. but: further keys that may differ.
    """
    ours = json.loads(config.to_json_best_effort())
    compared = POLICY_KEYS + (() if config.model.path else ("seed",))
    differing = recipe_differences(theirs, ours, among=compared, but=FREE_KEYS + but)
    if differing:
        raise ValueError(
            f"{where} is of another policy: {'; '.join(differing)}. Give the run's config and "
            "values (its config.json), or its own --workdir"
        )


def of_model(config: ConfigDict, tokenizer: Tokenizer) -> Policy:
    """The policy of model.path, whose lengths and cache are fitted."""
    programs = components.programs(config, tokenizer.vocab_size)
    weights = programs.load_weights(dtype=config.model.compute_dtype)
    require_finite_start(programs, None, 0, weights, None)
    return Policy(config, tokenizer, programs, programs.reshard(weights, None))


def named(config: ConfigDict) -> dict:
    """Returns the names of a model and its tokenizer, JSON-able."""
    tokenizer = json.loads(config.tokenizer.to_json())
    return {"model": config.model.path, **{f"tokenizer.{key}": v for key, v in tokenizer.items()}}
